//! A real server that misbehaves on the wire, everything that is ever asked of a store, and a look at what is left behind.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::sync::Arc;
use std::time::Duration;

use stream_s3_core::admission::Rate;
use stream_s3_core::error::TransferError;
use stream_s3_core::key::Prefix;
use stream_s3_core::manifest::{Manifest, encode_root};
use stream_s3_core::units::{Epoch, Uid};
use stream_s3_runtime::{Event, Executor, Fragment, Governor, Limits, Store, reason};
use stream_s3_s3local::{Action, Counts, Fault, Operation, Options, S3Local};
use stream_s3_store::s3::{Credentials, S3Settings, S3Store};
use stream_s3_store::{ErrorKind, Part, StoreError};
use tempfile::TempDir;
use tokio::sync::{Mutex, MutexGuard, oneshot};
use tokio::time::Instant;

use crate::support::{Answers, Log, mailbox, transfer};

/// How long anything may take that does not depend on the store.
pub(crate) const PROMPT: Duration = Duration::from_secs(2);
/// More than a pool keeps for reuse.
pub(crate) const KEPT_BYTES: u64 = 32 << 20;

/// What is asked of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    /// A fragment, through a governor: a streamed PUT of several buffers.
    Upload,
    /// A manifest root: a PUT from memory.
    Root,
    /// An object of 300 kB.
    Get,
    /// A page.
    List,
    /// One key, by a request of its own: as with stores that know no batches.
    Delete,
    /// A batch.
    MultiDelete,
}

impl Call {
    pub(crate) const ALL: [Self; 6] = [
        Self::Upload,
        Self::Root,
        Self::Get,
        Self::List,
        Self::Delete,
        Self::MultiDelete,
    ];

    pub(crate) fn operation(self) -> Operation {
        match self {
            Self::Upload | Self::Root => Operation::Put,
            Self::Get => Operation::Get,
            Self::List => Operation::List,
            Self::Delete => Operation::Delete,
            Self::MultiDelete => Operation::MultiDelete,
        }
    }

    pub(crate) fn is_put(self) -> bool {
        self.operation() == Operation::Put
    }
}

/// Descriptors are counted for the whole process, so one test runs at a time.
static ALONE: Mutex<()> = Mutex::const_new(());

/// A server, two stores on it, a governor and a fragment.
pub(crate) struct Rig {
    pub(crate) server: S3Local,
    pub(crate) log: Log,
    pub(crate) fragment: Fragment,
    pub(crate) governor: Governor<&'static str>,
    store: Store,
    single_deletes: Store,
    executor: Executor,
    dir: TempDir,
    descriptors: usize,
    _alone: MutexGuard<'static, ()>,
}

/// A store at `endpoint` with the server's keys.
pub(crate) fn store_at(endpoint: &str) -> Store {
    let settings = S3Settings {
        bucket: "bucket".to_owned(),
        endpoint: Some(endpoint.to_owned()),
        credentials: Credentials::Static {
            access_key_id: "s3local".to_owned(),
            secret_key: "s3local-secret".to_owned(),
            session_token: None,
        },
        ..S3Settings::default()
    };
    let objects = S3Store::open(settings).expect("a store");
    Store::over(Arc::new(objects), Prefix::default())
}

impl Rig {
    pub(crate) async fn new() -> Self {
        let alone = ALONE.lock().await;
        let descriptors = descriptors();
        let dir = TempDir::new().expect("a folder");
        let server = S3Local::start(Options::new(dir.path(), "bucket"))
            .await
            .expect("a server");
        let mut log = Log::new();
        // More than the buffers of a transfer.
        let fragment = log.chunk(5, 2 << 20).chunk(5, 1 << 20).fragment();
        let executor = Executor::current().expect("threads");
        let limits = Limits {
            rate: Rate::Unlimited,
            burst: 1,
            permits: 4,
        };
        let governor = Governor::start(&executor, limits, || true);
        let (store, single_deletes) = (store_at(server.endpoint()), store_at(server.endpoint()));
        std::fs::write(dir.path().join("bucket/object"), vec![7; 300_000]).expect("an object");
        let rig = Self {
            server,
            log,
            fragment,
            governor,
            store,
            single_deletes,
            executor,
            dir,
            descriptors,
            _alone: alone,
        };
        rig.make_single_deletes().await;
        rig
    }

