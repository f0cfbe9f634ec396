//! Object stores behind one trait: S3 and a directory.
//!
//! Every implementation makes exactly one attempt a call; retries belong to the caller, who alone knows what an
//! attempt costs and whether it is still wanted.

mod body;
mod credentials;
pub mod error;
pub mod fs;
pub mod meter;
mod probe;
pub mod s3;
mod sdk_error;
mod settings;
mod spelling;
pub mod tree;

use std::fmt;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::Stream;

pub use error::{ErrorKind, Failure, Op, StoreError};
pub use fs::FsStore;
pub use meter::{Meter, RequestCounts};
pub use s3::{Credentials, S3Settings, S3Store};

/// Most keys of one page of a listing, and of one batch of deletes: what S3 allows.
pub const PAGE_SIZE: usize = 1000;

/// What a call to a store returns.
pub type Result<T> = std::result::Result<T, StoreError>;

/// A store that is shared by tasks.
pub type SharedStore = Arc<dyn ObjectStore>;

/// A stream of the bytes of an object, in order.
pub type ByteStream = Pin<Box<dyn Stream<Item = std::io::Result<Bytes>> + Send + Sync + 'static>>;

/// What a PUT sends.
pub enum Body {
    /// Bytes in memory: manifest roots, groups, history segments.
    Bytes(Bytes),
    /// `len` bytes that are produced while they are sent. A stream that ends early or fails aborts the PUT: nothing is stored.
    Stream {
        /// Exact number of bytes of the object (Content-Length).
        len: u64,
        /// The bytes. An `io::Error` raised here comes back as the source of the [`StoreError`].
        stream: ByteStream,
    },
}

/// Its length alone: contents are nobody's business in a log.
impl fmt::Debug for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => write!(f, "Bytes({} bytes)", bytes.len()),
            Self::Stream { len, stream: _ } => write!(f, "Stream({len} bytes)"),
        }
    }
}

/// When a PUT may take effect.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Precondition {
    /// Always.
    #[default]
    None,
    /// Only while no object has the key (`If-None-Match: *`). Otherwise [`ErrorKind::Conflict`].
    Absent,
    /// Only while the object has this entity tag (`If-Match`). Otherwise [`ErrorKind::Conflict`].
    Matches(String),
}

/// How a PUT is done.
#[derive(Debug, Clone, Default)]
pub struct PutOptions {
    /// CRC-32/IEEE of the whole object, sent as the header `x-amz-checksum-crc32`, verified by a store that can,
    /// and compared with the store's echo where there is one.
    pub crc32: Option<u32>,
    /// When it may take effect.
    pub precondition: Precondition,
}

/// What a store says of a stored object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// Entity tag as the store gave it (with quotes where it has them).
    pub etag: Option<String>,
}

/// An object, or a part of one, that is being read.
pub struct Object {
    /// Size in bytes of the whole object, also where only a part was asked for.
    pub size: u64,
    /// Entity tag as the store gave it.
    pub etag: Option<String>,
    /// The bytes asked for. Ends with an error when the store sends fewer than it announced.
    pub body: ByteStream,
}

/// Without the body.
impl fmt::Debug for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Object")
            .field("size", &self.size)
            .field("etag", &self.etag)
            .finish_non_exhaustive()
    }
}

/// Which part of an object to read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// All of it.
    Whole,
    /// Bytes `start..end`, end exclusive; cut off at the object's end.
    Range(Range<u64>),
    /// The last `n` bytes, or all of it where it is shorter.
    Last(u64),
}

impl Part {
    /// The bytes `start..end` that are meant of an object of `size` bytes; `None` where that is no byte at all, unless the whole
    /// object is meant.
    pub fn resolve(&self, size: u64) -> Option<Range<u64>> {
        let range = match self {
            Self::Whole => return Some(0..size),
            Self::Range(range) => range.start..range.end.min(size),
            Self::Last(n) => size.saturating_sub(*n)..size,
        };
        (range.start < range.end).then_some(range)
    }
}

/// One row of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Whole key.
    pub key: String,
    /// Size in bytes.
    pub size: u64,
    /// Last modification, milliseconds since the Unix epoch; `None` where the store does not say.
    pub modified_ms: Option<i64>,
}

/// A page of a listing, ascending by key.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Page {
    /// At most as many rows as asked for.
    pub objects: Vec<Listed>,
    /// What to pass to get the next page; `None` at the end.
    pub next: Option<String>,
}

/// What the store turned out to support.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// It honours `If-None-Match` and `If-Match` on PUT.
    pub conditional_writes: bool,
    /// It refuses a PUT whose bytes do not fit the checksum header.
    pub verifies_checksums: bool,
}

/// Where objects live. One attempt a call; every future may be dropped at any time, which aborts the request.
///
/// Apart from connecting, nothing here has a time limit: only the caller knows how long a call may take, and drops the future.
#[async_trait]
pub trait ObjectStore: Send + Sync + 'static {
    /// Stores one object as a whole: after `Ok` it is there for every reader. After an error it may or may not be there where the kind
    /// is [`ErrorKind::Transient`], or where the echoed checksum differed ([`ErrorKind::Corrupt`]); otherwise it is not. One request.
    async fn put(&self, key: &str, body: Body, options: PutOptions) -> Result<Stored>;

    /// Reads an object or a part of it. [`ErrorKind::NotFound`] where there is none; `Failure::Http(416)` where the part holds no byte
    /// (a range that starts at or after the end, and any part but the whole of an empty object). One request.
    async fn get(&self, key: &str, part: Part) -> Result<Object>;

    /// Deletes up to any number of keys, in batches of 1000. A key that is not there counts as deleted. The answer has one
    /// row for each key that could not be deleted; an `Err` means that nothing is known of any of them.
    async fn delete(&self, keys: &[String]) -> Result<Vec<(String, StoreError)>>;

    /// Lists keys that start with `prefix`, ascending, at most `max` (1 to 1000); `from` is the `next` of the page before. One request.
    async fn list(&self, prefix: &str, from: Option<&str>, max: usize) -> Result<Page>;

    /// Tries whether the bucket is there, may be written, read, listed and deleted from under `prefix`, and what it supports. Leaves
    /// nothing behind. A handful of requests.
    async fn probe(&self, prefix: &str) -> Result<Capabilities>;
}
