//! Where a replica reader starts: the tier against the local log.

use crate::manifest::Manifest;
use crate::units::Offset;

/// What the local log holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalLog {
    /// Its first offset; `None` where it has no chunk.
    pub first: Option<Offset>,
    /// Offset after its last record.
    pub next: Offset,
    /// First offset of the deleted segments that are still open here and reach up to `first` without a gap.
    pub pinned_first: Option<Offset>,
}

/// The range of a tier that is given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Discarded {
    /// Inclusive.
    pub first: Offset,
    /// Exclusive.
    pub next: Offset,
}

/// Where to start, and with what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Nothing was ever tiered: begin at `at`.
    Fresh {
        /// First offset to drain.
        at: Offset,
    },
    /// Go on where the tier ends.
    Resume {
        /// First offset to drain.
        at: Offset,
    },
    /// The tier holds records that the log does not: another timeline. Empty the manifest and persist that at once.
    RemoteAhead {
        /// What is given up.
        discarded: Discarded,
        /// First offset to drain.
        at: Offset,
    },
    /// The log has lost records that the tier never got. Empty the manifest, and persist that together with the first new fragment.
    LocalAhead {
        /// What is given up.
        discarded: Discarded,
        /// First offset to drain.
        at: Offset,
    },
    /// The log is empty while the tier is not: most likely its writer is still recovering. Look again later.
    WaitForLog,
}

/// Compares the tier with the log.
#[must_use]
pub fn compare(manifest: &Manifest, log: &LocalLog) -> Start {
    let next = manifest.next_offset;
    let never_tiered = next == Offset(0);
    let Some(first) = log.first else {
        return if never_tiered {
            Start::Fresh { at: log.next }
        } else {
            Start::WaitForLog
        };
    };
    let at = log.pinned_first.map_or(first, |pinned| pinned.min(first));
    let discarded = Discarded {
        first: manifest.first_offset,
        next,
    };
    if never_tiered {
        Start::Fresh { at }
    } else if next > log.next {
        Start::RemoteAhead { discarded, at }
    } else if at > next {
        Start::LocalAhead { discarded, at }
    } else {
        Start::Resume { at: next }
    }
}

/// Where to start on a tier whose newest chunk turned out to be of another timeline, whatever the offsets say.
#[must_use]
pub fn on_other_timeline(manifest: &Manifest, log: &LocalLog) -> Start {
    let Some(first) = log.first else {
        return Start::WaitForLog;
    };
    Start::RemoteAhead {
        discarded: Discarded {
            first: manifest.first_offset,
            next: manifest.next_offset,
        },
        at: log.pinned_first.map_or(first, |pinned| pinned.min(first)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::{Edit, Entry, EntryKind, apply_edit};
    use crate::units::{Revision, TimestampMs, Uid};

    fn tier(first: u64, next: u64) -> Manifest {
        let entry = Entry {
            first_offset: Offset(first),
            first_timestamp: TimestampMs(1),
            last_timestamp: TimestampMs(2),
            kind: EntryKind::Fragment,
            size: 1,
            uid: Uid(1),
        };
        let empty = Manifest::empty_at(Offset(first), Revision(1));
        apply_edit(&Edit::append(&empty, entry, Offset(next)), &empty).unwrap()
    }

    fn log(first: u64, next: u64) -> LocalLog {
        LocalLog {
            first: Some(Offset(first)),
            next: Offset(next),
            pinned_first: None,
        }
    }

    const EMPTY: LocalLog = LocalLog {
        first: None,
        next: Offset(0),
        pinned_first: None,
    };

    #[test]
    fn a_stream_without_a_tier_begins_at_its_first_offset() {
        assert_eq!(
            compare(&Manifest::default(), &log(7, 9)),
            Start::Fresh { at: Offset(7) }
        );
        assert_eq!(
            compare(&Manifest::default(), &EMPTY),
            Start::Fresh { at: Offset(0) }
        );
    }

    #[test]
    fn a_tier_inside_the_log_is_resumed_at_its_end() {
        assert_eq!(
            compare(&tier(0, 50), &log(20, 90)),
            Start::Resume { at: Offset(50) }
        );
        assert_eq!(
            compare(&tier(0, 50), &log(50, 90)),
            Start::Resume { at: Offset(50) }
        );
        assert_eq!(
            compare(&tier(0, 50), &log(0, 50)),
            Start::Resume { at: Offset(50) }
        );
    }

    #[test]
    fn a_tier_beyond_the_log_is_discarded() {
        let discarded = Discarded {
            first: Offset(10),
            next: Offset(50),
        };
        let expected = Start::RemoteAhead {
            discarded,
            at: Offset(0),
        };
        assert_eq!(compare(&tier(10, 50), &log(0, 49)), expected);
        assert_eq!(on_other_timeline(&tier(10, 50), &log(0, 90)), expected);
    }

    #[test]
    fn a_log_that_begins_beyond_the_tier_leaves_a_gap() {
        let discarded = Discarded {
            first: Offset(10),
            next: Offset(50),
        };
        assert_eq!(
            compare(&tier(10, 50), &log(51, 90)),
            Start::LocalAhead {
                discarded,
                at: Offset(51)
            }
        );
    }

    #[test]
    fn deleted_segments_that_are_still_open_count_as_log() {
        let pinned = |at| LocalLog {
            pinned_first: Some(Offset(at)),
            ..log(80, 90)
        };
        assert_eq!(
            compare(&tier(10, 50), &pinned(50)),
            Start::Resume { at: Offset(50) }
        );
        let discarded = Discarded {
            first: Offset(10),
            next: Offset(50),
        };
        assert_eq!(
            compare(&tier(10, 50), &pinned(60)),
            Start::LocalAhead {
                discarded,
                at: Offset(60)
            }
        );
    }

    #[test]
    fn an_empty_log_under_a_tier_is_waited_for() {
        assert_eq!(compare(&tier(0, 50), &EMPTY), Start::WaitForLog);
        assert_eq!(on_other_timeline(&tier(0, 50), &EMPTY), Start::WaitForLog);
    }

    #[test]
    fn a_tier_that_retention_has_emptied_is_resumed_like_any_other() {
        let emptied = Manifest::empty_at(Offset(50), Revision(3));
        assert_eq!(
            compare(&emptied, &log(0, 90)),
            Start::Resume { at: Offset(50) }
        );
        assert_eq!(compare(&emptied, &EMPTY), Start::WaitForLog);
        let discarded = Discarded {
            first: Offset(50),
            next: Offset(50),
        };
        assert_eq!(
            compare(&emptied, &log(0, 40)),
            Start::RemoteAhead {
                discarded,
                at: Offset(0)
            }
        );
    }
}
