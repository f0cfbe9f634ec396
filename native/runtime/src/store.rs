//! An open store and the objects that are read and written as a whole: manifest roots and groups.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::{Bytes, BytesMut};
use futures::StreamExt as _;
use stream_s3_core::error::FormatError;
use stream_s3_core::key::{self, Prefix, StreamId};
use stream_s3_core::manifest::{self, Entry, EntryKind, Manifest};
use stream_s3_core::units::{Epoch, Offset, Uid};
use stream_s3_store::fs::FsStore;
use stream_s3_store::s3::{S3Settings, S3Store};
use stream_s3_store::{
    Body, ByteStream, Capabilities, ErrorKind, Failure, Meter, ObjectStore, Op, Part, PutOptions,
    RequestCounts, Result, SharedStore, StoreError,
};

/// Objects larger than this are not read into memory. A root of a million entries is half as large.
const MAX_IN_MEMORY: u64 = 64 << 20;

/// Where a store is.
#[derive(Debug, Clone)]
pub enum Settings {
    /// An S3 bucket.
    S3(Box<S3Settings>),
    /// A directory.
    Fs(std::path::PathBuf),
}

/// An open store, with the prefix of all its keys. Cheap to clone.
#[derive(Clone)]
pub struct Store {
    objects: SharedStore,
    prefix: Arc<Prefix>,
    /// What the last probe found; `false` before the first.
    verifies: Arc<AtomicBool>,
}

/// An object, or a part of it, in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Read {
    /// Bytes of the whole object.
    pub size: u64,
    /// Entity tag, where the store has one.
    pub etag: Option<String>,
    /// The part asked for.
    pub bytes: Bytes,
}

impl Store {
    /// Opens a store whose requests are counted into `counts`; sends none.
    ///
    /// # Errors
    /// `Failure::Setting` names the setting that cannot be used.
    pub fn open(settings: Settings, prefix: Prefix, counts: &Arc<RequestCounts>) -> Result<Self> {
        let meter = Meter::new(Arc::clone(counts), prefix.clone());
        let objects: SharedStore = match settings {
            Settings::S3(settings) => Arc::new(S3Store::open(*settings)?.metered(meter)),
            Settings::Fs(dir) => Arc::new(FsStore::open(dir)?.metered(meter)),
        };
        Ok(Self::over(objects, prefix))
    }

    /// A store over one that is open already: wrappers, tests.
    #[must_use]
    pub fn over(objects: SharedStore, prefix: Prefix) -> Self {
        Self {
            objects,
            prefix: Arc::new(prefix),
            verifies: Arc::default(),
        }
    }

    /// Tries out what the store allows and supports, and remembers it for all clones of this handle.
    ///
    /// # Errors
    /// As [`ObjectStore::probe`].
    pub async fn probe(&self) -> Result<Capabilities> {
        let found = self.objects.probe(self.prefix.as_str()).await?;
        self.verifies
            .store(found.verifies_checksums, Ordering::Relaxed);
        Ok(found)
    }

    /// Whether the store is known to refuse what does not fit its checksum. Where it is not, uploads check what they send.
    #[must_use]
    pub fn verifies_checksums(&self) -> bool {
        self.verifies.load(Ordering::Relaxed)
    }

    /// The store itself.
    #[must_use]
    pub fn objects(&self) -> &dyn ObjectStore {
        &*self.objects
    }

    /// What every key starts with.
    #[must_use]
    pub fn prefix(&self) -> &Prefix {
        &self.prefix
    }

    /// Stores a manifest root, as [`manifest::encode_root`] made it, under a new key, with its checksum; answers the uid in that key.
    /// One request.
    ///
    /// # Errors
    /// As [`ObjectStore::put`].
    pub async fn put_root(&self, stream: &StreamId, epoch: Epoch, root: Bytes) -> Result<Uid> {
        let uid = Uid(rand::random());
        self.put(&key::root(&self.prefix, stream, epoch, uid), root)
            .await?;
        Ok(uid)
    }

    /// Reads a manifest root; its revision is 0. One request.
    ///
    /// # Errors
    /// As [`ObjectStore::get`]; `Corrupt` where the object is no root.
    pub async fn get_root(&self, stream: &StreamId, epoch: Epoch, uid: Uid) -> Result<Manifest> {
        let key = key::root(&self.prefix, stream, epoch, uid);
        let read = self.get(&key, Part::Whole).await?;
        manifest::decode_root(&read.bytes)
            .map_err(|error| refused(Op::Get, ErrorKind::Corrupt, &key, error))
    }

