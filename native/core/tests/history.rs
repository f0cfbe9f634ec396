//! The history machine: events in, the whole list of effects out.

#![allow(clippy::disallowed_methods)]

use stream_s3_core::decisions::retry::RetryDelays;
use stream_s3_core::error::ErrorClass::{Permanent, Throttled, Transient};
use stream_s3_core::history::Effect::{
    Abort, Acknowledge, AskPermit, Catalog, Count, Delete, Examine, GivePermitBack, List, Put,
    Read, ReportMismatch, Sweep, TellHost, WakeAt,
};
use stream_s3_core::history::{
    Backlog, Effect, Event, Examined, Listing, Machine, Options, Outcome, PURGE_RETRY_MS,
    Precondition, Put as PutResult, Read as ReadResult, Segment, Stored, WINDOW,
};
use stream_s3_core::units::TimestampMs;

const OPTIONS: Options = Options {
    delays: RetryDelays {
        transient_ms: 10,
        transient_max_ms: 40,
        permanent_ms: 100,
        permanent_max_ms: 1_000,
    },
    purge_wait_ms: 60_000,
};
const ETAG: &str = "\"etag\"";

fn segment(seq: u64) -> Segment {
    Segment {
        seq,
        size: 10 * seq,
        sealed: TimestampMs(seq as i64),
    }
}

fn listing(seqs: &[u64]) -> Listing {
    Listing {
        first: seqs.iter().copied().map(segment).collect(),
        beyond: Backlog::default(),
    }
}

/// A machine whose answers always fit the last attempt.
struct Rig {
    machine: Machine,
    now: u64,
    attempt: u64,
}

impl Rig {
    fn new() -> Self {
        Self {
            machine: Machine::new(OPTIONS),
            now: 0,
            attempt: 0,
        }
    }

    /// One that was told by a scan of these segments.
    fn scanned(seqs: &[u64]) -> Self {
        let mut rig = Self::new();
        rig.tell(Event::Rescanned {
            listing: listing(seqs),
        });
        rig
    }

    /// The same, with the first segment's body read.
    fn ready(seqs: &[u64]) -> Self {
        let mut rig = Self::scanned(seqs);
        rig.permit();
        rig.read();
        rig
    }

    fn tell(&mut self, event: Event) -> Vec<Effect> {
        let effects = self.machine.handle(self.now, event);
        for effect in &effects {
            self.attempt = match effect {
                List { attempt }
                | AskPermit { attempt }
                | Read { attempt, .. }
                | Put { attempt, .. }
                | Examine { attempt, .. }
                | Acknowledge { attempt, .. }
                | Catalog { attempt }
                | Delete { attempt, .. }
                | Sweep { attempt }
                | TellHost { attempt } => *attempt,
                GivePermitBack | ReportMismatch { .. } | WakeAt { .. } | Count { .. } | Abort => {
                    self.attempt
                }
            };
        }
        effects
    }

    fn permit(&mut self) -> Vec<Effect> {
        let attempt = self.attempt;
        self.tell(Event::Permit { attempt })
    }

    fn read(&mut self) -> Vec<Effect> {
        let attempt = self.attempt;
        self.tell(Event::Read {
            attempt,
            read: ReadResult::Ready,
        })
    }

    fn put(&mut self, put: PutResult) -> Vec<Effect> {
        let attempt = self.attempt;
        self.tell(Event::Put { attempt, put })
    }

    fn stored(&mut self) -> Vec<Effect> {
        self.put(PutResult::Stored { crc: 7, size: 99 })
    }

    fn exists(&mut self) -> Vec<Effect> {
        self.put(PutResult::Exists {
            crc: 7,
            payload_len: 50,
        })
    }

    fn examined(&mut self, examined: Examined) -> Vec<Effect> {
        let attempt = self.attempt;
        self.tell(Event::Examined { attempt, examined })
    }

