//! The committed state of a host, and the checks on what changes it.

use std::collections::BTreeMap;

use stream_s3_core::history::{Backlog, Listing, Segment, WINDOW};
use stream_s3_core::key::RunId;
use stream_s3_core::units::TimestampMs;

#[derive(Debug, Clone)]
pub(super) struct Sealed {
    pub(super) content: Vec<u8>,
    pub(super) at: u64,
    pub(super) uploaded: bool,
}

/// A run that is known.
#[derive(Debug, Clone)]
pub(super) struct Run {
    pub(super) id: RunId,
    pub(super) segments: BTreeMap<u64, Sealed>,
    /// When it was committed that it is purging.
    pub(super) purging: Option<u64>,
}

/// What reading a segment answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Content {
    Bytes(Vec<u8>),
    NotSealed,
    Gone,
}

/// Runs by number; a number is never used again.
#[derive(Debug, Default)]
pub(super) struct Host {
    pub(super) runs: BTreeMap<u64, Run>,
    next_run: u64,
    /// When a run was committed to be purged altogether.
    pub(super) purged: BTreeMap<u64, u64>,
}

impl Host {
    pub(super) fn open(&mut self) -> u64 {
        self.next_run += 1;
        let run = Run {
            // The text is valid. One id is the beginning of another on purpose.
            id: RunId::parse(&format!("run-{}", self.next_run)).unwrap_or_else(|_| unreachable!()),
            segments: BTreeMap::new(),
            purging: None,
        };
        self.runs.insert(self.next_run, run);
        self.next_run
    }

    /// Runs that are not purging.
    pub(super) fn open_runs(&self) -> Vec<u64> {
        self.runs
            .iter()
            .filter(|(_, run)| run.purging.is_none())
            .map(|(run, _)| *run)
            .collect()
    }

    pub(super) fn read(&self, run: u64, seq: u64) -> Content {
        match self.runs.get(&run) {
            None
            | Some(Run {
                purging: Some(_), ..
            }) => Content::Gone,
            Some(run) => match run.segments.get(&seq) {
                Some(segment) if !segment.uploaded => Content::Bytes(segment.content.clone()),
                Some(_) | None => Content::NotSealed,
            },
        }
    }

    /// What the index has of a run.
    pub(super) fn listing(&self, run: u64) -> Listing {
        let mut listing = Listing::default();
        let Some(run) = self.runs.get(&run).filter(|run| run.purging.is_none()) else {
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
        self.open_runs()
            .into_iter()
            .filter(|run| !self.listing(*run).first.is_empty())
            .collect()
    }
}
