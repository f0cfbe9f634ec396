//! The machine once more, as simple as can be: plain vectors, everything worked out anew at every step, no thought for cost. It follows the
//! rules, not the code, and both have to give the same effects and the same manifests.

use std::sync::Arc;

use stream_s3_core::error::TransferError;
use stream_s3_core::fragment::Fragment;
use stream_s3_core::manifest::{Edit, Entry, EntryKind, Manifest};
use stream_s3_core::replica_reader::{Effect, Event, Options, PersistError, ResetPersist};
use stream_s3_core::units::{Offset, Revision, TimestampMs, TransferId, Uid};

use crate::support::{Groups, run};

pub(crate) type Term = u32;
pub(crate) type Effects = Vec<Effect<Term>>;

struct Transfer {
    id: TransferId,
    fragment: Fragment,
    detail: Term,
    uid: Option<Uid>,
}

/// A manifest as a header and a vector.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Plain {
    first_offset: Offset,
    first_timestamp: TimestampMs,
    first_last_timestamp: TimestampMs,
    pub(crate) next_offset: Offset,
    total_size: u128,
    pub(crate) entries: Vec<Entry>,
}

impl Plain {
    pub(crate) fn of(manifest: &Manifest) -> Self {
        Self {
            first_offset: manifest.first_offset,
            first_timestamp: manifest.first_timestamp,
            first_last_timestamp: manifest.first_last_timestamp,
            next_offset: manifest.next_offset,
            total_size: manifest.total_size,
            entries: manifest.entries.iter().copied().collect(),
        }
    }

    fn manifest(&self, revision: Revision) -> Manifest {
        Manifest {
            first_offset: self.first_offset,
            first_timestamp: self.first_timestamp,
            first_last_timestamp: self.first_last_timestamp,
            next_offset: self.next_offset,
            total_size: self.total_size,
            revision,
            entries: self.entries.iter().copied().collect(),
        }
    }

    fn edit(&self) -> Edit {
        Edit {
            first_offset: self.first_offset,
            first_timestamp: self.first_timestamp,
            first_last_timestamp: self.first_last_timestamp,
            next_offset: None,
            size: 0,
            entries: Arc::from([]),
            pos: 0,
            len: 0,
        }
    }
}

/// Edits, and which of them are rebalances.
type Edits = Vec<(Edit, bool)>;

pub(crate) struct Model {
    options: Options,
    manifest: Plain,
    persisted: Plain,
    revision: Revision,
    transfers: Vec<Transfer>,
    edits: Edits,
    since: u64,
    /// The snapshot, its edits, and how many of them are fragments.
    persist: Option<(Plain, Edits, u64)>,
    failures: u64,
    last: i64,
    rebalance: Option<(usize, EntryKind)>,
    retention: bool,
    waiters: Vec<(Offset, Term)>,
    /// The persisted manifest is to be discarded.
    discards: bool,
    /// Discarding waits for a fragment.
    holds: bool,
}

impl Model {
    pub(crate) fn new(manifest: &Manifest, options: Options, now: TimestampMs) -> Self {
        Self {
            options,
            manifest: Plain::of(manifest),
            persisted: Plain::of(manifest),
            revision: manifest.revision,
            transfers: Vec::new(),
            edits: Vec::new(),
            since: 0,
            persist: None,
            failures: 0,
            last: now.0,
            rebalance: None,
            retention: false,
            waiters: Vec::new(),
            discards: false,
            holds: false,
        }
    }

    /// A model that discards `old` and begins anew at `at`; the effects of that.
    pub(crate) fn reset(
        old: &Manifest,
        at: Offset,
        when: ResetPersist,
        options: Options,
        now: TimestampMs,
    ) -> (Self, Effects) {
        let mut model = Self::new(old, options, now);
        let emptied = Plain::of(&Manifest::empty_at(at, old.revision));
        let mut edit = emptied.edit();
        edit.next_offset = Some(at);
        edit.size = -i128::try_from(old.total_size).unwrap();
        edit.len = old.entries.len() as u64 * 34;
        model.manifest = emptied;
        model.edits.push((edit, false));
        model.discards = true;
        let effects = match when {
            ResetPersist::AtOnce => vec![model.start()],
            ResetPersist::WithFirstFragment => {
                model.holds = true;
                vec![]
            }
        };
        (model, effects)
    }

