//! Edits against vectors, searches and retention against brute force.

use std::sync::Arc;

use proptest::prelude::*;
use stream_s3_core::invariants;
use stream_s3_core::manifest::{
    Edit, Entry, EntryKind, Manifest, ObjectRef, Retention, RetentionLimits, apply_edit,
    evaluate_remote_retention, lookup_offset, lookup_timestamp, new_edit,
};
use stream_s3_core::units::{Offset, Revision, TimestampMs, Uid};

use crate::config;
use crate::formats::entries;
use crate::support::{Groups, evaluate, run, search};

/// Fragments of any length, size and age; timestamps ascend only where asked for.
fn tier(ascending: bool) -> impl Strategy<Value = (Manifest, Groups, Vec<Entry>)> {
    let row = (1u64..5, 0u64..100, 0i64..20, 0i64..20);
    (prop::collection::vec(row, 0..60), 2usize..6, 0u64..50).prop_map(
        move |(rows, threshold, start)| {
            let mut at = start;
            let mut clock = 0;
            let mut leaves = Vec::new();
            for (uid, (records, size, pause, length)) in (0u32..).zip(rows) {
                let first = if ascending { clock + pause } else { pause * 7 };
                clock = first + length;
                leaves.push(Entry {
                    first_offset: Offset(at),
                    first_timestamp: TimestampMs(first),
                    last_timestamp: TimestampMs(clock),
                    kind: EntryKind::Fragment,
                    size,
                    uid: Uid(uid),
                });
                at += records;
            }
            let (manifest, groups) = build(&leaves, Offset(start), Offset(at), threshold);
            (manifest, groups, leaves)
        },
    )
}

