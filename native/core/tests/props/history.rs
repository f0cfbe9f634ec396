//! The history machine under random events: what answers, what is old, what comes of itself.

use std::collections::BTreeSet;

use proptest::prelude::*;
use stream_s3_core::decisions::retry::RetryDelays;
use stream_s3_core::error::ErrorClass;
use stream_s3_core::history::{
    Backlog, Effect, Event, Examined, Listing, Machine, Options, PURGE_RETRY_MS, Precondition, Put,
    Read, Segment, WINDOW,
};
use stream_s3_core::units::TimestampMs;

use crate::config;

const PURGE_WAIT: u64 = 3_000;
const OPTIONS: Options = Options {
    delays: RetryDelays {
        transient_ms: 10,
        transient_max_ms: 500,
        permanent_ms: 100,
        permanent_max_ms: 1_000,
    },
    purge_wait_ms: PURGE_WAIT,
};

#[derive(Debug, Clone)]
enum Step {
    /// Some segments are sealed, and each is told of, or not.
    Seal(u8, bool),
    /// A scan, of what the index has, or of what it had so many acknowledgments ago.
    Scan(usize),
    /// The answer to what was asked last.
    Answer(u8),
    Fail(u8),
    Gone,
    /// An answer to something that was asked earlier.
    Old(u64, u8),
    /// Time passes, and then there is a tick.
    Tick(u64),
    /// Time passes until what the machine waits for.
    Wake,
    /// Somebody else acknowledges what comes next.
    Elsewhere,
    Purge,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (1u8..30, any::<bool>()).prop_map(|(count, told)| Step::Seal(count, told)),
        2 => (0usize..5).prop_map(Step::Scan),
        30 => any::<u8>().prop_map(Step::Answer),
        5 => any::<u8>().prop_map(Step::Fail),
        1 => prop_oneof![6 => Just(Step::Wake), 1 => Just(Step::Gone)],
        3 => (1u64..6, any::<u8>()).prop_map(|(ago, what)| Step::Old(ago, what)),
        2 => (0u64..700).prop_map(Step::Tick),
        5 => Just(Step::Wake),
        1 => Just(Step::Elsewhere),
        1 => prop_oneof![9 => Just(Step::Wake), 1 => Just(Step::Purge)],
    ]
}

/// What there is of the permit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Permit {
    None,
    Asked,
    Held,
}

/// A host, a store and a shell for one machine, which check what the machine wants.
struct World {
    machine: Machine,
    now: u64,
    sealed: u64,
    /// As many as there were when the machine was told of one.
    told: u64,
    /// Segments that are acknowledged, in the order of it.
    acknowledged: Vec<u64>,
    permit: Permit,
    /// The effect that wants an answer.
    asked: Option<Effect>,
    last: u64,
    wake: Option<u64>,
    /// The last purge.
    purging: Option<u64>,
    told_host: bool,
    proposed: Option<u64>,
}

impl World {
    fn new() -> Self {
        Self {
            machine: Machine::new(OPTIONS),
            now: 0,
            sealed: 0,
            told: 0,
            acknowledged: Vec::new(),
            permit: Permit::None,
            asked: None,
            last: 0,
            wake: None,
            purging: None,
            told_host: false,
            proposed: None,
        }
    }

    /// What the index has, or had before the last so many acknowledgments.
    fn listing(&self, lag: usize) -> Listing {
        let known = self.acknowledged.len().saturating_sub(lag);
        let done: BTreeSet<u64> = self.acknowledged[..known].iter().copied().collect();
        let mut listing = Listing::default();
        for seq in (0..self.sealed).filter(|seq| !done.contains(seq)) {
            let (size, sealed) = (10, TimestampMs(0));
            if listing.first.len() < WINDOW {
                listing.first.push(Segment { seq, size, sealed });
            } else {
                listing.beyond.add(size, sealed);
            }
        }
        listing
    }

