//! A shell, a store and a metadata store around the machine, driven by numbers. It remembers what it was ordered to do, and answers in any
//! order, more than once, or with failure.

use stream_s3_core::error::TransferError;
use stream_s3_core::fragment::Fragment;
use stream_s3_core::invariants::{self, Listed};
use stream_s3_core::manifest::{
    Edit, Entry, EntryKind, Manifest, ObjectRef, Retention, RetentionLimits, apply_edit,
    evaluate_remote_retention,
};
use stream_s3_core::replica_reader::{Effect, Event, Machine, Options, PersistError, ResetPersist};
use stream_s3_core::units::{Epoch, Offset, Revision, TimestampMs, TransferId, Uid};

use crate::model::{Effects, Model, Term};
use crate::support::{Groups, evaluate, grouped, timestamp};

/// What happens next. Numbers choose among what is possible.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Step {
    Cut { records: u64, size: u64 },
    Stored(usize),
    StoredAgain(usize),
    Failed(usize, bool),
    Persisted,
    PersistFailed,
    Stale(u8),
    Tick(i64),
    Await(u64),
    Grouped,
    GroupFailed(bool),
    Retain(u64, u64),
    RetentionDone,
    RetentionFailed,
}

pub(crate) struct World {
    machine: Machine<Term>,
    model: Model,
    groups: Groups,
    now: i64,
    next_id: u64,
    next_uid: u32,
    cut_at: u64,
    /// Submitted, and not answered with success.
    submitted: Vec<TransferId>,
    /// Answered with success.
    answered: Vec<TransferId>,
    /// The persist that was ordered.
    persist: Option<(Manifest, Revision, Vec<Edit>)>,
    /// The group that was ordered.
    group: Option<(EntryKind, Vec<Entry>)>,
    may_retain: bool,
    /// An announced retention, and what it decided.
    retention: Option<Option<(Edit, Vec<ObjectRef>)>>,
    /// A tier is being discarded, and the discarding is not persisted.
    resetting: bool,
    /// What a replica that follows the broadcasts has.
    replica: Manifest,
    /// Waiters by the offset they wait for; the term is the index.
    waiting: Vec<Option<u64>>,
    history: Vec<Manifest>,
}

/// How a world begins.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Start {
    /// On a tier of this many fragments, which were grouped by another threshold.
    Resume(u64),
    /// On such a tier that lies beyond the log, which begins this far below its end.
    RemoteAhead(u64, u64),
    /// On such a tier that ends this far before the log.
    LocalAhead(u64, u64),
}

impl World {
    pub(crate) fn new(persist_threshold: u64, rebalance_threshold: usize, start: Start) -> Self {
        let options = Options {
            epoch: Epoch(3),
            persist_threshold,
            persist_interval_ms: 50,
            rebalance_threshold,
        };
        let (Start::Resume(count) | Start::RemoteAhead(count, _) | Start::LocalAhead(count, _)) =
            start;
        let (manifest, groups) = grouped(count, 3);
        let next = manifest.next_offset.0;
        let now = TimestampMs(0);
        let init = |at: u64, when| {
            let (machine, effects) =
                Machine::init_reset(manifest.clone(), Offset(at), when, options, now).unwrap();
            let (model, expected) = Model::reset(&manifest, Offset(at), when, options, now);
            assert_eq!(effects, expected);
            (machine, model, effects, at)
        };
        let (machine, model, effects, cut_at) = match start {
            Start::Resume(_) => {
                let (machine, effects) = Machine::init(manifest.clone(), options, now).unwrap();
                assert_eq!(effects, []);
                (machine, Model::new(&manifest, options, now), effects, next)
            }
            Start::RemoteAhead(_, below) => init(next.saturating_sub(below), ResetPersist::AtOnce),
            Start::LocalAhead(_, above) => init(next + above, ResetPersist::WithFirstFragment),
        };
        let mut world = Self {
            machine,
            model,
            groups,
            now: 0,
            next_id: 0,
            next_uid: 0,
            cut_at,
            submitted: Vec::new(),
            answered: Vec::new(),
            persist: None,
            group: None,
            may_retain: false,
            retention: None,
            resetting: !matches!(start, Start::Resume(_)),
            replica: manifest.clone(),
            waiting: Vec::new(),
            history: vec![manifest],
        };
        effects.iter().for_each(|effect| world.perform(effect));
        world
    }