    fn acknowledged(&mut self) -> Vec<Effect> {
        let attempt = self.attempt;
        self.tell(Event::Acknowledged { attempt })
    }

    fn fail(&mut self, class: stream_s3_core::error::ErrorClass) -> Vec<Effect> {
        let attempt = self.attempt;
        self.tell(Event::Failed {
            attempt,
            class,
            jitter: u32::MAX,
        })
    }

    fn done(&mut self) -> Vec<Effect> {
        let attempt = self.attempt;
        self.tell(Event::Done { attempt })
    }

    fn gone(&mut self) -> Vec<Effect> {
        let attempt = self.attempt;
        self.tell(Event::Gone { attempt })
    }

    fn catalog(&mut self, seqs: Option<Vec<u64>>) -> Vec<Effect> {
        let attempt = self.attempt;
        self.tell(Event::Catalog { attempt, seqs })
    }

    fn phase(&self) -> &'static str {
        self.machine.status().phase
    }
}

fn count(outcome: Outcome, bytes: u64) -> Effect {
    Count { outcome, bytes }
}

fn acknowledge(attempt: u64, seq: u64, stored: Stored) -> Effect {
    Acknowledge {
        attempt,
        seq,
        crc: 7,
        size: 99,
        stored,
    }
}

#[test]
fn segments_are_uploaded_and_acknowledged_one_after_the_other_in_order() {
    let mut rig = Rig::new();
    let effects = rig.tell(Event::Rescanned {
        listing: listing(&[3, 4]),
    });
    assert_eq!(effects, [AskPermit { attempt: 1 }]);
    assert_eq!(rig.permit(), [Read { attempt: 2, seq: 3 }]);
    let put = Put {
        attempt: 3,
        seq: 3,
        when: Precondition::Absent,
    };
    assert_eq!(rig.read(), [put]);
    assert_eq!(
        rig.stored(),
        [
            count(Outcome::Stored(Stored::Uploaded), 99),
            GivePermitBack,
            acknowledge(4, 3, Stored::Uploaded)
        ]
    );
    assert_eq!(rig.acknowledged(), [AskPermit { attempt: 5 }]);
    assert_eq!(rig.permit(), [Read { attempt: 6, seq: 4 }]);
    rig.read();
    rig.stored();
    assert_eq!(rig.acknowledged(), []);
    assert!(rig.machine.status().is_idle);
}

#[test]
fn a_sealed_segment_lets_the_index_be_read_once() {
    let mut rig = Rig::new();
    let sealed = Event::Sealed {
        size: 5,
        sealed: TimestampMs(1),
    };
    assert_eq!(rig.tell(sealed.clone()), [List { attempt: 1 }]);
    // One that comes meanwhile may or may not be in the answer, so there is another look once that is through.
    assert_eq!(rig.tell(sealed), []);
    let listed = Event::Listed {
        attempt: 1,
        listing: listing(&[1]),
    };
    assert_eq!(rig.tell(listed), [AskPermit { attempt: 2 }]);
    rig.permit();
    rig.read();
    rig.stored();
    assert_eq!(rig.acknowledged(), [List { attempt: 6 }]);
    let nothing = Event::Listed {
        attempt: 6,
        listing: listing(&[]),
    };
    assert_eq!(rig.tell(nothing), []);
    assert!(rig.machine.status().is_idle);
}

#[test]
fn an_existing_object_with_the_same_content_is_acknowledged_with_its_size() {
    let mut rig = Rig::ready(&[1]);
    let examine = Examine {
        attempt: 4,
        seq: 1,
        crc: 7,
        payload_len: 50,
    };
    assert_eq!(rig.exists(), [examine]);
    assert_eq!(
        rig.examined(Examined::Same { size: 99 }),
        [
            count(Outcome::Stored(Stored::AlreadyPresent), 0),
            GivePermitBack,
            acknowledge(5, 1, Stored::AlreadyPresent)
        ]
    );
}

