//! Which of the oldest fragments have to go. Works through groups, one fetch at a time.
//!
//! The evaluation walks fragment by fragment from the oldest, dropping each that a limit condemns, and stops at the first one that
//! stays. It always looks at the fragment that will be the oldest afterwards, since the manifest records that one's timestamps.

use std::sync::Arc;

use super::{ENTRY_SIZE, EntryKind};
use super::{Edit, Entry, FragmentRef, GroupRef, Manifest, ObjectRef, new_edit};
use crate::units::{Offset, TimestampMs};

/// What the tier of a stream may hold. A fragment goes as soon as one limit says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RetentionLimits {
    /// Fragments go while the total size, in bytes, is above this.
    pub max_bytes: Option<u128>,
    /// Fragments go while their last timestamp is further back than this many milliseconds.
    pub max_age_ms: Option<u64>,
}

/// What an evaluation has come to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Retention {
    /// Everything stays.
    Unchanged,
    /// Apply `edit`; once it is persisted, delete `objects`.
    Drop {
        /// Removes a prefix.
        edit: Edit,
        /// Every object that lies wholly below the edit's first offset and was not dropped before: oldest first, a group after what it lists.
        objects: Vec<ObjectRef>,
    },
    /// The next fragment is inside this group: fetch and decode it, then [`RetentionContinuation::resume`].
    Fetch(GroupRef, RetentionContinuation),
}

/// The group could not be read. Why is the caller's to report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FetchFailed;

/// An evaluation that waits for a group. A value: it may be resumed more than once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetentionContinuation {
    walk: Box<Walk>,
    group: GroupRef,
}

/// Evaluates the limits at time `now` against a manifest; only a persisted one may be passed, so that nothing is dropped that was never
/// counted. One pass over the entries that go.
#[must_use]
pub fn evaluate_remote_retention(
    manifest: &Manifest,
    limits: RetentionLimits,
    now: TimestampMs,
) -> Retention {
    let cutoff = limits
        .max_age_ms
        .map(|age| TimestampMs(now.0.saturating_sub(i64::try_from(age).unwrap_or(i64::MAX))));
    let walk = Walk {
        manifest: manifest.clone(),
        max_bytes: limits.max_bytes,
        cutoff,
        root_index: 0,
        levels: Vec::new(),
        total: manifest.total_size,
        dropped: Vec::new(),
        floor: manifest.first_offset,
        last: None,
    };
    if walk.surely_unchanged() {
        Retention::Unchanged
    } else {
        walk.run()
    }
}

impl RetentionContinuation {
    /// The group that is waited for.
    #[must_use]
    pub fn group(&self) -> GroupRef {
        self.group
    }

    /// Goes on with the entries of [`group`](Self::group). Without them, or with some that cannot be that group's, the evaluation ends with what it
    /// has decided so far: the fragments in front of the group may go, and the next evaluation tries again. One pass over the
    /// group's entries.
    #[must_use]
    pub fn resume(mut self, fetched: Result<Vec<Entry>, FetchFailed>) -> Retention {
        match fetched {
            Ok(entries) if self.fits(&entries) => {
                self.walk.levels.push(Level {
                    group: self.group,
                    entries: entries.into(),
                    index: 0,
                });
                self.walk.run()
            }
            Ok(_) | Err(FetchFailed) => self.walk.give_up(),
        }
    }

    /// Entries of a lower level only (following others might never end), which begin where the group does and end inside it.
    fn fits(&self, entries: &[Entry]) -> bool {
        let (Some(first), Some(last)) = (entries.first(), entries.last()) else {
            return false;
        };
        first.first_offset == self.group.offset
            && self
                .walk
                .current()
                .is_some_and(|(_, end)| last.first_offset < end)
            && entries.is_sorted_by(|a, b| a.first_offset < b.first_offset)
            && entries.iter().all(|entry| entry.kind < self.group.kind)
    }
}

/// The evaluation: a path through the levels to the next fragment, and what has been decided on the way.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Walk {
    manifest: Manifest,
    max_bytes: Option<u128>,
    cutoff: Option<TimestampMs>,
    /// The root entry that the walk is at.
    root_index: usize,
    /// The groups that it is in, outermost first.
    levels: Vec<Level>,
    /// Bytes of what stays.
    total: u128,
    /// Objects wholly below `floor` that were not dropped before.
    dropped: Vec<ObjectRef>,
    /// First offset that stays.
    floor: Offset,
    /// The fragment that was dropped last, and how things stood in front of it.
    last: Option<LastDrop>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Level {
    group: GroupRef,
    entries: Arc<[Entry]>,
    index: usize,
}