    fn uid(&mut self) -> Uid {
        self.next_uid += 1;
        Uid(self.next_uid)
    }

    /// Both get the event; both have to do the same.
    fn on(&mut self, event: Event<Term>) -> Effects {
        let before = (
            self.machine.manifest().clone(),
            self.machine.persisted_manifest().clone(),
        );
        let older = self.machine.clone();
        let expected = self.model.on(&event, &self.groups);
        let effects = self.machine.handle(event).unwrap();
        assert_eq!(effects, expected);
        let (manifest, persisted) = self.model.manifests();
        assert_eq!(self.machine.manifest(), &manifest);
        assert_eq!(self.machine.persisted_manifest(), &persisted);
        assert_eq!(
            (older.manifest(), older.persisted_manifest()),
            (&before.0, &before.1)
        );
        self.check(&before);
        for effect in &effects {
            self.perform(effect);
        }
        effects
    }

    /// Does as it is told, and checks that it may be told so.
    fn perform(&mut self, effect: &Effect<Term>) {
        match effect {
            Effect::SubmitTransfer { id, .. } => self.submitted.push(*id),
            Effect::ResubmitTransfer { id, .. } | Effect::ResubmitTransferDelayed { id, .. } => {
                assert!(self.submitted.contains(id));
            }
            Effect::StartPersist {
                manifest,
                epoch,
                expected,
                edits,
            } => {
                assert!(self.persist.is_none(), "one persist at a time");
                assert!(!edits.is_empty());
                assert_eq!(*epoch, Epoch(3));
                assert_eq!(expected, &self.machine.persisted_manifest().revision);
                self.persist = Some((manifest.clone(), *expected, edits.clone()));
            }
            Effect::UploadGroup { kind, entries, .. } => {
                self.group = Some((*kind, entries.clone()));
            }
            Effect::UpdateRange {
                first_offset,
                next_offset,
            } => {
                let persisted = self.machine.persisted_manifest();
                assert_eq!(
                    (first_offset, next_offset),
                    (&persisted.first_offset, &persisted.next_offset)
                );
            }
            Effect::Broadcast { edits } => {
                self.resetting = false;
                for edit in edits {
                    self.replica = apply_edit(edit, &self.replica).unwrap();
                }
                self.replica.revision = self.machine.persisted_manifest().revision;
                assert_eq!(&self.replica, self.machine.persisted_manifest());
                self.history.push(self.replica.clone());
                invariants::replica_prefix(&self.replica, &self.history).unwrap();
            }
            Effect::EvaluateRetention => self.may_retain = true,
            Effect::ReplyWaiters { waiters } => {
                for waiter in waiters {
                    let offset = self.waiting[*waiter as usize].take().expect("told once");
                    assert!(offset <= self.machine.persisted_manifest().next_offset.0);
                }
            }
            Effect::StartPersistTimer { ms } => assert_eq!(*ms, 50),
            Effect::CancelPersistTimer | Effect::Reinitialize | Effect::Stop => {}
        }
    }

    fn check(&self, before: &(Manifest, Manifest)) {
        invariants::machine(&self.machine).unwrap();
        for (manifest, before) in [
            (self.machine.manifest(), &before.0),
            (self.machine.persisted_manifest(), &before.1),
        ] {
            if !self.resetting {
                invariants::contiguous_advance(before, manifest).unwrap();
            }
            let listed: Vec<Listed> = self.listed(manifest);
            invariants::coverage(manifest, &listed).unwrap();
        }
    }

    /// The live fragments of a manifest. Offsets after them come from what follows: nothing else knows.
    fn listed(&self, manifest: &Manifest) -> Vec<Listed> {
        let leaves = self.groups.leaves(&manifest.entries);
        let ends = leaves
            .iter()
            .skip(1)
            .map(|leaf| leaf.first_offset)
            .chain([manifest.next_offset]);
        let listed = leaves.iter().zip(ends).map(|(leaf, next)| Listed {
            first: leaf.first_offset,
            next,
            size: leaf.size,
        });
        listed
            .filter(|leaf| leaf.first >= manifest.first_offset)
            .collect()
    }

