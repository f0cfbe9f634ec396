//! What a fragment object will be, found out before its first byte is sent, from a few bytes of each chunk.
//!
//! osiris wrote the CRC of a chunk's data into the chunk's header when the records came in. A [`Planner`] reads what is
//! around the data (header, filter, trailer), and combines its CRC with the one that osiris wrote, so the object's CRC
//! speaks for the bytes as they were then, without a look at the data. The data is read once, to be sent. Whoever
//! compares the object with that CRC finds every bit that has flipped: the store while it stores, or a [`Check`] that goes along with
//! the upload where the store does not, and that finds the chunk which is to blame once a store has refused an object.

use std::fs::File;
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use stream_s3_core::chunk::{CHUNK_HEADER_SIZE, ChunkHeader};
use stream_s3_core::error::TransferError;
use stream_s3_core::fragment::{INDEX_RECORD_SIZE, IndexRecord, OBJECT_HEADER, object_len};
use stream_s3_core::units::Offset;

use crate::crc;
use crate::segment::read_at;

/// Least room that [`Planner::walk`] needs to read into, in bytes.
pub const ROOM: usize = 64 << 10;
/// Chunks up to this length are read whole, many at once: copying them costs less than a system call each.
const DENSE: u64 = 8 << 10;
/// Bytes that one read takes of longer chunks: the trailer of one, header and filter of the next.
const SPARSE_READ: usize = 512;
/// Reads of one step of a walk: well under a millisecond from the page cache.
const READS_PER_STEP: u32 = 1024;

/// The object that a fragment becomes. Memory: 24 bytes a chunk.
#[derive(Debug)]
pub struct Plan {
    /// Bytes of the whole object.
    pub object_len: u64,
    /// CRC-32 of the whole object, if its chunks are what osiris wrote.
    pub object_crc: u32,
    /// The index records that end the object.
    pub index: Bytes,
    /// Data bytes: the sum of the spans.
    size: u64,
    /// CRC-32 of the object's bytes up to the end of each chunk.
    chunk_crcs: Vec<u32>,
}

/// Makes a plan, chunk by chunk.
#[derive(Debug)]
pub struct Planner {
    next: Offset,
    end: Offset,
    /// Position of the next chunk, counted from the first data byte of the object.
    position: u64,
    crc: u32,
    index: Vec<u8>,
    chunk_crcs: Vec<u32>,
}

/// Why there is no plan.
#[derive(Debug)]
pub enum Unplanned {
    /// The file cannot be read.
    Unreadable(io::Error),
    /// The chunk that should be here is not, or not whole.
    Corrupt(Offset),
}

/// Compares the bytes of a fragment with its plan.
#[derive(Debug)]
pub struct Check {
    plan: Arc<Plan>,
    crc: u32,
    position: u64,
    chunk: usize,
}

/// The part of a file that has been read last.
struct Window<'f> {
    file: &'f File,
    room: &'f mut [u8],
    start: u64,
    len: usize,
    /// Where the span ends; nothing beyond is looked at.
    end: u64,
    ahead: usize,
    reads: u32,
}

impl Window<'_> {
    /// `len` bytes at `at`; `None` where the span or the file ends before.
    fn bytes(&mut self, at: u64, len: usize) -> io::Result<Option<&[u8]>> {
        let held = self.start..self.start + self.len as u64;
        if at < held.start || at + len as u64 > held.end {
            let left = usize::try_from(self.end.saturating_sub(at)).unwrap_or(usize::MAX);
            let wanted = len.max(self.ahead).min(self.room.len()).min(left);
            (self.start, self.len) = (at, read_at(self.file, &mut self.room[..wanted], at)?);
            self.reads += 1;
        }
        let from = usize::try_from(at - self.start).unwrap_or(usize::MAX);
        Ok(self.room[..self.len].get(from..from.saturating_add(len)))
    }
}

impl Planner {
    /// Expects chunks that cover `first..end` without a gap.
    #[must_use]
    pub fn new(first: Offset, end: Offset) -> Self {
        Self {
            next: first,
            end,
            position: 0,
            crc: crc32fast::hash(&OBJECT_HEADER),
            index: Vec::new(),
            chunk_crcs: Vec::new(),
        }
    }

    /// Takes chunks of `file` from `at` up to `end`, where one must end; answers how far it came. One step does not go
    /// on for long: call again until it answers `end`. Blocks on the file; reads into `room`, at least [`ROOM`] bytes.
    ///
    /// # Errors
    /// A failed read, or the chunk that is damaged around its data, is cut short, or does not join on.
    pub fn walk(
        &mut self,
        file: &File,
        mut at: u64,
        end: u64,
        room: &mut [u8],
    ) -> Result<u64, Unplanned> {
        let mut window = Window {
            file,
            room,
            start: at,
            len: 0,
            end,
            ahead: SPARSE_READ,
            reads: 0,
        };
        while at < end && window.reads < READS_PER_STEP {
            at += self.chunk(at, &mut window)?;
        }
        Ok(at)
    }

    /// The plan, once every span has been walked.
    ///
    /// # Errors
    /// The chunk that is missing at the end.
    pub fn finish(self) -> Result<Plan, TransferError> {
        let missing = TransferError::CorruptChunk(self.next);
        let Ok(chunks) = u32::try_from(self.chunk_crcs.len()) else {
            return Err(missing);
        };
        if self.next != self.end {
            return Err(missing);
        }
        Ok(Plan {
            object_len: object_len(self.position, chunks),
            object_crc: crc::extend(self.crc, &self.index),
            index: Bytes::from(self.index),
            size: self.position,
            chunk_crcs: self.chunk_crcs,
        })
    }

