//! In the place of the thread that hears from the kernel. As with inotify, a directory is watched once, however often that is asked for, and not
//! any more once that was asked for once.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::registry::{Pins, Shared};
use crate::sync::point;

#[derive(Default)]
struct Kernel {
    watched: BTreeMap<PathBuf, i32>,
    next: i32,
}

std::thread_local! {
    /// Each exploration runs on one thread.
    static KERNEL: RefCell<Kernel> = RefCell::default();
}

/// Asks the kernel.
pub(super) struct Watch;

impl Watch {
    #[expect(clippy::unnecessary_wraps, reason = "the kernel may refuse")]
    pub(super) fn start(_pins: &Arc<Shared>) -> io::Result<Self> {
        Ok(Self)
    }

    #[expect(clippy::unused_self, reason = "there is one kernel")]
    pub(super) fn add(&self, dir: &Path) -> Option<i32> {
        point();
        KERNEL.with_borrow_mut(|kernel| {
            let fresh = kernel.next;
            let id = *kernel.watched.entry(dir.to_owned()).or_insert(fresh);
            kernel.next += i32::from(id == fresh);
            Some(id)
        })
    }

    #[expect(clippy::unused_self, reason = "there is one kernel")]
    pub(super) fn remove(&self, id: i32) {
        point();
        KERNEL.with_borrow_mut(|kernel| kernel.watched.retain(|_, watched| *watched != id));
    }
}

/// What the thread does that listens, once a file has appeared or disappeared in `dir`.
pub fn happened(pins: &Pins, dir: &Path) {
    let id = KERNEL.with_borrow(|kernel| kernel.watched.get(dir).copied());
    point();
    if let Some(dir) = id.and_then(|id| pins.dir_of(id)) {
        drop(pins.look_and_keep(&dir));
    }
}

/// What that thread does once the kernel has had more to tell than it had room for.
pub fn overflowed(pins: &Pins) {
    for dir in pins.dirs() {
        drop(pins.look_and_keep(&dir));
    }
}

/// Whether the kernel tells of a directory.
#[must_use]
pub fn is_watched(dir: &Path) -> bool {
    KERNEL.with_borrow(|kernel| kernel.watched.contains_key(dir))
}

/// A kernel that nobody has asked anything.
pub fn forget_watches() {
    KERNEL.set(Kernel::default());
}
