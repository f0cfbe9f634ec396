//! The core's events and effects, as `rabbitmq_stream_s3_replica_reader_effects` turns what happens into the former and performs the
//! latter.

use std::rc::Rc;

use stream_s3_core::decisions::local_retention::{deletable_segments, floor};
use stream_s3_core::error::TransferError;
use stream_s3_core::fragment::FragmentMeta;
use stream_s3_core::invariants;
use stream_s3_core::key;
use stream_s3_core::manifest::{
    Entry, EntryKind, Manifest, ObjectRef, Retention, RetentionLimits, evaluate_remote_retention,
};
use stream_s3_core::replica_reader::{Effect, Machine, Options, PersistError, ResetPersist};
use stream_s3_core::units::{Epoch, Offset, Revision, TimestampMs, TransferId, Uid};

use super::drain::Turn;
use super::{Host, Reader, Timer, Verdict};
use crate::env::Env;
use crate::metadata::RootEntry;
use crate::replica;
use crate::tasks::{Kind, PersistFailure, Persisting, Work};
use crate::twin::Twin;

/// Turns of the drain that a forced cut takes first.
const FORCE_CUT_TURNS: usize = 16;

type Effects = Vec<Effect<Host>>;

impl Reader {
    pub(super) fn start(
        &mut self,
        env: &mut Env,
        manifest: Manifest,
        at: Offset,
        reset: Option<ResetPersist>,
    ) {
        let options = Options {
            epoch: Epoch(self.epoch),
            persist_threshold: env.plan.persist_threshold,
            persist_interval_ms: env.plan.persist_interval,
            rebalance_threshold: env.plan.rebalance_threshold,
        };
        let now = TimestampMs(env.clock());
        if reset.is_some() && env.is(Twin::ResetPersistedFirst) {
            env.publish(self.node, Manifest::empty_at(at, manifest.revision));
        }
        self.discarded = reset.is_some();
        let started = match reset {
            None => Machine::init(manifest, options, now),
            Some(when) => Machine::init_reset(manifest, at, when, options, now),
        };
        match started {
            Ok((core, effects)) => {
                self.core = Some(core);
                self.perform_all(env, effects);
            }
            Err(error) => env.violate(0, error.to_string()),
        }
    }

    /// One event for the core, and its effects.
    fn tell(&mut self, env: &mut Env, event: impl FnOnce(&mut Machine<Host>) -> Effects) {
        if let Some(core) = &mut self.core {
            let effects = event(core);
            let check = invariants::machine(core);
            env.check(check);
            // Of the moment of the decision: an effect in front of this one may start a retention, which is all right.
            let status = core.status();
            let persists = |effect: &Effect<Host>| matches!(effect, Effect::StartPersist { .. });
            if (status.rebalance_in_flight || status.retention_in_flight)
                && effects.iter().any(persists)
            {
                env.violate(8, "a persist starts beside a group or a retention".into());
            }
            self.perform_all(env, effects);
        }
    }

    // --- draining ----------------------------------------------------------------------------------------------------

    pub(super) fn drain(&mut self, env: &mut Env) {
        if !self.has_room(env) {
            env.coverage.hit("drain paused");
            self.paused = true;
            return;
        }
        match self.turn(env) {
            Some(Turn::Cut(meta)) => {
                self.cut(env, meta);
                self.go_on(env);
            }
            Some(Turn::More) => {
                self.watch_age(env);
                self.go_on(env);
            }
            Some(Turn::EndOfLog) => {
                self.watch_age(env);
                self.end_of_log(env);
            }
            Some(Turn::Gap) => self.verdict = Verdict::Resolve(TransferError::Timeout),
            None => {}
        }
    }

    fn turn(&mut self, env: &mut Env) -> Option<Turn> {
        self.drain.as_mut().map(|drain| drain.turn(env))
    }

    fn has_room(&self, env: &Env) -> bool {
        self.cut.len() < env.plan.max_in_flight
    }

    fn go_on(&mut self, env: &mut Env) {
        if !self.draining {
            self.draining = true;
            env.send(self.pid, super::Msg::Drain);
        }
    }

