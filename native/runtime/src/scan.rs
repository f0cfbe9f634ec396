//! What a fragment object will be, found out before its first byte is sent.
//!
//! The first pass over the chunks of a fragment ([`Scan`]) checks each chunk's data against the CRC in its header,
//! collects the index records, and computes the CRC of the object that is to be. The second pass ([`Check`]) goes along
//! with the upload and compares, chunk by chunk, with what the first one saw, so that a bit that flips in between is
//! caught on any store, and the chunk can be named.

use bytes::Bytes;
use crc32fast::Hasher;
use stream_s3_core::chunk::{CHUNK_HEADER_SIZE, ChunkHeader};
use stream_s3_core::error::TransferError;
use stream_s3_core::fragment::{INDEX_RECORD_SIZE, IndexRecord, OBJECT_HEADER, object_len};
use stream_s3_core::units::Offset;

/// The object that a fragment becomes. Memory: 24 bytes a chunk.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    /// Data bytes: the sum of the spans.
    pub(crate) size: u64,
    /// Bytes of the whole object.
    pub(crate) object_len: u64,
    /// CRC-32 of the whole object.
    pub(crate) object_crc: u32,
    /// The index records that end the object.
    pub(crate) index: Bytes,
    /// CRC-32 of the object's bytes up to the end of each chunk.
    chunk_crcs: Vec<u32>,
}

/// The first pass: fed with the bytes of the spans, in order, in pieces of any size.
#[derive(Debug)]
pub(crate) struct Scan {
    next: Offset,
    end: Offset,
    /// Position of the next byte, counted from the first data byte of the object.
    position: u64,
    object: Hasher,
    at: Part,
    index: Vec<u8>,
    chunk_crcs: Vec<u32>,
}

/// The part of a chunk that comes next.
#[derive(Debug)]
enum Part {
    Header {
        bytes: [u8; CHUNK_HEADER_SIZE],
        have: usize,
    },
    Filter {
        chunk: ChunkHeader,
        left: u64,
    },
    Data {
        chunk: ChunkHeader,
        left: u64,
        crc: Hasher,
    },
    Trailer {
        left: u64,
    },
}

/// The second pass: fed with the same bytes again.
#[derive(Debug)]
pub(crate) struct Check {
    plan: Plan,
    object: Hasher,
    position: u64,
    chunk: usize,
}

impl Scan {
    /// Expects chunks that cover `first..end` without a gap.
    pub(crate) fn new(first: Offset, end: Offset) -> Self {
        let mut object = Hasher::new();
        object.update(&OBJECT_HEADER);
        Self {
            next: first,
            end,
            position: 0,
            object,
            at: Part::start(),
            index: Vec::new(),
            chunk_crcs: Vec::new(),
        }
    }

    /// Takes the next bytes.
    pub(crate) fn feed(&mut self, mut bytes: &[u8]) -> Result<(), TransferError> {
        while !bytes.is_empty() {
            let taken = self.take(bytes)?;
            bytes = &bytes[taken..];
        }
        Ok(())
    }

    /// The chunk that cannot be read whole when the bytes end here, if they end inside one.
    pub(crate) fn torn(&self) -> Option<Offset> {
        match self.at {
            Part::Header { have: 0, .. } => None,
            Part::Header { .. }
            | Part::Filter { .. }
            | Part::Data { .. }
            | Part::Trailer { .. } => Some(self.current()),
        }
    }

    /// The chunk that the next byte belongs to.
    pub(crate) fn current(&self) -> Offset {
        match &self.at {
            Part::Header { .. } => self.next,
            Part::Filter { chunk, .. } | Part::Data { chunk, .. } => chunk.chunk_id,
            // `next` is past the chunk already; the last index record names it.
            Part::Trailer { .. } => last_chunk(&self.index).unwrap_or(self.next),
        }
    }

    /// The plan, once every span has been fed.
    pub(crate) fn finish(mut self) -> Result<Plan, TransferError> {
        if let Some(chunk) = self.torn() {
            return Err(TransferError::CorruptChunk(chunk));
        }
        if self.next != self.end {
            return Err(TransferError::CorruptChunk(self.next));
        }
        self.object.update(&self.index);
        let chunks = u32::try_from(self.chunk_crcs.len())
            .map_err(|_| TransferError::CorruptChunk(self.next))?;
        Ok(Plan {
            size: self.position,
            object_len: object_len(self.position, chunks),
            object_crc: self.object.finalize(),
            index: Bytes::from(self.index),
            chunk_crcs: self.chunk_crcs,
        })
    }

    /// Consumes a part of `bytes`, at least one byte, and moves on.
    fn take(&mut self, bytes: &[u8]) -> Result<usize, TransferError> {
        let taken = match &mut self.at {
            Part::Header {
                bytes: header,
                have,
            } => {
                let n = bytes.len().min(CHUNK_HEADER_SIZE - *have);
                header[*have..*have + n].copy_from_slice(&bytes[..n]);
                *have += n;
                n
            }
            Part::Filter { left, .. } | Part::Trailer { left } => advance(left, bytes),
            Part::Data { left, crc, .. } => {
                let n = advance(left, bytes);
                crc.update(&bytes[..n]);
                n
            }
        };
        self.object.update(&bytes[..taken]);
        self.position += taken as u64;
        self.settle()?;
        Ok(taken)
    }

