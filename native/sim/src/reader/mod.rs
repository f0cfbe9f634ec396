//! The replica reader's shell, one to one with `rabbitmq_stream_s3_replica_reader` and its modules: the same messages, the same
//! order of things, the same effects performed. What blocks runs in tasks.

mod cutting;
mod drain;
mod effects;
mod persists;
mod retention;
mod transfers;

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use stream_s3_core::decisions::deletions::DeletionQueue;
use stream_s3_core::decisions::local_log::{LocalLog, Start, compare, on_other_timeline};
use stream_s3_core::decisions::retry::retry_delay;
use stream_s3_core::decisions::timeline::Timeline;
use stream_s3_core::error::TransferError;
use stream_s3_core::fragment::FragmentMeta;
use stream_s3_core::manifest::{Entry, EntryKind, Manifest};
use stream_s3_core::replica_reader::{Machine, ResetPersist};
use stream_s3_core::units::{Offset, TransferId, Uid};

use crate::cluster::Writer;
use crate::env::{AttemptId, Cached, Env, Event, Pid, TaskId, TimerId};
use crate::metadata::RootEntry;
use crate::pins;
use crate::tasks::{self, Answer, Found, Kind, Resolving, Stage, Task, TaskResult, Work};
use crate::twin::Twin;

use drain::Drain;
use retention::Trimming;
use transfers::Transfers;

/// A task is given up that much after the moment at which it should have given up by itself.
const GRACE: u64 = 100;

/// A message to a reader.
#[derive(Debug)]
pub(crate) enum Msg {
    Start,
    Drain,
    Listened,
    Timer(TimerId, Timer),
    TaskResult(TaskId, TaskResult),
    /// A task died.
    TaskExit(TaskId),
    Admitted(AttemptId),
    Transferred(AttemptId, Result<Uid, TransferError>),
    /// Waiter, offset.
    Await(u64, u64),
    ForceCut,
    Flush(u64),
    /// The stream was paused or resumed.
    PauseChanged,
    WriterDown,
}

/// What a timer is for.
#[derive(Debug)]
pub(crate) enum Timer {
    Persist,
    Age,
    Resolve,
    Retention,
    Group(EntryKind, Vec<Entry>),
    Task(TaskId),
    Deadline(TransferId),
    NextAttempt(TransferId),
}

/// What the core hands back untouched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Host {
    Meta(Rc<FragmentMeta>),
    Offset(u64),
    Reason(TransferError),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    Continue,
    Resolve(TransferError),
    Stop,
}

/// What the last persist that succeeded is to tell other nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum News {
    Reset,
    /// From a revision to another one.
    Continues(u64, u64),
}

/// Whether the process goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Life {
    Continues,
    /// Normally, with its writer; as the stream is deleted, where true.
    Ended(bool),
}

/// The state of a reader.
pub(crate) struct Reader {
    pub(crate) pid: Pid,
    stream: usize,
    pub(crate) node: usize,
    pub(crate) writer: Writer,
    verdict: Verdict,
    tasks: BTreeMap<Kind, (TaskId, TimerId)>,
    transfers: Transfers,
    /// Callers by the offset they wait for.
    pub(crate) waiters: BTreeMap<u64, Vec<u64>>,
    listening: bool,
    resolutions: u32,
    resolve_timer: Option<TimerId>,
    epoch: u64,
    root: Option<RootEntry>,
    /// Since when the root is of a manifest that is to be discarded.
    discarded: Option<i64>,
    pub(crate) core: Option<Machine<Host>>,
    drain: Option<Drain>,
    draining: bool,
    paused: bool,
    /// What has been lost behind all that is on its way: when everything before is persisted the reader resolves anew.
    gap: Option<u64>,
    /// Whether the next fragment is cut with the first chunks that come, because the last beginning came to nothing.
    cut_early: bool,
    cut: VecDeque<u64>,
    age_timer: Option<(TimerId, u64)>,
    persist_timer: Option<TimerId>,
    group_timer: Option<TimerId>,
    persist_failures: (u32, TransferError),
    /// Revision that the persist under way replaces.
    persisting_from: u64,
    news: News,
    /// Everything below is to be cut and persisted without waiting for more.
    flush: Option<u64>,
    retention_timer: Option<TimerId>,
    trimming: Option<Trimming>,
    group_failures: (u32, TransferError),
    /// What retention dropped, until that is persisted.
    deletions: DeletionQueue,
}

