//! Edits, lookups and retention of manifests, through groups of every kind.

#![allow(clippy::disallowed_methods)]

mod support;

use std::sync::Arc;

use stream_s3_core::invariants;
use stream_s3_core::manifest::{
    Edit, EditError, Entry, EntryKind, FetchFailed, GroupRef, Lookup, Manifest, ObjectRef,
    Retention, RetentionLimits, apply_edit, evaluate_remote_retention, lookup_offset,
    lookup_timestamp, new_edit, new_total, splice_range,
};
use stream_s3_core::units::{Offset, Revision, TimestampMs, Uid};
use support::{Groups, altered, entry, evaluate, grouped, manifest_of, search, tens};

fn offsets(objects: &[ObjectRef]) -> Vec<(u8, u64)> {
    objects
        .iter()
        .map(|object| (object.kind().code(), object.offset().0))
        .collect()
}

// --- Edits -------------------------------------------------------------------------------------------------------------------------

#[test]
fn a_new_edit_changes_nothing() {
    let manifest = manifest_of(&[(0, 10), (10, 20)], 3);
    let edit = new_edit(&manifest);
    assert_eq!(
        (edit.next_offset, edit.size, edit.pos, edit.len),
        (None, 0, 0, 0)
    );
    assert_eq!(apply_edit(&edit, &manifest), Ok(manifest));
}

#[test]
fn an_edit_sets_the_beginning_and_keeps_an_unnamed_end() {
    let manifest = manifest_of(&[(0, 10), (10, 20)], 3);
    let edit = Edit {
        first_offset: Offset(10),
        first_timestamp: TimestampMs(100),
        first_last_timestamp: TimestampMs(190),
        size: -1_000,
        len: 34,
        ..new_edit(&manifest)
    };
    assert_eq!(
        apply_edit(&edit, &manifest),
        Ok(manifest_of(&[(10, 20)], 3))
    );
}

#[test]
fn a_splice_replaces_bytes_anywhere() {
    let manifest = manifest_of(&[(0, 10), (10, 20), (20, 30)], 3);
    let edit = |pos, len, entries: Vec<Entry>| {
        let edit = Edit {
            pos,
            len,
            entries: Arc::from(entries),
            ..new_edit(&manifest)
        };
        let entries = apply_edit(&edit, &manifest).unwrap().entries;
        entries
            .iter()
            .map(|entry| entry.first_offset.0)
            .collect::<Vec<_>>()
    };
    assert_eq!(edit(0, 0, tens(7, 9)), [70, 80, 0, 10, 20]);
    assert_eq!(edit(34, 34, tens(7, 9)), [0, 70, 80, 20]);
    assert_eq!(edit(34, 68, vec![]), [0]);
    assert_eq!(edit(0, 102, vec![]), [] as [u64; 0]);
    assert_eq!(edit(102, 0, tens(7, 8)), [0, 10, 20, 70]);
}

#[test]
fn an_edit_is_refused_for_its_splice_or_a_negative_total_and_nothing_else() {
    let manifest = manifest_of(&[(0, 10), (10, 20)], 3);
    let apply = |edit: Edit| apply_edit(&edit, &manifest);
    let base = new_edit(&manifest);
    for (pos, len) in [(1, 0), (0, 33), (34, 35), (17, 17)] {
        let edit = Edit {
            pos,
            len,
            ..base.clone()
        };
        assert_eq!(apply(edit), Err(EditError::OffGrid { pos, len }));
    }
    for (pos, len) in [(102, 0), (68, 34), (0, 102), (34 * (u64::MAX / 34), 34)] {
        let edit = Edit {
            pos,
            len,
            ..base.clone()
        };
        assert_eq!(
            apply(edit),
            Err(EditError::OutOfBounds { pos, len, have: 68 })
        );
    }
    let negative = Edit {
        size: -2_001,
        ..base.clone()
    };
    let error = EditError::NegativeTotal {
        total: 2_000,
        change: -2_001,
    };
    assert_eq!(apply(negative), Err(error));
    let senseless = Edit {
        first_offset: Offset(99),
        next_offset: Some(Offset(0)),
        entries: Arc::from([entry(0, 10)]),
        pos: 68,
        size: i128::from(u64::MAX),
        ..base
    };
    assert!(!apply(senseless).unwrap().is_well_formed());
}