    async fn make_single_deletes(&self) {
        let unknown = Action::Status {
            status: 501,
            code: "NotImplemented".to_owned(),
        };
        let id = self
            .server
            .faults()
            .add(Fault::new(Operation::MultiDelete, unknown));
        let gone = self.single_deletes.delete(&["x".to_owned()]).await;
        assert!(gone.expect("by a request of its own").is_empty());
        self.server.faults().remove(id);
    }

    /// From now on the call meets this fault, so many times.
    pub(crate) fn fault(&self, call: Call, action: Action, times: u64) {
        self.server.faults().clear();
        self.server
            .faults()
            .add(Fault::new(call.operation(), action).times(times));
    }

    pub(crate) fn counts(&self, call: Call) -> Counts {
        self.server.counters().of(call.operation())
    }

    /// Number of objects below the prefix.
    pub(crate) fn stored(&self) -> usize {
        fn files(dir: &std::path::Path) -> usize {
            let Ok(rows) = std::fs::read_dir(dir) else {
                return 0;
            };
            rows.map(|row| row.expect("a row").path())
                .map(|path| if path.is_dir() { files(&path) } else { 1 })
                .sum()
        }
        files(&self.dir.path().join("bucket/rabbitmq"))
    }

    /// One call, to its end. Errors in the terms in which the shell hears of them.
    pub(crate) async fn call(&self, call: Call) -> Result<(), TransferError> {
        self.call_on(&self.store, &self.single_deletes, call).await
    }

    /// The same, on stores at another place.
    pub(crate) async fn call_at(&self, endpoint: &str, call: Call) -> Result<(), TransferError> {
        let (store, single) = (store_at(endpoint), store_at(endpoint));
        self.call_on(&store, &single, call).await
    }

    async fn call_on(
        &self,
        store: &Store,
        single_deletes: &Store,
        call: Call,
    ) -> Result<(), TransferError> {
        if call == Call::Upload {
            let mut answers = self.submit(store, "upload");
            assert_eq!(answers.next().await, Event::Admitted);
            let end = answers.next().await;
            assert!(answers.are_over().await, "one answer, and no more");
            return match end {
                Event::Finished(result) => result.map(|_| ()),
                Event::Admitted | Event::Abandoned => panic!("{end:?}"),
            };
        }
        request(store, single_deletes, &self.fragment, call)
            .await
            .map_err(|error| {
                let failure = reason(&error.failure);
                assert_eq!(
                    error.kind == ErrorKind::Transient,
                    failure.is_transient(),
                    "{error}"
                );
                failure
            })
    }

    /// Submits the fragment under this name.
    pub(crate) fn submit_upload(&self, key: &'static str) -> Answers {
        self.submit(&self.store, key)
    }

    fn submit(&self, store: &Store, key: &'static str) -> Answers {
        let (to, answers, _) = mailbox();
        let (size, work) = (self.fragment.meta.size, transfer(store, &self.fragment));
        self.governor.submit(key, size, work, to);
        answers
    }

    /// Starts the call, here or at a place where nobody answers, and gives it up while it is under way, as the shell does at its deadline.
    pub(crate) async fn call_and_cancel(&self, call: Call, endpoint: Option<&str>) {
        // Nothing is to be seen of what goes elsewhere.
        let before = endpoint.is_none().then(|| self.counts(call).requests);
        let store = endpoint.map_or_else(|| self.store.clone(), store_at);
        let single = endpoint.map_or_else(|| self.single_deletes.clone(), store_at);
        if call == Call::Upload {
            let mut answers = self.submit(&store, "upload");
            assert_eq!(answers.next().await, Event::Admitted);
            self.under_way(call, before).await;
            assert!(answers.is_empty(), "nothing has come of it");
            let begun = Instant::now();
            self.governor.cancel(vec!["upload"]);
            let cancelled = Event::Finished(Err(TransferError::Cancelled));
            assert_eq!(answers.next().await, cancelled);
            assert!(begun.elapsed() < PROMPT, "{:?}", begun.elapsed());
            return;
        }
        let fragment = self.fragment.clone();
        let (dropped, gone) = oneshot::channel::<()>();
        let task = tokio::spawn(async move {
            let _dropped = dropped;
            request(&store, &single, &fragment, call)
                .await
                .map_err(|error| error.message)
        });
        self.under_way(call, before).await;
        assert!(!task.is_finished(), "nothing has come of it");
        let begun = Instant::now();
        task.abort();
        gone.await.expect_err("dropped");
        assert!(begun.elapsed() < PROMPT, "{:?}", begun.elapsed());
    }

