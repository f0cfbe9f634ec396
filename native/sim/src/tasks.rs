//! Work that may block, in processes of its own: `rabbitmq_stream_s3_replica_reader_resolve` and the tasks of a reader.
//!
//! A process that waits for an answer is here a value that is called with it.

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
use stream_s3_core::manifest::{
    Entry, EntryKind, FetchFailed, Manifest, ObjectRef, Retention, RetentionContinuation,
    decode_group, decode_root, encode_group, encode_root,
};
use stream_s3_core::units::{Epoch, Offset, Revision, Uid};

use crate::bucket::{Part, StoreAnswer, StoreError, StoreOp, StoreValue};
use crate::cluster::{Range, Writer};
use crate::env::{Cached, Env, Event, Origin, Pid, TaskId};
use crate::metadata::{MetaAnswer, MetaError, MetaOp, MetaValue, RootEntry};
use crate::reader::Msg;
use crate::twin::Twin;

/// Longest attempt to write to the metadata store.
const METADATA_ATTEMPT: u64 = 500;

/// At most one of each kind runs at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Resolve,
    Persist,
    Group,
    Retention,
}

/// A process that works for a reader.
#[derive(Debug)]
pub(crate) struct Task {
    pub(crate) id: TaskId,
    pub(crate) reader: Pid,
    pub(crate) node: usize,
    pub(crate) until: u64,
    /// Number of the call whose answer is waited for.
    pub(crate) call: u32,
    pub(crate) work: Work,
}

/// What it is doing.
#[derive(Debug)]
pub(crate) enum Work {
    Resolve(Resolving),
    Persist(Persisting),
    Group {
        kind: EntryKind,
        entries: Vec<Entry>,
        uid: Uid,
    },
    Retention(Option<RetentionContinuation>),
    /// A retention that needs no group, and some time.
    Decided(Box<Retention>),
}

/// A resolution on its way.
#[derive(Debug)]
pub(crate) struct Resolving {
    pub(crate) writer: Writer,
    pub(crate) root: Option<RootEntry>,
    pub(crate) manifest: Manifest,
    pub(crate) stage: Stage,
}

/// Where a resolution stands.
#[derive(Debug)]
pub(crate) enum Stage {
    Begin,
    Anchor,
    Get,
    Root(RootEntry, Revision),
    Group,
    Index(String),
    Header(Offset),
}

/// A persist on its way.
#[derive(Debug)]
pub(crate) struct Persisting {
    pub(crate) manifest: Manifest,
    pub(crate) epoch: u64,
    pub(crate) expected: u64,
    pub(crate) uid: u32,
    pub(crate) stored: bool,
    /// What the twin that deletes too early deletes.
    pub(crate) old: Option<RootEntry>,
}

/// What a resolution found out.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    pub(crate) epoch: u64,
    pub(crate) manifest: Manifest,
    pub(crate) root: Option<RootEntry>,
    pub(crate) range: Range,
    pub(crate) timeline: Timeline,
}

/// How a persist failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PersistFailure {
    Conflict,
    NotFound,
    Store(TransferError),
    Metadata,
    Crashed,
}

/// What a task sends before it ends.
#[derive(Debug)]
pub(crate) enum TaskResult {
    Resolved(Result<Box<Found>, TransferError>),
    Persisted(Result<(RootEntry, u64), PersistFailure>),
    Grouped(Result<Uid, TransferError>),
    Retained(Box<Retention>),
}

/// An answer to a task's call.
#[derive(Debug)]
pub(crate) enum Answer {
    Start,
    Store(StoreAnswer),
    Meta(MetaAnswer),
}

/// Lets a task go on with an answer.
pub(crate) fn proceed(env: &mut Env, id: TaskId, answer: Answer) {
    let Some(mut task) = env.tasks.remove(&id) else {
        return;
    };
    match task.step(env, answer) {
        Some(result) => {
            env.note(|| format!("task {id} ends: {result:?}"));
            env.send(task.reader, Msg::TaskResult(id, result));
        }
        None => {
            env.tasks.insert(id, task);
        }
    }
}

/// What a task of that kind answers when it died or kept no time.
pub(crate) fn failure(kind: Kind, error: TransferError) -> TaskResult {
    match kind {
        Kind::Resolve => TaskResult::Resolved(Err(error)),
        Kind::Persist => TaskResult::Persisted(Err(PersistFailure::Crashed)),
        Kind::Group => TaskResult::Grouped(Err(error)),
        Kind::Retention => TaskResult::Retained(Box::new(Retention::Unchanged)),
    }
}

