//! One row of a root or group, 34 bytes:
//!
//! ```text
//! 0             8                16              24    25       30
//! first offset | first timestamp | last timestamp | kind | size  | uid
//! u64          | s64             | s64            | u8   | u40   | u32
//! ```

use super::Entries;
use crate::bytes::{i64_at, u32_at, u40_at, u64_at};
use crate::error::{FormatError, FormatProblem};
use crate::units::{Offset, TimestampMs, Uid};

/// Length of an entry in bytes.
pub const ENTRY_SIZE: usize = 34;

/// Largest size of a fragment that an entry can hold, in bytes (2^40 - 1).
pub const MAX_ENTRY_SIZE: u64 = (1 << 40) - 1;

const KIND_AT: usize = 24;

/// What an entry stands for. Ordered by level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EntryKind {
    /// One fragment.
    Fragment,
    /// A group object that lists fragments.
    Group,
    /// A group object that lists groups.
    KiloGroup,
    /// A group object that lists kilo-groups.
    MegaGroup,
}

impl EntryKind {
    /// As stored: 0 to 3.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::Fragment => 0,
            Self::Group => 1,
            Self::KiloGroup => 2,
            Self::MegaGroup => 3,
        }
    }

    /// The kind that is stored as `code`.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        match code {
            0 => Some(Self::Fragment),
            1 => Some(Self::Group),
            2 => Some(Self::KiloGroup),
            3 => Some(Self::MegaGroup),
            _ => None,
        }
    }

    /// The kind of a group of entries of this kind; `None` at the top.
    #[must_use]
    pub fn parent(self) -> Option<Self> {
        match self {
            Self::Fragment => Some(Self::Group),
            Self::Group => Some(Self::KiloGroup),
            Self::KiloGroup => Some(Self::MegaGroup),
            Self::MegaGroup => None,
        }
    }
}

/// One row of a root or group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Entry {
    /// Offset of the first record. The entry ends where the next one begins.
    pub first_offset: Offset,
    /// Timestamp of the first chunk.
    pub first_timestamp: TimestampMs,
    /// Timestamp of the last chunk.
    pub last_timestamp: TimestampMs,
    /// What it stands for.
    pub kind: EntryKind,
    /// Bytes of a fragment's chunks, at most [`MAX_ENTRY_SIZE`]; 0 for groups.
    pub size: u64,
    /// Part of the object's key.
    pub uid: Uid,
}

/// What a fragment's key is made from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FragmentRef {
    /// First offset.
    pub offset: Offset,
    /// Of the attempt that stored it.
    pub uid: Uid,
    /// Bytes of its chunks.
    pub size: u64,
}

/// What a group's key is made from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupRef {
    /// First offset.
    pub offset: Offset,
    /// Its level; never `Fragment`.
    pub kind: EntryKind,
    /// Of the attempt that stored it.
    pub uid: Uid,
}

/// An object that an entry points to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ObjectRef {
    /// A fragment.
    Fragment(FragmentRef),
    /// A group.
    Group(GroupRef),
}

impl ObjectRef {
    /// First offset of the object.
    #[must_use]
    pub fn offset(&self) -> Offset {
        match self {
            Self::Fragment(fragment) => fragment.offset,
            Self::Group(group) => group.offset,
        }
    }

    /// Level of the object.
    #[must_use]
    pub fn kind(&self) -> EntryKind {
        match self {
            Self::Fragment(_) => EntryKind::Fragment,
            Self::Group(group) => group.kind,
        }
    }

    /// Of the attempt that stored it.
    #[must_use]
    pub fn uid(&self) -> Uid {
        match self {
            Self::Fragment(fragment) => fragment.uid,
            Self::Group(group) => group.uid,
        }
    }
}

impl Entry {
    /// The entry as stored. A size beyond [`MAX_ENTRY_SIZE`] cannot be stored and becomes that; no entry made by this crate has one.
    #[must_use]
    #[inline]
    pub fn encode(&self) -> [u8; ENTRY_SIZE] {
        debug_assert!(
            self.size <= MAX_ENTRY_SIZE,
            "fragment_cut refuses larger fragments"
        );
        let size = self.size.min(MAX_ENTRY_SIZE).to_be_bytes();
        let mut out = [0; ENTRY_SIZE];
        out[..8].copy_from_slice(&self.first_offset.0.to_be_bytes());
        out[8..16].copy_from_slice(&self.first_timestamp.0.to_be_bytes());
        out[16..24].copy_from_slice(&self.last_timestamp.0.to_be_bytes());
        out[KIND_AT] = self.kind.code();
        out[25..30].copy_from_slice(&size[3..]);
        out[30..].copy_from_slice(&self.uid.0.to_be_bytes());
        out
    }

