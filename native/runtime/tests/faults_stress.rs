//! Many streams at once on a store that fails now and then, driven as the shell drives: whatever ends badly is submitted again.

mod rig;
mod support;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use stream_s3_core::admission::Rate;
use stream_s3_core::error::{ErrorClass, TransferError};
use stream_s3_core::fragment::{Added, Assembly, Chunk, IndexRecord, OBJECT_HEADER};
use stream_s3_core::key::StreamId;
use stream_s3_core::units::Uid;
use stream_s3_runtime::{Event, Executor, Fragment, Governor, Limits, Store};
use stream_s3_s3local::{Action, Fault, Operation, Options, S3Local};
use support::{Log, mailbox, transfer};
use tempfile::TempDir;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

const MIB: usize = 1 << 20;

/// The fragments of one log, and the CRC-32 and length of the object that each becomes.
struct Expected {
    fragments: Vec<Fragment>,
    objects: Vec<(u32, u64)>,
}

/// A log of `count` fragments of `chunks` chunks each; every second one begins in one segment and ends in the next.
fn fragments(log: &mut Log, count: usize, chunks: usize, chunk: usize) -> Expected {
    for number in 0..count {
        for part in 0..chunks {
            log.chunk(3, chunk + 11 * number);
            if part == chunks / 2 && number % 2 == 1 {
                log.roll();
            }
        }
    }
    log.flush();
    let mut expected = Expected {
        fragments: Vec::new(),
        objects: Vec::new(),
    };
    for group in log.chunks.chunks(chunks) {
        let mut assembly = Assembly::expecting(u64::MAX, group[0].chunk_id);
        for chunk in group {
            assert_eq!(assembly.add(chunk), Ok(Added::Taken));
        }
        let fragment = Fragment {
            stream: StreamId::parse("replaced").expect("an id"),
            dir: log.dir.path().to_owned(),
            meta: assembly.metadata().expect("there are chunks"),
        };
        expected.objects.push(object(log, group, &fragment));
        expected.fragments.push(fragment);
    }
    expected
}

/// What the object must be, put together by hand.
fn object(log: &Log, chunks: &[Chunk], fragment: &Fragment) -> (u32, u64) {
    let mut object = OBJECT_HEADER.to_vec();
    for span in &fragment.meta.spans {
        let file = std::fs::read(log.file(span.segment_offset)).expect("a segment file");
        object.extend_from_slice(&file[span.start as usize..span.end as usize]);
    }
    let mut position = 0;
    for chunk in chunks {
        let record = IndexRecord {
            chunk_id: chunk.chunk_id,
            timestamp: chunk.timestamp,
            position,
        };
        object.extend_from_slice(&record.encode());
        position += (chunk.next_position - chunk.position) as u32;
    }
    (crc32fast::hash(&object), object.len() as u64)
}

/// One in five PUTs goes wrong, in one way or another.
fn make_trouble(server: &S3Local) {
    let status = |status, code: &str| Action::Status {
        status,
        code: code.to_owned(),
    };
    for (action, probability) in [
        (status(503, "SlowDown"), 0.05),
        (status(500, "InternalError"), 0.04),
        (status(403, "AccessDenied"), 0.02),
        (Action::ResetBefore, 0.02),
        (
            Action::ResetBody {
                after_bytes: 700_000,
            },
            0.03,
        ),
        (Action::LostReply, 0.03),
        (Action::WrongChecksum, 0.01),
        (Action::Stall, 0.01),
    ] {
        server.faults().add(Fault {
            probability,
            ..Fault::new(Operation::Put, action)
        });
    }
}

/// What the tasks of all streams have in common.
struct Driver {
    governor: Governor<u64>,
    store: Store,
    bucket: PathBuf,
    expected: Expected,
    /// From admission on, as the shell has it.
    deadline: Duration,
    attempts: AtomicU64,
    failures: AtomicU64,
    accepted: Mutex<HashSet<(String, u64, u32)>>,
    /// Objects are looked at and removed as soon as they are accepted, so that the disk holds few.
    keep: bool,
    /// Nothing is submitted any more.
    over: AtomicBool,
}

