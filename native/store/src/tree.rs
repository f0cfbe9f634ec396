//! A folder as a key space: every object is one plain file, its key the path below the root.
//!
//! Everything here blocks. Files appear whole or not at all: they are written in a scratch folder of the same file
//! system and renamed. Keys are listed in the byte order of the whole key, as S3 does, which is not the order of a
//! directory walk (`a.b` sorts before `a/b`).
//!
//! Limits that a folder has and S3 has not: a key cannot be another one's folder (`a` and `a/b`), each component has at most
//! 255 bytes, and none may be empty, `.` or `..`.

use std::fs::{self, File, FileTimes, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::{Bytes, BytesMut};

use crate::{ByteStream, Precondition};

/// Longest key in bytes, as in S3.
const LONGEST_KEY: usize = 1024;
/// Longest component of a key in bytes: the limit of the common file systems.
const LONGEST_COMPONENT: usize = 255;
/// A scratch file that old belongs to a process that is gone.
const SCRATCH_AGE: Duration = Duration::from_secs(24 * 3600);
/// How often a rename is tried again because a delete took the emptied folder away under it.
const RENAME_ATTEMPTS: u32 = 32;
/// Bytes of one read of [`read_stream`].
const READ_SIZE: u64 = 256 * 1024;

/// Why an operation on a [`Tree`] failed.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// The key cannot be a path; says why.
    #[error("the key {0:?} cannot be kept as a file: {1}")]
    Key(String, &'static str),
    /// No such object.
    #[error("no such object")]
    NotFound,
    /// The precondition was not met.
    #[error("the precondition was not met")]
    Precondition,
    /// The operating system refused.
    #[error("cannot {doing} {}: {error}", path.display())]
    Io {
        /// What was tried, in the infinitive.
        doing: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the operating system said.
        #[source]
        error: io::Error,
    },
}

/// What a call on a [`Tree`] returns.
pub type Result<T> = std::result::Result<T, TreeError>;

fn failed<'a>(
    doing: &'static str,
    path: &'a Path,
) -> impl FnOnce(io::Error) -> TreeError + use<'a> {
    move |error| TreeError::Io {
        doing,
        path: path.to_owned(),
        error,
    }
}

/// What is known of an object without reading it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Whole key.
    pub key: String,
    /// Size in bytes.
    pub size: u64,
    /// Last modification, milliseconds since the Unix epoch.
    pub modified_ms: i64,
    /// Entity tag, without quotes.
    pub etag: String,
}

impl Entry {
    fn new(key: String, metadata: &fs::Metadata) -> Self {
        Self {
            key,
            size: metadata.len(),
            modified_ms: metadata.mtime() * 1000 + metadata.mtime_nsec() / 1_000_000,
            etag: etag(metadata),
        }
    }
}

/// Inode, time in nanoseconds and size: another tag after every replacement, without reading the bytes or keeping a
/// second file beside each object. [`Upload`] sets the time from the precise clock, since the kernel's own stamp
/// stands still for milliseconds and inodes are reused at once.
fn etag(metadata: &fs::Metadata) -> String {
    let nanos = i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec());
    format!("{:x}-{nanos:x}-{:x}", metadata.ino(), metadata.len())
}

/// A folder whose files are objects. Cheap to share behind an `Arc`.
#[derive(Debug)]
pub struct Tree {
    root: PathBuf,
    scratch: PathBuf,
    durable: bool,
    uploads: AtomicU64,
}

/// An object that is being written. Dropped before [`Tree::commit`], it leaves nothing.
#[derive(Debug)]
pub struct Upload {
    file: File,
    path: PathBuf,
}

impl Upload {
    /// Appends bytes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file
            .write_all(bytes)
            .map_err(failed("write", &self.path))
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        match fs::remove_file(&self.path) {
            Ok(()) => {}
            // Renamed to its place: the usual end.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                tracing::warn!(path = %self.path.display(), %error, "cannot remove a scratch file")
            }
        }
    }
}

