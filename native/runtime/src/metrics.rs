//! What an operator sees of the governor.
//!
//! Counters only grow. Gauges are set from the governor's own state after each of its steps, and read from the buffer
//! pool itself, never counted up and down: a missed decrement would stay wrong for ever.

use crate::buffers::BufferPool;
use crate::sync::{AtomicU64, Ordering};

/// The numbers of one governor, shared between its task, its transfers and whoever reads them.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Submissions that came in.
    pub(crate) submissions_received: AtomicU64,
    /// Work that runs.
    pub(crate) tasks_in_flight: AtomicU64,
    /// Work that waits for tokens or a permit.
    pub(crate) pending_submissions: AtomicU64,
    /// Work that may run at a time.
    pub(crate) permits_effective: AtomicU64,
    /// Admissions larger than the burst.
    pub(crate) oversized_admissions: AtomicU64,
    /// Work dropped because the process that wanted the answer had died.
    pub(crate) dropped_dead_replyto: AtomicU64,
    /// Object bytes of uploads that succeeded.
    pub(crate) bytes_sent: AtomicU64,
    pub(crate) buffers: BufferPool,
}

/// The numbers at one moment. Names as in the metrics of the plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Snapshot {
    /// Counter: submissions that came in.
    pub governor_submissions_received: u64,
    /// Gauge: work that runs.
    pub governor_tasks_in_flight: u64,
    /// Gauge: work that waits for tokens or a permit.
    pub governor_pending_submissions: u64,
    /// Counter: admissions larger than the burst, which left a debt.
    pub governor_oversized_admissions: u64,
    /// Counter: work dropped because the process that wanted the answer had died.
    pub governor_dropped_dead_replyto: u64,
    /// Gauge: permits held. Equals the work that runs.
    pub upload_permits_in_use: u64,
    /// Gauge: permits that may be held: `upload_concurrency`, or less while the store asks to slow down.
    pub upload_permits_effective: u64,
    /// Gauge, bytes: memory held for transfers (buffers in use, buffers kept for reuse, index records).
    pub upload_buffer_bytes: u64,
    /// Counter, bytes: objects uploaded, whole.
    pub bytes_sent: u64,
}

impl Metrics {
    /// The numbers now.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let running = self.tasks_in_flight.load(Ordering::Relaxed);
        Snapshot {
            governor_submissions_received: self.submissions_received.load(Ordering::Relaxed),
            governor_tasks_in_flight: running,
            governor_pending_submissions: self.pending_submissions.load(Ordering::Relaxed),
            governor_oversized_admissions: self.oversized_admissions.load(Ordering::Relaxed),
            governor_dropped_dead_replyto: self.dropped_dead_replyto.load(Ordering::Relaxed),
            upload_permits_in_use: running,
            upload_permits_effective: self.permits_effective.load(Ordering::Relaxed),
            upload_buffer_bytes: self.buffers.bytes_held(),
            bytes_sent: self.bytes_sent.load(Ordering::Relaxed),
        }
    }
}
