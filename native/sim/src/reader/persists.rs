//! What became of transfers, persists and groups.

use stream_s3_core::error::TransferError;
use stream_s3_core::key;
use stream_s3_core::replica_reader::{Effect, Machine, PersistError};
use stream_s3_core::units::{Epoch, Offset, Revision, TimestampMs, TransferId, Uid};

use super::effects::Effects;
use super::retention::keys_of;
use super::{Host, News, Reader};
use crate::coverage::error_name;
use crate::env::Env;
use crate::metadata::RootEntry;
use crate::reaper;
use crate::tasks::PersistFailure;
use crate::twin::Twin;

impl Reader {
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
            self.evaluate_remote(env);
        }
        if env.is(Twin::LocalFloor) {
            self.trim_too_much(env, Offset(next));
        }
    }

    pub(super) fn not_stored(&mut self, env: &mut Env, id: TransferId, error: TransferError) {
        env.coverage.hit("event transfer_failed");
        env.coverage.hit(error_name(&error));
        let gone = matches!(&error, TransferError::OpenFailed { posix, .. } if posix == "enoent");
        let at = self.first_of(id);
        let first = env.cluster.members[self.node].range().first;
        // One that is pinned can be opened all the same.
        if let Some(at) = at.filter(|at| gone && first > Some(*at)) {
            env.coverage.hit("out of reach");
            self.give_up(env, id);
            self.lost(env, at);
            return;
        }
        let reason = Host::Reason(error.clone());
        self.tell(env, |core| core.transfer_failed(id, &error, reason));
    }

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
        let discarded = self.discarded.take().is_some();
        // The edits of a new tier do not lead there from the old one.
        self.news = if discarded {
            News::Reset
        } else {
            News::Continues(self.persisting_from, revision)
        };
        self.resolutions = 0;
        self.persist_failures.0 = 0;
        let now = TimestampMs(env.clock());
        let revision = Revision(revision);
        self.tell(env, |core| core.persist_complete(revision, now));
        // Last, when everybody has been told of the new one.
        if let Some((uid, epoch)) = old
            && !discarded
        {
            let key = key::root(&env.prefix, &env.stream, Epoch(epoch), Uid(uid));
            reaper::delete(env, self.node, vec![key]);
        }
        if let Some(core) = &self.core {
            let first = core.persisted_manifest().first_offset;
            let dropped = self.deletions.persisted(first);
            let keys = keys_of(env, &dropped);
            reaper::delete(env, self.node, keys);
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
                let mut given_up = false;
                self.leave(env, |core| {
                    let effects = core.group_upload_failed(&error);
                    given_up = !core.rebalance_in_flight();
                    effects
                });
                env.coverage.hit(if given_up {
                    "group given up"
                } else {
                    "group tried again"
                });
            }
        }
    }

    /// An event that ends a group or a retention.
    pub(super) fn leave(
        &mut self,
        env: &mut Env,
        event: impl FnOnce(&mut Machine<Host>) -> Effects,
    ) {
        let forgets = env.is(Twin::TimerOnExit);
        self.tell(env, |core| {
            let mut effects = event(core);
            effects
                .retain(|effect| !forgets || !matches!(effect, Effect::StartPersistTimer { .. }));
            effects
        });
    }

    /// What the guard of the log's floor is there to prevent.
    fn trim_too_much(&mut self, env: &mut Env, next: Offset) {
        if env.plan.local_uploaded {
            let segments = &env.cluster.members[self.node].segments;
            let count = segments.partition_point(|segment| segment.borrow().first <= next.0);
            if let Some(count) = count.checked_sub(1).filter(|count| *count > 0) {
                let below = Offset(segments[count].borrow().first);
                env.local_deleted(self.writer, below);
                env.cluster.members[self.node].trim(count);
            }
        }
    }
}
