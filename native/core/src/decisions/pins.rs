//! How many deleted segments a node may keep open until they are uploaded.

/// How many deleted segments have to be let go, oldest first, so that what is left takes at most `limit` bytes of disk. `unlinked` are the
/// sizes of those held open, oldest first; segments that are still linked cost nothing and do not count. The oldest go first: the records
/// behind them still join on to the log, those in front of a gap would be discarded with the tier.
#[must_use]
pub fn pins_to_release(unlinked: &[u64], limit: u64) -> usize {
    let mut held: u128 = unlinked.iter().map(|size| u128::from(*size)).sum();
    unlinked
        .iter()
        .take_while(|size| {
            let over = held > u128::from(limit);
            held -= u128::from(**size);
            over
        })
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_released_within_the_limit() {
        assert_eq!(pins_to_release(&[], 0), 0);
        assert_eq!(pins_to_release(&[10, 20], 30), 0);
        assert_eq!(pins_to_release(&[u64::MAX, 0], u64::MAX), 0);
    }

    #[test]
    fn the_oldest_are_released_until_the_rest_fits() {
        assert_eq!(pins_to_release(&[10, 20, 30], 50), 1);
        assert_eq!(pins_to_release(&[10, 20, 30], 49), 2);
        assert_eq!(pins_to_release(&[10, 20, 30], 0), 3);
        assert_eq!(pins_to_release(&[u64::MAX, u64::MAX, 1], 1), 2);
    }
}
