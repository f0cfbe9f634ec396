//! Dropping the oldest entries.

use std::sync::Arc;

use stream_s3_core::error::TransferError;
use stream_s3_core::manifest::{Edit, EntryKind, Manifest, new_edit};
use stream_s3_core::replica_reader::{Effect, Event, Options, Refused, RetentionError};
use stream_s3_core::units::{Offset, Revision, TimestampMs, Uid};

use crate::rig::*;
use crate::support::{altered, group_entry, manifest_of, tens};

/// Drops the `count` oldest fragments of ten records of a manifest that begins at 0.
fn dropping(manifest: &Manifest, count: u64) -> Edit {
    let first = manifest.entries.get(usize::try_from(count).unwrap());
    Edit {
        first_offset: Offset(count * 10),
        first_timestamp: first.map_or(TimestampMs::NONE, |entry| entry.first_timestamp),
        first_last_timestamp: first.map_or(TimestampMs::NONE, |entry| entry.last_timestamp),
        size: -i128::from(count * 1_000),
        len: count * 34,
        ..new_edit(manifest)
    }
}

/// INV-8.
#[test]
fn no_persist_and_no_group_starts_while_a_retention_runs() {
    let fragments = [(0, 10), (10, 20)];
    let options = Options {
        persist_threshold: 1,
        rebalance_threshold: 3,
        ..OPTIONS
    };
    let mut rig = Rig::new(manifest_of(&fragments, 7), options);
    rig.on(Event::RetentionStarted);
    assert!(rig.status().retention_in_flight);
    assert_eq!(rig.add(2, 3), [TIMER]);
    assert_eq!(rig.tick(99_000), []);
    assert_eq!(
        rig.on(Event::RetentionFailed),
        [upload(EntryKind::Group, tens(0, 3), 0), TIMER]
    );
    assert!(!rig.status().retention_in_flight);
}

#[test]
fn a_retention_that_failed_arms_the_timer_only_where_edits_wait_and_persists_nothing() {
    let mut rig = Rig::resumed();
    rig.on(Event::RetentionStarted);
    assert_eq!(rig.on(Event::RetentionFailed), []);
    rig.on(Event::RetentionStarted);
    assert_eq!(rig.add(5, 8), [TIMER]);
    assert_eq!(rig.on(Event::RetentionFailed), [TIMER]);
}

#[test]
fn a_retentions_edit_waits_for_the_next_persist() {
    let mut rig = Rig::resumed();
    let edit = dropping(rig.machine.persisted_manifest(), 2);
    rig.on(Event::RetentionStarted);
    assert_eq!(rig.on(Event::RetentionComplete(edit.clone())), [TIMER]);
    assert_eq!(
        rig.machine.manifest(),
        &manifest_of(&[(20, 30), (30, 40), (40, 50)], 7)
    );
    assert_eq!(rig.machine.persisted_manifest().first_offset, Offset(0));
    assert_eq!(rig.status().since_persist, 0);
    let effects = rig.tick(9_000);
    assert_eq!(
        effects,
        [start_persist(
            &manifest_of(&[(20, 30), (30, 40), (40, 50)], 7),
            7,
            vec![edit]
        )]
    );
    assert_eq!(rig.persisted(8, 9_000)[0], range(20, 50));
}

#[test]
fn a_retention_that_ends_lets_a_due_persist_start() {
    let mut rig = Rig::resumed();
    rig.on(Event::RetentionStarted);
    rig.add(5, 8);
    let edit = dropping(rig.machine.persisted_manifest(), 1);
    assert!(matches!(
        rig.on(Event::RetentionComplete(edit))[..],
        [Effect::StartPersist { ref edits, .. }] if edits.len() == 4
    ));
}

#[test]
fn a_retention_is_accepted_unannounced() {
    let mut rig = Rig::resumed();
    let edit = dropping(rig.machine.persisted_manifest(), 2);
    assert_eq!(rig.on(Event::RetentionComplete(edit)), [TIMER]);
    assert_eq!(rig.machine.manifest().first_offset, Offset(20));
}

#[test]
fn a_retention_that_empties_the_persisted_manifest_keeps_what_was_appended_since() {
    let mut rig = Rig::resumed();
    rig.on(Event::RetentionStarted);
    rig.add(5, 6);
    let edit = dropping(rig.machine.persisted_manifest(), 5);
    assert_eq!(edit.first_timestamp, TimestampMs::NONE);
    rig.on(Event::RetentionComplete(edit));
    assert_eq!(rig.machine.manifest(), &manifest_of(&[(50, 60)], 7));
}

#[test]
fn a_tier_that_retention_has_emptied_goes_on_at_its_end() {
    let mut rig = Rig::resumed();
    let edit = dropping(rig.machine.persisted_manifest(), 5);
    rig.on(Event::RetentionComplete(edit));
    assert_eq!(
        rig.machine.manifest(),
        &Manifest::empty_at(Offset(50), Revision(7))
    );
    rig.tick(9_000);
    assert_eq!(rig.persisted(8, 9_000)[0], range(50, 50));
    rig.add(5, 6);
    assert_eq!(rig.machine.manifest(), &manifest_of(&[(50, 60)], 8));
}

