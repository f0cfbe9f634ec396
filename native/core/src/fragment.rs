//! Fragments: assembling chunks into one, and the layout of the object it becomes.
//!
//! ```text
//! "OSIF" u32 1 | raw chunks of every span, in order (size bytes) | index: 20 bytes a chunk
//! 0            8                                                 8 + size
//! ```

use crate::bytes::{array, i64_at, u32_at, u64_at};
use crate::error::{FormatError, FormatProblem};
use crate::units::{Offset, TimestampMs};

/// What a fragment object starts with: magic `OSIF` and version 1.
pub const OBJECT_HEADER: [u8; 8] = *b"OSIF\0\0\0\x01";

/// Length of one index record in bytes.
pub const INDEX_RECORD_SIZE: usize = 20;

/// A fragment never holds more chunks, so that its index stays below 5 MiB.
pub const MAX_CHUNKS: u32 = 262_144;

/// Data beyond this many bytes could not be addressed by the 32-bit positions of the index.
pub const MAX_DATA: u64 = 1 << 32;

/// Length in bytes of the object of a fragment with `size` bytes of chunks and `num_chunks` of them (its Content-Length).
#[must_use]
pub const fn object_len(size: u64, num_chunks: u32) -> u64 {
    OBJECT_HEADER.len() as u64 + size + index_len(num_chunks)
}

/// Length in bytes of the index of `num_chunks` chunks.
#[must_use]
pub const fn index_len(num_chunks: u32) -> u64 {
    INDEX_RECORD_SIZE as u64 * num_chunks as u64
}

/// Where one chunk lies in a fragment object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexRecord {
    /// Offset of the chunk's first record.
    pub chunk_id: Offset,
    /// The chunk's timestamp.
    pub timestamp: TimestampMs,
    /// Where its header starts, counted from the first data byte: byte 8 of the object is position 0.
    pub position: u32,
}

impl IndexRecord {
    /// The record as stored.
    #[must_use]
    pub fn encode(&self) -> [u8; INDEX_RECORD_SIZE] {
        let mut out = [0; INDEX_RECORD_SIZE];
        out[..8].copy_from_slice(&self.chunk_id.0.to_be_bytes());
        out[8..16].copy_from_slice(&self.timestamp.0.to_be_bytes());
        out[16..].copy_from_slice(&self.position.to_be_bytes());
        out
    }

    /// Reads one stored record. Every 20 bytes are one.
    #[must_use]
    pub fn decode(bytes: &[u8; INDEX_RECORD_SIZE]) -> Self {
        Self {
            chunk_id: Offset(u64_at(bytes, 0)),
            timestamp: TimestampMs(i64_at(bytes, 8)),
            position: u32_at(bytes, 16),
        }
    }
}

/// Reads a whole index. An error names the record that does not fit: chunk ids and positions ascend, and the first position is 0.
/// One pass; allocates 24 bytes a record.
pub fn decode_index(bytes: &[u8]) -> Result<Vec<IndexRecord>, FormatError> {
    const WHAT: &str = "fragment index";
    let (rows, rest) = bytes.as_chunks::<INDEX_RECORD_SIZE>();
    if !rest.is_empty() {
        let expected = (rows.len() as u64 + 1) * INDEX_RECORD_SIZE as u64;
        let problem = FormatProblem::Length {
            expected,
            got: bytes.len() as u64,
        };
        return Err(FormatError::new(WHAT, bytes.len() as u64, problem));
    }
    let mut records: Vec<IndexRecord> = Vec::with_capacity(rows.len());
    for (row, raw) in rows.iter().enumerate() {
        let at = (row * INDEX_RECORD_SIZE) as u64;
        let record = IndexRecord::decode(raw);
        match records.last() {
            None if record.position != 0 => {
                let problem = FormatProblem::NotZero("position of the first chunk");
                return Err(FormatError::new(WHAT, at + 16, problem));
            }
            Some(last) if record.chunk_id <= last.chunk_id => {
                let problem = FormatProblem::NotAscending {
                    previous: last.chunk_id.0,
                    next: record.chunk_id.0,
                };
                return Err(FormatError::new(WHAT, at, problem));
            }
            Some(last) if record.position <= last.position => {
                let problem = FormatProblem::NotAscending {
                    previous: u64::from(last.position),
                    next: u64::from(record.position),
                };
                return Err(FormatError::new(WHAT, at + 16, problem));
            }
            None | Some(_) => records.push(record),
        }
    }
    Ok(records)
}

