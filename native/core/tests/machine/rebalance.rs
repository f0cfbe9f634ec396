//! Runs of entries that move into groups.

use stream_s3_core::error::TransferError;
use stream_s3_core::manifest::EntryKind;
use stream_s3_core::replica_reader::{Effect, Event, Options};
use stream_s3_core::units::{Offset, TimestampMs, Uid};

use crate::rig::*;
use crate::support::{group_entry, manifest_of, tens};

#[test]
fn a_run_of_fragments_becomes_a_group() {
    let mut rig = Rig::with(GROUPING);
    assert_eq!(rig.add(0, 2), [TIMER]);
    assert_eq!(
        rig.add(2, 3),
        [upload(EntryKind::Group, tens(0, 3), 0), TIMER]
    );
    assert!(rig.machine.rebalance_in_flight());
    assert_eq!(rig.on(Event::GroupUploadComplete(Uid(9))), [TIMER]);
    let group = group_entry(EntryKind::Group, &tens(0, 3), 9);
    let manifest = rig.machine.manifest();
    assert_eq!(
        manifest.entries.iter().copied().collect::<Vec<_>>(),
        [group]
    );
    assert_eq!(
        (manifest.first_offset, manifest.next_offset),
        (Offset(0), Offset(30))
    );
    assert_eq!(
        (manifest.total_size, manifest.first_last_timestamp),
        (3_000, TimestampMs(90))
    );
    let edit = rig.machine.unpersisted_edits().last().unwrap();
    assert_eq!(
        (edit.pos, edit.len, edit.size, edit.next_offset),
        (0, 102, 0, None)
    );
}

#[test]
fn fragments_that_come_while_a_group_is_stored_stay_behind_it() {
    let mut rig = Rig::with(GROUPING);
    rig.add(0, 3);
    assert_eq!(rig.add(3, 5), [TIMER]);
    rig.on(Event::GroupUploadComplete(Uid(9)));
    let mut expected = vec![group_entry(EntryKind::Group, &tens(0, 3), 9)];
    expected.extend(tens(3, 5));
    assert_eq!(
        rig.machine
            .manifest()
            .entries
            .iter()
            .copied()
            .collect::<Vec<_>>(),
        expected
    );
}

#[test]
fn groups_become_kilo_groups_and_those_mega_groups_and_there_it_ends() {
    let options = Options {
        rebalance_threshold: 2,
        ..GROUPING
    };
    let mut rig = Rig::with(options);
    let mut kinds = Vec::new();
    for number in 0..32 {
        let mut effects = rig.add(number, number + 1);
        while let Some(Effect::UploadGroup { kind, .. }) = effects.first() {
            kinds.push(kind.code());
            effects = rig.on(Event::GroupUploadComplete(Uid(
                u32::try_from(kinds.len()).unwrap()
            )));
        }
    }
    let count = |code| kinds.iter().filter(|kind| **kind == code).count();
    assert_eq!((count(1), count(2), count(3)), (16, 8, 4));
    let entries = &rig.machine.manifest().entries;
    assert!(
        entries
            .iter()
            .all(|entry| entry.kind == EntryKind::MegaGroup)
    );
    assert_eq!(entries.len(), 4);
    assert_eq!(rig.machine.manifest().total_size, 32_000);
}

#[test]
fn the_oldest_run_goes_first_and_only_its_first_entries() {
    let fragments: Vec<_> = (0..7)
        .map(|number| (number * 10, number * 10 + 10))
        .collect();
    let mut rig = Rig::new(manifest_of(&fragments, 1), GROUPING);
    let effects = rig.add(7, 8);
    assert_eq!(effects, [upload(EntryKind::Group, tens(0, 3), 0), TIMER]);
    let effects = rig.on(Event::GroupUploadComplete(Uid(1)));
    assert_eq!(effects, [upload(EntryKind::Group, tens(3, 6), 1), TIMER]);
    assert_eq!(rig.on(Event::GroupUploadComplete(Uid(2))), [TIMER]);
    let kinds: Vec<_> = rig
        .machine
        .manifest()
        .entries
        .iter()
        .map(|e| e.kind.code())
        .collect();
    assert_eq!(kinds, [1, 1, 0, 0]);
}

