//! Edits: the difference between two manifests, small enough to be sent to every replica.

use std::sync::Arc;

use super::{ENTRY_SIZE, Entry, Manifest};
use crate::units::{Offset, TimestampMs};

/// A change of a manifest. The `first_*` fields replace the manifest's; the entries replace `len` bytes at `pos` of its entries array.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Edit {
    /// New first offset.
    pub first_offset: Offset,
    /// New timestamp of the oldest fragment's first chunk.
    pub first_timestamp: TimestampMs,
    /// New timestamp of the oldest fragment's last chunk.
    pub first_last_timestamp: TimestampMs,
    /// New next offset; `None` leaves it as it is.
    pub next_offset: Option<Offset>,
    /// What `total_size` changes by, in bytes.
    pub size: i128,
    /// What is put in place of the removed bytes.
    pub entries: Arc<[Entry]>,
    /// Where, in bytes: a multiple of [`ENTRY_SIZE`].
    pub pos: u64,
    /// How many bytes are removed there: a multiple of [`ENTRY_SIZE`].
    pub len: u64,
}

/// Why an edit does not fit a manifest. Whoever keeps the manifest has missed an edit and needs all of it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EditError {
    /// The splice begins or ends between entries' boundaries.
    #[error("splice at {pos}, {len} bytes, is not on the grid of {ENTRY_SIZE} bytes")]
    OffGrid {
        /// Where the splice begins.
        pos: u64,
        /// How much it removes.
        len: u64,
    },
    /// The splice goes beyond the end of the entries.
    #[error("splice at {pos}, {len} bytes, goes beyond the {have} bytes of entries")]
    OutOfBounds {
        /// Where the splice begins.
        pos: u64,
        /// How much it removes.
        len: u64,
        /// Length of the entries.
        have: u64,
    },
    /// The total size would become negative.
    #[error("the total size of {total} bytes cannot change by {change}")]
    NegativeTotal {
        /// The total in front of the edit.
        total: u128,
        /// What it should change by.
        change: i128,
    },
}

impl Edit {
    /// The edit that appends a fragment's entry. In an empty manifest the fragment's offset and timestamps become the manifest's.
    #[must_use]
    pub fn append(manifest: &Manifest, entry: Entry, next_offset: Offset) -> Self {
        let mut edit = new_edit(manifest);
        if manifest.entries.is_empty() {
            edit.first_offset = entry.first_offset;
            edit.first_timestamp = entry.first_timestamp;
            edit.first_last_timestamp = entry.last_timestamp;
        }
        edit.next_offset = Some(next_offset);
        edit.size = i128::from(entry.size);
        edit.entries = Arc::from([entry]);
        edit.pos = manifest.entries_len();
        edit
    }

    /// The edit that turns any manifest with the size and entries of `manifest` into an empty one at `at`.
    #[must_use]
    pub fn reset(manifest: &Manifest, at: Offset) -> Self {
        Self {
            first_offset: at,
            first_timestamp: TimestampMs::NONE,
            first_last_timestamp: TimestampMs::NONE,
            next_offset: Some(at),
            size: i128::try_from(manifest.total_size).map_or(i128::MIN, |size| -size),
            entries: Arc::from([]),
            pos: 0,
            len: manifest.entries_len(),
        }
    }
}

/// The edit that changes nothing: a starting point for others.
#[must_use]
pub fn new_edit(manifest: &Manifest) -> Edit {
    Edit {
        first_offset: manifest.first_offset,
        first_timestamp: manifest.first_timestamp,
        first_last_timestamp: manifest.first_last_timestamp,
        next_offset: None,
        size: 0,
        entries: Arc::from([]),
        pos: 0,
        len: 0,
    }
}

/// The manifest after the edit. Fails on a splice out of bounds or off the grid and on a negative total, and for nothing else; in
/// particular it does not judge whether the result is well-formed. An append takes the time of the appended entries, anything else one
/// pass over all of them.
pub fn apply_edit(edit: &Edit, manifest: &Manifest) -> Result<Manifest, EditError> {
    let (start, end) = splice_range(manifest.entries.len(), edit.pos, edit.len)?;
    let total_size = new_total(manifest.total_size, edit.size)?;
    Ok(Manifest {
        first_offset: edit.first_offset,
        first_timestamp: edit.first_timestamp,
        first_last_timestamp: edit.first_last_timestamp,
        next_offset: edit.next_offset.unwrap_or(manifest.next_offset),
        total_size,
        revision: manifest.revision,
        entries: manifest.entries.splice(start, end, &edit.entries),
    })
}

/// Which of `count` entries a splice of `len` bytes at `pos` removes: the range `[start, end)` of their indices.
pub fn splice_range(count: usize, pos: u64, len: u64) -> Result<(usize, usize), EditError> {
    let grid = ENTRY_SIZE as u64;
    if !pos.is_multiple_of(grid) || !len.is_multiple_of(grid) {
        return Err(EditError::OffGrid { pos, len });
    }
    let have = count as u64 * grid;
    match pos.checked_add(len) {
        // Both fit `usize`: they are at most `count`.
        Some(end) if end <= have => Ok(((pos / grid) as usize, (end / grid) as usize)),
        Some(_) | None => Err(EditError::OutOfBounds { pos, len, have }),
    }
}

/// The total size after a change.
pub fn new_total(total: u128, change: i128) -> Result<u128, EditError> {
    total
        .checked_add_signed(change)
        .ok_or(EditError::NegativeTotal { total, change })
}
