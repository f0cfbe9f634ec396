//! Pinned segments: real files, deleted while they are still needed.

mod support;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use stream_s3_core::decisions::timeline::{ChunkIdentity, LocalChunk};
use stream_s3_core::error::TransferError;
use stream_s3_core::fragment::Chunk;
use stream_s3_core::key::StreamId;
use stream_s3_core::units::{Epoch, Offset};
use stream_s3_runtime::pins::{Headers, PINS_A_STREAM, Pins, PinsInfo, Place};
use stream_s3_runtime::{Event, Executor, Store};
use stream_s3_store::fs::FsStore;
use support::{Log, governor_on, keys, object, store, upload_by};
use tempfile::TempDir;

const WRITER: &[u8] = b"the writer";
const PLENTY: u64 = 1 << 30;

fn folder() -> (TempDir, Store) {
    let dir = TempDir::new().expect("a folder");
    let objects = store(FsStore::open(dir.path()).expect("a store"));
    (dir, objects)
}

fn stream() -> StreamId {
    StreamId::parse(support::STREAM).expect("an id")
}

fn enter(pins: &Pins, log: &Log, budget: u64) {
    pins.enter(stream(), log.dir.path(), WRITER, || true, budget)();
}

/// A log of three segments of three chunks each, of five records each; the last one is being written.
fn three_segments() -> Log {
    let mut log = Log::new();
    for segment in 0..3 {
        for chunk in 0..3 {
            log.chunk(5, 100 + 10 * segment + chunk);
        }
        if segment < 2 {
            log.roll();
        }
    }
    log.flush();
    log
}

fn size(path: &Path) -> u64 {
    fs::metadata(path).expect("a file").len()
}

/// Deletes a segment and answers how large it was.
fn unlink(log: &Log, segment: u64) -> u64 {
    let file = log.file(Offset(segment));
    let size = size(&file);
    fs::remove_file(file).expect("it was there");
    size
}

fn linked(segments: u64) -> PinsInfo {
    PinsInfo {
        segments,
        streams: vec![(stream(), 0)],
        ..PinsInfo::default()
    }
}

fn unlinked(segments: u64, bytes: u64) -> PinsInfo {
    PinsInfo {
        segments,
        unlinked_bytes: bytes,
        streams: vec![(stream(), bytes)],
        ..PinsInfo::default()
    }
}

