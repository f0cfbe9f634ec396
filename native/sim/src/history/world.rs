//! One world of one seed.

mod requests;

use std::collections::{BTreeMap, BTreeSet};

use stream_s3_core::decisions::retry::RetryDelays;
use stream_s3_core::error::ErrorClass;
use stream_s3_core::history::{Event, Examined, Listing, Options, encode};
use stream_s3_core::key::{self, Prefix, RunId};
use stream_s3_core::units::TimestampMs;

use super::bucket::{Bucket, Write, Written};
use super::host::{Content, Host, Sealed};
use super::owner::Owner;
use super::twin::HistoryTwin;
use crate::coverage::Coverage;
use crate::rng::Rng;

/// How long a request may take effect after it was sent, in milliseconds, unless the store had taken it in already.
const LIFETIME: u64 = 2_000;
/// How long a purge waits: longer than that, and than the reading of a body before it.
const PURGE_WAIT: u64 = 3_000;
/// What the store had taken in takes effect within this time.
const LATEST: u64 = 9_000;
/// When a request is given up.
const DEADLINE: u64 = 500;
/// How old an object has to be to be swept.
const MIN_AGE: u64 = 1_000;
/// Two retries of a purge that was refused, and what comes after them.
const CALM: u64 = 150_000;

/// What an owner asks for.
#[derive(Debug, Clone)]
pub(super) enum Call {
    List,
    Read(u64),
    Examine(u64, u32, u64),
    Acknowledge(u64),
    Catalog,
    Delete,
    Purged,
    Write(Write),
}

/// What it is answered.
#[derive(Debug, Clone)]
pub(super) enum Reply {
    Failed(ErrorClass),
    Gone,
    Listed(Listing),
    Read(Content),
    Put(Write, Written),
    Examined(Examined),
    Acknowledged,
    Catalog(bool),
    Done,
}

/// Who asked.
#[derive(Debug, Clone, Copy)]
pub(super) struct Origin {
    owner: u64,
    run: u64,
    attempt: u64,
    life: u64,
    request: u64,
    sent: u64,
}

/// What happens at a moment.
#[derive(Debug)]
pub(super) enum Happening {
    Seal,
    Purge,
    Takeover,
    Stop {
        owner: u64,
    },
    Scan {
        owner: u64,
    },
    Orphans {
        owner: u64,
    },
    Judge {
        owner: u64,
        listed: Vec<(String, u64)>,
    },
    Tell {
        owner: u64,
        run: u64,
        /// Of the machine that it is for, where it answers something.
        life: Option<u64>,
        event: Event,
    },
    Wake {
        owner: u64,
        run: u64,
    },
    Apply {
        origin: Origin,
        call: Call,
        /// After how long it is answered, and whether that is a failure whatever it came to.
        answer: Option<(u64, Option<ErrorClass>)>,
    },
    Answer {
        origin: Origin,
        reply: Reply,
    },
}

/// What a world came to.
#[derive(Debug, Clone)]
pub struct HistoryOutcome {
    /// Events that happened.
    pub events: u64,
    /// What was violated.
    pub violation: Option<String>,
    /// What happened.
    pub coverage: Coverage,
    /// Its story, where somebody wanted it.
    pub trace: Vec<String>,
}

/// See the module.
pub(super) struct World {
    pub(super) now: u64,
    pub(super) rng: Rng,
    pub(super) options: Options,
    pub(super) permits: usize,
    pub(super) prefix: Prefix,
    pub(super) host: Host,
    pub(super) bucket: Bucket,
    pub(super) owners: BTreeMap<u64, Owner>,
    /// The one that the host has started last.
    leader: u64,
    twin: Option<HistoryTwin>,
    calm: bool,
    faults: u64,
    horizon: u64,
    scan_every: u64,
    queue: BTreeMap<(u64, u64), Happening>,
    next_id: u64,
    /// Requests that wait for their effect, and those whose owner does not wait any more.
    under_way: BTreeMap<u64, (u64, u64)>,
    abandoned: BTreeSet<u64>,
    ids: BTreeMap<u64, RunId>,
    numbers: BTreeMap<String, u64>,
    violation: Option<String>,
    coverage: Coverage,
    trace: Option<Vec<String>>,
}

/// Runs the world of a seed.
#[must_use]
pub fn run(seed: u64, twin: Option<HistoryTwin>, traced: bool) -> HistoryOutcome {
    let mut world = World::new(seed, twin, traced);
    let mut events = 0;
    let end = world.horizon + CALM;
    while world.violation.is_none() {
        let Some(((at, _), happening)) = world.queue.pop_first() else {
            break;
        };
        if at > end {
            break;
        }
        world.now = at;
        world.calm |= at > world.horizon;
        events += 1;
        world.happen(happening);
    }
    world.check_the_end();
    HistoryOutcome {
        events,
        violation: world.violation,
        coverage: world.coverage,
        trace: world.trace.unwrap_or_default(),
    }
}

