//! What everything in a world shares: time, what is to come, randomness, faults, stores, logs, and the oracle.

use std::collections::BTreeMap;
use std::mem::swap;
use std::rc::Rc;

use stream_s3_core::admission::{Admission, Rate};
use stream_s3_core::error::TransferError;
use stream_s3_core::fragment::FragmentMeta;
use stream_s3_core::invariants::{Check, Violation};
use stream_s3_core::key::{Prefix, StreamId};
use stream_s3_core::manifest::Manifest;
use stream_s3_core::units::{Epoch, Offset, Uid};

use crate::bucket::{self, Bucket, Fate, StoreAnswer, StoreError, StoreOp};
use crate::cluster::Cluster;
use crate::coverage::Coverage;
use crate::gc::Pass;
use crate::metadata::{self, MetaAnswer, MetaError, MetaFate, MetaOp, Metadata};
use crate::oracle::Oracle;
use crate::pins::Pins;
use crate::plan::{Limits, Plan};
use crate::reader::Msg;
use crate::reaper::Reaper;
use crate::replica::{Replica, Sent, Synced};
use crate::rng::Rng;
use crate::tasks::Task;
use crate::twin::Twin;
use crate::world::Split;

/// Names a process.
pub(crate) type Pid = u64;
/// Names a task.
pub(crate) type TaskId = u64;
/// Names an attempt to transfer a fragment.
pub(crate) type AttemptId = u64;
/// Names a timer.
pub(crate) type TimerId = u64;

/// Who waits for an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The call of that number.
    Task(TaskId, u32),
    /// With the uid of its object.
    Attempt(usize, AttemptId, Uid),
    /// A listing.
    Gc,
    /// The request of that number of a node's reaper.
    Reaper(usize, u64),
    Nobody,
}

/// What happens to the world at some moment.
#[derive(Debug)]
pub(crate) enum Event {
    Write,
    Replicate(usize),
    Flush(usize),
    Trim,
    Nemesis,
    Split(Split),
    Elect,
    Join(usize),
    Up(usize),
    Reconnect(usize),
    Reconcile(usize),
    /// The supervisor of a reader starts it again.
    Restart(usize, u64),
    /// A reader that fails soon after each start, so many times more.
    KeepFailing(usize, u32),
    Client,
    /// An operator resumes the stream.
    Resume,
    DeleteStream,
    WriterEnds(usize),
    Calm,
    Gc,
    GcLook(Pass),
    GcDelete(Pass),
    Reaper(usize, u64),
    Look,
    StoreApply {
        op: StoreOp,
        origin: Origin,
        /// What is answered, and after how long.
        reply: Option<(u64, Option<TransferError>)>,
    },
    StoreReply(Origin, StoreAnswer),
    MetaApply {
        op: MetaOp,
        origin: Origin,
        reply: Option<u64>,
    },
    MetaReply(Origin, MetaAnswer),
    Reader(Pid, Msg),
    CallTimeout(TaskId, u32),
    Governor(usize),
    OpenFiles(usize, AttemptId),
    Aborted(usize, AttemptId),
    /// The governor looks for the work of a reader that has died.
    Sweep(usize, Pid),
    Replica(usize, Rc<Sent>),
    ReplicaLook(usize),
    /// Of a log that is tiered up to there, as the writer of that epoch has persisted.
    ReplicaTrim(usize, (Offset, Epoch)),
    ReplicaSync(usize, u64),
    ReplicaSynced(usize, u64, Synced),
}

/// What a node's table of manifests has for the stream.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum Cached {
    #[default]
    Unknown,
    Pending,
    Known(Manifest),
}

/// An attempt that the governor has.
#[derive(Debug)]
pub(crate) struct Attempt {
    pub(crate) stream: usize,
    pub(crate) reader: Pid,
    pub(crate) meta: Rc<FragmentMeta>,
}

/// A node's part outside of readers.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) governor: Admission<AttemptId>,
    pub(crate) attempts: BTreeMap<AttemptId, Attempt>,
    pub(crate) reaper: Reaper,
    /// Of the stream at hand.
    pub(crate) table: Table,
}

/// What a node knows of one stream.
#[derive(Debug, Default)]
pub(crate) struct Table {
    pub(crate) cached: Cached,
    pub(crate) replica: Replica,
    pub(crate) pins: Pins,
    /// Whether the stream has a reader here.
    pub(crate) reader: bool,
}

/// What a stream has for itself, while another one is at hand.
#[derive(Debug)]
struct Part {
    stream: StreamId,
    cluster: Cluster,
    metadata: Metadata,
    listeners: Vec<(usize, Pid, u64)>,
    oracle: Oracle,
    paused: bool,
    tables: Vec<Table>,
}

