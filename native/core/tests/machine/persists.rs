//! From edits to a persisted manifest, and who is told.

use stream_s3_core::manifest::Manifest;
use stream_s3_core::replica_reader::{Effect, Event, Options, PersistError};
use stream_s3_core::units::{Offset, Revision, TimestampMs, TransferId, Uid};

use crate::rig::*;
use crate::support::manifest_of;

#[test]
fn a_persist_starts_at_the_threshold_with_a_snapshot_and_its_edits() {
    let mut rig = Rig::empty();
    assert_eq!(rig.add(0, 1), [TIMER]);
    let edits = vec![appended(0, 10, 0), appended(10, 20, 1)];
    assert_eq!(
        rig.add(1, 2),
        [start_persist(
            &manifest_of(&[(0, 10), (10, 20)], 0),
            0,
            edits
        )]
    );
    let status = rig.status();
    assert!(status.persist_in_flight);
    assert_eq!(
        (
            status.since_persist,
            status.in_persist_count,
            status.edits_waiting
        ),
        (0, 2, 0)
    );
    assert_eq!(status.bytes_in_persist, 2_000);
    assert_eq!(status.persisted_next_offset, Offset(0));
}

#[test]
fn only_one_persist_is_in_flight_and_later_edits_wait_for_the_next() {
    let mut rig = Rig::empty();
    rig.add(0, 2);
    assert_eq!(rig.add(2, 3), [TIMER]);
    assert_eq!(rig.add(3, 4), [TIMER]);
    assert_eq!(rig.tick(99_000), []);
    let status = rig.status();
    assert_eq!(
        (
            status.since_persist,
            status.in_persist_count,
            status.edits_waiting
        ),
        (2, 2, 2)
    );
}

#[test]
fn a_persist_that_succeeds_publishes_exactly_what_it_persisted() {
    let mut rig = Rig::empty();
    rig.add(0, 2);
    rig.add(2, 3);
    let edits = vec![appended(0, 10, 0), appended(10, 20, 1)];
    assert_eq!(
        rig.persisted(1, 5_000),
        [
            range(0, 20),
            Effect::Broadcast { edits },
            Effect::EvaluateRetention,
            Effect::CancelPersistTimer,
            TIMER,
        ]
    );
    assert_eq!(
        rig.machine.persisted_manifest(),
        &manifest_of(&[(0, 10), (10, 20)], 1)
    );
    assert_eq!(
        rig.machine.manifest(),
        &manifest_of(&[(0, 10), (10, 20), (20, 30)], 1)
    );
    let status = rig.status();
    assert!(!status.persist_in_flight);
    assert_eq!((status.since_persist, status.in_persist_count), (1, 0));
    assert_eq!(status.last_persist_ts, TimestampMs(5_000));
}

#[test]
fn after_a_persist_nothing_is_armed_where_nothing_waits() {
    let mut rig = Rig::empty();
    rig.add(0, 2);
    let effects = rig.persisted(1, 5_000);
    assert_eq!(effects.last(), Some(&Effect::CancelPersistTimer));
    assert_eq!(effects.len(), 4);
}

#[test]
fn after_a_persist_the_next_one_starts_at_once_where_enough_fragments_wait() {
    let mut rig = Rig::empty();
    rig.add(0, 4);
    let effects = rig.persisted(1, 5_000);
    let manifest = manifest_of(&[(0, 10), (10, 20), (20, 30), (30, 40)], 1);
    let edits = vec![appended(20, 30, 2), appended(30, 40, 3)];
    assert_eq!(effects.last(), Some(&start_persist(&manifest, 1, edits)));
    assert_eq!(effects.len(), 5);
}

#[test]
fn a_tick_persists_once_the_interval_is_over() {
    let mut rig = Rig::empty();
    rig.add(0, 1);
    assert_eq!(rig.tick(2_999), []);
    let edits = vec![appended(0, 10, 0)];
    assert_eq!(
        rig.tick(3_000),
        [start_persist(&manifest_of(&[(0, 10)], 0), 0, edits)]
    );
    assert_eq!(rig.tick(9_000), []);
}

#[test]
fn the_interval_counts_from_the_last_success() {
    let mut rig = Rig::empty();
    rig.add(0, 2);
    rig.persisted(1, 5_000);
    rig.add(2, 3);
    assert_eq!(rig.tick(6_999), []);
    assert_eq!(rig.tick(7_000).len(), 1);
}

#[test]
fn a_tick_without_edits_does_nothing() {
    let mut rig = Rig::empty();
    rig.cut(0, 10);
    assert_eq!(rig.tick(99_000), []);
}

#[test]
fn a_clock_that_is_set_back_does_not_hold_persists_up() {
    let mut rig = Rig::new(Manifest::default(), OPTIONS);
    rig.add(0, 2);
    rig.persisted(1, 1_000_000);
    rig.add(2, 3);
    assert_eq!(rig.tick(10_000), []);
    assert_eq!(rig.tick(12_000).len(), 1);
}

#[test]
fn a_result_without_a_persist_in_flight_changes_nothing() {
    let mut rig = Rig::resumed();
    rig.add(5, 6);
    assert_eq!(rig.persisted(99, 5_000), []);
    assert_eq!(rig.on(Event::PersistFailed(PersistError::Other)), []);
    assert_eq!(rig.machine.persisted_manifest().revision, Revision(7));
    assert_eq!(rig.status().persist_failures, 0);
}

