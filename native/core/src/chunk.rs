//! The header that osiris writes in front of every chunk, and the one in front of every segment file.

use crate::bytes::{array, i64_at, u16_at, u32_at, u64_at};
use crate::error::{FormatError, FormatProblem};
use crate::units::{Epoch, Offset, TimestampMs};

/// Length of a chunk header in bytes.
pub const CHUNK_HEADER_SIZE: usize = 48;

/// What a segment file starts with: magic `OSIL` and version 1. The first chunk follows at position 8.
pub const SEGMENT_HEADER: [u8; 8] = *b"OSIL\0\0\0\x01";

const WHAT: &str = "chunk header";
const MAGIC: u8 = 5;
const VERSION: u8 = 0;

/// What a chunk carries. All of them are tiered: offsets count through every type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ChunkType {
    /// Records of users.
    User,
    /// Changes of osiris' tracking state.
    TrackingDelta,
    /// The whole of osiris' tracking state; takes one offset.
    TrackingSnapshot,
}

impl ChunkType {
    /// As on disk.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::User => 0,
            Self::TrackingDelta => 1,
            Self::TrackingSnapshot => 2,
        }
    }

    fn from_code(code: u8) -> Option<Self> {
        match code {
            0 => Some(Self::User),
            1 => Some(Self::TrackingDelta),
            2 => Some(Self::TrackingSnapshot),
            _ => None,
        }
    }
}

/// A chunk header, all of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkHeader {
    /// What the chunk carries.
    pub kind: ChunkType,
    /// Number of entries; an entry is a record or a batch of them.
    pub num_entries: u16,
    /// Number of records, and so of offsets.
    pub num_records: u32,
    /// When the writer wrote it.
    pub timestamp: TimestampMs,
    /// Term of that writer.
    pub epoch: Epoch,
    /// Offset of the first record.
    pub chunk_id: Offset,
    /// CRC-32/IEEE of the data part alone.
    pub crc: u32,
    /// Length of the data part in bytes.
    pub data_size: u32,
    /// Length of the trailer in bytes; it follows the data.
    pub trailer_size: u32,
    /// Length of the Bloom filter in bytes; it precedes the data.
    pub filter_size: u8,
    /// Bytes without a meaning yet, kept as they are.
    pub reserved: [u8; 3],
}

impl ChunkHeader {
    /// Reads the header at the beginning of `bytes`; what follows it is ignored. An error names the field and its place. Constant time.
    pub fn decode(bytes: &[u8]) -> Result<Self, FormatError> {
        let fail = |at, problem| Err(FormatError::new(WHAT, at, problem));
        if bytes.len() < CHUNK_HEADER_SIZE {
            let problem = FormatProblem::Length {
                expected: CHUNK_HEADER_SIZE as u64,
                got: bytes.len() as u64,
            };
            return fail(bytes.len() as u64, problem);
        }
        if bytes[0] >> 4 != MAGIC {
            return fail(0, FormatProblem::Magic(array(bytes, 0)));
        }
        if bytes[0] & 0x0f != VERSION {
            return fail(0, FormatProblem::Version(u32::from(bytes[0] & 0x0f)));
        }
        let Some(kind) = ChunkType::from_code(bytes[1]) else {
            let problem = FormatProblem::UnknownValue {
                field: "chunk type",
                value: u64::from(bytes[1]),
            };
            return fail(1, problem);
        };
        Ok(Self {
            kind,
            num_entries: u16_at(bytes, 2),
            num_records: u32_at(bytes, 4),
            timestamp: TimestampMs(i64_at(bytes, 8)),
            epoch: Epoch(u64_at(bytes, 16)),
            chunk_id: Offset(u64_at(bytes, 24)),
            crc: u32_at(bytes, 32),
            data_size: u32_at(bytes, 36),
            trailer_size: u32_at(bytes, 40),
            filter_size: bytes[44],
            reserved: array(bytes, 45),
        })
    }

    /// The bytes that [`decode`](Self::decode) reads.
    #[must_use]
    pub fn encode(&self) -> [u8; CHUNK_HEADER_SIZE] {
        let mut out = [0; CHUNK_HEADER_SIZE];
        out[0] = MAGIC << 4 | VERSION;
        out[1] = self.kind.code();
        out[2..4].copy_from_slice(&self.num_entries.to_be_bytes());
        out[4..8].copy_from_slice(&self.num_records.to_be_bytes());
        out[8..16].copy_from_slice(&self.timestamp.0.to_be_bytes());
        out[16..24].copy_from_slice(&self.epoch.0.to_be_bytes());
        out[24..32].copy_from_slice(&self.chunk_id.0.to_be_bytes());
        out[32..36].copy_from_slice(&self.crc.to_be_bytes());
        out[36..40].copy_from_slice(&self.data_size.to_be_bytes());
        out[40..44].copy_from_slice(&self.trailer_size.to_be_bytes());
        out[44] = self.filter_size;
        out[45..48].copy_from_slice(&self.reserved);
        out
    }

    /// Bytes that the chunk takes in a segment file and in a fragment: header, filter, data and trailer.
    #[must_use]
    pub fn len_in_segment(&self) -> u64 {
        CHUNK_HEADER_SIZE as u64
            + u64::from(self.filter_size)
            + u64::from(self.data_size)
            + u64::from(self.trailer_size)
    }

    /// Id of the chunk that follows.
    #[must_use]
    pub fn next_chunk_id(&self) -> Offset {
        self.chunk_id.advanced_by(u64::from(self.num_records))
    }
}

/// Checks the first 8 bytes of a segment file. An error says what is wrong with them.
pub fn check_segment_header(bytes: &[u8]) -> Result<(), FormatError> {
    const WHAT: &str = "segment header";
    if bytes.len() < SEGMENT_HEADER.len() {
        let problem = FormatProblem::Length {
            expected: SEGMENT_HEADER.len() as u64,
            got: bytes.len() as u64,
        };
        return Err(FormatError::new(WHAT, bytes.len() as u64, problem));
    }
    if bytes[..4] != SEGMENT_HEADER[..4] {
        return Err(FormatError::new(
            WHAT,
            0,
            FormatProblem::Magic(array(bytes, 0)),
        ));
    }
    match u32_at(bytes, 4) {
        1 => Ok(()),
        version => Err(FormatError::new(WHAT, 4, FormatProblem::Version(version))),
    }
}