impl Task {
    pub(crate) fn kind(&self) -> Kind {
        match &self.work {
            Work::Resolve(_) => Kind::Resolve,
            Work::Persist(_) => Kind::Persist,
            Work::Group { .. } => Kind::Group,
            Work::Retention(_) | Work::Decided(_) => Kind::Retention,
        }
    }

    /// Whether the answer that it waits for is the metadata store's.
    pub(crate) fn waits_for_metadata(&self) -> bool {
        match &self.work {
            Work::Resolve(resolving) => match resolving.stage {
                Stage::Anchor | Stage::Get => true,
                Stage::Begin
                | Stage::Root(..)
                | Stage::Group
                | Stage::Index(_)
                | Stage::Header(_) => false,
            },
            Work::Persist(persisting) => persisting.stored,
            Work::Group { .. } | Work::Retention(_) | Work::Decided(_) => false,
        }
    }

    fn left(&self, env: &Env) -> u64 {
        self.until.saturating_sub(env.now)
    }

    fn limit(&mut self, env: &mut Env, limit: u64) -> Origin {
        self.call += 1;
        env.after(limit, Event::CallTimeout(self.id, self.call));
        Origin::Task(self.id, self.call)
    }

    fn store(&mut self, env: &mut Env, op: StoreOp) {
        let limit = self.left(env);
        let origin = self.limit(env, limit);
        env.store(op, origin);
    }

    fn metadata(&mut self, env: &mut Env, op: MetaOp, limit: u64) {
        let origin = self.limit(env, limit);
        env.metadata(op, origin);
    }

    fn step(&mut self, env: &mut Env, answer: Answer) -> Option<TaskResult> {
        match &mut self.work {
            Work::Resolve(_) => self.resolve(env, answer).map(TaskResult::Resolved),
            Work::Persist(_) => self.persist(env, answer).map(TaskResult::Persisted),
            Work::Group { .. } => self.group(env, answer).map(TaskResult::Grouped),
            Work::Retention(_) => self
                .retention(env, answer)
                .map(|retention| TaskResult::Retained(Box::new(retention))),
            Work::Decided(retention) => match answer {
                Answer::Start => {
                    let limit = env.rng.between(0, 40);
                    self.limit(env, limit);
                    None
                }
                Answer::Store(_) | Answer::Meta(_) => Some(TaskResult::Retained(retention.clone())),
            },
        }
    }

    // --- resolve ---------------------------------------------------------------------------------------------------