impl World {
    fn new(seed: u64, twin: Option<HistoryTwin>, traced: bool) -> Self {
        let mut rng = Rng::new(seed ^ 0x4157_0000);
        let purge_wait_ms = if twin == Some(HistoryTwin::PurgeWait) {
            0
        } else {
            PURGE_WAIT
        };
        let mut world = Self {
            now: 0,
            options: Options {
                delays: RetryDelays {
                    transient_ms: 10,
                    transient_max_ms: 500,
                    permanent_ms: 100,
                    permanent_max_ms: 2_000,
                },
                purge_wait_ms,
            },
            permits: rng.between(1, 3) as usize,
            prefix: Prefix::default(),
            host: Host::default(),
            bucket: Bucket::default(),
            owners: BTreeMap::new(),
            leader: 0,
            twin,
            calm: false,
            faults: rng.between(0, 300),
            horizon: rng.between(4_000, 20_000),
            scan_every: rng.between(500, 4_000),
            queue: BTreeMap::new(),
            next_id: 1,
            under_way: BTreeMap::new(),
            abandoned: BTreeSet::new(),
            ids: BTreeMap::new(),
            numbers: BTreeMap::new(),
            violation: None,
            coverage: Coverage::default(),
            trace: traced.then(Vec::new),
            rng,
        };
        for _ in 0..world.rng.between(1, 4) {
            world.open();
        }
        world.after(0, Happening::Takeover);
        world.after(10, Happening::Seal);
        world.after(2_000, Happening::Purge);
        world
    }

    fn open(&mut self) {
        let run = self.host.open();
        if let Some(known) = self.host.runs.get(&run) {
            self.numbers.insert(known.id.as_str().to_owned(), run);
            self.ids.insert(run, known.id.clone());
        }
    }

    pub(super) fn is(&self, twin: HistoryTwin) -> bool {
        self.twin == Some(twin)
    }

    /// A number that nothing else in this world has.
    pub(super) fn fresh(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn life(&self, owner: u64, run: u64) -> Option<u64> {
        let task = self.owners.get(&owner)?.tasks.get(&run)?;
        Some(task.life)
    }

    pub(super) fn after(&mut self, delay: u64, happening: Happening) {
        self.next_id += 1;
        self.queue
            .insert((self.now + delay, self.next_id), happening);
    }

    pub(super) fn hit(&mut self, what: &'static str) {
        self.coverage.hit(what);
    }

    pub(super) fn note(&mut self, line: impl FnOnce() -> String) {
        let now = self.now;
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{now:>7} {}", line()));
        }
    }

    pub(super) fn violate(&mut self, what: String) {
        self.note(|| format!("VIOLATION {what}"));
        self.violation.get_or_insert(what);
    }

    /// Of a run that is, or was, known.
    pub(super) fn run_id(&self, run: u64) -> RunId {
        self.ids
            .get(&run)
            .cloned()
            .unwrap_or_else(|| unreachable!("a run without a name"))
    }

    pub(super) fn keys(&self, run: u64, seqs: &[u64]) -> Vec<String> {
        let id = self.run_id(run);
        seqs.iter()
            .map(|seq| key::history_segment(&self.prefix, &id, *seq))
            .collect()
    }

    /// What the index answers.
    pub(super) fn listing(&mut self, run: u64) -> Listing {
        let mut listing = self.host.listing(run);
        if self.is(HistoryTwin::SeqOrder) && listing.first.len() > 1 {
            listing.first.remove(0);
        }
        listing
    }

