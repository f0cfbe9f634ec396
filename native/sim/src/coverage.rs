//! What happened in worlds: a simulation that never meets a fault proves nothing about it.

use std::collections::BTreeMap;

use stream_s3_core::error::TransferError;

/// Each of [`REQUIRED`] has to happen so often in a million worlds.
const BOUND_PER_MILLION: u64 = 1_000;

/// Everything that worlds are for: the core's events, effects, errors and outcomes, and each way out of a fault. What cannot happen as long as
/// nothing is wrong (events that the machine refuses) is not among them.
pub const REQUIRED: &[&str] = &[
    // Effects.
    "effect submit_transfer",
    "effect resubmit_transfer",
    "effect resubmit_transfer_delayed",
    "effect start_persist",
    "effect start_persist_timer",
    "effect cancel_persist_timer",
    "effect upload_group",
    "effect upload_group kilo",
    "effect upload_group mega",
    "effect update_range",
    "effect broadcast",
    "effect evaluate_retention",
    "effect reply_waiters",
    "effect reinitialize",
    "effect stop",
    // Events.
    "event fragment_cut",
    "event transfer_complete",
    "event transfer_failed",
    "event group_upload_complete",
    "event group_upload_failed",
    "event persist_complete",
    "event persist_failed conflict",
    "event persist_failed not_found",
    "event persist_failed other",
    "event tick",
    "event await_offset",
    "event retention_started",
    "event retention_complete",
    "event retention_failed",
    // Kinds of errors.
    "error http transient",
    "error http throttled",
    "error http permanent",
    "error timeout",
    "error connection",
    "error throttled",
    "error checksum_mismatch",
    "error corrupt_chunk",
    "error open_failed",
    "error panic",
    "error clock_skew",
    "error expired_token",
    "error write_conflict",
    "error other",
    // Faults of the store and of the metadata store.
    "store lost reply",
    "store late arrival",
    "store black hole",
    "store stall",
    "store wrong checksum echo",
    "store truncated answer",
    "store 200 with error",
    "store deletes in part",
    "store outage",
    "metadata timeout with effect",
    "metadata timeout without effect",
    "metadata late effect",
    "metadata error",
    "metadata outage",
    // Decisions.
    "start fresh",
    "start resume",
    "start local ahead",
    "start remote ahead",
    "start wait for log",
    "timeline same",
    "timeline different",
    "timeline unverifiable",
    "resolve empty",
    "resolve from cache",
    "resolve by fetch",
    "resolve superseded",
    "resolution failed",
    "replica accepts",
    "replica stale",
    "replica resync epoch",
    "replica resync gap",
    "replica resync bad edit",
    "replica resync bad manifest",
    "replica reset",
    "replica is current",
    "replica reads anew",
    "replica reading failed",
    "replica reading given up",
    "gc keeps what it does not know",
    "gc keeps young",
    "gc keeps what is in use",
    "gc keeps what is ahead",
    "gc keeps a discarded tier",
    "gc finds an orphan",
    "gc finds a discarded tier",
    "gc finds a deleted stream",
    "gc looks again",
    "gc deletes",
    "admit",
    "admit oversized",
    "admit another stream",
    "wait for tokens",
    "cancel queued",
    "cancel running",
    "local retention",
    "local retention of a replica",
    "log not trimmed",
    "retention through a group",
    "retention incomplete",
    "retention without a persist",
    // Ways out.
    "force cut",
    "age cut",
    "flush cuts",
    "flush persists",
    "drain paused",
    "stream paused",
    "gap in the log",
    "out of reach",
    "log does not open",
    "segment gone or changed",
    "transfer deadline",
    "given-up attempt succeeded",
    "one fragment is tried for all",
    "old transfer result",
    "task died or kept no time",
    "group tried again",
    "group given up",
    "swap tried again",
    "swap unanswered",
    "discard noted",
    "discard failed",
    "tier discarded",
    "reaper fails",
    "reaper deletes in part",
    "dead requester dropped",
    "reader killed",
    "reader keeps failing",
    "restarts used up",
    "governor killed",
    "machine crashes",
    "machine loses power",
    "member cut off",
    "writer without metadata store",
    "deposed writer begins anew",
    "leader moves",
    "committed chunks lost",
    "stream deleted",
    "clock jump",
    "user retention",
    "pinned segment uploaded",
    "pinned segment drained",
    "log prolonged by pins",
    "pin released",
    "gap settled",
    "cut early",
    "broadcast lost",
    "broadcast damaged",
];

/// Counters by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Coverage(BTreeMap<&'static str, u64>);

impl Coverage {
    /// One more.
    pub fn hit(&mut self, what: &'static str) {
        *self.0.entry(what).or_insert(0) += 1;
    }

    /// Adds another world's counters.
    pub fn merge(&mut self, other: &Self) {
        for (what, count) in &other.0 {
            *self.0.entry(what).or_insert(0) += count;
        }
    }

    /// How often.
    #[must_use]
    pub fn count(&self, what: &str) -> u64 {
        self.0.get(what).copied().unwrap_or(0)
    }

    /// All counters, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        self.0.iter().map(|(what, count)| (*what, *count))
    }

    /// What has to happen, rarest first.
    #[must_use]
    pub fn required(&self, list: &[&'static str]) -> Vec<(&'static str, u64)> {
        let mut all: Vec<_> = list.iter().map(|what| (*what, self.count(what))).collect();
        all.sort_by_key(|(_, count)| *count);
        all
    }

    /// What of a list did not happen as often as it has to in so many worlds.
    #[must_use]
    pub fn missing(&self, list: &[&'static str], seeds: u64) -> Vec<(&'static str, u64)> {
        let all = self.required(list).into_iter();
        all.take_while(|(_, count)| *count < bound(seeds)).collect()
    }
}

/// How often each kind has to happen in so many worlds; at least once in any number.
#[must_use]
pub fn bound(seeds: u64) -> u64 {
    (seeds * BOUND_PER_MILLION / 1_000_000).max(1)
}

/// The name of an error among the counters.
pub(crate) fn error_name(error: &TransferError) -> &'static str {
    match error {
        TransferError::Http(429) => "error http throttled",
        TransferError::Http(408 | 500..=599) => "error http transient",
        TransferError::Http(_) => "error http permanent",
        TransferError::Timeout => "error timeout",
        TransferError::Connection => "error connection",
        TransferError::Throttled => "error throttled",
        TransferError::ChecksumMismatch => "error checksum_mismatch",
        TransferError::CorruptChunk(_) => "error corrupt_chunk",
        TransferError::OpenFailed { .. } => "error open_failed",
        TransferError::Panic(_) => "error panic",
        TransferError::Cancelled => "error cancelled",
        TransferError::ClockSkew => "error clock_skew",
        TransferError::ExpiredToken => "error expired_token",
        TransferError::WriteConflict => "error write_conflict",
        TransferError::Other => "error other",
    }
}
