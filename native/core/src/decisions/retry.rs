//! How long to wait before the next attempt, and which fragments are attempted while the store is away.

use crate::error::{ErrorClass, TransferError};

/// The settings behind retry delays, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryDelays {
    /// After the second transient failure.
    pub transient_ms: u64,
    /// Longest delay after a transient failure.
    pub transient_max_ms: u64,
    /// After the first failure of another class.
    pub permanent_ms: u64,
    /// Longest delay after a failure of another class, throttling included.
    pub permanent_max_ms: u64,
}

/// A store that asks for less is left alone for about this long at first.
const THROTTLED_MS: u64 = 1000;

/// Delay in milliseconds after `failures` attempts have failed (1 is the first), the last one with `class`. A transient failure is
/// repeated at once the first time; from then on the delay doubles up to its maximum, and a throttled one begins at a second. `jitter`, evenly
/// distributed over all 32-bit values, spreads the delay `d` over `[d/2, d]`, so that a node's streams do not come back all at once.
/// There is no last attempt: a fragment is never given up.
#[must_use]
pub fn retry_delay(class: ErrorClass, failures: u32, delays: &RetryDelays, jitter: u32) -> u64 {
    let (first, max, doublings) = match class {
        ErrorClass::Transient if failures <= 1 => return 0,
        ErrorClass::Transient => (delays.transient_ms, delays.transient_max_ms, failures - 2),
        ErrorClass::Throttled => (
            THROTTLED_MS,
            delays.permanent_max_ms.max(THROTTLED_MS),
            failures.saturating_sub(1),
        ),
        ErrorClass::Permanent => (
            delays.permanent_ms,
            delays.permanent_max_ms,
            failures.saturating_sub(1),
        ),
    };
    let factor = 1u64.checked_shl(doublings).unwrap_or(u64::MAX);
    spread(first.saturating_mul(factor).min(max), jitter)
}

fn spread(delay: u64, jitter: u32) -> u64 {
    let half = delay / 2;
    let share = u128::from(delay - half) * u128::from(jitter) / u128::from(u32::MAX);
    // At most `delay - half`.
    half + u64::try_from(share).unwrap_or(0)
}

/// So many failures of one fragment are more than a hiccup, and some tens of milliseconds with the usual delays.
const AWAY_AFTER: u32 = 3;

/// What a failed attempt says of the store. While it is away one fragment of a stream is tried for all: asked once in a while, not once for each
/// fragment, it costs next to nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outlook {
    /// The failure is the fragment's own, or it costs little to try each: the fragment is tried again by itself.
    There,
    /// As if the store were away. The fragment waits for the one that is tried for all, if there is one.
    Doubtful,
    /// So often that it is: the fragment is tried for all, if no other one is.
    Away,
}

/// The outlook after `failures` attempts for a fragment have failed (1 is the first), the last one with `error`. No connection and statuses from 500 on are
/// signs of a store that is away. A request that hangs is none: it costs nothing meanwhile, and of several the one that notices first that the store is
/// back counts. Nor is throttling, where a second or more lies between attempts.
#[must_use]
pub fn outlook(error: &TransferError, failures: u32) -> Outlook {
    let away = matches!(
        error,
        TransferError::Connection | TransferError::Http(500..=599)
    );
    match (away, failures >= AWAY_AFTER) {
        (false, _) => Outlook::There,
        (true, false) => Outlook::Doubtful,
        (true, true) => Outlook::Away,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ErrorClass::{Permanent, Throttled, Transient};

    const DELAYS: RetryDelays = RetryDelays {
        transient_ms: 10,
        transient_max_ms: 5_000,
        permanent_ms: 1_000,
        permanent_max_ms: 30_000,
    };

    fn longest(class: ErrorClass) -> Vec<u64> {
        (1..=7)
            .map(|failures| retry_delay(class, failures, &DELAYS, u32::MAX))
            .collect()
    }

    #[test]
    fn a_transient_failure_is_repeated_at_once_and_then_ever_later() {
        assert_eq!(longest(Transient), [0, 10, 20, 40, 80, 160, 320]);
        assert_eq!(retry_delay(Transient, 40, &DELAYS, u32::MAX), 5_000);
    }

    #[test]
    fn throttling_and_other_failures_begin_at_a_second() {
        let expected = [1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000];
        assert_eq!(longest(Throttled), expected);
        assert_eq!(longest(Permanent), expected);
    }

    #[test]
    fn jitter_spreads_over_the_upper_half() {
        assert_eq!(retry_delay(Permanent, 1, &DELAYS, 0), 500);
        assert_eq!(retry_delay(Permanent, 1, &DELAYS, u32::MAX / 2), 749);
        assert_eq!(retry_delay(Permanent, 1, &DELAYS, u32::MAX), 1_000);
    }

    #[test]
    fn a_store_that_often_refuses_or_is_out_of_order_is_away() {
        for error in [
            TransferError::Connection,
            TransferError::Http(500),
            TransferError::Http(503),
            TransferError::Http(599),
        ] {
            let outlooks: Vec<Outlook> = (1..=4).map(|n| outlook(&error, n)).collect();
            let (doubtful, away) = (Outlook::Doubtful, Outlook::Away);
            assert_eq!(outlooks, [doubtful, doubtful, away, away], "{error}");
        }
    }

    #[test]
    fn a_store_that_hangs_throttles_or_complains_is_there() {
        for error in [
            TransferError::Timeout,
            TransferError::Throttled,
            TransferError::Http(403),
            TransferError::Http(408),
            TransferError::Http(429),
            TransferError::Http(600),
            TransferError::CorruptChunk(crate::units::Offset(0)),
            TransferError::ExpiredToken,
            TransferError::Cancelled,
        ] {
            assert_eq!(outlook(&error, 100), Outlook::There, "{error}");
        }
    }

    #[test]
    fn no_number_of_failures_overflows() {
        for class in [Transient, Throttled, Permanent] {
            for failures in [0, 63, 64, 65, 66, 128, u32::MAX] {
                let delays = RetryDelays {
                    transient_max_ms: u64::MAX,
                    permanent_max_ms: u64::MAX,
                    ..DELAYS
                };
                let _ = retry_delay(class, failures, &delays, u32::MAX);
            }
        }
        assert_eq!(retry_delay(Permanent, u32::MAX, &DELAYS, u32::MAX), 30_000);
    }
}