    /// Reads a stored entry; the error is the code of an unknown kind.
    pub fn decode(bytes: &[u8; ENTRY_SIZE]) -> Result<Self, u8> {
        let code = bytes[KIND_AT];
        EntryKind::from_code(code)
            .map(|kind| Self::with_kind(bytes, kind))
            .ok_or(code)
    }

    fn with_kind(bytes: &[u8; ENTRY_SIZE], kind: EntryKind) -> Self {
        Self {
            first_offset: Offset(u64_at(bytes, 0)),
            first_timestamp: TimestampMs(i64_at(bytes, 8)),
            last_timestamp: TimestampMs(i64_at(bytes, 16)),
            kind,
            size: u40_at(bytes, 25),
            uid: Uid(u32_at(bytes, 30)),
        }
    }

    /// The object that the entry points to.
    #[must_use]
    pub fn object(&self) -> ObjectRef {
        let (offset, uid) = (self.first_offset, self.uid);
        match self.kind {
            EntryKind::Fragment => ObjectRef::Fragment(FragmentRef {
                offset,
                uid,
                size: self.size,
            }),
            EntryKind::Group | EntryKind::KiloGroup | EntryKind::MegaGroup => {
                ObjectRef::Group(GroupRef {
                    offset,
                    kind: self.kind,
                    uid,
                })
            }
        }
    }
}

/// Reads an array of entries. Checks each entry alone, not their order. An error's place counts from the beginning of `bytes`.
/// One pass; the result takes about as much memory as the input.
pub fn decode_entries(bytes: &[u8]) -> Result<Entries, FormatError> {
    rows("entries", 0, bytes).map(read_rows)
}

/// An entry as stored.
pub(super) type Row = [u8; ENTRY_SIZE];

/// The rows of an array of entries, each of them checked; `base` is where `bytes` starts in the object that errors speak of.
pub(super) fn rows<'b>(
    what: &'static str,
    base: usize,
    bytes: &'b [u8],
) -> Result<&'b [Row], FormatError> {
    let (rows, rest) = bytes.as_chunks::<ENTRY_SIZE>();
    if !rest.is_empty() {
        let got = (base + bytes.len()) as u64;
        let problem = FormatProblem::Length {
            expected: (base + (rows.len() + 1) * ENTRY_SIZE) as u64,
            got,
        };
        return Err(FormatError::new(what, got, problem));
    }
    // The kind is all that can be wrong with a row. Looked at first, so that nothing has to be moved once it is read.
    let kind = |row: &Row| EntryKind::from_code(row[KIND_AT]);
    if let Some((index, row)) = rows.iter().enumerate().find(|(_, row)| kind(row).is_none()) {
        let at = (base + index * ENTRY_SIZE + KIND_AT) as u64;
        let problem = FormatProblem::UnknownValue {
            field: "entry kind",
            value: u64::from(row[KIND_AT]),
        };
        return Err(FormatError::new(what, at, problem));
    }
    Ok(rows)
}

/// Reads rows that have been checked. Without a copy.
pub(super) fn read_rows(rows: &[Row]) -> Entries {
    Entries::build(rows.len(), |index| read_row(&rows[index]))
}

/// Reads a row that has been checked: its kind is known.
pub(super) fn read_row(row: &Row) -> Entry {
    Entry::with_kind(
        row,
        EntryKind::from_code(row[KIND_AT]).unwrap_or(EntryKind::Fragment),
    )
}

/// The entries as stored, one after the other. Allocates 34 bytes an entry.
#[must_use]
pub fn encode_entries<'a>(entries: impl IntoIterator<Item = &'a Entry>) -> Vec<u8> {
    let entries = entries.into_iter();
    let mut out = Vec::with_capacity(entries.size_hint().0 * ENTRY_SIZE);
    encode_entries_into(&mut out, entries);
    out
}

/// Appends the stored form of the entries to `out`.
pub fn encode_entries_into<'a>(out: &mut Vec<u8>, entries: impl IntoIterator<Item = &'a Entry>) {
    entries
        .into_iter()
        .for_each(|entry| out.extend_from_slice(&entry.encode()));
}
