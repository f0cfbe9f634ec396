//! The manifest: the list of what a stream has in the object store.
//!
//! A root lists fragments and groups; a group lists fragments, a kilo-group groups, and a mega-group kilo-groups. All of them hold
//! the same 34-byte entries.

mod edit;
mod entries;
mod entry;
mod group;
mod retention;
mod root;
mod search;

pub use edit::{Edit, EditError, apply_edit, new_edit, new_total, splice_range};
pub use entries::{Entries, Iter};
pub use entry::{
    ENTRY_SIZE, Entry, EntryKind, FragmentRef, GroupRef, MAX_ENTRY_SIZE, ObjectRef, decode_entries,
    encode_entries, encode_entries_into,
};
pub use group::{Group, decode_group, encode_group};
pub use retention::{
    FetchFailed, Retention, RetentionContinuation, RetentionLimits, evaluate_remote_retention,
};
pub use root::{
    Header, MANIFEST_HEADER_SIZE, MAX_TOTAL_SIZE, decode_root, encode_root, encode_root_of,
};
pub use search::{Lookup, LookupContinuation, SearchError, lookup_offset, lookup_timestamp};

use crate::error::{FormatError, FormatProblem};
use crate::units::{Offset, Revision, TimestampMs};

/// What a stream has in the object store: the records of `[first_offset, next_offset)`.
///
/// As a value it is cheap to clone, whatever the number of entries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// Oldest offset that is still tiered. Inside the first entry where that is a group which retention has begun to consume.
    pub first_offset: Offset,
    /// Timestamp of the oldest fragment's first chunk; [`TimestampMs::NONE`] while there are no entries.
    pub first_timestamp: TimestampMs,
    /// Timestamp of the oldest fragment's last chunk; [`TimestampMs::NONE`] while there are no entries.
    pub first_last_timestamp: TimestampMs,
    /// Offset after the newest tiered record.
    pub next_offset: Offset,
    /// Bytes of all tiered fragments, those inside groups included; below 2^70.
    pub total_size: u128,
    /// Revision under which it was persisted; 0 if it never was. Not part of the stored root.
    pub revision: Revision,
    /// Oldest first.
    pub entries: Entries,
}

impl Default for Manifest {
    fn default() -> Self {
        Self::empty_at(Offset(0), Revision(0))
    }
}

impl Manifest {
    /// One without entries, for a stream whose tier begins at `at`.
    #[must_use]
    pub fn empty_at(at: Offset, revision: Revision) -> Self {
        Self {
            first_offset: at,
            first_timestamp: TimestampMs::NONE,
            first_last_timestamp: TimestampMs::NONE,
            next_offset: at,
            total_size: 0,
            revision,
            entries: Entries::new(),
        }
    }

    /// Length of the entries array in bytes.
    #[must_use]
    pub fn entries_len(&self) -> u64 {
        (self.entries.len() * ENTRY_SIZE) as u64
    }

    /// Whether [`check`](Self::check) finds nothing.
    #[must_use]
    pub fn is_well_formed(&self) -> bool {
        self.check().is_ok()
    }

    /// Checks what can be checked without reading groups: entries ascend, they lie inside `[first_offset, next_offset)`, and sizes fit
    /// their fields. The error's place is that of the stored root. One pass over the entries.
    pub fn check(&self) -> Result<(), FormatError> {
        root::check_manifest(self)
    }

    /// Offset after entry `index`, exclusive: where the next entry begins, or the manifest ends.
    #[must_use]
    pub fn entry_end(&self, index: usize) -> Offset {
        self.entries
            .get(index + 1)
            .map_or(self.next_offset, |entry| entry.first_offset)
    }
}

/// Checks that entries ascend and that their sizes fit; `base` is the place of the first one.
fn check_entries<'a>(
    what: &'static str,
    base: usize,
    entries: impl IntoIterator<Item = &'a Entry>,
) -> Result<(), FormatError> {
    let mut previous: Option<Offset> = None;
    for (index, entry) in entries.into_iter().enumerate() {
        let at = (base + index * ENTRY_SIZE) as u64;
        if let Some(previous) = previous
            && entry.first_offset <= previous
        {
            let problem = FormatProblem::NotAscending {
                previous: previous.0,
                next: entry.first_offset.0,
            };
            return Err(FormatError::new(what, at, problem));
        }
        if entry.size > MAX_ENTRY_SIZE {
            let problem = FormatProblem::TooLarge {
                field: "size",
                value: u128::from(entry.size),
            };
            return Err(FormatError::new(what, at, problem));
        }
        previous = Some(entry.first_offset);
    }
    Ok(())
}