    /// Stores a group under a new key, with its checksum; answers the uid in that key. One request.
    ///
    /// # Errors
    /// As [`ObjectStore::put`]; `Invalid` where there is no such group.
    pub async fn put_group(
        &self,
        stream: &StreamId,
        kind: EntryKind,
        entries: &[Entry],
    ) -> Result<Uid> {
        let bytes = manifest::encode_group(kind, entries)
            .map_err(|error| refused(Op::Put, ErrorKind::Invalid, "the group", error))?;
        let uid = Uid(rand::random());
        let first = entries
            .first()
            .map_or(Offset(0), |entry| entry.first_offset);
        self.put(
            &key::group(&self.prefix, stream, kind, first, uid),
            bytes.into(),
        )
        .await?;
        Ok(uid)
    }

    /// Reads the entries of a group. One request.
    ///
    /// # Errors
    /// As [`ObjectStore::get`]; `Corrupt` where the object is no group of this kind.
    pub async fn get_group(
        &self,
        stream: &StreamId,
        kind: EntryKind,
        first: Offset,
        uid: Uid,
    ) -> Result<Vec<Entry>> {
        let key = key::group(&self.prefix, stream, kind, first, uid);
        let read = self.get(&key, Part::Whole).await?;
        let group = manifest::decode_group(&read.bytes)
            .map_err(|error| refused(Op::Get, ErrorKind::Corrupt, &key, error))?;
        if group.kind == kind {
            Ok(group.entries)
        } else {
            let message = format!("{key}: holds a group of another kind ({:?})", group.kind);
            Err(StoreError {
                kind: ErrorKind::Corrupt,
                op: Op::Get,
                failure: Failure::ChecksumMismatch,
                message,
                source: None,
            })
        }
    }

    /// Reads an object, or a part of it, into memory. One request.
    ///
    /// # Errors
    /// As [`ObjectStore::get`]; `Invalid` where more than 64 MiB were to be read.
    pub async fn get(&self, key: &str, part: Part) -> Result<Read> {
        let object = self.objects.get(key, part).await?;
        let bytes = collect(key, object.body).await?;
        Ok(Read {
            size: object.size,
            etag: object.etag,
            bytes,
        })
    }

    /// Deletes the objects of `keys`; answers those that could not be deleted.
    ///
    /// # Errors
    /// As [`ObjectStore::delete`].
    pub async fn delete(&self, keys: &[String]) -> Result<Vec<(String, StoreError)>> {
        self.objects.delete(keys).await
    }

    async fn put(&self, key: &str, bytes: Bytes) -> Result<()> {
        let options = PutOptions {
            crc32: Some(crc32fast::hash(&bytes)),
            ..PutOptions::default()
        };
        self.objects
            .put(key, Body::Bytes(bytes), options)
            .await
            .map(drop)
    }
}

async fn collect(key: &str, body: ByteStream) -> Result<Bytes> {
    collect_into(key, body, BytesMut::new(), MAX_IN_MEMORY).await
}

/// Collects a body of a known length into memory of just that length.
pub(crate) async fn collect_sized(key: &str, body: ByteStream, size: u64) -> Result<Bytes> {
    let capacity = usize::try_from(size).unwrap_or(usize::MAX);
    collect_into(key, body, BytesMut::with_capacity(capacity), size).await
}

async fn collect_into(
    key: &str,
    mut body: ByteStream,
    mut whole: BytesMut,
    max: u64,
) -> Result<Bytes> {
    while let Some(piece) = body.next().await {
        let piece = piece.map_err(|error| StoreError {
            kind: ErrorKind::Transient,
            op: Op::Get,
            failure: Failure::Connection,
            message: format!(
                "{key}: the answer broke off after {} bytes: {error}",
                whole.len()
            ),
            source: Some(Box::new(error)),
        })?;
        if (whole.len() + piece.len()) as u64 > max {
            let message =
                format!("{key}: longer than {max} bytes, which is too long to be read as a whole");
            return Err(StoreError {
                kind: ErrorKind::Invalid,
                op: Op::Get,
                failure: Failure::Body,
                message,
                source: None,
            });
        }
        whole.extend_from_slice(&piece);
    }
    Ok(whole.freeze())
}

fn refused(op: Op, kind: ErrorKind, what: &str, error: FormatError) -> StoreError {
    StoreError {
        kind,
        op,
        failure: Failure::ChecksumMismatch,
        message: format!("{what}: {error}"),
        source: Some(Box::new(error)),
    }
}
