//! Orders of the machine to its shell. `T` is whatever the host wants handed back untouched (an Erlang term, in production).

use crate::manifest::{Edit, Entry, EntryKind, Manifest};
use crate::units::{Epoch, Offset, Revision, TransferId};

/// Work for the shell. The order of a list is the order in which it is to be performed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect<T> {
    /// Upload a fragment; `transfer_complete` or `transfer_failed` with the same `id` answers it.
    SubmitTransfer {
        /// Names the fragment in the answer.
        id: TransferId,
        /// The fragment's description, as the host gave it at the cut.
        detail: T,
    },
    /// The same fragment once more, at once, as a new submission.
    ResubmitTransfer {
        /// Names the fragment in the answer.
        id: TransferId,
        /// As given at the cut.
        detail: T,
    },
    /// The same fragment once more, after a delay that the shell chooses.
    ResubmitTransferDelayed {
        /// Names the fragment in the answer.
        id: TransferId,
        /// As given at the cut.
        detail: T,
        /// Why the last attempt failed, as the host reported it.
        reason: T,
    },
    /// Write the root, then compare-and-set the metadata; `persist_complete` or `persist_failed` answers it.
    StartPersist {
        /// What to write.
        manifest: Manifest,
        /// The writer's epoch.
        epoch: Epoch,
        /// Revision that must be in the metadata store.
        expected: Revision,
        /// What changed since the last persisted manifest, oldest first.
        edits: Vec<Edit>,
    },
    /// Arm the persist timer, unless it is armed.
    StartPersistTimer {
        /// Delay in milliseconds.
        ms: u64,
    },
    /// Disarm the persist timer.
    CancelPersistTimer,
    /// Store a group object; `group_upload_complete` or `group_upload_failed` answers it.
    UploadGroup {
        /// The kind of the group (never `Fragment`).
        kind: EntryKind,
        /// The entries that move into the group, oldest first.
        entries: Vec<Entry>,
        /// Where they stand in the manifest's entries array, in bytes.
        pos: u64,
        /// How much they take there, in bytes.
        len: u64,
    },
    /// Publish the persisted range `[first_offset, next_offset)` and the persisted manifest.
    UpdateRange {
        /// Inclusive.
        first_offset: Offset,
        /// Exclusive.
        next_offset: Offset,
    },
    /// Send the edits that were just persisted to the replicas.
    Broadcast {
        /// Oldest first.
        edits: Vec<Edit>,
    },
    /// Evaluate local retention, then remote retention.
    EvaluateRetention,
    /// Tell these waiters `ok`.
    ReplyWaiters {
        /// In the order in which they came.
        waiters: Vec<T>,
    },
    /// Forget everything and resolve the manifest again.
    Reinitialize,
    /// The stream is gone: stop.
    Stop,
}
