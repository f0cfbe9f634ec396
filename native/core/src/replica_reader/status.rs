//! What the machine tells of itself.

use super::Machine;
use crate::units::{Offset, TimestampMs};

/// Where a machine stands. Every number is derived from the state when asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// Of the speculative manifest.
    pub manifest_first_offset: Offset,
    /// Of the speculative manifest.
    pub manifest_next_offset: Offset,
    /// Of the speculative manifest, in bytes.
    pub manifest_total_size: u128,
    /// Of the persisted manifest.
    pub persisted_next_offset: Offset,
    /// Fragments whose transfer has not been answered with success.
    pub transfers_in_flight: usize,
    /// Fragments that are stored, and wait for an older one.
    pub transfers_pending_order: usize,
    /// Bytes of both.
    pub bytes_in_transfer: u64,
    /// Fragments in the speculative manifest that no persist has taken up.
    pub since_persist: u64,
    /// Fragments in the persist that is in flight.
    pub in_persist_count: u64,
    /// Bytes of both.
    pub bytes_in_persist: u64,
    /// Edits that no persist has taken up.
    pub edits_waiting: usize,
    /// Whether a persist is in flight.
    pub persist_in_flight: bool,
    /// Persists that have failed since the last one that succeeded.
    pub persist_failures: u64,
    /// When the last persist succeeded, or the machine began.
    pub last_persist_ts: TimestampMs,
    /// Whether a group is being stored.
    pub rebalance_in_flight: bool,
    /// Whether a retention has been announced and not ended.
    pub retention_in_flight: bool,
    /// Callers that wait for an offset to be persisted.
    pub waiters: usize,
}

impl<T: Clone> Machine<T> {
    /// Where it stands. One pass over transfers and edits.
    #[must_use]
    pub fn status(&self) -> Status {
        let pending = self
            .transfers
            .iter()
            .filter(|transfer| transfer.stored.is_some())
            .count();
        Status {
            manifest_first_offset: self.manifest.first_offset,
            manifest_next_offset: self.manifest.next_offset,
            manifest_total_size: self.manifest.total_size,
            persisted_next_offset: self.persisted.next_offset,
            transfers_in_flight: self.transfers.iter().count() - pending,
            transfers_pending_order: pending,
            bytes_in_transfer: self
                .transfers
                .iter()
                .map(|transfer| transfer.fragment.size)
                .sum(),
            since_persist: self.since_persist,
            in_persist_count: self.persist.as_ref().map_or(0, |persist| persist.fragments),
            bytes_in_persist: self
                .unpersisted()
                .map(|pending| pending.appended_bytes())
                .sum(),
            edits_waiting: self.edits.len(),
            persist_in_flight: self.persist.is_some(),
            persist_failures: self.persist_failures,
            last_persist_ts: self.last_persist,
            rebalance_in_flight: self.rebalance.is_some(),
            retention_in_flight: self.retention.is_some(),
            waiters: self.waiters.len(),
        }
    }
}