impl Tree {
    /// A tree at `root`, which must exist. `scratch` is created; it must lie on the same file system, and where it lies below the
    /// root its first component is no key. `durable` says whether a commit waits until the disk has the object. No I/O.
    pub fn new(root: impl Into<PathBuf>, scratch: impl Into<PathBuf>, durable: bool) -> Self {
        Self {
            root: root.into(),
            scratch: scratch.into(),
            durable,
            uploads: AtomicU64::new(0),
        }
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Creates the scratch folder, and removes what processes that died left in it more than a day ago.
    pub fn prepare(&self) -> Result<()> {
        fs::create_dir_all(&self.scratch).map_err(failed("create the folder", &self.scratch))?;
        let now = SystemTime::now();
        for row in fs::read_dir(&self.scratch).map_err(failed("read the folder", &self.scratch))? {
            let path = row
                .map_err(failed("read the folder", &self.scratch))?
                .path();
            if path.extension().is_none_or(|extension| extension != "part") {
                continue;
            }
            let Ok(modified) = fs::metadata(&path).and_then(|metadata| metadata.modified()) else {
                continue;
            };
            if now
                .duration_since(modified)
                .is_ok_and(|age| age > SCRATCH_AGE)
            {
                remove_if_there(&path)?;
            }
        }
        Ok(())
    }

    /// The file of a key.
    pub fn path(&self, key: &str) -> Result<PathBuf> {
        let refuse = |why| Err(TreeError::Key(key.to_owned(), why));
        if key.is_empty() || key.len() > LONGEST_KEY {
            return refuse("it is empty or longer than 1024 bytes");
        }
        if key.contains('\0') {
            return refuse("it contains a zero byte");
        }
        for component in key.split('/') {
            if component.is_empty() || component == "." || component == ".." {
                return refuse("it has an empty component, '.' or '..'");
            }
            if component.len() > LONGEST_COMPONENT {
                return refuse("a component is longer than 255 bytes");
            }
        }
        let path = self.root.join(key);
        if path.starts_with(&self.scratch) || self.scratch.starts_with(&path) {
            return refuse("the name is reserved for unfinished files");
        }
        Ok(path)
    }

    /// Begins an object. Its key is named at the end.
    pub fn begin(&self) -> Result<Upload> {
        let number = self.uploads.fetch_add(1, Ordering::Relaxed);
        // The random part keeps hosts apart that share the folder and happen to run with the same process id.
        let name = format!(
            "{}-{number}-{:08x}.part",
            std::process::id(),
            rand::random::<u32>()
        );
        let path = self.scratch.join(name);
        let open = || OpenOptions::new().write(true).create_new(true).open(&path);
        let file = match open() {
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.root.is_dir() => {
                fs::create_dir_all(&self.scratch)
                    .map_err(failed("create the folder", &self.scratch))?;
                open()
            }
            other => other,
        };
        let file = file.map_err(failed("create", &path))?;
        Ok(Upload { file, path })
    }

    /// Puts a written object in its place, if the precondition is met. Answers with its entry.
    pub fn commit(&self, upload: Upload, key: &str, precondition: &Precondition) -> Result<Entry> {
        let path = self.path(key)?;
        let set_time = upload
            .file
            .set_times(FileTimes::new().set_modified(SystemTime::now()));
        set_time.map_err(failed("set the time of", &upload.path))?;
        if self.durable {
            upload
                .file
                .sync_all()
                .map_err(failed("write", &upload.path))?;
        }
        let metadata = upload
            .file
            .metadata()
            .map_err(failed("read", &upload.path))?;
        self.place(&upload.path, &path, precondition)?;
        if self.durable {
            sync_parent(&path)?;
        }
        Ok(Entry::new(key.to_owned(), &metadata))
    }

    fn place(&self, from: &Path, to: &Path, precondition: &Precondition) -> Result<()> {
        for _ in 0..RENAME_ATTEMPTS {
            let placed = match precondition {
                Precondition::None => {
                    let _lock = self.lock(false)?;
                    fs::rename(from, to)
                }
                Precondition::Absent => {
                    let _lock = self.lock(false)?;
                    // A link never replaces: this holds also against a host that does not share the lock.
                    fs::hard_link(from, to)
                }
                Precondition::Matches(expected) => {
                    let _lock = self.lock(true)?;
                    match fs::metadata(to) {
                        Ok(metadata)
                            if metadata.is_file()
                                && etag(&metadata) == expected.trim_matches('"') =>
                        {
                            fs::rename(from, to)
                        }
                        Ok(_) => return Err(TreeError::Precondition),
                        Err(error) if is_absent(&error) => return Err(TreeError::Precondition),
                        Err(error) => Err(error),
                    }
                }
            };
            match placed {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    return Err(TreeError::Precondition);
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound && from.exists() => {
                    self.make_folders(to)?
                }
                Err(error) => return Err(failed("write", to)(error)),
            }
        }
        let error = io::Error::new(
            io::ErrorKind::Interrupted,
            "the folder was removed again and again",
        );
        Err(failed("write", to)(error))
    }

    /// Serialises `If-Match` with every other change, among processes too; the others do not wait for each other.
    fn lock(&self, exclusive: bool) -> Result<File> {
        let path = self.scratch.join("lock");
        let open = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path);
        let file = open.map_err(failed("open", &path))?;
        let locked = if exclusive {
            file.lock()
        } else {
            file.lock_shared()
        };
        locked.map_err(failed("lock", &path))?;
        Ok(file)
    }

