//! A directory as an object store: for tests, for a single machine, and for a shared file system.
//!
//! Objects are plain files (see [`crate::tree`] for what a key may be). A PUT is on the disk when it returns. `If-Match` is
//! serialised by a lock file, so it holds among processes that share the folder on one machine, and among machines as far as the
//! file system's locks reach; create-only PUTs hold everywhere. Folders that a delete leaves empty are removed. Reading takes no more
//! than permission to read.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use futures::StreamExt;

use crate::error::{Failure, Op, StoreError};
use crate::meter::{self, Meter, Operation};
use crate::probe;
use crate::tree::{self, Tree, TreeError, Upload};
use crate::{
    Body, ByteStream, Capabilities, Listed, Object, ObjectStore, Page, Part, PutOptions, Result,
    Stored,
};

/// Folder for unfinished files and the lock, below the root. No key may start with it.
const SCRATCH: &str = ".stream_s3";
/// Bytes that are gathered before they go to a blocking thread.
const WRITE_SIZE: usize = 512 * 1024;

/// An object store in a folder.
#[derive(Debug)]
pub struct FsStore {
    tree: Arc<Tree>,
    /// The folder has been seen, or made.
    found: AtomicBool,
    /// So has the one for unfinished files, which readers have no use for.
    prepared: AtomicBool,
    probes: probe::Name,
    meter: Meter,
}

impl FsStore {
    /// A store in `dir`, an absolute path. The folder is looked at with the first call, not here; where it is missing, it is made if
    /// the folder above it exists (so a lost mount does not silently become a folder on the disk below it).
    /// [`Failure::Setting`]`("fs_dir")` where the path is not absolute.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        if !dir.is_absolute() {
            let message = format!(
                "{:?} is not an absolute path; the node's working directory is nobody's choice",
                dir.display()
            );
            return Err(StoreError::setting("fs_dir", message));
        }
        let tree = Tree::new(dir, dir.join(SCRATCH), true);
        Ok(Self {
            tree: Arc::new(tree),
            found: AtomicBool::new(false),
            prepared: AtomicBool::new(false),
            probes: probe::Name::new(),
            meter: Meter::default(),
        })
    }

    /// The same, with its calls counted: each of them as one request.
    #[must_use]
    pub fn metered(self, meter: Meter) -> Self {
        Self { meter, ..self }
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        self.tree.root()
    }

    /// Runs `work` on a blocking thread, after the folder has been made ready once, as far as `op` needs it.
    async fn run<T: Send + 'static>(
        &self,
        op: Op,
        key: &str,
        work: impl FnOnce(&Tree) -> tree::Result<T> + Send + 'static,
    ) -> Result<T> {
        let writes = match op {
            Op::Put | Op::Delete => true,
            Op::Get | Op::List | Op::Probe | Op::Open => false,
        };
        let find = !self.found.load(Ordering::Acquire);
        let prepare = writes && !self.prepared.load(Ordering::Acquire);
        let tree = Arc::clone(&self.tree);
        let done = blocking(op, move || {
            if find {
                make_root(tree.root())?;
            }
            if prepare {
                tree.prepare()?;
            }
            work(&tree)
        })
        .await?;
        let value = done.map_err(|error| self.failed(op, key, error))?;
        self.found.store(true, Ordering::Release);
        if writes {
            self.prepared.store(true, Ordering::Release);
        }
        Ok(value)
    }

    fn failed(&self, op: Op, key: &str, error: TreeError) -> StoreError {
        let place = || format!("{} {:?} in {}", op.name(), key, self.tree.root().display());
        match error {
            TreeError::Key(..) => {
                StoreError::new(op, Failure::Http(400), format!("{}: {error}", place()))
            }
            TreeError::NotFound => StoreError::new(
                op,
                Failure::Http(404),
                format!("{}: no such object", place()),
            ),
            TreeError::Precondition => StoreError::new(
                op,
                Failure::Http(412),
                format!("{}: the precondition was not met", place()),
            ),
            TreeError::Io { doing, path, error } => StoreError::file(op, &path, doing, error),
        }
    }
}

/// `create_dir` and not `create_dir_all`: see [`FsStore::open`].
fn make_root(root: &Path) -> tree::Result<()> {
    match std::fs::create_dir(root) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        // A folder that exists on a read-only file system is the business of whoever writes.
        Err(_) if root.is_dir() => Ok(()),
        Err(error) => Err(TreeError::Io {
            doing: "create the folder",
            path: root.to_owned(),
            error,
        }),
    }
}

async fn blocking<T: Send + 'static>(
    op: Op,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(value) => Ok(value),
        Err(stopped) => match stopped.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Err(StoreError::new(
                op,
                Failure::Closed,
                "the runtime is being stopped",
            )),
        },
    }
}

/// Checks what goes into a file while it is written.
struct Writing {
    upload: Upload,
    crc: crc32fast::Hasher,
}