    fn resolve(
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
                if env.is(Twin::AnchorFirst) {
                    at.stage = Stage::Get;
                    let left = self.left(env);
                    self.metadata(env, MetaOp::Get, left);
                } else {
                    at.stage = Stage::Anchor;
                    let left = self.left(env);
                    self.metadata(env, MetaOp::Anchor, left);
                }
                None
            }
            (Stage::Anchor, Answer::Meta(Ok(MetaValue::Anchored))) => {
                at.stage = Stage::Get;
                let left = self.left(env);
                self.metadata(env, MetaOp::Get, left);
                None
            }
            (Stage::Get, Answer::Meta(answer)) => self.got(env, answer),
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
            Ok(MetaValue::Anchored | MetaValue::Written(_))
            | Err(MetaError::Conflict | MetaError::Timeout) => Known::Failed,
        };
        let cached = match &env.nodes[self.node].cached {
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
                self.timeline(env)
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
            Ok(StoreValue::Done | StoreValue::Listing(_)) | Err(StoreError::Failed(_)) => {
                Fetched::Failed
            }
        };
        match resolved(fetched, revision) {
            Resolved::Manifest(manifest) => {
                at.root = Some(entry);
                at.manifest = manifest;
                self.timeline(env)
            }
            Resolved::Retry if env.is(Twin::ErrorIsNotEmpty) => {
                at.root = Some(entry);
                at.manifest = Manifest::empty_at(Offset(0), revision);
                self.timeline(env)
            }
            Resolved::Retry => Some(Err(body(answer).err().unwrap_or(TransferError::Other))),
        }
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
            | Work::Decided(_) => Timeline::Unverifiable,
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

    // --- persist ---------------------------------------------------------------------------------------------------

    fn persist(
        &mut self,
        env: &mut Env,
        answer: Answer,
    ) -> Option<Result<(RootEntry, u64), PersistFailure>> {
        let Work::Persist(at) = &mut self.work else {
            return None;
        };
        let key = key::root(&env.prefix, &env.stream, Epoch(at.epoch), Uid(at.uid));
        match answer {
            Answer::Start => match encode_root(&at.manifest) {
                Ok(bytes) => {
                    let body = bytes.into();
                    self.store(env, StoreOp::Put { key, body });
                    None
                }
                Err(_) => Some(Err(PersistFailure::Crashed)),
            },
            Answer::Store(Ok(_)) => {
                at.stored = true;
                env.coverage.hit("root stored");
                if let Some((uid, epoch)) = at.old
                    && env.is(Twin::OldRootAfterSwap)
                {
                    let keys = vec![key::root(&env.prefix, &env.stream, Epoch(epoch), Uid(uid))];
                    env.store(StoreOp::Delete { keys }, Origin::Nobody);
                }
                self.make_current(env);
                None
            }
            Answer::Store(Err(StoreError::Failed(error))) => {
                Some(Err(PersistFailure::Store(error)))
            }
            Answer::Store(Err(StoreError::NotFound)) => {
                Some(Err(PersistFailure::Store(TransferError::Http(404))))
            }
            Answer::Meta(Ok(MetaValue::Written(revision))) if revision > at.expected => {
                Some(Ok(((at.uid, at.epoch), revision)))
            }
            Answer::Meta(Ok(_)) => Some(Err(PersistFailure::Metadata)),
            Answer::Meta(Err(MetaError::Conflict)) => {
                // Revisions only grow, so no attempt with this one can win any more.
                env.store(StoreOp::Delete { keys: vec![key] }, Origin::Nobody);
                Some(Err(PersistFailure::Conflict))
            }
            Answer::Meta(Err(MetaError::NotFound)) => Some(Err(PersistFailure::NotFound)),
            Answer::Meta(Err(MetaError::Timeout)) => {
                if env.is(Twin::KeepUnknownRoot) {
                    env.store(StoreOp::Delete { keys: vec![key] }, Origin::Nobody);
                    return Some(Err(PersistFailure::Metadata));
                }
                if self.left(env) == 0 {
                    return Some(Err(PersistFailure::Metadata));
                }
                // It may have won. With the same entry the next attempt recognises itself.
                self.make_current(env);
                None
            }
        }
    }

    fn make_current(&mut self, env: &mut Env) {
        let left = self.left(env);
        let Work::Persist(at) = &self.work else {
            return;
        };
        let op = MetaOp::Put {
            entry: (at.uid, at.epoch),
            expected: at.expected,
        };
        self.metadata(env, op, left.min(METADATA_ATTEMPT));
    }

    // --- group and retention ----------------------------------------------------------------------------------------

    fn group(&mut self, env: &mut Env, answer: Answer) -> Option<Result<Uid, TransferError>> {
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

    fn retention(&mut self, env: &mut Env, answer: Answer) -> Option<Retention> {
        let Work::Retention(waiting) = &mut self.work else {
            return None;
        };
        let continuation = waiting.take()?;
        let entries = match answer {
            Answer::Start => {
                let group = continuation.group();
                let key = key::group(
                    &env.prefix,
                    &env.stream,
                    group.kind,
                    group.offset,
                    group.uid,
                );
                *waiting = Some(continuation);
                let part = Part::Whole;
                self.store(env, StoreOp::Get { key, part });
                return None;
            }
            Answer::Store(answer) => match body(answer).map(|bytes| decode_group(&bytes)) {
                Ok(Ok(group)) => Ok(group.entries),
                Ok(Err(_)) | Err(_) => Err(FetchFailed),
            },
            Answer::Meta(_) => Err(FetchFailed),
        };
        match continuation.resume(entries) {
            Retention::Fetch(_, continuation) => {
                *waiting = Some(continuation);
                self.retention(env, Answer::Start)
            }
            decided @ (Retention::Unchanged | Retention::Drop { .. }) => Some(decided),
        }
    }
}

/// The bytes of an answer, or why there are none.
pub(crate) fn body(answer: StoreAnswer) -> Result<crate::bucket::Body, TransferError> {
    match answer {
        Ok(StoreValue::Body(bytes)) => Ok(bytes),
        Ok(StoreValue::Done | StoreValue::Listing(_)) => Err(TransferError::Other),
        Err(StoreError::NotFound) => Err(TransferError::Http(404)),
        Err(StoreError::Failed(error)) => Err(error),
    }
}

/// What a member's log has where a chunk should be.
pub(crate) fn local_chunk(env: &Env, node: usize, chunk_id: Offset) -> LocalChunk {
    let member = &env.cluster.members[node];
    let range = member.range();
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
