//! Edits between the speculative manifest and the persisted one, and the persist that takes them across.

use std::sync::Arc;

use super::{Effect, Machine, PersistError};
use crate::manifest::{Edit, Manifest};
use crate::units::{Offset, Revision, TimestampMs};

/// An edit that has been applied to the speculative manifest and is not persisted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pending {
    pub(super) edit: Edit,
    pub(super) origin: Origin,
}

/// What made an edit. Retention has to know what stands between the persisted manifest, which it looks at, and the speculative
/// one, which it changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// A fragment was appended.
    Fragment,
    /// Entries moved into a group.
    Rebalance,
    /// Entries were dropped.
    Retention,
    /// Everything was dropped.
    Reset,
}

impl Pending {
    /// By reference: a persistent vector copies 64 elements when one is added to a shared one.
    pub(super) fn new(edit: Edit, origin: Origin) -> Arc<Self> {
        Arc::new(Self { edit, origin })
    }

    /// Bytes of the fragment that the edit appends; 0 for other edits.
    pub(super) fn appended_bytes(&self) -> u64 {
        match self.origin {
            Origin::Fragment => self.edit.entries.iter().map(|entry| entry.size).sum(),
            Origin::Rebalance | Origin::Retention | Origin::Reset => 0,
        }
    }
}

/// A persist in flight: a snapshot of the speculative manifest, and the edits that led to it.
#[derive(Debug, Clone)]
pub(super) struct Persist {
    pub(super) manifest: Manifest,
    pub(super) edits: imbl::Vector<Arc<Pending>>,
    /// How many of the edits are fragments.
    pub(super) fragments: u64,
}

/// Somebody who waits for an offset to be persisted.
#[derive(Debug, Clone)]
pub(super) struct Waiter<T> {
    pub(super) offset: Offset,
    pub(super) from: T,
}

impl<T: Clone> Machine<T> {
    /// The snapshot is in the object store and in the metadata store, the latter under `revision`. Without a persist in flight the
    /// event is an old one and changes nothing.
    ///
    /// Effects, in this order: `UpdateRange`, `Broadcast`, `EvaluateRetention` (not while entries are moving into a group or have moved
    /// since the snapshot), `CancelPersistTimer`, `ReplyWaiters` if somebody is satisfied; then `StartPersist` where enough fragments
    /// came meanwhile, or else `StartPersistTimer` where edits wait.
    pub fn persist_complete(&mut self, revision: Revision, now: TimestampMs) -> Vec<Effect<T>> {
        let Some(persist) = self.persist.take() else {
            return Vec::new();
        };
        self.persisted = persist.manifest;
        self.persisted.revision = revision;
        self.manifest.revision = revision;
        self.last_persist = now;
        self.persist_failures = 0;
        self.reset_unpersisted = false;
        let mut effects = vec![
            Effect::UpdateRange {
                first_offset: self.persisted.first_offset,
                next_offset: self.persisted.next_offset,
            },
            Effect::Broadcast {
                edits: edits(&persist.edits),
            },
        ];
        let moved = self
            .edits
            .iter()
            .any(|pending| pending.origin == Origin::Rebalance);
        if self.rebalance.is_none() && !moved {
            effects.push(Effect::EvaluateRetention);
        }
        effects.push(Effect::CancelPersistTimer);
        effects.extend(self.reply_to_satisfied());
        self.persist_or_arm(&mut effects);
        effects
    }

    /// The snapshot is not persisted, or nobody knows. Its edits wait again, in front of those that came since.
    ///
    /// - `Conflict`: `Reinitialize`, nothing else.
    /// - `NotFound`: `Stop` where the stream had metadata before (it was deleted), `Reinitialize` where it did not.
    /// - `Other`: the first time since a success, `StartPersist` with a new snapshot, unless a group is being stored or a retention runs; in
    ///   every other case `StartPersistTimer`. Without a persist in flight the event is an old one: no effects.
    pub fn persist_failed(&mut self, error: PersistError) -> Vec<Effect<T>> {
        let was_in_flight = self.take_back();
        match error {
            PersistError::Conflict => vec![Effect::Reinitialize],
            PersistError::NotFound if self.persisted.revision > Revision(0) => vec![Effect::Stop],
            PersistError::NotFound => vec![Effect::Reinitialize],
            PersistError::Other if !was_in_flight => Vec::new(),
            PersistError::Other => {
                self.persist_failures += 1;
                if self.persist_failures == 1 && self.may_persist() {
                    vec![self.start_persist()]
                } else {
                    vec![self.arm_timer()]
                }
            }
        }
    }

