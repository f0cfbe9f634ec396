//! What a reader finds out before it reads: `rabbitmq_stream_s3_replica_reader_resolve:resolve/3`.

use stream_s3_core::chunk::{CHUNK_HEADER_SIZE, ChunkHeader};
use stream_s3_core::decisions::resolution::{
    Fetched, Metadata as Known, Resolve, Resolved, resolve, resolved,
};
use stream_s3_core::decisions::timeline::{
    ChunkIdentity, LocalChunk, Timeline, check_beginning, check_continuation, check_timeline,
};
use stream_s3_core::error::TransferError;
use stream_s3_core::fragment::{INDEX_RECORD_SIZE, IndexRecord, OBJECT_HEADER};
use stream_s3_core::key;
use stream_s3_core::manifest::{Entry, Manifest, ObjectRef, decode_group, decode_root};
use stream_s3_core::units::{Epoch, Offset, Revision, Uid};

use super::{Answer, Found, Stage, Task, Work, body};
use crate::bucket::{Part, StoreAnswer, StoreError, StoreOp, StoreValue};
use crate::cluster::Range;
use crate::env::{Cached, Env};
use crate::metadata::{MetaAnswer, MetaError, MetaOp, MetaValue, RootEntry};
use crate::pins;
use crate::twin::Twin;

impl Task {
    pub(super) fn resolve(
        &mut self,
        env: &mut Env,
        answer: Answer,
    ) -> Option<Result<Box<Found>, TransferError>> {
        let Work::Resolve(at) = &mut self.work else {
            return None;
        };
        let stage = std::mem::replace(&mut at.stage, Stage::Begin);
        match (stage, answer) {
            (Stage::Begin, Answer::Start) => {
                // A writer that has ended has no context; its reader hears of that by itself.
                if env.cluster.members[self.node].writer.map(|w| w.id) != Some(at.writer.id) {
                    return Some(Err(TransferError::Other));
                }
                // As soon as there is a log: while the stores do not answer, retention goes on.
                pins::enter(env, self.node, at.writer);
                if env.is(Twin::AnchorFirst) {
                    at.stage = Stage::Get;
                    let left = self.left(env);
                    self.ask(env, MetaOp::Get, left);
                } else {
                    at.stage = Stage::Anchor;
                    let left = self.left(env);
                    self.ask(env, MetaOp::Anchor, left);
                }
                None
            }
            (Stage::Anchor, Answer::Meta(Ok(MetaValue::Anchored))) => {
                at.stage = Stage::Get;
                let left = self.left(env);
                self.ask(env, MetaOp::Get, left);
                None
            }
            (Stage::Get, Answer::Meta(answer)) => self.got(env, answer),
            (Stage::Claim, Answer::Meta(Ok(MetaValue::Claimed))) => self.timeline(env),
            (Stage::Claim, Answer::Meta(Err(MetaError::Conflict))) => {
                env.coverage.hit("resolve fenced by the note");
                Some(Err(TransferError::Other))
            }
            (Stage::Root(entry, revision), Answer::Store(answer)) => {
                self.root(env, entry, revision, answer)
            }
            (Stage::Group, Answer::Store(answer)) => match body(answer) {
                Ok(bytes) => match decode_group(&bytes) {
                    Ok(group) => self.newest(env, group.entries.last().copied()),
                    Err(_) => Some(Err(TransferError::Other)),
                },
                Err(error) => Some(Err(error)),
            },
            (Stage::Index(key), Answer::Store(answer)) => match body(answer) {
                Ok(bytes) => self.index(env, key, &bytes),
                Err(error) => Some(Err(error)),
            },
            (Stage::Header(chunk_id), Answer::Store(answer)) => match body(answer) {
                Ok(bytes) => self.header(env, chunk_id, &bytes),
                Err(error) => Some(Err(error)),
            },
            // No answer, or one that says no.
            (_, Answer::Store(_) | Answer::Meta(_) | Answer::Start) => {
                Some(Err(TransferError::Timeout))
            }
        }
    }