#[test]
fn a_splice_of_bytes_is_one_of_entries() {
    assert_eq!(splice_range(3, 34, 68), Ok((1, 3)));
    assert_eq!(splice_range(0, 0, 0), Ok((0, 0)));
    assert_eq!(new_total(5, -5), Ok(0));
    assert_eq!(
        new_total(u128::MAX, 1),
        Err(EditError::NegativeTotal {
            total: u128::MAX,
            change: 1
        })
    );
}

#[test]
fn a_manifest_is_well_formed_or_not() {
    let good = manifest_of(&[(0, 10), (10, 20)], 3);
    assert!(good.is_well_formed());
    assert!(Manifest::default().is_well_formed());
    let changed = |change: fn(&mut Manifest)| {
        let mut manifest = good.clone();
        change(&mut manifest);
        manifest.is_well_formed()
    };
    assert!(!altered(&good, |entries| entries.swap(0, 1)).is_well_formed());
    assert!(!changed(|manifest| manifest.first_offset = Offset(1)));
    assert!(!changed(|manifest| manifest.first_offset = Offset(21)));
    assert!(!changed(|manifest| manifest.next_offset = Offset(10)));
    assert!(!altered(&good, |entries| entries[1].size = 1 << 40).is_well_formed());
    assert!(!changed(|manifest| manifest.total_size = 1 << 70));
}

// --- Lookups -----------------------------------------------------------------------------------------------------------------------

#[test]
fn an_offset_is_found_in_the_fragment_that_holds_it() {
    let manifest = manifest_of(&[(10, 20), (20, 30), (30, 40)], 3);
    let groups = Groups::default();
    for (offset, expected) in [
        (9, None),
        (10, Some(10)),
        (19, Some(10)),
        (20, Some(20)),
        (39, Some(30)),
        (40, None),
    ] {
        let (found, _) = search(lookup_offset(&manifest, Offset(offset)), &groups);
        assert_eq!(found, expected.map(Offset), "{offset}");
    }
    assert_eq!(
        lookup_offset(&Manifest::default(), Offset(0)),
        Lookup::NotFound
    );
}

#[test]
fn a_found_fragment_says_what_its_key_is_made_from() {
    let Lookup::Found(fragment) = lookup_offset(&manifest_of(&[(10, 20)], 3), Offset(15)) else {
        panic!("not found");
    };
    assert_eq!(
        (fragment.offset, fragment.uid, fragment.size),
        (Offset(10), Uid(10), 1_000)
    );
}

#[test]
fn every_offset_is_found_through_groups_of_every_kind() {
    let (manifest, groups) = grouped(45, 2);
    let kinds: Vec<_> = manifest
        .entries
        .iter()
        .map(|entry| entry.kind.code())
        .collect();
    assert_eq!(kinds, [3, 3, 3, 3, 3, 2, 0]);
    for offset in 0..450 {
        let (found, fetched) = search(lookup_offset(&manifest, Offset(offset)), &groups);
        assert_eq!(found, Some(Offset(offset / 10 * 10)));
        assert!(fetched.len() <= 3);
    }
}

#[test]
fn a_timestamp_finds_the_oldest_fragment_that_ends_at_or_after_it() {
    let manifest = manifest_of(&[(10, 20), (20, 30), (30, 40)], 3);
    let groups = Groups::default();
    let cases = [
        (i64::MIN, Some(10)),
        (190, Some(10)),
        (191, Some(20)),
        (390, Some(30)),
        (391, None),
    ];
    for (timestamp, expected) in cases {
        let (found, _) = search(lookup_timestamp(&manifest, TimestampMs(timestamp)), &groups);
        assert_eq!(found, expected.map(Offset), "{timestamp}");
    }
    assert_eq!(
        lookup_timestamp(&Manifest::default(), TimestampMs(0)),
        Lookup::NotFound
    );
}

