//! What shall go wrong, and how often.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

/// What a request does, as seen from its method, path and query.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// PUT of an object.
    Put,
    /// GET of an object or a part of it.
    Get,
    /// HEAD of an object.
    Head,
    /// DELETE of one object.
    Delete,
    /// A batch of deletes in one request.
    MultiDelete,
    /// One key of a batch: the request succeeds and reports the key as failed. Only `status` faults make sense here.
    DeleteKey,
    /// The condition of a PUT (`If-None-Match`, `If-Match`). Whatever a rule for it does, the condition is not looked at, as by a server that does
    /// not know conditions.
    Condition,
    /// A page of a listing.
    List,
    /// Everything else, such as making a bucket.
    Other,
}

impl Operation {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Put,
        Self::Get,
        Self::Head,
        Self::Delete,
        Self::MultiDelete,
        Self::DeleteKey,
        Self::Condition,
        Self::List,
        Self::Other,
    ];

    pub(crate) fn index(self) -> usize {
        self as usize
    }
}

/// What happens instead of, before or after the request's own effect.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Action {
    /// The body is read, nothing is done, and this is the answer.
    Status {
        /// HTTP status, 400 to 599.
        status: u16,
        /// Code of the error document.
        #[serde(default = "internal_error")]
        code: String,
    },
    /// The body is read, nothing is done, and the answer is 200 with an error document.
    ErrorBody {
        /// Code of the error document.
        #[serde(default = "internal_error")]
        code: String,
    },
    /// The request waits, then goes on, also through the faults after this one.
    Delay {
        /// Milliseconds.
        ms: u64,
    },
    /// The body is read, then nothing happens for as long as the client waits.
    Stall,
    /// The connection is reset before anything is read.
    ResetBefore,
    /// The request takes effect, then the connection is reset instead of an answer.
    LostReply,
    /// The connection is reset in the middle: of the request where it has a body, else of the answer.
    ResetBody {
        /// Bytes that still pass.
        after_bytes: u64,
    },
    /// The answer ends early, by an ordinary end of the connection.
    Truncate {
        /// Bytes of the body that are sent.
        after_bytes: u64,
    },
    /// The answer acknowledges another CRC-32 than that of the bytes.
    WrongChecksum,
    /// Bodies pass at this pace in both directions.
    Slow {
        /// Bytes a second, at least 1.
        bytes_per_sec: u64,
    },
}

fn internal_error() -> String {
    "InternalError".to_owned()
}

fn always() -> f64 {
    1.0
}

/// A rule. The first one that matches a request is applied and counted; after a delay the search goes on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Fault {
    /// Only these requests; all where left out.
    #[serde(default)]
    pub op: Option<Operation>,
    /// Only keys that fit: `*` stands for any characters, slashes too. All where left out. For a listing the key is its prefix; a batch of
    /// deletes has the empty key.
    #[serde(default)]
    pub key: Option<String>,
    /// So many matching requests pass first.
    #[serde(default)]
    pub skip: u64,
    /// So often, then never again; without end where left out.
    #[serde(default)]
    pub count: Option<u64>,
    /// Chance that a matching request is hit, 0 to 1. Requests that are not hit are not counted.
    #[serde(default = "always")]
    pub probability: f64,
    /// What happens.
    #[serde(flatten)]
    pub action: Action,
}

impl Fault {
    /// Always, for all keys.
    pub fn new(op: Operation, action: Action) -> Self {
        Self {
            op: Some(op),
            key: None,
            skip: 0,
            count: None,
            probability: 1.0,
            action,
        }
    }

    /// The same, but only so often.
    #[must_use]
    pub fn times(mut self, count: u64) -> Self {
        self.count = Some(count);
        self
    }

    /// The same, but only after so many matching requests.
    #[must_use]
    pub fn after(mut self, skip: u64) -> Self {
        self.skip = skip;
        self
    }

    /// The same, but only for keys that fit the pattern.
    #[must_use]
    pub fn on(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// What is wrong with it, if anything.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        if let Action::Status { status, .. } = &self.action
            && !(400..600).contains(status)
        {
            return Err("status must be 400 to 599");
        }
        if self.action == (Action::Slow { bytes_per_sec: 0 }) {
            return Err("bytes_per_sec must be at least 1");
        }
        if !(0.0..=1.0).contains(&self.probability) {
            return Err("probability must be 0 to 1");
        }
        Ok(())
    }

    fn matches(&self, op: Operation, key: &str) -> bool {
        let spent = self.count == Some(0);
        // A fault for all requests does not mean the parts of one of them.
        let of_op = match self.op {
            Some(wanted) => wanted == op,
            None => op != Operation::DeleteKey && op != Operation::Condition,
        };
        !spent && of_op && self.key.as_deref().is_none_or(|pattern| fits(pattern, key))
    }
}