    fn make_folders(&self, path: &Path) -> Result<()> {
        let Some(folder) = path.parent() else {
            return Ok(());
        };
        // Only below the root: a root that went away (a lost mount) must not be made anew on the disk below it.
        if !folder.starts_with(&self.root) || folder == self.root {
            return match fs::metadata(&self.root) {
                Ok(_) => Ok(()),
                Err(error) => Err(failed("open the folder", &self.root)(error)),
            };
        }
        match fs::create_dir(folder) {
            Ok(()) if self.durable => sync_parent(folder),
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.make_folders(folder)?;
                match fs::create_dir(folder) {
                    Ok(()) if self.durable => sync_parent(folder),
                    Ok(()) => Ok(()),
                    // Made or removed by another thread: the caller's rename tells.
                    Err(error)
                        if matches!(
                            error.kind(),
                            io::ErrorKind::AlreadyExists | io::ErrorKind::NotFound
                        ) =>
                    {
                        Ok(())
                    }
                    Err(error) => Err(failed("create the folder", folder)(error)),
                }
            }
            Err(error) => Err(failed("create the folder", folder)(error)),
        }
    }

    /// Opens an object for reading.
    pub fn open(&self, key: &str) -> Result<(File, Entry)> {
        let path = self.path(key)?;
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if is_absent(&error) => return Err(TreeError::NotFound),
            Err(error) => return Err(failed("open", &path)(error)),
        };
        let metadata = file.metadata().map_err(failed("read", &path))?;
        if !metadata.is_file() {
            return Err(TreeError::NotFound);
        }
        Ok((file, Entry::new(key.to_owned(), &metadata)))
    }

    /// Removes an object, and the folders that it leaves empty. `false` where there was none.
    pub fn delete(&self, key: &str) -> Result<bool> {
        let path = self.path(key)?;
        if path.is_dir() {
            return Ok(false);
        }
        let _lock = match self.lock(false) {
            Ok(lock) => lock,
            // No scratch folder: nothing was ever stored.
            Err(TreeError::Io { error, .. })
                if error.kind() == io::ErrorKind::NotFound && self.root.is_dir() =>
            {
                return Ok(false);
            }
            Err(error) => return Err(error),
        };
        let removed = remove_if_there(&path)?;
        // An empty folder is no object. Removing fails on one that is not empty, so this cannot race with an upload.
        let mut folder = path.parent();
        while let Some(empty) =
            folder.filter(|folder| *folder != self.root && folder.starts_with(&self.root))
        {
            if fs::remove_dir(empty).is_err() {
                break;
            }
            folder = empty.parent();
        }
        Ok(removed)
    }

    /// Objects whose key starts with `prefix` and is greater than `after`, ascending, at most `max`; and whether there are
    /// more. Reads only the folders that can hold such keys.
    pub fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
        max: usize,
    ) -> Result<(Vec<Entry>, bool)> {
        let base = prefix.rfind('/').map_or("", |slash| &prefix[..=slash]);
        if base
            .split_terminator('/')
            .any(|part| part.is_empty() || part == "." || part == "..")
            || base.contains('\0')
        {
            return Ok((Vec::new(), false));
        }
        let mut walk = Walk {
            tree: self,
            prefix,
            after,
            limit: max.saturating_add(1),
            found: Vec::new(),
        };
        walk.folder(&self.root.join(base), base)?;
        let more = walk.found.len() > max;
        walk.found.truncate(max);
        Ok((walk.found, more))
    }
}