    /// A message, which takes a moment.
    pub(super) fn answer(&mut self, owner: u64, run: u64, event: Event) {
        let delay = self.rng.between(0, 2);
        let life = None;
        self.after(
            delay,
            Happening::Tell {
                owner,
                run,
                life,
                event,
            },
        );
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Seal => self.seal(),
            Happening::Purge => self.purge(),
            Happening::Takeover => self.take_over(),
            Happening::Stop { owner } => {
                if owner != self.leader || !self.calm {
                    self.note(|| format!("owner {owner} ends"));
                    self.abandon(owner, None);
                    self.owners.remove(&owner);
                }
            }
            Happening::Scan { owner } => {
                if self.owners.contains_key(&owner) {
                    self.scan(owner);
                    self.after(self.scan_every, Happening::Scan { owner });
                }
            }
            Happening::Orphans { owner } => {
                if self.owners.contains_key(&owner) && !self.is(HistoryTwin::OrphanSweep) {
                    let listed = self.bucket.under(&key::histories_prefix(&self.prefix));
                    let delay = self.rng.between(1, 100);
                    self.after(delay, Happening::Judge { owner, listed });
                    self.after(4 * self.scan_every, Happening::Orphans { owner });
                }
            }
            Happening::Judge { owner, listed } => {
                if self.owners.contains_key(&owner) {
                    self.judge(listed);
                }
            }
            Happening::Tell {
                owner,
                run,
                life,
                event,
            } => {
                if life.is_none() || self.life(owner, run) == life {
                    self.note(|| format!("owner {owner} run {run}: {event:?}"));
                    self.tell(owner, run, event);
                }
            }
            Happening::Wake { owner, run } => {
                if let Some(of) = self.owners.get(&owner)
                    && of.tasks.contains_key(&run)
                {
                    self.tell(owner, run, Event::Tick);
                }
            }
            Happening::Apply {
                origin,
                call,
                answer,
            } => self.apply(origin, call, answer),
            Happening::Answer { origin, reply } => {
                let Origin {
                    owner,
                    run,
                    attempt,
                    ..
                } = origin;
                self.under_way.remove(&origin.request);
                let known = self.life(owner, run) == Some(origin.life);
                if known && !self.abandoned.contains(&origin.request) {
                    self.note(|| format!("owner {owner} run {run} attempt {attempt}: {reply:?}"));
                    self.replied(owner, run, attempt, reply);
                }
            }
        }
    }

    fn seal(&mut self) {
        if self.calm {
            return;
        }
        if self.rng.chance(100) {
            self.open();
        }
        let runs = self.host.open_runs();
        if let Some(run) = (!runs.is_empty()).then(|| self.rng.pick(&runs)) {
            self.seal_in(run);
        }
        let delay = self.rng.between(20, 400);
        self.after(delay, Happening::Seal);
    }

    fn seal_in(&mut self, run: u64) {
        let (now, len) = (self.now, self.rng.between(0, 40));
        let content: Vec<u8> = (0..len).map(|_| self.rng.bits() as u8).collect();
        let id = self.run_id(run);
        let Some(known) = self.host.runs.get_mut(&run) else {
            return;
        };
        let seq = known.segments.keys().last().map_or(0, |last| last + 1) + now % 2;
        let sealed = Sealed {
            content: content.clone(),
            at: now,
            uploaded: false,
        };
        known.segments.insert(seq, sealed);
        self.note(|| format!("sealed {seq} of run {run}"));
        let key = key::history_segment(&self.prefix, &id, seq);
        if self.rng.chance(150) {
            // Left by somebody who had another history, or damaged.
            let mut bytes = encode(&id, seq, &content);
            let last = bytes.len() - 1;
            if self.rng.chance(500) {
                bytes[last] ^= 1;
            } else {
                bytes = encode(&id, seq, b"another history");
            }
            self.bucket.put(&key, bytes.into(), now);
            self.hit("something else is there");
        }
        let event = Event::Sealed {
            size: len,
            sealed: TimestampMs(now as i64),
        };
        // A hint may be lost.
        if self.rng.chance(900) {
            self.answer(self.leader, run, event);
        }
    }

    fn purge(&mut self) {
        let runs = self.host.open_runs();
        if self.calm || runs.is_empty() {
            return;
        }
        let run = self.rng.pick(&runs);
        let now = self.now;
        if let Some(known) = self.host.runs.get_mut(&run) {
            known.purging = Some(now);
        }
        self.hit("purge");
        self.note(|| format!("run {run} is purging"));
        self.answer(self.leader, run, Event::Purge);
        let delay = self.rng.between(1_000, 6_000);
        self.after(delay, Happening::Purge);
    }

    fn take_over(&mut self) {
        if self.calm && self.owners.contains_key(&self.leader) {
            return;
        }
        let old = self.leader;
        self.next_id += 1;
        self.leader = self.next_id;
        let owner = self.leader;
        self.owners.insert(owner, Owner::default());
        self.note(|| format!("owner {owner} begins"));
        if self.rng.chance(500) {
            self.after(0, Happening::Stop { owner: old });
        } else {
            self.hit("two owners at once");
            let delay = self.rng.between(1, 3_000);
            self.after(delay, Happening::Stop { owner: old });
        }
        self.after(0, Happening::Scan { owner });
        self.after(2_000, Happening::Orphans { owner });
        let purging: Vec<u64> = self
            .host
            .runs
            .iter()
            .filter(|(_, run)| run.purging.is_some())
            .map(|(run, _)| *run)
            .collect();
        for run in purging {
            self.answer(owner, run, Event::Purge);
        }
        let delay = self.rng.between(300, 6_000);
        self.after(delay, Happening::Takeover);
    }
}
