//! What the registry asks of the file system.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use stream_s3_core::units::Offset;

/// Which part of the descriptors that the process may have (`RLIMIT_NOFILE`, the soft limit) goes to pins at most.
const SHARE_OF_DESCRIPTORS: u64 = 4;
/// What the process may have where the system does not say.
const DESCRIPTORS: u64 = 65_536;

/// First offsets of the segment files of a log, ascending.
pub(super) fn list(dir: &Path) -> io::Result<Vec<Offset>> {
    let mut segments = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        segments.extend(segment_of(entry?.file_name().as_encoded_bytes()));
    }
    segments.sort_unstable();
    Ok(segments)
}

/// The first offset of the segment that a file of this name is, if it is one.
pub(super) fn segment_of(name: &[u8]) -> Option<Offset> {
    let digits = std::str::from_utf8(name.strip_suffix(b".segment")?).ok()?;
    digits.parse().ok().map(Offset)
}

/// Opens a segment.
pub(super) fn open(path: &Path) -> io::Result<File> {
    File::open(path)
}

/// The size in bytes of a file that is deleted; `None` where it has a name.
pub(super) fn unlinked(file: &File) -> io::Result<Option<u64>> {
    let facts = file.metadata()?;
    Ok((facts.nlink() == 0).then_some(facts.len()))
}

/// Descriptors that pins may take.
pub(super) fn descriptors() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let share = limit.current.unwrap_or(DESCRIPTORS) / SHARE_OF_DESCRIPTORS;
    usize::try_from(share).unwrap_or(usize::MAX)
}
