//! Walks one fragment object from its first byte to its last, as bytes come in, and checks all that its own bytes,
//! its entry and its length can tell. No I/O here; memory is one index (at most 5 MiB), whatever the size of the object.

use crc32fast::Hasher;
use stream_s3_core::chunk::{CHUNK_HEADER_SIZE, ChunkHeader};
use stream_s3_core::fragment::{
    INDEX_RECORD_SIZE, IndexRecord, MAX_CHUNKS, MAX_DATA, OBJECT_HEADER,
};
use stream_s3_core::manifest::Entry;
use stream_s3_core::units::{Epoch, Offset, TimestampMs};

use crate::finding::{Finding, FindingKind};

/// Findings kept for one object. One broken chunk header can make a whole index wrong; the first few tell all there is to know.
pub(crate) const MAX_FINDINGS: usize = 16;

const HEADER_LEN: u64 = OBJECT_HEADER.len() as u64;
const CHUNK_HEADER_LEN: u64 = CHUNK_HEADER_SIZE as u64;
const INDEX_RECORD_LEN: u64 = INDEX_RECORD_SIZE as u64;

/// Whether the walk wants more bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flow {
    /// Feed the bytes that follow.
    More,
    /// Nothing that follows can be told apart any more, or nothing is left to check: stop reading.
    Enough,
}

/// What a walk found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// What is wrong, in the order of the bytes; at most [`MAX_FINDINGS`].
    pub(crate) findings: Vec<Finding>,
    /// How many more there were.
    pub(crate) suppressed: u64,
    /// Chunks walked.
    pub(crate) chunks: u64,
    /// Records in those chunks, as their headers say; all chunk types, since each takes offsets.
    pub(crate) records: u64,
    /// The offset after the last chunk; `None` where the walk did not reach the end of the data.
    pub(crate) next_offset: Option<Offset>,
    /// Epochs of the first and of the last chunk.
    pub(crate) epochs: Option<(Epoch, Epoch)>,
}

enum State {
    ObjectHeader,
    ChunkHeader,
    Filter {
        left: u64,
        chunk: ChunkHeader,
    },
    Data {
        left: u64,
        crc: Hasher,
        chunk: ChunkHeader,
    },
    Trailer {
        left: u64,
    },
    Index,
    Lost,
}

/// The walk over one fragment object.
pub(crate) struct Walk {
    key: String,
    entry: Entry,
    object_len: u64,
    state: State,
    /// Head of a header or record that is not whole yet.
    partial: Vec<u8>,
    /// The index as the chunk headers say it must be.
    index: Vec<[u8; INDEX_RECORD_SIZE]>,
    index_seen: usize,
    /// Object byte where the chunk at hand starts, and where it ends.
    chunk_at: u64,
    chunk_end: u64,
    expected_id: Offset,
    last_timestamp: TimestampMs,
    data_ended: bool,
    out: Outcome,
}

impl Walk {
    /// A walk over the object `key` of `object_len` bytes that `entry` names. Feed it the object from its first byte.
    pub(crate) fn new(key: &str, entry: &Entry, object_len: u64) -> Self {
        Self {
            key: key.to_owned(),
            entry: *entry,
            object_len,
            state: State::ObjectHeader,
            partial: Vec::with_capacity(CHUNK_HEADER_SIZE),
            index: Vec::new(),
            index_seen: 0,
            chunk_at: HEADER_LEN,
            chunk_end: HEADER_LEN,
            expected_id: entry.first_offset,
            last_timestamp: entry.first_timestamp,
            data_ended: false,
            out: Outcome {
                findings: Vec::new(),
                suppressed: 0,
                chunks: 0,
                records: 0,
                next_offset: None,
                epochs: None,
            },
        }
    }

    /// Takes the next bytes of the object.
    pub(crate) fn feed(&mut self, mut bytes: &[u8]) -> Flow {
        while !bytes.is_empty() {
            let taken = self.step(bytes);
            bytes = &bytes[taken..];
            if matches!(self.state, State::Lost) || self.index_is_done() {
                return Flow::Enough;
            }
        }
        Flow::More
    }

    /// Ends the walk, after the last byte or after [`Flow::Enough`].
    pub(crate) fn finish(mut self) -> Outcome {
        let known = HEADER_LEN + self.entry.size;
        if self.data_ended {
            let expected = known + INDEX_RECORD_LEN * self.out.chunks;
            if self.object_len != expected {
                self.report(self.finding(
                    FindingKind::ObjectSize,
                    format!("{expected} bytes"),
                    format!("{} bytes", self.object_len),
                ));
            }
            if self.last_timestamp != self.entry.last_timestamp {
                let found = format!("{} in the last chunk", self.last_timestamp);
                let expected = format!(
                    "last timestamp {} as in the entry",
                    self.entry.last_timestamp
                );
                self.report(
                    self.finding(FindingKind::EntryTimestamp, expected, found)
                        .at_offset(self.entry.first_offset),
                );
            }
            self.out.next_offset = Some(self.expected_id);
        } else {
            let index = self.object_len.checked_sub(known);
            if index.is_none_or(|len| len == 0 || len % INDEX_RECORD_LEN != 0)
                || !matches!(self.state, State::Lost)
            {
                let expected = format!("{known} bytes and {INDEX_RECORD_LEN} for each chunk");
                self.report(self.finding(
                    FindingKind::ObjectSize,
                    expected,
                    format!("{} bytes", self.object_len),
                ));
            }
        }
        self.out
    }