/// INV-8.
#[test]
fn no_persist_starts_while_a_group_is_stored() {
    let mut rig = Rig::with(Options {
        persist_threshold: 3,
        ..GROUPING
    });
    assert_eq!(
        rig.add(0, 3),
        [upload(EntryKind::Group, tens(0, 3), 0), TIMER]
    );
    assert_eq!(rig.tick(99_000), []);
    assert_eq!(rig.add(3, 5), [TIMER]);
    assert!(matches!(
        rig.on(Event::GroupUploadComplete(Uid(9)))[..],
        [Effect::StartPersist { .. }]
    ));
}

#[test]
fn a_persist_in_flight_does_not_keep_a_group_from_being_stored() {
    let mut rig = Rig::with(Options {
        persist_threshold: 2,
        ..GROUPING
    });
    rig.add(0, 2);
    assert_eq!(
        rig.add(2, 3),
        [upload(EntryKind::Group, tens(0, 3), 0), TIMER]
    );
    let effects = rig.persisted(1, 5_000);
    assert!(
        !effects.contains(&Effect::EvaluateRetention),
        "its edit would not fit after the group"
    );
    assert_eq!(effects.last(), Some(&TIMER));
}

#[test]
fn retention_is_not_evaluated_until_a_group_is_persisted() {
    let mut rig = Rig::with(Options {
        persist_threshold: 2,
        ..GROUPING
    });
    rig.add(0, 3);
    rig.on(Event::GroupUploadComplete(Uid(9)));
    let effects = rig.persisted(1, 5_000);
    assert!(!effects.contains(&Effect::EvaluateRetention));
    rig.tick(99_000);
    assert!(
        rig.persisted(2, 99_000)
            .contains(&Effect::EvaluateRetention)
    );
}

#[test]
fn a_group_is_stored_again_where_the_failure_may_pass() {
    let mut rig = Rig::with(GROUPING);
    rig.add(0, 3);
    rig.add(3, 4);
    for error in [
        TransferError::Timeout,
        TransferError::Http(503),
        TransferError::Throttled,
    ] {
        assert_eq!(
            rig.on(Event::GroupUploadFailed(error)),
            [upload(EntryKind::Group, tens(0, 3), 0)]
        );
    }
    assert!(rig.machine.rebalance_in_flight());
}

#[test]
fn a_group_that_cannot_be_stored_is_given_up_until_the_next_fragment() {
    let mut rig = Rig::with(Options {
        persist_threshold: 3,
        ..GROUPING
    });
    rig.add(0, 3);
    assert!(matches!(
        rig.on(Event::GroupUploadFailed(TransferError::Http(403)))[..],
        [Effect::StartPersist { .. }]
    ));
    assert!(!rig.machine.rebalance_in_flight());
    assert_eq!(
        rig.add(3, 4),
        [upload(EntryKind::Group, tens(0, 3), 0), TIMER]
    );
}

#[test]
fn giving_a_group_up_arms_the_timer_where_too_few_fragments_wait() {
    let mut rig = Rig::with(GROUPING);
    rig.add(0, 3);
    assert_eq!(
        rig.on(Event::GroupUploadFailed(TransferError::Http(403))),
        [TIMER]
    );
}

#[test]
fn a_group_that_nobody_stores_changes_nothing() {
    let mut rig = Rig::resumed();
    assert_eq!(rig.on(Event::GroupUploadComplete(Uid(9))), []);
    assert_eq!(rig.on(Event::GroupUploadFailed(TransferError::Timeout)), []);
    assert_eq!(rig.machine.manifest(), rig.machine.persisted_manifest());
}
