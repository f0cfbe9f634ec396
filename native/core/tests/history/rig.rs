//! A machine with a memory for attempts.

use stream_s3_core::decisions::retry::RetryDelays;
use stream_s3_core::error::ErrorClass;
use stream_s3_core::history::Effect::{
    Abort, Acknowledge, AskPermit, Catalog, Count, Delete, Examine, GivePermitBack, List, Put,
    Read, ReportMismatch, Sweep, TellHost, WakeAt,
};
use stream_s3_core::history::{
    Backlog, Effect, Event, Examined, Listing, Machine, Options, Outcome, Put as PutResult,
    Read as ReadResult, Segment, Stored,
};
use stream_s3_core::units::TimestampMs;

pub(crate) const OPTIONS: Options = Options {
    delays: RetryDelays {
        transient_ms: 10,
        transient_max_ms: 40,
        permanent_ms: 100,
        permanent_max_ms: 1_000,
    },
    purge_wait_ms: 60_000,
};
pub(crate) const ETAG: &str = "\"etag\"";

pub(crate) fn segment(seq: u64) -> Segment {
    Segment {
        seq,
        size: 10 * seq,
        sealed: TimestampMs(seq as i64),
    }
}

pub(crate) fn listing(seqs: &[u64]) -> Listing {
    Listing {
        first: seqs.iter().copied().map(segment).collect(),
        beyond: Backlog::default(),
    }
}

/// A machine whose answers always fit the last attempt.
pub(crate) struct Rig {
    pub(crate) machine: Machine,
    pub(crate) now: u64,
    /// Of the last effect that has one.
    pub(crate) attempt: u64,
}

impl Rig {
    pub(crate) fn new() -> Self {
        Self {
            machine: Machine::new(OPTIONS),
            now: 0,
            attempt: 0,
        }
    }

    /// One that was told by a scan of these segments.
    pub(crate) fn scanned(seqs: &[u64]) -> Self {
        let mut rig = Self::new();
        rig.tell(Event::Rescanned {
            listing: listing(seqs),
        });
        rig
    }

    /// The same, with the first segment's body read.
    pub(crate) fn ready(seqs: &[u64]) -> Self {
        let mut rig = Self::scanned(seqs);
        rig.permit();
        rig.read();
        rig
    }

    pub(crate) fn tell(&mut self, event: Event) -> Vec<Effect> {
        let effects = self.machine.handle(self.now, event);
        for effect in &effects {
            self.attempt = match effect {
                List { attempt }
                | AskPermit { attempt }
                | Read { attempt, .. }
                | Put { attempt, .. }
                | Examine { attempt, .. }
                | Acknowledge { attempt, .. }
                | Catalog { attempt }
                | Delete { attempt }
                | Sweep { attempt }
                | TellHost { attempt } => *attempt,
                GivePermitBack | ReportMismatch { .. } | WakeAt { .. } | Count { .. } | Abort => {
                    self.attempt
                }
            };
        }
        effects
    }

    pub(crate) fn permit(&mut self) -> Vec<Effect> {
        let attempt = self.attempt;
        self.tell(Event::Permit { attempt })
    }

    pub(crate) fn read(&mut self) -> Vec<Effect> {
        let attempt = self.attempt;
        self.tell(Event::Read {
            attempt,
            read: ReadResult::Ready,
        })
    }

    pub(crate) fn put(&mut self, put: PutResult) -> Vec<Effect> {
        let attempt = self.attempt;
        self.tell(Event::Put { attempt, put })
    }

    pub(crate) fn stored(&mut self) -> Vec<Effect> {
        self.put(PutResult::Stored { crc: 7, size: 99 })
    }

    pub(crate) fn exists(&mut self) -> Vec<Effect> {
        self.put(PutResult::Exists {
            crc: 7,
            payload_len: 50,
        })
    }

    pub(crate) fn examined(&mut self, examined: Examined) -> Vec<Effect> {
        let attempt = self.attempt;
        self.tell(Event::Examined { attempt, examined })
    }

    pub(crate) fn acknowledged(&mut self) -> Vec<Effect> {
        let attempt = self.attempt;
        self.tell(Event::Acknowledged { attempt })
    }

    pub(crate) fn fail(&mut self, class: ErrorClass) -> Vec<Effect> {
        let attempt = self.attempt;
        self.tell(Event::Failed {
            attempt,
            class,
            jitter: u32::MAX,
        })
    }

    pub(crate) fn done(&mut self) -> Vec<Effect> {
        let attempt = self.attempt;
        self.tell(Event::Done { attempt })
    }

    pub(crate) fn gone(&mut self) -> Vec<Effect> {
        let attempt = self.attempt;
        self.tell(Event::Gone { attempt })
    }

    pub(crate) fn catalog(&mut self, had_segments: bool) -> Vec<Effect> {
        let attempt = self.attempt;
        self.tell(Event::Catalog {
            attempt,
            had_segments,
        })
    }

    pub(crate) fn phase(&self) -> &'static str {
        self.machine.status().phase
    }
}

pub(crate) fn count(outcome: Outcome, bytes: u64) -> Effect {
    Count { outcome, bytes }
}

pub(crate) fn acknowledge(attempt: u64, seq: u64, stored: Stored) -> Effect {
    Acknowledge {
        attempt,
        seq,
        crc: 7,
        size: 99,
        stored,
    }
}