    /// Takes some bytes, at least one, in the state at hand.
    fn step(&mut self, bytes: &[u8]) -> usize {
        match &mut self.state {
            State::ObjectHeader => self.collect(bytes, OBJECT_HEADER.len(), Self::object_header),
            State::ChunkHeader => self.collect(bytes, CHUNK_HEADER_SIZE, Self::chunk_header),
            State::Index => self.collect(bytes, INDEX_RECORD_SIZE, Self::index_record),
            State::Filter { left, .. } | State::Trailer { left } => {
                let taken = take(left, bytes);
                if *left == 0 {
                    self.advance();
                }
                taken
            }
            State::Data { left, crc, .. } => {
                let taken = take(left, bytes);
                crc.update(&bytes[..taken]);
                if *left == 0 {
                    self.advance();
                }
                taken
            }
            State::Lost => bytes.len(),
        }
    }

    /// Gathers `len` bytes and hands them to `then`.
    fn collect(&mut self, bytes: &[u8], len: usize, then: fn(&mut Self, &[u8])) -> usize {
        let taken = bytes.len().min(len - self.partial.len());
        self.partial.extend_from_slice(&bytes[..taken]);
        if self.partial.len() == len {
            let whole = std::mem::take(&mut self.partial);
            then(self, &whole);
            self.partial = whole;
            self.partial.clear();
        }
        taken
    }

    /// Leaves the part of a chunk that has just ended, and every empty part after it.
    fn advance(&mut self) {
        loop {
            match std::mem::replace(&mut self.state, State::Lost) {
                State::Filter { left: 0, chunk } => {
                    self.state = State::Data {
                        left: u64::from(chunk.data_size),
                        crc: Hasher::new(),
                        chunk,
                    };
                }
                State::Data {
                    left: 0,
                    crc,
                    chunk,
                } => {
                    let found = crc.finalize();
                    if found != chunk.crc {
                        let finding = self.finding(
                            FindingKind::ChunkCrc,
                            format!("{:#010x}", chunk.crc),
                            format!("{found:#010x}"),
                        );
                        self.report(finding.at_byte(self.chunk_at).at_offset(chunk.chunk_id));
                    }
                    self.state = State::Trailer {
                        left: u64::from(chunk.trailer_size),
                    };
                }
                State::Trailer { left: 0 } => {
                    self.data_boundary(self.chunk_end);
                    return;
                }
                unfinished @ (State::ObjectHeader
                | State::ChunkHeader
                | State::Filter { .. }
                | State::Data { .. }
                | State::Trailer { .. }
                | State::Index
                | State::Lost) => {
                    self.state = unfinished;
                    return;
                }
            }
        }
    }

    fn object_header(&mut self, bytes: &[u8]) {
        if bytes != OBJECT_HEADER {
            let finding = self.finding(FindingKind::ObjectHeader, hex(&OBJECT_HEADER), hex(bytes));
            self.report(finding.at_byte(0));
        }
        self.data_boundary(HEADER_LEN);
    }

    /// At a chunk's start or at the end of the data: `at` is the object byte where the next thing starts.
    fn data_boundary(&mut self, at: u64) {
        self.chunk_at = at;
        let left = (HEADER_LEN + self.entry.size).saturating_sub(at);
        self.state = if left >= CHUNK_HEADER_LEN {
            State::ChunkHeader
        } else if left == 0 && self.out.chunks > 0 {
            self.data_ended = true;
            State::Index
        } else {
            let expected = format!("a chunk header of {CHUNK_HEADER_LEN} bytes");
            let found = format!("{left} bytes left of the fragment's data");
            let finding = self.finding(FindingKind::ChunkBounds, expected, found);
            self.report(finding.at_byte(at).at_offset(self.expected_id));
            State::Lost
        };
    }