impl Reader {
    pub(crate) fn new(pid: Pid, node: usize, writer: Writer, env: &mut Env) -> Self {
        let table = &mut env.nodes[node].table;
        table.reader = true;
        if table.cached == Cached::Unknown {
            table.cached = Cached::Pending;
        }
        env.send(pid, Msg::Start);
        Self {
            pid,
            stream: env.at(),
            node,
            writer,
            verdict: Verdict::Continue,
            tasks: BTreeMap::new(),
            transfers: Transfers::default(),
            waiters: BTreeMap::new(),
            listening: false,
            resolutions: 0,
            resolve_timer: None,
            epoch: 0,
            root: None,
            discarded: None,
            core: None,
            drain: None,
            draining: false,
            paused: false,
            gap: None,
            cut_early: false,
            cut: VecDeque::new(),
            age_timer: None,
            persist_timer: None,
            group_timer: None,
            persist_failures: (0, TransferError::Timeout),
            persisting_from: 0,
            news: News::Reset,
            flush: None,
            retention_timer: None,
            trimming: None,
            group_failures: (0, TransferError::Timeout),
            deletions: DeletionQueue::default(),
        }
    }

    /// Whether it is the one of a stream on a node.
    pub(crate) fn is_of(&self, stream: usize, node: usize) -> bool {
        self.stream == stream && self.node == node
    }

    pub(crate) fn stream(&self) -> usize {
        self.stream
    }

    /// Whether it runs with nothing under way and nothing to do.
    pub(crate) fn is_idle(&self) -> bool {
        let Some(core) = &self.core else {
            return false;
        };
        let status = core.status();
        self.tasks.is_empty()
            && status.edits_waiting == 0
            && status.transfers_in_flight + status.transfers_pending_order == 0
            && !self.draining
            && !self.paused
            && self.drain.as_ref().is_some_and(Drain::is_empty)
    }

    /// Where it stands, for a trace.
    pub(crate) fn describe(&self) -> String {
        let drain = self
            .drain
            .as_ref()
            .map(|drain| (drain.next_offset(), drain.is_empty()));
        format!(
            "reader {} node {} epoch {} running {} draining {} paused {} listening {} drain {drain:?} cut {:?} timers {:?} tasks {:?} status {:?}",
            self.pid,
            self.node,
            self.writer.epoch,
            self.core.is_some(),
            self.draining,
            self.paused,
            self.listening,
            self.cut,
            (
                self.persist_timer,
                self.age_timer,
                self.group_timer,
                self.resolve_timer
            ),
            self.tasks,
            self.core.as_ref().map(Machine::status)
        )
    }

    fn timer(&self, env: &mut Env, delay: u64, timer: Timer) -> TimerId {
        let id = env.fresh();
        env.after(delay, Event::Reader(self.pid, Msg::Timer(id, timer)));
        id
    }

    /// One message.
    pub(crate) fn handle(&mut self, env: &mut Env, msg: Msg) -> Life {
        match msg {
            Msg::Start => self.start_resolving(env),
            Msg::Drain if self.draining => {
                self.draining = false;
                self.drain(env);
            }
            Msg::Drain => {}
            Msg::Listened => {
                self.listening = false;
                if self.core.is_some() {
                    self.drain(env);
                }
            }
            Msg::Timer(id, timer) => self.timed_out(env, id, timer),
            Msg::TaskResult(task, result) => self.task_ended(env, task, Ok(result)),
            Msg::TaskExit(task) => self.task_ended(env, task, Err(TransferError::Other)),
            Msg::Admitted(attempt) => self.admitted(env, attempt),
            Msg::Transferred(attempt, result) => self.transfer_result(env, attempt, result),
            Msg::Await(waiter, offset) => self.wait_for(env, waiter, offset),
            Msg::ForceCut if self.core.is_some() && !env.paused => self.force_cut(env),
            Msg::ForceCut => {}
            Msg::Flush(waiter) => self.ask_to_flush(env, waiter),
            Msg::PauseChanged => self.resume(env),
            Msg::WriterDown => {
                self.release(env);
                env.nodes[self.node].table.cached = Cached::Unknown;
                return Life::Ended(false);
            }
        }
        if self.verdict == Verdict::Continue && self.core.is_some() {
            if self.gap.is_some() {
                self.settle(env);
            } else if self.flush.is_some() {
                self.flush(env);
            }
        }
        match std::mem::replace(&mut self.verdict, Verdict::Continue) {
            Verdict::Continue => Life::Continues,
            Verdict::Resolve(reason) => {
                self.resolve_again(env, reason);
                Life::Continues
            }
            Verdict::Stop => {
                env.note(|| format!("reader {} stops, the stream is deleted", self.pid));
                self.release(env);
                env.nodes[self.node].table.cached = Cached::Unknown;
                Life::Ended(true)
            }
        }
    }

