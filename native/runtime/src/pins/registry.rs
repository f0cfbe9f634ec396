//! The registry. `native/interleavings` compiles it, too, with files and a kernel at which other threads may come.

#[cfg(test)]
#[path = "tests.rs"]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Bound::{Excluded, Unbounded};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use stream_s3_core::decisions::pins::{
    Joining, is_superfluous, joining, pins_to_release, segments_to_pin,
};
use stream_s3_core::decisions::timeline::LocalChunk;
use stream_s3_core::key::StreamId;
use stream_s3_core::units::Offset;

use super::files::{self, descriptors};
use super::headers::{self, Headers, Place};
use super::watch::Watch;
use crate::executor::Executor;
use crate::segment::segment_path;
use crate::sync::Mutex;

/// Segments of one stream that are pinned at most: the oldest of those that are not uploaded. Retention takes these first.
pub const PINS_A_STREAM: usize = 512;

/// The registry of a node. Clones are the same one. Nothing here is done with the lock held that could wait for a disk.
#[derive(Clone, Default)]
pub struct Pins(pub(super) Arc<Shared>);

impl fmt::Debug for Pins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pins").field(&self.info()).finish()
    }
}

#[derive(Default)]
pub(super) struct Shared {
    state: Mutex<State>,
    /// Started by the first log that is entered; `None` inside where the system refuses.
    watch: OnceLock<Option<Watch>>,
    /// Held by whoever changes what is watched. The kernel has one watch of a directory for all who ask: what one reader has left may be what the next
    /// one has just entered.
    watching: Mutex<()>,
}

#[derive(Default)]
struct State {
    /// Bytes that deleted segments may take; 0 pins nothing.
    budget: u64,
    logs: HashMap<PathBuf, Log>,
    /// Age of the next pin.
    next_age: u64,
    /// What went wrong last, until it goes well.
    problem: Option<String>,
    /// Why nothing can be watched.
    deaf: Option<String>,
}

/// Who writes a log. Pins of another one's files may hold what was never committed.
struct Writer {
    name: Box<[u8]>,
    is_alive: Box<dyn Fn() -> bool + Send + Sync>,
}

impl Writer {
    fn is(&self, name: &[u8]) -> bool {
        *self.name == *name
    }
}

struct Log {
    stream: StreamId,
    writer: Arc<Writer>,
    /// Everything below is persisted.
    persisted: Offset,
    watched: Option<i32>,
    pins: BTreeMap<Offset, Pin>,
    /// The segment that stays whatever the budget is, until something of it is persisted.
    held: Option<Offset>,
}

impl Log {
    /// Answers the file where the segment is pinned already.
    fn pin(&mut self, segment: Offset, file: Arc<File>, next_age: &mut u64) -> Option<Arc<File>> {
        if self.pins.contains_key(&segment) {
            return Some(file);
        }
        // One that was seen late goes before those behind it all the same: without them it would be of no use.
        let mut behind = self.pins.range((Excluded(segment), Unbounded));
        let pin = Pin {
            file,
            age: behind.next().map_or(*next_age, |(_, pin)| pin.age),
            end: None,
            followed: None,
            unlinked: None,
        };
        *next_age += 1;
        self.pins.insert(segment, pin);
        None
    }
}

struct Pin {
    file: Arc<File>,
    /// Smaller is older. Of one log none is younger than those behind it.
    age: u64,
    /// Offset behind its last record, once its headers have been read.
    end: Option<Offset>,
    /// Where a later segment begins, once one has been listed: the end is not behind that. It may be before it: of the segments that
    /// retention deletes at once osiris deletes the newest first, so meanwhile a list has the one in front of a gap and the one behind it.
    followed: Option<Offset>,
    /// Its size in bytes, if it is deleted.
    unlinked: Option<u64>,
}

/// The registry at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PinsInfo {
    /// Segments that are held open, deleted or not.
    pub segments: u64,
    /// Bytes of the deleted ones among them: the sum of their sizes.
    pub unlinked_bytes: u64,
    /// The same of each stream, also of those that have none.
    pub streams: Vec<(StreamId, u64)>,
    /// Logs whose directory the system does not watch: looked at only when something is persisted, and now and then.
    pub unwatched: u64,
    /// What went wrong last, unless it has gone well since.
    pub problem: Option<String>,
}