impl Driver {
    /// Submits the fragment until it is stored, as the shell does: each attempt under a name of its own, and given up at its deadline.
    async fn upload(self: Arc<Self>, stream: String, number: usize) {
        let mut fragment = self.expected.fragments[number].clone();
        fragment.stream = StreamId::parse(&stream).expect("an id");
        let mut delay = Duration::from_millis(10);
        let uid = loop {
            match self.attempt(&fragment).await {
                Ok(uid) => break uid,
                Err(_) if self.over.load(Ordering::Relaxed) => return,
                Err(error) => {
                    assert_ne!(error.class() == ErrorClass::Permanent, error.is_transient());
                    self.failures.fetch_add(1, Ordering::Relaxed);
                    tokio::time::sleep(delay).await;
                    delay = (delay * 2).min(Duration::from_millis(500));
                }
            }
        };
        let first = fragment.meta.first_offset.0;
        let key = (stream.clone(), first, uid.0);
        assert!(
            self.accepted.lock().expect("no panic").insert(key),
            "accepted twice"
        );
        let file = self.bucket.join(format!(
            "rabbitmq/stream/{stream}/data/{first:020}.{:08x}.fragment",
            uid.0
        ));
        self.look_at(&file, number);
        if !self.keep {
            std::fs::remove_file(file).expect("removed");
        }
    }

    async fn attempt(&self, fragment: &Fragment) -> Result<Uid, TransferError> {
        let name = self.attempts.fetch_add(1, Ordering::Relaxed);
        let (to, mut answers, _) = mailbox();
        let work = transfer(&self.store, fragment);
        self.governor.submit(name, fragment.meta.size, work, to);
        match answers.next().await {
            Event::Admitted => {}
            // Still queued when the governor was stopped.
            Event::Finished(Err(error)) if self.over.load(Ordering::Relaxed) => return Err(error),
            other @ (Event::Finished(_) | Event::Abandoned) => panic!("{other:?}"),
        }
        let end = match timeout(self.deadline, answers.next()).await {
            Ok(end) => end,
            Err(_) => {
                self.governor.cancel(vec![name]);
                answers.next().await
            }
        };
        assert!(answers.are_over().await, "one answer, and no more");
        match end {
            Event::Finished(result) => result,
            Event::Admitted | Event::Abandoned => panic!("{end:?}"),
        }
    }

    fn look_at(&self, file: &Path, number: usize) {
        let (crc, len) = self.expected.objects[number];
        let bytes = std::fs::read(file).expect("it is there");
        assert_eq!(bytes.len() as u64, len);
        assert_eq!(crc32fast::hash(&bytes), crc, "{}", file.display());
    }
}

struct Load {
    streams: usize,
    fragments: usize,
    chunks: usize,
    chunk: usize,
    permits: usize,
    deadline: Duration,
    keep: bool,
    /// Bytes that memory may grow by between a tenth of the way and the end.
    growth: u64,
}