/// Waits until the numbers are these: the thread that listens needs a moment.
async fn becomes(pins: &Pins, expected: &PinsInfo) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while pins.info() != *expected {
        assert!(Instant::now() < deadline, "{:?}", pins.info());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn read_on(executor: &Executor, log: &Log, place: Place, max: usize) -> (Vec<Chunk>, Place) {
    let headers = executor
        .pins()
        .headers(executor, log.dir.path(), place, max)
        .await
        .expect("readable");
    match headers {
        Headers::Chunks { chunks, next } => (chunks, next),
        Headers::NotPinned => panic!("{place:?} is not pinned"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_segment_that_is_deleted_still_uploads_byte_for_byte() {
    let (_dir, store) = folder();
    let executor = Executor::current().expect("threads");
    let governor = governor_on(&executor, 1);
    let log = three_segments();
    let fragment = log.fragment();
    let expected = log.object(&fragment.meta);
    enter(executor.pins(), &log, PLENTY);
    for segment in [0, 15, 30] {
        unlink(&log, segment);
    }
    assert!(matches!(
        upload_by(&governor, &store, &fragment).await,
        Event::Finished(Ok(_))
    ));
    let key = &keys(&store).await[0];
    assert!(object(&store, key).await == expected, "bytes differ");
    executor.pins().clear();
    match upload_by(&governor, &store, &fragment).await {
        Event::Finished(Err(TransferError::OpenFailed { posix, .. })) => {
            assert_eq!(posix, "enoent");
        }
        other @ (Event::Finished(_) | Event::Admitted | Event::Abandoned) => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_segment_that_appears_is_pinned_though_nobody_asks() {
    let pins = Pins::default();
    let mut log = three_segments();
    enter(&pins, &log, PLENTY);
    assert_eq!(pins.info(), linked(3));
    log.roll().chunk(1, 10).flush();
    becomes(&pins, &linked(4)).await;
    let bytes = unlink(&log, 0);
    becomes(&pins, &unlinked(4, bytes)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn beyond_the_budget_the_oldest_is_let_go_and_the_gauge_is_exact() {
    let pins = Pins::default();
    let log = three_segments();
    let [first, second] = [0, 15].map(|segment| size(&log.file(Offset(segment))));
    enter(&pins, &log, first + second);
    assert_eq!((unlink(&log, 0), unlink(&log, 15)), (first, second));
    becomes(&pins, &unlinked(3, first + second)).await;
    // One byte less than both take.
    enter(&pins, &log, first + second - 1);
    assert_eq!(pins.info(), unlinked(2, second));
    assert!(pins.file(log.dir.path(), Offset(0)).is_none());
    assert!(pins.file(log.dir.path(), Offset(15)).is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_budget_is_that_of_the_node_and_the_oldest_goes_wherever_it_is() {
    let pins = Pins::default();
    let (older, younger) = (three_segments(), three_segments());
    // The second one of a log is a little larger than the first.
    let two = size(&older.file(Offset(15))) + size(&younger.file(Offset(0)));
    enter(&pins, &older, two);
    let other = StreamId::parse("other").expect("an id");
    pins.enter(other, younger.dir.path(), WRITER, || true, two)();
    let young = unlink(&younger, 0);
    pins.look(younger.dir.path());
    assert_eq!(pins.info().unlinked_bytes, young);
    unlink(&older, 0);
    let old = unlink(&older, 15);
    pins.look(older.dir.path());
    assert_eq!(pins.info().unlinked_bytes, young + old);
    assert!(pins.file(older.dir.path(), Offset(0)).is_none());
    assert!(pins.file(older.dir.path(), Offset(15)).is_some());
    assert!(pins.file(younger.dir.path(), Offset(0)).is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_budget_of_nothing_nothing_is_pinned() {
    let pins = Pins::default();
    let mut log = three_segments();
    enter(&pins, &log, 0);
    assert_eq!(pins.info(), linked(0));
    log.roll().chunk(1, 10).flush();
    unlink(&log, 0);
    pins.look(log.dir.path());
    assert_eq!(pins.info(), linked(0));
    // And what was pinned under another budget is let go.
    enter(&pins, &log, PLENTY);
    assert_eq!(pins.info(), linked(3));
    enter(&pins, &log, 0);
    assert_eq!(pins.info(), linked(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_persisted_is_let_go_whether_deleted_or_not() {
    let pins = Pins::default();
    let log = three_segments();
    enter(&pins, &log, PLENTY);
    let persisted = |offset| pins.persisted(log.dir.path(), Offset(offset))();
    persisted(14);
    assert_eq!(pins.info(), linked(3));
    persisted(15);
    assert_eq!(pins.info(), linked(2));
    let bytes = unlink(&log, 15);
    persisted(29);
    assert_eq!(pins.info(), unlinked(2, bytes));
    persisted(30);
    assert_eq!(pins.info(), linked(1));
    // The one that is being written stays, however much of it is persisted: more will come.
    persisted(45);
    assert_eq!(pins.info(), linked(1));
    // A tier that begins anew further back wants what is still there.
    unlink(&log, 0);
    persisted(0);
    assert_eq!(pins.info(), linked(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_long_log_the_oldest_segments_are_pinned_and_the_others_follow() {
    let pins = Pins::default();
    let mut log = Log::new();
    for _ in 0..PINS_A_STREAM + 10 {
        log.chunk(1, 1).roll();
    }
    log.chunk(1, 1).flush();
    enter(&pins, &log, PLENTY);
    assert_eq!(pins.info(), linked(PINS_A_STREAM as u64));
    assert!(pins.file(log.dir.path(), Offset(0)).is_some());
    pins.persisted(log.dir.path(), Offset(4))();
    assert_eq!(pins.info(), linked(PINS_A_STREAM as u64));
    pins.persisted(log.dir.path(), Offset(20))();
    assert_eq!(pins.info(), linked(PINS_A_STREAM as u64 + 11 - 20));
}

#[tokio::test(flavor = "multi_thread")]
async fn pins_outlive_a_reader_but_not_the_writer() {
    let pins = Pins::default();
    let log = three_segments();
    let dir = log.dir.path();
    let alive = Arc::new(AtomicBool::new(true));
    let enter = |writer: &[u8]| {
        let alive = Arc::clone(&alive);
        let is_alive = move || alive.load(Ordering::Relaxed);
        pins.enter(stream(), dir, writer, is_alive, PLENTY)();
    };
    enter(b"first");
    let bytes = unlink(&log, 0);
    // A reader that is started again enters again.
    enter(b"first");
    assert_eq!(pins.info(), unlinked(3, bytes));
    // The files of another writer may have the same names, and other chunks.
    enter(b"second");
    assert_eq!(pins.info(), linked(2));
    pins.leave(dir, b"first");
    pins.sweep();
    assert_eq!(pins.info(), linked(2));
    alive.store(false, Ordering::Relaxed);
    pins.sweep();
    assert_eq!(pins.info(), PinsInfo::default());
    enter(b"third");
    pins.leave(dir, b"third");
    assert_eq!(pins.info(), PinsInfo::default());
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_of_deleted_segments_are_those_that_were_written() {
    let executor = Executor::current().expect("threads");
    let log = three_segments();
    enter(executor.pins(), &log, PLENTY);
    unlink(&log, 0);
    unlink(&log, 15);
    // From the middle of the first one on, two at a time.
    let (chunks, next) = read_on(&executor, &log, Place::Offset(Offset(5)), 2).await;
    assert_eq!(chunks, log.chunks[1..3]);
    // It ends there, and whoever reads has to ask for what follows.
    let (none, end) = read_on(&executor, &log, next, 2).await;
    assert_eq!((none.as_slice(), end), (&[] as &[Chunk], next));
    let (chunks, next) = read_on(&executor, &log, Place::Offset(Offset(15)), 2).await;
    assert_eq!(chunks, log.chunks[3..5]);
    let (chunks, _) = read_on(&executor, &log, next, 100).await;
    assert_eq!(chunks, log.chunks[5..6]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_no_pinned_segment_has_is_not_pinned() {
    let executor = Executor::current().expect("threads");
    let log = three_segments();
    enter(executor.pins(), &log, PLENTY);
    let dir = log.dir.path();
    unlink(&log, 0);
    executor.pins().persisted(dir, Offset(15))();
    // Let go, inside a chunk, behind the log's end.
    for offset in [0, 17, 45, 99] {
        let place = Place::Offset(Offset(offset));
        let headers = executor.pins().headers(&executor, dir, place, 9).await;
        assert_eq!(headers.expect("readable"), Headers::NotPinned, "{offset}");
    }
    let elsewhere = TempDir::new().expect("a folder");
    let headers = executor
        .pins()
        .headers(&executor, elsewhere.path(), Place::Offset(Offset(0)), 9);
    assert_eq!(headers.await.expect("readable"), Headers::NotPinned);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_segment_that_is_not_pinned_is_read_until_it_is_deleted() {
    let executor = Executor::current().expect("threads");
    let log = three_segments();
    let place = Place::Position {
        segment: Offset(15),
        position: log.chunks[4].position,
        offset: log.chunks[4].chunk_id,
    };
    let (chunks, end) = read_on(&executor, &log, place, 9).await;
    assert_eq!(chunks, log.chunks[4..6]);
    let (none, next) = read_on(&executor, &log, end, 9).await;
    assert_eq!((none.as_slice(), next), (&[] as &[Chunk], end));
    unlink(&log, 15);
    for place in [place, end] {
        let headers = executor
            .pins()
            .headers(&executor, log.dir.path(), place, 9)
            .await;
        assert_eq!(headers.expect("readable"), Headers::NotPinned);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chunk_that_is_being_written_is_read_when_all_of_it_is_there() {
    let executor = Executor::current().expect("threads");
    let log = three_segments();
    let (file, last) = (log.file(Offset(30)), &log.chunks[8]);
    let whole = fs::read(&file).expect("a file");
    let position = |bytes: u64| usize::try_from(bytes).expect("small");
    let mut place = Place::Position {
        segment: Offset(30),
        position: log.chunks[7].position,
        offset: log.chunks[7].chunk_id,
    };
    // Its header in part, its header, all but its last byte.
    for there in [
        last.position + 20,
        last.position + 48,
        last.next_position - 1,
    ] {
        fs::write(&file, &whole[..position(there)]).expect("written");
        let (chunks, next) = read_on(&executor, &log, place, 9).await;
        assert!(!chunks.contains(last), "{there}");
        place = next;
    }
    fs::write(&file, &whole).expect("written");
    let (chunks, _) = read_on(&executor, &log, place, 9).await;
    assert_eq!(chunks, log.chunks[8..]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chunk_of_a_deleted_segment_is_told_from_others() {
    let executor = Executor::current().expect("threads");
    let log = three_segments();
    enter(executor.pins(), &log, PLENTY);
    unlink(&log, 0);
    let (pins, dir) = (executor.pins(), log.dir.path());
    let identity = |chunk_id| pins.identity(&executor, dir, Offset(chunk_id));
    let chunk = &log.chunks[1];
    let expected = ChunkIdentity {
        chunk_id: chunk.chunk_id,
        epoch: Epoch(3),
        crc: chunk.crc,
    };
    assert_eq!(
        identity(5).await.expect("readable"),
        LocalChunk::Found(expected)
    );
    assert_eq!(
        identity(7).await.expect("readable"),
        LocalChunk::InsideAnother
    );
    pins.persisted(dir, Offset(15))();
    assert_eq!(identity(5).await.expect("readable"), LocalChunk::Trimmed);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_header_that_is_none_is_an_error_and_no_chunk() {
    let executor = Executor::current().expect("threads");
    let log = three_segments();
    support::flip(&log.file(Offset(0)), log.chunks[1].position);
    enter(executor.pins(), &log, PLENTY);
    unlink(&log, 0);
    let pins = executor.pins();
    let place = Place::Offset(Offset(0));
    let error = pins.headers(&executor, log.dir.path(), place, 9).await;
    assert_eq!(
        error.expect_err("damaged").kind(),
        std::io::ErrorKind::InvalidData
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_segments_join_a_log_that_begins_where_they_end() {
    let executor = Executor::current().expect("threads");
    let log = three_segments();
    let (pins, dir) = (executor.pins(), log.dir.path());
    enter(pins, &log, PLENTY);
    unlink(&log, 0);
    unlink(&log, 15);
    let joining = |first| pins.joining(&executor, dir, Offset(first));
    assert_eq!(joining(30).await.expect("readable"), Some(Offset(0)));
    assert_eq!(joining(15).await.expect("readable"), Some(Offset(0)));
    assert_eq!(joining(0).await.expect("readable"), None);
    assert_eq!(joining(31).await.expect("readable"), None);
}

/// Nothing was ever listed behind it, so the segment itself has to tell where it ends.
#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_segment_that_was_the_last_one_is_found_in_it() {
    let executor = Executor::current().expect("threads");
    let log = three_segments();
    let (pins, dir) = (executor.pins(), log.dir.path());
    enter(pins, &log, PLENTY);
    for segment in [0, 15, 30] {
        unlink(&log, segment);
    }
    let joining = |first| pins.joining(&executor, dir, Offset(first));
    assert_eq!(joining(45).await.expect("readable"), Some(Offset(0)));
    assert_eq!(joining(46).await.expect("readable"), None);
}

/// osiris lists what goes from the newest to the oldest, and deletes it in this order. Whoever looks meanwhile finds a log with a gap.
#[tokio::test(flavor = "multi_thread")]
async fn segments_join_the_log_though_the_newest_of_them_was_deleted_first() {
    let executor = Executor::current().expect("threads");
    let log = three_segments();
    let (pins, dir) = (executor.pins(), log.dir.path());
    enter(pins, &log, PLENTY);
    for segment in [15, 0] {
        unlink(&log, segment);
        pins.look(dir);
    }
    let joining = |first| pins.joining(&executor, dir, Offset(first));
    assert_eq!(joining(30).await.expect("readable"), Some(Offset(0)));
    assert_eq!(joining(15).await.expect("readable"), Some(Offset(0)));
    let (chunks, _) = read_on(&executor, &log, Place::Offset(Offset(10)), 9).await;
    assert_eq!(chunks, log.chunks[2..3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_segment_that_was_never_listed_with_its_successor_joins_it() {
    let executor = Executor::current().expect("threads");
    let mut log = Log::new();
    log.chunk(5, 100).chunk(5, 100).flush();
    let (pins, dir) = (executor.pins(), log.dir.path().to_owned());
    enter(pins, &log, PLENTY);
    // The next one appears when the first is gone.
    log.roll();
    unlink(&log, 0);
    log.chunk(5, 100).flush();
    pins.look(&dir);
    let joining = |first| pins.joining(&executor, &dir, Offset(first));
    assert_eq!(joining(10).await.expect("readable"), Some(Offset(0)));
}

/// The segment that a tier begins anew with may be missing by the time it is asked for; what is behind it still joins the log.
#[tokio::test(flavor = "multi_thread")]
async fn behind_a_segment_that_could_not_be_pinned_the_others_join_the_log() {
    let executor = Executor::current().expect("threads");
    let log = three_segments();
    let (pins, dir) = (executor.pins(), log.dir.path());
    unlink(&log, 0);
    enter(pins, &log, PLENTY);
    unlink(&log, 15);
    let joining = |first| pins.joining(&executor, dir, Offset(first));
    assert_eq!(joining(30).await.expect("readable"), Some(Offset(15)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_held_segment_uploads_without_a_budget_and_is_let_go_once_something_of_it_is_persisted() {
    let (_dir, store) = folder();
    let executor = Executor::current().expect("threads");
    let governor = governor_on(&executor, 1);
    let log = three_segments();
    let (pins, dir) = (executor.pins(), log.dir.path());
    let fragment = log.fragment_of(&log.chunks[..2]);
    enter(pins, &log, 0);
    pins.hold(dir, Offset(0))().expect("it is there");
    assert_eq!(pins.info(), linked(1));
    let bytes = unlink(&log, 0);
    becomes(pins, &unlinked(1, bytes)).await;
    // Once more, now that it has no name.
    pins.hold(dir, Offset(0))().expect("it is open");
    pins.persisted(dir, Offset(0))();
    assert_eq!(pins.info(), unlinked(1, bytes));
    assert!(matches!(
        upload_by(&governor, &store, &fragment).await,
        Event::Finished(Ok(_))
    ));
    pins.persisted(dir, Offset(10))();
    assert_eq!(pins.info(), linked(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn one_segment_of_a_log_is_held_and_it_is_that_of_the_writer_who_asked() {
    let pins = Pins::default();
    let log = three_segments();
    let dir = log.dir.path();
    // Of a log that nobody has entered.
    pins.hold(dir, Offset(0))().expect("it is there");
    assert_eq!(pins.info(), PinsInfo::default());
    enter(&pins, &log, 0);
    pins.hold(dir, Offset(0))().expect("it is there");
    pins.hold(dir, Offset(15))().expect("it is there");
    assert_eq!(pins.info(), linked(1));
    assert!(pins.file(dir, Offset(15)).is_some());
    unlink(&log, 0);
    let error = pins.hold(dir, Offset(0))().expect_err("it is deleted");
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    assert!(pins.file(dir, Offset(15)).is_some());
    let late = pins.hold(dir, Offset(30));
    pins.enter(stream(), dir, b"another", || true, 0)();
    late().expect("it is there");
    assert_eq!(pins.info(), linked(0));
}
