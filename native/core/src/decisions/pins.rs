//! Which segments a node keeps open, and how many deleted ones until they are uploaded.

use std::ops::Range;

use crate::units::Offset;

/// Which of a log's segments are to be open, as a range of indices: those that hold something beyond `persisted`, the oldest first, at most
/// `limit`. `segments` are the first offsets of all segment files, ascending. Retention deletes the oldest, so these are the ones in danger.
#[must_use]
pub fn segments_to_pin(segments: &[Offset], persisted: Offset, limit: usize) -> Range<usize> {
    // The last one that begins at `persisted` or before holds what comes next, or will.
    let first = segments
        .partition_point(|segment| *segment <= persisted)
        .saturating_sub(1);
    first..segments.len().min(first.saturating_add(limit))
}

/// Whether a segment that ends at `end` (exclusive; `None` where that is not known) holds nothing that the tier lacks.
#[must_use]
pub fn is_superfluous(end: Option<Offset>, persisted: Offset) -> bool {
    end.is_some_and(|end| end <= persisted)
}

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

/// What is known of the open segments in front of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Joining {
    /// They reach up to the log without a gap from here on; `None`: none of them does.
    From(Option<Offset>),
    /// It depends on where the segment that begins here ends.
    DependsOn(Offset),
}

/// How far the open segments prolong a log that begins at `log_first`. `pins` are first offset and end (exclusive; `None` where that
/// is not known) of each, ascending; those that begin at `log_first` or later do not matter.
#[must_use]
pub fn joining(pins: &[(Offset, Option<Offset>)], log_first: Offset) -> Joining {
    let mut from = None;
    for (first, end) in pins.iter().rev().filter(|(first, _)| *first < log_first) {
        match end {
            None => return Joining::DependsOn(*first),
            Some(end) if *end == from.unwrap_or(log_first) => from = Some(*first),
            Some(_) => break,
        }
    }
    Joining::From(from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offsets(all: &[u64]) -> Vec<Offset> {
        all.iter().copied().map(Offset).collect()
    }

    #[test]
    fn segments_are_pinned_from_the_one_that_holds_the_next_offset_on() {
        let log = offsets(&[10, 20, 30, 40]);
        assert_eq!(segments_to_pin(&log, Offset(0), 9), 0..4);
        assert_eq!(segments_to_pin(&log, Offset(10), 9), 0..4);
        assert_eq!(segments_to_pin(&log, Offset(29), 9), 1..4);
        assert_eq!(segments_to_pin(&log, Offset(30), 9), 2..4);
        assert_eq!(segments_to_pin(&log, Offset(99), 9), 3..4);
        assert_eq!(segments_to_pin(&[], Offset(99), 9), 0..0);
    }

    #[test]
    fn where_not_all_can_be_pinned_the_oldest_are() {
        let log = offsets(&[10, 20, 30, 40]);
        assert_eq!(segments_to_pin(&log, Offset(25), 2), 1..3);
        assert_eq!(segments_to_pin(&log, Offset(25), 0), 1..1);
    }

    #[test]
    fn a_segment_is_superfluous_once_all_of_it_is_persisted() {
        assert!(is_superfluous(Some(Offset(10)), Offset(10)));
        assert!(!is_superfluous(Some(Offset(11)), Offset(10)));
        assert!(!is_superfluous(None, Offset(10)));
    }

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

    #[test]
    fn a_log_is_prolonged_by_what_joins_it_without_a_gap() {
        let pins = |all: &[(u64, u64)]| -> Vec<_> {
            all.iter()
                .map(|(first, end)| (Offset(*first), Some(Offset(*end))))
                .collect()
        };
        let from = |offset| Joining::From(Some(Offset(offset)));
        assert_eq!(joining(&[], Offset(30)), Joining::From(None));
        assert_eq!(
            joining(&pins(&[(0, 10), (10, 20), (20, 30), (30, 40)]), Offset(30)),
            from(0)
        );
        assert_eq!(joining(&pins(&[(0, 9), (10, 20)]), Offset(20)), from(10));
        assert_eq!(
            joining(&pins(&[(0, 10), (10, 20)]), Offset(30)),
            Joining::From(None)
        );
        assert_eq!(joining(&pins(&[(30, 40)]), Offset(30)), Joining::From(None));
    }

    #[test]
    fn an_end_that_is_not_known_is_asked_for_only_if_it_matters() {
        let pins = [
            (Offset(0), None),
            (Offset(10), Some(Offset(19))),
            (Offset(20), None),
        ];
        assert_eq!(joining(&pins, Offset(30)), Joining::DependsOn(Offset(20)));
        assert_eq!(joining(&pins, Offset(20)), Joining::From(None));
        assert_eq!(joining(&pins, Offset(10)), Joining::DependsOn(Offset(0)));
    }
}
