//! The root object, and the header that groups share with it, 49 bytes:
//!
//! ```text
//! 0       4         8             16            24                32                     40                       49
//! magic | u32 1   | first offset | next offset | first timestamp | first-last timestamp | 2 zero bits, total size | entries
//! ```

use super::entry::{read_rows, rows};
use super::{ENTRY_SIZE, EntryKind, Manifest, check_entries, encode_entries_into};
use crate::bytes::{array, i64_at, u32_at, u64_at, u72_at};
use crate::error::{FormatError, FormatProblem};
use crate::units::{Offset, Revision, TimestampMs};

/// Length of the header of roots and groups in bytes.
pub const MANIFEST_HEADER_SIZE: usize = 49;

/// Largest total size that a root can hold, in bytes (2^70 - 1).
pub const MAX_TOTAL_SIZE: u128 = (1 << 70) - 1;

const WHAT: &str = "root";
const MAGIC: [u8; 4] = *b"OSIR";
const VERSION: u32 = 1;

pub(super) const FIRST_OFFSET_AT: u64 = 8;
pub(super) const NEXT_OFFSET_AT: u64 = 16;
pub(super) const FIRST_TIMESTAMP_AT: u64 = 24;
pub(super) const FIRST_LAST_TIMESTAMP_AT: u64 = 32;
pub(super) const TOTAL_SIZE_AT: u64 = 40;

/// The fields between magic and entries; each is what [`Manifest`] has under that name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Oldest offset that is still tiered.
    pub first_offset: Offset,
    /// Offset after the newest tiered record.
    pub next_offset: Offset,
    /// Timestamp of the oldest fragment's first chunk.
    pub first_timestamp: TimestampMs,
    /// Timestamp of the oldest fragment's last chunk.
    pub first_last_timestamp: TimestampMs,
    /// Bytes of all tiered fragments, at most [`MAX_TOTAL_SIZE`].
    pub total_size: u128,
}

/// The object that stores a manifest. Fails only where the total size does not fit its 70 bits. One pass; allocates the result.
pub fn encode_root(manifest: &Manifest) -> Result<Vec<u8>, FormatError> {
    let header = Header {
        first_offset: manifest.first_offset,
        next_offset: manifest.next_offset,
        first_timestamp: manifest.first_timestamp,
        first_last_timestamp: manifest.first_last_timestamp,
        total_size: manifest.total_size,
    };
    let mut out = header.begin_root(manifest.entries.len() * ENTRY_SIZE)?;
    manifest
        .entries
        .pieces()
        .for_each(|piece| encode_entries_into(&mut out, piece));
    Ok(out)
}

/// The same of entries as they are stored, which are copied. Fails also where they are no array of entries of known kinds; what else
/// they say is not looked at. The place of such an error counts from the beginning of `entries`.
pub fn encode_root_of(header: &Header, entries: &[u8]) -> Result<Vec<u8>, FormatError> {
    let mut out = header.begin_root(entries.len())?;
    rows("entries", 0, entries)?;
    out.extend_from_slice(entries);
    Ok(out)
}

/// Reads a stored manifest; its revision is 0. The error says which byte is wrong, and how: magic, version, length, the two zero bits,
/// an unknown kind, or offsets that contradict each other. Never panics, and allocates no more than the input's size. One pass.
pub fn decode_root(bytes: &[u8]) -> Result<Manifest, FormatError> {
    check_length(WHAT, bytes)?;
    if bytes[..4] != MAGIC {
        return Err(FormatError::new(
            WHAT,
            0,
            FormatProblem::Magic(array(bytes, 0)),
        ));
    }
    let header = Header::read(WHAT, bytes)?;
    let manifest = Manifest {
        first_offset: header.first_offset,
        first_timestamp: header.first_timestamp,
        first_last_timestamp: header.first_last_timestamp,
        next_offset: header.next_offset,
        total_size: header.total_size,
        revision: Revision(0),
        entries: rows(WHAT, MANIFEST_HEADER_SIZE, &bytes[MANIFEST_HEADER_SIZE..]).map(read_rows)?,
    };
    check_manifest(&manifest)?;
    Ok(manifest)
}