#[test]
fn a_retention_that_comes_twice_drops_once() {
    let mut rig = Rig::resumed();
    let edit = dropping(rig.machine.persisted_manifest(), 2);
    rig.on(Event::RetentionComplete(edit.clone()));
    let after = rig.machine.manifest().clone();
    assert_eq!(rig.on(Event::RetentionComplete(edit)), [TIMER]);
    assert_eq!(rig.machine.manifest(), &after);
    assert_eq!(rig.machine.unpersisted_edits().count(), 1);
}

/// A persist in flight keeps the first retention from being seen by the second one.
#[test]
fn a_second_retention_of_the_same_persisted_manifest_drops_only_what_is_left() {
    for announced in [true, false] {
        let mut rig = Rig::resumed();
        let (two, three) = {
            let persisted = rig.machine.persisted_manifest();
            (dropping(persisted, 2), dropping(persisted, 3))
        };
        rig.on(Event::RetentionComplete(two));
        if announced {
            rig.on(Event::RetentionStarted);
        }
        rig.on(Event::RetentionComplete(three));
        assert_eq!(
            rig.machine.manifest(),
            &manifest_of(&[(30, 40), (40, 50)], 7)
        );
    }
}

#[test]
fn an_unannounced_retention_of_the_speculative_manifest_fits_too() {
    let mut rig = Rig::resumed();
    rig.on(Event::RetentionComplete(dropping(
        rig.machine.persisted_manifest(),
        2,
    )));
    let one_more = Edit {
        first_offset: Offset(30),
        first_timestamp: TimestampMs(300),
        first_last_timestamp: TimestampMs(390),
        size: -1_000,
        len: 34,
        ..new_edit(rig.machine.manifest())
    };
    rig.on(Event::RetentionComplete(one_more));
    assert_eq!(
        rig.machine.manifest(),
        &manifest_of(&[(30, 40), (40, 50)], 7)
    );
}

#[test]
fn a_retention_inside_a_group_moves_only_the_manifests_beginning() {
    let options = Options {
        rebalance_threshold: 3,
        persist_threshold: 1,
        ..OPTIONS
    };
    let mut rig = Rig::with(options);
    rig.add(0, 3);
    rig.on(Event::GroupUploadComplete(Uid(9)));
    rig.persisted(1, 5_000);
    rig.tick(99_000);
    rig.persisted(2, 99_000);
    let inside = Edit {
        first_offset: Offset(10),
        first_timestamp: TimestampMs(100),
        first_last_timestamp: TimestampMs(190),
        size: -1_000,
        ..new_edit(rig.machine.persisted_manifest())
    };
    rig.on(Event::RetentionStarted);
    assert_eq!(rig.on(Event::RetentionComplete(inside.clone())), [TIMER]);
    let manifest = rig.machine.manifest();
    assert_eq!(
        (manifest.first_offset, manifest.total_size),
        (Offset(10), 2_000)
    );
    assert_eq!(
        (manifest.entries.len(), manifest.first_last_timestamp),
        (1, TimestampMs(190))
    );
    // Evaluated once more before the first one is persisted: only the difference counts.
    let further = Edit {
        first_offset: Offset(20),
        size: -2_000,
        ..inside
    };
    rig.on(Event::RetentionStarted);
    rig.on(Event::RetentionComplete(further));
    assert_eq!(rig.machine.manifest().total_size, 1_000);
}

/// A retention is meant to be announced. Where it is not, fragments that came since may have moved into a group.
#[test]
fn a_retention_that_comes_late_finds_the_oldest_fragment_inside_a_group() {
    let options = Options {
        rebalance_threshold: 3,
        ..GROUPING
    };
    for (floor, oldest) in [(50, [500, 590]), (60, [-1, -1])] {
        let mut rig = Rig::new(manifest_of(&[(40, 50)], 7), options);
        rig.cut(50, 60);
        rig.stored(50);
        rig.cut(60, 70);
        rig.stored(60);
        rig.on(Event::GroupUploadComplete(Uid(9)));
        let persisted = rig.machine.persisted_manifest();
        let edit = Edit {
            first_offset: Offset(floor),
            first_timestamp: TimestampMs::NONE,
            first_last_timestamp: TimestampMs::NONE,
            size: -1_000,
            len: 34,
            ..new_edit(persisted)
        };
        rig.on(Event::RetentionComplete(edit));
        let manifest = rig.machine.manifest();
        assert_eq!(
            (manifest.first_offset, manifest.entries.len()),
            (Offset(floor), 1)
        );
        let found = [manifest.first_timestamp, manifest.first_last_timestamp];
        assert_eq!(found, oldest.map(TimestampMs));
    }
}