    fn chunk_header(&mut self, bytes: &[u8]) {
        let chunk = match ChunkHeader::decode(bytes) {
            Ok(chunk) => chunk,
            Err(error) => {
                let finding = self.finding(
                    FindingKind::ChunkHeader,
                    "a chunk header",
                    format!("other bytes: {}", error.problem),
                );
                self.report(
                    finding
                        .at_byte(self.chunk_at + error.at)
                        .at_offset(self.expected_id),
                );
                self.state = State::Lost;
                return;
            }
        };
        if chunk.chunk_id != self.expected_id {
            let finding = self.finding(FindingKind::ChunkId, self.expected_id, chunk.chunk_id);
            self.report(finding.at_byte(self.chunk_at).at_offset(self.expected_id));
        }
        self.check_order(&chunk);
        self.remember(&chunk);

        let left = HEADER_LEN + self.entry.size - self.chunk_at;
        let len = chunk.len_in_segment();
        if len > left {
            let finding = self.finding(
                FindingKind::ChunkBounds,
                format!("at most {left} bytes"),
                format!("{len} bytes"),
            );
            self.report(finding.at_byte(self.chunk_at).at_offset(chunk.chunk_id));
            self.state = State::Lost;
            return;
        }
        self.chunk_end = self.chunk_at + len;
        self.state = State::Filter {
            left: u64::from(chunk.filter_size),
            chunk,
        };
        self.advance();
    }

    /// Epoch against the chunk before, and the first timestamp against the entry.
    fn check_order(&mut self, chunk: &ChunkHeader) {
        match self.out.epochs {
            None => {
                if chunk.timestamp != self.entry.first_timestamp {
                    let expected = format!(
                        "first timestamp {} as in the entry",
                        self.entry.first_timestamp
                    );
                    let finding = self.finding(
                        FindingKind::EntryTimestamp,
                        expected,
                        format!("{} in the first chunk", chunk.timestamp),
                    );
                    self.report(finding.at_byte(self.chunk_at).at_offset(chunk.chunk_id));
                }
                self.out.epochs = Some((chunk.epoch, chunk.epoch));
            }
            Some((first, last)) => {
                if chunk.epoch < last {
                    let finding = self.finding(
                        FindingKind::ChunkEpoch,
                        format!("epoch {last} or above"),
                        format!("epoch {}", chunk.epoch),
                    );
                    self.report(finding.at_byte(self.chunk_at).at_offset(chunk.chunk_id));
                }
                self.out.epochs = Some((first, chunk.epoch));
            }
        }
        self.last_timestamp = chunk.timestamp;
    }

    /// Counts a chunk and notes what its index record must be.
    fn remember(&mut self, chunk: &ChunkHeader) {
        self.out.chunks += 1;
        self.out.records += u64::from(chunk.num_records);
        self.expected_id = chunk.next_chunk_id();
        // A single chunk may have any length: it starts at position 0.
        if self.out.chunks == 2 && self.entry.size > MAX_DATA {
            let expected = format!("at most {MAX_DATA} bytes of data");
            self.report(self.finding(
                FindingKind::FragmentLimit,
                expected,
                format!("{} bytes", self.entry.size),
            ));
        }
        if self.out.chunks <= u64::from(MAX_CHUNKS) {
            // Past 2^32 the position does not fit; the fragment is already reported as too large.
            let position = (self.chunk_at - HEADER_LEN) as u32;
            let record = IndexRecord {
                chunk_id: chunk.chunk_id,
                timestamp: chunk.timestamp,
                position,
            };
            self.index.push(record.encode());
        } else if self.out.chunks == u64::from(MAX_CHUNKS) + 1 {
            let finding = self.finding(
                FindingKind::FragmentLimit,
                format!("at most {MAX_CHUNKS} chunks"),
                "more",
            );
            self.report(finding.at_byte(self.chunk_at).at_offset(chunk.chunk_id));
        }
    }

    fn index_record(&mut self, bytes: &[u8]) {
        let place = self.index_seen;
        self.index_seen += 1;
        let Some(expected) = self
            .index
            .get(place)
            .filter(|expected| expected[..] != *bytes)
        else {
            return;
        };
        let record = IndexRecord::decode(expected);
        let mut found = [0; INDEX_RECORD_SIZE];
        found.copy_from_slice(bytes);
        let finding = self.finding(
            FindingKind::IndexRecord,
            describe(record),
            describe(IndexRecord::decode(&found)),
        );
        let byte = HEADER_LEN + self.entry.size + INDEX_RECORD_LEN * place as u64;
        self.report(finding.at_byte(byte).at_offset(record.chunk_id));
    }

    fn index_is_done(&self) -> bool {
        matches!(self.state, State::Index) && self.index_seen >= self.index.len()
    }

    fn finding(&self, kind: FindingKind, expected: impl ToString, found: impl ToString) -> Finding {
        Finding::new(kind, &self.key, expected, found)
    }

    fn report(&mut self, finding: Finding) {
        if self.out.findings.len() < MAX_FINDINGS {
            self.out.findings.push(finding);
        } else {
            self.out.suppressed += 1;
        }
    }
}

/// Counts down by as many bytes as there are, at most to zero.
fn take(left: &mut u64, bytes: &[u8]) -> usize {
    let taken = bytes
        .len()
        .min(usize::try_from(*left).unwrap_or(usize::MAX));
    *left -= taken as u64;
    taken
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// An index record in words.
fn describe(record: IndexRecord) -> String {
    format!(
        "chunk {} at {}, timestamp {}",
        record.chunk_id, record.position, record.timestamp
    )
}

#[cfg(test)]
pub(crate) mod tests;
