//! How a root becomes current: `rabbitmq_stream_s3_replica_reader_resolve:persist/5`.

use stream_s3_core::error::TransferError;
use stream_s3_core::key;
use stream_s3_core::manifest::encode_root;
use stream_s3_core::units::{Epoch, Uid};

use super::{Answer, PersistFailure, PersistStage, Task, Work};
use crate::bucket::{StoreError, StoreOp};
use crate::env::Env;
use crate::metadata::{MetaError, MetaOp, MetaValue, RootEntry};
use crate::reaper;
use crate::twin::Twin;

/// Longest attempt to write to the metadata store.
const METADATA_ATTEMPT: u64 = 500;

impl Task {
    pub(super) fn persist(
        &mut self,
        env: &mut Env,
        answer: Answer,
    ) -> Option<Result<(RootEntry, u64), PersistFailure>> {
        let Work::Persist(at) = &mut self.work else {
            return None;
        };
        match (answer, at.stage) {
            (Answer::Start, _) => match at.discarded {
                None => self.put_root(env),
                Some(discarded) => {
                    at.stage = PersistStage::Discard;
                    let (at, epoch) = (discarded, at.epoch);
                    let limit = self.left(env).min(METADATA_ATTEMPT);
                    self.ask(env, MetaOp::Discard { at, epoch }, limit);
                    None
                }
            },
            (Answer::Meta(Ok(MetaValue::Discarded)), PersistStage::Discard) => {
                env.coverage.hit("discard noted");
                self.put_root(env)
            }
            (Answer::Meta(Err(MetaError::NotFound)), _) => Some(Err(PersistFailure::NotFound)),
            (Answer::Meta(Err(MetaError::Conflict)), PersistStage::Discard) => {
                env.coverage.hit("discard fenced");
                Some(Err(PersistFailure::Conflict))
            }
            (Answer::Meta(_), PersistStage::Discard) => {
                env.coverage.hit("discard failed");
                Some(Err(PersistFailure::Metadata))
            }
            (Answer::Store(Ok(_)), _) => {
                env.coverage.hit("root stored");
                if let Some((uid, epoch)) = at.old
                    && env.is(Twin::OldRootAfterSwap)
                {
                    let key = key::root(&env.prefix, &env.stream, Epoch(epoch), Uid(uid));
                    env.delete_at_once(vec![key]);
                }
                self.make_current(env);
                None
            }
            (Answer::Store(Err(StoreError::Failed(error))), _) => {
                Some(Err(PersistFailure::Store(error)))
            }
            (Answer::Store(Err(StoreError::NotFound)), _) => {
                Some(Err(PersistFailure::Store(TransferError::Http(404))))
            }
            (Answer::Meta(Ok(MetaValue::Written(revision))), _) if revision > at.expected => {
                Some(Ok(((at.uid, at.epoch), revision)))
            }
            (Answer::Meta(Ok(_) | Err(MetaError::Other)), _) => Some(Err(PersistFailure::Metadata)),
            (Answer::Meta(Err(MetaError::Conflict)), _) => {
                // Revisions only grow, so no attempt with this one can win any more.
                let key = key::root(&env.prefix, &env.stream, Epoch(at.epoch), Uid(at.uid));
                reaper::delete(env, self.node, vec![key]);
                Some(Err(PersistFailure::Conflict))
            }
            (Answer::Meta(Err(MetaError::Timeout)), stage) => self.unanswered(env, stage),
        }
    }

    /// It may have won. With the same entry the next attempt recognises itself.
    fn unanswered(
        &mut self,
        env: &mut Env,
        stage: PersistStage,
    ) -> Option<Result<(RootEntry, u64), PersistFailure>> {
        let Work::Persist(at) = &self.work else {
            return None;
        };
        if env.is(Twin::KeepUnknownRoot) {
            let key = key::root(&env.prefix, &env.stream, Epoch(at.epoch), Uid(at.uid));
            env.delete_at_once(vec![key]);
            return Some(Err(PersistFailure::Metadata));
        }
        match stage {
            PersistStage::Swap(left) if left > METADATA_ATTEMPT => {
                env.coverage.hit("swap tried again");
                self.make_current(env);
                None
            }
            PersistStage::Swap(_) | PersistStage::Root | PersistStage::Discard => {
                env.coverage.hit("swap unanswered");
                Some(Err(PersistFailure::Metadata))
            }
        }
    }

    fn put_root(&mut self, env: &mut Env) -> Option<Result<(RootEntry, u64), PersistFailure>> {
        let Work::Persist(at) = &mut self.work else {
            return None;
        };
        at.stage = PersistStage::Root;
        let key = key::root(&env.prefix, &env.stream, Epoch(at.epoch), Uid(at.uid));
        match encode_root(&at.manifest) {
            Ok(bytes) => {
                let body = bytes.into();
                self.store(env, StoreOp::Put { key, body });
                None
            }
            Err(_) => Some(Err(PersistFailure::Crashed)),
        }
    }

    fn make_current(&mut self, env: &mut Env) {
        let left = self.left(env);
        let Work::Persist(at) = &mut self.work else {
            return;
        };
        at.stage = PersistStage::Swap(left);
        let op = MetaOp::Put {
            entry: (at.uid, at.epoch),
            expected: at.expected,
        };
        self.ask(env, op, left.min(METADATA_ATTEMPT));
    }
}