    fn end_of_log(&mut self, env: &mut Env) {
        if self.listening {
            return;
        }
        let next = self.drain.as_ref().map_or(0, |drain| drain.next_offset());
        env.listen(self.node, self.pid, next);
        self.listening = true;
        // And look again: a commit that came before the writer knew of us is announced to nobody.
        self.go_on(env);
    }

    fn cut(&mut self, env: &mut Env, meta: FragmentMeta) {
        self.cut.push_back(meta.next_offset.0);
        self.watch_age(env);
        let id = TransferId(env.fresh());
        env.note(|| {
            format!(
                "reader {} cuts [{}, {}) as {id}",
                self.pid, meta.first_offset, meta.next_offset
            )
        });
        env.drained(self.node, &meta);
        let fragment = meta.fragment();
        let detail = Host::Meta(Rc::new(meta));
        let Some(core) = &mut self.core else {
            return;
        };
        match core.fragment_cut(id, fragment, detail) {
            Ok(effects) => self.perform_all(env, effects),
            Err(error) => env.violate(0, error.to_string()),
        }
    }

    pub(super) fn force_cut(&mut self, env: &mut Env) {
        env.coverage.hit("force cut");
        for _ in 0..FORCE_CUT_TURNS {
            if !self.has_room(env) {
                break;
            }
            match self.turn(env) {
                Some(Turn::Cut(meta)) => self.cut(env, meta),
                Some(Turn::More) => {}
                Some(Turn::EndOfLog) | None => break,
                Some(Turn::Gap) => {
                    self.verdict = Verdict::Resolve(TransferError::Timeout);
                    return;
                }
            }
        }
        if let Some(meta) = self.drain.as_mut().and_then(|drain| drain.cut(env)) {
            self.cut(env, meta);
        }
        self.go_on(env);
    }

    /// The fragment that is being assembled has reached the age at which it is cut.
    pub(super) fn too_old(&mut self, env: &mut Env) {
        if !self.has_room(env) {
            self.paused = true;
            return;
        }
        if let Some(meta) = self.drain.as_mut().and_then(|drain| drain.cut(env)) {
            env.coverage.hit("age cut");
            self.cut(env, meta);
        }
    }

    fn watch_age(&mut self, env: &mut Env) {
        let since = self.drain.as_ref().and_then(|drain| drain.since());
        if self.age_timer.map(|(_, since)| since) == since {
            return;
        }
        self.age_timer = since.map(|since| {
            let left = (since + env.plan.fragment_max_age).saturating_sub(env.now);
            (self.timer(env, left, Timer::Age), since)
        });
    }

    // --- transfers ---------------------------------------------------------------------------------------------------

    pub(super) fn stored(&mut self, env: &mut Env, id: TransferId, uid: Uid) {
        env.coverage.hit("event transfer_complete");
        self.tell(env, |core| core.transfer_complete(id, uid));
        let Some(core) = &self.core else {
            return;
        };
        let speculative = core.manifest().clone();
        let next = speculative.next_offset.0;
        while self.cut.front().is_some_and(|end| *end <= next) {
            self.cut.pop_front();
        }
        if self.paused && self.has_room(env) {
            self.paused = false;
            self.go_on(env);
        }
        if env.is(Twin::PersistedOnlyCache) {
            env.publish(self.node, speculative);
        }
        if env.is(Twin::WaitersAfterPersist) {
            let reached: Vec<u64> = self.waiters.range(..=next).map(|(o, _)| *o).collect();
            for offset in reached {
                self.reply(env, offset);
            }
        }
        if env.is(Twin::MutatorExclusion) {
            self.evaluate_remote_retention(env);
        }
        if env.is(Twin::LocalFloor) {
            self.local_retention(env, Offset(next));
        }
    }

    pub(super) fn not_stored(&mut self, env: &mut Env, id: TransferId, error: TransferError) {
        env.coverage.hit("event transfer_failed");
        let gone = matches!(&error, TransferError::OpenFailed { posix, .. } if posix == "enoent");
        let next = self.core.as_ref().map(|core| core.manifest().next_offset.0);
        let first = env.cluster.members[self.node].range().first;
        // Only when the oldest missing chunk is gone is it given up.
        if gone && first > next {
            env.coverage.hit("out of reach");
            self.verdict = Verdict::Resolve(TransferError::Timeout);
            return;
        }
        let reason = Host::Reason(error.clone());
        self.tell(env, |core| core.transfer_failed(id, &error, reason));
    }

