//! Segments that appear and are deleted while others look at the log, persist, read, come and go.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use shuttle::future::block_on;
use shuttle::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use shuttle::thread;
use stream_s3_core::chunk::{ChunkHeader, ChunkType, SEGMENT_HEADER};
use stream_s3_core::key::StreamId;
use stream_s3_core::units::{Epoch, Offset, TimestampMs};
use stream_s3_interleavings::pins::{
    Headers, Pins, Place, forget_watches, happened, is_watched, overflowed,
};
use stream_s3_interleavings::{Executor, explore, orders};
use tempfile::TempDir;

/// Records of a segment, which is one chunk.
const RECORDS: u64 = 10;
/// Bytes of a segment.
const BYTES: u64 = 8 + 48 + 4;
const PLENTY: u64 = 1 << 30;
const OLD: &[u8] = b"the old writer";
const NEW: &[u8] = b"the new writer";

/// A log directory, and what the host does to it.
#[derive(Clone)]
struct Log {
    _folder: Arc<TempDir>,
    dir: PathBuf,
    pins: Pins,
}

impl Log {
    fn new() -> Self {
        forget_watches();
        let folder = TempDir::new().expect("a folder");
        Self {
            dir: folder.path().to_owned(),
            _folder: Arc::new(folder),
            pins: Pins::default(),
        }
    }

    fn enter(&self, writer: &[u8], budget: u64) -> impl FnOnce() + Send + 'static {
        let stream = StreamId::parse("stream_1").expect("an id");
        self.pins.enter(stream, &self.dir, writer, || true, budget)
    }

    fn path(&self, segment: u64) -> PathBuf {
        self.dir.join(format!("{:020}.segment", segment * RECORDS))
    }

    fn append(&self, segment: u64) {
        let header = ChunkHeader {
            kind: ChunkType::User,
            num_entries: 1,
            num_records: RECORDS as u32,
            timestamp: TimestampMs(1),
            epoch: Epoch(1),
            chunk_id: Offset(segment * RECORDS),
            crc: 0,
            data_size: 4,
            trailer_size: 0,
            filter_size: 0,
            reserved: [0; 3],
        };
        let bytes = [&SEGMENT_HEADER[..], &header.encode(), b"data"].concat();
        assert_eq!(bytes.len() as u64, BYTES);
        fs::write(self.path(segment), bytes).expect("a segment");
        happened(&self.pins, &self.dir);
    }

    fn unlink(&self, segment: u64) {
        fs::remove_file(self.path(segment)).expect("it was there");
        happened(&self.pins, &self.dir);
    }

    fn is_pinned(&self, segment: u64) -> bool {
        let at = Offset(segment * RECORDS);
        self.pins.file(&self.dir, at).is_some()
    }

    fn unlinked_bytes(&self) -> u64 {
        self.pins.info().unlinked_bytes
    }
}

/// Descriptors of the process that lead into a directory.
fn descriptors(dir: &Path) -> usize {
    let all = fs::read_dir("/proc/self/fd").expect("descriptors");
    let files = all.filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
    files.filter(|file| file.starts_with(dir)).count()
}

fn join<T>(threads: Vec<thread::JoinHandle<T>>) {
    for thread in threads {
        thread.join().expect("a thread panicked");
    }
}

/// Retention deletes what has been announced, at any time; what is persisted goes on beside it, and others look when they like. Nothing is let go before
/// its end is persisted, nothing stays behind that, and the bytes that are counted are those that are held.
#[test]
fn what_was_announced_stays_readable_until_it_is_persisted_and_is_counted() {
    explore(
        || {
            let log = Log::new();
            log.enter(OLD, PLENTY)();
            let persisted = Arc::new(AtomicU64::new(0));
            let host = {
                let (log, persisted) = (log.clone(), Arc::clone(&persisted));
                thread::spawn(move || {
                    for segment in 0..4 {
                        log.append(segment);
                        if segment > 1 {
                            log.unlink(segment - 2);
                        }
                        for old in 0..=segment {
                            let pinned = log.is_pinned(old);
                            let end = (old + 1) * RECORDS;
                            assert!(
                                pinned || end <= persisted.load(Ordering::SeqCst),
                                "segment {old} was let go"
                            );
                        }
                    }
                })
            };
            let uploader = {
                let (log, persisted) = (log.clone(), Arc::clone(&persisted));
                thread::spawn(move || {
                    for upto in [5, 10] {
                        persisted.store(upto, Ordering::SeqCst);
                        log.pins.persisted(&log.dir, Offset(upto))();
                    }
                })
            };
            let other = {
                let log = log.clone();
                thread::spawn(move || log.pins.look(&log.dir))
            };
            join(vec![host, uploader, other]);
            let pinned: Vec<u64> = (0..4).filter(|segment| log.is_pinned(*segment)).collect();
            assert_eq!(pinned, [1, 2, 3]);
            assert_eq!(log.unlinked_bytes(), BYTES, "one of them is deleted");
            log.pins.clear();
            assert_eq!(descriptors(&log.dir), 0);
        },
        orders(500),
    );
}

