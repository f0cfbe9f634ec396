//! The metadata store: one container with an anchor and a manifest node, as `rabbitmq_stream_s3_metadata` sees Khepri.

use stream_s3_core::decisions::discard::{Claim, DiscardNote, claim};
use stream_s3_core::units::{Epoch, TimestampMs};

use crate::rng::Rng;
use crate::twin::Twin;

/// What the manifest node holds: uid and epoch of the current root.
pub(crate) type RootEntry = (u32, u64);

/// A command or a consistent read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MetaOp {
    Anchor,
    Get,
    /// Takes the note of discarded tiers over, if there is a root: a read and a write that fails where somebody was faster, in one step.
    Claim {
        epoch: u64,
        now: i64,
    },
    /// Notes when the tier was discarded.
    Discard {
        at: i64,
        epoch: u64,
    },
    Put {
        entry: RootEntry,
        expected: u64,
    },
}

/// What a command came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MetaValue {
    Anchored,
    Claimed,
    Discarded,
    Root(RootEntry, u64),
    Written(u64),
}

/// How it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MetaError {
    NotFound,
    Conflict,
    Timeout,
    /// Refused at once, without effect.
    Other,
}

/// An answer.
pub(crate) type MetaAnswer = Result<MetaValue, MetaError>;

/// What becomes of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MetaFate {
    Done {
        after: u64,
        reply: u64,
    },
    /// Never performed, never answered.
    Lost,
    /// Not performed, and answered so.
    Refused {
        after: u64,
    },
    /// Performed, not answered.
    Silent {
        after: u64,
    },
}

/// The store.
#[derive(Debug, Default)]
pub(crate) struct Metadata {
    /// Whether the queue that the container lives and dies with is gone.
    pub(crate) deleted: bool,
    pub(crate) anchored: bool,
    pub(crate) root: Option<(RootEntry, u64)>,
    /// When the tier was discarded last, by the clock of who did, and who begins or has begun.
    pub(crate) discarded: Option<DiscardNote>,
}

impl Metadata {
    /// The queue is deleted, and all below it in the same transaction.
    pub(crate) fn delete_queue(&mut self) {
        self.deleted = true;
        self.anchored = false;
        self.root = None;
        self.discarded = None;
    }

    pub(crate) fn perform(&mut self, op: MetaOp, twin: Option<Twin>) -> MetaAnswer {
        match op {
            MetaOp::Anchor if self.deleted => Err(MetaError::NotFound),
            MetaOp::Anchor => {
                self.anchored = true;
                Ok(MetaValue::Anchored)
            }
            MetaOp::Claim { .. } | MetaOp::Discard { .. } if !self.anchored => {
                Err(MetaError::NotFound)
            }
            MetaOp::Claim { .. } if twin == Some(Twin::DiscardFence) => Ok(MetaValue::Claimed),
            MetaOp::Claim { epoch, now } => {
                match claim(self.discarded.as_ref(), Epoch(epoch), TimestampMs(now)) {
                    Claim::Own => Ok(MetaValue::Claimed),
                    Claim::TakeOver(note) => {
                        self.discarded = Some(note);
                        Ok(MetaValue::Claimed)
                    }
                    Claim::Fenced(_) => Err(MetaError::Conflict),
                }
            }
            MetaOp::Discard { epoch, .. }
                if self.discarded.is_some_and(|note| note.epoch > Epoch(epoch))
                    && twin != Some(Twin::DiscardFence) =>
            {
                Err(MetaError::Conflict)
            }
            MetaOp::Discard { at, epoch } => {
                self.discarded = Some(DiscardNote {
                    at: Some(TimestampMs(at)),
                    epoch: Epoch(epoch),
                });
                Ok(MetaValue::Discarded)
            }
            MetaOp::Get => match self.root {
                Some((entry, revision)) => Ok(MetaValue::Root(entry, revision)),
                None => Err(MetaError::NotFound),
            },
            MetaOp::Put { entry, expected } => self.put(entry, expected, twin),
        }
    }

    fn put(&mut self, entry: RootEntry, expected: u64, twin: Option<Twin>) -> MetaAnswer {
        let Some((stored, revision)) = self.root else {
            // The anchor is the manifest's keep_while: without it nothing is created.
            if expected > 0 || !self.anchored && twin != Some(Twin::AnchorFirst) {
                return Err(MetaError::NotFound);
            }
            self.root = Some((entry, 1));
            return Ok(MetaValue::Written(1));
        };
        let revision_fits = revision == expected || twin == Some(Twin::RevisionCheck);
        let not_fenced = stored.1 <= entry.1 || twin == Some(Twin::EpochCheck);
        if expected > 0 && revision_fits && not_fenced {
            // A write of what is there already does not count.
            let next = if stored == entry {
                revision
            } else {
                revision + 1
            };
            self.root = Some((entry, next));
            return Ok(MetaValue::Written(next));
        }
        if stored == entry && twin != Some(Twin::OwnConflictIsSuccess) {
            return Ok(MetaValue::Written(revision));
        }
        Err(MetaError::Conflict)
    }
}

/// Draws the fate of a command that meets no fault.
pub(crate) fn smooth(rng: &mut Rng) -> MetaFate {
    MetaFate::Done {
        after: rng.between(1, 15),
        reply: rng.between(0, 10),
    }
}

/// Draws the fate of one that does; the name is for coverage.
pub(crate) fn misfortune(rng: &mut Rng) -> (&'static str, MetaFate) {
    match rng.between(0, 5) {
        0 => ("metadata timeout without effect", MetaFate::Lost),
        1 | 2 => {
            let after = rng.between(1, 50);
            ("metadata timeout with effect", MetaFate::Silent { after })
        }
        3 => {
            let after = rng.between(1, 20);
            ("metadata error", MetaFate::Refused { after })
        }
        4 => {
            let after = rng.between(300, 8_000);
            ("metadata late effect", MetaFate::Silent { after })
        }
        _ => {
            let (after, reply) = (rng.between(100, 3_000), rng.between(0, 500));
            ("metadata slow", MetaFate::Done { after, reply })
        }
    }
}
