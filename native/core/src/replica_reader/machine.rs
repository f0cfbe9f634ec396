//! The machine's state, and the events around fragments and groups.

use std::sync::Arc;

use super::persist::{Origin, Pending, Persist, Waiter};
use super::rebalance::{Rebalance, Runs};
use super::retention::RetentionInFlight;
use super::transfers::Transfers;
use super::{Effect, Event, FragmentError, Options, OptionsError, Refused};
use crate::error::TransferError;
use crate::fragment::Fragment;
use crate::manifest::{Edit, Entry, EntryKind, MAX_ENTRY_SIZE, Manifest, apply_edit};
use crate::units::{Offset, TimestampMs, TransferId, Uid};

/// The replica reader of one stream, as a value. A clone shares everything and costs some reference counts, whatever the number of
/// entries, transfers and edits. `T` is whatever the host wants handed back untouched.
#[derive(Debug, Clone)]
pub struct Machine<T> {
    pub(super) options: Options,
    /// Speculative: what is in the object store, persisted or not.
    pub(super) manifest: Manifest,
    /// What everybody may see.
    pub(super) persisted: Manifest,
    pub(super) transfers: Transfers<T>,
    /// Applied to the speculative manifest, and not taken up by a persist.
    pub(super) edits: imbl::Vector<Arc<Pending>>,
    /// How many of those are fragments.
    pub(super) since_persist: u64,
    pub(super) persist: Option<Persist>,
    /// Since the last success.
    pub(super) persist_failures: u64,
    pub(super) last_persist: TimestampMs,
    /// Of the speculative manifest.
    pub(super) runs: Runs,
    pub(super) rebalance: Option<Rebalance>,
    pub(super) retention: Option<RetentionInFlight>,
    pub(super) waiters: imbl::Vector<Waiter<T>>,
    /// The persisted manifest is one that is to be discarded.
    pub(super) reset_unpersisted: bool,
    /// Its discarding waits for a first fragment.
    pub(super) reset_waits: bool,
}

impl<T: Clone> Machine<T> {
    /// A machine for a stream whose persisted manifest is `manifest`, with its revision. `now` is what the first tick counts from. No effects;
    /// a group that is due is stored after the first fragment. One pass over the entries.
    pub fn init(
        manifest: Manifest,
        options: Options,
        now: TimestampMs,
    ) -> Result<(Self, Vec<Effect<T>>), OptionsError> {
        options.check()?;
        let machine = Self {
            options,
            runs: Runs::of(&manifest.entries),
            persisted: manifest.clone(),
            manifest,
            transfers: Transfers::new(),
            edits: imbl::Vector::new(),
            since_persist: 0,
            persist: None,
            persist_failures: 0,
            last_persist: now,
            rebalance: None,
            retention: None,
            waiters: imbl::Vector::new(),
            reset_unpersisted: false,
            reset_waits: false,
        };
        Ok((machine, Vec::new()))
    }

    /// The speculative manifest: what is in the object store, persisted or not. For the machine's own shell alone.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The persisted manifest: the only one that anybody else may see.
    #[must_use]
    pub fn persisted_manifest(&self) -> &Manifest {
        &self.persisted
    }

    /// Whether entries are moving into a group.
    #[must_use]
    pub fn rebalance_in_flight(&self) -> bool {
        self.rebalance.is_some()
    }

    /// The edits between the persisted manifest and the speculative one, oldest first.
    pub fn unpersisted_edits(&self) -> impl Iterator<Item = &Edit> {
        self.unpersisted().map(|pending| &pending.edit)
    }

    /// The settings it works with.
    #[must_use]
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// A fragment has been cut. It may start anywhere, and is applied only where the manifest ends when its turn comes. `id` must be one that is
    /// not in use.
    ///
    /// Effects: `SubmitTransfer`; `StartPersistTimer` too where no transfer was under way and no edit waits.
    pub fn fragment_cut(
        &mut self,
        id: TransferId,
        fragment: Fragment,
        detail: T,
    ) -> Result<Vec<Effect<T>>, FragmentError> {
        if fragment.next_offset <= fragment.first_offset {
            let (first, next) = (fragment.first_offset, fragment.next_offset);
            return Err(FragmentError::Empty { first, next });
        }
        if fragment.size > MAX_ENTRY_SIZE {
            return Err(FragmentError::TooLarge(fragment.size));
        }
        let idle = self.transfers.is_empty() && self.edits.is_empty();
        if !self.transfers.push(id, fragment, detail.clone()) {
            return Err(FragmentError::IdInUse(id));
        }
        let mut effects = vec![Effect::SubmitTransfer { id, detail }];
        if idle {
            effects.push(self.arm_timer());
        }
        Ok(effects)
    }

    /// A fragment is in the object store under `uid`. Unknown ids and repetitions change nothing.
    ///
    /// Effects: none while an older fragment is missing. Otherwise the fragment and those that waited for it are applied, and there is
    /// `UploadGroup` where a group is due; then `StartPersist` where enough fragments wait and nothing is in the way, else
    /// `StartPersistTimer`.
    pub fn transfer_complete(&mut self, id: TransferId, uid: Uid) -> Vec<Effect<T>> {
        let mut effects = Vec::new();
        if self.transfers.set_stored(id, uid) && self.drain() {
            self.rebalance_if_due(&mut effects);
            self.persist_or_arm(&mut effects);
        }
        effects
    }

