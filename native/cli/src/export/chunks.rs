//! The chunks of one fragment object, each of them checked against its CRC before anybody sees its data.

use bytes::{Bytes, BytesMut};
use stream_s3_core::chunk::{CHUNK_HEADER_SIZE, ChunkHeader};
use stream_s3_core::fragment::{self, MAX_CHUNKS, OBJECT_HEADER};
use stream_s3_core::units::{Offset, TimestampMs};
use stream_s3_store::{Failure, Object, Part};

use crate::reader::{Failed, Patience, Read, Reader, next_piece};
use crate::tree::Node;

const HEADER_LEN: u64 = OBJECT_HEADER.len() as u64;
/// Longest index of a fragment in bytes.
const MAX_INDEX: u64 = fragment::index_len(MAX_CHUNKS);

/// A chunk whose data fits its CRC.
#[derive(Debug, Clone)]
pub(crate) struct Chunk {
    /// Its header.
    pub(crate) header: ChunkHeader,
    /// Its data part: entries.
    pub(crate) data: Bytes,
    /// Key of the object that holds it.
    pub(crate) key: String,
}

/// Reads a fragment chunk by chunk. Holds one chunk in memory, and what the store has sent of the next.
///
/// An answer that breaks off is asked for again from the chunk at hand on, a few times.
pub(crate) struct FragmentChunks {
    reader: Reader,
    node: Node,
    /// Object byte at which the next thing to read starts.
    position: u64,
    /// Object byte behind the data.
    data_end: u64,
    /// Id of the next chunk.
    expected: Offset,
    object: Option<Object>,
    buffer: BytesMut,
    patience: Patience,
}

impl FragmentChunks {
    /// Starts at the chunk that holds `from`, or, where that is later, at the first one of `since` or later: one request for the index,
    /// unless all of the fragment is wanted. An index that does not help is left alone: the fragment is read from its beginning.
    pub(crate) async fn open(
        reader: &Reader,
        node: Node,
        from: Offset,
        since: TimestampMs,
    ) -> Result<Self, Failed> {
        let mut chunks = Self {
            reader: reader.clone(),
            position: 0,
            data_end: HEADER_LEN + node.entry.size,
            expected: node.entry.first_offset,
            object: None,
            buffer: BytesMut::new(),
            patience: Patience::new(),
            node,
        };
        let entry = chunks.node.entry;
        if (from > entry.first_offset || since > entry.first_timestamp)
            && let Some((chunk_id, position)) = chunks.find(from, since).await?
        {
            chunks.expected = chunk_id;
            chunks.position = HEADER_LEN + u64::from(position);
        }
        Ok(chunks)
    }

    /// Where the index says that the first chunk of interest is.
    async fn find(
        &self,
        from: Offset,
        since: TimestampMs,
    ) -> Result<Option<(Offset, u32)>, Failed> {
        let index = Part::Range(self.data_end..self.data_end + MAX_INDEX + 1);
        let bytes = match self.reader.read(&self.node.key, index, MAX_INDEX).await {
            Ok(Read::Bytes(bytes)) => bytes,
            Ok(Read::Absent | Read::TooLarge(_)) => return Ok(None),
            Err(Failed::Store(error)) if error.failure == Failure::Http(416) => return Ok(None),
            Err(failed) => return Err(failed),
        };
        let Ok(records) = fragment::decode_index(&bytes) else {
            return Ok(None);
        };
        if records
            .first()
            .is_none_or(|first| first.chunk_id != self.node.entry.first_offset)
        {
            return Ok(None);
        }
        let by_offset = records.partition_point(|record| record.chunk_id <= from);
        let by_time = records.iter().position(|record| record.timestamp >= since);
        let place = by_offset
            .saturating_sub(1)
            .max(by_time.unwrap_or(records.len() - 1));
        Ok(records
            .get(place)
            .map(|record| (record.chunk_id, record.position)))
    }

    /// The next chunk, `None` behind the last one.
    pub(crate) async fn next(&mut self) -> Result<Option<Chunk>, Failed> {
        loop {
            match self.read().await {
                Ok(chunk) => return Ok(chunk),
                Err(failed) => {
                    self.patience.wait_or_give_up(failed).await?;
                    self.object = None;
                    self.buffer.clear();
                }
            }
        }
    }