    // --- persists and groups -----------------------------------------------------------------------------------------

    pub(super) fn persisted(
        &mut self,
        env: &mut Env,
        result: Result<(RootEntry, u64), PersistFailure>,
    ) {
        let error = match result {
            Ok((root, revision)) => {
                self.persist_succeeded(env, root, revision);
                return;
            }
            Err(PersistFailure::Conflict) => PersistError::Conflict,
            Err(PersistFailure::NotFound) => PersistError::NotFound,
            Err(PersistFailure::Store(error)) => {
                self.persist_failures = (self.persist_failures.0 + 1, error);
                PersistError::Other
            }
            Err(PersistFailure::Metadata | PersistFailure::Crashed) => {
                self.persist_failures = (self.persist_failures.0 + 1, TransferError::Timeout);
                PersistError::Other
            }
        };
        env.coverage.hit(match error {
            PersistError::Conflict => "event persist_failed conflict",
            PersistError::NotFound => "event persist_failed not_found",
            PersistError::Other => "event persist_failed other",
        });
        self.tell(env, |core| core.persist_failed(error));
    }

    fn persist_succeeded(&mut self, env: &mut Env, root: RootEntry, revision: u64) {
        env.coverage.hit("event persist_complete");
        let old = self.root.replace(root);
        let discarded = std::mem::take(&mut self.discarded);
        self.resolutions = 0;
        self.persist_failures.0 = 0;
        let now = TimestampMs(env.clock());
        let revision = Revision(revision);
        self.tell(env, |core| core.persist_complete(revision, now));
        if let Some(core) = &self.core {
            let first = core.persisted_manifest().first_offset;
            let dropped = self.deletions.persisted(first);
            let keys = keys_of(env, &dropped);
            Self::delete(env, keys);
        }
        // Last, when everybody has been told of the new one.
        if let Some((uid, epoch)) = old
            && !discarded
            && old != Some(root)
        {
            let key = key::root(&env.prefix, &env.stream, Epoch(epoch), Uid(uid));
            Self::delete(env, vec![key]);
        }
    }

    pub(super) fn grouped(&mut self, env: &mut Env, result: Result<Uid, TransferError>) {
        match result {
            Ok(uid) => {
                env.coverage.hit("event group_upload_complete");
                self.group_failures.0 = 0;
                self.leave(env, |core| core.group_upload_complete(uid));
            }
            Err(error) => {
                env.coverage.hit("event group_upload_failed");
                self.group_failures = (self.group_failures.0 + 1, error.clone());
                self.leave(env, |core| core.group_upload_failed(&error));
            }
        }
    }

    /// An event that ends a group or a retention.
    fn leave(&mut self, env: &mut Env, event: impl FnOnce(&mut Machine<Host>) -> Effects) {
        let forgets = env.is(Twin::TimerOnExit);
        self.tell(env, |core| {
            let mut effects = event(core);
            effects
                .retain(|effect| !forgets || !matches!(effect, Effect::StartPersistTimer { .. }));
            effects
        });
    }

    pub(super) fn tick(&mut self, env: &mut Env) {
        env.coverage.hit("event tick");
        let now = TimestampMs(env.clock());
        self.tell(env, |core| core.tick(now));
        if let Some(core) = &self.core {
            let status = core.status();
            let waiting = if env.is(Twin::RearmForEdits) {
                status.since_persist
            } else {
                status.edits_waiting as u64
            };
            if waiting > 0 && !status.persist_in_flight {
                self.arm_persist_timer(env, env.plan.persist_interval);
            }
        }
    }

    pub(super) fn await_offset(&mut self, env: &mut Env, offset: u64) {
        env.coverage.hit("event await_offset");
        self.tell(env, |core| {
            core.await_offset(Offset(offset), Host::Offset(offset))
        });
    }

    // --- effects -----------------------------------------------------------------------------------------------------