    /// Takes the chunk at `at`; answers its length.
    fn chunk(&mut self, at: u64, window: &mut Window) -> Result<u64, Unplanned> {
        let name = self.next;
        let bytes = need(window, name, at, CHUNK_HEADER_SIZE)?;
        // Of the very bytes that are looked at: another read may find others.
        self.crc = crc::extend(self.crc, bytes);
        let chunk = self.header(bytes)?;
        let len = chunk.len_in_segment();
        if at + len > window.end {
            return Err(Unplanned::Corrupt(name));
        }
        let filter = (
            at + CHUNK_HEADER_SIZE as u64,
            usize::from(chunk.filter_size),
        );
        self.crc = crc::extend(self.crc, need(window, name, filter.0, filter.1)?);
        self.crc = crc::combine(self.crc, chunk.crc, chunk.data_size);
        window.ahead = if len > DENSE { SPARSE_READ } else { ROOM };
        let mut trailer = u64::from(chunk.trailer_size);
        while trailer > 0 {
            let piece = trailer.min(ROOM as u64);
            let bytes = need(window, name, at + len - trailer, piece as usize)?;
            self.crc = crc::extend(self.crc, bytes);
            trailer -= piece;
        }
        self.chunk_crcs.push(self.crc);
        self.position += len;
        self.next = chunk.next_chunk_id();
        Ok(len)
    }

    /// The chunk must be the one that follows, and lie inside the fragment.
    fn header(&mut self, bytes: &[u8]) -> Result<ChunkHeader, Unplanned> {
        let corrupt = Unplanned::Corrupt(self.next);
        let Ok(chunk) = ChunkHeader::decode(bytes) else {
            return Err(corrupt);
        };
        let follows = chunk.next_chunk_id();
        if chunk.chunk_id != self.next || follows <= self.next || follows > self.end {
            return Err(corrupt);
        }
        let Ok(position) = u32::try_from(self.position) else {
            return Err(corrupt);
        };
        let record = IndexRecord {
            chunk_id: chunk.chunk_id,
            timestamp: chunk.timestamp,
            position,
        };
        self.index.extend_from_slice(&record.encode());
        Ok(chunk)
    }
}

fn need<'w>(
    window: &'w mut Window,
    chunk: Offset,
    at: u64,
    len: usize,
) -> Result<&'w [u8], Unplanned> {
    match window.bytes(at, len) {
        Ok(Some(bytes)) => Ok(bytes),
        Ok(None) => Err(Unplanned::Corrupt(chunk)),
        Err(error) => Err(Unplanned::Unreadable(error)),
    }
}

impl Plan {
    /// Bytes of memory that the plan takes.
    #[must_use]
    pub fn memory(&self) -> u64 {
        (self.index.len() + self.chunk_crcs.len() * size_of::<u32>()) as u64
    }

    /// The chunk that a data byte of the object belongs to, as an error. `position` counts from the first data byte.
    #[must_use]
    pub fn corrupt_at(&self, position: u64) -> TransferError {
        let records = self.records();
        let after = records
            .partition_point(|record| u64::from(IndexRecord::decode(record).position) <= position);
        self.corrupt(after.saturating_sub(1))
    }

    fn corrupt(&self, chunk: usize) -> TransferError {
        self.records()
            .get(chunk)
            .map_or(TransferError::ChecksumMismatch, |record| {
                TransferError::CorruptChunk(IndexRecord::decode(record).chunk_id)
            })
    }

    fn records(&self) -> &[[u8; INDEX_RECORD_SIZE]] {
        self.index.as_chunks().0
    }

    /// Where a chunk ends, counted from the first data byte.
    fn chunk_end(&self, chunk: usize) -> u64 {
        self.records().get(chunk + 1).map_or(self.size, |next| {
            u64::from(IndexRecord::decode(next).position)
        })
    }
}

impl Check {
    /// Starts before the first data byte.
    #[must_use]
    pub fn new(plan: Arc<Plan>) -> Self {
        Self {
            plan,
            crc: crc32fast::hash(&OBJECT_HEADER),
            position: 0,
            chunk: 0,
        }
    }

    /// Takes the next bytes. A chunk that is not what it should be is named as soon as its last byte is seen.
    ///
    /// # Errors
    /// `CorruptChunk`; `ChecksumMismatch` for bytes beyond the last chunk.
    pub fn feed(&mut self, mut bytes: &[u8]) -> Result<(), TransferError> {
        while !bytes.is_empty() {
            let Some(&expected) = self.plan.chunk_crcs.get(self.chunk) else {
                return Err(TransferError::ChecksumMismatch);
            };
            let left = self.plan.chunk_end(self.chunk) - self.position;
            let taken = usize::try_from(left).map_or(bytes.len(), |left| left.min(bytes.len()));
            self.crc = crc::extend(self.crc, &bytes[..taken]);
            self.position += taken as u64;
            bytes = &bytes[taken..];
            if taken as u64 == left {
                if self.crc != expected {
                    return Err(self.plan.corrupt(self.chunk));
                }
                self.chunk += 1;
            }
        }
        Ok(())
    }
}