    /// Waits until the server has the call, or for a moment where it never will.
    async fn under_way(&self, call: Call, before: Option<u64>) {
        match before {
            Some(before) => {
                eventually("the server has it", || self.counts(call).requests > before).await
            }
            None => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }

    /// Nothing is left of what was asked: not in the governor, not at the server, not in this process.
    pub(crate) async fn leaves_nothing(self) {
        eventually("the governor is idle", || {
            let info = self.governor.info();
            let work = info.governor_tasks_in_flight + info.governor_pending_submissions;
            work == 0 && info.upload_permits_in_use == 0
        })
        .await;
        // The next one is served as if nothing had been.
        self.server.faults().clear();
        for call in Call::ALL {
            self.call(call).await.expect("works");
        }
        // Two uploads more leave as many bytes held as they found: those that the pool keeps.
        let held = || self.governor.info().upload_buffer_bytes;
        let before = held();
        assert!(before <= KEPT_BYTES, "{before} bytes held");
        for _ in 0..2 {
            self.call(Call::Upload).await.expect("works");
        }
        eventually("all buffers are back", || held() == before).await;
        let Self {
            server,
            log,
            governor,
            store,
            single_deletes,
            executor,
            dir,
            descriptors: before,
            ..
        } = self;
        server.stop().await;
        drop((governor, store, single_deletes, executor, log, dir));
        eventually("all descriptors are closed", || descriptors() <= before).await;
    }
}

/// A call that is not an upload.
async fn request(
    store: &Store,
    single_deletes: &Store,
    fragment: &Fragment,
    call: Call,
) -> Result<(), StoreError> {
    let one_row = |rows: Vec<(String, StoreError)>| match rows.into_iter().next() {
        Some((_, error)) => Err(error),
        None => Ok(()),
    };
    match call {
        Call::Upload => unreachable!("is not a single request"),
        Call::Root => {
            let root = encode_root(&Manifest::default()).expect("a root");
            let put = store
                .put_root(&fragment.stream, Epoch(1), root.into())
                .await;
            put.map(|Uid(_)| ())
        }
        Call::Get => store.get("object", Part::Whole).await.map(|read| {
            assert!(read.bytes.len() == 300_000 && read.bytes.iter().all(|byte| *byte == 7));
        }),
        Call::List => store.objects().list("object", None, 10).await.map(|page| {
            assert_eq!(page.objects.len(), 1);
        }),
        Call::Delete => one_row(single_deletes.delete(&["gone".to_owned()]).await?),
        Call::MultiDelete => {
            let keys: Vec<_> = (0..100).map(|number| format!("gone/{number}")).collect();
            one_row(store.delete(&keys).await?)
        }
    }
}

/// Looks again until it is so; fails after ten seconds.
pub(crate) async fn eventually(what: &str, so: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !so() {
        assert!(Instant::now() < deadline, "not within ten seconds: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Open files and TCP sockets of this process. Those of a tokio runtime are left out: tests that wait for their turn have one too.
pub(crate) fn descriptors() -> usize {
    let local = std::fs::read_to_string("/proc/net/unix").expect("Linux");
    let local: Vec<&str> = local
        .lines()
        .filter_map(|row| row.split_whitespace().nth(6))
        .collect();
    let rows = std::fs::read_dir("/proc/self/fd").expect("Linux");
    let counts = |name: &str| match name.strip_prefix("socket:[") {
        Some(inode) => !local.contains(&inode.trim_end_matches(']')),
        None => name.starts_with('/') && !name.starts_with("/proc") && !name.starts_with("/dev"),
    };
    // One that is closed meanwhile has no name.
    rows.filter_map(|row| std::fs::read_link(row.expect("a row").path()).ok())
        .filter(|name| counts(&name.to_string_lossy()))
        .count()
}

/// Bytes of this process in memory.
pub(crate) fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages = text
        .split(' ')
        .nth(1)
        .and_then(|pages| pages.parse::<u64>().ok());
    pages.expect("a number") * 4096
}