impl FsStore {
    async fn write(&self, key: &str, body: Body) -> Result<Writing> {
        let upload = self.run(Op::Put, key, |tree| tree.begin()).await?;
        let mut writing = Writing {
            upload,
            crc: crc32fast::Hasher::new(),
        };
        match body {
            Body::Bytes(bytes) => self.append(key, writing, vec![bytes]).await,
            Body::Stream { len, mut stream } => {
                let mut taken: u64 = 0;
                let mut gathered: Vec<Bytes> = Vec::new();
                let mut waiting = 0;
                while let Some(bytes) = stream.next().await {
                    let bytes = bytes.map_err(|error| {
                        let message = format!(
                            "put {key:?}: the body failed after {taken} of {len} bytes: {error}"
                        );
                        StoreError::new(Op::Put, Failure::Body, message).with_source(error)
                    })?;
                    taken += bytes.len() as u64;
                    waiting += bytes.len();
                    gathered.push(bytes);
                    if taken > len {
                        break;
                    }
                    if waiting >= WRITE_SIZE {
                        writing = self
                            .append(key, writing, std::mem::take(&mut gathered))
                            .await?;
                        waiting = 0;
                    }
                }
                if taken != len {
                    let message =
                        format!("put {key:?}: the body has {taken} bytes instead of {len}");
                    return Err(StoreError::new(Op::Put, Failure::Body, message));
                }
                self.append(key, writing, gathered).await
            }
        }
    }

    async fn append(&self, key: &str, mut writing: Writing, pieces: Vec<Bytes>) -> Result<Writing> {
        let meter = self.meter.clone();
        let done = blocking(Op::Put, move || {
            for piece in &pieces {
                writing.crc.update(piece);
                writing.upload.write(piece)?;
                meter.sent(piece.len());
            }
            Ok(writing)
        })
        .await?;
        done.map_err(|error| self.failed(Op::Put, key, error))
    }

    async fn put_file(&self, key: &str, body: Body, options: PutOptions) -> Result<Stored> {
        // Refused before anything is written.
        self.tree
            .path(key)
            .map_err(|error| self.failed(Op::Put, key, error))?;
        let Writing { upload, crc } = self.write(key, body).await?;
        let actual = crc.finalize();
        if let Some(expected) = options.crc32.filter(|expected| *expected != actual) {
            let message = format!(
                "put {key:?}: the bytes have CRC-32 {actual:08x} instead of {expected:08x}; nothing was stored"
            );
            return Err(StoreError::new(Op::Put, Failure::ChecksumMismatch, message));
        }
        let name = key.to_owned();
        let entry = self
            .run(Op::Put, key, move |tree| {
                tree.commit(upload, &name, &options.precondition)
            })
            .await?;
        Ok(Stored {
            etag: Some(entry.etag),
        })
    }

    async fn open_file(&self, key: &str, part: &Part) -> Result<Object> {
        let name = key.to_owned();
        let (file, entry) = self.run(Op::Get, key, move |tree| tree.open(&name)).await?;
        let range = part.resolve(entry.size).ok_or_else(|| {
            let message = format!(
                "get {key:?}: no byte of {part:?} lies within its {} bytes",
                entry.size
            );
            StoreError::new(Op::Get, Failure::Http(416), message)
        })?;
        let body: ByteStream = tree::read_stream(file, range.start, range.end);
        Ok(Object {
            size: entry.size,
            etag: Some(entry.etag),
            body,
        })
    }

    async fn delete_files(&self, keys: &[String]) -> Result<Vec<(String, StoreError)>> {
        let keys = keys.to_vec();
        let failed: Vec<(String, TreeError)> = self
            .run(Op::Delete, "", move |tree| {
                let failures = keys.into_iter().filter_map(|key| match tree.delete(&key) {
                    Ok(_) => None,
                    Err(error) => Some((key, error)),
                });
                Ok(failures.collect())
            })
            .await?;
        let failed = failed.into_iter().map(|(key, error)| {
            let error = self.failed(Op::Delete, &key, error);
            (key, error)
        });
        Ok(failed.collect())
    }

    async fn list_files(&self, prefix: &str, from: Option<&str>, max: usize) -> Result<Page> {
        let (start, after) = (prefix.to_owned(), from.map(str::to_owned));
        let max = max.clamp(1, crate::PAGE_SIZE);
        let (entries, more) = self
            .run(Op::List, prefix, move |tree| {
                tree.list(&start, after.as_deref(), max)
            })
            .await?;
        let next = if more {
            entries.last().map(|entry| entry.key.clone())
        } else {
            None
        };
        let listed = |entry: tree::Entry| Listed {
            key: entry.key,
            size: entry.size,
            modified_ms: Some(entry.modified_ms),
        };
        Ok(Page {
            objects: entries.into_iter().map(listed).collect(),
            next,
        })
    }
}

#[async_trait]
impl ObjectStore for FsStore {
    async fn put(&self, key: &str, body: Body, options: PutOptions) -> Result<Stored> {
        let ongoing = self.meter.begin(Operation::Put, [key]);
        ongoing.end(self.put_file(key, body, options).await)
    }

    async fn get(&self, key: &str, part: Part) -> Result<Object> {
        let ongoing = self.meter.begin(Operation::Get, [key]);
        ongoing.reading(self.open_file(key, &part).await, &part)
    }

    async fn delete(&self, keys: &[String]) -> Result<Vec<(String, StoreError)>> {
        let names = keys.iter().map(String::as_str);
        let ongoing = self.meter.begin(Operation::MultiDelete, names);
        ongoing.end(self.delete_files(keys).await)
    }

    async fn list(&self, prefix: &str, from: Option<&str>, max: usize) -> Result<Page> {
        let ongoing = self.meter.begin(Operation::List, []);
        ongoing.end(self.list_files(prefix, from, max).await)
    }

    async fn probe(&self, prefix: &str) -> Result<Capabilities> {
        // The checksum is compared here in any case; the calls below show that the folder can be used at all.
        let put = |key: String, body: Bytes, options: PutOptions| async move {
            self.put(&key, Body::Bytes(body), options).await.map(|_| ())
        };
        meter::probing(probe::run(self, prefix, &self.probes, put)).await
    }
}