    async fn read(&mut self) -> Result<Option<Chunk>, Failed> {
        if self.position == 0 {
            self.fill(OBJECT_HEADER.len()).await?;
            if self.buffer[..OBJECT_HEADER.len()] != OBJECT_HEADER {
                return Err(self.damaged("it does not begin as a fragment does", None));
            }
            self.take(OBJECT_HEADER.len());
        }
        if self.position == self.data_end {
            if self.expected != self.node.next_offset {
                let why = format!(
                    "it ends before offset {}, and its manifest says before {}",
                    self.expected, self.node.next_offset
                );
                return Err(self.damaged(&why, None));
            }
            return Ok(None);
        }
        self.fill(CHUNK_HEADER_SIZE).await?;
        let header = match ChunkHeader::decode(&self.buffer) {
            Ok(header) => header,
            Err(error) => {
                let why = format!("there is no chunk header, but {}", error.problem);
                return Err(self.damaged(&why, None));
            }
        };
        let len = header.len_in_segment();
        if header.chunk_id != self.expected || self.position + len > self.data_end {
            let why = format!(
                "a chunk header says offset {} and {len} bytes, which does not fit there",
                header.chunk_id
            );
            return Err(self.damaged(&why, None));
        }
        self.fill_data(&header).await
    }

    /// Takes the chunk behind a header that has been looked at.
    async fn fill_data(&mut self, header: &ChunkHeader) -> Result<Option<Chunk>, Failed> {
        // At most what a chunk holds, whatever the fragment holds.
        let len = usize::try_from(header.len_in_segment()).unwrap_or(usize::MAX);
        self.fill(len).await?;
        let start = CHUNK_HEADER_SIZE + usize::from(header.filter_size);
        let whole = self.take(len);
        let data = whole.slice(start..start + header.data_size as usize);
        let found = crc32fast::hash(&data);
        if found != header.crc {
            let why = format!(
                "the checksum of the chunk's data is {found:#010x}, and its header says {:#010x}",
                header.crc
            );
            return Err(self.damaged(&why, Some(header.next_chunk_id())));
        }
        self.expected = header.next_chunk_id();
        self.patience = Patience::new();
        Ok(Some(Chunk {
            header: header.clone(),
            data,
            key: self.node.key.clone(),
        }))
    }

    /// Waits until so many bytes are there.
    async fn fill(&mut self, len: usize) -> Result<(), Failed> {
        while self.buffer.len() < len {
            let Some(object) = &mut self.object else {
                let rest = Part::Range(self.position..self.data_end);
                let opened = self.reader.open(&self.node.key, rest).await;
                self.object = Some(self.check_opened(opened)?);
                continue;
            };
            match next_piece(&self.node.key, object).await? {
                Some(piece) => self.buffer.extend_from_slice(&piece),
                None if object.size < self.data_end => {
                    let why = format!("it has {} bytes, too few", object.size);
                    return Err(self.damaged(&why, None));
                }
                None => {
                    return Err(Failed::Broken {
                        doing: "read",
                        key: self.node.key.clone(),
                        reason: "the answer ended too early".to_owned(),
                    });
                }
            }
        }
        Ok(())
    }

    fn check_opened(&self, opened: Result<Option<Object>, Failed>) -> Result<Object, Failed> {
        match opened {
            Ok(Some(object)) => Ok(object),
            Ok(None) => Err(self.damaged("there is no such object", None)),
            Err(Failed::Store(error)) if error.failure == Failure::Http(416) => {
                let why = format!("it ends before byte {}", self.position);
                Err(self.damaged(&why, None))
            }
            Err(failed) => Err(failed),
        }
    }

    fn take(&mut self, len: usize) -> Bytes {
        self.position += len as u64;
        self.buffer.split_to(len).freeze()
    }

    /// Damage at the chunk at hand; the next whole one is at `next`, or in the next fragment.
    fn damaged(&self, why: &str, next: Option<Offset>) -> Failed {
        Failed::Damaged {
            offset: self.expected,
            key: self.node.key.clone(),
            why: why.to_owned(),
            next: next.unwrap_or(self.node.next_offset),
            written: 0,
        }
    }
}