    pub(crate) fn manifests(&self) -> (Manifest, Manifest) {
        (
            self.manifest.manifest(self.revision),
            self.persisted.manifest(self.revision),
        )
    }

    /// The effects of an event. `groups` tells what groups hold.
    pub(crate) fn on(&mut self, event: &Event<Term>, groups: &Groups) -> Effects {
        match event {
            Event::FragmentCut {
                id,
                fragment,
                detail,
            } => self.cut(*id, *fragment, *detail),
            Event::TransferComplete { id, uid } => self.complete(*id, *uid),
            Event::TransferFailed { id, error, reason } => self.failed(*id, error, *reason),
            Event::GroupUploadComplete(uid) => self.grouped(*uid),
            Event::GroupUploadFailed(error) => self.not_grouped(error),
            Event::PersistComplete { revision, now } => self.persisted(*revision, *now),
            Event::PersistFailed(error) => self.not_persisted(*error),
            Event::Tick(now) => self.tick(now.0),
            Event::AwaitOffset { offset, from } => self.wait(*offset, *from),
            Event::RetentionStarted => {
                self.retention = true;
                vec![]
            }
            Event::RetentionComplete(edit) => {
                self.retain(edit, groups);
                self.retention = false;
                let mut effects = self.rebalance();
                effects.extend(self.persist_or_timer());
                effects
            }
            Event::RetentionFailed => {
                self.retention = false;
                let mut effects = self.rebalance();
                effects.extend(self.timer_if_edits());
                effects
            }
        }
    }

    fn cut(&mut self, id: TransferId, fragment: Fragment, detail: Term) -> Effects {
        let mut effects = vec![Effect::SubmitTransfer { id, detail }];
        if self.transfers.is_empty() && self.edits.is_empty() {
            effects.push(self.timer());
        }
        self.transfers.push(Transfer {
            id,
            fragment,
            detail,
            uid: None,
        });
        effects
    }

    fn complete(&mut self, id: TransferId, uid: Uid) -> Effects {
        match self.transfers.iter_mut().find(|transfer| transfer.id == id) {
            Some(transfer) if transfer.uid.is_none() => transfer.uid = Some(uid),
            _ => return vec![],
        }
        let mut applied = false;
        while let Some(Transfer {
            fragment,
            uid: Some(uid),
            ..
        }) = self.transfers.first()
        {
            let (fragment, uid) = (*fragment, *uid);
            if !self.manifest.entries.is_empty()
                && fragment.first_offset != self.manifest.next_offset
            {
                break;
            }
            self.transfers.remove(0);
            self.append(fragment, uid);
            applied = true;
        }
        if !applied {
            return vec![];
        }
        let mut effects = self.rebalance();
        effects.extend(self.persist_or_timer());
        effects
    }

    fn append(&mut self, fragment: Fragment, uid: Uid) {
        if self.manifest.entries.is_empty() {
            self.manifest.first_offset = fragment.first_offset;
            self.manifest.first_timestamp = fragment.first_timestamp;
            self.manifest.first_last_timestamp = fragment.last_timestamp;
        }
        let entry = Entry {
            first_offset: fragment.first_offset,
            first_timestamp: fragment.first_timestamp,
            last_timestamp: fragment.last_timestamp,
            kind: EntryKind::Fragment,
            size: fragment.size,
            uid,
        };
        let mut edit = self.manifest.edit();
        edit.next_offset = Some(fragment.next_offset);
        edit.size = i128::from(fragment.size);
        edit.entries = Arc::from([entry]);
        edit.pos = self.manifest.entries.len() as u64 * 34;
        self.manifest.next_offset = fragment.next_offset;
        self.manifest.total_size += u128::from(fragment.size);
        self.manifest.entries.push(entry);
        self.edits.push((edit, false));
        self.since += 1;
        self.holds = false;
    }

