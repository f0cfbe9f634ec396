//! How many transfers may run at a time while the store asks to slow down.
//!
//! Halved when it does, and brought back one by one by transfers that succeed: the rule by which TCP shares a line, and for the
//! same reason. Nodes that share a bucket cannot see each other, only what the store says.

use crate::units::MonotonicUs;

/// One burst of refusals is one halving: whatever comes so soon after it was sent before it could take effect. In microseconds.
pub const WINDOW_US: u64 = 1_000_000;

/// A limit, and what is left of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Congestion {
    limit: usize,
    effective: usize,
    /// Since the last change of `effective`.
    successes: usize,
    halved: Option<MonotonicUs>,
}

impl Congestion {
    /// All of `limit`.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            effective: limit,
            successes: 0,
            halved: None,
        }
    }

    /// How many may run at a time: `1 <= effective <= limit`, or 0 where the limit is 0.
    #[must_use]
    pub fn effective(&self) -> usize {
        self.effective
    }

    /// How many may, when the store minds nothing.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Changes the limit. What the store took away stays away until successes bring it back.
    pub fn set_limit(&mut self, limit: usize) {
        let whole = self.effective == self.limit;
        self.limit = limit;
        self.effective = if whole {
            limit
        } else {
            self.effective.min(limit).max(1.min(limit))
        };
    }

    /// The store asked to slow down: half of it, rounded down, but one goes on; at most once in [`WINDOW_US`].
    pub fn throttled(&mut self, now: MonotonicUs) {
        if self.in_window(now) {
            return;
        }
        self.halved = Some(now);
        self.successes = 0;
        self.effective = (self.effective / 2).max(1).min(self.limit);
    }

    /// A transfer succeeded. As many of them as may run at a time make it one more, up to the limit; those in the window after a halving
    /// do not count.
    pub fn succeeded(&mut self, now: MonotonicUs) {
        if self.effective >= self.limit || self.in_window(now) {
            return;
        }
        self.successes += 1;
        if self.successes >= self.effective {
            self.successes = 0;
            self.effective += 1;
        }
    }

    fn in_window(&self, now: MonotonicUs) -> bool {
        self.halved
            .is_some_and(|halved| now.0 < halved.0.saturating_add(WINDOW_US))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(us: u64) -> MonotonicUs {
        MonotonicUs(us)
    }

    #[test]
    fn a_burst_of_refusals_is_one_halving() {
        let mut congestion = Congestion::new(16);
        for us in 0..16 {
            congestion.throttled(at(us));
        }
        assert_eq!(congestion.effective(), 8);
        congestion.throttled(at(WINDOW_US));
        assert_eq!(congestion.effective(), 4);
    }

    #[test]
    fn one_goes_on() {
        let mut congestion = Congestion::new(5);
        for (second, left) in [(0, 2), (1, 1), (2, 1)] {
            congestion.throttled(at(second * WINDOW_US));
            assert_eq!(congestion.effective(), left);
        }
    }

    #[test]
    fn as_many_successes_as_may_run_bring_back_one() {
        let mut congestion = Congestion::new(4);
        congestion.throttled(at(0));
        congestion.throttled(at(WINDOW_US));
        // Sent before, and so no sign of anything.
        congestion.succeeded(at(WINDOW_US));
        let mut grown = Vec::new();
        for _ in 0..8 {
            congestion.succeeded(at(2 * WINDOW_US));
            grown.push(congestion.effective());
        }
        assert_eq!(grown, [2, 2, 3, 3, 3, 4, 4, 4]);
    }

    #[test]
    fn a_new_limit_holds_at_once_and_gives_back_nothing_that_the_store_took() {
        let mut congestion = Congestion::new(8);
        congestion.set_limit(10);
        assert_eq!(congestion.effective(), 10);
        congestion.throttled(at(0));
        congestion.set_limit(100);
        assert_eq!(congestion.effective(), 5);
        congestion.set_limit(3);
        assert_eq!(congestion.effective(), 3);
        congestion.set_limit(4);
        assert_eq!(congestion.effective(), 4, "it was whole");
    }
}