async fn uploads_everything(load: Load) {
    let (dir, mut log) = (TempDir::new().expect("a folder"), Log::new());
    let server = S3Local::start(Options::new(dir.path(), "bucket"))
        .await
        .expect("a server");
    let limits = Limits {
        rate: Rate::Unlimited,
        burst: 1,
        permits: load.permits,
    };
    let executor = Executor::current().expect("threads");
    let driver = Arc::new(Driver {
        governor: Governor::start(&executor, limits, || true),
        store: rig::store_at(server.endpoint()),
        bucket: dir.path().join("bucket"),
        expected: fragments(&mut log, load.fragments, load.chunks, load.chunk),
        deadline: load.deadline,
        attempts: AtomicU64::new(0),
        failures: AtomicU64::new(0),
        accepted: Mutex::default(),
        keep: load.keep,
        over: AtomicBool::new(false),
    });
    // Whether the store verifies is found out before anything goes wrong.
    driver.store.probe().await.expect("usable");
    let probed = server.counters().of(Operation::Put).requests;
    make_trouble(&server);
    let mut tasks = JoinSet::new();
    for number in 0..load.fragments {
        for stream in 0..load.streams {
            tasks.spawn(Arc::clone(&driver).upload(format!("stream_{stream}"), number));
        }
    }
    let total = tasks.len();
    let (mut warm, mut largest) = (0, 0);
    // A few buffers for each that runs, and what the pool keeps: nothing that grows with fragments or streams.
    let permitted = load.permits as u64 * (2 << 20) + rig::KEPT_BYTES;
    while let Some(done) = tasks.join_next().await {
        done.expect("uploaded");
        let resident = rig::resident();
        if tasks.len() >= total - total / 10 {
            warm = resident.max(warm);
        }
        largest = resident.max(largest);
        let info = driver.governor.info();
        assert!(info.upload_permits_in_use <= load.permits as u64);
        assert!(info.upload_buffer_bytes <= permitted);
    }
    assert!(
        largest - warm < load.growth,
        "{} bytes more",
        largest - warm
    );
    let (attempts, failures) = (
        driver.attempts.load(Ordering::Relaxed),
        driver.failures.load(Ordering::Relaxed),
    );
    assert_eq!(
        attempts - failures,
        total as u64,
        "each fragment was accepted once"
    );
    assert_eq!(driver.accepted.lock().expect("no panic").len(), total);
    assert!(
        failures > total as u64 / 20,
        "the store has failed: {failures} times"
    );
    let counts = server.counters().of(Operation::Put);
    assert!(
        counts.requests - probed <= attempts,
        "no attempt is more than one request"
    );
    rig::eventually("the governor is idle", || {
        let info = driver.governor.info();
        info.upload_permits_in_use + info.governor_pending_submissions == 0
            && info.upload_buffer_bytes <= rig::KEPT_BYTES
    })
    .await;
    let info = driver.governor.info();
    assert_eq!(info.governor_submissions_received, attempts);
    let each: u64 = driver.expected.objects.iter().map(|(_, len)| len).sum();
    assert_eq!(info.bytes_sent, each * load.streams as u64);
    let strangers = strangers(&driver, load.streams);
    assert!(
        strangers as u64 <= failures,
        "{strangers} objects nobody accepted"
    );
    println!(
        "{total} fragments, {attempts} attempts, {strangers} stored without an answer, {} MiB at most, {} MiB grown",
        largest >> 20,
        (largest - warm) >> 20
    );
}