impl Header {
    /// A root up to its entries, with room for them.
    fn begin_root(&self, entries_len: usize) -> Result<Vec<u8>, FormatError> {
        if self.total_size > MAX_TOTAL_SIZE {
            let problem = FormatProblem::TooLarge {
                field: "total size",
                value: self.total_size,
            };
            return Err(FormatError::new(WHAT, TOTAL_SIZE_AT, problem));
        }
        let mut out = Vec::with_capacity(MANIFEST_HEADER_SIZE + entries_len);
        self.write(MAGIC, &mut out);
        Ok(out)
    }

    pub(super) fn write(&self, magic: [u8; 4], out: &mut Vec<u8>) {
        out.extend_from_slice(&magic);
        out.extend_from_slice(&VERSION.to_be_bytes());
        out.extend_from_slice(&self.first_offset.0.to_be_bytes());
        out.extend_from_slice(&self.next_offset.0.to_be_bytes());
        out.extend_from_slice(&self.first_timestamp.0.to_be_bytes());
        out.extend_from_slice(&self.first_last_timestamp.0.to_be_bytes());
        out.extend_from_slice(&self.total_size.to_be_bytes()[7..]);
    }

    /// Reads version and fields; the caller has checked length and magic.
    pub(super) fn read(what: &'static str, bytes: &[u8]) -> Result<Self, FormatError> {
        let version = u32_at(bytes, 4);
        if version != VERSION {
            return Err(FormatError::new(what, 4, FormatProblem::Version(version)));
        }
        let total_size = u72_at(bytes, 40);
        if total_size > MAX_TOTAL_SIZE {
            let problem = FormatProblem::NotZero("the two bits in front of the total size");
            return Err(FormatError::new(what, TOTAL_SIZE_AT, problem));
        }
        Ok(Self {
            first_offset: Offset(u64_at(bytes, 8)),
            next_offset: Offset(u64_at(bytes, 16)),
            first_timestamp: TimestampMs(i64_at(bytes, 24)),
            first_last_timestamp: TimestampMs(i64_at(bytes, 32)),
            total_size,
        })
    }
}

/// A header and whole entries.
pub(super) fn check_length(what: &'static str, bytes: &[u8]) -> Result<(), FormatError> {
    let got = bytes.len() as u64;
    let length = |expected| {
        let problem = FormatProblem::Length { expected, got };
        Err(FormatError::new(what, got, problem))
    };
    let Some(rest) = bytes.len().checked_sub(MANIFEST_HEADER_SIZE) else {
        return length(MANIFEST_HEADER_SIZE as u64);
    };
    match rest % ENTRY_SIZE {
        0 => Ok(()),
        over => length(got + (ENTRY_SIZE - over) as u64),
    }
}

pub(super) fn check_manifest(manifest: &Manifest) -> Result<(), FormatError> {
    let inconsistent = |at, text| {
        Err(FormatError::new(
            WHAT,
            at,
            FormatProblem::Inconsistent(text),
        ))
    };
    if manifest.total_size > MAX_TOTAL_SIZE {
        let problem = FormatProblem::TooLarge {
            field: "total size",
            value: manifest.total_size,
        };
        return Err(FormatError::new(WHAT, TOTAL_SIZE_AT, problem));
    }
    if manifest.first_offset > manifest.next_offset {
        return inconsistent(FIRST_OFFSET_AT, "first offset lies beyond next offset");
    }
    check_entries(
        WHAT,
        MANIFEST_HEADER_SIZE,
        manifest.entries.pieces().flatten(),
    )?;
    let (Some(first), Some(last)) = (manifest.entries.front(), manifest.entries.back()) else {
        return Ok(());
    };
    if last.first_offset >= manifest.next_offset {
        return inconsistent(
            NEXT_OFFSET_AT,
            "the last entry starts at or beyond next offset",
        );
    }
    // Retention consumes a group from within, so the tier may begin inside the first entry; a fragment goes as a whole.
    let inside = first.first_offset <= manifest.first_offset
        && manifest.first_offset < manifest.entry_end(0);
    let fits = match first.kind {
        EntryKind::Fragment => first.first_offset == manifest.first_offset,
        EntryKind::Group | EntryKind::KiloGroup | EntryKind::MegaGroup => inside,
    };
    if fits {
        Ok(())
    } else {
        inconsistent(FIRST_OFFSET_AT, "first offset is not in the first entry")
    }
}