    /// One step; false where the machine has asked to be thrown away.
    pub(crate) fn step(&mut self, step: Step) -> bool {
        self.now += 1;
        let effects = match step {
            Step::Cut { records, size } => self.cut(records, size),
            Step::Stored(index) => self.stored(index),
            Step::StoredAgain(index) => self.stored_again(index),
            Step::Failed(index, transient) => self.failed(index, transient),
            Step::Persisted => self.persisted(),
            Step::PersistFailed => self.persist_failed(),
            Step::Stale(which) => self.stale(which),
            Step::Tick(later) => {
                self.now += later;
                self.on(Event::Tick(TimestampMs(self.now)))
            }
            Step::Await(ahead) => {
                let offset = self.machine.persisted_manifest().next_offset.0 + ahead;
                self.waiting.push(Some(offset));
                let from = Term::try_from(self.waiting.len() - 1).unwrap();
                self.on(Event::AwaitOffset {
                    offset: Offset(offset),
                    from,
                })
            }
            Step::Grouped => self.grouped(),
            Step::GroupFailed(transient) => self.group_failed(transient),
            Step::Retain(bytes, age) => self.retain(bytes, age),
            Step::RetentionDone => self.retention_done(),
            Step::RetentionFailed => match self.retention.take() {
                Some(_) => self.on(Event::RetentionFailed),
                None => vec![],
            },
        };
        !effects
            .iter()
            .any(|effect| matches!(effect, Effect::Reinitialize | Effect::Stop))
    }

    fn cut(&mut self, records: u64, size: u64) -> Effects {
        let first = self.cut_at;
        self.cut_at += records;
        let fragment = Fragment {
            first_offset: Offset(first),
            next_offset: Offset(self.cut_at),
            first_timestamp: timestamp(first),
            last_timestamp: timestamp(self.cut_at - 1),
            size,
        };
        self.next_id += 1;
        let detail = Term::try_from(self.next_id).unwrap() * 10;
        self.on(Event::FragmentCut {
            id: TransferId(self.next_id),
            fragment,
            detail,
        })
    }

    fn stored(&mut self, index: usize) -> Effects {
        if self.submitted.is_empty() {
            return vec![];
        }
        let id = self.submitted.remove(index % self.submitted.len());
        self.answered.push(id);
        let uid = self.uid();
        self.on(Event::TransferComplete { id, uid })
    }

    fn stored_again(&mut self, index: usize) -> Effects {
        if self.answered.is_empty() {
            return vec![];
        }
        let id = self.answered[index % self.answered.len()];
        let uid = self.uid();
        let effects = self.on(Event::TransferComplete { id, uid });
        assert_eq!(effects, [], "a repetition changes nothing");
        effects
    }

    fn failed(&mut self, index: usize, transient: bool) -> Effects {
        let all = self.submitted.len() + self.answered.len();
        if all == 0 {
            return vec![];
        }
        let index = index % all;
        let id = match self.submitted.get(index) {
            Some(id) => *id,
            None => self.answered[index - self.submitted.len()],
        };
        self.on(Event::TransferFailed {
            id,
            error: error(transient),
            reason: 7,
        })
    }

    fn persisted(&mut self) -> Effects {
        let Some((_, expected, _)) = self.persist.take() else {
            return vec![];
        };
        let (revision, now) = (Revision(expected.0 + 1), TimestampMs(self.now));
        self.on(Event::PersistComplete { revision, now })
    }

    fn persist_failed(&mut self) -> Effects {
        match self.persist.take() {
            Some(_) => self.on(Event::PersistFailed(PersistError::Other)),
            None => vec![],
        }
    }

