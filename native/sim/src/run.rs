//! Many seeds, and the shortest way to a finding.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use stream_s3_core::invariants::Violation;

use crate::coverage::Coverage;
use crate::plan::Limits;
use crate::world::run;

/// A world with a violation.
#[derive(Debug, Clone)]
pub struct Finding {
    /// Its seed.
    pub seed: u64,
    /// The bounds under which it still happens.
    pub limits: Limits,
    /// What happens.
    pub violation: Violation,
}

/// What a search came to.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Worlds that ran.
    pub seeds: u64,
    /// What happened in them.
    pub coverage: Coverage,
    /// Events of all worlds.
    pub events: u64,
    /// The finding with the smallest seed, if there is one.
    pub finding: Option<Finding>,
}

/// Runs the worlds of `from..from + count` on all cores; each of them on one. Ends early after a violation.
#[must_use]
pub fn search(from: u64, count: u64, limits: Limits) -> Report {
    let workers = std::thread::available_parallelism().map_or(2, usize::from);
    let next = AtomicU64::new(from);
    let found = AtomicBool::new(false);
    let report = Mutex::new(Report::default());
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                let mut mine = Report::default();
                while !found.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= from.saturating_add(count) {
                        break;
                    }
                    let outcome = run(seed, limits, false);
                    mine.seeds += 1;
                    mine.events += outcome.events;
                    mine.coverage.merge(&outcome.coverage);
                    if let Some(violation) = outcome.violation {
                        found.store(true, Ordering::Relaxed);
                        mine.finding = Some(Finding {
                            seed,
                            limits,
                            violation,
                        });
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

/// Looks for tighter bounds, of time and of faults, under which a seed still violates the same invariant. Some dozens of runs; the result may
/// not be the smallest, because a world with fewer faults is another world.
#[must_use]
pub fn shrink(finding: &Finding) -> Finding {
    let mut best = finding.clone();
    for _ in 0..2 {
        let outcome = run(best.seed, best.limits, false);
        bisect(&mut best, outcome.ended, |limits, horizon_ms| Limits {
            horizon_ms,
            ..limits
        });
        let outcome = run(best.seed, best.limits, false);
        bisect(&mut best, outcome.faults, |limits, faults| Limits {
            faults,
            ..limits
        });
    }
    best
}

fn bisect(best: &mut Finding, high: u64, with: impl Fn(Limits, u64) -> Limits) {
    let (mut low, mut high) = (0, high);
    while low < high {
        let middle = low + (high - low) / 2;
        let limits = with(best.limits, middle);
        match run(best.seed, limits, false).violation {
            Some(violation) if violation.invariant == best.violation.invariant => {
                *best = Finding {
                    limits,
                    violation,
                    ..*best
                };
                high = middle;
            }
            Some(_) | None => low = middle + 1,
        }
    }
}
