//! One thing that is wrong in a bucket: what, where, what should be there and what is.

use std::fmt;

use serde::Serialize;
use stream_s3_core::units::Offset;

/// What is wrong. In JSON the name in snake case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FindingKind {
    /// The stream has objects and no root names them.
    RootMissing,
    /// A root object is there and cannot be decoded.
    RootUnreadable,
    /// The root's first offset is not where its oldest surviving fragment starts.
    RootFirstOffset,
    /// The root's first timestamp is not that of its oldest surviving fragment.
    RootFirstTimestamp,
    /// The root's first-last timestamp is not the last timestamp of its oldest surviving fragment.
    RootFirstLastTimestamp,
    /// The root's total size is not the sum of its fragments.
    TotalSize,
    /// A group is named and not there.
    GroupMissing,
    /// A group object cannot be decoded.
    GroupUnreadable,
    /// A group object is of another kind than the entry that names it, or holds entries of the wrong kind.
    GroupKind,
    /// The entry that names a group does not fit the entries the group holds.
    GroupEntry,
    /// A group reaches into what follows it in the tree.
    EntryOrder,
    /// A fragment is named and not there.
    FragmentMissing,
    /// A fragment is larger than a fragment may be, or holds more chunks.
    FragmentLimit,
    /// An object is not as long as its entry and its chunks say.
    ObjectSize,
    /// A fragment object does not start with its header.
    ObjectHeader,
    /// No chunk header where one must be.
    ChunkHeader,
    /// A chunk id other than the one that follows from the chunk before, or from the entry.
    ChunkId,
    /// The epoch of a chunk is below that of the chunk before.
    ChunkEpoch,
    /// A chunk does not end within the data part of its fragment.
    ChunkBounds,
    /// The data of a chunk does not fit the checksum in its header.
    ChunkCrc,
    /// An index record does not say what the header of its chunk says.
    IndexRecord,
    /// The first or last timestamp of an entry is not that of its first or last chunk.
    EntryTimestamp,
    /// Offsets are missing between two fragments, or between the last one and the end of the root.
    Gap,
    /// Two fragments hold the same offsets, or the last one passes the end of the root.
    Overlap,
}

impl fmt::Display for FindingKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::RootMissing => "no root names the objects of this stream",
            Self::RootUnreadable => "the root cannot be decoded",
            Self::RootFirstOffset => "wrong first offset in the root",
            Self::RootFirstTimestamp => "wrong first timestamp in the root",
            Self::RootFirstLastTimestamp => "wrong first-last timestamp in the root",
            Self::TotalSize => "wrong total size in the root",
            Self::GroupMissing => "the group is not there",
            Self::GroupUnreadable => "the group cannot be decoded",
            Self::GroupKind => "wrong kind of group or entry",
            Self::GroupEntry => "the group does not fit the entry that names it",
            Self::EntryOrder => "the group reaches into what follows it",
            Self::FragmentMissing => "the fragment is not there",
            Self::FragmentLimit => "the fragment is larger than allowed",
            Self::ObjectSize => "wrong object size",
            Self::ObjectHeader => "wrong fragment header",
            Self::ChunkHeader => "no chunk header",
            Self::ChunkId => "wrong chunk id",
            Self::ChunkEpoch => "epoch goes back",
            Self::ChunkBounds => "the chunk passes the end of the fragment's data",
            Self::ChunkCrc => "chunk data does not fit its CRC",
            Self::IndexRecord => "wrong index record",
            Self::EntryTimestamp => "wrong timestamp in the entry",
            Self::Gap => "offsets are missing",
            Self::Overlap => "offsets are there twice",
        })
    }
}

/// One thing that is wrong, and where.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    /// What is wrong.
    pub(crate) kind: FindingKind,
    /// Key of the object it was found in.
    pub(crate) key: String,
    /// Stream offset it concerns: a chunk id, or an entry's first offset.
    pub(crate) offset: Option<u64>,
    /// Where in the object, in bytes from its start.
    pub(crate) byte: Option<u64>,
    /// What should be there.
    pub(crate) expected: String,
    /// What is there.
    pub(crate) found: String,
}

impl Finding {
    /// A finding about an object as a whole.
    pub(crate) fn new(
        kind: FindingKind,
        key: &str,
        expected: impl ToString,
        found: impl ToString,
    ) -> Self {
        Self {
            kind,
            key: key.to_owned(),
            offset: None,
            byte: None,
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }

    /// The same, at a stream offset.
    #[must_use]
    pub(crate) fn at_offset(mut self, offset: Offset) -> Self {
        self.offset = Some(offset.0);
        self
    }

    /// The same, at a byte of the object.
    #[must_use]
    pub(crate) fn at_byte(mut self, byte: u64) -> Self {
        self.byte = Some(byte);
        self
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.key)?;
        if let Some(byte) = self.byte {
            write!(f, " byte {byte}")?;
        }
        if let Some(offset) = self.offset {
            write!(f, " (offset {offset})")?;
        }
        write!(
            f,
            ": {}: expected {}, found {}",
            self.kind, self.expected, self.found
        )
    }
}
