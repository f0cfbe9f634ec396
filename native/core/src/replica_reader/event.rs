//! Facts that the machine is told, and what it may refuse of them.

use super::RetentionError;
use crate::error::TransferError;
use crate::fragment::Fragment;
use crate::manifest::Edit;
use crate::units::{Epoch, Offset, Revision, TimestampMs, TransferId, Uid};

/// How a machine behaves. There are no defaults here: they belong to the host's configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// The writer's term; passed on in `StartPersist`.
    pub epoch: Epoch,
    /// A persist starts once this many fragments have been added to the manifest; at least 1.
    pub persist_threshold: u64,
    /// A tick starts a persist once the last one is this many milliseconds old.
    pub persist_interval_ms: u64,
    /// This many entries of one kind in a row become one group; at least 2.
    pub rebalance_threshold: usize,
}

/// Settings that no machine can work with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OptionsError {
    /// With 0 a persist would start without anything to persist.
    #[error("persist_threshold has to be at least 1")]
    PersistThreshold,
    /// With 0 or 1 grouping would never end.
    #[error("rebalance_threshold has to be at least 2")]
    RebalanceThreshold,
}

impl Options {
    pub(super) fn check(&self) -> Result<(), OptionsError> {
        if self.persist_threshold == 0 {
            return Err(OptionsError::PersistThreshold);
        }
        if self.rebalance_threshold < 2 {
            return Err(OptionsError::RebalanceThreshold);
        }
        Ok(())
    }
}

/// A fragment that cannot be tiered. The caller is mistaken: nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FragmentError {
    /// It holds no record.
    #[error("fragment at {first} ends at {next}")]
    Empty {
        /// Its first offset.
        first: Offset,
        /// Its next offset.
        next: Offset,
    },
    /// An entry could not hold its size.
    #[error("fragment of {0} bytes is too large for a manifest")]
    TooLarge(u64),
    /// A fragment with this id is in the machine.
    #[error("transfer {0} is in use")]
    IdInUse(TransferId),
}

/// How a persist failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PersistError {
    /// Somebody else has persisted.
    Conflict,
    /// The metadata of the stream is not there.
    NotFound,
    /// Anything that may pass.
    Other,
}

/// Each event as a value, for whoever records or generates them. [`Machine::handle`](super::Machine::handle) takes them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event<T> {
    /// See [`Machine::fragment_cut`](super::Machine::fragment_cut).
    FragmentCut {
        /// Names it.
        id: TransferId,
        /// What the manifest needs to know of it.
        fragment: Fragment,
        /// What the host needs to know of it.
        detail: T,
    },
    /// See [`Machine::transfer_complete`](super::Machine::transfer_complete).
    TransferComplete {
        /// As given at the cut.
        id: TransferId,
        /// Of the attempt that succeeded.
        uid: Uid,
    },
    /// See [`Machine::transfer_failed`](super::Machine::transfer_failed).
    TransferFailed {
        /// As given at the cut.
        id: TransferId,
        /// Why, as far as the machine needs to know.
        error: TransferError,
        /// Why, as the host says it.
        reason: T,
    },
    /// See [`Machine::group_upload_complete`](super::Machine::group_upload_complete).
    GroupUploadComplete(Uid),
    /// See [`Machine::group_upload_failed`](super::Machine::group_upload_failed).
    GroupUploadFailed(TransferError),
    /// See [`Machine::persist_complete`](super::Machine::persist_complete).
    PersistComplete {
        /// Of the metadata that was written.
        revision: Revision,
        /// When.
        now: TimestampMs,
    },
    /// See [`Machine::persist_failed`](super::Machine::persist_failed).
    PersistFailed(PersistError),
    /// See [`Machine::tick`](super::Machine::tick).
    Tick(TimestampMs),
    /// See [`Machine::await_offset`](super::Machine::await_offset).
    AwaitOffset {
        /// What has to be persisted.
        offset: Offset,
        /// Whom to tell.
        from: T,
    },
    /// See [`Machine::retention_started`](super::Machine::retention_started).
    RetentionStarted,
    /// See [`Machine::retention_complete`](super::Machine::retention_complete).
    RetentionComplete(Edit),
    /// See [`Machine::retention_failed`](super::Machine::retention_failed).
    RetentionFailed,
}

/// An event that cannot be. Nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Of a fragment.
    #[error(transparent)]
    Fragment(#[from] FragmentError),
    /// Of a retention.
    #[error(transparent)]
    Retention(#[from] RetentionError),
}
