//! Counts the requests of a store, where they are made: one count is one request, with how it ended and how long it took.
//!
//! Lock-free, and never reset: all numbers grow as long as the process lives. A few atomic additions a request.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::Stream;
use stream_s3_core::key::{self, ParsedKey, Prefix};
use stream_s3_core::manifest::EntryKind;

use crate::error::{ErrorKind, Failure, StoreError};
use crate::{ByteStream, Object, Part, Result};

/// Upper bounds of the histogram's buckets in seconds, inclusive; one more holds what took longer. From a small object on a fast
/// network to the deadline of a large fragment.
pub const DURATION_BOUNDS: [f64; 14] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0,
];

/// Declares an enumeration with all its values and their names in terms and metrics.
macro_rules! labels {
    ($(#[$doc:meta])* $name:ident { $($(#[$value_doc:meta])* $value:ident = $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name { $($(#[$value_doc])* $value,)+ }

        impl $name {
            /// All of them, in the order of their declaration.
            pub const ALL: [Self; [$($text),+].len()] = [$(Self::$value),+];

            /// The name used in terms and metrics: lower case, underscores.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$value => $text,)+ }
            }
        }
    };
}

labels! {
    /// What was asked of the store.
    Operation {
        /// Store an object.
        Put = "put",
        /// Read an object or a part of it.
        Get = "get",
        /// List keys.
        List = "list",
        /// Delete one object: where the store knows no batches, or a batch cannot name the key.
        Delete = "delete",
        /// Delete a batch of objects. The keys in it that failed are not told apart here.
        MultiDelete = "multi_delete",
        /// Whatever a probe does: several requests, some of which the store is meant to refuse.
        Probe = "probe",
    }
}

labels! {
    /// How a request ended: as [`ErrorKind`] has it, with two more.
    Outcome {
        /// As it should.
        Ok = "ok",
        /// [`ErrorKind::Transient`], but for the next one.
        Transient = "transient",
        /// The store asked to slow down.
        Throttled = "throttled",
        /// [`ErrorKind::Conflict`].
        Conflict = "conflict",
        /// [`ErrorKind::NotFound`].
        NotFound = "not_found",
        /// [`ErrorKind::Corrupt`].
        Corrupt = "corrupt",
        /// [`ErrorKind::Invalid`]: an operator has to act.
        Invalid = "invalid",
        /// [`ErrorKind::Closed`].
        Closed = "closed",
        /// Nobody wanted the answer any more: a deadline has passed, or the work was cancelled.
        Cancelled = "cancelled",
    }
}

labels! {
    /// What the keys of a request name.
    ObjectKind {
        /// A fragment.
        Fragment = "fragment",
        /// A manifest root.
        Root = "root",
        /// A group of the lowest level.
        Group = "group",
        /// A group of groups.
        KiloGroup = "kilo_group",
        /// A group of kilo-groups.
        MegaGroup = "mega_group",
        /// A segment of a history run.
        History = "history",
        /// Anything else: a listing, objects of several kinds, or no key of this plugin.
        Unknown = "unknown",
    }
}

impl Outcome {
    /// How a request ended that ended with this error.
    #[must_use]
    pub fn of(error: &StoreError) -> Self {
        match (error.kind, &error.failure) {
            (_, Failure::Throttled) => Self::Throttled,
            (ErrorKind::Transient, _) => Self::Transient,
            (ErrorKind::Conflict, _) => Self::Conflict,
            (ErrorKind::NotFound, _) => Self::NotFound,
            (ErrorKind::Corrupt, _) => Self::Corrupt,
            (ErrorKind::Invalid, _) => Self::Invalid,
            (ErrorKind::Closed, _) => Self::Closed,
        }
    }
}

impl ObjectKind {
    /// What `key` names, where keys start with `prefix`.
    #[must_use]
    pub fn of(prefix: &Prefix, key: &str) -> Self {
        match key::parse(prefix, key) {
            None => Self::Unknown,
            Some(ParsedKey::Root { .. }) => Self::Root,
            Some(ParsedKey::History { .. }) => Self::History,
            Some(ParsedKey::Fragment { .. }) => Self::Fragment,
            Some(ParsedKey::Group { kind, .. }) => match kind {
                EntryKind::Fragment => Self::Fragment,
                EntryKind::Group => Self::Group,
                EntryKind::KiloGroup => Self::KiloGroup,
                EntryKind::MegaGroup => Self::MegaGroup,
            },
        }
    }