    fn perform_all(&mut self, env: &mut Env, effects: Effects) {
        for effect in effects {
            self.perform(env, effect);
        }
    }

    fn perform(&mut self, env: &mut Env, effect: Effect<Host>) {
        match effect {
            Effect::SubmitTransfer { id, detail } => {
                env.coverage.hit("effect submit_transfer");
                if let Host::Meta(meta) = detail {
                    self.submit(env, id, meta);
                }
            }
            Effect::ResubmitTransfer { id, .. } => {
                env.coverage.hit("effect resubmit_transfer");
                self.retry(env, id);
            }
            Effect::ResubmitTransferDelayed { id, .. } => {
                env.coverage.hit("effect resubmit_transfer_delayed");
                if !env.is(Twin::NeverDropped) {
                    self.retry(env, id);
                }
            }
            Effect::StartPersist {
                manifest,
                epoch,
                expected,
                ..
            } => self.start_persist(env, manifest, epoch, expected.0),
            Effect::StartPersistTimer { ms } => {
                env.coverage.hit("effect start_persist_timer");
                let delay = match self.persist_failures.clone() {
                    (0, _) => ms,
                    (failures, reason) => ms.max(Self::retry_delay(env, &reason, failures)),
                };
                self.arm_persist_timer(env, delay);
            }
            Effect::CancelPersistTimer => {
                env.coverage.hit("effect cancel_persist_timer");
                self.persist_timer = None;
            }
            Effect::UploadGroup { kind, entries, .. } => {
                env.coverage.hit(match kind {
                    EntryKind::Fragment | EntryKind::Group => "effect upload_group",
                    EntryKind::KiloGroup => "effect upload_group kilo",
                    EntryKind::MegaGroup => "effect upload_group mega",
                });
                match self.group_failures.clone() {
                    (0, _) => self.upload_group(env, kind, entries),
                    (failures, reason) => {
                        let delay = Self::retry_delay(env, &reason, failures);
                        let timer = self.timer(env, delay, Timer::Group(kind, entries));
                        self.group_timer = Some(timer);
                    }
                }
            }
            Effect::UpdateRange {
                first_offset,
                next_offset,
            } => self.update_range(env, first_offset, next_offset),
            Effect::Broadcast { edits } => {
                env.coverage.hit("effect broadcast");
                if let Some(core) = &self.core {
                    let revision = core.persisted_manifest().revision;
                    let from = (Revision(self.persist_expected), revision);
                    replica::broadcast(env, self.node, self.epoch, from, edits);
                }
            }
            Effect::EvaluateRetention => {
                env.coverage.hit("effect evaluate_retention");
                self.evaluate_retention(env);
            }
            Effect::ReplyWaiters { waiters } => {
                env.coverage.hit("effect reply_waiters");
                for waiter in waiters {
                    if let Host::Offset(offset) = waiter {
                        self.reply(env, offset);
                    }
                }
            }
            Effect::Reinitialize => {
                env.coverage.hit("effect reinitialize");
                self.verdict = Verdict::Resolve(TransferError::Timeout);
            }
            Effect::Stop => {
                env.coverage.hit("effect stop");
                self.verdict = Verdict::Stop;
            }
        }
    }

    fn start_persist(&mut self, env: &mut Env, manifest: Manifest, epoch: Epoch, expected: u64) {
        env.coverage.hit("effect start_persist");
        self.persist_expected = expected;
        let uid = env.rng.bits32();
        env.note(|| {
            format!(
                "reader {} persists [{}, {}) on revision {expected} as root.{epoch}.{uid:08x}",
                self.pid, manifest.first_offset, manifest.next_offset
            )
        });
        let persisting = Persisting {
            manifest,
            epoch: epoch.0,
            expected,
            uid,
            stored: false,
            old: self.root,
        };
        self.start_task(env, Work::Persist(persisting));
    }

    pub(super) fn upload_group(&mut self, env: &mut Env, kind: EntryKind, entries: Vec<Entry>) {
        self.group_timer = None;
        let uid = Uid(env.rng.bits32());
        self.start_task(env, Work::Group { kind, entries, uid });
    }