    fn failed(&self, id: TransferId, error: &TransferError, reason: Term) -> Effects {
        let Some(transfer) = self
            .transfers
            .iter()
            .find(|transfer| transfer.id == id && transfer.uid.is_none())
        else {
            return vec![];
        };
        let detail = transfer.detail;
        vec![if error.is_transient() {
            Effect::ResubmitTransfer { id, detail }
        } else {
            Effect::ResubmitTransferDelayed { id, detail, reason }
        }]
    }

    fn rebalance(&mut self) -> Effects {
        if self.rebalance.is_some() || self.retention {
            return vec![];
        }
        self.rebalance = run(&self.manifest.entries, self.options.rebalance_threshold);
        self.upload().into_iter().collect()
    }

    fn upload(&self) -> Option<Effect<Term>> {
        let (start, kind) = self.rebalance?;
        let threshold = self.options.rebalance_threshold;
        Some(Effect::UploadGroup {
            kind,
            entries: self.manifest.entries[start..start + threshold].to_vec(),
            pos: start as u64 * 34,
            len: threshold as u64 * 34,
        })
    }

    fn grouped(&mut self, uid: Uid) -> Effects {
        let Some((start, kind)) = self.rebalance.take() else {
            return vec![];
        };
        let threshold = self.options.rebalance_threshold;
        let moved: Vec<Entry> = self
            .manifest
            .entries
            .drain(start..start + threshold)
            .collect();
        let (first, last) = (moved[0], moved[threshold - 1]);
        let entry = Entry {
            last_timestamp: last.last_timestamp,
            kind,
            size: 0,
            uid,
            ..first
        };
        self.manifest.entries.insert(start, entry);
        let mut edit = self.manifest.edit();
        edit.entries = Arc::from([entry]);
        edit.pos = start as u64 * 34;
        edit.len = threshold as u64 * 34;
        self.edits.push((edit, true));
        let mut effects = self.rebalance();
        effects.extend(self.persist_or_timer());
        effects
    }

    fn not_grouped(&mut self, error: &TransferError) -> Effects {
        if self.rebalance.is_none() {
            return vec![];
        }
        if error.is_transient() {
            return self.upload().into_iter().collect();
        }
        self.rebalance = None;
        self.persist_or_timer()
    }

    fn may_persist(&self) -> bool {
        self.persist.is_none()
            && self.rebalance.is_none()
            && !self.retention
            && !self.holds
            && !self.edits.is_empty()
    }

    fn persist_or_timer(&mut self) -> Effects {
        if self.may_persist() && self.since >= self.options.persist_threshold {
            vec![self.start()]
        } else {
            self.timer_if_edits()
        }
    }

    fn start(&mut self) -> Effect<Term> {
        let edits = std::mem::take(&mut self.edits);
        let effect = Effect::StartPersist {
            manifest: self.manifest.manifest(self.revision),
            epoch: self.options.epoch,
            expected: self.revision,
            edits: edits.iter().map(|(edit, _)| edit.clone()).collect(),
        };
        self.persist = Some((
            self.manifest.clone(),
            edits,
            std::mem::take(&mut self.since),
        ));
        effect
    }

