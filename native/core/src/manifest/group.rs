//! Group objects: entries that have moved out of the root, under the same header.

use super::entry::{read_row, rows};
use super::root::{
    FIRST_LAST_TIMESTAMP_AT, FIRST_OFFSET_AT, FIRST_TIMESTAMP_AT, Header, MANIFEST_HEADER_SIZE,
    NEXT_OFFSET_AT, TOTAL_SIZE_AT, check_length,
};
use super::{ENTRY_SIZE, Entry, EntryKind, check_entries, encode_entries_into};
use crate::bytes::array;
use crate::error::{FormatError, FormatProblem};
use crate::units::{Offset, TimestampMs};

const WHAT: &str = "group";

/// A group as read back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Its level; never `Fragment`.
    pub kind: EntryKind,
    /// At least one, oldest first, ascending.
    pub entries: Vec<Entry>,
}

fn magic(kind: EntryKind) -> Option<[u8; 4]> {
    match kind {
        EntryKind::Fragment => None,
        EntryKind::Group => Some(*b"OSIG"),
        EntryKind::KiloGroup => Some(*b"OSIK"),
        EntryKind::MegaGroup => Some(*b"OSIM"),
    }
}

/// The object that stores a group. Fails where there is no such object: no entries, or `kind` is `Fragment`. One pass; allocates the result.
pub fn encode_group(kind: EntryKind, entries: &[Entry]) -> Result<Vec<u8>, FormatError> {
    let Some(magic) = magic(kind) else {
        let problem = FormatProblem::Inconsistent("a fragment is not a group");
        return Err(FormatError::new(WHAT, 0, problem));
    };
    let Some(first) = entries.first() else {
        return Err(empty());
    };
    let header = Header {
        first_offset: first.first_offset,
        next_offset: Offset(0),
        first_timestamp: first.first_timestamp,
        first_last_timestamp: TimestampMs(0),
        total_size: 0,
    };
    let mut out = Vec::with_capacity(MANIFEST_HEADER_SIZE + entries.len() * ENTRY_SIZE);
    header.write(magic, &mut out);
    encode_entries_into(&mut out, entries);
    Ok(out)
}

/// Reads a stored group. The error says which byte is wrong, and how. Never panics, and allocates no more than about the input's size.
/// One pass.
pub fn decode_group(bytes: &[u8]) -> Result<Group, FormatError> {
    check_length(WHAT, bytes)?;
    let found: [u8; 4] = array(bytes, 0);
    let kinds = [EntryKind::Group, EntryKind::KiloGroup, EntryKind::MegaGroup];
    let Some(kind) = kinds.into_iter().find(|kind| magic(*kind) == Some(found)) else {
        return Err(FormatError::new(WHAT, 0, FormatProblem::Magic(found)));
    };
    let header = Header::read(WHAT, bytes)?;
    let rows = rows(WHAT, MANIFEST_HEADER_SIZE, &bytes[MANIFEST_HEADER_SIZE..])?;
    let entries: Vec<_> = rows.iter().map(read_row).collect();
    check_entries(WHAT, MANIFEST_HEADER_SIZE, &entries)?;
    check_header(&header, entries.first().ok_or_else(empty)?)?;
    Ok(Group { kind, entries })
}

fn empty() -> FormatError {
    let expected = (MANIFEST_HEADER_SIZE + ENTRY_SIZE) as u64;
    let problem = FormatProblem::Length {
        expected,
        got: MANIFEST_HEADER_SIZE as u64,
    };
    FormatError::new(WHAT, MANIFEST_HEADER_SIZE as u64, problem)
}

/// The first entry repeats two fields; the others have no meaning in a group.
fn check_header(header: &Header, first: &Entry) -> Result<(), FormatError> {
    let fail = |at, problem| Err(FormatError::new(WHAT, at, problem));
    if header.first_offset != first.first_offset {
        let text = "first offset differs from the first entry's";
        return fail(FIRST_OFFSET_AT, FormatProblem::Inconsistent(text));
    }
    if header.first_timestamp != first.first_timestamp {
        let text = "first timestamp differs from the first entry's";
        return fail(FIRST_TIMESTAMP_AT, FormatProblem::Inconsistent(text));
    }
    if header.next_offset != Offset(0) {
        return fail(NEXT_OFFSET_AT, FormatProblem::NotZero("next offset"));
    }
    if header.first_last_timestamp != TimestampMs(0) {
        return fail(
            FIRST_LAST_TIMESTAMP_AT,
            FormatProblem::NotZero("first-last timestamp"),
        );
    }
    if header.total_size != 0 {
        return fail(TOTAL_SIZE_AT, FormatProblem::NotZero("total size"));
    }
    Ok(())
}