    fn update_range(&mut self, env: &mut Env, first: Offset, next: Offset) {
        env.coverage.hit("effect update_range");
        let Some(core) = &self.core else {
            return;
        };
        let manifest = core.persisted_manifest().clone();
        if (manifest.first_offset, manifest.next_offset) != (first, next) {
            env.violate(5, "the range is not the persisted manifest's".into());
        }
        env.publish(self.node, manifest);
    }

    fn arm_persist_timer(&mut self, env: &mut Env, delay: u64) {
        if self.persist_timer.is_none() {
            self.persist_timer = Some(self.timer(env, delay, Timer::Persist));
        }
    }

    fn reply(&mut self, env: &mut Env, offset: u64) {
        for waiter in self.waiters.remove(&offset).unwrap_or_default() {
            env.answer_waiter(self.node, self.writer, waiter);
        }
    }

    // --- retention ---------------------------------------------------------------------------------------------------

    fn evaluate_retention(&mut self, env: &mut Env) {
        if let Some(core) = &self.core {
            let persisted = core.persisted_manifest().next_offset;
            self.local_retention(env, persisted);
        }
        self.evaluate_remote_retention(env);
    }

    fn local_retention(&mut self, env: &mut Env, uploaded: Offset) {
        if !env.plan.local_uploaded {
            return;
        }
        let member = &env.cluster.members[self.node];
        let firsts: Vec<Offset> = member
            .segments
            .iter()
            .map(|segment| Offset(segment.borrow().first))
            .collect();
        let count = deletable_segments(&firsts, floor(uploaded, &[]));
        if count > 0 {
            env.coverage.hit("local retention");
            env.local_deleted(self.writer, firsts[count]);
            env.cluster.members[self.node].trim(count);
        }
    }

    fn evaluate_remote_retention(&mut self, env: &mut Env) {
        let (Some(core), false) = (&mut self.core, self.tasks.contains_key(&Kind::Retention))
        else {
            return;
        };
        let limits = RetentionLimits {
            max_bytes: env.plan.remote_max_bytes,
            max_age_ms: None,
        };
        let now = TimestampMs(env.clock());
        let exclusive = !env.is(Twin::MutatorExclusion);
        match evaluate_remote_retention(core.persisted_manifest(), limits, now) {
            Retention::Unchanged => {}
            Retention::Fetch(_, continuation) => {
                if exclusive {
                    core.retention_started();
                }
                env.coverage.hit("retention through a group");
                self.start_task(env, Work::Retention(Some(continuation)));
            }
            decided @ Retention::Drop { .. } => {
                if exclusive {
                    core.retention_started();
                }
                self.start_task(env, Work::Decided(Box::new(decided)));
            }
        }
    }

    pub(super) fn retained(&mut self, env: &mut Env, retention: Retention) {
        let Some(core) = &mut self.core else {
            return;
        };
        let Retention::Drop { edit, objects } = retention else {
            env.coverage.hit("event retention_failed");
            self.leave(env, Machine::retention_failed);
            return;
        };
        match core.retention_complete(&edit) {
            Ok(effects) => {
                env.coverage.hit("event retention_complete");
                if env.is(Twin::DeleteAfterPersist) {
                    let keys = keys_of(env, &objects);
                    Self::delete(env, keys);
                } else {
                    self.deletions.add(edit.first_offset, objects);
                }
                self.leave(env, |_| effects);
            }
            Err(error) => {
                env.coverage.hit("retention refused");
                env.note(|| format!("retention refused: {error}"));
                if env.is(Twin::MutatorExclusion) {
                    let keys = keys_of(env, &objects);
                    Self::delete(env, keys);
                }
                // Nothing may be deleted for it.
                self.leave(env, Machine::retention_failed);
            }
        }
    }
}

fn keys_of(env: &Env, objects: &[ObjectRef]) -> Vec<String> {
    objects
        .iter()
        .map(|object| match object {
            ObjectRef::Fragment(fragment) => {
                key::fragment(&env.prefix, &env.stream, fragment.offset, fragment.uid)
            }
            ObjectRef::Group(group) => key::group(
                &env.prefix,
                &env.stream,
                group.kind,
                group.offset,
                group.uid,
            ),
        })
        .collect()
}