    /// The persist timer has fired at `now`. `StartPersist` where edits wait, the last persist is old enough, and nothing is in the way; otherwise
    /// nothing, and the shell arms the timer again while edits wait.
    pub fn tick(&mut self, now: TimestampMs) -> Vec<Effect<T>> {
        // A clock that was set back must not hold persists up until it has caught up.
        self.last_persist = self.last_persist.min(now);
        let age = now.0.abs_diff(self.last_persist.0);
        if self.may_persist() && age >= self.options.persist_interval_ms {
            vec![self.start_persist()]
        } else {
            Vec::new()
        }
    }

    /// `from` wants to be told once `offset` lies below the persisted next offset or is equal to it: at once, where that is so.
    pub fn await_offset(&mut self, offset: Offset, from: T) -> Vec<Effect<T>> {
        // The tier that is about to be discarded must not answer for the one that takes its place.
        if !self.reset_unpersisted && offset <= self.persisted.next_offset {
            return vec![Effect::ReplyWaiters {
                waiters: vec![from],
            }];
        }
        self.waiters.push_back(Waiter { offset, from });
        Vec::new()
    }

    fn reply_to_satisfied(&mut self) -> Option<Effect<T>> {
        let next = self.persisted.next_offset;
        if self.waiters.iter().all(|waiter| waiter.offset > next) {
            return None;
        }
        let (satisfied, rest): (Vec<_>, Vec<_>) = self
            .waiters
            .iter()
            .cloned()
            .partition(|waiter| waiter.offset <= next);
        self.waiters = rest.into_iter().collect();
        let waiters = satisfied.into_iter().map(|waiter| waiter.from).collect();
        Some(Effect::ReplyWaiters { waiters })
    }

    /// Whether a persist could start now.
    fn may_persist(&self) -> bool {
        self.persist.is_none()
            && self.rebalance.is_none()
            && self.retention.is_none()
            && !self.reset_waits
            && !self.edits.is_empty()
    }

    /// `StartPersist` where enough fragments wait; otherwise `StartPersistTimer` where edits wait.
    pub(super) fn persist_or_arm(&mut self, effects: &mut Vec<Effect<T>>) {
        if self.may_persist() && self.since_persist >= self.options.persist_threshold {
            effects.push(self.start_persist());
        } else {
            self.arm_if_edits_wait(effects);
        }
    }

    pub(super) fn arm_if_edits_wait(&self, effects: &mut Vec<Effect<T>>) {
        if !self.edits.is_empty() {
            effects.push(self.arm_timer());
        }
    }

    pub(super) fn arm_timer(&self) -> Effect<T> {
        Effect::StartPersistTimer {
            ms: self.options.persist_interval_ms,
        }
    }

    pub(super) fn start_persist(&mut self) -> Effect<T> {
        let taken = std::mem::take(&mut self.edits);
        let effect = Effect::StartPersist {
            manifest: self.manifest.clone(),
            epoch: self.options.epoch,
            expected: self.persisted.revision,
            edits: edits(&taken),
        };
        self.persist = Some(Persist {
            manifest: self.manifest.clone(),
            edits: taken,
            fragments: std::mem::take(&mut self.since_persist),
        });
        effect
    }

    /// Ends the persist in flight without success; false where there is none.
    fn take_back(&mut self) -> bool {
        let Some(persist) = self.persist.take() else {
            return false;
        };
        let newer = std::mem::replace(&mut self.edits, persist.edits);
        self.edits.extend(newer);
        self.since_persist += persist.fragments;
        true
    }

    /// Every edit between the persisted manifest and the speculative one, oldest first.
    pub(super) fn unpersisted(&self) -> impl Iterator<Item = &Pending> {
        self.persist
            .iter()
            .flat_map(|persist| persist.edits.iter())
            .chain(self.edits.iter())
            .map(Arc::as_ref)
    }
}

fn edits(pending: &imbl::Vector<Arc<Pending>>) -> Vec<Edit> {
    pending.iter().map(|pending| pending.edit.clone()).collect()
}
