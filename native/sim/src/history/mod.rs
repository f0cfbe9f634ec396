//! The history uploader as a small world of its own: one host that commits, owners that come and go, a store with conditional writes, and the production
//! machine for each run.
//!
//! ```text
//! world    what happens, in order; seals, purges, takeovers, the end
//! owner    the shell of an uploader: machines, permits, scans, one to one with the Erlang one
//! host     the committed state, the commands that change it, and what it answers
//! commands what is committed, and when the member beside an owner gets to know of it
//! bucket   objects with entity tags, and writes that take effect late
//! ```
//!
//! What must hold: whatever is acknowledged lies in the bucket, with equal content, until its run is purged; acknowledgments come in order; nobody
//! writes over the right object; nothing is deleted of a run that is not purged; no request that was under way when a purge began takes effect after its
//! end, unless it is older than the purge's wait, or its owner did not know of the purge; and what such a late one leaves goes with a later sweep. Each
//! acknowledgment changes something once. A member that was restored from a snapshot has the same state as all others once it has applied everything. Retention
//! takes a closed run only when nothing of it is sealed. In the end everything sealed is acknowledged, and every closed run is gone.

mod bucket;
mod coverage;
mod host;
mod owner;
mod twin;
mod world;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::coverage::Coverage;

pub use coverage::HISTORY_REQUIRED;
pub use twin::HistoryTwin;
pub use world::{HistoryOutcome, run};

/// A world in which something was violated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HistoryFinding {
    /// Its seed.
    pub seed: u64,
    /// What happened.
    pub violation: String,
}

/// What a search came to.
#[derive(Debug, Clone, Default)]
pub struct HistoryReport {
    /// Worlds that ran.
    pub seeds: u64,
    /// Events of all worlds.
    pub events: u64,
    /// What happened in them.
    pub coverage: Coverage,
    /// The finding with the smallest seed, if there is one.
    pub finding: Option<HistoryFinding>,
}

/// Runs the worlds of `from..from + count` on all cores. Ends early after a violation.
#[must_use]
pub fn search(from: u64, count: u64, twin: Option<HistoryTwin>) -> HistoryReport {
    let workers = std::thread::available_parallelism().map_or(2, usize::from);
    let next = AtomicU64::new(from);
    let found = AtomicBool::new(false);
    let report = Mutex::new(HistoryReport::default());
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                let mut mine = HistoryReport::default();
                while !found.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= from.saturating_add(count) {
                        break;
                    }
                    let outcome = run(seed, twin, false);
                    mine.seeds += 1;
                    mine.events += outcome.events;
                    mine.coverage.merge(&outcome.coverage);
                    if let Some(violation) = outcome.violation {
                        found.store(true, Ordering::Relaxed);
                        mine.finding = Some(HistoryFinding { seed, violation });
                    }
                }
                let mut all = report
                    .lock()
                    .unwrap_or_else(std::sync::PoisonError::into_inner);
                all.seeds += mine.seeds;
                all.events += mine.events;
                all.coverage.merge(&mine.coverage);
                if let Some(finding) = mine.finding
                    && all.finding.as_ref().is_none_or(|f| finding.seed < f.seed)
                {
                    all.finding = Some(finding);
                }
            });
        }
    });
    report
        .into_inner()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}