    fn timed_out(&mut self, env: &mut Env, id: TimerId, timer: Timer) {
        match timer {
            Timer::Persist if self.persist_timer == Some(id) => {
                self.persist_timer = None;
                self.tick(env);
            }
            Timer::Age if self.age_timer.map(|(timer, _)| timer) == Some(id) => {
                self.age_timer = None;
                self.too_old(env);
            }
            Timer::Resolve if self.resolve_timer == Some(id) => {
                self.resolve_timer = None;
                self.start_resolving(env);
            }
            Timer::Retention if self.retention_timer == Some(id) => {
                self.retention_timer = None;
                self.retain(env);
            }
            Timer::Group(kind, entries) if self.group_timer == Some(id) => {
                self.upload_group(env, kind, entries);
            }
            Timer::Task(task) => {
                if self.tasks.values().any(|known| *known == (task, id)) {
                    self.task_ended(env, task, Err(TransferError::Timeout));
                }
            }
            Timer::Deadline(fragment) => self.deadline(env, id, fragment),
            Timer::NextAttempt(fragment) => self.next_attempt(env, id, fragment),
            // Cancelled too late.
            Timer::Persist | Timer::Age | Timer::Resolve | Timer::Retention | Timer::Group(..) => {}
        }
    }

    /// Lets go of all that is under way. Keeps those who wait.
    pub(crate) fn release(&mut self, env: &mut Env) {
        self.answer_trimming(env);
        for (task, _) in std::mem::take(&mut self.tasks).into_values() {
            if !env.is(Twin::GenerationCheck) {
                env.tasks.remove(&task);
            }
        }
        self.cancel_transfers(env);
        self.core = None;
        self.drain = None;
        self.draining = false;
        self.paused = false;
        self.gap = None;
        self.cut.clear();
        self.age_timer = None;
        self.persist_timer = None;
        self.group_timer = None;
        self.resolve_timer = None;
        self.retention_timer = None;
        self.persist_failures.0 = 0;
        self.group_failures.0 = 0;
        self.deletions = DeletionQueue::default();
    }

    // --- tasks -------------------------------------------------------------------------------------------------------

    fn start_task(&mut self, env: &mut Env, work: Work) {
        let id = env.fresh();
        let until = env.now + env.plan.persist_timeout;
        let task = Task {
            id,
            stream: env.at(),
            reader: self.pid,
            node: self.node,
            until,
            call: 0,
            work,
        };
        let kind = task.kind();
        let timer = self.timer(env, env.plan.persist_timeout + GRACE, Timer::Task(id));
        if self.tasks.insert(kind, (id, timer)).is_some() {
            env.violate(8, format!("two tasks of kind {kind:?} at once"));
        }
        env.tasks.insert(id, task);
        tasks::proceed(env, id, Answer::Start);
    }

    /// A task's result, or why there is none. Those of tasks that were given up mean nothing.
    fn task_ended(
        &mut self,
        env: &mut Env,
        task: TaskId,
        result: Result<TaskResult, TransferError>,
    ) {
        let known = self
            .tasks
            .iter()
            .find(|(_, (id, _))| *id == task)
            .map(|(kind, _)| *kind);
        let result = match (known, result) {
            (Some(kind), Ok(result)) => {
                self.tasks.remove(&kind);
                result
            }
            (Some(kind), Err(error)) => {
                self.tasks.remove(&kind);
                env.tasks.remove(&task);
                env.coverage.hit("task died or kept no time");
                tasks::failure(kind, error)
            }
            (None, Ok(result)) if env.is(Twin::GenerationCheck) && self.core.is_some() => result,
            (None, Ok(_) | Err(_)) => {
                env.coverage.hit("old task result");
                return;
            }
        };
        match result {
            TaskResult::Resolved(result) if self.core.is_none() => self.resolved(env, result),
            TaskResult::Resolved(_) => {}
            TaskResult::Persisted(result) => self.persisted(env, result),
            TaskResult::Grouped(result) => self.grouped(env, result),
            TaskResult::Retained(retained) => self.retained(env, *retained),
            TaskResult::Trimmed(done) => self.trimmed(env, done),
        }
    }

    fn retry_delay(env: &mut Env, reason: &TransferError, failures: u32) -> u64 {
        let jitter = env.rng.bits32();
        retry_delay(reason.class(), failures, &env.plan.delays, jitter)
    }

