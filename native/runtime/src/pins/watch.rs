//! Hears from the kernel of files that appear and disappear in log directories.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, pipe};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Weak};
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;

use super::files::segment_of;
use super::registry::{Pins, Shared};
use crate::panics::caught;

/// Room for some dozens of events at once.
const EVENTS: usize = 4096;

/// Handle on the thread that listens. The thread ends when this is dropped.
pub(super) struct Watch {
    inotify: Arc<OwnedFd>,
    /// Its end is what the thread sees when it is dropped.
    _alive: PipeWriter,
}

impl Watch {
    /// Starts the thread.
    pub(super) fn start(pins: &Arc<Shared>) -> io::Result<Self> {
        let inotify = Arc::new(inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?);
        let (end, alive) = pipe()?;
        let (closer, gone) = channel::<Vec<Arc<File>>>();
        let listener = Listener {
            inotify: Arc::clone(&inotify),
            end,
            pins: Arc::downgrade(pins),
            closer,
        };
        // Nor does the one that opens wait for files to be closed. This one ends with it.
        thread::Builder::new()
            .name("stream_s3_close".to_owned())
            .spawn(move || gone.into_iter().for_each(drop))?;
        // Not one of the readers: those may all be waiting for a slow disk, and a segment has to be opened before it is deleted.
        thread::Builder::new()
            .name("stream_s3_pins".to_owned())
            .spawn(move || listener.run())?;
        Ok(Self {
            inotify,
            _alive: alive,
        })
    }

    /// Watches a directory. `None` where the system has no more watches, or no such directory.
    pub(super) fn add(&self, dir: &Path) -> Option<i32> {
        let events = WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::ONLYDIR;
        inotify::add_watch(&self.inotify, dir, events).ok()
    }

    /// Does not watch it any more. The kernel has done that itself where the directory is gone.
    pub(super) fn remove(&self, id: i32) {
        let _ = inotify::remove_watch(&self.inotify, id);
    }
}

struct Listener {
    inotify: Arc<OwnedFd>,
    end: PipeReader,
    pins: Weak<Shared>,
    closer: Sender<Vec<Arc<File>>>,
}

impl Listener {
    fn run(self) {
        let mut room = [MaybeUninit::uninit(); EVENTS];
        let mut reader = Reader::new(&*self.inotify, &mut room);
        while self.wait() {
            let Some(pins) = self.pins.upgrade().map(Pins) else {
                return;
            };
            for dir in changed(&mut reader, &pins) {
                // The thread outlives a look that panics; the hook has said where.
                let gone = caught(|| pins.look_and_keep(&dir)).unwrap_or_default();
                // Without the other thread they are closed here.
                let _ = self.closer.send(gone);
            }
        }
    }

    /// Waits for events; false when there is nobody left to tell.
    fn wait(&self) -> bool {
        let mut fds = [
            PollFd::new(&*self.inotify, PollFlags::IN),
            PollFd::new(&self.end, PollFlags::IN),
        ];
        match poll(&mut fds, None) {
            Ok(_) => fds[1].revents().is_empty(),
            Err(Errno::INTR) => true,
            // Of these descriptors there is no other error.
            Err(_) => false,
        }
    }
}

/// The directories whose segments have changed, each once, however much happened there.
fn changed(reader: &mut Reader<'_, &OwnedFd>, pins: &Pins) -> BTreeSet<PathBuf> {
    let mut ids = BTreeSet::new();
    let mut dirs = BTreeSet::new();
    // Ends when there is none left: whatever it is that `next` fails with, the next wait brings it up again.
    while let Ok(event) = reader.next() {
        if event.events().contains(ReadFlags::QUEUE_OVERFLOW) {
            dirs.extend(pins.dirs());
        } else if event
            .file_name()
            .is_some_and(|name| segment_of(name.to_bytes()).is_some())
        {
            ids.insert(event.wd());
        }
    }
    dirs.extend(ids.into_iter().filter_map(|id| pins.dir_of(id)));
    dirs
}