    fn tell(&mut self, event: Event) {
        let answers = attempt_of_event(&event);
        if answers.is_some_and(|attempt| attempt == self.last) {
            if matches!(event, Event::Permit { .. }) && self.asked.is_some() {
                self.permit = Permit::Held;
            }
            self.asked = None;
        }
        if event == Event::Tick {
            self.wake = self.wake.filter(|ms| *ms > self.now);
        }
        let effects = self.machine.handle(self.now, event);
        for effect in effects {
            self.perform(effect);
        }
        self.check();
    }

    fn perform(&mut self, effect: Effect) {
        let of_purge = matches!(
            effect,
            Effect::Catalog { .. }
                | Effect::Delete { .. }
                | Effect::Sweep { .. }
                | Effect::TellHost { .. }
        );
        let neutral = matches!(
            effect,
            Effect::Abort | Effect::GivePermitBack | Effect::WakeAt { .. }
        );
        assert!(
            neutral || of_purge == self.purging.is_some(),
            "{effect:?} while purging is {:?}",
            self.purging
        );
        if let Some(attempt) = attempt_of(&effect) {
            assert!(attempt > self.last, "an attempt is used twice");
            assert_eq!(self.asked, None, "two things at a time");
            self.last = attempt;
            self.wake = None;
            self.asked = Some(effect.clone());
        }
        match effect {
            Effect::AskPermit { .. } => {
                assert_eq!(self.permit, Permit::None, "a second permit");
                self.permit = Permit::Asked;
            }
            Effect::GivePermitBack => {
                assert_ne!(self.permit, Permit::None, "nothing to be given back");
                self.permit = Permit::None;
            }
            Effect::Read { seq, .. } | Effect::Put { seq, .. } | Effect::Examine { seq, .. } => {
                assert_eq!(self.permit, Permit::Held, "without a permit");
                assert!(seq < self.sealed);
            }
            Effect::Acknowledge { seq, .. } => {
                assert_eq!(self.permit, Permit::None, "a permit while the host commits");
                // The next one, or one that somebody else has acknowledged meanwhile.
                assert!(seq <= self.acknowledged.len() as u64, "out of order");
                assert!(self.proposed.is_none_or(|proposed| proposed <= seq));
                self.proposed = Some(seq);
            }
            Effect::WakeAt { ms } => {
                assert!(ms >= self.now);
                assert_eq!(self.asked, None, "waits for an answer and for its time");
                self.wake = Some(ms);
            }
            Effect::Abort => {
                // Whatever was under way is not answered any more.
                self.asked = None;
                self.wake = None;
            }
            Effect::Delete { .. } => {
                let begun = self.purging.unwrap_or(u64::MAX);
                assert!(self.now >= begun.saturating_add(PURGE_WAIT), "too early");
            }
            Effect::TellHost { .. } => self.told_host = true,
            Effect::List { .. }
            | Effect::ReportMismatch { .. }
            | Effect::Count { .. }
            | Effect::Catalog { .. }
            | Effect::Sweep { .. } => {}
        }
    }

    /// Nothing is lost: whoever is not at rest waits for an answer, or for its time, and for one of them only.
    fn check(&self) {
        let status = self.machine.status();
        match status.phase {
            "idle" | "blocked" | "gone" | "purged" => {
                assert_eq!(self.asked, None, "{}", status.phase);
                assert_eq!(self.permit, Permit::None, "{}", status.phase);
            }
            "pausing" => assert!(self.wake.is_some() && self.asked.is_none()),
            "purging" => assert!(self.wake.is_some() != self.asked.is_some()),
            _ => assert!(self.asked.is_some(), "{} without an effect", status.phase),
        }
        if status.is_idle && status.phase == "idle" {
            assert_eq!(status.backlog, Backlog::default());
            assert!(
                self.acknowledged.len() as u64 >= self.told,
                "rests, and was told of more"
            );
        }
    }