#[test]
fn any_other_existing_object_is_reported_and_replaced_on_its_entity_tag() {
    let mut rig = Rig::ready(&[1]);
    rig.exists();
    let other = Examined::Other {
        etag: ETAG.to_owned(),
    };
    assert_eq!(
        rig.examined(other),
        [ReportMismatch { seq: 1 }, Read { attempt: 5, seq: 1 }]
    );
    let put = Put {
        attempt: 6,
        seq: 1,
        when: Precondition::Matches(ETAG.to_owned()),
    };
    assert_eq!(rig.read(), [put]);
    assert_eq!(
        rig.stored(),
        [
            count(Outcome::Stored(Stored::Replaced), 99),
            GivePermitBack,
            acknowledge(7, 1, Stored::Replaced)
        ]
    );
}

#[test]
fn an_object_that_changes_meanwhile_is_looked_at_again() {
    for changed in [true, false] {
        let mut rig = Rig::ready(&[1]);
        rig.exists();
        let effects = if changed {
            rig.examined(Examined::Other {
                etag: ETAG.to_owned(),
            });
            rig.read();
            rig.put(PutResult::Changed)
        } else {
            rig.examined(Examined::Vanished)
        };
        assert_eq!(
            effects,
            [
                GivePermitBack,
                count(Outcome::RetryableError, 0),
                WakeAt { ms: 0 }
            ]
        );
        assert!(matches!(rig.tell(Event::Tick)[..], [AskPermit { .. }]));
    }
}

#[test]
fn a_read_or_encode_failure_never_writes() {
    let mut rig = Rig::scanned(&[1]);
    rig.permit();
    assert_eq!(
        rig.fail(Permanent),
        [GivePermitBack, count(Outcome::PermanentError, 0)]
    );
    assert_eq!(rig.phase(), "blocked");
    assert_eq!(rig.read(), []);
}

#[test]
fn a_retryable_failure_gives_the_permit_back_and_reads_again_ever_later() {
    let mut rig = Rig::ready(&[1]);
    let mut delays = Vec::new();
    for _ in 0..5 {
        let effects = rig.fail(Transient);
        let [
            GivePermitBack,
            Count {
                outcome: Outcome::RetryableError,
                bytes: 0,
            },
            WakeAt { ms },
        ] = effects[..]
        else {
            panic!("{effects:?}");
        };
        delays.push(ms - rig.now);
        rig.now = ms;
        rig.tell(Event::Tick);
        assert!(matches!(rig.permit()[..], [Read { seq: 1, .. }]));
        rig.read();
    }
    assert_eq!(delays, [0, 10, 20, 40, 40]);
}

#[test]
fn a_throttled_store_is_left_alone_for_a_second() {
    let mut rig = Rig::ready(&[1]);
    let effects = rig.fail(Throttled);
    assert_eq!(effects.last(), Some(&WakeAt { ms: 1_000 }));
    rig.now = 999;
    assert_eq!(rig.tell(Event::Tick), [WakeAt { ms: 1_000 }]);
}

#[test]
fn only_the_acknowledgment_is_repeated_when_only_that_fails() {
    let mut rig = Rig::ready(&[1]);
    rig.stored();
    let effects = rig.fail(Transient);
    assert_eq!(
        effects,
        [count(Outcome::RetryableError, 0), WakeAt { ms: 0 }]
    );
    assert_eq!(
        rig.tell(Event::Tick),
        [acknowledge(rig.attempt, 1, Stored::Uploaded)]
    );
}