/// What it takes to keep the last dropped fragment after all.
#[derive(Debug, Clone, PartialEq, Eq)]
struct LastDrop {
    entry: Entry,
    root_index: usize,
    dropped: usize,
    total: u128,
}

impl Walk {
    /// The header of the manifest alone can tell, without reading a group.
    fn surely_unchanged(&self) -> bool {
        let Some(first) = self.manifest.entries.front() else {
            return true;
        };
        let last_timestamp = match first.kind {
            EntryKind::Fragment => first.last_timestamp,
            EntryKind::Group | EntryKind::KiloGroup | EntryKind::MegaGroup => {
                self.manifest.first_last_timestamp
            }
        };
        !self.too_large() && !self.too_old(last_timestamp)
    }

    fn too_large(&self) -> bool {
        self.max_bytes.is_some_and(|max| self.total > max)
    }

    fn too_old(&self, last_timestamp: TimestampMs) -> bool {
        self.cutoff.is_some_and(|cutoff| last_timestamp < cutoff)
    }

    fn run(mut self) -> Retention {
        loop {
            let Some((entry, end)) = self.current() else {
                return self.finish(None);
            };
            // Dropped by an earlier evaluation, which left the group that lists it.
            if end <= self.manifest.first_offset {
                self.step();
                continue;
            }
            match entry.object() {
                ObjectRef::Group(group) => {
                    return Retention::Fetch(
                        group,
                        RetentionContinuation {
                            walk: Box::new(self),
                            group,
                        },
                    );
                }
                ObjectRef::Fragment(fragment) => {
                    if !self.too_large() && !self.too_old(entry.last_timestamp) {
                        return self.finish(Some(entry));
                    }
                    self.drop_fragment(entry, fragment, end);
                }
            }
        }
    }

    /// The entry that the walk is at, and the offset after it; `None` at the manifest's end.
    fn current(&self) -> Option<(Entry, Offset)> {
        let root = *self.manifest.entries.get(self.root_index)?;
        let mut found = root;
        let mut end = self.manifest.entry_end(self.root_index);
        for level in &self.levels {
            found = *level.entries.get(level.index)?;
            end = level
                .entries
                .get(level.index + 1)
                .map_or(end, |next| next.first_offset);
        }
        Some((found, end))
    }

    fn drop_fragment(&mut self, entry: Entry, fragment: FragmentRef, end: Offset) {
        self.last = Some(LastDrop {
            entry,
            root_index: self.root_index,
            dropped: self.dropped.len(),
            total: self.total,
        });
        self.dropped.push(ObjectRef::Fragment(fragment));
        self.total = self.total.saturating_sub(u128::from(fragment.size));
        self.floor = end;
        self.step();
    }

    /// Moves on by one entry, leaving every group that ends here.
    fn step(&mut self) {
        while let Some(level) = self.levels.last_mut() {
            level.index += 1;
            if level.index < level.entries.len() {
                return;
            }
            let group = level.group;
            self.levels.pop();
            // Whatever ends below the manifest's first offset is never entered, so this group goes now and for the first time.
            self.dropped.push(ObjectRef::Group(group));
        }
        self.root_index += 1;
    }

    fn give_up(mut self) -> Retention {
        let Some(last) = self.last.take() else {
            return Retention::Unchanged;
        };
        self.dropped.truncate(last.dropped);
        self.root_index = last.root_index;
        self.floor = last.entry.first_offset;
        self.total = last.total;
        self.finish(Some(last.entry))
    }

    /// The result, where `first` is the oldest fragment that stays.
    fn finish(self, first: Option<Entry>) -> Retention {
        if self.floor <= self.manifest.first_offset {
            return Retention::Unchanged;
        }
        let removed = self.manifest.total_size.saturating_sub(self.total);
        let mut edit = new_edit(&self.manifest);
        edit.first_offset = self.floor;
        edit.first_timestamp = first.map_or(TimestampMs::NONE, |entry| entry.first_timestamp);
        edit.first_last_timestamp = first.map_or(TimestampMs::NONE, |entry| entry.last_timestamp);
        edit.size = i128::try_from(removed).map_or(i128::MIN, |removed| -removed);
        edit.len = (self.root_index * ENTRY_SIZE) as u64;
        Retention::Drop {
            edit,
            objects: self.dropped,
        }
    }
}