impl Part {
    fn new(number: usize, plan: &Plan) -> Self {
        Self {
            // The text is valid.
            stream: StreamId::parse(&format!("s_{}", number + 1))
                .unwrap_or_else(|_| unreachable!()),
            cluster: Cluster::new(plan.segment_bytes),
            metadata: Metadata::default(),
            listeners: Vec::new(),
            oracle: Oracle::default(),
            paused: false,
            tables: (0..crate::cluster::MEMBERS)
                .map(|_| Table::default())
                .collect(),
        }
    }
}

impl Node {
    pub(crate) fn new(plan: &Plan) -> Self {
        Self {
            governor: Admission::new(plan.rate, plan.burst, plan.permits),
            attempts: BTreeMap::new(),
            reaper: Reaper::default(),
            table: Table::default(),
        }
    }
}

/// See the module. Streams share time, stores, governors and machines; what each has for itself is here of the one that is at hand, the
/// one that the present event is of.
pub(crate) struct Env {
    /// Milliseconds, monotonic.
    pub(crate) now: u64,
    /// What the wall clock shows besides.
    pub(crate) skew: i64,
    pub(crate) rng: Rng,
    pub(crate) plan: Plan,
    pub(crate) twin: Option<Twin>,
    pub(crate) prefix: Prefix,
    pub(crate) stream: StreamId,
    pub(crate) cluster: Cluster,
    pub(crate) bucket: Bucket,
    pub(crate) metadata: Metadata,
    /// The metadata store has no majority until then.
    pub(crate) minority_until: u64,
    /// Until when each machine does not reach the metadata store.
    pub(crate) cut_from_metadata: [u64; crate::cluster::MEMBERS],
    /// Whether an operator has paused the stream.
    pub(crate) paused: bool,
    pub(crate) nodes: Vec<Node>,
    pub(crate) tasks: BTreeMap<TaskId, Task>,
    /// Who wants to be told by the writer of a node that a chunk is committed.
    pub(crate) listeners: Vec<(usize, Pid, u64)>,
    pub(crate) oracle: Oracle,
    pub(crate) coverage: Coverage,
    pub(crate) violation: Option<Violation>,
    /// Lines, where somebody wants to read them.
    pub(crate) trace: Option<Vec<String>>,
    /// Bytes a second of the slowest rate that a governor was ever given, if any was limited.
    pub(crate) slowest: Option<u64>,
    /// Faults are over.
    pub(crate) calm: bool,
    pub(crate) faults: u64,
    most_faults: u64,
    queue: BTreeMap<(u64, u64), (usize, Box<Event>)>,
    next_id: u64,
    /// What the wall clock has shown at most.
    pub(crate) latest_clock: i64,
    at: usize,
    parts: Vec<Part>,
}

/// What the wall clock shows in the beginning.
const CLOCK_START: i64 = 1_700_000_000_000;
/// By how much the clocks that object ages and discards are told by are wrong at most.
pub(crate) const CLOCK_ERROR: i64 = 4_000;

impl Env {
    pub(crate) fn new(seed: u64, limits: Limits, traced: bool) -> Self {
        let mut rng = Rng::new(seed);
        let mut plan = Plan::new(&mut rng);
        // By numbers of their own, so that the other worlds stay what they are.
        let mut of_split = Rng::new(seed ^ 0x0511_7000);
        if of_split.chance(20) {
            plan.split(&mut of_split);
        }
        let mut parts: Vec<Part> = (0..plan.streams)
            .map(|number| Part::new(number, &plan))
            .collect();
        let first = std::mem::replace(&mut parts[0], Part::new(0, &plan));
        Self {
            now: 0,
            skew: CLOCK_START,
            latest_clock: CLOCK_START,
            twin: limits.twin,
            prefix: Prefix::default(),
            stream: first.stream,
            cluster: first.cluster,
            bucket: Bucket::default(),
            metadata: first.metadata,
            minority_until: 0,
            cut_from_metadata: [0; crate::cluster::MEMBERS],
            paused: false,
            nodes: (0..crate::cluster::MEMBERS)
                .map(|_| Node::new(&plan))
                .collect(),
            tasks: BTreeMap::new(),
            listeners: Vec::new(),
            oracle: Oracle::default(),
            coverage: Coverage::default(),
            violation: None,
            trace: traced.then(Vec::new),
            slowest: None,
            calm: false,
            faults: 0,
            most_faults: limits.faults,
            queue: BTreeMap::new(),
            next_id: 1,
            at: 0,
            parts,
            rng,
            plan,
        }
    }