    /// Results that nobody waits for.
    fn stale(&mut self, which: u8) -> Effects {
        let id = TransferId(u64::MAX);
        let event = match which % 8 {
            0 => Event::TransferComplete { id, uid: Uid(1) },
            1 => Event::TransferFailed {
                id,
                error: error(true),
                reason: 1,
            },
            2 if self.group.is_none() => Event::GroupUploadComplete(Uid(1)),
            3 if self.group.is_none() => Event::GroupUploadFailed(error(which > 8)),
            4 if self.persist.is_none() => Event::PersistComplete {
                revision: Revision(999),
                now: TimestampMs(0),
            },
            5 if self.persist.is_none() => Event::PersistFailed(PersistError::Other),
            6 => return self.on(Event::PersistFailed(PersistError::Conflict)),
            7 => return self.on(Event::PersistFailed(PersistError::NotFound)),
            _ => return vec![],
        };
        let effects = self.on(event);
        assert_eq!(effects, [], "an old result changes nothing");
        effects
    }

    fn grouped(&mut self) -> Effects {
        let Some((kind, entries)) = self.group.take() else {
            return vec![];
        };
        let uid = self.uid();
        self.groups.store(kind, entries, uid.0);
        self.on(Event::GroupUploadComplete(uid))
    }

    fn group_failed(&mut self, transient: bool) -> Effects {
        match self.group.take() {
            Some(_) => self.on(Event::GroupUploadFailed(error(transient))),
            None => vec![],
        }
    }

    /// Evaluates as a shell does: when told to, one at a time, against the persisted manifest.
    fn retain(&mut self, bytes: u64, age: u64) -> Effects {
        if !self.may_retain || self.retention.is_some() || self.group.is_some() {
            return vec![];
        }
        self.may_retain = false;
        let limits = RetentionLimits {
            max_bytes: Some(u128::from(bytes)),
            max_age_ms: Some(age),
        };
        let persisted = self.machine.persisted_manifest().clone();
        let now = timestamp(self.cut_at);
        let found = evaluate_remote_retention(&persisted, limits, now);
        self.retention = Some(match evaluate(found, &self.groups, &[]) {
            Retention::Drop { edit, objects } => {
                let after = apply_edit(&edit, &persisted).unwrap();
                invariants::retention(&persisted, &after, &objects).unwrap();
                Some((edit, objects))
            }
            Retention::Unchanged | Retention::Fetch(..) => None,
        });
        self.on(Event::RetentionStarted)
    }

    fn retention_done(&mut self) -> Effects {
        match self.retention.take() {
            Some(Some((edit, objects))) => {
                let floor = edit.first_offset;
                let effects = self.on(Event::RetentionComplete(edit));
                let in_use = self.listed(self.machine.manifest());
                assert!(objects.iter().all(|object| object.offset() < floor));
                assert!(in_use.iter().all(|listed| listed.first >= floor));
                effects
            }
            Some(None) => self.on(Event::RetentionFailed),
            None => vec![],
        }
    }

    /// Answers everything with success until nothing is left to do: nothing may be stuck.
    pub(crate) fn settle(&mut self) {
        // A reset may wait for a first fragment.
        self.step(Step::Cut {
            records: 1,
            size: 1,
        });
        for _ in 0..10_000 {
            let idle = self.submitted.is_empty()
                && self.persist.is_none()
                && self.group.is_none()
                && self.retention.is_none()
                && self.machine.status().edits_waiting == 0;
            if idle {
                return self.check_settled();
            }
            self.step(Step::Stored(0));
            self.step(Step::Grouped);
            self.step(Step::RetentionDone);
            self.step(Step::Persisted);
            self.step(Step::Tick(60));
        }
        panic!("never settles: {:?}", self.machine.status());
    }

    fn check_settled(&self) {
        assert_eq!(self.machine.manifest(), self.machine.persisted_manifest());
        let status = self.machine.status();
        assert_eq!(
            (status.transfers_in_flight, status.transfers_pending_order),
            (0, 0)
        );
        assert_eq!((status.since_persist, status.in_persist_count), (0, 0));
        assert_eq!(status.persisted_next_offset, Offset(self.cut_at));
        let late = self
            .waiting
            .iter()
            .flatten()
            .filter(|offset| **offset <= self.cut_at);
        assert_eq!(late.count(), 0, "everybody is told");
    }
}

fn error(transient: bool) -> TransferError {
    if transient {
        TransferError::Timeout
    } else {
        TransferError::Http(403)
    }
}
