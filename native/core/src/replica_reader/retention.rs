//! Dropping the oldest entries.
//!
//! Retention looks at the persisted manifest, and its result changes the speculative one. Between the two stand edits: appends, which do not
//! matter to a prefix, and possibly an earlier retention that is not persisted. So the machine takes the result by its first offset and
//! works out itself how many of its own entries lie below.

use super::persist::{Origin, Pending};
use super::{Effect, Machine};
use crate::manifest::{ENTRY_SIZE, Edit, EditError, Entry, EntryKind, apply_edit, new_edit};
use crate::units::{Offset, TimestampMs};

/// A retention in flight, and what it cannot know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RetentionInFlight {
    /// What earlier retentions had removed from the speculative manifest, and not yet from the persisted one, when this one began.
    hidden: Removed,
    /// The fragment that followed the persisted manifest's last one when this one began, if there was one: where everything persisted
    /// goes, that is the oldest fragment left.
    following: Option<Entry>,
}

/// What retentions remove.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Removed {
    /// Bytes of entries in the root.
    len: u64,
    /// Change of the total size; not positive.
    size: i128,
}

/// A retention's edit that would damage the manifest. Nothing has changed, and nothing may be deleted for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RetentionError {
    /// It does not remove a prefix: it adds entries, or its splice is not at the beginning.
    #[error("a retention's edit has to remove a prefix, and nothing else")]
    NotAPrefix,
    /// It would drop records that are not in the manifest.
    #[error("retention up to {first_offset} goes beyond the manifest's end at {next_offset}")]
    BeyondEnd {
        /// The edit's first offset.
        first_offset: Offset,
        /// The manifest's next offset.
        next_offset: Offset,
    },
    /// It would cut a fragment in two.
    #[error("retention up to {first_offset} ends inside the fragment at {fragment}")]
    InsideFragment {
        /// The edit's first offset.
        first_offset: Offset,
        /// First offset of that fragment.
        fragment: Offset,
    },
    /// It says that it removes another number of bytes than it does.
    #[error("retention removes {actual} bytes, not {claimed}")]
    Size {
        /// Bytes of the entries that it removes.
        actual: u128,
        /// What it takes off the total size.
        claimed: i128,
    },
    /// It would drop entries that are moving into a group.
    #[error("retention overlaps entries that are moving into a group")]
    OverlapsRebalance,
    /// It was not announced, another retention is not persisted, and it fits neither the manifest with nor the one without that.
    #[error("retention was made for another manifest")]
    OtherManifest,
    /// It cannot be applied.
    #[error(transparent)]
    Edit(#[from] EditError),
}

impl<T: Clone> Machine<T> {
    /// A retention of the *persisted* manifest begins. Until it ends no persist starts, and no group.
    pub fn retention_started(&mut self) {
        self.retention = Some(RetentionInFlight {
            hidden: self.unpersisted_removals(),
            following: self.oldest_unpersisted(),
        });
    }

    /// A retention has decided. Its edit is applied to the speculative manifest and waits for the next persist; the objects it drops may be
    /// deleted once the persisted first offset has reached the edit's. An edit that drops nothing more than has been dropped changes
    /// nothing, and none moves the manifest's end. Accepted without [`retention_started`](Self::retention_started) too.
    ///
    /// Effects: `UploadGroup` where a group is due; `StartPersist` where that is not so and enough fragments wait, else
    /// `StartPersistTimer` where edits wait.
    pub fn retention_complete(&mut self, edit: &Edit) -> Result<Vec<Effect<T>>, RetentionError> {
        if edit.first_offset > self.manifest.first_offset {
            self.drop_prefix(edit)?;
        }
        self.retention = None;
        let mut effects = Vec::new();
        self.rebalance_if_due(&mut effects);
        self.persist_or_arm(&mut effects);
        Ok(effects)
    }

    /// A retention has ended without a result. Effects: `UploadGroup` where a group is due, and `StartPersistTimer` where edits wait.
    pub fn retention_failed(&mut self) -> Vec<Effect<T>> {
        self.retention = None;
        let mut effects = Vec::new();
        self.rebalance_if_due(&mut effects);
        self.arm_if_edits_wait(&mut effects);
        effects
    }

    fn drop_prefix(&mut self, edit: &Edit) -> Result<(), RetentionError> {
        let (edit, count) = self.fitted(edit)?;
        let manifest = apply_edit(&edit, &self.manifest)?;
        if let Some(rebalance) = &mut self.rebalance
            && !rebalance.shift(count)
        {
            return Err(RetentionError::OverlapsRebalance);
        }
        self.replace_manifest(manifest);
        self.edits.push_back(Pending::new(edit, Origin::Retention));
        Ok(())
    }

