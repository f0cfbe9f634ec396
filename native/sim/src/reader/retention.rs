//! Retention of the remote tier and of the local log.

use stream_s3_core::key;
use stream_s3_core::manifest::{ObjectRef, Retention, RetentionLimits};
use stream_s3_core::replica_reader::Machine;

use super::{Reader, Timer};
use crate::env::Env;
use crate::tasks::{Kind, Retained, Retaining, Work};
use crate::twin::Twin;

/// The local log is being trimmed.
#[derive(Debug)]
pub(super) struct Trimming {
    /// Offsets whose callers are answered when that is done.
    due: Vec<u64>,
    /// Another time is wanted, and these callers are answered then.
    later: Option<Vec<u64>>,
}

impl Reader {
    /// Looks at retention although nothing was persisted: time passes, and replicas catch up.
    pub(super) fn retain(&mut self, env: &mut Env) {
        self.arm_retention_timer(env);
        let Some(status) = self.core.as_ref().map(Machine::status) else {
            return;
        };
        // Otherwise a persist is to come, and retention with it. A tier that is discarded says nothing of the log.
        if status.since_persist == 0
            && !status.persist_in_flight
            && !status.rebalance_in_flight
            && self.discarded.is_none()
        {
            env.coverage.hit("retention without a persist");
            self.evaluate_local(env);
            self.evaluate_remote(env);
        }
    }

    pub(super) fn arm_retention_timer(&mut self, env: &mut Env) {
        let timer = self.timer(env, env.plan.reconcile_every, Timer::Retention);
        self.retention_timer = Some(timer);
    }

    // --- the remote tier -----------------------------------------------------------------------------------------------

    pub(super) fn evaluate_remote(&mut self, env: &mut Env) {
        let limits = RetentionLimits {
            max_bytes: env.plan.remote_max_bytes,
            max_age_ms: env.plan.remote_max_age,
        };
        let Some(core) = &mut self.core else {
            return;
        };
        let manifest = core.persisted_manifest();
        if limits == RetentionLimits::default()
            || !self.deletions.is_empty()
            || self.tasks.contains_key(&Kind::Retention)
            || manifest.entries.is_empty()
        {
            return;
        }
        let work = Work::Retention(Retaining::Begin(manifest.clone(), limits));
        if !env.is(Twin::MutatorExclusion) {
            env.coverage.hit("event retention_started");
            core.retention_started();
        }
        self.start_task(env, work);
    }

    pub(super) fn retained(&mut self, env: &mut Env, retained: Retained) {
        if !retained.complete {
            env.coverage.hit("retention incomplete");
        }
        let Some(core) = &mut self.core else {
            return;
        };
        let Retention::Drop { edit, objects } = retained.decision else {
            env.coverage.hit("event retention_failed");
            self.leave(env, Machine::retention_failed);
            return;
        };
        match core.retention_complete(&edit) {
            Ok(effects) => {
                env.coverage.hit("event retention_complete");
                if env.is(Twin::DeleteAfterPersist) {
                    let keys = keys_of(env, &objects);
                    env.delete_at_once(keys);
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
                    env.delete_at_once(keys);
                }
                // Nothing may be deleted for it.
                self.leave(env, Machine::retention_failed);
            }
        }
    }

    // --- the local log -------------------------------------------------------------------------------------------------

    pub(super) fn evaluate_local(&mut self, env: &mut Env) {
        if !env.plan.local_uploaded {
            return;
        }
        match &mut self.trimming {
            None => self.start_trimming(env, Vec::new()),
            Some(trimming) => {
                trimming.later.get_or_insert_default();
            }
        }
    }

    fn start_trimming(&mut self, env: &mut Env, due: Vec<u64>) {
        let Some(core) = &self.core else {
            return;
        };
        let persisted = core.persisted_manifest().next_offset;
        self.trimming = Some(Trimming { due, later: None });
        self.start_task(env, Work::LocalRetention(self.writer, persisted));
    }

    pub(super) fn trimmed(&mut self, env: &mut Env, done: bool) {
        env.coverage.hit(if done {
            "log trimmed"
        } else {
            "log not trimmed"
        });
        let Some(Trimming { due, later }) = self.trimming.take() else {
            return;
        };
        for offset in due {
            self.reply(env, offset);
        }
        if let Some(later) = later {
            self.start_trimming(env, later);
        }
    }

    /// Whoever is told that an offset is in the tier may look at what that means for the local log.
    pub(super) fn reply_after_trimming(&mut self, env: &mut Env, reached: Vec<u64>) {
        match &mut self.trimming {
            None => {
                for offset in reached {
                    self.reply(env, offset);
                }
            }
            Some(Trimming {
                later: Some(later), ..
            }) => later.extend(reached),
            Some(Trimming { due, later: None }) => due.extend(reached),
        }
    }

    /// Answers those who wait for the local log, which will not be looked at now. What they were to be told is true.
    pub(super) fn answer_trimming(&mut self, env: &mut Env) {
        if let Some(Trimming { due, later }) = self.trimming.take() {
            for offset in due.into_iter().chain(later.unwrap_or_default()) {
                self.reply(env, offset);
            }
        }
    }
}

pub(super) fn keys_of(env: &Env, objects: &[ObjectRef]) -> Vec<String> {
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
