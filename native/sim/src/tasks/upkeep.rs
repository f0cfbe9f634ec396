//! Groups, and what retention decides: the tasks of a reader that look after its tier.

use stream_s3_core::decisions::local_retention::{deletable_segments, floor};
use stream_s3_core::error::TransferError;
use stream_s3_core::key;
use stream_s3_core::manifest::{
    FetchFailed, Retention, decode_group, encode_group, evaluate_remote_retention,
};
use stream_s3_core::units::{Offset, TimestampMs, Uid};

use super::{Answer, Retained, Retaining, Task, Work, body};
use crate::bucket::{Part, StoreError, StoreOp};
use crate::cluster::MEMBERS;
use crate::env::Env;
use crate::pins;

impl Task {
    pub(super) fn group(
        &mut self,
        env: &mut Env,
        answer: Answer,
    ) -> Option<Result<Uid, TransferError>> {
        let Work::Group { kind, entries, uid } = &self.work else {
            return None;
        };
        match answer {
            Answer::Start => {
                let first = entries
                    .first()
                    .map_or(Offset(0), |entry| entry.first_offset);
                let key = key::group(&env.prefix, &env.stream, *kind, first, *uid);
                match encode_group(*kind, entries) {
                    Ok(bytes) => {
                        let body = bytes.into();
                        self.store(env, StoreOp::Put { key, body });
                        None
                    }
                    Err(_) => Some(Err(TransferError::Other)),
                }
            }
            Answer::Store(Ok(_)) => Some(Ok(*uid)),
            Answer::Store(Err(StoreError::Failed(error))) => Some(Err(error)),
            Answer::Store(Err(StoreError::NotFound)) | Answer::Meta(_) => {
                Some(Err(TransferError::Other))
            }
        }
    }

    pub(super) fn retention(&mut self, env: &mut Env, answer: Answer) -> Option<Retained> {
        let Work::Retention(at) = &mut self.work else {
            return None;
        };
        let (decision, complete) = match (&mut *at, answer) {
            (Retaining::Begin(manifest, limits), _) => {
                let now = TimestampMs(env.clock());
                (evaluate_remote_retention(manifest, *limits, now), true)
            }
            (Retaining::Fetching(continuation), Answer::Store(answer)) => {
                let entries = match body(answer).map(|bytes| decode_group(&bytes)) {
                    Ok(Ok(group)) => Ok(group.entries),
                    Ok(Err(_)) | Err(_) => Err(FetchFailed),
                };
                let complete = entries.is_ok();
                (continuation.clone().resume(entries), complete)
            }
            (Retaining::Decided(retained), _) => return Some((**retained).clone()),
            (Retaining::Fetching(_), Answer::Start | Answer::Meta(_)) => return None,
        };
        if let Retention::Fetch(group, continuation) = decision {
            env.coverage.hit("retention through a group");
            *at = Retaining::Fetching(continuation);
            let key = key::group(
                &env.prefix,
                &env.stream,
                group.kind,
                group.offset,
                group.uid,
            );
            let part = Part::Whole;
            self.store(env, StoreOp::Get { key, part });
            return None;
        }
        *at = Retaining::Decided(Box::new(Retained { decision, complete }));
        let limit = env.rng.between(0, 40);
        self.limit(env, limit);
        None
    }

    /// Deletes segments of the log that are tiered and that no replica has still to read. Whether it could.
    pub(super) fn local_retention(&mut self, env: &mut Env, answer: &Answer) -> Option<bool> {
        let Work::LocalRetention(writer, persisted_next) = &self.work else {
            return None;
        };
        let (writer, persisted_next) = (*writer, *persisted_next);
        match answer {
            // The call of the writer, and osiris' process that is busy with others.
            Answer::Start => {
                let limit = env.rng.between(0, 60);
                self.limit(env, limit);
                None
            }
            Answer::Store(_) | Answer::Meta(_) => {
                if env.cluster.members[self.node].writer.map(|w| w.id) != Some(writer.id) {
                    return Some(false);
                }
                let replicas: Vec<Offset> = (0..MEMBERS)
                    .filter(|member| *member != self.node)
                    .map(|member| Offset(env.cluster.acknowledged(member)))
                    .collect();
                let segments = &env.cluster.members[self.node].segments;
                let firsts: Vec<Offset> = segments
                    .iter()
                    .map(|segment| Offset(segment.borrow().first))
                    .collect();
                let count = deletable_segments(&firsts, floor(persisted_next, &replicas));
                if count > 0 {
                    env.coverage.hit("local retention");
                    env.local_deleted(writer, firsts[count]);
                    env.cluster.members[self.node].trim(count);
                    pins::look(env, self.node);
                }
                Some(true)
            }
        }
    }
}
