//! Which local segments may go because the tier has them.

use crate::units::Offset;

/// Below which offset local data is no longer needed: the persisted next offset, or where the slowest replica is.
#[must_use]
pub fn floor(persisted_next: Offset, replicas: &[Offset]) -> Offset {
    replicas.iter().copied().fold(persisted_next, Offset::min)
}

/// How many of the oldest segments lie wholly below `floor`. `first_offsets` are those of all segments, ascending; a segment ends where
/// the next one begins, so the last one, which is being written, always stays. Logarithmic.
#[must_use]
pub fn deletable_segments(first_offsets: &[Offset], floor: Offset) -> usize {
    first_offsets
        .get(1..)
        .map_or(0, |ends| ends.partition_point(|end| *end <= floor))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEGMENTS: [Offset; 4] = [Offset(0), Offset(10), Offset(20), Offset(30)];

    #[test]
    fn segments_wholly_below_the_floor_may_go() {
        assert_eq!(deletable_segments(&SEGMENTS, Offset(0)), 0);
        assert_eq!(deletable_segments(&SEGMENTS, Offset(9)), 0);
        assert_eq!(deletable_segments(&SEGMENTS, Offset(10)), 1);
        assert_eq!(deletable_segments(&SEGMENTS, Offset(29)), 2);
    }

    #[test]
    fn the_active_segment_stays() {
        assert_eq!(deletable_segments(&SEGMENTS, Offset(u64::MAX)), 3);
        assert_eq!(deletable_segments(&SEGMENTS[..1], Offset(u64::MAX)), 0);
        assert_eq!(deletable_segments(&[], Offset(u64::MAX)), 0);
    }

    #[test]
    fn the_slowest_replica_holds_segments_back() {
        assert_eq!(floor(Offset(30), &[]), Offset(30));
        assert_eq!(floor(Offset(30), &[Offset(40), Offset(12)]), Offset(12));
    }
}