#[test]
fn timestamps_that_go_back_do_not_hide_the_oldest_fragment() {
    let manifest = manifest_of(&[(10, 20), (20, 30), (30, 40)], 3);
    let manifest = altered(&manifest, |entries| {
        entries[0].last_timestamp = TimestampMs(1_000)
    });
    let (found, _) = search(
        lookup_timestamp(&manifest, TimestampMs(300)),
        &Groups::default(),
    );
    assert_eq!(found, Some(Offset(10)));
}

#[test]
fn every_timestamp_is_found_through_groups_of_every_kind() {
    let (manifest, groups) = grouped(45, 2);
    let leaves = groups.leaves(&manifest.entries);
    for timestamp in (0..4_500).step_by(7).map(TimestampMs) {
        let expected = leaves.iter().find(|leaf| leaf.last_timestamp >= timestamp);
        let (found, _) = search(lookup_timestamp(&manifest, timestamp), &groups);
        assert_eq!(found, expected.map(|leaf| leaf.first_offset));
    }
}

#[test]
fn fragments_that_retention_has_dropped_inside_a_group_are_not_found() {
    let (mut manifest, groups) = grouped(8, 2);
    manifest.first_offset = Offset(30);
    let (found, _) = search(lookup_timestamp(&manifest, TimestampMs(0)), &groups);
    assert_eq!(found, Some(Offset(30)));
    assert_eq!(lookup_offset(&manifest, Offset(29)), Lookup::NotFound);
}

#[test]
fn entries_that_are_not_the_groups_are_an_error_and_no_endless_search() {
    let (manifest, groups) = grouped(8, 2);
    let Lookup::Fetch(group, continuation) = lookup_offset(&manifest, Offset(15)) else {
        panic!("no group");
    };
    assert_eq!(continuation.group(), group);
    assert!(continuation.resume(&[]).is_err());
    assert!(
        continuation.resume(&tens(1, 2)).is_err(),
        "begins elsewhere"
    );
    let itself: Vec<_> = manifest.entries.iter().copied().collect();
    assert!(
        continuation.resume(&itself).is_err(),
        "not of a lower level"
    );
    let Lookup::Fetch(_, by_time) = lookup_timestamp(&manifest, TimestampMs(700)) else {
        panic!("no group");
    };
    assert!(
        by_time.resume(&[entry(0, 10)]).is_err(),
        "none is young enough"
    );
    assert!(
        continuation.resume(&groups.0[&group]).is_ok(),
        "and may be resumed again"
    );
}

// --- Retention ---------------------------------------------------------------------------------------------------------------------

fn bytes(max: u128) -> RetentionLimits {
    RetentionLimits {
        max_bytes: Some(max),
        max_age_ms: None,
    }
}

fn age(max: u64) -> RetentionLimits {
    RetentionLimits {
        max_bytes: None,
        max_age_ms: Some(max),
    }
}

/// The manifest after an evaluation at time 10,000, and what was dropped.
fn retained(
    manifest: &Manifest,
    groups: &Groups,
    limits: RetentionLimits,
    missing: &[GroupRef],
) -> (Manifest, Vec<(u8, u64)>) {
    let found = evaluate_remote_retention(manifest, limits, TimestampMs(10_000));
    match evaluate(found, groups, missing) {
        Retention::Unchanged => (manifest.clone(), vec![]),
        Retention::Drop { edit, objects } => {
            let after = apply_edit(&edit, manifest).unwrap();
            invariants::retention(manifest, &after, &objects).unwrap();
            invariants::root_coverage(&after).unwrap();
            (after, offsets(&objects))
        }
        Retention::Fetch(..) => unreachable!("evaluated to the end"),
    }
}

#[test]
fn nothing_goes_without_limits_or_within_them() {
    let manifest = manifest_of(&[(0, 10), (10, 20)], 3);
    for limits in [
        RetentionLimits::default(),
        bytes(2_000),
        age(9_910),
        bytes(u128::MAX),
    ] {
        let found = evaluate_remote_retention(&manifest, limits, TimestampMs(10_000));
        assert_eq!(found, Retention::Unchanged);
    }
    let found = evaluate_remote_retention(&Manifest::default(), bytes(0), TimestampMs(0));
    assert_eq!(found, Retention::Unchanged);
}