/// What a look needs to know.
struct Known {
    writer: Arc<Writer>,
    persisted: Offset,
    limit: usize,
    /// How many more descriptors there may be.
    spare: usize,
    open: Vec<(Offset, Arc<File>)>,
}

/// What a look has found.
struct Found {
    writer: Arc<Writer>,
    segments: Vec<Offset>,
    opened: Vec<(Offset, Arc<File>)>,
    /// Of each file whether it is deleted, and how large it is then.
    sizes: Vec<(Offset, Arc<File>, Option<u64>)>,
    problem: Option<String>,
}

impl Pins {
    /// Enters the log of a stream, to pin what it has and to watch it from now on. Pins of an earlier `writer` of the same log are let go; those of
    /// the same one stay. `is_alive` tells whether it still writes: once it says no, [`Pins::sweep`] lets go of the log. `budget` holds for the node:
    /// bytes that deleted segments may take, 0 to pin nothing.
    ///
    /// The answer does the work that may block on the file system; until it has run nothing is pinned.
    pub fn enter(
        &self,
        stream: StreamId,
        dir: &Path,
        writer: &[u8],
        is_alive: impl Fn() -> bool + Send + Sync + 'static,
        budget: u64,
    ) -> impl FnOnce() + Send + 'static {
        let mut state = self.0.state.lock();
        state.budget = budget;
        let same = state.logs.get(dir).is_some_and(|log| log.writer.is(writer));
        let old = if same {
            None
        } else {
            let log = Log {
                stream,
                writer: Arc::new(Writer {
                    name: Box::from(writer),
                    is_alive: Box::new(is_alive),
                }),
                persisted: Offset(0),
                watched: None,
                pins: BTreeMap::new(),
                held: None,
            };
            state.logs.insert(dir.to_owned(), log)
        };
        let (pins, dir) = (self.clone(), dir.to_owned());
        move || {
            drop(old);
            // Before the look, so that a segment that appears meanwhile is seen by one of them.
            pins.begin_watching(&dir);
            pins.look(&dir);
        }
    }

    /// Keeps one segment of a log open whatever the budget is, until something of it is persisted; an earlier one is let go. For a tier that begins
    /// anew there, after a beginning of which nothing was uploaded in time.
    ///
    /// The answer does the work, which blocks on the file system. Of a log that nobody has entered, or another writer by then, nothing is kept.
    ///
    /// # Errors
    /// Of the answer: the segment cannot be opened.
    pub fn hold(
        &self,
        dir: &Path,
        segment: Offset,
    ) -> impl FnOnce() -> io::Result<()> + Send + 'static {
        let writer = self
            .0
            .state
            .lock()
            .logs
            .get(dir)
            .map(|log| Arc::clone(&log.writer));
        let (pins, dir) = (self.clone(), dir.to_owned());
        move || {
            let file = match pins.file(&dir, segment) {
                Some(pinned) => pinned,
                None => Arc::new(files::open(&segment_path(&dir, segment))?),
            };
            let unused = pins
                .0
                .state
                .lock()
                .hold(&dir, segment, file, writer.as_ref());
            drop(unused);
            pins.look(&dir);
            Ok(())
        }
    }

    /// Everything below `persisted` is in the tier. The answer does the work, which may block: lets go of what is superfluous now, and pins what
    /// may have been one too many before. Of a log that nobody has entered nothing is pinned.
    pub fn persisted(&self, dir: &Path, persisted: Offset) -> impl FnOnce() + Send + 'static {
        if let Some(log) = self.0.state.lock().logs.get_mut(dir) {
            log.persisted = persisted;
        }
        let (pins, dir) = (self.clone(), dir.to_owned());
        move || pins.look(&dir)
    }

    /// Looks at the directory of a log: pins what is new, measures what is deleted, and keeps the budget. Blocks on the file system.
    pub fn look(&self, dir: &Path) {
        drop(self.look_and_keep(dir));
    }

    /// The same, leaving it to the caller to close what is let go: the last descriptor of a deleted file frees its blocks, which takes its time.
    pub(super) fn look_and_keep(&self, dir: &Path) -> Vec<Arc<File>> {
        let known = self.0.state.lock().known(dir);
        let Some(known) = known else {
            return Vec::new();
        };
        let found = survey(dir, known);
        self.0.state.lock().take(dir, found)
    }

    /// Lets go of a log and of all that is pinned of it, unless it has another writer by now. Blocks on the file system: the last descriptor of a
    /// deleted file frees its blocks.
    pub fn leave(&self, dir: &Path, writer: &[u8]) {
        self.leave_where(|other, log| other == dir && log.writer.is(writer));
    }

    /// Lets go of the logs whose writers are gone. Blocks on the file system.
    pub fn sweep(&self) {
        self.leave_where(|_, log| !(log.writer.is_alive)());
    }

    /// Lets go of all logs. Blocks on the file system.
    pub fn clear(&self) {
        self.leave_where(|_, _| true);
    }

    /// Unless the log has been left meanwhile.
    fn begin_watching(&self, dir: &Path) {
        let _alone = self.0.watching.lock();
        if !self.0.state.lock().logs.contains_key(dir) {
            return;
        }
        let watched = self.watch().and_then(|watch| watch.add(dir));
        if let Some(log) = self.0.state.lock().logs.get_mut(dir) {
            log.watched = watched;
        }
    }

    fn leave_where(&self, leaves: impl Fn(&Path, &Log) -> bool) {
        let alone = self.0.watching.lock();
        let gone: Vec<Log> = {
            let mut state = self.0.state.lock();
            let left = state.logs.extract_if(|dir, log| leaves(dir, log));
            left.map(|(_, log)| log).collect()
        };
        for log in &gone {
            if let (Some(Some(watch)), Some(id)) = (self.0.watch.get(), log.watched) {
                watch.remove(id);
            }
        }
        // The files are closed without it.
        drop(alone);
    }

    /// The descriptor of the segment that begins at `segment`, if it is pinned. A table lookup.
    #[must_use]
    pub fn file(&self, dir: &Path, segment: Offset) -> Option<Arc<File>> {
        let state = self.0.state.lock();
        let pin = state.logs.get(dir)?.pins.get(&segment)?;
        Some(Arc::clone(&pin.file))
    }

    /// From where on the pinned segments reach up to `log_first`, the first offset of the local log, without a gap; `None`: nothing joins it.
    /// Where it is not known yet at which offset a segment ends its headers are read, on a reader thread.
    ///
    /// # Errors
    /// A segment cannot be read, or holds what is no chunk.
    pub async fn joining(
        &self,
        executor: &Executor,
        dir: &Path,
        log_first: Offset,
    ) -> Result<Option<Offset>, io::Error> {
        loop {
            let (segment, file) = {
                let state = self.0.state.lock();
                let Some(log) = state.logs.get(dir) else {
                    return Ok(None);
                };
                let ends: Vec<_> = log.pins.iter().map(|(at, pin)| (*at, pin.end)).collect();
                match joining(&ends, log_first) {
                    Joining::From(first) => return Ok(first),
                    Joining::DependsOn(segment) => match log.pins.get(&segment) {
                        Some(pin) => (segment, Arc::clone(&pin.file)),
                        None => return Ok(None),
                    },
                }
            };
            let end = headers::end(executor, Arc::clone(&file), segment).await?;
            let mut state = self.0.state.lock();
            let pin = state
                .logs
                .get_mut(dir)
                .and_then(|log| log.pins.get_mut(&segment));
            // A segment in front of the log is complete, so it stays true.
            if let Some(pin) = pin.filter(|pin| Arc::ptr_eq(&pin.file, &file)) {
                pin.end = Some(end);
            }
        }
    }

    /// The next chunks from `place` on, at most `max`, of one segment. It need not be pinned where the place names it: then it is opened by
    /// its name, as long as it has one. Reads 48 bytes a chunk, on a reader thread.
    ///
    /// # Errors
    /// The segment cannot be read, or holds what is no chunk.
    pub async fn headers(
        &self,
        executor: &Executor,
        dir: &Path,
        place: Place,
        max: usize,
    ) -> Result<Headers, io::Error> {
        if let Some((segment, file)) = self.holding(dir, place) {
            return headers::read(executor, file, segment, place, max).await;
        }
        let Place::Position { segment, .. } = place else {
            return Ok(Headers::NotPinned);
        };
        match headers::open(executor, segment_path(dir, segment)).await? {
            Some(file) => headers::read(executor, file, segment, place, max).await,
            None => Ok(Headers::NotPinned),
        }
    }

    /// What the pinned segments have where a chunk should be; trimmed: none of them reaches that far. Reads 48 bytes for each chunk in front of it in its
    /// segment, on a reader thread.
    ///
    /// # Errors
    /// The segment cannot be read, or holds what is no chunk.
    pub async fn identity(
        &self,
        executor: &Executor,
        dir: &Path,
        chunk_id: Offset,
    ) -> Result<LocalChunk, io::Error> {
        match self.holding(dir, Place::Offset(chunk_id)) {
            Some((segment, file)) => headers::identity(executor, file, segment, chunk_id).await,
            None => Ok(LocalChunk::Trimmed),
        }
    }

    /// The pinned segment that may hold a place.
    fn holding(&self, dir: &Path, place: Place) -> Option<(Offset, Arc<File>)> {
        let state = self.0.state.lock();
        let pins = &state.logs.get(dir)?.pins;
        let (segment, pin) = match place {
            Place::Offset(offset) => pins.range(..=offset).next_back()?,
            Place::Position { segment, .. } => pins.get_key_value(&segment)?,
        };
        let is_beyond = match place {
            Place::Offset(offset) => pin.end.or(pin.followed).is_some_and(|end| end <= offset),
            Place::Position { .. } => false,
        };
        (!is_beyond).then(|| (*segment, Arc::clone(&pin.file)))
    }

    /// The numbers now. Takes a lock for a few nanoseconds a pin.
    #[must_use]
    pub fn info(&self) -> PinsInfo {
        let state = self.0.state.lock();
        let mut info = PinsInfo {
            problem: state.problem.clone().or_else(|| state.deaf.clone()),
            ..PinsInfo::default()
        };
        for log in state.logs.values() {
            let bytes = log.pins.values().filter_map(|pin| pin.unlinked).sum();
            info.segments += log.pins.len() as u64;
            info.unlinked_bytes += bytes;
            info.unwatched += u64::from(log.watched.is_none());
            info.streams.push((log.stream.clone(), bytes));
        }
        info
    }

    fn watch(&self) -> Option<&Watch> {
        let started = self.0.watch.get_or_init(|| match Watch::start(&self.0) {
            Ok(watch) => Some(watch),
            Err(error) => {
                self.0.state.lock().deaf = Some(format!("inotify: {error}"));
                None
            }
        });
        started.as_ref()
    }

    pub(super) fn dirs(&self) -> Vec<PathBuf> {
        self.0.state.lock().logs.keys().cloned().collect()
    }

    pub(super) fn dir_of(&self, watched: i32) -> Option<PathBuf> {
        let state = self.0.state.lock();
        let mut logs = state.logs.iter();
        logs.find(|(_, log)| log.watched == Some(watched))
            .map(|(dir, _)| dir.clone())
    }
}