/// Whoever looks, and whenever: the deleted segments never take more than they may, nor do descriptors outlive what they are for.
#[test]
fn the_budget_holds_at_any_moment_and_in_the_end_for_all_that_is_held() {
    explore(
        || {
            let log = Log::new();
            log.enter(OLD, 2 * BYTES)();
            for segment in 0..5 {
                log.append(segment);
            }
            let host = {
                let log = log.clone();
                thread::spawn(move || (0..4).for_each(|segment| log.unlink(segment)))
            };
            let mut all = vec![host];
            for _ in 0..2 {
                let log = log.clone();
                all.push(thread::spawn(move || {
                    overflowed(&log.pins);
                    assert!(log.unlinked_bytes() <= 2 * BYTES);
                }));
            }
            join(all);
            let pinned: Vec<u64> = (0..5).filter(|segment| log.is_pinned(*segment)).collect();
            assert_eq!(pinned, [2, 3, 4]);
            assert_eq!(log.unlinked_bytes(), 2 * BYTES);
            assert_eq!(descriptors(&log.dir), 3);
        },
        orders(500),
    );
}

/// A reader reads headers of what is being deleted and let go: what it gets is of the chunk that it asked for.
#[test]
fn what_is_read_is_what_was_asked_for_or_is_not_pinned() {
    explore(
        || {
            let log = Log::new();
            log.enter(OLD, BYTES)();
            for segment in 0..4 {
                log.append(segment);
            }
            let host = {
                let log = log.clone();
                thread::spawn(move || (0..3).for_each(|segment| log.unlink(segment)))
            };
            let reader = {
                let log = log.clone();
                thread::spawn(move || {
                    let executor = Executor::default();
                    for segment in 0..3u64 {
                        let at = Offset(segment * RECORDS);
                        let read = log.pins.headers(&executor, &log.dir, Place::Offset(at), 9);
                        match block_on(read).expect("headers") {
                            Headers::Chunks { chunks, .. } => {
                                let ids: Vec<Offset> = chunks.iter().map(|c| c.chunk_id).collect();
                                assert_eq!(ids, [at]);
                            }
                            Headers::NotPinned => {}
                        }
                    }
                    // What of it is pinned reaches up to the log without a gap, and nothing else does.
                    let joined = log.pins.joining(&executor, &log.dir, Offset(3 * RECORDS));
                    let from = block_on(joined).expect("headers");
                    assert!(from.is_none_or(|from| from.0 < 3 * RECORDS && from.0 % RECORDS == 0));
                })
            };
            join(vec![host, reader]);
            let executor = Executor::default();
            let joined = log.pins.joining(&executor, &log.dir, Offset(3 * RECORDS));
            assert_eq!(
                block_on(joined).expect("headers"),
                Some(Offset(2 * RECORDS))
            );
        },
        orders(500),
    );
}

/// The reader of the old writer leaves its log while that of the new one enters it.
#[test]
fn a_log_that_is_entered_while_it_is_left_is_watched_and_pinned() {
    explore(
        || {
            let log = Log::new();
            log.enter(OLD, PLENTY)();
            log.append(0);
            let leaver = {
                let log = log.clone();
                thread::spawn(move || log.pins.leave(&log.dir, OLD))
            };
            let newcomer = {
                let log = log.clone();
                thread::spawn(move || log.enter(NEW, PLENTY)())
            };
            join(vec![leaver, newcomer]);
            assert!(log.is_pinned(0));
            assert!(is_watched(&log.dir));
            log.append(1);
            assert!(log.is_pinned(1));
            assert_eq!(descriptors(&log.dir), 2);
            log.pins.leave(&log.dir, NEW);
            assert!(!is_watched(&log.dir));
            assert_eq!(descriptors(&log.dir), 0);
        },
        orders(500),
    );
}

/// A reader leaves before the work of its entering has been done, and a sweep comes, too.
#[test]
fn a_log_that_everybody_has_left_is_not_watched_and_holds_no_file() {
    explore(
        || {
            let log = Log::new();
            let alive = Arc::new(AtomicBool::new(true));
            fs::write(log.path(0), b"OSIL").expect("a segment");
            let stream = StreamId::parse("stream_1").expect("an id");
            let is_alive = {
                let alive = Arc::clone(&alive);
                move || alive.load(Ordering::SeqCst)
            };
            let work = log.pins.enter(stream, &log.dir, OLD, is_alive, PLENTY);
            let worker = thread::spawn(work);
            let leaver = {
                let log = log.clone();
                thread::spawn(move || log.pins.leave(&log.dir, OLD))
            };
            let sweeper = {
                let log = log.clone();
                thread::spawn(move || {
                    alive.store(false, Ordering::SeqCst);
                    log.pins.sweep();
                })
            };
            join(vec![worker, leaver, sweeper]);
            assert_eq!(log.pins.info().streams, []);
            assert!(!is_watched(&log.dir));
            assert_eq!(descriptors(&log.dir), 0);
        },
        orders(500),
    );
}