#[test]
fn the_oldest_go_while_there_are_too_many_bytes() {
    let manifest = manifest_of(&[(0, 10), (10, 20), (20, 30)], 3);
    for (max, kept) in [(2_999, 10), (2_000, 10), (1_999, 20), (1_000, 20)] {
        let (after, dropped) = retained(&manifest, &Groups::default(), bytes(max), &[]);
        assert_eq!(after.first_offset, Offset(kept), "{max}");
        assert_eq!(dropped.len() as u64, kept / 10);
    }
    let (after, dropped) = retained(&manifest, &Groups::default(), bytes(2_000), &[]);
    assert_eq!(after, manifest_of(&[(10, 20), (20, 30)], 3));
    assert_eq!(dropped, [(0, 0)]);
}

#[test]
fn the_oldest_go_while_their_last_record_is_too_old() {
    let manifest = manifest_of(&[(0, 10), (10, 20), (20, 30)], 3);
    // They end at 90, 190 and 290.
    for (max, kept) in [
        (9_910, 0),
        (9_909, 10),
        (9_810, 10),
        (9_809, 20),
        (9_710, 20),
    ] {
        let (after, _) = retained(&manifest, &Groups::default(), age(max), &[]);
        assert_eq!(after.first_offset, Offset(kept), "{max}");
    }
}

#[test]
fn a_fragment_goes_where_either_limit_says_so() {
    let manifest = manifest_of(&[(0, 10), (10, 20), (20, 30)], 3);
    let limits = |max, age| RetentionLimits {
        max_bytes: Some(max),
        max_age_ms: Some(age),
    };
    let first = |limits| {
        retained(&manifest, &Groups::default(), limits, &[])
            .0
            .first_offset
    };
    assert_eq!(first(limits(2_000, 9_809)), Offset(20));
    assert_eq!(first(limits(1_000, 9_909)), Offset(20));
}

#[test]
fn a_tier_may_be_emptied() {
    let manifest = manifest_of(&[(0, 10), (10, 20)], 3);
    let (after, dropped) = retained(&manifest, &Groups::default(), bytes(0), &[]);
    assert_eq!(after, Manifest::empty_at(Offset(20), Revision(3)));
    assert_eq!(dropped, [(0, 0), (0, 10)]);
    let (manifest, groups) = grouped(8, 2);
    let (after, dropped) = retained(&manifest, &groups, age(0), &[]);
    assert_eq!(after, Manifest::empty_at(Offset(80), Revision(1)));
    let expected = [
        (0, 0),
        (0, 10),
        (1, 0),
        (0, 20),
        (0, 30),
        (1, 20),
        (2, 0),
        (0, 40),
        (0, 50),
        (1, 40),
        (0, 60),
        (0, 70),
        (1, 60),
        (2, 40),
        (3, 0),
    ];
    assert_eq!(dropped, expected);
}

#[test]
fn a_group_is_consumed_from_within_and_stays_until_it_is_empty() {
    let (manifest, groups) = grouped(7, 3);
    let (after, dropped) = retained(&manifest, &groups, bytes(6_000), &[]);
    assert_eq!(dropped, [(0, 0)]);
    assert_eq!(after.entries, manifest.entries);
    assert_eq!((after.first_offset, after.total_size), (Offset(10), 6_000));
    assert_eq!(
        (after.first_timestamp, after.first_last_timestamp),
        (TimestampMs(100), TimestampMs(190))
    );
    let (after, dropped) = retained(&after, &groups, bytes(4_000), &[]);
    assert_eq!(dropped, [(0, 10), (0, 20), (1, 0)]);
    assert_eq!(after.entries.len(), manifest.entries.len() - 1);
    assert_eq!(
        (after.first_offset, after.first_last_timestamp),
        (Offset(30), TimestampMs(390))
    );
}

