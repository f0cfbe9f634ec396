//! Keeping the root short: runs of entries of one kind move into a group.

use std::sync::Arc;

use super::effect::Effect;
use crate::manifest::{ENTRY_SIZE, Edit, Entries, Entry, EntryKind, Manifest, new_edit};
use crate::units::Uid;

/// How many entries of one kind follow each other, oldest first. Kept so that finding a run does not walk the entries; there are at
/// most four runs in every root that was written by this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Runs(imbl::Vector<Run>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    kind: EntryKind,
    len: usize,
}

impl Runs {
    pub(super) fn of(entries: &Entries) -> Self {
        let mut runs = Self(imbl::Vector::new());
        for entry in entries {
            runs.push(entry.kind);
        }
        runs
    }

    pub(super) fn push(&mut self, kind: EntryKind) {
        match self.0.back_mut() {
            Some(run) if run.kind == kind => run.len += 1,
            Some(_) | None => self.0.push_back(Run { kind, len: 1 }),
        }
    }

    /// The first run of at least `threshold` entries that can be grouped: the index of its first entry, and the kind of the group.
    fn find(&self, threshold: usize) -> Option<(usize, EntryKind)> {
        let mut start = 0;
        for run in &self.0 {
            if run.len >= threshold
                && let Some(parent) = run.kind.parent()
            {
                return Some((start, parent));
            }
            start += run.len;
        }
        None
    }
}

/// A group that is being stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rebalance {
    kind: EntryKind,
    /// Index of the first entry in the speculative manifest. Appends do not move it; retention in front of it does.
    start: usize,
    /// Never empty.
    entries: Arc<[Entry]>,
}

impl Rebalance {
    /// The group to store next, if there is one.
    pub(super) fn find(runs: &Runs, manifest: &Manifest, threshold: usize) -> Option<Self> {
        let (start, kind) = runs.find(threshold)?;
        let entries = manifest
            .entries
            .iter()
            .skip(start)
            .take(threshold)
            .copied()
            .collect();
        Some(Self {
            kind,
            start,
            entries,
        })
    }

    pub(super) fn effect<T>(&self) -> Effect<T> {
        Effect::UploadGroup {
            kind: self.kind,
            entries: self.entries.to_vec(),
            pos: (self.start * ENTRY_SIZE) as u64,
            len: (self.entries.len() * ENTRY_SIZE) as u64,
        }
    }

    /// Follows the removal of `count` entries from the beginning of the manifest. False, and no change, where that removes entries of
    /// this group.
    pub(super) fn shift(&mut self, count: usize) -> bool {
        match self.start.checked_sub(count) {
            Some(start) => {
                self.start = start;
                true
            }
            None => false,
        }
    }

    /// The edit that puts the stored group in place of its entries.
    pub(super) fn edit(&self, manifest: &Manifest, uid: Uid) -> Edit {
        let mut edit = new_edit(manifest);
        edit.pos = (self.start * ENTRY_SIZE) as u64;
        edit.len = (self.entries.len() * ENTRY_SIZE) as u64;
        if let (Some(first), Some(last)) = (self.entries.first(), self.entries.last()) {
            edit.entries = Arc::from([Entry {
                first_offset: first.first_offset,
                first_timestamp: first.first_timestamp,
                last_timestamp: last.last_timestamp,
                kind: self.kind,
                size: 0,
                uid,
            }]);
        }
        edit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(kinds: &[EntryKind]) -> Runs {
        let mut runs = Runs(imbl::Vector::new());
        for kind in kinds {
            runs.push(*kind);
        }
        runs
    }

    #[test]
    fn the_oldest_run_that_is_long_enough_is_found() {
        use EntryKind::{Fragment, Group};
        let runs = runs(&[
            Group, Fragment, Fragment, Group, Group, Group, Fragment, Fragment, Fragment,
        ]);
        assert_eq!(runs.find(2), Some((1, Group)));
        assert_eq!(runs.find(3), Some((3, EntryKind::KiloGroup)));
        assert_eq!(runs.find(4), None);
    }

    #[test]
    fn mega_groups_stay_where_they_are() {
        use EntryKind::{Fragment, Group, MegaGroup};
        assert_eq!(runs(&[MegaGroup; 9]).find(2), None);
        assert_eq!(
            runs(&[MegaGroup, MegaGroup, Fragment, Fragment]).find(2),
            Some((2, Group))
        );
    }
}