/// Checks the first 8 bytes of a fragment object. An error says what is wrong with them.
pub fn check_object_header(bytes: &[u8]) -> Result<(), FormatError> {
    const WHAT: &str = "fragment header";
    if bytes.len() < OBJECT_HEADER.len() {
        let problem = FormatProblem::Length {
            expected: OBJECT_HEADER.len() as u64,
            got: bytes.len() as u64,
        };
        return Err(FormatError::new(WHAT, bytes.len() as u64, problem));
    }
    if bytes[..4] != OBJECT_HEADER[..4] {
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

/// A chunk as the drain loop sees it: its header, and where it lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// Offset of the first record.
    pub chunk_id: Offset,
    /// When it was written.
    pub timestamp: TimestampMs,
    /// Number of records, and so of offsets.
    pub num_records: u32,
    /// Length of the data part in bytes; this is what counts towards a fragment's target.
    pub data_size: u32,
    /// Where its header starts in the segment file, in bytes.
    pub position: u64,
    /// Where the next chunk starts, or would start, in bytes.
    pub next_position: u64,
    /// First offset of the segment, which names the file.
    pub segment_offset: Offset,
    /// CRC-32/IEEE of the data part.
    pub crc: u32,
}

/// Bytes of one segment file that are part of a fragment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// First offset of the segment, which names the file.
    pub segment_offset: Offset,
    /// First byte.
    pub start: u64,
    /// Exclusive.
    pub end: u64,
}

impl Span {
    /// Number of bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }
}

/// A fragment that is ready to be uploaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FragmentMeta {
    /// Offset of the first record.
    pub first_offset: Offset,
    /// Timestamp of the first chunk.
    pub first_timestamp: TimestampMs,
    /// Timestamp of the last chunk.
    pub last_timestamp: TimestampMs,
    /// Offset after the last record.
    pub next_offset: Offset,
    /// Bytes of whole chunks, headers included: the sum of the spans.
    pub size: u64,
    /// Number of chunks.
    pub num_chunks: u32,
    /// Where the bytes are, in the order in which they are uploaded.
    pub spans: Vec<Span>,
}

impl FragmentMeta {
    /// What the machine and the manifest need to know of it.
    #[must_use]
    pub fn fragment(&self) -> Fragment {
        Fragment {
            first_offset: self.first_offset,
            next_offset: self.next_offset,
            first_timestamp: self.first_timestamp,
            last_timestamp: self.last_timestamp,
            size: self.size,
        }
    }
}

/// What the manifest lists of a fragment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fragment {
    /// Offset of the first record.
    pub first_offset: Offset,
    /// Offset after the last record; greater than `first_offset`.
    pub next_offset: Offset,
    /// Timestamp of the first chunk.
    pub first_timestamp: TimestampMs,
    /// Timestamp of the last chunk.
    pub last_timestamp: TimestampMs,
    /// Bytes of whole chunks; below 2^40.
    pub size: u64,
}

/// Why a chunk cannot be part of the fragment that is being assembled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AssemblyError {
    /// The chunk is not the one that follows. Chunks are missing in front of it, or it was there before: nothing was taken.
    #[error("expected chunk {expected}, got {got}")]
    Gap {
        /// Id of the chunk that should have come.
        expected: Offset,
        /// Id of the chunk that came.
        got: Offset,
    },
    /// The chunk ends before it starts: it was not read from a segment.
    #[error("chunk {chunk_id} ends at {end} before it starts at {start}")]
    Backwards {
        /// Its id.
        chunk_id: Offset,
        /// Its position.
        start: u64,
        /// The position after it.
        end: u64,
    },
}

