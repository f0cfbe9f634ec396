//! Ten thousand fragments of segments that are deleted before they are uploaded. Alone in its process, whose descriptors it counts.

mod support;

use std::fs;
use std::time::{Duration, Instant};

use stream_s3_core::key::StreamId;
use stream_s3_runtime::{Event, Executor};
use support::{Gate, Log, governor_on, store, upload_by};
use tokio::sync::Semaphore;

const FRAGMENTS: usize = 10_000;
const CHUNKS_A_SEGMENT: usize = 20;

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").expect("of Linux").count()
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_fragments_of_deleted_segments_leave_no_descriptor_open() {
    let executor = Executor::current().expect("threads");
    let governor = governor_on(&executor, 4);
    let gate = Gate {
        open: std::sync::Arc::new(Semaphore::new(FRAGMENTS)),
        ..Gate::closed()
    };
    let store = store(gate);
    let mut log = Log::new();
    let dir = log.dir.path().to_owned();
    let stream = StreamId::parse(support::STREAM).expect("an id");
    let pins = executor.pins().clone();
    pins.enter(stream, &dir, b"writer", || true, 1 << 20)();
    let before = descriptors();
    let mut most = 0;
    for _ in 0..FRAGMENTS / CHUNKS_A_SEGMENT {
        let first = log.chunks.len();
        for n in 0..CHUNKS_A_SEGMENT {
            log.chunk(3, 50 + n);
        }
        let segment = log.file(log.chunks[first].segment_offset);
        log.roll();
        pins.look(&dir);
        fs::remove_file(segment).expect("it was there");
        for chunk in &log.chunks[first..] {
            let fragment = log.fragment_of(std::slice::from_ref(chunk));
            let end = upload_by(&governor, &store, &fragment).await;
            assert!(matches!(end, Event::Finished(Ok(_))), "{end:?}");
        }
        let last = &log.chunks[log.chunks.len() - 1];
        pins.persisted(&dir, last.chunk_id.advanced_by(u64::from(last.num_records)))();
        most = most.max(descriptors());
    }
    assert!(most <= before + 8, "{most} descriptors, {before} before");
    assert!(pins.info().segments <= 1, "{:?}", pins.info());
    pins.clear();
    // A transfer that has answered may still be dropping what it held.
    let deadline = Instant::now() + Duration::from_secs(20);
    while descriptors() > before {
        assert!(Instant::now() < deadline, "{} of {before}", descriptors());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