#[test]
fn a_permanent_failure_waits_for_the_scan_whatever_else_comes() {
    for step in 0..3 {
        let mut rig = Rig::ready(&[1]);
        match step {
            0 => {}
            1 => drop(rig.exists()),
            _ => drop(rig.stored()),
        }
        rig.fail(Permanent);
        for seq in 2..12 {
            let sealed = Event::Sealed {
                size: 1,
                sealed: TimestampMs(seq),
            };
            assert_eq!(rig.tell(sealed), []);
        }
        assert_eq!(rig.tell(Event::Tick), []);
        assert_eq!(rig.machine.status().backlog.segments, 11);
        let listing = listing(&[1, 2]);
        let effects = rig.tell(Event::Rescanned { listing });
        assert!(matches!(effects[..], [AskPermit { .. }]), "{effects:?}");
    }
}

#[test]
fn a_segment_that_somebody_else_acknowledged_is_passed_over() {
    let mut rig = Rig::scanned(&[1, 2]);
    rig.permit();
    let attempt = rig.attempt;
    let effects = rig.tell(Event::Read {
        attempt,
        read: ReadResult::NotSealed,
    });
    assert!(matches!(effects[..], [GivePermitBack, AskPermit { .. }]));
    assert!(matches!(rig.permit()[..], [Read { seq: 2, .. }]));
}

#[test]
fn a_run_that_is_gone_is_left_alone() {
    let mut rig = Rig::ready(&[1, 2]);
    assert_eq!(rig.gone(), [GivePermitBack, count(Outcome::Gone, 0)]);
    assert_eq!(rig.machine.status().backlog, Backlog::default());
    let again = Event::Rescanned {
        listing: listing(&[2]),
    };
    assert_eq!(rig.tell(again), []);
    assert!(rig.machine.status().is_idle);
}

#[test]
fn answers_to_what_was_given_up_change_nothing() {
    let mut rig = Rig::ready(&[1]);
    let old = rig.attempt;
    rig.fail(Transient);
    let before = rig.machine.clone();
    for event in [
        Event::Put {
            attempt: old,
            put: PutResult::Stored { crc: 1, size: 1 },
        },
        Event::Gone { attempt: old },
        Event::Acknowledged { attempt: old },
        Event::Failed {
            attempt: old,
            class: Permanent,
            jitter: 0,
        },
    ] {
        assert_eq!(rig.tell(event), []);
        assert_eq!(rig.machine, before);
    }
}

#[test]
fn an_index_that_lags_behind_brings_nothing_back() {
    let mut rig = Rig::ready(&[1, 2]);
    rig.stored();
    rig.acknowledged();
    rig.tell(Event::Rescanned {
        listing: listing(&[1, 2]),
    });
    assert!(matches!(rig.permit()[..], [Read { seq: 2, .. }]));
}

#[test]
fn an_index_that_shows_only_what_is_done_is_not_asked_again_at_once_for_ever() {
    let mut rig = Rig::ready(&[1]);
    rig.tell(Event::Sealed {
        size: 1,
        sealed: TimestampMs(0),
    });
    rig.stored();
    rig.acknowledged();
    let stale = || {
        let mut stale = listing(&[1]);
        stale.beyond.add(1, TimestampMs(0));
        stale
    };
    let mut waits = Vec::new();
    for _ in 0..4 {
        let attempt = rig.attempt;
        let effects = rig.tell(Event::Listed {
            attempt,
            listing: stale(),
        });
        let [WakeAt { ms }] = effects[..] else {
            panic!("{effects:?}");
        };
        waits.push(ms - rig.now);
        rig.now = ms;
        assert!(matches!(rig.tell(Event::Tick)[..], [List { .. }]));
    }
    assert_eq!(waits, [0, 10, 20, 40]);
}