    /// An answer to what was asked last; `what` chooses among what it can be.
    fn answer(&mut self, what: u8) {
        let Some(asked) = self.asked.clone() else {
            return;
        };
        let event = match asked {
            Effect::List { attempt } => Event::Listed {
                attempt,
                listing: self.listing(usize::from(what % 3)),
            },
            Effect::AskPermit { attempt } => Event::Permit { attempt },
            Effect::Read { attempt, seq } => Event::Read {
                attempt,
                read: if self.acknowledged.contains(&seq) {
                    Read::NotSealed
                } else {
                    Read::Ready
                },
            },
            Effect::Put { attempt, when, .. } => Event::Put {
                attempt,
                put: match (what % 4, when) {
                    (0, Precondition::Absent) => Put::Exists {
                        crc: 1,
                        payload_len: 10,
                    },
                    (0, Precondition::Matches(_)) => Put::Changed,
                    _ => Put::Stored { crc: 1, size: 30 },
                },
            },
            Effect::Examine { attempt, .. } => Event::Examined {
                attempt,
                examined: match what % 3 {
                    0 => Examined::Same { size: 30 },
                    1 => Examined::Other {
                        etag: "\"1\"".to_owned(),
                    },
                    _ => Examined::Vanished,
                },
            },
            Effect::Acknowledge { attempt, seq, .. } => {
                self.acknowledge(seq);
                Event::Acknowledged { attempt }
            }
            Effect::Catalog { attempt } => Event::Catalog {
                attempt,
                had_segments: what.is_multiple_of(2),
            },
            Effect::Delete { attempt }
            | Effect::Sweep { attempt }
            | Effect::TellHost { attempt } => Event::Done { attempt },
            Effect::GivePermitBack
            | Effect::ReportMismatch { .. }
            | Effect::WakeAt { .. }
            | Effect::Count { .. }
            | Effect::Abort => return,
        };
        self.tell(event);
    }

    fn acknowledge(&mut self, seq: u64) {
        if !self.acknowledged.contains(&seq) {
            assert_eq!(seq, self.acknowledged.len() as u64, "a gap");
            self.acknowledged.push(seq);
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Seal(count, told) => {
                for _ in 0..count {
                    self.sealed += 1;
                    if told {
                        self.told = self.sealed;
                        self.tell(Event::Sealed {
                            size: 10,
                            sealed: TimestampMs(0),
                        });
                    }
                }
            }
            Step::Scan(lag) => {
                let listing = self.listing(lag);
                self.tell(Event::Rescanned { listing });
            }
            Step::Answer(what) => self.answer(what),
            Step::Fail(what) => {
                // A permit is given or not, and nothing else.
                if self.asked.is_some() && self.permit != Permit::Asked {
                    self.tell(Event::Failed {
                        attempt: self.last,
                        class: class(what),
                        jitter: u32::from(what) << 24,
                    });
                }
            }
            Step::Gone => {
                if self.asked.is_some() && self.permit != Permit::Asked {
                    let attempt = self.last;
                    self.told_host |= self.purging.is_some();
                    self.tell(Event::Gone { attempt });
                }
            }
            Step::Old(ago, what) => self.old(ago, what),
            Step::Tick(ms) => {
                self.now += ms;
                self.tell(Event::Tick);
            }
            Step::Wake => {
                if let Some(ms) = self.wake {
                    self.now = self.now.max(ms);
                    self.tell(Event::Tick);
                }
            }
            Step::Elsewhere => {
                let next = self.acknowledged.len() as u64;
                if next < self.sealed && self.purging.is_none() {
                    self.acknowledge(next);
                }
            }
            Step::Purge => {
                // One that is under way goes on.
                if self.machine.status().phase != "purging" {
                    self.purging = Some(self.now);
                    self.told_host = false;
                }
                self.tell(Event::Purge);
            }
        }
    }

    /// Changes nothing at all.
    fn old(&mut self, ago: u64, what: u8) {
        let Some(attempt) = self.last.checked_sub(ago) else {
            return;
        };
        let event = match what % 8 {
            0 => Event::Permit { attempt },
            1 => Event::Read {
                attempt,
                read: Read::Ready,
            },
            2 => Event::Put {
                attempt,
                put: Put::Stored { crc: 9, size: 9 },
            },
            3 => Event::Acknowledged { attempt },
            4 => Event::Done { attempt },
            5 => Event::Gone { attempt },
            6 => Event::Listed {
                attempt,
                listing: Listing::default(),
            },
            _ => Event::Failed {
                attempt,
                class: class(what),
                jitter: 0,
            },
        };
        let before = self.machine.clone();
        let effects = self.machine.handle(self.now, event);
        assert_eq!(effects, []);
        // Not even the time of it is remembered in what matters.
        assert_eq!(self.machine.status(), before.status());
    }

