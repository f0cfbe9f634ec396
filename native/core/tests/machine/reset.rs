//! Beginning anew; settings; status.

use stream_s3_core::invariants;
use stream_s3_core::manifest::{Edit, Manifest, apply_edit};
use stream_s3_core::replica_reader::{
    Effect, Event, Machine, Options, OptionsError, PersistError, ResetPersist, Status,
};
use stream_s3_core::units::{Offset, Revision, TimestampMs};

use crate::rig::*;
use crate::support::{entry, manifest_of};

fn reset(at: u64, when: ResetPersist) -> (Rig, Effects) {
    let old = manifest_of(&[(0, 10), (10, 20)], 7);
    let (machine, effects) =
        Machine::init_reset(old, Offset(at), when, OPTIONS, TimestampMs(1_000)).unwrap();
    invariants::machine(&machine).unwrap();
    (Rig { machine }, effects)
}

#[test]
fn a_tier_of_another_timeline_is_emptied_at_once_and_published_only_then() {
    let (mut rig, effects) = reset(5, ResetPersist::AtOnce);
    let empty = Manifest::empty_at(Offset(5), Revision(7));
    let edit = Edit::reset(&manifest_of(&[(0, 10), (10, 20)], 7), Offset(5));
    assert_eq!(effects, [start_persist(&empty, 7, vec![edit.clone()])]);
    assert_eq!(rig.machine.persisted_manifest().next_offset, Offset(20));
    assert_eq!(
        rig.waits(12, "a"),
        [],
        "the old tier does not answer for the new one"
    );
    rig.waits(5, "b");
    assert_eq!(
        rig.persisted(8, 5_000),
        [
            range(5, 5),
            Effect::Broadcast { edits: vec![edit] },
            Effect::EvaluateRetention,
            Effect::CancelPersistTimer,
            Effect::ReplyWaiters { waiters: vec!["b"] },
        ]
    );
    assert_eq!(
        rig.waits(5, "c"),
        [Effect::ReplyWaiters { waiters: vec!["c"] }]
    );
}

#[test]
fn a_reset_that_fails_is_tried_again_like_any_persist() {
    let (mut rig, first) = reset(5, ResetPersist::AtOnce);
    assert_eq!(rig.on(Event::PersistFailed(PersistError::Other)), first);
    assert_eq!(rig.on(Event::PersistFailed(PersistError::Other)), [TIMER]);
    assert_eq!(rig.tick(99_000), first);
}

#[test]
fn a_tier_with_a_gap_behind_it_stays_published_until_the_first_fragment_is_stored() {
    let (mut rig, effects) = reset(50, ResetPersist::WithFirstFragment);
    assert_eq!(effects, []);
    assert_eq!(rig.tick(99_000), []);
    assert_eq!(rig.cut(50, 60), [submit(50)]);
    assert_eq!(rig.tick(99_000), []);
    assert_eq!(rig.stored(50), [TIMER]);
    assert_eq!(rig.machine.persisted_manifest().next_offset, Offset(20));
    let old = manifest_of(&[(0, 10), (10, 20)], 7);
    let mut edits = vec![Edit::reset(&old, Offset(50))];
    edits.push(Edit::append(
        &Manifest::empty_at(Offset(50), Revision(7)),
        entry(50, 60),
        Offset(60),
    ));
    assert_eq!(
        rig.tick(99_000),
        [start_persist(
            &manifest_of(&[(50, 60)], 7),
            7,
            edits.clone()
        )]
    );
    let effects = rig.persisted(8, 99_000);
    assert_eq!(
        effects[..2],
        [
            range(50, 60),
            Effect::Broadcast {
                edits: edits.clone()
            }
        ]
    );
    let replica = edits
        .iter()
        .fold(old, |manifest, edit| apply_edit(edit, &manifest).unwrap());
    assert_eq!(replica.entries, rig.machine.persisted_manifest().entries);
    assert_eq!(
        replica.total_size,
        rig.machine.persisted_manifest().total_size
    );
}

#[test]
fn settings_that_cannot_work_are_refused() {
    let init = |options| Machine::<()>::init(Manifest::default(), options, TimestampMs(0)).err();
    let no_persist = Options {
        persist_threshold: 0,
        ..OPTIONS
    };
    assert_eq!(init(no_persist), Some(OptionsError::PersistThreshold));
    let no_end = Options {
        rebalance_threshold: 1,
        ..OPTIONS
    };
    assert_eq!(init(no_end), Some(OptionsError::RebalanceThreshold));
    assert_eq!(init(OPTIONS), None);
}

#[test]
fn the_status_of_a_new_machine_is_that_of_its_manifest() {
    let rig = Rig::resumed();
    assert_eq!(
        rig.status(),
        Status {
            manifest_first_offset: Offset(0),
            manifest_next_offset: Offset(50),
            manifest_total_size: 5_000,
            persisted_next_offset: Offset(50),
            transfers_in_flight: 0,
            transfers_pending_order: 0,
            bytes_in_transfer: 0,
            since_persist: 0,
            in_persist_count: 0,
            bytes_in_persist: 0,
            edits_waiting: 0,
            persist_in_flight: false,
            persist_failures: 0,
            last_persist_ts: TimestampMs(1_000),
            rebalance_in_flight: false,
            retention_in_flight: false,
            waiters: 0,
        }
    );
}
