//! What the tests of this crate share: fragments and entries that follow from their offsets, and a store of groups.

// Each test program uses its own part.
#![allow(dead_code, clippy::disallowed_methods)]

use std::collections::BTreeMap;

use stream_s3_core::fragment::Fragment;
use stream_s3_core::manifest::{
    Edit, Entry, EntryKind, FetchFailed, GroupRef, Lookup, Manifest, ObjectRef, Retention,
    apply_edit,
};
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

/// The manifest with other entries.
pub(crate) fn altered(manifest: &Manifest, change: impl FnOnce(&mut Vec<Entry>)) -> Manifest {
    let mut entries = manifest.entries.to_vec();
    change(&mut entries);
    Manifest {
        entries: entries.into(),
        ..manifest.clone()
    }
}

/// Groups by what they are referred to.
#[derive(Debug, Default, Clone)]
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

/// Runs a search to its end, fetching groups from `groups`; the groups fetched on the way.
pub(crate) fn search(mut found: Lookup, groups: &Groups) -> (Option<Offset>, Vec<GroupRef>) {
    let mut fetched = Vec::new();
    loop {
        match found {
            Lookup::Found(fragment) => return (Some(fragment.offset), fetched),
            Lookup::NotFound => return (None, fetched),
            Lookup::Fetch(group, continuation) => {
                fetched.push(group);
                found = continuation.resume(&groups.0[&group]).unwrap();
            }
        }
    }
}

/// Runs an evaluation to its end; the groups in `missing` cannot be fetched.
pub(crate) fn evaluate(mut found: Retention, groups: &Groups, missing: &[GroupRef]) -> Retention {
    loop {
        match found {
            Retention::Fetch(group, continuation) if missing.contains(&group) => {
                found = continuation.resume(Err(FetchFailed));
            }
            Retention::Fetch(group, continuation) => {
                found = continuation.resume(Ok(groups.0[&group].clone()));
            }
            Retention::Unchanged | Retention::Drop { .. } => return found,
        }
    }
}

/// A manifest whose fragments, `0..count` of ten records each, have moved into groups of `threshold` wherever they could.
pub(crate) fn grouped(count: u64, threshold: usize) -> (Manifest, Groups) {
    let mut groups = Groups::default();
    let mut entries: Vec<Entry> = Vec::new();
    let mut uid = 1_000;
    for number in 0..count {
        entries.push(entry(number * 10, number * 10 + 10));
        while let Some((start, kind)) = run(&entries, threshold) {
            uid += 1;
            let moved: Vec<_> = entries.drain(start..start + threshold).collect();
            entries.insert(start, groups.store(kind, moved, uid));
        }
    }
    let mut manifest = Manifest::empty_at(Offset(0), Revision(1));
    manifest.next_offset = Offset(count * 10);
    manifest.total_size = u128::from(count) * 1_000;
    if count > 0 {
        manifest.first_timestamp = timestamp(0);
        manifest.first_last_timestamp = timestamp(9);
    }
    manifest.entries = entries.into_iter().collect();
    (manifest, groups)
}

/// The first run of `threshold` entries of one kind, found the slow way.
pub(crate) fn run(entries: &[Entry], threshold: usize) -> Option<(usize, EntryKind)> {
    let start = entries.windows(threshold).position(|window| {
        window.iter().all(|entry| entry.kind == window[0].kind) && window[0].kind.parent().is_some()
    })?;
    Some((start, entries[start].kind.parent()?))
}