    /// All goes well from now on, and a scan comes by.
    fn settle(&mut self) {
        let gone = self.machine.status().phase == "gone";
        for _ in 0..200_000 {
            if self.asked.is_some() {
                self.answer(u8::MAX - 3);
            } else if self.wake.is_some() && !self.machine.status().is_idle {
                self.step(Step::Wake);
            } else if self.machine.status().phase == "blocked" {
                self.step(Step::Scan(0));
            } else {
                break;
            }
        }
        let status = self.machine.status();
        assert!(status.is_idle, "{status:?}");
        if self.purging.is_some() {
            assert!(self.told_host, "the host is not told");
        } else if !gone {
            let listing = self.listing(0);
            if !listing.first.is_empty() {
                self.tell(Event::Rescanned { listing });
                return self.settle();
            }
            let all: Vec<u64> = (0..self.sealed).collect();
            assert_eq!(self.acknowledged, all);
        }
    }
}

fn class(what: u8) -> ErrorClass {
    match what % 4 {
        0 => ErrorClass::Permanent,
        1 => ErrorClass::Throttled,
        _ => ErrorClass::Transient,
    }
}

fn attempt_of(effect: &Effect) -> Option<u64> {
    match effect {
        Effect::List { attempt }
        | Effect::AskPermit { attempt }
        | Effect::Read { attempt, .. }
        | Effect::Put { attempt, .. }
        | Effect::Examine { attempt, .. }
        | Effect::Acknowledge { attempt, .. }
        | Effect::Catalog { attempt }
        | Effect::Delete { attempt }
        | Effect::Sweep { attempt }
        | Effect::TellHost { attempt } => Some(*attempt),
        Effect::GivePermitBack
        | Effect::ReportMismatch { .. }
        | Effect::WakeAt { .. }
        | Effect::Count { .. }
        | Effect::Abort => None,
    }
}

fn attempt_of_event(event: &Event) -> Option<u64> {
    match event {
        Event::Listed { attempt, .. }
        | Event::Permit { attempt }
        | Event::Read { attempt, .. }
        | Event::Put { attempt, .. }
        | Event::Examined { attempt, .. }
        | Event::Acknowledged { attempt }
        | Event::Catalog { attempt, .. }
        | Event::Done { attempt }
        | Event::Gone { attempt }
        | Event::Failed { attempt, .. } => Some(*attempt),
        Event::Sealed { .. } | Event::Rescanned { .. } | Event::Tick | Event::Purge => None,
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn every_order_of_events_keeps_permits_order_and_purges_and_loses_nothing(
        steps in prop::collection::vec(step(), 1..300),
    ) {
        let mut world = World::new();
        for step in steps {
            world.step(step);
        }
        world.settle();
    }

    #[test]
    fn a_purge_that_is_refused_for_good_is_repeated_a_minute_later(
        steps in prop::collection::vec(step(), 0..100),
        answers in 0usize..4,
    ) {
        let mut world = World::new();
        for step in steps {
            world.step(step);
        }
        world.step(Step::Purge);
        for _ in 0..answers {
            if world.asked.is_some() {
                world.answer(0);
            } else {
                world.step(Step::Wake);
            }
        }
        if let Some(asked) = world.asked.clone() {
            world.step(Step::Fail(0));
            prop_assert_eq!(world.wake, Some(world.now + PURGE_RETRY_MS));
            world.step(Step::Wake);
            let again = world.asked.clone();
            prop_assert_eq!(again.as_ref().map(std::mem::discriminant), Some(std::mem::discriminant(&asked)));
        }
        world.settle();
    }
}