/// What became of a chunk that was offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a chunk that was left belongs to the next fragment"]
pub enum Added {
    /// It is part of the fragment.
    Taken,
    /// The fragment is cut: the chunk belongs to the next one.
    Left,
}

/// A fragment being assembled, as a value: a clone costs a few reference counts, and both go their own ways.
#[derive(Debug, Clone)]
pub struct Assembly {
    target: u64,
    expected: Option<Offset>,
    content: Option<Content>,
    cut: bool,
}

#[derive(Debug, Clone)]
struct Content {
    first_offset: Offset,
    first_timestamp: TimestampMs,
    last_timestamp: TimestampMs,
    next_offset: Offset,
    data_size: u64,
    size: u64,
    num_chunks: u32,
    spans: imbl::Vector<Span>,
    index: imbl::Vector<[u8; INDEX_RECORD_SIZE]>,
}

/// Where an assembly stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AssemblyInfo {
    /// Sum of `data_size` at which the fragment is cut, in bytes.
    pub target: u64,
    /// Id of the only chunk that may come next; `None` where any may.
    pub expected: Option<Offset>,
    /// Whether it is full.
    pub is_cut: bool,
    /// Sum of `data_size` so far, in bytes.
    pub data_size: u64,
    /// Bytes of whole chunks so far.
    pub size: u64,
    /// Chunks so far.
    pub num_chunks: u32,
    /// Offset of the first record; `None` while empty.
    pub first_offset: Option<Offset>,
    /// Offset after the last record; `None` while empty.
    pub next_offset: Option<Offset>,
}

impl Assembly {
    /// An empty one that takes chunks as they come. It is cut once the sum of `data_size` reaches `target` bytes.
    #[must_use]
    pub fn new(target: u64) -> Self {
        Self {
            target,
            expected: None,
            content: None,
            cut: false,
        }
    }

    /// An empty one that takes only a gapless run of chunks, the first of which is `expected`.
    #[must_use]
    pub fn expecting(target: u64, expected: Offset) -> Self {
        Self {
            target,
            expected: Some(expected),
            content: None,
            cut: false,
        }
    }

    /// Offers one chunk. After an error nothing has changed. A chunk that would pass the 32-bit positions of the index cuts the
    /// fragment in front of it. Amortised constant time.
    pub fn add(&mut self, chunk: &Chunk) -> Result<Added, AssemblyError> {
        if self.cut {
            return Ok(Added::Left);
        }
        self.add_past_target(chunk)
    }

    /// The same, for a fragment that has reached its target too: `Left` only where no fragment could hold the chunk. For hosts that offer
    /// single chunks and look at [`is_cut`](Self::is_cut) themselves.
    pub fn add_past_target(&mut self, chunk: &Chunk) -> Result<Added, AssemblyError> {
        if let Some(expected) = self.expected
            && chunk.chunk_id != expected
        {
            return Err(AssemblyError::Gap {
                expected,
                got: chunk.chunk_id,
            });
        }
        let Some(len) = chunk.next_position.checked_sub(chunk.position) else {
            return Err(AssemblyError::Backwards {
                chunk_id: chunk.chunk_id,
                start: chunk.position,
                end: chunk.next_position,
            });
        };
        let content = self
            .content
            .get_or_insert_with(|| Content::starting_with(chunk));
        // A first chunk has position 0 whatever its length, so it always fits.
        if content.num_chunks >= MAX_CHUNKS
            || content.num_chunks > 0 && content.size.saturating_add(len) > MAX_DATA
        {
            self.cut = true;
            return Ok(Added::Left);
        }
        content.push(chunk, len);
        self.cut = content.data_size >= self.target || content.num_chunks >= MAX_CHUNKS;
        self.expected = self.expected.map(|_| content.next_offset);
        Ok(Added::Taken)
    }

