//! A machine under test, and the effects it should have, in short.

use std::sync::Arc;

use stream_s3_core::error::TransferError;
use stream_s3_core::invariants;
use stream_s3_core::manifest::{Edit, Entry, EntryKind, Manifest};
use stream_s3_core::replica_reader::{Effect, Event, Machine, Options, Refused, Status};
use stream_s3_core::units::{Epoch, Offset, Revision, TimestampMs, TransferId, Uid};

use crate::support::{entry, fragment, manifest_of, size};

pub(crate) type Effects = Vec<Effect<&'static str>>;

pub(crate) const OPTIONS: Options = Options {
    epoch: Epoch(3),
    persist_threshold: 2,
    persist_interval_ms: 2_000,
    rebalance_threshold: 100,
};

pub(crate) const TIMER: Effect<&str> = Effect::StartPersistTimer { ms: 2_000 };

/// A machine, and how often it was asked.
pub(crate) struct Rig {
    pub(crate) machine: Machine<&'static str>,
}

impl Rig {
    pub(crate) fn new(manifest: Manifest, options: Options) -> Self {
        let (machine, effects) = Machine::init(manifest, options, TimestampMs(1_000)).unwrap();
        assert_eq!(effects, []);
        Self { machine }
    }

    pub(crate) fn empty() -> Self {
        Self::new(Manifest::default(), OPTIONS)
    }

    pub(crate) fn with(options: Options) -> Self {
        Self::new(Manifest::default(), options)
    }

    /// On a manifest of five fragments of ten records.
    pub(crate) fn resumed() -> Self {
        Self::new(
            manifest_of(&[(0, 10), (10, 20), (20, 30), (30, 40), (40, 50)], 7),
            OPTIONS,
        )
    }

    /// Every event goes through here, so that every state is checked.
    pub(crate) fn on(&mut self, event: Event<&'static str>) -> Effects {
        let effects = self.machine.handle(event).unwrap();
        invariants::machine(&self.machine).unwrap();
        effects
    }

    pub(crate) fn refused(&mut self, event: Event<&'static str>) -> Refused {
        let before = self.machine.status();
        let refused = self.machine.handle(event).unwrap_err();
        assert_eq!(
            self.machine.status(),
            before,
            "a refused event changes nothing"
        );
        invariants::machine(&self.machine).unwrap();
        refused
    }

    /// The fragment `[first, next)` is cut; its id is its first offset.
    pub(crate) fn cut(&mut self, first: u64, next: u64) -> Effects {
        self.on(Event::FragmentCut {
            id: TransferId(first),
            fragment: fragment(first, next),
            detail: "meta",
        })
    }

    /// The fragment at `first` is stored; its uid is its first offset.
    pub(crate) fn stored(&mut self, first: u64) -> Effects {
        let uid = Uid(u32::try_from(first).unwrap());
        self.on(Event::TransferComplete {
            id: TransferId(first),
            uid,
        })
    }

    pub(crate) fn failed(&mut self, first: u64, error: TransferError) -> Effects {
        self.on(Event::TransferFailed {
            id: TransferId(first),
            error,
            reason: "why",
        })
    }

    pub(crate) fn persisted(&mut self, revision: u64, now: i64) -> Effects {
        self.on(Event::PersistComplete {
            revision: Revision(revision),
            now: TimestampMs(now),
        })
    }

    pub(crate) fn tick(&mut self, now: i64) -> Effects {
        self.on(Event::Tick(TimestampMs(now)))
    }

    pub(crate) fn waits(&mut self, offset: u64, from: &'static str) -> Effects {
        self.on(Event::AwaitOffset {
            offset: Offset(offset),
            from,
        })
    }

    /// Cuts and stores fragments of ten records, `from..to` counted in fragments; the effects of the last one.
    pub(crate) fn add(&mut self, from: u64, to: u64) -> Effects {
        let mut effects = Vec::new();
        for number in from..to {
            self.cut(number * 10, number * 10 + 10);
            effects = self.stored(number * 10);
        }
        effects
    }

    pub(crate) fn status(&self) -> Status {
        self.machine.status()
    }
}

pub(crate) fn submit(first: u64) -> Effect<&'static str> {
    Effect::SubmitTransfer {
        id: TransferId(first),
        detail: "meta",
    }
}

/// The edit that appends `[first, next)` where `before` entries stand.
pub(crate) fn appended(first: u64, next: u64, before: u64) -> Edit {
    let oldest = if before == 0 {
        entry(first, next)
    } else {
        entry(0, 10)
    };
    Edit {
        first_offset: oldest.first_offset,
        first_timestamp: oldest.first_timestamp,
        first_last_timestamp: oldest.last_timestamp,
        next_offset: Some(Offset(next)),
        size: i128::from(size(first, next)),
        entries: Arc::from([entry(first, next)]),
        pos: before * 34,
        len: 0,
    }
}

pub(crate) fn start_persist(
    manifest: &Manifest,
    expected: u64,
    edits: Vec<Edit>,
) -> Effect<&'static str> {
    Effect::StartPersist {
        manifest: manifest.clone(),
        epoch: Epoch(3),
        expected: Revision(expected),
        edits,
    }
}

pub(crate) fn range(first: u64, next: u64) -> Effect<&'static str> {
    Effect::UpdateRange {
        first_offset: Offset(first),
        next_offset: Offset(next),
    }
}

pub(crate) const GROUPING: Options = Options {
    rebalance_threshold: 3,
    persist_threshold: 100,
    ..OPTIONS
};

pub(crate) fn upload(kind: EntryKind, entries: Vec<Entry>, index: u64) -> Effect<&'static str> {
    let len = entries.len() as u64 * 34;
    Effect::UploadGroup {
        kind,
        entries,
        pos: index * 34,
        len,
    }
}