/// Whether a pattern with `*` fits a text.
fn fits(pattern: &str, text: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else {
        return pattern == text;
    };
    let Some(text) = text.strip_prefix(start) else {
        return false;
    };
    let mut ends = text.char_indices().map(|(at, _)| at).chain([text.len()]);
    ends.any(|at| fits(rest, &text[at..]))
}

/// A rule with the number it was given.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Numbered {
    /// Number for [`Faults::remove`].
    pub id: u64,
    /// The rule; its counts are what is left of them.
    #[serde(flatten)]
    pub fault: Fault,
}

/// The rules of a server. Chance comes from a fixed seed, so a run can be repeated.
#[derive(Debug)]
pub struct Faults {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    next_id: u64,
    rules: Vec<Numbered>,
    random: StdRng,
}

impl Faults {
    pub(crate) fn new(seed: u64) -> Self {
        let state = State {
            next_id: 1,
            rules: Vec::new(),
            random: StdRng::seed_from_u64(seed),
        };
        Self {
            state: Mutex::new(state),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a rule behind the others and returns its number.
    pub fn add(&self, fault: Fault) -> u64 {
        let mut state = self.state();
        let id = state.next_id;
        state.next_id += 1;
        state.rules.push(Numbered { id, fault });
        id
    }

    /// Removes a rule; `false` where there is none of that number.
    pub fn remove(&self, id: u64) -> bool {
        let mut state = self.state();
        let before = state.rules.len();
        state.rules.retain(|rule| rule.id != id);
        state.rules.len() < before
    }

    /// Removes all rules.
    pub fn clear(&self) {
        self.state().rules.clear();
    }

    /// The rules, in the order in which they are tried.
    pub fn rules(&self) -> Vec<Numbered> {
        self.state().rules.clone()
    }

    /// What happens to this request. Counts down the rules that apply.
    pub(crate) fn take(&self, op: Operation, key: &str) -> Plan {
        let mut state = self.state();
        let State { rules, random, .. } = &mut *state;
        let mut plan = Plan::default();
        for rule in rules {
            let fault = &mut rule.fault;
            if !fault.matches(op, key) {
                continue;
            }
            if fault.skip > 0 {
                fault.skip -= 1;
                continue;
            }
            if fault.probability < 1.0 && !random.random_bool(fault.probability) {
                continue;
            }
            fault.count = fault.count.map(|count| count - 1);
            plan.faults += 1;
            if let Action::Delay { ms } = fault.action {
                plan.delay += Duration::from_millis(ms);
                continue;
            }
            plan.then = Some(fault.action.clone());
            break;
        }
        plan
    }
}

/// What happens to one request: it waits, then at most one other thing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Plan {
    /// How long it waits.
    pub(crate) delay: Duration,
    /// What happens then; never a delay.
    pub(crate) then: Option<Action>,
    /// How many rules made this plan.
    pub(crate) faults: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_fit_as_one_expects() {
        assert!(fits("a*c", "abc"));
        assert!(fits("*.fragment", "p/stream/s/data/1.fragment"));
        assert!(fits("*", ""));
        assert!(fits("a**b*", "ab"));
        assert!(!fits("a*c", "abd"));
        assert!(!fits("", "a"));
    }

    #[test]
    fn a_rule_skips_then_counts_then_rests() {
        let faults = Faults::new(0);
        faults.add(
            Fault::new(Operation::Put, Action::LostReply)
                .after(1)
                .times(2)
                .on("*.x"),
        );
        let hit = |op, key| faults.take(op, key).then.is_some();
        assert!(!hit(Operation::Put, "a.x"));
        assert!(!hit(Operation::Put, "a.y"));
        assert!(!hit(Operation::Get, "a.x"));
        assert!(hit(Operation::Put, "a.x"));
        assert!(hit(Operation::Put, "a.x"));
        assert!(!hit(Operation::Put, "a.x"));
    }

    #[test]
    fn a_delay_does_not_end_the_search() {
        let faults = Faults::new(0);
        faults.add(Fault::new(Operation::Put, Action::Delay { ms: 1 }));
        faults.add(Fault::new(Operation::Put, Action::Stall));
        faults.add(Fault::new(Operation::Put, Action::LostReply));
        let plan = faults.take(Operation::Put, "k");
        let expected = Plan {
            delay: Duration::from_millis(1),
            then: Some(Action::Stall),
            faults: 2,
        };
        assert_eq!(plan, expected);
    }

    #[test]
    fn a_rule_is_read_from_json() {
        let json = r#"{"op": "multi_delete", "count": 2, "do": "status", "status": 503, "code": "SlowDown"}"#;
        let fault: Fault = serde_json::from_str(json).expect("a fault");
        let status = Action::Status {
            status: 503,
            code: "SlowDown".to_owned(),
        };
        assert_eq!(fault, Fault::new(Operation::MultiDelete, status).times(2));
    }
}