#[test]
fn a_conflict_reinitializes_and_nothing_else() {
    let mut rig = Rig::resumed();
    rig.add(5, 7);
    rig.add(7, 8);
    assert_eq!(
        rig.on(Event::PersistFailed(PersistError::Conflict)),
        [Effect::Reinitialize]
    );
}

#[test]
fn missing_metadata_stops_where_there_was_some_before() {
    let mut rig = Rig::resumed();
    rig.add(5, 7);
    assert_eq!(
        rig.on(Event::PersistFailed(PersistError::NotFound)),
        [Effect::Stop]
    );
}

#[test]
fn missing_metadata_reinitializes_where_there_was_none_before() {
    let mut rig = Rig::empty();
    rig.add(0, 2);
    assert_eq!(
        rig.on(Event::PersistFailed(PersistError::NotFound)),
        [Effect::Reinitialize]
    );
    let mut rig = Rig::empty();
    rig.add(0, 2);
    rig.persisted(1, 5_000);
    rig.add(2, 4);
    assert_eq!(
        rig.on(Event::PersistFailed(PersistError::NotFound)),
        [Effect::Stop]
    );
}

#[test]
fn the_first_failure_persists_a_fresh_snapshot_at_once() {
    let mut rig = Rig::empty();
    rig.add(0, 2);
    rig.add(2, 3);
    let manifest = manifest_of(&[(0, 10), (10, 20), (20, 30)], 0);
    let edits = vec![appended(0, 10, 0), appended(10, 20, 1), appended(20, 30, 2)];
    assert_eq!(
        rig.on(Event::PersistFailed(PersistError::Other)),
        [start_persist(&manifest, 0, edits.clone())]
    );
    let status = rig.status();
    assert_eq!((status.since_persist, status.in_persist_count), (0, 3));
    let effects = rig.persisted(1, 5_000);
    assert_eq!(effects[..2], [range(0, 30), Effect::Broadcast { edits }]);
}

#[test]
fn later_failures_wait_for_the_timer_until_a_success() {
    let mut rig = Rig::empty();
    rig.add(0, 2);
    rig.on(Event::PersistFailed(PersistError::Other));
    for _ in 0..3 {
        assert_eq!(rig.on(Event::PersistFailed(PersistError::Other)), [TIMER]);
        assert_eq!(rig.status().since_persist, 2);
        assert_eq!(rig.tick(99_000).len(), 1);
    }
    rig.persisted(1, 99_000);
    rig.add(2, 4);
    assert!(matches!(
        rig.on(Event::PersistFailed(PersistError::Other))[..],
        [Effect::StartPersist { .. }]
    ));
}

#[test]
fn a_failure_while_a_group_or_a_retention_is_in_flight_waits_for_the_timer() {
    let mut rig = Rig::empty();
    rig.add(0, 2);
    rig.on(Event::RetentionStarted);
    assert_eq!(rig.on(Event::PersistFailed(PersistError::Other)), [TIMER]);

    let mut rig = Rig::with(Options {
        rebalance_threshold: 3,
        ..OPTIONS
    });
    rig.add(0, 3);
    assert!(rig.machine.rebalance_in_flight());
    assert_eq!(rig.on(Event::PersistFailed(PersistError::Other)), [TIMER]);
}

#[test]
fn older_states_stay_usable() {
    let mut rig = Rig::empty();
    rig.cut(0, 10);
    let before = rig.machine.clone();
    rig.stored(0);
    rig.add(1, 2);
    assert_eq!(before.manifest(), &Manifest::default());
    assert_eq!(before.status().transfers_in_flight, 1);
    let mut other = Rig { machine: before };
    assert_eq!(
        other.on(Event::TransferComplete {
            id: TransferId(0),
            uid: Uid(5)
        }),
        [TIMER]
    );
    assert_eq!(
        other
            .machine
            .manifest()
            .entries
            .front()
            .map(|entry| entry.uid),
        Some(Uid(5))
    );
}

#[test]
fn a_waiter_for_what_is_persisted_is_answered_at_once() {
    let mut rig = Rig::resumed();
    assert_eq!(
        rig.waits(50, "a"),
        [Effect::ReplyWaiters { waiters: vec!["a"] }]
    );
    assert_eq!(
        rig.waits(0, "b"),
        [Effect::ReplyWaiters { waiters: vec!["b"] }]
    );
    assert_eq!(rig.status().waiters, 0);
}

/// INV-5: waiters go by the persisted manifest, not by the speculative one.
#[test]
fn a_waiter_is_answered_after_everything_else_is_published() {
    let mut rig = Rig::empty();
    rig.waits(30, "late");
    rig.waits(20, "b");
    rig.waits(1, "c");
    rig.add(0, 2);
    assert_eq!(rig.waits(20, "d"), []);
    rig.add(2, 3);
    let effects = rig.persisted(1, 5_000);
    assert_eq!(
        effects[2..],
        [
            Effect::EvaluateRetention,
            Effect::CancelPersistTimer,
            Effect::ReplyWaiters {
                waiters: vec!["b", "c", "d"]
            },
            TIMER,
        ]
    );
    assert_eq!(rig.status().waiters, 1);
    rig.tick(9_000);
    let effects = rig.persisted(2, 9_000);
    assert_eq!(
        effects.last(),
        Some(&Effect::ReplyWaiters {
            waiters: vec!["late"]
        })
    );
}