    /// An attempt to transfer a fragment has failed. The fragment keeps its place, whatever the reason. Unknown ids and stored fragments: no
    /// effects.
    ///
    /// Effects: `ResubmitTransfer` where the error may pass by itself, else `ResubmitTransferDelayed` with `reason`.
    pub fn transfer_failed(
        &mut self,
        id: TransferId,
        error: &TransferError,
        reason: T,
    ) -> Vec<Effect<T>> {
        match self.transfers.get(id) {
            Some(transfer) if transfer.stored.is_none() => {
                let detail = transfer.detail.clone();
                vec![if error.is_transient() {
                    Effect::ResubmitTransfer { id, detail }
                } else {
                    Effect::ResubmitTransferDelayed { id, detail, reason }
                }]
            }
            Some(_) | None => Vec::new(),
        }
    }

    /// The group is in the object store under `uid`. Its entry takes the place of the entries it lists. Nothing where no group was being
    /// stored.
    ///
    /// Effects: `UploadGroup` where that makes another group due; then `StartPersist` or `StartPersistTimer`, as in
    /// [`transfer_complete`](Self::transfer_complete).
    pub fn group_upload_complete(&mut self, uid: Uid) -> Vec<Effect<T>> {
        let Some(rebalance) = self.rebalance.take() else {
            return Vec::new();
        };
        let mut effects = Vec::new();
        let edit = rebalance.edit(&self.manifest, uid);
        match apply_edit(&edit, &self.manifest) {
            Ok(manifest) => {
                self.replace_manifest(manifest);
                self.edits.push_back(Pending::new(edit, Origin::Rebalance));
                self.rebalance_if_due(&mut effects);
                self.persist_or_arm(&mut effects);
            }
            // Its entries have not moved: appends come after them, and retention moves the position along. If that should ever be wrong,
            // resolving the manifest again is safe; the group is an orphan.
            Err(_) => effects.push(Effect::Reinitialize),
        }
        effects
    }

    /// The group could not be stored. Nothing where no group was being stored.
    ///
    /// Effects: the same `UploadGroup` again where the error may pass by itself. Otherwise the group is given up until the next fragment, and the
    /// persist that it held up goes on: `StartPersist` or `StartPersistTimer`.
    pub fn group_upload_failed(&mut self, error: &TransferError) -> Vec<Effect<T>> {
        let Some(rebalance) = &self.rebalance else {
            return Vec::new();
        };
        if error.is_transient() {
            return vec![rebalance.effect()];
        }
        self.rebalance = None;
        let mut effects = Vec::new();
        self.persist_or_arm(&mut effects);
        effects
    }

    /// Passes an event to the function of its name. Nothing has changed where it is refused.
    pub fn handle(&mut self, event: Event<T>) -> Result<Vec<Effect<T>>, Refused> {
        Ok(match event {
            Event::FragmentCut {
                id,
                fragment,
                detail,
            } => self.fragment_cut(id, fragment, detail)?,
            Event::TransferComplete { id, uid } => self.transfer_complete(id, uid),
            Event::TransferFailed { id, error, reason } => self.transfer_failed(id, &error, reason),
            Event::GroupUploadComplete(uid) => self.group_upload_complete(uid),
            Event::GroupUploadFailed(error) => self.group_upload_failed(&error),
            Event::PersistComplete { revision, now } => self.persist_complete(revision, now),
            Event::PersistFailed(error) => self.persist_failed(error),
            Event::Tick(now) => self.tick(now),
            Event::AwaitOffset { offset, from } => self.await_offset(offset, from),
            Event::RetentionStarted => {
                self.retention_started();
                Vec::new()
            }
            Event::RetentionComplete(edit) => self.retention_complete(&edit)?,
            Event::RetentionFailed => self.retention_failed(),
        })
    }

    /// Applies the stored fragments at the head of the queue, as far as they follow each other; whether there was one.
    fn drain(&mut self) -> bool {
        let mut any = false;
        loop {
            let next = self.appends_at();
            let fits = |fragment: &Fragment| next.is_none_or(|next| fragment.first_offset == next);
            let Some((fragment, uid)) = self.transfers.pop_stored(fits) else {
                return any;
            };
            self.append(&fragment, uid);
            any = true;
        }
    }

    /// Where the next fragment has to start; `None` while there are no entries, when any may be the first.
    fn appends_at(&self) -> Option<Offset> {
        (!self.manifest.entries.is_empty()).then_some(self.manifest.next_offset)
    }

    /// What [`apply_edit`] would do with the edit, without copying.
    fn append(&mut self, fragment: &Fragment, uid: Uid) {
        let entry = Entry {
            first_offset: fragment.first_offset,
            first_timestamp: fragment.first_timestamp,
            last_timestamp: fragment.last_timestamp,
            kind: EntryKind::Fragment,
            size: fragment.size,
            uid,
        };
        let edit = Edit::append(&self.manifest, entry, fragment.next_offset);
        self.manifest.first_offset = edit.first_offset;
        self.manifest.first_timestamp = edit.first_timestamp;
        self.manifest.first_last_timestamp = edit.first_last_timestamp;
        self.manifest.next_offset = fragment.next_offset;
        self.manifest.total_size = self
            .manifest
            .total_size
            .saturating_add(u128::from(entry.size));
        self.manifest.entries.push_back(entry);
        self.runs.push(entry.kind);
        self.edits.push_back(Pending::new(edit, Origin::Fragment));
        self.since_persist += 1;
        self.reset_waits = false;
    }

    pub(super) fn replace_manifest(&mut self, manifest: Manifest) {
        self.runs = Runs::of(&manifest.entries);
        self.manifest = manifest;
    }

    /// Starts to store the next group, unless one is being stored or a retention may remove its entries meanwhile.
    pub(super) fn rebalance_if_due(&mut self, effects: &mut Vec<Effect<T>>) {
        if self.rebalance.is_some() || self.retention.is_some() {
            return;
        }
        self.rebalance =
            Rebalance::find(&self.runs, &self.manifest, self.options.rebalance_threshold);
        effects.extend(self.rebalance.iter().map(Rebalance::effect));
    }
}