    /// The edit as it fits the speculative manifest, and how many entries it removes.
    fn fitted(&self, edit: &Edit) -> Result<(Edit, usize), RetentionError> {
        let first_offset = edit.first_offset;
        let next_offset = self.manifest.next_offset;
        if edit.pos != 0 || !edit.entries.is_empty() || edit.size > 0 {
            return Err(RetentionError::NotAPrefix);
        }
        if first_offset > next_offset {
            return Err(RetentionError::BeyondEnd {
                first_offset,
                next_offset,
            });
        }
        let count = self.entries_below(first_offset);
        let mut fitted = new_edit(&self.manifest);
        fitted.first_offset = first_offset;
        fitted.next_offset = edit.next_offset.filter(|next| *next == next_offset);
        fitted.len = (count * ENTRY_SIZE) as u64;
        fitted.size = edit
            .size
            .saturating_sub(self.hidden_from(edit, fitted.len)?.size);
        (fitted.first_timestamp, fitted.first_last_timestamp) =
            self.oldest_timestamps(edit, count)?;
        self.check_size(fitted.size, count)?;
        Ok((fitted, count))
    }

    /// Timestamps of the fragment that is the oldest after `edit`, which removes `count` entries.
    fn oldest_timestamps(
        &self,
        edit: &Edit,
        count: usize,
    ) -> Result<(TimestampMs, TimestampMs), RetentionError> {
        let Some(first) = self.manifest.entries.get(count) else {
            return Ok((TimestampMs::NONE, TimestampMs::NONE));
        };
        if first.kind == EntryKind::Fragment && first.first_offset != edit.first_offset {
            let (first_offset, fragment) = (edit.first_offset, first.first_offset);
            return Err(RetentionError::InsideFragment {
                first_offset,
                fragment,
            });
        }
        let told = (edit.first_timestamp, edit.first_last_timestamp);
        if edit.first_timestamp != TimestampMs::NONE {
            return Ok(told);
        }
        // It empties the persisted manifest, and cannot know what came since.
        let oldest = match first.kind {
            EntryKind::Fragment => Some(*first),
            EntryKind::Group | EntryKind::KiloGroup | EntryKind::MegaGroup => self
                .retention
                .and_then(|retention| retention.following)
                .or_else(|| self.oldest_unpersisted())
                .filter(|entry| entry.first_offset == edit.first_offset),
        };
        Ok(oldest.map_or(told, |entry| (entry.first_timestamp, entry.last_timestamp)))
    }

    /// How many entries end at or below `offset`.
    fn entries_below(&self, offset: Offset) -> usize {
        if offset >= self.manifest.next_offset {
            return self.manifest.entries.len();
        }
        let found = self
            .manifest
            .entries
            .binary_search_by(|entry| entry.first_offset.cmp(&offset));
        found.unwrap_or_else(|after| after.saturating_sub(1))
    }

    /// What earlier retentions have removed that `edit` removes once more; `len` is how much it removes of the speculative manifest.
    fn hidden_from(&self, edit: &Edit, len: u64) -> Result<Removed, RetentionError> {
        if let Some(retention) = &self.retention {
            return Ok(retention.hidden);
        }
        let hidden = self.unpersisted_removals();
        if hidden == Removed::default() || edit.len == len.saturating_add(hidden.len) {
            Ok(hidden)
        } else if edit.len == len {
            Ok(Removed::default())
        } else {
            Err(RetentionError::OtherManifest)
        }
    }

    /// The oldest fragment that is not persisted.
    fn oldest_unpersisted(&self) -> Option<Entry> {
        self.unpersisted()
            .find(|pending| pending.origin == Origin::Fragment)
            .and_then(|pending| pending.edit.entries.first().copied())
    }

    fn unpersisted_removals(&self) -> Removed {
        self.unpersisted()
            .filter(|pending| pending.origin == Origin::Retention)
            .fold(Removed::default(), |sum, pending| Removed {
                len: sum.len.saturating_add(pending.edit.len),
                size: sum.size.saturating_add(pending.edit.size),
            })
    }

    /// Where only fragments go, the entries themselves tell how many bytes go with them.
    fn check_size(&self, size: i128, count: usize) -> Result<(), RetentionError> {
        let fragments = |count| {
            self.manifest
                .entries
                .iter()
                .take(count)
                .all(|entry| entry.kind == EntryKind::Fragment)
        };
        // A surviving group may have lost fragments from within.
        if !fragments((count + 1).min(self.manifest.entries.len())) {
            return if size <= 0 {
                Ok(())
            } else {
                Err(RetentionError::OtherManifest)
            };
        }
        let actual = self
            .manifest
            .entries
            .iter()
            .take(count)
            .map(|entry| u128::from(entry.size))
            .sum();
        let claimed = size.saturating_neg();
        if i128::try_from(actual) == Ok(claimed) {
            Ok(())
        } else {
            Err(RetentionError::Size { actual, claimed })
        }
    }
}