    /// Number of the stream at hand.
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    /// Takes another stream in hand.
    pub(crate) fn focus(&mut self, stream: usize) {
        if stream != self.at {
            self.exchange(self.at);
            self.exchange(stream);
            self.at = stream;
        }
    }

    /// Between the stream at hand and a place where others are kept.
    fn exchange(&mut self, stream: usize) {
        let part = &mut self.parts[stream];
        swap(&mut self.stream, &mut part.stream);
        swap(&mut self.cluster, &mut part.cluster);
        swap(&mut self.metadata, &mut part.metadata);
        swap(&mut self.listeners, &mut part.listeners);
        swap(&mut self.oracle, &mut part.oracle);
        swap(&mut self.paused, &mut part.paused);
        for (node, table) in self.nodes.iter_mut().zip(&mut part.tables) {
            swap(&mut node.table, table);
        }
    }

    /// A machine has gone down: all that was in its memory is lost, of all streams.
    pub(crate) fn forget_node(&mut self, node: usize) {
        self.nodes[node] = Node::new(&self.plan);
        for (stream, part) in self.parts.iter_mut().enumerate() {
            if stream != self.at {
                part.tables[node] = Table::default();
            }
        }
    }

    /// The oracles of all streams.
    pub(crate) fn oracles(&self) -> impl Iterator<Item = &Oracle> {
        let others = self.parts.iter().enumerate();
        let others = others.filter(|(stream, _)| *stream != self.at);
        std::iter::once(&self.oracle).chain(others.map(|(_, part)| &part.oracle))
    }

    /// A governor has got this rate.
    pub(crate) fn limited(&mut self, rate: Rate) {
        if let Rate::BytesPerSec(rate) = rate {
            self.slowest = Some(self.slowest.map_or(rate, |slowest| slowest.min(rate)));
        }
    }