struct Walk<'a> {
    tree: &'a Tree,
    prefix: &'a str,
    after: Option<&'a str>,
    limit: usize,
    found: Vec<Entry>,
}

impl Walk<'_> {
    /// `base` is the key of the folder, with a slash at its end, or empty.
    fn folder(&mut self, path: &Path, base: &str) -> Result<()> {
        let mut names = match fs::read_dir(path) {
            Ok(rows) => self.names(path, base, rows)?,
            Err(error)
                if is_absent(&error) && (path != self.tree.root() || self.tree.root().is_dir()) =>
            {
                return Ok(());
            }
            Err(error) => return Err(failed("read the folder", path)(error)),
        };
        names.sort_unstable();
        for key in names {
            if self.found.len() >= self.limit {
                break;
            }
            let path = self.tree.root().join(&key);
            if key.ends_with('/') {
                self.folder(&path, &key)?;
                continue;
            }
            match fs::symlink_metadata(&path) {
                Ok(metadata) => self.found.push(Entry::new(key, &metadata)),
                // Deleted meanwhile.
                Err(error) if is_absent(&error) => {}
                Err(error) => return Err(failed("read", &path)(error)),
            }
        }
        Ok(())
    }

    /// Keys of what lies in a folder and matters. A folder's key ends in a slash, so that sorting gives the order of the whole keys.
    fn names(&self, path: &Path, base: &str, rows: fs::ReadDir) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for row in rows {
            let row = row.map_err(failed("read the folder", path))?;
            // A name that is no text was not stored by us.
            let Ok(name) = row.file_name().into_string() else {
                continue;
            };
            let Ok(kind) = row.file_type() else { continue };
            let mut key = format!("{base}{name}");
            if kind.is_dir() {
                key.push('/');
                if row.path() != self.tree.scratch && self.may_hold(&key) {
                    names.push(key);
                }
            } else if kind.is_file()
                && key.starts_with(self.prefix)
                && self.after.is_none_or(|after| key.as_str() > after)
            {
                names.push(key);
            }
        }
        Ok(names)
    }

    fn may_hold(&self, folder: &str) -> bool {
        let in_prefix = folder.starts_with(self.prefix) || self.prefix.starts_with(folder);
        in_prefix
            && self
                .after
                .is_none_or(|after| folder > after || after.starts_with(folder))
    }
}

/// The bytes `start..end` of a file as a stream, read on the runtime's blocking threads in pieces of 256 KiB. Ends with an error where the
/// file is shorter.
pub fn read_stream(file: File, start: u64, end: u64) -> ByteStream {
    let state = (Some(file), start);
    Box::pin(futures::stream::unfold(
        state,
        move |(file, at)| async move {
            let file = file?;
            if at >= end {
                return None;
            }
            let read = tokio::task::spawn_blocking(move || {
                let len = usize::try_from((end - at).min(READ_SIZE)).unwrap_or(usize::MAX);
                let mut bytes = BytesMut::zeroed(len);
                file.read_exact_at(&mut bytes, at)
                    .map(|()| (file, bytes.freeze()))
            });
            Some(match read.await {
                Ok(Ok((file, bytes))) => {
                    let at = at + bytes.len() as u64;
                    (Ok::<Bytes, io::Error>(bytes), (Some(file), at))
                }
                Ok(Err(error)) => (Err(error), (None, at)),
                Err(stopped) => (Err(io::Error::other(stopped)), (None, at)),
            })
        },
    ))
}

/// Milliseconds since the Unix epoch as a time.
pub fn time_of(modified_ms: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(u64::try_from(modified_ms).unwrap_or(0))
}

fn is_absent(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
    )
}

fn remove_if_there(path: &Path) -> Result<bool> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if is_absent(&error) => Ok(false),
        Err(error) => Err(failed("remove", path)(error)),
    }
}

/// A rename or a new folder is on the disk only once the folder above it is. One that another thread removed meanwhile needs nothing.
fn sync_parent(path: &Path) -> Result<()> {
    let Some(parent) = path.parent() else {
        return Ok(());
    };
    match File::open(parent).and_then(|folder| folder.sync_all()) {
        Ok(()) => Ok(()),
        Err(error) if is_absent(&error) => Ok(()),
        Err(error) => Err(failed("write the folder", parent)(error)),
    }
}
