//! The committed state of a host, and the commands that change it. It follows from the commands alone, so whoever replays them, from the beginning or
//! from a snapshot, has the same.

use std::collections::BTreeMap;
use std::rc::Rc;

use stream_s3_core::history::{Backlog, Listing, Segment, WINDOW};
use stream_s3_core::key::RunId;
use stream_s3_core::units::TimestampMs;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sealed {
    pub(super) content: Rc<[u8]>,
    pub(super) at: u64,
    pub(super) uploaded: bool,
}

/// What may happen to a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Segments may be sealed.
    Open,
    /// None any more; retention takes it when it may.
    Closed,
    /// It is being deleted.
    Purging,
}

/// A run that is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) id: RunId,
    pub(super) segments: BTreeMap<u64, Sealed>,
    pub(super) phase: Phase,
}

/// Something that is committed.
#[derive(Debug, Clone)]
pub(super) enum Command {
    Open,
    Seal {
        run: u64,
        seq: u64,
        content: Rc<[u8]>,
        at: u64,
    },
    Close {
        run: u64,
    },
    Purge {
        run: u64,
    },
    Acknowledge {
        run: u64,
        seq: u64,
    },
    Purged {
        run: u64,
    },
}

/// What a command came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Committed {
    Changed,
    /// It was so already.
    Same,
    /// The run is unknown, or is being purged.
    Gone,
    /// There is no such segment.
    NeverSealed,
}

/// What reading a segment answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Content {
    Bytes {
        bytes: Rc<[u8]>,
        /// Whoever answered did not know yet that the run is purging.
        behind: bool,
    },
    NotSealed,
    Gone,
}

/// What a catalog answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Catalog {
    Segments(Vec<u64>),
    None,
    Gone,
}

/// Runs by number; a number is never used again.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Host {
    pub(super) runs: BTreeMap<u64, Run>,
    pub(super) next_run: u64,
    /// A second acknowledgment changes something.
    pub(super) acknowledges_twice: bool,
}

impl Host {
    pub(super) fn apply(&mut self, command: &Command) -> Committed {
        match command {
            Command::Open => {
                self.next_run += 1;
                let run = Run {
                    // The text is valid. One id is the beginning of another on purpose.
                    id: RunId::parse(&format!("run-{}", self.next_run))
                        .unwrap_or_else(|_| unreachable!()),
                    segments: BTreeMap::new(),
                    phase: Phase::Open,
                };
                self.runs.insert(self.next_run, run);
                Committed::Changed
            }
            Command::Seal {
                run,
                seq,
                content,
                at,
            } => self.in_run(*run, |known| {
                let sealed = Sealed {
                    content: content.clone(),
                    at: *at,
                    uploaded: false,
                };
                known.segments.insert(*seq, sealed);
                Committed::Changed
            }),
            Command::Close { run } => self.in_run(*run, |known| {
                known.phase = Phase::Closed;
                Committed::Changed
            }),
            Command::Purge { run } => self.in_run(*run, |known| {
                known.phase = Phase::Purging;
                Committed::Changed
            }),
            Command::Acknowledge { run, seq } => {
                let twice = self.acknowledges_twice;
                self.in_run(*run, |known| match known.segments.get_mut(seq) {
                    None => Committed::NeverSealed,
                    Some(segment) if segment.uploaded && !twice => Committed::Same,
                    Some(segment) => {
                        segment.uploaded = true;
                        Committed::Changed
                    }
                })
            }
            Command::Purged { run } => match self.runs.remove(run) {
                Some(_) => Committed::Changed,
                None => Committed::Same,
            },
        }
    }

    fn in_run(&mut self, run: u64, change: impl FnOnce(&mut Run) -> Committed) -> Committed {
        match self.runs.get_mut(&run) {
            Some(known) if known.phase != Phase::Purging => change(known),
            Some(_) | None => Committed::Gone,
        }
    }

    /// Runs in these phases.
    pub(super) fn runs_in(&self, phases: &[Phase]) -> Vec<u64> {
        self.runs
            .iter()
            .filter(|(_, run)| phases.contains(&run.phase))
            .map(|(run, _)| *run)
            .collect()
    }

    /// A run that is known, and of which uploads are wanted.
    fn wanted(&self, run: u64) -> Option<&Run> {
        self.runs
            .get(&run)
            .filter(|known| known.phase != Phase::Purging)
    }

    pub(super) fn wants(&self, run: u64) -> bool {
        self.wanted(run).is_some()
    }

    pub(super) fn read(&self, run: u64, seq: u64, behind: bool) -> Content {
        match self.wanted(run) {
            None => Content::Gone,
            Some(known) => match known.segments.get(&seq) {
                Some(segment) if !segment.uploaded => Content::Bytes {
                    bytes: segment.content.clone(),
                    behind,
                },
                Some(_) | None => Content::NotSealed,
            },
        }
    }

    /// How many segments are sealed and not uploaded; `None` where the run is unknown.
    pub(super) fn sealed(&self, run: u64) -> Option<u64> {
        let known = self.runs.get(&run)?;
        let sealed = known.segments.values().filter(|segment| !segment.uploaded);
        Some(sealed.count() as u64)
    }

    pub(super) fn catalog(&self, run: u64) -> Catalog {
        match self.runs.get(&run) {
            None => Catalog::Gone,
            Some(known) if known.segments.is_empty() => Catalog::None,
            Some(known) => Catalog::Segments(known.segments.keys().copied().collect()),
        }
    }

    /// What the index has of a run.
    pub(super) fn listing(&self, run: u64) -> Listing {
        let mut listing = Listing::default();
        let Some(run) = self.wanted(run) else {
            return listing;
        };
        for (seq, segment) in run.segments.iter().filter(|(_, segment)| !segment.uploaded) {
            let (size, sealed) = (segment.content.len() as u64, TimestampMs(segment.at as i64));
            if listing.first.len() < WINDOW {
                listing.first.push(Segment {
                    seq: *seq,
                    size,
                    sealed,
                });
            } else {
                let mut beyond: Backlog = listing.beyond;
                beyond.add(size, sealed);
                listing.beyond = beyond;
            }
        }
        listing
    }

    pub(super) fn pending(&self) -> Vec<u64> {
        let wanted = self.runs_in(&[Phase::Open, Phase::Closed]);
        wanted
            .into_iter()
            .filter(|run| self.sealed(*run).is_some_and(|sealed| sealed > 0))
            .collect()
    }
}