    /// Offers chunks in order until one cuts the fragment; returns how many were taken. After an error the chunks in front of the
    /// offending one have been taken.
    pub fn add_all(&mut self, chunks: &[Chunk]) -> Result<usize, AssemblyError> {
        for (taken, chunk) in chunks.iter().enumerate() {
            if self.add(chunk)? == Added::Left {
                return Ok(taken);
            }
        }
        Ok(chunks.len())
    }

    /// Whether the fragment is full. One that is not may be cut all the same, for its age or on demand.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        self.cut
    }

    /// The fragment assembled so far; `None` while it is empty. Copies the spans.
    #[must_use]
    pub fn metadata(&self) -> Option<FragmentMeta> {
        self.content.as_ref().map(|content| FragmentMeta {
            first_offset: content.first_offset,
            first_timestamp: content.first_timestamp,
            last_timestamp: content.last_timestamp,
            next_offset: content.next_offset,
            size: content.size,
            num_chunks: content.num_chunks,
            spans: content.spans.iter().copied().collect(),
        })
    }

    /// The index of the chunks taken so far, as it will end the object. Copies 20 bytes a chunk.
    #[must_use]
    pub fn index_records(&self) -> Vec<u8> {
        let Some(content) = &self.content else {
            return Vec::new();
        };
        let mut out = Vec::with_capacity(content.index.len() * INDEX_RECORD_SIZE);
        for leaf in content.index.leaves() {
            out.extend_from_slice(leaf.as_flattened());
        }
        out
    }

    /// Where it stands. Constant time.
    #[must_use]
    pub fn info(&self) -> AssemblyInfo {
        let content = self.content.as_ref();
        AssemblyInfo {
            target: self.target,
            expected: self.expected,
            is_cut: self.cut,
            data_size: content.map_or(0, |content| content.data_size),
            size: content.map_or(0, |content| content.size),
            num_chunks: content.map_or(0, |content| content.num_chunks),
            first_offset: content.map(|content| content.first_offset),
            next_offset: content.map(|content| content.next_offset),
        }
    }
}

impl Content {
    fn starting_with(chunk: &Chunk) -> Self {
        Self {
            first_offset: chunk.chunk_id,
            first_timestamp: chunk.timestamp,
            last_timestamp: chunk.timestamp,
            next_offset: chunk.chunk_id,
            data_size: 0,
            size: 0,
            num_chunks: 0,
            spans: imbl::Vector::new(),
            index: imbl::Vector::new(),
        }
    }

    fn push(&mut self, chunk: &Chunk, len: u64) {
        // `add` keeps the data below 2^32 bytes in front of every chunk.
        let position = u32::try_from(self.size).unwrap_or(u32::MAX);
        let record = IndexRecord {
            chunk_id: chunk.chunk_id,
            timestamp: chunk.timestamp,
            position,
        };
        self.index.push_back(record.encode());
        self.extend_spans(chunk);
        self.last_timestamp = chunk.timestamp;
        self.next_offset = chunk.chunk_id.advanced_by(u64::from(chunk.num_records));
        self.data_size = self.data_size.saturating_add(u64::from(chunk.data_size));
        self.size = self.size.saturating_add(len);
        self.num_chunks += 1;
    }

    fn extend_spans(&mut self, chunk: &Chunk) {
        if let Some(last) = self.spans.back_mut()
            && last.segment_offset == chunk.segment_offset
            && last.end == chunk.position
        {
            last.end = chunk.next_position;
            return;
        }
        self.spans.push_back(Span {
            segment_offset: chunk.segment_offset,
            start: chunk.position,
            end: chunk.next_position,
        });
    }
}