/// Objects of attempts whose answer was lost. They are as good as the others, and nobody knows them.
fn strangers(driver: &Driver, streams: usize) -> usize {
    let mut strangers = 0;
    let accepted = driver.accepted.lock().expect("no panic");
    for stream in 0..streams {
        let stream = format!("stream_{stream}");
        let folder = driver
            .bucket
            .join("rabbitmq/stream")
            .join(&stream)
            .join("data");
        for row in std::fs::read_dir(folder).into_iter().flatten() {
            let path = row.expect("a row").path();
            let name = path
                .file_name()
                .expect("a name")
                .to_string_lossy()
                .into_owned();
            let (offset, uid) = (
                name[..20].parse::<u64>().expect("an offset"),
                u32::from_str_radix(&name[21..29], 16).expect("a uid"),
            );
            let number = driver
                .expected
                .fragments
                .iter()
                .position(|fragment| fragment.meta.first_offset.0 == offset);
            driver.look_at(&path, number.expect("one of the fragments"));
            strangers += usize::from(!accepted.contains(&(stream.clone(), offset, uid)));
        }
    }
    strangers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_fragment_of_twenty_streams_lands_once_although_every_fifth_put_fails() {
    uploads_everything(Load {
        streams: 20,
        fragments: 4,
        chunks: 4,
        chunk: MIB / 4,
        permits: 8,
        deadline: Duration::from_secs(3),
        keep: true,
        growth: 64 << 20,
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "writes 16 GiB in some minutes, though never more than a few of them at once"]
async fn every_fragment_of_two_hundred_streams_lands_once_although_every_fifth_put_fails() {
    uploads_everything(Load {
        streams: 200,
        fragments: 10,
        chunks: 8,
        chunk: MIB,
        permits: 16,
        deadline: Duration::from_secs(20),
        keep: false,
        growth: 64 << 20,
    })
    .await;
}

/// Of the bytes of this window a fragment is a quarter of a percent, so what is measured is the rate and not the grain.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_bytes_on_the_wire_keep_to_the_rate_with_all_retries() {
    const RATE: u64 = 16 << 20;
    const WINDOW: Duration = Duration::from_secs(3);
    let (dir, mut log) = (TempDir::new().expect("a folder"), Log::new());
    let server = S3Local::start(Options::new(dir.path(), "bucket"))
        .await
        .expect("a server");
    server.faults().add(Fault {
        probability: 0.2,
        ..Fault::new(
            Operation::Put,
            Action::Status {
                status: 503,
                code: "SlowDown".to_owned(),
            },
        )
    });
    let limits = Limits {
        rate: Rate::BytesPerSec(RATE),
        burst: RATE / 5,
        permits: 16,
    };
    let executor = Executor::current().expect("threads");
    let driver = Arc::new(Driver {
        governor: Governor::start(&executor, limits, || true),
        store: rig::store_at(server.endpoint()),
        bucket: dir.path().join("bucket"),
        expected: fragments(&mut log, 4, 2, MIB / 16),
        deadline: Duration::from_secs(10),
        attempts: AtomicU64::new(0),
        failures: AtomicU64::new(0),
        accepted: Mutex::default(),
        keep: false,
        over: AtomicBool::new(false),
    });
    // More than can be sent while it is measured, so that there is always something to send.
    let fragments = 2 * (RATE * 10 / (MIB as u64 / 8)) as usize;
    let mut tasks = JoinSet::new();
    for number in 0..fragments {
        tasks.spawn(Arc::clone(&driver).upload(format!("stream_{number}"), number % 4));
    }
    let sent = || server.counters().of(Operation::Put).bytes_in;
    // The burst goes at once and is none of the window's.
    rig::eventually("the burst is over", || sent() > 2 * RATE).await;
    // A machine that has other things to do falls behind, or catches up, by a burst; so it has three tries.
    let mut tries = 0..3;
    while let Some(number) = tries.next() {
        let (begun, before) = (Instant::now(), sent());
        tokio::time::sleep(WINDOW).await;
        let (took, bytes) = (begun.elapsed(), (sent() - before) as f64);
        assert!(
            !tasks.is_empty(),
            "there was something to send all the time"
        );
        let granted = RATE as f64 * took.as_secs_f64();
        println!(
            "window {number}: {:.2} % of the rate",
            100.0 * bytes / granted
        );
        // What was admitted before the window may arrive in it.
        let before_it = (limits.burst + limits.permits as u64 * MIB as u64 / 8) as f64;
        assert!(
            bytes <= granted + before_it,
            "{bytes} bytes where {granted} were granted"
        );
        if (bytes / granted - 1.0).abs() < 0.05 {
            break;
        }
        assert!(!tries.is_empty(), "five per cent off in each window");
    }
    assert!(
        driver.failures.load(Ordering::Relaxed) > 20,
        "some were sent twice"
    );
    driver.over.store(true, Ordering::Relaxed);
    driver.governor.stop(|| ());
    while let Some(done) = tasks.join_next().await {
        done.expect("no panic");
    }
}