impl State {
    fn known(&self, dir: &Path) -> Option<Known> {
        let log = self.logs.get(dir)?;
        let pins = log.pins.iter();
        Some(Known {
            writer: Arc::clone(&log.writer),
            persisted: log.persisted,
            limit: if self.budget == 0 { 0 } else { PINS_A_STREAM },
            spare: self.spare(),
            open: pins.map(|(at, pin)| (*at, Arc::clone(&pin.file))).collect(),
        })
    }

    /// Answers the file where it is not needed.
    fn hold(
        &mut self,
        dir: &Path,
        segment: Offset,
        file: Arc<File>,
        writer: Option<&Arc<Writer>>,
    ) -> Option<Arc<File>> {
        let log = self.logs.get_mut(dir);
        let same = |log: &&mut Log| writer.is_some_and(|writer| Arc::ptr_eq(&log.writer, writer));
        let Some(log) = log.filter(same) else {
            return Some(file);
        };
        log.held = Some(segment);
        log.pin(segment, file, &mut self.next_age)
    }

    /// Descriptors that may still be pinned.
    fn spare(&self) -> usize {
        descriptors().saturating_sub(self.logs.values().map(|log| log.pins.len()).sum())
    }

    /// Takes what a look has found; answers the files that are let go, to be closed without the lock.
    fn take(&mut self, dir: &Path, found: Found) -> Vec<Arc<File>> {
        self.problem = found.problem;
        let mut spare =
            descriptors().saturating_sub(self.logs.values().map(|l| l.pins.len()).sum());
        let log = self.logs.get_mut(dir);
        let Some(log) = log.filter(|log| Arc::ptr_eq(&log.writer, &found.writer)) else {
            let opened = found.opened.into_iter().map(|(_, file)| file);
            let measured = found.sizes.into_iter().map(|(_, file, _)| file);
            return opened.chain(measured).collect();
        };
        let mut gone = Vec::new();
        for (segment, file) in found.opened {
            if spare == 0 {
                gone.push(file);
                continue;
            }
            match log.pin(segment, file, &mut self.next_age) {
                Some(pinned_already) => gone.push(pinned_already),
                None => spare -= 1,
            }
        }
        for (segment, file, size) in found.sizes {
            let pin = log.pins.get_mut(&segment);
            // Another look may have seen it deleted since this one saw it linked, and no event would come any more to put that right.
            if let Some(pin) = pin.filter(|pin| Arc::ptr_eq(&pin.file, &file)) {
                pin.unlinked = pin.unlinked.max(size);
            }
            gone.push(file);
        }
        for pair in found.segments.windows(2) {
            if let Some(pin) = log.pins.get_mut(&pair[0]) {
                pin.followed = Some(pin.followed.map_or(pair[1], |other| other.min(pair[1])));
            }
        }
        let (all, persisted) = (self.budget == 0, log.persisted);
        log.held = log.held.filter(|held| persisted <= *held);
        let held = log.held;
        let starts: BTreeSet<Offset> = log.pins.keys().copied().chain(found.segments).collect();
        // A segment ends at the latest where any later one begins, also if those in between were never seen.
        let ends_by = |at: Offset| starts.range((Excluded(at), Unbounded)).next().copied();
        let superfluous = log.pins.extract_if(.., |at, _| {
            all && held != Some(*at) || is_superfluous(ends_by(*at), persisted)
        });
        gone.extend(superfluous.map(|(_, pin)| pin.file));
        gone.extend(self.keep_budget());
        gone
    }

