//! Sealed segments of a run's history: their objects, and the machine that brings those of one run into the store, in order.
//!
//! Events go in, effects come out, in the order in which they are to be performed. Time is an argument.
//!
//! ```text
//! sealed, listed -> AskPermit -> Read -> Put (create only) -> stored ------------------------> GivePermitBack, Acknowledge
//!                                          \-> exists -> Examine -> same content -------------/
//!                                                           \-> other -> Read -> Put (If-Match)/
//! purge -> Abort -> Catalog -> wait -> Delete (by key, of a fresh catalog) -> Sweep (by prefix) -> TellHost
//! ```
//!
//! Why a put may be repeated without thought: key and content of a segment follow from the host's committed state alone, so whoever repeats
//! an upload finds what he would have written.

mod codec;
mod event;
mod machine;
mod purge;
mod upload;
mod window;

pub use codec::{
    Existing, HistorySegment, decode, encode, encode_header, encoded_len, judge_existing,
};
pub use event::{Effect, Event, Examined, Outcome, Precondition, Put, Read, Stored};
pub use machine::{Machine, Options, Status};
pub use purge::{PURGE_RETRY_MS, may_sweep};
pub use window::{Backlog, Listing, Segment, WINDOW};

/// How long retention leaves a run alone that still has a sealed segment, in milliseconds.
pub const POSTPONE_RETENTION_MS: u64 = 3_600_000;

/// Whether retention of a run has to be put off: a sealed segment that is not acknowledged would be lost with its run. `sealed`: how many
/// there are; `None` where that is not known.
#[must_use]
pub fn postpone_retention(sealed: Option<u64>) -> bool {
    sealed != Some(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retention_waits_for_sealed_segments_and_where_nothing_is_known() {
        assert!(postpone_retention(Some(1)));
        assert!(postpone_retention(None));
        assert!(!postpone_retention(Some(0)));
    }
}
