//! Segment files of the local log, read from their descriptors: a file that retention unlinks stays readable.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use stream_s3_core::error::TransferError;
use stream_s3_core::units::Offset;

use crate::executor::Executor;

/// Files that one transfer keeps open. A fragment of usual size touches one or two segments; one that touches more
/// (tiny segments) opens them again when it comes back to them.
const KEPT_OPEN: usize = 16;

/// The segment files of one log directory, as far as one transfer has opened them.
#[derive(Debug, Clone)]
pub(crate) struct Segments {
    dir: PathBuf,
    open: Vec<(Offset, Arc<File>)>,
}

impl Segments {
    pub(crate) fn new(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
            open: Vec::new(),
        }
    }

    /// The file that starts at `offset`: the one that is open already, here or as a pin, or opened now, on a reader thread.
    pub(crate) async fn file(
        &mut self,
        executor: &Executor,
        offset: Offset,
    ) -> Result<Arc<File>, TransferError> {
        if let Some((_, file)) = self.open.iter().find(|(of, _)| *of == offset) {
            return Ok(Arc::clone(file));
        }
        // By its name only if it is not pinned: the name may be gone.
        let file = match executor.pins().file(&self.dir, offset) {
            Some(pinned) => pinned,
            None => {
                let path = segment_path(&self.dir, offset);
                let opened = executor
                    .read(move || File::open(path))
                    .await
                    .map_err(TransferError::Panic)?;
                Arc::new(opened.map_err(|error| self.failed(offset, &error))?)
            }
        };
        if self.open.len() < KEPT_OPEN {
            self.open.push((offset, Arc::clone(&file)));
        }
        Ok(file)
    }

    /// What a file operation on the segment failed with, in the terms of a transfer.
    pub(crate) fn failed(&self, offset: Offset, error: &io::Error) -> TransferError {
        TransferError::OpenFailed {
            file: segment_path(&self.dir, offset)
                .to_string_lossy()
                .into_owned(),
            posix: posix_name(error).to_owned(),
        }
    }
}

/// The file of the segment that begins at `offset`.
pub(crate) fn segment_path(dir: &Path, offset: Offset) -> PathBuf {
    dir.join(format!("{:020}.segment", offset.0))
}

/// Reads at `position` what can be had without waiting for a disk; answers how many bytes that are. Fewer than there is `space` for
/// says nothing: not of the file's end, and not of an error. Where the file system cannot tell, it is always none.
pub(crate) fn read_cached(file: &File, space: &mut [u8], position: u64) -> usize {
    let Ok(offset) = libc::off_t::try_from(position) else {
        return 0;
    };
    let part = libc::iovec {
        iov_base: space.as_mut_ptr().cast(),
        iov_len: space.len(),
    };
    // SAFETY: the descriptor is open as long as `file` is borrowed, and the one part is memory that is borrowed for writing.
    let read = unsafe { libc::preadv2(file.as_raw_fd(), &part, 1, offset, libc::RWF_NOWAIT) };
    usize::try_from(read).unwrap_or(0)
}

/// Reads at `position` until `space` is full or the file ends; answers how many bytes were read.
pub(crate) fn read_at(file: &File, space: &mut [u8], position: u64) -> io::Result<usize> {
    let mut have = 0;
    while have < space.len() {
        match file.read_at(&mut space[have..], position + have as u64) {
            Ok(0) => break,
            Ok(n) => have += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(have)
}

/// The POSIX name of an error, in lower case as Erlang has it; `eio` for those that have none.
#[must_use]
pub fn posix_name(error: &io::Error) -> &'static str {
    // Numbers of Linux, the only system the library is built for. Closed list: each becomes an atom.
    match error.raw_os_error() {
        Some(1) => "eperm",
        Some(2) => "enoent",
        Some(4) => "eintr",
        Some(9) => "ebadf",
        Some(12) => "enomem",
        Some(13) => "eacces",
        Some(16) => "ebusy",
        Some(17) => "eexist",
        Some(20) => "enotdir",
        Some(21) => "eisdir",
        Some(22) => "einval",
        Some(23) => "enfile",
        Some(24) => "emfile",
        Some(27) => "efbig",
        Some(28) => "enospc",
        Some(30) => "erofs",
        Some(36) => "enametoolong",
        Some(40) => "eloop",
        Some(116) => "estale",
        Some(122) => "edquot",
        Some(_) | None => "eio",
    }
}
