//! The core's events and effects, as `rabbitmq_stream_s3_replica_reader_effects` turns what happens into the former and performs the
//! latter.

use stream_s3_core::error::TransferError;
use stream_s3_core::invariants;
use stream_s3_core::manifest::{Entry, EntryKind, Manifest};
use stream_s3_core::replica_reader::{Effect, Machine, Options, ResetPersist};
use stream_s3_core::units::{Epoch, Offset, Revision, TimestampMs, Uid};

use super::{Host, News, Reader, Timer, Verdict};
use crate::env::Env;
use crate::pins;
use crate::replica;
use crate::tasks::{PersistStage, Persisting, Work};
use crate::twin::Twin;

pub(super) type Effects = Vec<Effect<Host>>;

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
        // Now, and not when it is persisted: what this process uploads meanwhile is no part of the discarded tier.
        self.discarded = reset.is_some().then(|| env.rough_clock());
        self.arm_retention_timer(env);
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
    pub(super) fn tell(
        &mut self,
        env: &mut Env,
        event: impl FnOnce(&mut Machine<Host>) -> Effects,
    ) {
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

    pub(super) fn perform_all(&mut self, env: &mut Env, effects: Effects) {
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
                let news = match self.news {
                    News::Reset => replica::News::Reset,
                    News::Continues(previous, revision) => replica::News::Edits {
                        previous: Revision(previous),
                        revision: Revision(revision),
                        edits,
                    },
                };
                replica::broadcast(env, self.node, self.epoch, news);
            }
            Effect::EvaluateRetention => {
                env.coverage.hit("effect evaluate_retention");
                self.evaluate_local(env);
                self.evaluate_remote(env);
            }
            Effect::ReplyWaiters { waiters } => {
                env.coverage.hit("effect reply_waiters");
                let reached = waiters.into_iter().filter_map(|waiter| match waiter {
                    Host::Offset(offset) => Some(offset),
                    Host::Meta(_) | Host::Reason(_) => None,
                });
                self.reply_after_trimming(env, reached.collect());
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
        self.persisting_from = expected;
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
            stage: PersistStage::Root,
            discarded: self.discarded,
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
        pins::persisted(env, self.node, self.writer, next);
    }

    fn arm_persist_timer(&mut self, env: &mut Env, delay: u64) {
        if self.persist_timer.is_none() {
            self.persist_timer = Some(self.timer(env, delay, Timer::Persist));
        }
    }

    pub(super) fn reply(&mut self, env: &mut Env, offset: u64) {
        for waiter in self.waiters.remove(&offset).unwrap_or_default() {
            env.answer_waiter(self.node, self.writer, waiter);
        }
    }
}