    /// What all of `keys` name.
    fn of_all<'a>(prefix: &Prefix, keys: impl IntoIterator<Item = &'a str>) -> Self {
        let mut kinds = keys.into_iter().map(|key| Self::of(prefix, key));
        match kinds.next() {
            Some(kind) if kinds.all(|other| other == kind) => kind,
            Some(_) | None => Self::Unknown,
        }
    }
}

const OPERATIONS: usize = Operation::ALL.len();
const OUTCOMES: usize = Outcome::ALL.len();
const KINDS: usize = ObjectKind::ALL.len();
const BUCKETS: usize = DURATION_BOUNDS.len() + 1;

/// The counts of all stores that share it.
#[derive(Debug)]
pub struct RequestCounts {
    requests: [[[AtomicU64; KINDS]; OUTCOMES]; OPERATIONS],
    durations: [Durations; OPERATIONS],
    sent: AtomicU64,
    received: AtomicU64,
}

#[derive(Debug)]
struct Durations {
    /// How many took so long, not cumulative.
    buckets: [AtomicU64; BUCKETS],
    sum_us: AtomicU64,
}

/// The counts at one moment. Each of them only grows; one that is made while requests end may have one of its parts in it and not yet
/// another.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestSnapshot {
    /// Requests that have ended; what never happened is left out.
    pub requests: Vec<(Operation, Outcome, ObjectKind, u64)>,
    /// How long they took, one row for each operation.
    pub durations: Vec<DurationSnapshot>,
    /// Bytes of objects handed to a connection (or written to a file), attempts that failed included.
    pub bytes_sent: u64,
    /// Bytes of objects that came in, answers that broke off included.
    pub bytes_received: u64,
}

/// A histogram: from sending a request to its answer, of a GET to the last byte that was read.
#[derive(Debug, Clone, PartialEq)]
pub struct DurationSnapshot {
    /// Of which requests.
    pub operation: Operation,
    /// How many took at most as long as each of [`DURATION_BOUNDS`], and at last all of them.
    pub cumulative: [u64; BUCKETS],
    /// All durations, in seconds.
    pub sum: f64,
}

impl Default for RequestCounts {
    fn default() -> Self {
        let zeros = || std::array::from_fn(|_| AtomicU64::new(0));
        Self {
            requests: std::array::from_fn(|_| std::array::from_fn(|_| zeros())),
            durations: std::array::from_fn(|_| Durations {
                buckets: std::array::from_fn(|_| AtomicU64::new(0)),
                sum_us: AtomicU64::new(0),
            }),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
        }
    }
}

impl RequestCounts {
    /// The counts now.
    #[must_use]
    pub fn snapshot(&self) -> RequestSnapshot {
        let mut requests = Vec::new();
        for operation in Operation::ALL {
            for outcome in Outcome::ALL {
                for kind in ObjectKind::ALL {
                    let count = self.requests[operation as usize][outcome as usize][kind as usize]
                        .load(Ordering::Relaxed);
                    if count > 0 {
                        requests.push((operation, outcome, kind, count));
                    }
                }
            }
        }
        RequestSnapshot {
            requests,
            durations: Operation::ALL.map(|it| self.duration(it)).into(),
            bytes_sent: self.sent.load(Ordering::Relaxed),
            bytes_received: self.received.load(Ordering::Relaxed),
        }
    }

    fn duration(&self, operation: Operation) -> DurationSnapshot {
        let durations = &self.durations[operation as usize];
        let mut sum = 0;
        let cumulative = std::array::from_fn(|at| {
            sum += durations.buckets[at].load(Ordering::Relaxed);
            sum
        });
        DurationSnapshot {
            operation,
            cumulative,
            sum: Duration::from_micros(durations.sum_us.load(Ordering::Relaxed)).as_secs_f64(),
        }
    }