    /// Leaves every part that has no bytes left.
    fn settle(&mut self) -> Result<(), TransferError> {
        loop {
            self.at = match std::mem::replace(&mut self.at, Part::start()) {
                Part::Header { bytes, have } if have == CHUNK_HEADER_SIZE => {
                    let chunk = self.header(&bytes)?;
                    Part::Filter {
                        left: u64::from(chunk.filter_size),
                        chunk,
                    }
                }
                Part::Filter { chunk, left: 0 } => Part::Data {
                    left: u64::from(chunk.data_size),
                    chunk,
                    crc: Hasher::new(),
                },
                Part::Data {
                    chunk,
                    left: 0,
                    crc,
                } => {
                    if crc.finalize() != chunk.crc {
                        return Err(TransferError::CorruptChunk(chunk.chunk_id));
                    }
                    Part::Trailer {
                        left: u64::from(chunk.trailer_size),
                    }
                }
                Part::Trailer { left: 0 } => {
                    self.chunk_crcs.push(self.object.clone().finalize());
                    self.at = Part::start();
                    return Ok(());
                }
                unfinished @ (Part::Header { .. }
                | Part::Filter { .. }
                | Part::Data { .. }
                | Part::Trailer { .. }) => {
                    self.at = unfinished;
                    return Ok(());
                }
            };
        }
    }

    /// A whole header has been read: the chunk must be the one that follows, and lie inside the fragment.
    fn header(&mut self, bytes: &[u8; CHUNK_HEADER_SIZE]) -> Result<ChunkHeader, TransferError> {
        let corrupt = TransferError::CorruptChunk(self.next);
        let Ok(chunk) = ChunkHeader::decode(bytes) else {
            return Err(corrupt);
        };
        let follows = chunk.next_chunk_id();
        if chunk.chunk_id != self.next || follows <= self.next || follows > self.end {
            return Err(corrupt);
        }
        let Ok(position) = u32::try_from(self.position - CHUNK_HEADER_SIZE as u64) else {
            return Err(corrupt);
        };
        self.index.extend_from_slice(
            &IndexRecord {
                chunk_id: chunk.chunk_id,
                timestamp: chunk.timestamp,
                position,
            }
            .encode(),
        );
        self.next = follows;
        Ok(chunk)
    }
}

impl Part {
    fn start() -> Self {
        Self::Header {
            bytes: [0; CHUNK_HEADER_SIZE],
            have: 0,
        }
    }
}

impl Plan {
    /// Starts the second pass.
    pub(crate) fn check(&self) -> Check {
        let mut object = Hasher::new();
        object.update(&OBJECT_HEADER);
        Check {
            plan: self.clone(),
            object,
            position: 0,
            chunk: 0,
        }
    }

    /// Bytes of memory that the plan takes.
    pub(crate) fn memory(&self) -> u64 {
        (self.index.len() + self.chunk_crcs.len() * size_of::<u32>()) as u64
    }

    fn record(&self, chunk: usize) -> Option<IndexRecord> {
        records(&self.index).get(chunk).map(IndexRecord::decode)
    }

    /// Where a chunk ends, counted from the first data byte.
    fn chunk_end(&self, chunk: usize) -> u64 {
        self.record(chunk + 1)
            .map_or(self.size, |next| u64::from(next.position))
    }
}

impl Check {
    /// Takes the next bytes; the chunk that has changed since the first pass is named as soon as its last byte is seen.
    pub(crate) fn feed(&mut self, mut bytes: &[u8]) -> Result<(), TransferError> {
        while !bytes.is_empty() {
            let Some(&expected) = self.plan.chunk_crcs.get(self.chunk) else {
                return Err(TransferError::ChecksumMismatch);
            };
            let mut left = self
                .plan
                .chunk_end(self.chunk)
                .saturating_sub(self.position);
            let n = advance(&mut left, bytes);
            self.object.update(&bytes[..n]);
            self.position += n as u64;
            bytes = &bytes[n..];
            if left == 0 {
                if self.object.clone().finalize() != expected {
                    return Err(self.corrupt());
                }
                self.chunk += 1;
            }
        }
        Ok(())
    }

    /// The chunk that the next byte belongs to, as an error.
    pub(crate) fn corrupt(&self) -> TransferError {
        self.plan
            .record(self.chunk)
            .map_or(TransferError::ChecksumMismatch, |record| {
                TransferError::CorruptChunk(record.chunk_id)
            })
    }
}

/// Takes as much of `bytes` as `left` allows; answers how much.
fn advance(left: &mut u64, bytes: &[u8]) -> usize {
    let n = usize::try_from(*left)
        .unwrap_or(usize::MAX)
        .min(bytes.len());
    *left -= n as u64;
    n
}

fn records(index: &[u8]) -> &[[u8; INDEX_RECORD_SIZE]] {
    index.as_chunks().0
}

fn last_chunk(index: &[u8]) -> Option<Offset> {
    records(index)
        .last()
        .map(|record| IndexRecord::decode(record).chunk_id)
}