#[test]
fn the_header_alone_can_tell_that_nothing_goes() {
    let (manifest, _) = grouped(8, 2);
    for limits in [bytes(8_000), age(9_910)] {
        let found = evaluate_remote_retention(&manifest, limits, TimestampMs(10_000));
        assert_eq!(found, Retention::Unchanged);
    }
}

#[test]
fn steps_drop_what_a_single_one_does() {
    let (manifest, groups) = grouped(45, 2);
    let (at_once, all) = retained(&manifest, &groups, bytes(0), &[]);
    let mut stepwise = manifest;
    let mut dropped = Vec::new();
    for max in (0..45).rev() {
        let (after, more) = retained(&stepwise, &groups, bytes(max * 1_000), &[]);
        assert_eq!(after.total_size, max * 1_000);
        stepwise = after;
        dropped.extend(more);
    }
    assert_eq!(stepwise, at_once);
    assert_eq!(dropped, all);
}

#[test]
fn what_goes_is_the_same_however_fragments_are_grouped() {
    for threshold in 2..6 {
        let (manifest, groups) = grouped(40, threshold);
        for max in 0..=40 {
            let (after, dropped) = retained(&manifest, &groups, bytes(max * 1_000), &[]);
            let fragments = dropped.iter().filter(|(kind, _)| *kind == 0).count() as u128;
            assert_eq!(fragments, 40 - max);
            assert_eq!(after.first_offset.0, u64::try_from(40 - max).unwrap() * 10);
            let listed: Vec<_> = groups
                .leaves(&after.entries)
                .into_iter()
                .filter(|leaf| leaf.first_offset >= after.first_offset)
                .map(|leaf| invariants::Listed {
                    first: leaf.first_offset,
                    next: Offset(leaf.first_offset.0 + 10),
                    size: leaf.size,
                })
                .collect();
            invariants::coverage(&after, &listed).unwrap();
        }
    }
}

#[test]
fn a_group_that_cannot_be_read_ends_the_evaluation_in_front_of_it() {
    let (manifest, groups) = grouped(6, 3);
    let fetch = |index: usize| match manifest.entries.get(index).unwrap().object() {
        ObjectRef::Group(group) => group,
        ObjectRef::Fragment(_) => panic!("not a group"),
    };
    let (after, dropped) = retained(&manifest, &groups, bytes(1_000), &[fetch(0)]);
    assert_eq!((&after, dropped.len()), (&manifest, 0));
    // The first group would go as a whole, but what comes after it is not known: its last fragment stays.
    for max in [1_000, 3_000] {
        let (after, dropped) = retained(&manifest, &groups, bytes(max), &[fetch(1)]);
        assert_eq!(dropped, [(0, 0), (0, 10)]);
        assert_eq!((after.first_offset, after.total_size), (Offset(20), 4_000));
        assert_eq!(after.first_last_timestamp, TimestampMs(290));
        let (further, dropped) = retained(&after, &groups, bytes(3_000), &[]);
        assert_eq!(
            (further.first_offset, dropped),
            (Offset(30), vec![(0, 20), (1, 0)])
        );
    }
}

#[test]
fn entries_that_cannot_be_the_groups_are_as_good_as_none() {
    let (manifest, groups) = grouped(6, 3);
    let Retention::Fetch(group, continuation) =
        evaluate_remote_retention(&manifest, bytes(0), TimestampMs(0))
    else {
        panic!("no group");
    };
    assert_eq!(continuation.group(), group);
    let good = groups.0[&group].clone();
    let mut unsorted = good.clone();
    unsorted.swap(1, 2);
    let mut same_level = good.clone();
    same_level[1].kind = EntryKind::Group;
    let mut too_far = good.clone();
    too_far[2].first_offset = Offset(30);
    for bad in [vec![], good[1..].to_vec(), unsorted, same_level, too_far] {
        assert_eq!(continuation.clone().resume(Ok(bad)), Retention::Unchanged);
    }
    assert_eq!(
        continuation.clone().resume(Err(FetchFailed)),
        Retention::Unchanged
    );
    assert!(matches!(
        continuation.resume(Ok(good)),
        Retention::Fetch(..)
    ));
}