#[test]
fn what_the_window_does_not_hold_is_asked_for_when_it_is_through() {
    let mut rig = Rig::new();
    let seqs: Vec<u64> = (1..=WINDOW as u64).collect();
    let mut all = listing(&seqs);
    for seq in 17..=20 {
        all.beyond.add(10 * seq, TimestampMs(seq as i64));
    }
    rig.tell(Event::Rescanned { listing: all });
    let backlog = rig.machine.status().backlog;
    assert_eq!((backlog.segments, backlog.bytes), (20, 2_100));
    assert_eq!(backlog.oldest, Some(TimestampMs(1)));
    for seq in 1..=WINDOW as u64 {
        assert_eq!(
            rig.permit(),
            [Read {
                attempt: rig.attempt,
                seq
            }]
        );
        rig.read();
        rig.stored();
        rig.acknowledged();
    }
    assert_eq!(rig.phase(), "listing");
    let attempt = rig.attempt;
    rig.tell(Event::Listed {
        attempt,
        listing: listing(&[17, 18, 19, 20]),
    });
    assert_eq!(rig.machine.status().backlog.segments, 4);
    assert!(matches!(rig.permit()[..], [Read { seq: 17, .. }]));
}

#[test]
fn a_purge_stops_the_upload_waits_deletes_by_key_sweeps_and_tells() {
    let mut rig = Rig::ready(&[1, 2]);
    rig.now = 500;
    let effects = rig.tell(Event::Purge);
    let catalog = Catalog {
        attempt: rig.attempt,
    };
    assert_eq!(effects, [Abort, GivePermitBack, catalog]);
    assert_eq!(rig.machine.status().backlog, Backlog::default());
    rig.now = 1_000;
    // The wait began with the purge, not with the answer.
    assert_eq!(
        rig.catalog(Some(vec![0, 1, 2])),
        [WakeAt { ms: 60_500 }],
        "nothing is deleted yet"
    );
    rig.now = 60_500;
    let effects = rig.tell(Event::Tick);
    let delete = Delete {
        attempt: rig.attempt,
        seqs: vec![0, 1, 2],
    };
    assert_eq!(effects, [delete]);
    assert!(matches!(rig.done()[..], [Sweep { .. }]));
    assert!(matches!(rig.done()[..], [TellHost { .. }]));
    assert_eq!(rig.done(), []);
    assert_eq!(rig.phase(), "purged");
    assert!(rig.machine.status().is_idle);
}

#[test]
fn a_run_without_segment_state_is_purged_at_once() {
    let mut rig = Rig::new();
    rig.tell(Event::Purge);
    assert!(matches!(rig.catalog(None)[..], [Sweep { .. }]));
}

#[test]
fn a_purge_repeats_what_is_refused_each_minute_and_what_passes_sooner() {
    let mut rig = Rig::new();
    rig.tell(Event::Purge);
    rig.catalog(None);
    assert_eq!(rig.fail(Permanent), [WakeAt { ms: PURGE_RETRY_MS }]);
    rig.now = PURGE_RETRY_MS;
    assert!(matches!(rig.tell(Event::Tick)[..], [Sweep { .. }]));
    assert_eq!(rig.fail(Transient), [WakeAt { ms: rig.now }]);
    assert!(matches!(rig.tell(Event::Tick)[..], [Sweep { .. }]));
    assert!(matches!(rig.done()[..], [TellHost { .. }]));
}

#[test]
fn nothing_is_uploaded_while_a_run_is_purged_or_afterwards() {
    let mut rig = Rig::scanned(&[1]);
    rig.tell(Event::Purge);
    let sealed = Event::Sealed {
        size: 1,
        sealed: TimestampMs(0),
    };
    let scanned = Event::Rescanned {
        listing: listing(&[1]),
    };
    for event in [sealed, scanned, Event::Purge] {
        assert_eq!(rig.tell(event), []);
    }
    rig.catalog(Some(vec![1]));
    assert_eq!(rig.tell(Event::Purge), []);
}

#[test]
fn an_older_state_stays_usable() {
    let rig = Rig::ready(&[1]);
    let (mut one, mut other) = (rig.machine.clone(), rig.machine);
    let stored = Event::Put {
        attempt: 3,
        put: PutResult::Stored { crc: 7, size: 99 },
    };
    assert_eq!(one.handle(0, stored.clone()), other.handle(0, stored));
    assert_eq!(one, other);
}
