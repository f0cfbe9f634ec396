//! What is pending of one run: the next segments one by one, the others as a sum.

use std::collections::VecDeque;

use crate::units::TimestampMs;

/// Most segments that a machine knows one by one. The others stay in the host's index until these are through.
pub const WINDOW: usize = 16;

/// A sealed segment that is not acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Its number in the run.
    pub seq: u64,
    /// Payload in bytes.
    pub size: u64,
    /// When it was sealed, by the host's clock.
    pub sealed: TimestampMs,
}

/// Pending segments as a sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Backlog {
    /// How many.
    pub segments: u64,
    /// Their payload in bytes.
    pub bytes: u64,
    /// When the oldest of them was sealed.
    pub oldest: Option<TimestampMs>,
}

impl Backlog {
    /// Adds one.
    pub fn add(&mut self, size: u64, sealed: TimestampMs) {
        self.segments = self.segments.saturating_add(1);
        self.bytes = self.bytes.saturating_add(size);
        self.oldest = Some(self.oldest.map_or(sealed, |oldest| oldest.min(sealed)));
    }

    fn less(&mut self, segment: &Segment) {
        self.segments = self.segments.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(segment.size);
        if self.segments == 0 {
            *self = Self::default();
        }
    }
}

/// What the host's index has of one run: the first segments in ascending order, at most [`WINDOW`] of them, and the others.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Listing {
    /// Ascending by number, without a gap in the index.
    pub first: Vec<Segment>,
    /// What the index has of the run behind them, as far as it was read.
    pub beyond: Backlog,
}

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Window {
    first: VecDeque<Segment>,
    beyond: Backlog,
    /// Something was sealed since the index was asked for the last time.
    dirty: bool,
    /// All segments up to this one are acknowledged, or need no upload.
    done: Option<u64>,
}

impl Window {
    /// A segment was sealed: the index knows more now.
    pub(super) fn sealed(&mut self, size: u64, sealed: TimestampMs) {
        self.dirty = true;
        self.beyond.add(size, sealed);
    }

    /// The index is about to be asked.
    pub(super) fn asked(&mut self) {
        self.dirty = false;
    }

    /// The index could not be read.
    pub(super) fn ask_again(&mut self) {
        self.dirty = true;
    }

    /// The index was read from this run's beginning. `whole`: to the end of the run, so that its sums are true; otherwise a larger sum
    /// that is known from before is kept.
    pub(super) fn listed(&mut self, listing: Listing, whole: bool) {
        let before = self.beyond;
        let done = self.done;
        self.first = listing
            .first
            .into_iter()
            .filter(|segment| done.is_none_or(|done| segment.seq > done))
            .take(WINDOW)
            .collect();
        self.beyond = listing.beyond;
        if !whole && (listing.beyond.segments > 0 || self.dirty) {
            let mut rest = before;
            for segment in &self.first {
                rest.less(segment);
            }
            if rest.segments > self.beyond.segments {
                self.beyond = rest;
            }
        }
    }

    /// What is to be uploaded next.
    pub(super) fn next(&self) -> Option<Segment> {
        self.first.front().copied()
    }

    /// Whether the index may have more than is known one by one.
    pub(super) fn has_more(&self) -> bool {
        self.dirty || self.beyond.segments > 0
    }

    /// This segment, and with it all before it, need nothing any more.
    pub(super) fn done(&mut self, seq: u64) {
        self.done = Some(self.done.map_or(seq, |done| done.max(seq)));
        while self.first.front().is_some_and(|first| first.seq <= seq) {
            self.first.pop_front();
        }
    }

    /// All of it.
    pub(super) fn backlog(&self) -> Backlog {
        let mut all = self.beyond;
        for segment in &self.first {
            all.add(segment.size, segment.sealed);
        }
        all
    }

    /// Forgets what is pending.
    pub(super) fn clear(&mut self) {
        self.first.clear();
        self.beyond = Backlog::default();
        self.dirty = false;
    }
}