fn build(leaves: &[Entry], start: Offset, next: Offset, threshold: usize) -> (Manifest, Groups) {
    let mut groups = Groups::default();
    let mut entries: Vec<Entry> = Vec::new();
    for leaf in leaves {
        entries.push(*leaf);
        while let Some((at, kind)) = run(&entries, threshold) {
            let moved: Vec<_> = entries.drain(at..at + threshold).collect();
            let uid = u32::try_from(groups.0.len()).unwrap() + 1_000;
            entries.insert(at, groups.store(kind, moved, uid));
        }
    }
    let mut manifest = Manifest::empty_at(start, Revision(1));
    manifest.next_offset = next;
    if let Some(first) = leaves.first() {
        manifest.first_timestamp = first.first_timestamp;
        manifest.first_last_timestamp = first.last_timestamp;
    }
    manifest.total_size = leaves.iter().map(|leaf| u128::from(leaf.size)).sum();
    manifest.entries = entries.into_iter().collect();
    (manifest, groups)
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn an_edit_does_what_a_splice_of_vectors_does(
        (before, next_offset) in entries(300),
        (inserted, _) in entries(4),
        from: prop::sample::Index,
        to: prop::sample::Index,
        end: bool,
    ) {
        let manifest = Manifest {
            next_offset,
            entries: before.iter().copied().collect(),
            ..Manifest::default()
        };
        let from = if end { before.len() } else { from.index(before.len() + 1) };
        let to = from + to.index(before.len() + 1 - from);
        let edit = Edit {
            pos: from as u64 * 34,
            len: (to - from) as u64 * 34,
            entries: Arc::from(inserted.as_slice()),
            ..new_edit(&manifest)
        };
        let mut expected = before.clone();
        expected.splice(from..to, inserted);
        let after = apply_edit(&edit, &manifest).unwrap();
        prop_assert_eq!(after.entries.iter().copied().collect::<Vec<_>>(), expected);
        prop_assert!(manifest.entries.iter().eq(before.iter()), "the older one stays");
    }

    #[test]
    fn any_splice_is_applied_or_refused((before, _) in entries(9), pos in 0u64..400, len: u64, size: i64) {
        let manifest = Manifest { entries: before.into_iter().collect(), ..Manifest::default() };
        let edit = Edit { pos, len: len >> (len % 64), size: i128::from(size), ..new_edit(&manifest) };
        let fits = edit.pos.is_multiple_of(34)
            && edit.len.is_multiple_of(34)
            && edit.pos + edit.len.min(1_000) <= manifest.entries_len()
            && size >= 0;
        prop_assert_eq!(apply_edit(&edit, &manifest).is_ok(), fits);
    }

    #[test]
    fn an_offset_is_found_where_a_walk_finds_it((manifest, groups, leaves) in tier(false), ahead in 0u64..300) {
        let offset = Offset(ahead);
        let inside = offset >= manifest.first_offset && offset < manifest.next_offset;
        let expected = leaves
            .iter()
            .rev()
            .find(|leaf| inside && leaf.first_offset <= offset)
            .map(|leaf| leaf.first_offset);
        prop_assert_eq!(search(lookup_offset(&manifest, offset), &groups).0, expected);
    }

    #[test]
    fn a_timestamp_is_found_where_a_walk_finds_it((manifest, groups, leaves) in tier(true), at in -5i64..900) {
        let expected = leaves
            .iter()
            .find(|leaf| leaf.last_timestamp.0 >= at)
            .map(|leaf| leaf.first_offset);
        prop_assert_eq!(search(lookup_timestamp(&manifest, TimestampMs(at)), &groups).0, expected);
    }

    #[test]
    fn retention_drops_what_a_walk_drops(
        (manifest, groups, leaves) in tier(false),
        max_bytes in prop::option::of(0u128..5_000),
        max_age_ms in prop::option::of(0u64..200),
        now in 0i64..300,
        unreadable in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let limits = RetentionLimits { max_bytes, max_age_ms };
        let missing: Vec<_> = match unreadable {
            Some(index) if !groups.0.is_empty() => {
                groups.0.keys().nth(index.index(groups.0.len())).copied().into_iter().collect()
            }
            _ => vec![],
        };
        let mut left = manifest.total_size;
        let dropped: Vec<_> = leaves
            .iter()
            .take_while(|leaf| {
                let large = max_bytes.is_some_and(|max| left > max);
                let cutoff = max_age_ms.map(|age| now - i64::try_from(age).unwrap());
                let old = cutoff.is_some_and(|cutoff| leaf.last_timestamp.0 < cutoff);
                if large || old {
                    left -= u128::from(leaf.size);
                }
                large || old
            })
            .map(|leaf| leaf.object())
            .collect();
        let found = evaluate_remote_retention(&manifest, limits, TimestampMs(now));
        match evaluate(found, &groups, &missing) {
            Retention::Unchanged => prop_assert!(dropped.is_empty() || !missing.is_empty()),
            Retention::Drop { edit, objects } => {
                let after = apply_edit(&edit, &manifest).unwrap();
                invariants::retention(&manifest, &after, &objects).unwrap();
                let fragments: Vec<_> = objects
                    .iter()
                    .filter(|object| matches!(object, ObjectRef::Fragment(_)))
                    .copied()
                    .collect();
                if missing.is_empty() {
                    prop_assert_eq!(&fragments, &dropped);
                } else {
                    prop_assert!(dropped.starts_with(&fragments));
                }
                check_rest(&after, &groups, &leaves[fragments.len()..]);
            }
            Retention::Fetch(..) => unreachable!("evaluated to the end"),
        }
    }
}

/// What is left is exactly the rest of the fragments, and every group that lists one of them is still referred to.
fn check_rest(after: &Manifest, groups: &Groups, rest: &[Entry]) {
    let alive: Vec<_> = groups
        .leaves(&after.entries)
        .into_iter()
        .filter(|leaf| leaf.first_offset >= after.first_offset)
        .collect();
    assert_eq!(alive, rest);
    assert_eq!(
        after.total_size,
        rest.iter().map(|leaf| u128::from(leaf.size)).sum()
    );
    let first = rest.first();
    assert_eq!(
        after.first_offset,
        first.map_or(after.next_offset, |leaf| leaf.first_offset)
    );
    let none = TimestampMs::NONE;
    assert_eq!(
        after.first_timestamp,
        first.map_or(none, |leaf| leaf.first_timestamp)
    );
    assert_eq!(
        after.first_last_timestamp,
        first.map_or(none, |leaf| leaf.last_timestamp)
    );
    invariants::root_coverage(after).unwrap();
}