    // --- finding out where to start ----------------------------------------------------------------------------------

    fn start_resolving(&mut self, env: &mut Env) {
        self.resolutions += 1;
        let resolving = Resolving {
            writer: self.writer,
            root: None,
            manifest: Manifest::default(),
            stage: Stage::Begin,
        };
        self.start_task(env, Work::Resolve(resolving));
    }

    fn resolve_again(&mut self, env: &mut Env, reason: TransferError) {
        env.coverage.hit("resolve again");
        self.release(env);
        let delay = Self::retry_delay(env, &reason, self.resolutions.max(1));
        self.resolve_timer = Some(self.timer(env, delay, Timer::Resolve));
    }

    fn resolved(&mut self, env: &mut Env, result: Result<Box<Found>, TransferError>) {
        let found = match result {
            Ok(found) => *found,
            Err(reason) => {
                env.coverage.hit("resolution failed");
                self.verdict = Verdict::Resolve(reason);
                return;
            }
        };
        let Found {
            epoch,
            manifest,
            root,
            range,
            timeline,
        } = found;
        env.publish(self.node, manifest.clone());
        self.epoch = epoch;
        self.root = root;
        self.discarded = None;
        let log = LocalLog {
            first: range.first.map(Offset),
            next: Offset(range.next),
            pinned_first: pins::prolonging(env, self.node, range.first),
        };
        if log.pinned_first.is_some() {
            env.coverage.hit("log prolonged by pins");
        }
        let start = if timeline == Timeline::Different {
            on_other_timeline(&manifest, &log)
        } else {
            compare(&manifest, &log)
        };
        env.note(|| {
            format!(
                "reader {} resolved revision {} [{}, {}) log {range:?} {timeline:?}: {start:?}",
                self.pid, manifest.revision, manifest.first_offset, manifest.next_offset
            )
        });
        match start {
            Start::Fresh { at } => {
                env.coverage.hit("start fresh");
                self.run(env, at, manifest, None);
            }
            Start::Resume { at } => {
                env.coverage.hit("start resume");
                if timeline == Timeline::Unverifiable && !env.is(Twin::TimelineCheck) {
                    env.resumed_blindly(self.node);
                }
                self.run(env, at, manifest, None);
            }
            Start::LocalAhead { at, discarded } => {
                env.coverage.hit("start local ahead");
                if pins::must_hold(env, self.node, self.writer, discarded.next.0) {
                    let what = format!(
                        "offsets from {} were lost within the budget of pins",
                        discarded.next
                    );
                    env.violate(4, what);
                }
                self.run(env, at, manifest, Some(ResetPersist::WithFirstFragment));
            }
            Start::RemoteAhead { at, .. } => {
                env.coverage.hit("start remote ahead");
                self.run(env, at, manifest, Some(ResetPersist::AtOnce));
            }
            Start::WaitForLog => {
                env.coverage.hit("start wait for log");
                self.verdict = Verdict::Resolve(TransferError::Timeout);
            }
        }
    }

    fn run(&mut self, env: &mut Env, at: Offset, manifest: Manifest, reset: Option<ResetPersist>) {
        let Some(drain) = Drain::open(env, self.node, at.0) else {
            env.coverage.hit("log does not open");
            self.verdict = Verdict::Resolve(TransferError::Timeout);
            return;
        };
        pins::persisted(env, self.node, self.writer, at);
        self.drain = Some(drain);
        self.draining = true;
        env.send(self.pid, Msg::Drain);
        self.start(env, manifest, at, reset);
        let waiting: Vec<u64> = self.waiters.keys().copied().collect();
        for offset in waiting {
            self.await_offset(env, offset);
        }
    }

    fn wait_for(&mut self, env: &mut Env, waiter: u64, offset: u64) {
        let callers = self.waiters.entry(offset).or_default();
        callers.push(waiter);
        if callers.len() == 1 && self.core.is_some() {
            self.await_offset(env, offset);
        }
    }

    /// What a process that has ended leaves: its tasks die with it, and its callers hear of it. One that was killed has cancelled nothing;
    /// the governor finds out by itself.
    pub(crate) fn ended(mut self, env: &mut Env) {
        for (task, _) in std::mem::take(&mut self.tasks).into_values() {
            env.tasks.remove(&task);
        }
        let delay = env.rng.between(0, 1_000);
        env.after(delay, Event::Sweep(self.node, self.pid));
        for waiter in self.waiters.values().flatten() {
            env.oracle.reader_down(*waiter);
        }
        env.nodes[self.node].table.reader = false;
    }
}
