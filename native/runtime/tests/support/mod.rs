//! A log to upload from, stores that do as they are told, and a mailbox to look into.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use futures::StreamExt as _;
use stream_s3_core::admission::Rate;
use stream_s3_core::chunk::{ChunkHeader, ChunkType, SEGMENT_HEADER};
use stream_s3_core::fragment::{Added, Assembly, Chunk, FragmentMeta, IndexRecord, OBJECT_HEADER};
use stream_s3_core::key::{Prefix, StreamId};
use stream_s3_core::units::{Epoch, Offset, TimestampMs};
use stream_s3_runtime::{Event, Executor, Fragment, Governor, Limits, Mailbox, Store, Work};
use stream_s3_store::{
    Body, Capabilities, Object, ObjectStore, Page, Part, PutOptions, Result, StoreError, Stored,
};
use tempfile::TempDir;
use tokio::sync::{Semaphore, mpsc};

pub(crate) const STREAM: &str = "stream_1";

/// Segment files of one stream, written as osiris does.
pub(crate) struct Log {
    pub(crate) dir: TempDir,
    pub(crate) chunks: Vec<Chunk>,
    segment: Offset,
    bytes: Vec<u8>,
    next: Offset,
}

impl Log {
    pub(crate) fn new() -> Self {
        Self {
            dir: TempDir::new().expect("a folder"),
            chunks: Vec::new(),
            segment: Offset(0),
            bytes: SEGMENT_HEADER.to_vec(),
            next: Offset(0),
        }
    }

    /// Appends a chunk of `records` records with `data` bytes of data, a filter and a trailer.
    pub(crate) fn chunk(&mut self, records: u32, data: usize) -> &mut Self {
        let number = self.chunks.len() as u64;
        let data: Vec<u8> = (0..data as u64)
            .map(|n| (n * 31 + number * 7 + n / 253) as u8)
            .collect();
        let (filter, trailer) = ([0xf1; 16], [0x7e; 5]);
        let header = ChunkHeader {
            kind: ChunkType::User,
            num_entries: 1,
            num_records: records,
            timestamp: TimestampMs(1_000 + number as i64),
            epoch: Epoch(3),
            chunk_id: self.next,
            crc: crc32fast::hash(&data),
            data_size: data.len() as u32,
            trailer_size: trailer.len() as u32,
            filter_size: filter.len() as u8,
            reserved: [0; 3],
        };
        let position = self.bytes.len() as u64;
        self.bytes.extend_from_slice(&header.encode());
        self.bytes.extend_from_slice(&filter);
        self.bytes.extend_from_slice(&data);
        self.bytes.extend_from_slice(&trailer);
        self.chunks.push(Chunk {
            chunk_id: header.chunk_id,
            timestamp: header.timestamp,
            num_records: records,
            data_size: header.data_size,
            position,
            next_position: self.bytes.len() as u64,
            segment_offset: self.segment,
            crc: header.crc,
        });
        self.next = header.next_chunk_id();
        self
    }

    /// Ends the segment; the next chunk starts another file.
    pub(crate) fn roll(&mut self) -> &mut Self {
        self.flush();
        self.segment = self.next;
        self.bytes = SEGMENT_HEADER.to_vec();
        self
    }

    /// Writes the segment that is being filled.
    pub(crate) fn flush(&self) {
        fs::write(self.file(self.segment), &self.bytes).expect("a segment file");
    }

    pub(crate) fn file(&self, segment: Offset) -> PathBuf {
        self.dir.path().join(format!("{:020}.segment", segment.0))
    }

    /// All chunks as one fragment.
    pub(crate) fn fragment(&self) -> Fragment {
        self.fragment_of(&self.chunks)
    }

    /// Some chunks that follow each other as one fragment.
    pub(crate) fn fragment_of(&self, chunks: &[Chunk]) -> Fragment {
        self.flush();
        let mut assembly = Assembly::new(u64::MAX);
        for chunk in chunks {
            assert_eq!(assembly.add(chunk), Ok(Added::Taken));
        }
        let meta = assembly.metadata().expect("there are chunks");
        Fragment {
            stream: StreamId::parse(STREAM).expect("an id"),
            dir: self.dir.path().to_owned(),
            meta,
        }
    }

    /// What the object of that fragment must be, put together from the files by hand.
    pub(crate) fn object(&self, meta: &FragmentMeta) -> Vec<u8> {
        let mut object = OBJECT_HEADER.to_vec();
        for span in &meta.spans {
            let file = fs::read(self.file(span.segment_offset)).expect("a segment file");
            object.extend_from_slice(&file[span.start as usize..span.end as usize]);
        }
        let mut position = 0;
        for chunk in &self.chunks {
            let record = IndexRecord {
                chunk_id: chunk.chunk_id,
                timestamp: chunk.timestamp,
                position,
            };
            object.extend_from_slice(&record.encode());
            position += (chunk.next_position - chunk.position) as u32;
        }
        object
    }
}

/// Turns one bit of a file.
pub(crate) fn flip(path: &Path, at: u64) {
    let mut bytes = fs::read(path).expect("a file");
    bytes[at as usize] ^= 0x10;
    fs::write(path, bytes).expect("a file");
}

pub(crate) fn store(objects: impl ObjectStore) -> Store {
    Store::over(Arc::new(objects), Prefix::default())
}

/// The keys below the prefix.
pub(crate) async fn keys(store: &Store) -> Vec<String> {
    let page = store
        .objects()
        .list("", None, 1000)
        .await
        .expect("a listing");
    page.objects.into_iter().map(|row| row.key).collect()
}