    fn persisted(&mut self, revision: Revision, now: TimestampMs) -> Effects {
        let Some((manifest, edits, _)) = self.persist.take() else {
            return vec![];
        };
        self.persisted = manifest;
        self.revision = revision;
        self.failures = 0;
        self.discards = false;
        self.last = now.0;
        let mut effects = vec![
            Effect::UpdateRange {
                first_offset: self.persisted.first_offset,
                next_offset: self.persisted.next_offset,
            },
            Effect::Broadcast {
                edits: edits.into_iter().map(|(edit, _)| edit).collect(),
            },
        ];
        if self.rebalance.is_none() && !self.edits.iter().any(|(_, rebalance)| *rebalance) {
            effects.push(Effect::EvaluateRetention);
        }
        effects.push(Effect::CancelPersistTimer);
        let next = self.persisted.next_offset;
        let told: Vec<Term> = self
            .waiters
            .iter()
            .filter(|(offset, _)| *offset <= next)
            .map(|(_, from)| *from)
            .collect();
        self.waiters.retain(|(offset, _)| *offset > next);
        if !told.is_empty() {
            effects.push(Effect::ReplyWaiters { waiters: told });
        }
        effects.extend(self.persist_or_timer());
        effects
    }

    fn not_persisted(&mut self, error: PersistError) -> Effects {
        let in_flight = self.persist.is_some();
        if let Some((_, mut edits, fragments)) = self.persist.take() {
            edits.append(&mut self.edits);
            self.edits = edits;
            self.since += fragments;
        }
        match error {
            PersistError::Conflict => vec![Effect::Reinitialize],
            PersistError::NotFound if self.revision.0 == 0 => vec![Effect::Reinitialize],
            PersistError::NotFound => vec![Effect::Stop],
            PersistError::Other if !in_flight => vec![],
            PersistError::Other => {
                self.failures += 1;
                if self.failures == 1 && self.may_persist() {
                    vec![self.start()]
                } else {
                    vec![self.timer()]
                }
            }
        }
    }

    fn tick(&mut self, now: i64) -> Effects {
        if now < self.last {
            self.last = now;
        }
        let due = now - self.last >= i64::try_from(self.options.persist_interval_ms).unwrap();
        if due && self.may_persist() {
            vec![self.start()]
        } else {
            vec![]
        }
    }

    fn wait(&mut self, offset: Offset, from: Term) -> Effects {
        if !self.discards && offset <= self.persisted.next_offset {
            return vec![Effect::ReplyWaiters {
                waiters: vec![from],
            }];
        }
        self.waiters.push((offset, from));
        vec![]
    }

    /// Works from what is left, fragment by fragment, and never looks at the edit's size or length.
    fn retain(&mut self, edit: &Edit, groups: &Groups) {
        let floor = edit.first_offset;
        if floor <= self.manifest.first_offset {
            return;
        }
        let before = self.manifest.total_size;
        let mut removed = 0;
        while !self.manifest.entries.is_empty() {
            let end = match self.manifest.entries.get(1) {
                Some(next) => next.first_offset,
                None => self.manifest.next_offset,
            };
            if end > floor {
                break;
            }
            self.manifest.entries.remove(0);
            removed += 1;
            if let Some((start, _)) = &mut self.rebalance {
                *start -= 1;
            }
        }
        let left: Vec<Entry> = groups
            .leaves(&self.manifest.entries)
            .into_iter()
            .filter(|leaf| leaf.first_offset >= floor)
            .collect();
        self.manifest.first_offset = floor;
        self.manifest.first_timestamp = left
            .first()
            .map_or(TimestampMs(-1), |leaf| leaf.first_timestamp);
        self.manifest.first_last_timestamp = left
            .first()
            .map_or(TimestampMs(-1), |leaf| leaf.last_timestamp);
        self.manifest.total_size = left.iter().map(|leaf| u128::from(leaf.size)).sum();
        let mut edit = self.manifest.edit();
        edit.len = removed * 34;
        edit.size = -i128::try_from(before - self.manifest.total_size).unwrap();
        self.edits.push((edit, false));
    }

    fn timer(&self) -> Effect<Term> {
        Effect::StartPersistTimer {
            ms: self.options.persist_interval_ms,
        }
    }

    fn timer_if_edits(&self) -> Effects {
        if self.edits.is_empty() {
            vec![]
        } else {
            vec![self.timer()]
        }
    }
}
