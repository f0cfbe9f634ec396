//! A token bucket in whole numbers: no drift, whatever the intervals at which it is asked.

use crate::units::MonotonicUs;

const MICROS: i128 = 1_000_000;

/// Bytes that may be sent, refilled at a fixed rate up to a limit. May be in debt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenBucket {
    /// Bytes a second.
    rate: u64,
    /// Bytes that a full bucket holds.
    burst: u64,
    /// Millionths of a byte, so that the refill of a microsecond is a whole number. Negative: debt.
    level: i128,
    /// The time up to which `level` counts.
    at: MonotonicUs,
}

impl TokenBucket {
    /// A full bucket. `rate` in bytes a second, `burst` in bytes.
    #[must_use]
    pub fn full(rate: u64, burst: u64, now: MonotonicUs) -> Self {
        Self {
            rate,
            burst,
            level: i128::from(burst) * MICROS,
            at: now,
        }
    }

    /// Changes rate and limit from `now` on. What is in the bucket, or owed, stays, as far as it fits.
    pub fn set(&mut self, rate: u64, burst: u64, now: MonotonicUs) {
        self.refill(now);
        self.rate = rate;
        self.burst = burst;
        self.level = self.level.min(self.capacity());
    }

    /// Bytes in the bucket at `now`, rounded down; negative while in debt.
    #[must_use]
    pub fn available(&mut self, now: MonotonicUs) -> i128 {
        self.refill(now);
        self.level.div_euclid(MICROS)
    }

    /// Takes `size` bytes if the bucket holds them. A size above the limit is taken from a full bucket, which leaves a debt: it could never
    /// be served otherwise. Answers whether that was so, or when to ask again.
    pub fn take(&mut self, size: u64, now: MonotonicUs) -> Taken {
        self.refill(now);
        let oversized = size > self.burst;
        let needed = if oversized {
            self.capacity()
        } else {
            i128::from(size) * MICROS
        };
        if self.level >= needed {
            self.level -= i128::from(size) * MICROS;
            return Taken::Now { oversized };
        }
        let rate = i128::from(self.rate);
        if rate == 0 {
            return Taken::Never;
        }
        let missing = needed - self.level;
        let wait = missing / rate + i128::from(missing % rate != 0);
        let wait = u64::try_from(wait).unwrap_or(u64::MAX);
        Taken::At(MonotonicUs(self.at.0.saturating_add(wait)))
    }

    fn capacity(&self) -> i128 {
        i128::from(self.burst) * MICROS
    }

    fn refill(&mut self, now: MonotonicUs) {
        let elapsed = now.0.saturating_sub(self.at.0);
        let refill = i128::from(elapsed).saturating_mul(i128::from(self.rate));
        self.level = self.level.saturating_add(refill).min(self.capacity());
        self.at = self.at.max(now);
    }
}

/// What became of a request for tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Taken {
    /// They have been taken.
    Now {
        /// Whether the request was larger than the bucket, and left a debt.
        oversized: bool,
    },
    /// They will be there at this time, and not before.
    At(MonotonicUs),
    /// Time alone does not bring them: the rate is 0.
    Never,
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(us: u64) -> MonotonicUs {
        MonotonicUs(us)
    }

    #[test]
    fn a_full_bucket_serves_its_burst_at_once() {
        let mut bucket = TokenBucket::full(10, 100, at(0));
        assert_eq!(bucket.take(60, at(0)), Taken::Now { oversized: false });
        assert_eq!(bucket.take(40, at(0)), Taken::Now { oversized: false });
        assert_eq!(bucket.take(1, at(0)), Taken::At(at(100_000)));
    }

    #[test]
    fn the_time_to_ask_again_is_exact() {
        let mut bucket = TokenBucket::full(3, 100, at(0));
        assert_eq!(bucket.take(100, at(0)), Taken::Now { oversized: false });
        assert_eq!(bucket.take(1, at(0)), Taken::At(at(333_334)));
        assert_eq!(bucket.take(1, at(333_333)), Taken::At(at(333_334)));
        assert_eq!(bucket.take(1, at(333_334)), Taken::Now { oversized: false });
    }

    #[test]
    fn many_short_intervals_refill_as_much_as_a_long_one() {
        let mut often = TokenBucket::full(7, 1_000, at(0));
        let mut once = often.clone();
        assert_eq!(often.take(1_000, at(0)), Taken::Now { oversized: false });
        assert_eq!(once.take(1_000, at(0)), Taken::Now { oversized: false });
        for us in 0..=1_000_000 {
            let _ = often.available(at(us));
        }
        assert_eq!(often.available(at(1_000_000)), 7);
        assert_eq!(once.available(at(1_000_000)), 7);
    }

    #[test]
    fn an_oversized_request_waits_for_a_full_bucket_and_leaves_a_debt() {
        let mut bucket = TokenBucket::full(10, 100, at(0));
        assert_eq!(bucket.take(1, at(0)), Taken::Now { oversized: false });
        assert_eq!(bucket.take(250, at(0)), Taken::At(at(100_000)));
        assert_eq!(
            bucket.take(250, at(100_000)),
            Taken::Now { oversized: true }
        );
        assert_eq!(bucket.available(at(100_000)), -150);
        assert_eq!(
            bucket.take(0, at(100_000)),
            Taken::At(at(15_100_000)),
            "a debt is repaid before anything else"
        );
    }

    #[test]
    fn a_bucket_never_holds_more_than_its_burst() {
        let mut bucket = TokenBucket::full(u64::MAX, 100, at(0));
        assert_eq!(bucket.available(at(u64::MAX)), 100);
    }

    #[test]
    fn a_clock_that_goes_back_gives_nothing_and_takes_nothing() {
        let mut bucket = TokenBucket::full(10, 100, at(1_000_000));
        assert_eq!(
            bucket.take(100, at(1_000_000)),
            Taken::Now { oversized: false }
        );
        assert_eq!(bucket.available(at(0)), 0);
        assert_eq!(bucket.available(at(2_000_000)), 10);
    }

    #[test]
    fn a_new_rate_counts_from_its_change_on() {
        let mut bucket = TokenBucket::full(10, 100, at(0));
        assert_eq!(bucket.take(100, at(0)), Taken::Now { oversized: false });
        bucket.set(20, 50, at(1_000_000));
        assert_eq!(bucket.available(at(1_000_000)), 10);
        assert_eq!(bucket.available(at(2_000_000)), 30);
        assert_eq!(bucket.available(at(9_000_000)), 50);
    }

    #[test]
    fn without_a_rate_waiting_is_pointless() {
        let mut bucket = TokenBucket::full(0, 100, at(0));
        assert_eq!(bucket.take(100, at(0)), Taken::Now { oversized: false });
        assert_eq!(bucket.take(1, at(0)), Taken::Never);
    }
}