    fn count(&self, operation: Operation, outcome: Outcome, kind: ObjectKind, took: Duration) {
        self.requests[operation as usize][outcome as usize][kind as usize]
            .fetch_add(1, Ordering::Relaxed);
        let seconds = took.as_secs_f64();
        let bucket = DURATION_BOUNDS.partition_point(|bound| *bound < seconds);
        let durations = &self.durations[operation as usize];
        durations.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        durations.sum_us.fetch_add(us, Ordering::Relaxed);
    }
}

tokio::task_local! {
    /// Set while a probe runs: its requests are made by the same code as all others.
    static PROBING: ();
}

/// Runs a probe, whose requests are counted as such.
pub(crate) async fn probing<T>(probe: impl Future<Output = T>) -> T {
    PROBING.scope((), probe).await
}

/// What a store counts with; by default it counts nothing. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Meter(Option<Arc<(Arc<RequestCounts>, Prefix)>>);

impl Meter {
    /// Counts into `counts`; `prefix` is what keys start with, to tell what they name.
    #[must_use]
    pub fn new(counts: Arc<RequestCounts>, prefix: Prefix) -> Self {
        Self(Some(Arc::new((counts, prefix))))
    }

    /// A request begins. It is counted when it ends, or is dropped.
    pub(crate) fn begin<'a>(
        &self,
        operation: Operation,
        keys: impl IntoIterator<Item = &'a str>,
    ) -> Ongoing {
        let request = self.0.as_deref().map(|(counts, prefix)| Request {
            counts: Arc::clone(counts),
            operation: PROBING.try_with(|()| Operation::Probe).unwrap_or(operation),
            kind: ObjectKind::of_all(prefix, keys),
            began: Instant::now(),
        });
        Ongoing(request)
    }

    /// Bytes of an object have been sent.
    pub(crate) fn sent(&self, bytes: usize) {
        if let Some((counts, _)) = self.0.as_deref() {
            counts.sent.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }
}

#[derive(Debug)]
struct Request {
    counts: Arc<RequestCounts>,
    operation: Operation,
    kind: ObjectKind,
    began: Instant,
}

/// A request that runs. Dropped before its end, it counts as cancelled.
#[derive(Debug)]
#[must_use]
pub(crate) struct Ongoing(Option<Request>);

impl Ongoing {
    /// It has ended so.
    pub(crate) fn end<T>(mut self, result: Result<T>) -> Result<T> {
        self.close(result.as_ref().map_or_else(Outcome::of, |_| Outcome::Ok));
        result
    }

    /// A GET has been answered so; where that was with an object, the request goes on until its bytes have been read.
    pub(crate) fn reading(self, answer: Result<Object>, part: &Part) -> Result<Object> {
        let object = match answer {
            Ok(object) => object,
            Err(error) => return self.end(Err(error)),
        };
        let len = part.resolve(object.size).map_or(0, |it| it.end - it.start);
        Ok(Object {
            body: Box::pin(Incoming::new(object.body, len, self)),
            ..object
        })
    }

    fn close(&mut self, outcome: Outcome) {
        if let Some(request) = self.0.take() {
            let took = request.began.elapsed();
            request
                .counts
                .count(request.operation, outcome, request.kind, took);
        }
    }
}

impl Drop for Ongoing {
    fn drop(&mut self) {
        self.close(Outcome::Cancelled);
    }
}

/// The body of an answer; its request ends with the last of `left` bytes.
struct Incoming {
    inner: ByteStream,
    left: u64,
    request: Ongoing,
}

impl Incoming {
    fn new(inner: ByteStream, len: u64, mut request: Ongoing) -> Self {
        if len == 0 {
            request.close(Outcome::Ok);
        }
        Self {
            inner,
            left: len,
            request,
        }
    }
}

impl Stream for Incoming {
    type Item = std::io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let piece = std::task::ready!(self.inner.as_mut().poll_next(cx));
        match &piece {
            Some(Ok(bytes)) => {
                let len = bytes.len() as u64;
                if let Some(request) = &self.request.0 {
                    request.counts.received.fetch_add(len, Ordering::Relaxed);
                }
                self.left = self.left.saturating_sub(len);
                if self.left == 0 {
                    self.request.close(Outcome::Ok);
                }
            }
            Some(Err(_)) | None => self.request.close(Outcome::Transient),
        }
        Poll::Ready(piece)
    }
}
