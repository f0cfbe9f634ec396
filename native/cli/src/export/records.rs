//! The records in the data part of a chunk, as osiris lays them out (`osiris_log`, and the stream protocol's `Deliver`):
//!
//! ```text
//! chunk data = entry ...                              as many as the header says
//! entry      = 0 bit, size u31, record                one record
//!            | 1 bit, compression u3, 4 zero bits,    a batch of records that a client has put together
//!              records u16, size before compression u32, size u32, body
//! body       = size u32, record, ...                  when decompressed; the highest bit of each size is 0
//! ```
//!
//! Compression: 0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd. Snappy comes framed or as one raw block, lz4 and zstd as frames.

use std::io::{self, Cursor, Read};

use bytes::Bytes;
use stream_s3_core::units::Offset;

use super::chunks::Chunk;
use crate::reader::Failed;

/// Longest record that is taken out of a compressed batch. RabbitMQ takes no message beyond 512 MiB.
const MAX_RECORD: u64 = 512 * 1024 * 1024;
/// Length of the head of an entry that is one record, and of one that is a batch.
const RECORD_HEAD: usize = 4;
const BATCH_HEAD: usize = 11;
/// What a snappy stream starts with; a raw block cannot.
const SNAPPY_FRAMES: &[u8] = b"\xff\x06\x00\x00sNaPpY";

/// Takes a chunk apart, record by record.
pub(crate) struct Records {
    chunk: Chunk,
    at: usize,
    entries: u16,
    next: Offset,
    batch: Option<Batch>,
}

/// A batch that is being read.
struct Batch {
    body: Box<dyn Read + Send>,
    records: u16,
    bytes: u64,
}

impl Records {
    /// All records of a chunk of users' records.
    pub(crate) fn of(chunk: Chunk) -> Self {
        Self {
            at: 0,
            entries: 0,
            next: chunk.header.chunk_id,
            batch: None,
            chunk,
        }
    }

    /// The next record and its offset, `None` behind the last. Shares the memory of the chunk, unless it was in a compressed batch.
    ///
    /// The data fits its CRC, so an error is what a client published: a batch that is not what its head says, or of a compression
    /// that is not known here.
    pub(crate) fn next(&mut self) -> Result<Option<(Offset, Bytes)>, Failed> {
        loop {
            if let Some(batch) = &mut self.batch {
                if batch.records > 0 {
                    let record = batch.next().map_err(|why| self.unreadable(&why))?;
                    return Ok(Some((self.count(), record)));
                }
                if batch.bytes > 0 {
                    return Err(self.unreadable("a batch holds more bytes than its records have"));
                }
                self.batch = None;
            }
            if self.entries == self.chunk.header.num_entries {
                if self.at != self.chunk.data.len() || self.next != self.end() {
                    return Err(
                        self.unreadable("its entries do not add up to what its header says")
                    );
                }
                return Ok(None);
            }
            self.entries += 1;
            if self.data(0, 1)?[0] & 0x80 == 0 {
                let size = u32_at(self.data(0, RECORD_HEAD)?, 0) as usize;
                self.data(RECORD_HEAD, size)?;
                let start = self.at + RECORD_HEAD;
                self.at = start + size;
                return Ok(Some((self.count(), self.chunk.data.slice(start..self.at))));
            }
            self.batch = Some(self.open_batch()?);
        }
    }

    /// Offset behind the chunk.
    pub(crate) fn end(&self) -> Offset {
        self.chunk.header.next_chunk_id()
    }

    fn open_batch(&mut self) -> Result<Batch, Failed> {
        let head = self.data(0, BATCH_HEAD)?;
        let compression = head[0] >> 4 & 0x07;
        let records = u16::from_be_bytes([head[1], head[2]]);
        let bytes = u32_at(head, 3);
        let size = u32_at(head, 7) as usize;
        self.data(BATCH_HEAD, size)?;
        let start = self.at + BATCH_HEAD;
        self.at = start + size;
        let body = self.chunk.data.slice(start..self.at);
        Ok(Batch {
            body: decoder(compression, body, bytes).map_err(|why| self.unreadable(&why))?,
            records,
            bytes: u64::from(bytes),
        })
    }

    fn count(&mut self) -> Offset {
        let offset = self.next;
        self.next = offset.advanced_by(1);
        offset
    }

    /// `len` bytes, `skip` behind where we are.
    fn data(&self, skip: usize, len: usize) -> Result<&[u8], Failed> {
        let start = self.at + skip;
        self.chunk
            .data
            .get(start..start + len)
            .ok_or_else(|| self.unreadable("an entry reaches beyond its end"))
    }

    fn unreadable(&self, why: &str) -> Failed {
        let chunk_id = self.chunk.header.chunk_id;
        Failed::Damaged {
            offset: self.next,
            key: self.chunk.key.clone(),
            why: format!("of the chunk at offset {chunk_id}, {why}"),
            next: self.end(),
            written: 0,
        }
    }
}

impl Batch {
    fn next(&mut self) -> Result<Bytes, String> {
        let broken =
            |error: io::Error| format!("a compressed batch cannot be decompressed: {error}");
        let mut head = [0; RECORD_HEAD];
        self.body.read_exact(&mut head).map_err(broken)?;
        let size = u64::from(u32::from_be_bytes(head));
        let left = self.bytes.checked_sub(RECORD_HEAD as u64 + size);
        let (Some(left), true) = (left, size <= MAX_RECORD) else {
            return Err(format!(
                "a record in a batch says that it has {size} bytes, more than it can have"
            ));
        };
        self.bytes = left;
        self.records -= 1;
        let mut record = Vec::new();
        // Grows with what there is, not with what the head promises.
        (&mut self.body)
            .take(size)
            .read_to_end(&mut record)
            .map_err(broken)?;
        if record.len() as u64 != size {
            return Err("a batch ends in the middle of a record".to_owned());
        }
        Ok(record.into())
    }
}

/// What a batch's body is when decompressed.
fn decoder(compression: u8, body: Bytes, bytes: u32) -> Result<Box<dyn Read + Send>, String> {
    let cursor = Cursor::new(body.clone());
    Ok(match compression {
        0 => Box::new(cursor),
        1 => Box::new(flate2::read::MultiGzDecoder::new(cursor)),
        2 if body.starts_with(SNAPPY_FRAMES) => Box::new(snap::read::FrameDecoder::new(cursor)),
        2 => Box::new(Cursor::new(snappy_block(&body, bytes)?)),
        3 => Box::new(lz4_flex::frame::FrameDecoder::new(cursor)),
        4 => Box::new(
            ruzstd::decoding::StreamingDecoder::new(cursor)
                .map_err(|error| format!("a batch is no zstd frame: {error}"))?,
        ),
        other => {
            return Err(format!(
                "a batch has compression {other}, which is none that is known here (0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd)"
            ));
        }
    })
}

fn snappy_block(body: &[u8], bytes: u32) -> Result<Vec<u8>, String> {
    let no = |error: snap::Error| format!("a batch is no snappy block or stream: {error}");
    // Before memory is taken for as much as the block promises.
    if snap::raw::decompress_len(body).map_err(no)? as u64 > u64::from(bytes) {
        return Err("a snappy block says that it is larger than its batch".to_owned());
    }
    snap::raw::Decoder::new().decompress_vec(body).map_err(no)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[cfg(test)]
mod tests;
