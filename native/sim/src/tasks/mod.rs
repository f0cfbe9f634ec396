//! Work that may block, in processes of its own: `rabbitmq_stream_s3_replica_reader_resolve` and the tasks of a reader.
//!
//! A process that waits for an answer is here a value that is called with it.

mod persist;
mod resolve;
mod upkeep;

use stream_s3_core::decisions::timeline::Timeline;
use stream_s3_core::error::TransferError;
use stream_s3_core::manifest::{
    Entry, EntryKind, Manifest, Retention, RetentionContinuation, RetentionLimits,
};
use stream_s3_core::units::{Offset, Revision, Uid};

use crate::bucket::{StoreAnswer, StoreError, StoreOp, StoreValue};
use crate::cluster::{Range, Writer};
use crate::env::{Env, Event, Origin, Pid, TaskId};
use crate::metadata::{MetaAnswer, MetaOp, RootEntry};
use crate::reader::Msg;

/// At most one of each kind runs at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Resolve,
    Persist,
    Group,
    Retention,
    LocalRetention,
}

/// A process that works for a reader.
#[derive(Debug)]
pub(crate) struct Task {
    pub(crate) id: TaskId,
    pub(crate) stream: usize,
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
    Retention(Retaining),
    /// Trims the log of this writer, tiered up to this offset.
    LocalRetention(Writer, Offset),
}

/// A retention of the remote tier on its way.
#[derive(Debug)]
pub(crate) enum Retaining {
    Begin(Manifest, RetentionLimits),
    Fetching(RetentionContinuation),
    /// It takes some time.
    Decided(Box<Retained>),
}

/// What a retention has decided, and whether it could read all that it wanted to.
#[derive(Debug, Clone)]
pub(crate) struct Retained {
    pub(crate) decision: Retention,
    pub(crate) complete: bool,
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
    Claim,
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
    pub(crate) stage: PersistStage,
    /// When the tier so far was discarded, if this takes its place.
    pub(crate) discarded: Option<i64>,
    /// What the twin that deletes too early deletes.
    pub(crate) old: Option<RootEntry>,
}

/// Where a persist stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PersistStage {
    Discard,
    Root,
    /// With what was left of its time when the attempt began.
    Swap(u64),
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
    Retained(Box<Retained>),
    /// Whether it was done.
    Trimmed(bool),
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
        Kind::Retention => TaskResult::Retained(Box::new(Retained {
            decision: Retention::Unchanged,
            complete: false,
        })),
        Kind::LocalRetention => TaskResult::Trimmed(false),
    }
}

impl Task {
    pub(crate) fn kind(&self) -> Kind {
        match &self.work {
            Work::Resolve(_) => Kind::Resolve,
            Work::Persist(_) => Kind::Persist,
            Work::Group { .. } => Kind::Group,
            Work::Retention(_) => Kind::Retention,
            Work::LocalRetention(..) => Kind::LocalRetention,
        }
    }

    /// Whether the answer that it waits for is the metadata store's.
    pub(crate) fn waits_for_metadata(&self) -> bool {
        match &self.work {
            Work::Resolve(resolving) => match resolving.stage {
                Stage::Anchor | Stage::Get | Stage::Claim => true,
                Stage::Begin
                | Stage::Root(..)
                | Stage::Group
                | Stage::Index(_)
                | Stage::Header(_) => false,
            },
            Work::Persist(persisting) => match persisting.stage {
                PersistStage::Discard | PersistStage::Swap(_) => true,
                PersistStage::Root => false,
            },
            Work::Group { .. } | Work::Retention(_) | Work::LocalRetention(..) => false,
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

    fn ask(&mut self, env: &mut Env, op: MetaOp, limit: u64) {
        let origin = self.limit(env, limit);
        env.metadata(op, origin, self.node);
    }

    fn step(&mut self, env: &mut Env, answer: Answer) -> Option<TaskResult> {
        match &mut self.work {
            Work::Resolve(_) => self.resolve(env, answer).map(TaskResult::Resolved),
            Work::Persist(_) => self.persist(env, answer).map(TaskResult::Persisted),
            Work::Group { .. } => self.group(env, answer).map(TaskResult::Grouped),
            Work::Retention(_) => self
                .retention(env, answer)
                .map(|retained| TaskResult::Retained(Box::new(retained))),
            Work::LocalRetention(..) => self.local_retention(env, &answer).map(TaskResult::Trimmed),
        }
    }
}

/// The bytes of an answer, or why there are none.
pub(crate) fn body(answer: StoreAnswer) -> Result<crate::bucket::Body, TransferError> {
    match answer {
        Ok(StoreValue::Body(bytes)) => Ok(bytes),
        Ok(StoreValue::Done | StoreValue::Listing(_) | StoreValue::Undeleted(_)) => {
            Err(TransferError::Other)
        }
        Err(StoreError::NotFound) => Err(TransferError::Http(404)),
        Err(StoreError::Failed(error)) => Err(error),
    }
}
