//! Uploads.

use stream_s3_core::error::ErrorClass::{Permanent, Throttled, Transient};
use stream_s3_core::history::Effect::{
    AskPermit, Count, Examine, GivePermitBack, List, Put, Read, ReportMismatch, WakeAt,
};
use stream_s3_core::history::{
    Backlog, Event, Examined, Outcome, Precondition, Put as PutResult, Read as ReadResult, Stored,
    WINDOW,
};
use stream_s3_core::units::TimestampMs;

use crate::rig::{ETAG, Rig, acknowledge, count, listing};

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

#[test]
fn a_look_at_the_index_that_failed_is_repeated_even_if_a_scan_from_before_the_seal_came_past() {
    for class in [Transient, Permanent] {
        let mut rig = Rig::new();
        let sealed = Event::Sealed {
            size: 5,
            sealed: TimestampMs(1),
        };
        assert_eq!(rig.tell(sealed), [List { attempt: 1 }]);
        let before = Event::Rescanned {
            listing: listing(&[]),
        };
        assert_eq!(rig.tell(before.clone()), []);
        rig.fail(class);
        let event = match class {
            Permanent => before,
            Transient | Throttled => Event::Tick,
        };
        assert!(matches!(rig.tell(event)[..], [List { .. }]));
    }
}
