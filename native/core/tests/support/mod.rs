//! What the tests of this crate share: fragments and entries that follow from their offsets, and a store of groups.

// Each test program uses its own part.
#![allow(dead_code, clippy::disallowed_methods)]

use std::collections::BTreeMap;

use stream_s3_core::fragment::Fragment;
use stream_s3_core::manifest::{Edit, Entry, EntryKind, GroupRef, Manifest, ObjectRef, apply_edit};
use stream_s3_core::units::{Offset, Revision, TimestampMs, Uid};

/// Bytes of the fragment `[first, next)`.
pub(crate) fn size(first: u64, next: u64) -> u64 {
    (next - first) * 100
}

/// The fragment `[first, next)`: its timestamps are ten times its offsets.
pub(crate) fn fragment(first: u64, next: u64) -> Fragment {
    Fragment {
        first_offset: Offset(first),
        next_offset: Offset(next),
        first_timestamp: timestamp(first),
        last_timestamp: timestamp(next - 1),
        size: size(first, next),
    }
}

pub(crate) fn timestamp(offset: u64) -> TimestampMs {
    TimestampMs(i64::try_from(offset).unwrap() * 10)
}

/// The entry of the fragment `[first, next)`, whose uid is its first offset.
pub(crate) fn entry(first: u64, next: u64) -> Entry {
    Entry {
        first_offset: Offset(first),
        first_timestamp: timestamp(first),
        last_timestamp: timestamp(next - 1),
        kind: EntryKind::Fragment,
        size: size(first, next),
        uid: Uid(u32::try_from(first).unwrap()),
    }
}

/// The entry of a group of entries.
pub(crate) fn group_entry(kind: EntryKind, entries: &[Entry], uid: u32) -> Entry {
    let (first, last) = (entries.first().unwrap(), entries.last().unwrap());
    Entry {
        first_offset: first.first_offset,
        first_timestamp: first.first_timestamp,
        last_timestamp: last.last_timestamp,
        kind,
        size: 0,
        uid: Uid(uid),
    }
}

/// The entries of fragments of ten records each, `from..to` counted in fragments.
pub(crate) fn tens(from: u64, to: u64) -> Vec<Entry> {
    (from..to)
        .map(|number| entry(number * 10, (number + 1) * 10))
        .collect()
}

/// A manifest of the given fragments, `[first, next)` each, persisted as `revision`.
pub(crate) fn manifest_of(fragments: &[(u64, u64)], revision: u64) -> Manifest {
    let at = fragments.first().map_or(0, |(first, _)| *first);
    let mut manifest = Manifest::empty_at(Offset(at), Revision(revision));
    for (first, next) in fragments {
        let edit = Edit::append(&manifest, entry(*first, *next), Offset(*next));
        manifest = apply_edit(&edit, &manifest).unwrap();
    }
    manifest
}

/// Groups by what they are referred to.
#[derive(Default, Clone)]
pub(crate) struct Groups(pub(crate) BTreeMap<GroupRef, Vec<Entry>>);

impl Groups {
    /// Stores a group; its entry.
    pub(crate) fn store(&mut self, kind: EntryKind, entries: Vec<Entry>, uid: u32) -> Entry {
        let entry = group_entry(kind, &entries, uid);
        let ObjectRef::Group(group) = entry.object() else {
            panic!("not a group")
        };
        self.0.insert(group, entries);
        entry
    }

    /// All fragments below these entries, oldest first.
    pub(crate) fn leaves<'a>(&'a self, entries: impl IntoIterator<Item = &'a Entry>) -> Vec<Entry> {
        entries
            .into_iter()
            .flat_map(|entry| match entry.object() {
                ObjectRef::Fragment(_) => vec![*entry],
                ObjectRef::Group(group) => self.leaves(&self.0[&group]),
            })
            .collect()
    }
}
