//! How often what was asked for.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

use crate::fault::Operation;

/// Counts of one operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Counts {
    /// Requests that came in.
    pub requests: u64,
    /// Answers with a status below 300.
    pub succeeded: u64,
    /// Answers with another status, and requests that ended without an answer.
    pub failed: u64,
    /// Requests that are being worked on, or wait or stall.
    pub in_flight: u64,
    /// Faults that were applied.
    pub faults: u64,
    /// Body bytes that answered requests brought.
    pub bytes_in: u64,
    /// Body bytes that answers announced.
    pub bytes_out: u64,
}

#[derive(Debug, Default)]
struct Row {
    requests: AtomicU64,
    succeeded: AtomicU64,
    failed: AtomicU64,
    faults: AtomicU64,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
}

/// Counts of all operations of a server.
#[derive(Debug, Default)]
pub struct Counters {
    rows: [Row; Operation::ALL.len()],
}

impl Counters {
    /// The counts of an operation since the start.
    pub fn of(&self, op: Operation) -> Counts {
        let row = &self.rows[op.index()];
        // Ends before beginnings, so that the difference is never negative.
        let (succeeded, failed) = (
            row.succeeded.load(Ordering::Acquire),
            row.failed.load(Ordering::Acquire),
        );
        let requests = row.requests.load(Ordering::Acquire);
        Counts {
            requests,
            succeeded,
            failed,
            in_flight: requests - succeeded - failed,
            faults: row.faults.load(Ordering::Relaxed),
            bytes_in: row.bytes_in.load(Ordering::Relaxed),
            bytes_out: row.bytes_out.load(Ordering::Relaxed),
        }
    }

    /// All of them.
    pub fn all(&self) -> Vec<(Operation, Counts)> {
        Operation::ALL
            .iter()
            .map(|op| (*op, self.of(*op)))
            .collect()
    }

    pub(crate) fn begin(self: &Arc<Self>, op: Operation) -> Counting {
        self.rows[op.index()]
            .requests
            .fetch_add(1, Ordering::AcqRel);
        Counting {
            counters: Arc::clone(self),
            op,
            ended: false,
        }
    }

    pub(crate) fn faults(&self, op: Operation, count: u64) {
        self.rows[op.index()]
            .faults
            .fetch_add(count, Ordering::Relaxed);
    }
}

/// A request that is being counted. One that is dropped has failed: the client went away or a fault ended it.
pub(crate) struct Counting {
    counters: Arc<Counters>,
    op: Operation,
    ended: bool,
}

impl Counting {
    pub(crate) fn end(mut self, succeeded: bool, bytes_in: u64, bytes_out: u64) {
        self.ended = true;
        let row = &self.counters.rows[self.op.index()];
        row.bytes_in.fetch_add(bytes_in, Ordering::Relaxed);
        row.bytes_out.fetch_add(bytes_out, Ordering::Relaxed);
        let end = if succeeded {
            &row.succeeded
        } else {
            &row.failed
        };
        end.fetch_add(1, Ordering::AcqRel);
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        if !self.ended {
            self.counters.rows[self.op.index()]
                .failed
                .fetch_add(1, Ordering::AcqRel);
        }
    }
}
