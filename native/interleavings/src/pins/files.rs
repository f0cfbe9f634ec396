//! In front of the production module of that name: at each of its calls another thread may come.

use std::fs::File;
use std::io;
use std::path::Path;

use stream_s3_core::units::Offset;

use crate::sync::point;

#[path = "../../../runtime/src/pins/files.rs"]
mod real;

pub(super) fn list(dir: &Path) -> io::Result<Vec<Offset>> {
    point();
    real::list(dir)
}

pub(super) fn open(path: &Path) -> io::Result<File> {
    point();
    real::open(path)
}

pub(super) fn unlinked(file: &File) -> io::Result<Option<u64>> {
    point();
    real::unlinked(file)
}

pub(super) fn descriptors() -> usize {
    real::descriptors()
}