    /// A name that nothing else in this world has.
    pub(crate) fn fresh(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    pub(crate) fn is(&self, twin: Twin) -> bool {
        self.twin == Some(twin)
    }

    /// What the wall clock shows.
    pub(crate) fn clock(&self) -> i64 {
        self.skew + self.now as i64
    }

    /// What a wall clock shows that is set right now and then, in the store's time: for ages of hours, which smaller errors do not matter to.
    pub(crate) fn rough_clock(&self) -> i64 {
        self.now as i64 + (self.skew - CLOCK_START).clamp(-CLOCK_ERROR, CLOCK_ERROR)
    }

    /// An event of the stream at hand.
    pub(crate) fn after(&mut self, delay: u64, event: Event) {
        self.after_for(self.at, delay, event);
    }

    /// An event of another stream.
    pub(crate) fn after_for(&mut self, stream: usize, delay: u64, event: Event) {
        let id = self.fresh();
        self.queue
            .insert((self.now + delay, id), (stream, Box::new(event)));
    }

    /// A message, which takes a moment: those of different senders may overtake each other.
    pub(crate) fn send(&mut self, reader: Pid, msg: Msg) {
        self.send_to(self.at, reader, msg);
    }

    /// To a reader of another stream.
    pub(crate) fn send_to(&mut self, stream: usize, reader: Pid, msg: Msg) {
        let delay = self.rng.between(0, 2);
        self.after_for(stream, delay, Event::Reader(reader, msg));
    }

    /// The next event, with the time set to its moment.
    pub(crate) fn next(&mut self) -> Option<Event> {
        let ((at, _), (stream, event)) = self.queue.pop_first()?;
        self.now = at;
        self.latest_clock = self.latest_clock.max(self.clock());
        self.focus(stream);
        Some(*event)
    }

    pub(crate) fn note(&mut self, line: impl FnOnce() -> String) {
        let now = self.now;
        if let Some(trace) = &mut self.trace {
            let of = match self.parts.len() {
                1 => String::new(),
                _ => format!("{} ", self.stream.as_str()),
            };
            trace.push(format!("{now:>7} {of}{}", line()));
        }
    }

    /// Records a violation; the first one counts.
    pub(crate) fn check(&mut self, check: Check) {
        if let Err(violation) = check {
            self.note(|| format!("VIOLATION {violation}"));
            self.violation.get_or_insert(violation);
        }
    }

    pub(crate) fn violate(&mut self, invariant: u8, what: String) {
        self.check(Err(Violation { invariant, what }));
    }

    /// Whether something goes wrong now.
    pub(crate) fn fault(&mut self, per_mille: u64) -> bool {
        let hit = self.rng.chance(per_mille);
        if !hit || self.calm || self.faults >= self.most_faults {
            return false;
        }
        self.faults += 1;
        true
    }

    pub(crate) fn store(&mut self, op: StoreOp, origin: Origin) {
        let fate = if self.bucket.down_until > self.now {
            self.coverage.hit("store down");
            if self.rng.chance(500) {
                Fate::Lost
            } else {
                let error = TransferError::Connection;
                Fate::Refused { after: 1, error }
            }
        } else if self.fault(self.plan.store_faults) {
            let (name, fate) = bucket::misfortune(&mut self.rng);
            self.coverage.hit(name);
            fate
        } else {
            bucket::smooth(&mut self.rng)
        };
        self.note(|| format!("store  {} {origin:?} {fate:?}", name_of(&op)));
        match fate {
            Fate::Done { after, reply } => {
                let reply = Some((reply, None));
                self.after(after, Event::StoreApply { op, origin, reply });
            }
            Fate::Damaged { after } => {
                let reply = Some((0, Some(TransferError::ChecksumMismatch)));
                let op = bucket::damaged(op);
                self.after(after, Event::StoreApply { op, origin, reply });
            }
            Fate::Refused { after, error } => {
                let answer = Err(StoreError::Failed(error));
                self.after(after, Event::StoreReply(origin, answer));
            }
            Fate::Lost => {}
            Fate::ReplyLost { after, error } => {
                let reply = Some((0, Some(error)));
                self.after(after, Event::StoreApply { op, origin, reply });
            }
            Fate::Late { after } => {
                let reply = None;
                self.after(after, Event::StoreApply { op, origin, reply });
            }
        }
    }

    pub(crate) fn metadata(&mut self, op: MetaOp, origin: Origin, node: usize) {
        let fate = if self.cut_from_metadata[node] > self.now {
            MetaFate::Lost
        } else if self.minority_until > self.now {
            self.coverage.hit("metadata minority");
            // A command may wait in the log of a member until there is a majority again.
            if self.rng.chance(200) {
                let after = self.minority_until - self.now;
                MetaFate::Silent { after }
            } else {
                MetaFate::Lost
            }
        } else if self.fault(self.plan.metadata_faults) {
            let (name, fate) = metadata::misfortune(&mut self.rng);
            self.coverage.hit(name);
            fate
        } else {
            metadata::smooth(&mut self.rng)
        };
        self.note(|| format!("meta   {op:?} {origin:?} {fate:?}"));
        match fate {
            MetaFate::Done { after, reply } => {
                let reply = Some(reply);
                self.after(after, Event::MetaApply { op, origin, reply });
            }
            MetaFate::Refused { after } => {
                self.after(after, Event::MetaReply(origin, Err(MetaError::Other)));
            }
            MetaFate::Lost => {}
            MetaFate::Silent { after } => {
                let reply = None;
                self.after(after, Event::MetaApply { op, origin, reply });
            }
        }
    }

    /// Deletes without a thought for what may go wrong, as guards that are missing do.
    pub(crate) fn delete_at_once(&mut self, keys: Vec<String>) {
        if !keys.is_empty() {
            self.store(StoreOp::Delete { keys, refused: 0 }, Origin::Nobody);
        }
    }

    /// Asks the writer of a node for one message as soon as the chunk that starts at `offset` is committed.
    pub(crate) fn listen(&mut self, node: usize, reader: Pid, offset: u64) {
        self.listeners.push((node, reader, offset));
        self.notify();
    }

    /// Tells those who listen.
    pub(crate) fn notify(&mut self) {
        let members = &self.cluster.members;
        let (ready, rest) =
            std::mem::take(&mut self.listeners)
                .into_iter()
                .partition(|(node, _, offset)| {
                    members[*node].writer.is_none_or(|writer| {
                        u64::try_from(writer.committed).is_ok_and(|committed| committed >= *offset)
                    })
                });
        self.listeners = rest;
        let ready: Vec<(usize, Pid, u64)> = ready;
        for (node, reader, _) in ready {
            // A writer that has ended takes its listeners along.
            if self.cluster.members[node].writer.is_some() {
                self.send(reader, Msg::Listened);
            }
        }
    }

    /// Publishes a manifest on a node.
    pub(crate) fn publish(&mut self, node: usize, manifest: Manifest) {
        let check = self.oracle.published(&manifest);
        self.check(check);
        self.nodes[node].table.cached = Cached::Known(manifest);
    }
}

fn name_of(op: &StoreOp) -> String {
    match op {
        StoreOp::Put { key, body } => format!("PUT {key} ({} bytes)", body.len()),
        StoreOp::Get { key, part } => format!("GET {key} {part:?}"),
        StoreOp::Delete { keys, .. } => format!("DELETE {}", keys.join(" ")),
        StoreOp::List { prefix } => format!("LIST {prefix}"),
    }
}