    /// Lets go of the oldest deleted segments of the node, until the rest is within the budget.
    fn keep_budget(&mut self) -> Vec<Arc<File>> {
        let mut unlinked: Vec<(u64, &PathBuf, Offset, u64)> = self
            .logs
            .iter()
            .flat_map(|(dir, log)| {
                let pins = log.pins.iter();
                let free = pins.filter(|(at, _)| log.held != Some(**at));
                free.map(move |(at, pin)| (dir, at, pin))
            })
            .filter_map(|(dir, at, pin)| pin.unlinked.map(|size| (pin.age, dir, *at, size)))
            .collect();
        unlinked.sort_unstable();
        let sizes: Vec<u64> = unlinked.iter().map(|(_, _, _, size)| *size).collect();
        let released: Vec<(PathBuf, Offset)> = unlinked
            .into_iter()
            .take(pins_to_release(&sizes, self.budget))
            .map(|(_, dir, at, _)| (dir.clone(), at))
            .collect();
        released
            .into_iter()
            .filter_map(|(dir, at)| self.logs.get_mut(&dir)?.pins.remove(&at))
            .map(|pin| pin.file)
            .collect()
    }
}

/// Lists the segments, opens those that are to be pinned and are not, and measures all that are.
fn survey(dir: &Path, known: Known) -> Found {
    let Known {
        writer,
        persisted,
        limit,
        spare,
        mut open,
    } = known;
    let mut problem = None;
    let mut note = |what: &Path, error: &io::Error| {
        // Retention is not waited for: what is gone is gone.
        if error.kind() != io::ErrorKind::NotFound {
            problem = Some(format!("{}: {error}", what.display()));
        }
    };
    let segments = files::list(dir).unwrap_or_else(|error| {
        note(dir, &error);
        Vec::new()
    });
    let mut opened = Vec::new();
    for segment in &segments[segments_to_pin(&segments, persisted, limit)] {
        if open.iter().any(|(at, _)| at == segment) {
            continue;
        }
        if opened.len() == spare {
            break;
        }
        let path = segment_path(dir, *segment);
        match files::open(&path) {
            Ok(file) => opened.push((*segment, Arc::new(file))),
            Err(error) => note(&path, &error),
        }
    }
    open.extend(opened.iter().cloned());
    let mut sizes = Vec::with_capacity(open.len());
    for (segment, file) in open {
        match files::unlinked(&file) {
            Ok(size) => sizes.push((segment, file, size)),
            Err(error) => note(&segment_path(dir, segment), &error),
        }
    }
    Found {
        writer,
        segments,
        opened,
        sizes,
        problem,
    }
}
