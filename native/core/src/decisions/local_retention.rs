//! Which local segments may go because the tier has them.

use crate::units::{Epoch, Offset};

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

/// The floor of a replica's own log, of which `committed` is the last chunk that it knows to be committed. The manifest has to be of the writer
/// that the log follows now: only that writer's reader has compared the two. One that an earlier writer persisted may be of records that were
/// lost since, and say that offsets are tiered which the log has other records for. Constant time.
#[must_use]
pub fn replica_floor(
    persisted_next: Offset,
    persisted_in: Epoch,
    log: Epoch,
    committed: Offset,
) -> Offset {
    if persisted_in == log {
        persisted_next.min(committed)
    } else {
        Offset(0)
    }
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

    #[test]
    fn a_replica_trims_by_the_manifest_of_its_own_writer_only() {
        let floor =
            |of, committed| replica_floor(Offset(30), Epoch(of), Epoch(4), Offset(committed));
        assert_eq!(floor(4, 40), Offset(30));
        assert_eq!(floor(4, 12), Offset(12));
        assert_eq!(floor(3, 40), Offset(0));
        assert_eq!(floor(5, 40), Offset(0));
    }
}