    fn got(
        &mut self,
        env: &mut Env,
        answer: MetaAnswer,
    ) -> Option<Result<Box<Found>, TransferError>> {
        let Work::Resolve(at) = &mut self.work else {
            return None;
        };
        let known = match answer {
            Ok(MetaValue::Root((uid, epoch), revision)) => Known::Present {
                uid: Uid(uid),
                epoch: Epoch(epoch),
                revision: Revision(revision),
            },
            Err(MetaError::NotFound) => Known::Absent,
            Ok(
                MetaValue::Anchored
                | MetaValue::Claimed
                | MetaValue::Discarded
                | MetaValue::Written(_),
            )
            | Err(MetaError::Conflict | MetaError::Timeout | MetaError::Other) => Known::Failed,
        };
        let cached = match &env.nodes[self.node].table.cached {
            Cached::Known(manifest) => Some(manifest.clone()),
            Cached::Unknown | Cached::Pending => None,
        };
        let own = if env.is(Twin::EpochCheck) {
            Epoch(u64::MAX)
        } else {
            Epoch(at.writer.epoch)
        };
        match resolve(known, cached.as_ref().map(|m| m.revision), own) {
            Resolve::Empty => {
                env.coverage.hit("resolve empty");
                self.finish(env, Timeline::Unverifiable)
            }
            Resolve::UseCache => {
                env.coverage.hit("resolve from cache");
                if let Known::Present { uid, epoch, .. } = known {
                    at.root = Some((uid.0, epoch.0));
                }
                at.manifest = cached.unwrap_or_default();
                self.claim(env);
                None
            }
            Resolve::Fetch {
                uid,
                epoch,
                revision,
            } => {
                env.coverage.hit("resolve by fetch");
                at.stage = Stage::Root((uid.0, epoch.0), revision);
                let key = key::root(&env.prefix, &env.stream, epoch, uid);
                self.store(
                    env,
                    StoreOp::Get {
                        key,
                        part: Part::Whole,
                    },
                );
                None
            }
            Resolve::Superseded { .. } => {
                env.coverage.hit("resolve superseded");
                Some(Err(TransferError::Other))
            }
            Resolve::Retry => Some(Err(TransferError::Timeout)),
        }
    }

    fn root(
        &mut self,
        env: &mut Env,
        entry: RootEntry,
        revision: Revision,
        answer: StoreAnswer,
    ) -> Option<Result<Box<Found>, TransferError>> {
        let Work::Resolve(at) = &mut self.work else {
            return None;
        };
        let fetched = match &answer {
            Ok(StoreValue::Body(bytes)) => {
                decode_root(bytes).map_or(Fetched::Failed, Fetched::Manifest)
            }
            Err(StoreError::NotFound) => Fetched::NotFound,
            Ok(StoreValue::Done | StoreValue::Listing(_) | StoreValue::Undeleted(_))
            | Err(StoreError::Failed(_)) => Fetched::Failed,
        };
        match resolved(fetched, revision) {
            Resolved::Manifest(manifest) => {
                at.root = Some(entry);
                at.manifest = manifest;
                self.claim(env);
                None
            }
            Resolved::Retry if env.is(Twin::ErrorIsNotEmpty) => {
                at.root = Some(entry);
                at.manifest = Manifest::empty_at(Offset(0), revision);
                self.claim(env);
                None
            }
            Resolved::Retry => Some(Err(body(answer).err().unwrap_or(TransferError::Other))),
        }
    }

    /// Before anything is uploaded that goes on from the manifest.
    fn claim(&mut self, env: &mut Env) {
        let left = self.left(env);
        let Work::Resolve(at) = &mut self.work else {
            return;
        };
        at.stage = Stage::Claim;
        let (epoch, now) = (at.writer.epoch, env.rough_clock());
        self.ask(env, MetaOp::Claim { epoch, now }, left);
    }

    /// Looks for the newest tiered chunk, and compares it with the local one.
    fn timeline(&mut self, env: &mut Env) -> Option<Result<Box<Found>, TransferError>> {
        let Work::Resolve(at) = &mut self.work else {
            return None;
        };
        let newest = at.manifest.entries.back().copied();
        if env.is(Twin::TimelineCheck) {
            return self.finish(env, Timeline::Unverifiable);
        }
        if newest.is_none() && at.manifest.next_offset == Offset(0) {
            return self.finish(env, Timeline::Unverifiable);
        }
        if newest.is_none() {
            let timeline = self.continuation(env, None);
            return self.finish(env, timeline);
        }
        self.newest(env, newest)
    }

