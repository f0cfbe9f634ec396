//! In the place of the transfers: they take buffers, step by step, and end as they are told to.

use std::sync::{Arc, Mutex, PoisonError};

use shuttle::future::yield_now;
use stream_s3_core::error::TransferError;
use stream_s3_core::units::Uid;

use crate::executor::Executor;
use crate::metrics::Metrics;
use crate::store::Store;

/// Counts transfers that really run, which no flag of the governor tells.
#[derive(Debug, Clone, Default)]
pub struct Meter(Arc<Mutex<(usize, usize)>>);

impl Meter {
    fn change(&self, by: impl FnOnce(&mut (usize, usize))) {
        by(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn enter(&self) -> Run {
        self.change(|(now, most)| {
            *now += 1;
            *most = (*most).max(*now);
        });
        Run(self.clone())
    }

    /// How many ran at once, at most.
    #[must_use]
    pub fn most(&self) -> usize {
        let mut found = 0;
        self.change(|(_, most)| found = *most);
        found
    }
}

/// A transfer that runs, until it is dropped.
struct Run(Meter);

impl Drop for Run {
    fn drop(&mut self) {
        self.0.change(|(now, _)| *now -= 1);
    }
}

/// What a transfer does.
#[derive(Debug, Clone)]
pub struct Fragment {
    /// Where it is counted.
    pub meter: Meter,
    /// Buffers that it fills, one after the other.
    pub buffers: usize,
    /// How it ends.
    pub end: End,
}

/// What is remembered of uploads that failed: here nothing.
#[derive(Debug, Default)]
pub(crate) struct Checksums;

/// How a transfer ends. Not with a panic: the scheduler takes each for the end of its exploration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Stored under this uid.
    Stored(u32),
    /// The store refuses it.
    Refused,
    /// It waits for a store that never answers.
    Hangs,
}

/// Holds at most two buffers at a time, as a socket that drains does.
pub(crate) async fn upload(
    _executor: &Executor,
    metrics: &Metrics,
    _checksums: &Checksums,
    _store: &Store,
    fragment: &Fragment,
) -> Result<Uid, TransferError> {
    let _run = fragment.meter.enter();
    let share = metrics.buffers.share();
    let mut sent = None;
    for position in 0..fragment.buffers as u64 {
        let mut buffer = share.buffer(position).await;
        buffer.advance(1);
        yield_now().await;
        drop(sent.replace(buffer.into_bytes()));
    }
    match fragment.end {
        End::Stored(uid) => Ok(Uid(uid)),
        End::Refused => Err(TransferError::Http(500)),
        End::Hangs => std::future::pending().await,
    }
}

/// An upload without a governor.
pub async fn run(executor: &Executor, metrics: &Metrics, fragment: &Fragment) {
    // How it ends says the fragment.
    let _ = upload(executor, metrics, &Checksums, &Store, fragment).await;
}
