//! What a history machine is told, and what it wants done.

use super::window::Listing;
use crate::error::ErrorClass;
use crate::units::TimestampMs;

/// A fact. Answers carry the attempt that they answer; an answer to another attempt than the current one changes nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The host has sealed a segment of this run.
    Sealed {
        /// Payload in bytes.
        size: u64,
        /// When.
        sealed: TimestampMs,
    },
    /// Answers [`Effect::List`].
    Listed {
        /// Of the effect.
        attempt: u64,
        /// What the index has, from the run's beginning.
        listing: Listing,
    },
    /// A scan of the whole index has come past this run; also says that it has nothing pending. Ends what a permanent failure has blocked.
    Rescanned {
        /// What the index has, the sums to the run's end.
        listing: Listing,
    },
    /// Answers [`Effect::AskPermit`].
    Permit {
        /// Of the effect.
        attempt: u64,
    },
    /// Answers [`Effect::Read`].
    Read {
        /// Of the effect.
        attempt: u64,
        /// What came of it.
        read: Read,
    },
    /// Answers [`Effect::Put`].
    Put {
        /// Of the effect.
        attempt: u64,
        /// What came of it.
        put: Put,
    },
    /// Answers [`Effect::Examine`].
    Examined {
        /// Of the effect.
        attempt: u64,
        /// What is there.
        examined: Examined,
    },
    /// Answers [`Effect::Acknowledge`]: it is in the host's committed state.
    Acknowledged {
        /// Of the effect.
        attempt: u64,
    },
    /// Answers [`Effect::Catalog`].
    Catalog {
        /// Of the effect.
        attempt: u64,
        /// Whether the run ever had segment state. Which segments is for whoever deletes them: there may be a hundred thousand.
        had_segments: bool,
    },
    /// Answers [`Effect::Delete`], [`Effect::Sweep`] and [`Effect::TellHost`]: all of it is done.
    Done {
        /// Of the effect.
        attempt: u64,
    },
    /// Answers any effect with an attempt: the run is gone, or is being purged.
    Gone {
        /// Of the effect.
        attempt: u64,
    },
    /// Answers any effect with an attempt.
    Failed {
        /// Of the effect.
        attempt: u64,
        /// Transient and throttled ones are repeated after a while, permanent ones with the next scan.
        class: ErrorClass,
        /// Evenly distributed over all values; spreads the delay.
        jitter: u32,
    },
    /// The time of [`Effect::WakeAt`] has come. One that comes too early changes nothing.
    Tick,
    /// The host wants everything of this run deleted.
    Purge,
}

/// What came of reading a segment from the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Read {
    /// The body is there, and stays until it is put or given up.
    Ready,
    /// The segment needs no upload any more: somebody else's acknowledgment is in the committed state.
    NotSealed,
}

/// What came of a put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Put {
    /// Stored.
    Stored {
        /// CRC-32/IEEE of the payload.
        crc: u32,
        /// Length of the object in bytes.
        size: u64,
    },
    /// A create-only put has found an object under the key.
    Exists {
        /// CRC-32/IEEE of the payload that was to be stored.
        crc: u32,
        /// Its length in bytes.
        payload_len: u64,
    },
    /// A replacing put has found another object than the one that was to be replaced, or none.
    Changed,
}

/// What an object under a segment's key turned out to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Examined {
    /// It decodes, and holds the same content.
    Same {
        /// Its length in bytes.
        size: u64,
    },
    /// It is something else, or damaged.
    Other {
        /// Its entity tag.
        etag: String,
    },
    /// It is gone meanwhile.
    Vanished,
}

/// How a segment came to be in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stored {
    /// By this put.
    Uploaded,
    /// It was there.
    AlreadyPresent,
    /// In place of something else.
    Replaced,
}

/// What is counted of uploads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// A segment is in the store.
    Stored(Stored),
    /// Something failed, and is repeated after a while.
    RetryableError,
    /// Something failed, and is repeated with the next scan.
    PermanentError,
    /// The run was found to be gone, or to be purged.
    Gone,
}

/// When a put may take effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Precondition {
    /// While there is no object under the key.
    Absent,
    /// While the object there has this entity tag.
    Matches(String),
}

/// An order. Those with an attempt are to be answered, once, with an event of the same attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Read the host's index from this run's beginning.
    List {
        /// For the answer.
        attempt: u64,
    },
    /// Wait for a permit to hold a body.
    AskPermit {
        /// For the answer.
        attempt: u64,
    },
    /// The permit is not needed any more, nor the wait for it.
    GivePermitBack,
    /// Read this segment from the host.
    Read {
        /// For the answer.
        attempt: u64,
        /// Which.
        seq: u64,
    },
    /// Encode the body that was read, put it, and let go of it.
    Put {
        /// For the answer.
        attempt: u64,
        /// Which.
        seq: u64,
        /// When it may take effect.
        when: Precondition,
    },
    /// Fetch the object under the segment's key and compare. No body of one's own is held meanwhile.
    Examine {
        /// For the answer.
        attempt: u64,
        /// Which.
        seq: u64,
        /// CRC-32/IEEE of the payload that it should hold.
        crc: u32,
        /// Its length in bytes.
        payload_len: u64,
    },
    /// An object that is not the segment's is about to be replaced: an error for the log, and counted.
    ReportMismatch {
        /// Of the segment.
        seq: u64,
    },
    /// Propose the acknowledgment to the host.
    Acknowledge {
        /// For the answer.
        attempt: u64,
        /// Which.
        seq: u64,
        /// CRC-32/IEEE of the payload.
        crc: u32,
        /// Length of the object in bytes.
        size: u64,
        /// How it came to be there.
        stored: Stored,
    },
    /// Send a tick then. Replaces an earlier one.
    WakeAt {
        /// By the clock of the events.
        ms: u64,
    },
    /// Something to be counted.
    Count {
        /// What.
        outcome: Outcome,
        /// Bytes that were sent.
        bytes: u64,
    },
    /// End all that is under way for this run: readers, requests, acknowledgments. Nothing of it may be started any more afterwards.
    Abort,
    /// Ask the host whether the run ever had segments.
    Catalog {
        /// For the answer.
        attempt: u64,
    },
    /// Delete the objects of all segments that the host's catalog has now, by key. Where it has none any more there is nothing to do; a run
    /// that is gone meanwhile is answered with [`Event::Gone`].
    Delete {
        /// For the answer.
        attempt: u64,
    },
    /// Delete whatever else lies under the run's prefix.
    Sweep {
        /// For the answer.
        attempt: u64,
    },
    /// Tell the host that nothing of the run is left.
    TellHost {
        /// For the answer.
        attempt: u64,
    },
}