    fn newest(
        &mut self,
        env: &mut Env,
        entry: Option<Entry>,
    ) -> Option<Result<Box<Found>, TransferError>> {
        let Work::Resolve(at) = &mut self.work else {
            return None;
        };
        let Some(entry) = entry else {
            return Some(Err(TransferError::Other));
        };
        let (kind, first) = (entry.kind, entry.first_offset);
        let key = key::entry(&env.prefix, &env.stream, kind, first, entry.uid);
        let part = match entry.object() {
            ObjectRef::Fragment(_) => {
                at.stage = Stage::Index(key.clone());
                Part::Last(INDEX_RECORD_SIZE as u64)
            }
            ObjectRef::Group(_) => {
                at.stage = Stage::Group;
                Part::Whole
            }
        };
        self.store(env, StoreOp::Get { key, part });
        None
    }

    fn index(
        &mut self,
        env: &mut Env,
        key: String,
        bytes: &[u8],
    ) -> Option<Result<Box<Found>, TransferError>> {
        let Work::Resolve(at) = &mut self.work else {
            return None;
        };
        let Ok(bytes) = bytes.try_into() else {
            return Some(Err(TransferError::Other));
        };
        let record = IndexRecord::decode(bytes);
        at.stage = Stage::Header(record.chunk_id);
        let start = OBJECT_HEADER.len() as u64 + u64::from(record.position);
        let part = Part::Range(start, start + CHUNK_HEADER_SIZE as u64);
        self.store(env, StoreOp::Get { key, part });
        None
    }

    fn header(
        &mut self,
        env: &mut Env,
        chunk_id: Offset,
        bytes: &[u8],
    ) -> Option<Result<Box<Found>, TransferError>> {
        let header = match ChunkHeader::decode(bytes) {
            Ok(header) if header.chunk_id == chunk_id => header,
            Ok(_) | Err(_) => return Some(Err(TransferError::CorruptChunk(chunk_id))),
        };
        let local = local_chunk(env, self.node, chunk_id);
        let newest = ChunkIdentity::from(&header);
        let mut timeline = check_timeline(&newest, &local);
        if timeline == Timeline::Unverifiable {
            timeline = self.continuation(env, Some(&newest));
        }
        env.coverage.hit(match timeline {
            Timeline::Same => "timeline same",
            Timeline::Different => "timeline different",
            Timeline::Unverifiable => "timeline unverifiable",
        });
        self.finish(env, timeline)
    }

    /// What the log has where the tier ends, where its newest chunk does not tell.
    fn continuation(&self, env: &Env, newest: Option<&ChunkIdentity>) -> Timeline {
        match &self.work {
            Work::Resolve(at) if !env.is(Twin::ContinuationCheck) => {
                let end = at.manifest.next_offset;
                let first = env.cluster.members[self.node].range().first;
                if newest.is_some()
                    && check_beginning(end, first.map(Offset)) == Timeline::Different
                {
                    return Timeline::Different;
                }
                check_continuation(newest, &local_chunk(env, self.node, end))
            }
            Work::Resolve(_)
            | Work::Persist(_)
            | Work::Group { .. }
            | Work::Retention(_)
            | Work::LocalRetention(..) => Timeline::Unverifiable,
        }
    }

    fn finish(
        &mut self,
        env: &mut Env,
        timeline: Timeline,
    ) -> Option<Result<Box<Found>, TransferError>> {
        let Work::Resolve(at) = &mut self.work else {
            return None;
        };
        let range = if at.writer.recovering_until > env.now {
            Range {
                first: None,
                next: 0,
            }
        } else {
            env.cluster.members[self.node].range()
        };
        Some(Ok(Box::new(Found {
            epoch: at.writer.epoch,
            manifest: at.manifest.clone(),
            root: at.root,
            range,
            timeline,
        })))
    }
}

/// What a member's log has where a chunk should be.
pub(crate) fn local_chunk(env: &Env, node: usize, chunk_id: Offset) -> LocalChunk {
    let member = &env.cluster.members[node];
    let range = member.range();
    let trimmed = range.first.is_some_and(|first| chunk_id.0 < first);
    if trimmed {
        return pins::identity(env, node, chunk_id);
    }
    if let Some(chunk) = member.chunk_at(chunk_id.0) {
        return LocalChunk::Found(ChunkIdentity {
            chunk_id,
            epoch: Epoch(chunk.epoch),
            crc: chunk.crc,
        });
    }
    match range.first {
        Some(first) if first < chunk_id.0 && chunk_id.0 < range.next => LocalChunk::InsideAnother,
        Some(_) | None => LocalChunk::Trimmed,
    }
}