pub(crate) async fn object(store: &Store, key: &str) -> Vec<u8> {
    store
        .get(key, Part::Whole)
        .await
        .expect("an object")
        .bytes
        .to_vec()
}

/// Where the answers to a submission can be looked at.
pub(crate) struct Answers(mpsc::UnboundedReceiver<Event>);

pub(crate) struct Client {
    to: mpsc::UnboundedSender<Event>,
    alive: Arc<AtomicBool>,
}

impl Mailbox for Client {
    fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Relaxed)
    }

    fn deliver(&self, event: Event) {
        self.to.send(event).expect("the test waits for it");
    }
}

impl Answers {
    pub(crate) async fn next(&mut self) -> Event {
        self.0
            .recv()
            .await
            .expect("an answer comes before the mailbox is dropped")
    }

    /// Whether nothing more came, and nothing more can come.
    pub(crate) async fn are_over(&mut self) -> bool {
        self.0.recv().await.is_none()
    }

    pub(crate) fn is_empty(&mut self) -> bool {
        self.0.try_recv().is_err()
    }
}

/// A mailbox, a look into it, and whether its owner lives.
pub(crate) fn mailbox() -> (Box<dyn Mailbox>, Answers, Arc<AtomicBool>) {
    let (to, answers) = mpsc::unbounded_channel();
    let alive = Arc::new(AtomicBool::new(true));
    (
        Box::new(Client {
            to,
            alive: Arc::clone(&alive),
        }),
        Answers(answers),
        alive,
    )
}

pub(crate) fn governor(permits: usize) -> Governor<&'static str> {
    limited(Limits {
        rate: Rate::Unlimited,
        burst: 1,
        permits,
    })
}

pub(crate) fn governor_on(executor: &Executor, permits: usize) -> Governor<&'static str> {
    let limits = Limits {
        rate: Rate::Unlimited,
        burst: 1,
        permits,
    };
    Governor::start(executor, limits, || true)
}

pub(crate) fn limited(limits: Limits) -> Governor<&'static str> {
    Governor::start(&Executor::current().expect("threads"), limits, || true)
}

pub(crate) fn transfer(store: &Store, fragment: &Fragment) -> Work {
    Work::Transfer(Box::new((store.clone(), fragment.clone())))
}

/// Runs one transfer to its end.
pub(crate) async fn upload(store: &Store, fragment: &Fragment) -> Event {
    upload_by(&governor(1), store, fragment).await
}

/// Runs one transfer of this governor to its end.
pub(crate) async fn upload_by(
    governor: &Governor<&'static str>,
    store: &Store,
    fragment: &Fragment,
) -> Event {
    let (to, mut answers, _) = mailbox();
    governor.submit("only", fragment.meta.size, transfer(store, fragment), to);
    assert_eq!(answers.next().await, Event::Admitted);
    let end = answers.next().await;
    assert!(answers.are_over().await, "one answer, and no more");
    end
}

/// A store that does something before each PUT, and then what the other one does.
pub(crate) struct Before<S, F>(pub(crate) S, pub(crate) F);

#[async_trait]
impl<S: ObjectStore, F: Fn() + Send + Sync + 'static> ObjectStore for Before<S, F> {
    async fn put(&self, key: &str, body: Body, options: PutOptions) -> Result<Stored> {
        (self.1)();
        self.0.put(key, body, options).await
    }

    async fn get(&self, key: &str, part: Part) -> Result<Object> {
        self.0.get(key, part).await
    }

    async fn delete(&self, keys: &[String]) -> Result<Vec<(String, StoreError)>> {
        self.0.delete(keys).await
    }

    async fn list(&self, prefix: &str, from: Option<&str>, max: usize) -> Result<Page> {
        self.0.list(prefix, from, max).await
    }

    async fn probe(&self, prefix: &str) -> Result<Capabilities> {
        self.0.probe(prefix).await
    }
}

/// A store that takes what it is sent, and answers when it is let: never, if it is not.
#[derive(Clone)]
pub(crate) struct Gate {
    /// One permit for each PUT that has begun.
    pub(crate) begun: Arc<Semaphore>,
    /// One permit for each PUT that may end.
    pub(crate) open: Arc<Semaphore>,
}

impl Gate {
    pub(crate) fn closed() -> Self {
        Self {
            begun: Arc::new(Semaphore::new(0)),
            open: Arc::new(Semaphore::new(0)),
        }
    }

    /// Waits until as many PUTs have begun.
    pub(crate) async fn has_begun(&self, puts: u32) {
        self.begun
            .acquire_many(puts)
            .await
            .expect("not closed")
            .forget();
    }
}

#[async_trait]
impl ObjectStore for Gate {
    async fn put(&self, _key: &str, body: Body, _options: PutOptions) -> Result<Stored> {
        self.begun.add_permits(1);
        self.open.acquire().await.expect("not closed").forget();
        match body {
            Body::Bytes(_) => {}
            Body::Stream { mut stream, .. } => while stream.next().await.is_some() {},
        }
        Ok(Stored { etag: None })
    }

    async fn get(&self, _key: &str, _part: Part) -> Result<Object> {
        unimplemented("get")
    }

    async fn delete(&self, _keys: &[String]) -> Result<Vec<(String, StoreError)>> {
        unimplemented("delete")
    }

    async fn list(&self, _prefix: &str, _from: Option<&str>, _max: usize) -> Result<Page> {
        unimplemented("list")
    }

    async fn probe(&self, _prefix: &str) -> Result<Capabilities> {
        unimplemented("probe")
    }
}

fn unimplemented<T>(call: &str) -> T {
    panic!("no test asks this store to {call}")
}