/// It comes from whoever has seen the fragments; only what was appended since cannot be known there.
#[test]
fn a_retentions_own_timestamps_are_taken() {
    let mut rig = Rig::resumed();
    let edit = Edit {
        first_timestamp: TimestampMs(7),
        next_offset: Some(Offset(50)),
        ..dropping(rig.machine.persisted_manifest(), 2)
    };
    rig.on(Event::RetentionComplete(edit.clone()));
    assert_eq!(rig.machine.manifest().first_timestamp, TimestampMs(7));
    assert_eq!(rig.machine.unpersisted_edits().collect::<Vec<_>>(), [&edit]);
}

#[test]
fn a_retention_never_moves_the_manifests_end() {
    let mut rig = Rig::resumed();
    rig.on(Event::RetentionStarted);
    rig.add(5, 6);
    let edit = Edit {
        next_offset: Some(Offset(50)),
        ..dropping(rig.machine.persisted_manifest(), 2)
    };
    rig.on(Event::RetentionComplete(edit));
    assert_eq!(rig.machine.manifest().next_offset, Offset(60));
}

#[test]
fn a_retention_that_would_damage_the_manifest_is_refused() {
    let mut rig = Rig::resumed();
    let good = dropping(rig.machine.persisted_manifest(), 2);
    let mut refuse = |edit: Edit| match rig.refused(Event::RetentionComplete(edit)) {
        Refused::Retention(error) => error,
        Refused::Fragment(error) => panic!("{error}"),
    };
    assert_eq!(
        refuse(Edit {
            pos: 34,
            ..good.clone()
        }),
        RetentionError::NotAPrefix
    );
    let adding = Edit {
        entries: Arc::from(tens(0, 1)),
        ..good.clone()
    };
    assert_eq!(refuse(adding), RetentionError::NotAPrefix);
    assert_eq!(
        refuse(Edit {
            size: 1,
            ..good.clone()
        }),
        RetentionError::NotAPrefix
    );
    let (first_offset, next_offset) = (Offset(51), Offset(50));
    assert_eq!(
        refuse(Edit {
            first_offset,
            ..good.clone()
        }),
        RetentionError::BeyondEnd {
            first_offset,
            next_offset
        }
    );
    let (first_offset, fragment) = (Offset(25), Offset(20));
    assert_eq!(
        refuse(Edit {
            first_offset,
            ..good.clone()
        }),
        RetentionError::InsideFragment {
            first_offset,
            fragment
        }
    );
    for size in [-1_999, -2_001, 0, i128::MIN] {
        let claimed = size.saturating_neg();
        assert_eq!(
            refuse(Edit {
                size,
                ..good.clone()
            }),
            RetentionError::Size {
                actual: 2_000,
                claimed
            }
        );
    }
}

#[test]
fn a_retention_in_front_of_a_moving_group_moves_the_group_along() {
    let group = group_entry(EntryKind::Group, &tens(0, 3), 9);
    let mut manifest = altered(&manifest_of(&[(30, 40), (40, 50)], 7), |entries| {
        entries.insert(0, group)
    });
    (manifest.first_offset, manifest.total_size) = (Offset(0), 5_000);
    let mut rig = Rig::new(manifest, GROUPING);
    assert_eq!(
        rig.add(5, 6),
        [upload(EntryKind::Group, tens(3, 6), 1), TIMER]
    );
    let edit = Edit {
        first_offset: Offset(30),
        size: -3_000,
        len: 34,
        ..new_edit(rig.machine.persisted_manifest())
    };
    assert_eq!(rig.on(Event::RetentionComplete(edit)), [TIMER]);
    assert_eq!(
        rig.on(Event::GroupUploadFailed(TransferError::Timeout)),
        [upload(EntryKind::Group, tens(3, 6), 0)]
    );
    rig.on(Event::GroupUploadComplete(Uid(4)));
    let expected = [group_entry(EntryKind::Group, &tens(3, 6), 4)];
    assert_eq!(
        rig.machine
            .manifest()
            .entries
            .iter()
            .copied()
            .collect::<Vec<_>>(),
        expected
    );
    assert_eq!(rig.machine.manifest().first_offset, Offset(30));
}

#[test]
fn a_retention_of_entries_that_move_into_a_group_is_refused() {
    let fragments: Vec<_> = (0..3)
        .map(|number| (number * 10, number * 10 + 10))
        .collect();
    let mut rig = Rig::new(
        manifest_of(&fragments, 1),
        Options {
            rebalance_threshold: 4,
            ..GROUPING
        },
    );
    rig.add(3, 4);
    assert!(rig.machine.rebalance_in_flight());
    let edit = dropping(rig.machine.persisted_manifest(), 1);
    let expected = Refused::Retention(RetentionError::OverlapsRebalance);
    assert_eq!(rig.refused(Event::RetentionComplete(edit)), expected);
    assert_eq!(rig.on(Event::GroupUploadComplete(Uid(4))), [TIMER]);
}
