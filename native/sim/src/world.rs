//! One world: what happens, in the order in which it happens, until nothing is under way any more.

use std::collections::{BTreeMap, BTreeSet};

use stream_s3_core::admission::Rate;
use stream_s3_core::error::TransferError;
use stream_s3_core::invariants::Violation;

use crate::bucket::{StoreError, StoreOp};
use crate::cluster::MEMBERS;
use crate::coverage::Coverage;
use crate::env::{Env, Event, Node, Origin, Pid};
use crate::gc;
use crate::governor;
use crate::metadata::{MetaError, MetaOp, MetaValue};
use crate::plan::Limits;
use crate::reader::{Life, Msg, Reader};
use crate::replica;
use crate::tasks::{self, Answer};

/// How long a world may take to come to rest once nothing goes wrong any more.
const REST: u64 = 300_000;
/// How long it is watched afterwards, for what arrives late.
const AFTERMATH: u64 = 9_000;

/// How a world ended.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The first thing that was not as it must be.
    pub violation: Option<Violation>,
    /// What happened.
    pub coverage: Coverage,
    /// Number of events.
    pub events: u64,
    /// Number of faults.
    pub faults: u64,
    /// When it ended, in milliseconds of the world's time.
    pub ended: u64,
    /// One line for each thing of interest, if that was asked for.
    pub trace: Vec<String>,
}

/// Lets the world of `seed` run to its end. Takes some milliseconds.
#[must_use]
pub fn run(seed: u64, limits: Limits, traced: bool) -> Outcome {
    let mut world = World {
        env: Env::new(seed, limits, traced),
        readers: BTreeMap::new(),
        ignored: BTreeSet::new(),
        deleted: false,
        rested: None,
    };
    world.begin(limits);
    let mut events = 0;
    while world.env.violation.is_none() && !world.is_over() {
        let Some(event) = world.env.next() else {
            break;
        };
        events += 1;
        world.happen(event);
    }
    if world.env.violation.is_none() && !world.deleted {
        let check = world.env.at_rest();
        world.env.check(check);
    }
    let env = world.env;
    Outcome {
        violation: env.violation,
        coverage: env.coverage,
        events,
        faults: env.faults,
        ended: env.now,
        trace: env.trace.unwrap_or_default(),
    }
}

struct World {
    env: Env,
    readers: BTreeMap<Pid, Reader>,
    /// Writers of a stream that is deleted.
    ignored: BTreeSet<u64>,
    deleted: bool,
    /// Since when nothing is under way.
    rested: Option<u64>,
}

impl World {
    fn begin(&mut self, limits: Limits) {
        let env = &mut self.env;
        env.plan.horizon = env.plan.horizon.min(limits.horizon_ms);
        let plan = env.plan.clone();
        env.note(|| format!("{plan:#?}"));
        env.after(0, Event::Elect);
        env.after(20, Event::Write);
        env.after(30, Event::Client);
        for member in 0..MEMBERS {
            env.after(25, Event::Replicate(member));
            env.after(100, Event::Flush(member));
        }
        for (delay, event) in [
            (plan.trim_every, Event::Trim),
            (plan.nemesis_every, Event::Nemesis),
            (plan.gc_every, Event::Gc),
            (plan.delete_at, Event::DeleteStream),
        ] {
            if let Some(delay) = delay {
                env.after(delay, event);
            }
        }
        env.after(plan.horizon, Event::Calm);
    }

    fn is_over(&self) -> bool {
        self.rested
            .is_some_and(|since| self.env.now >= since + AFTERMATH)
    }

    fn happen(&mut self, event: Event) {
        let env = &mut self.env;
        match event {
            Event::Write => self.write(),
            Event::Replicate(member) => {
                let most = env.rng.between(1, 4);
                if env.cluster.replicate(member, most) {
                    env.committed();
                    env.notify();
                }
                self.periodically(5, 120, Event::Replicate(member));
            }
            Event::Flush(member) => {
                let next = env.cluster.members[member].range().next;
                env.cluster.members[member].durable = next;
                let every = env.plan.flush_every;
                self.periodically(every / 2, every, Event::Flush(member));
            }
            Event::Trim => self.trim(),
            Event::Nemesis => self.misfortune(),
            Event::Elect => self.elect(),
            Event::Join(member) => self.join(member),
            Event::Up(member) => self.up(member),
            Event::Reconnect(member) => self.reconnect(member),
            Event::Reconcile(node) => self.reconcile(node),
            Event::Client => self.client(),
            Event::DeleteStream => {
                env.note(|| "the stream is deleted".into());
                env.coverage.hit("stream deleted");
                env.metadata.delete_queue();
                env.oracle.tier = None;
                self.deleted = true;
                for node in 0..MEMBERS {
                    let delay = env.rng.between(0, 3_000);
                    env.after(delay, Event::WriterEnds(node));
                }
            }
            Event::WriterEnds(node) => self.stop_writer(node),
            Event::Calm => self.calm(),
            Event::Look => self.look(),
            Event::Gc => {
                gc::start(env);
                let every = env.plan.gc_every.unwrap_or(1_000);
                self.periodically(every, every, Event::Gc);
            }
            Event::GcDelete(garbage) => gc::delete(env, garbage),
            Event::StoreApply { op, origin, reply } => store_apply(env, op, origin, reply),
            Event::StoreReply(origin, answer) => match origin {
                Origin::Task(task, call) => {
                    if env.tasks.get(&task).is_some_and(|task| task.call == call) {
                        tasks::proceed(env, task, Answer::Store(answer));
                    }
                }
                Origin::Attempt(node, attempt, uid) => {
                    governor::answered(env, node, attempt, uid, answer);
                }
                Origin::Gc(_) => gc::listed(env, answer),
                Origin::Nobody => {}
            },
            Event::MetaApply { op, origin, reply } => meta_apply(env, op, origin, reply),
            Event::MetaReply(origin, answer) => {
                if let Origin::Task(task, call) = origin
                    && env.tasks.get(&task).is_some_and(|task| task.call == call)
                {
                    tasks::proceed(env, task, Answer::Meta(answer));
                }
            }
            Event::CallTimeout(task, call) => call_timeout(env, task, call),
            Event::Reader(pid, msg) => self.message(pid, msg),
            Event::Governor(node) => governor::pump(env, node),
            Event::OpenFiles(node, attempt) => governor::open_files(env, node, attempt),
            Event::Replica(node, sent) => replica::received(env, node, &sent),
            Event::Resync(node) => replica::resync(env, node),
        }
    }

    /// Again after some time, unless all has ended.
    fn periodically(&mut self, low: u64, high: u64, event: Event) {
        let delay = self.env.rng.between(low, high);
        self.env.after(delay, event);
    }

    // --- the log -----------------------------------------------------------------------------------------------------

    fn write(&mut self) {
        let env = &mut self.env;
        if env.calm {
            return;
        }
        let (now, clock) = (env.now, env.clock());
        for _ in 0..env.rng.between(1, 3) {
            env.cluster.write(&mut env.rng, now, clock);
        }
        let every = env.plan.write_every;
        self.periodically(every / 2, every, Event::Write);
    }

    fn trim(&mut self) {
        let env = &mut self.env;
        if env.calm {
            return;
        }
        let member = env.rng.between(0, MEMBERS as u64 - 1) as usize;
        // A writer's log keeps what is not committed.
        let kept = env.cluster.members[member]
            .writer
            .map_or(usize::MAX, |writer| {
                env.cluster.members[member].committed_segments(writer)
            });
        let count = (env.rng.between(1, 8) as usize).min(kept);
        if env.cluster.members[member].trim(count) > 0 {
            env.coverage.hit("user retention");
            env.note(|| format!("retention trims the log of member {member}"));
        }
        let every = env.plan.trim_every.unwrap_or(1_000);
        self.periodically(every / 2, every, Event::Trim);
    }

    fn elect(&mut self) {
        if self.deleted || self.env.cluster.healthy() {
            return;
        }
        self.elect_now();
    }

    fn elect_now(&mut self) {
        let env = &mut self.env;
        let recovering = if env.rng.chance(300) {
            env.rng.between(1, 1_500)
        } else {
            0
        };
        let writers: Vec<Option<u64>> = (0..MEMBERS).map(|m| self.writer_of(m)).collect();
        let env = &mut self.env;
        let Some((winner, voters)) = env.cluster.elect(env.now, recovering) else {
            self.periodically(300, 1_000, Event::Elect);
            return;
        };
        env.elected();
        env.coverage.hit("election");
        let epoch = env.cluster.epoch;
        env.note(|| format!("epoch {epoch}: member {winner} writes, elected by {voters:?}"));
        for member in voters {
            if let Some(writer) = writers[member] {
                self.writer_down(member, writer);
            }
            self.periodically(3, 100, Event::Join(member));
        }
        let within = self.env.plan.attach_within;
        self.periodically(0, within, Event::Reconcile(winner));
    }

    fn writer_of(&self, member: usize) -> Option<u64> {
        self.env.cluster.members[member].writer.map(|w| w.id)
    }

    /// The reader of a writer hears that it has ended.
    fn writer_down(&mut self, node: usize, writer: u64) {
        let readers: Vec<Pid> = self
            .readers
            .values()
            .filter(|reader| reader.node == node && reader.writer.id == writer)
            .map(|reader| reader.pid)
            .collect();
        for pid in readers {
            self.env.send(pid, Msg::WriterDown);
        }
        self.env.listeners.retain(|(at, _, _)| *at != node);
    }

    fn stop_writer(&mut self, node: usize) {
        if let Some(writer) = self.writer_of(node) {
            self.env.cluster.members[node].writer = None;
            self.writer_down(node, writer);
        }
    }

    fn join(&mut self, member: usize) {
        let env = &mut self.env;
        let epoch = env.cluster.epoch;
        let old = env.cluster.members[member]
            .writer
            .filter(|writer| writer.epoch < epoch);
        if old.is_some() && env.cluster.members[member].up && !env.cluster.members[member].cut_off {
            // The writer ends first; its files change later.
            self.stop_writer(member);
            self.periodically(3, 50, Event::Join(member));
            return;
        }
        self.env.cluster.join(member);
    }

    fn up(&mut self, member: usize) {
        let env = &mut self.env;
        if env.cluster.members[member].up {
            return;
        }
        env.note(|| format!("member {member} is up again"));
        env.cluster.members[member].up = true;
        env.nodes[member] = Node::new(&env.plan);
        self.periodically(0, 50, Event::Elect);
        self.periodically(10, 200, Event::Join(member));
    }

    fn reconnect(&mut self, member: usize) {
        let env = &mut self.env;
        env.note(|| format!("member {member} is in touch again"));
        env.cluster.members[member].cut_off = false;
        self.periodically(0, 50, Event::Elect);
        self.periodically(10, 200, Event::Join(member));
    }

    // --- readers -----------------------------------------------------------------------------------------------------

    fn reconcile(&mut self, node: usize) {
        let Some(writer) = self.env.cluster.members[node].writer else {
            return;
        };
        if self.ignored.contains(&writer.id) {
            return;
        }
        if let Some(reader) = self.readers.values().find(|reader| reader.node == node) {
            // It may be about to end, with its writer.
            if reader.writer.id != writer.id {
                self.periodically(400, 600, Event::Reconcile(node));
            }
            return;
        }
        let pid = self.env.fresh();
        self.env
            .note(|| format!("node {node}: reader {pid} of epoch {}", writer.epoch));
        let reader = Reader::new(pid, node, writer, &mut self.env);
        self.readers.insert(pid, reader);
    }

    fn message(&mut self, pid: Pid, msg: Msg) {
        let Some(mut reader) = self.readers.remove(&pid) else {
            if let Msg::Await(waiter, _) = msg {
                self.env.oracle.reader_down(waiter);
            }
            return;
        };
        match reader.handle(&mut self.env, msg) {
            Life::Continues => {
                self.readers.insert(pid, reader);
            }
            Life::Ended(deleted) => {
                if deleted {
                    self.ignored.insert(reader.writer.id);
                }
                let node = reader.node;
                reader.killed(&mut self.env);
                self.periodically(400, 600, Event::Reconcile(node));
            }
        }
    }

    fn kill_reader(&mut self, pid: Pid) {
        if let Some(reader) = self.readers.remove(&pid) {
            let node = reader.node;
            self.env.note(|| format!("reader {pid} is killed"));
            reader.killed(&mut self.env);
            self.env.listeners.retain(|(_, reader, _)| *reader != pid);
            self.periodically(0, 5, Event::Reconcile(node));
        }
    }

    fn client(&mut self) {
        if self.env.calm {
            return;
        }
        let env = &mut self.env;
        let leader = env.cluster.current().map(|(leader, _)| leader);
        let end = env.oracle.end();
        let reader = self.readers.values().find(|r| Some(r.node) == leader);
        if let Some(pid) = reader.map(|reader| reader.pid) {
            if env.rng.chance(150) {
                env.send(pid, Msg::ForceCut);
            } else {
                let offset = end.saturating_sub(env.rng.between(0, 20));
                let waiter = env.fresh();
                env.oracle.asked(waiter, offset);
                env.send(pid, Msg::Await(waiter, offset));
            }
        }
        self.periodically(100, 1_500, Event::Client);
    }

    // --- misfortune --------------------------------------------------------------------------------------------------

    fn misfortune(&mut self) {
        if self.env.calm {
            return;
        }
        let every = self.env.plan.nemesis_every.unwrap_or(1_000);
        self.periodically(every / 2, every, Event::Nemesis);
        let kind = self.env.rng.between(0, 11);
        let member = self.env.rng.between(0, MEMBERS as u64 - 1) as usize;
        let length = self.env.rng.between(300, 6_000);
        if !self.env.fault(1_000) {
            return;
        }
        let env = &mut self.env;
        match kind {
            0 | 1 => self.crash(member, length),
            // A whole rack.
            11 => {
                for member in 0..MEMBERS {
                    self.crash(member, length);
                }
            }
            2 => {
                env.coverage.hit("member cut off");
                env.note(|| format!("member {member} is cut off for {length}"));
                env.cluster.members[member].cut_off = true;
                env.after(length, Event::Reconnect(member));
                self.periodically(200, 1_500, Event::Elect);
            }
            3 if !self.deleted => {
                env.coverage.hit("leader moves");
                self.elect_now();
            }
            4 | 5 => {
                if let Some(pid) = self.readers.keys().next().copied() {
                    self.env.coverage.hit("reader killed");
                    self.kill_reader(pid);
                }
            }
            6 => {
                if let Some((id, task)) = env.tasks.pop_last() {
                    env.coverage.hit("task killed");
                    env.note(|| format!("task {id} is killed"));
                    env.send(task.reader, Msg::TaskExit(id));
                }
            }
            7 => {
                env.coverage.hit("clock jump");
                let jump = env.rng.between(0, 20_000) as i64 - 10_000;
                env.skew += jump;
                env.note(|| format!("the clock jumps by {jump}"));
            }
            8 => {
                env.coverage.hit("store outage");
                env.bucket.down_until = env.now + length;
            }
            9 => {
                env.coverage.hit("metadata outage");
                env.metadata.minority_until = env.now + length;
            }
            _ => self.change_rate(member),
        }
    }

    fn change_rate(&mut self, node: usize) {
        let env = &mut self.env;
        env.coverage.hit("rate changed");
        let rate = if env.rng.chance(500) {
            Rate::Unlimited
        } else {
            Rate::BytesPerSec(env.rng.between(500, 20_000))
        };
        let burst = env.rng.between(100, 4_000);
        let now = stream_s3_core::units::MonotonicUs(env.now * 1000);
        env.nodes[node].governor.set_rate(now, rate, burst);
        governor::pump(env, node);
    }

    fn crash(&mut self, member: usize, length: u64) {
        let lose = self.env.plan.lose_cache && self.env.rng.chance(800);
        if !self.env.cluster.members[member].up {
            return;
        }
        self.env.coverage.hit(if lose {
            "machine loses power"
        } else {
            "machine crashes"
        });
        self.env
            .note(|| format!("machine {member} goes down, loses its cache: {lose}"));
        let readers: Vec<Pid> = self
            .readers
            .values()
            .filter(|reader| reader.node == member)
            .map(|reader| reader.pid)
            .collect();
        for pid in readers {
            if let Some(reader) = self.readers.remove(&pid) {
                reader.killed(&mut self.env);
            }
        }
        let env = &mut self.env;
        env.listeners.retain(|(node, _, _)| *node != member);
        env.nodes[member] = Node::new(&env.plan);
        env.cluster.crash(member, lose);
        env.after(length, Event::Up(member));
        self.periodically(200, 1_500, Event::Elect);
    }

    // --- the end -----------------------------------------------------------------------------------------------------

    /// Nothing goes wrong from here on, and nothing new comes but a last chunk.
    fn calm(&mut self) {
        let env = &mut self.env;
        env.note(|| "calm".into());
        env.bucket.down_until = 0;
        env.metadata.minority_until = 0;
        for member in 0..MEMBERS {
            env.after(1, Event::Up(member));
            env.after(2, Event::Reconnect(member));
        }
        env.calm = true;
        env.after(3_000, Event::Look);
    }

    /// Is all at rest?
    fn look(&mut self) {
        let env = &mut self.env;
        let since = env.now.saturating_sub(env.plan.horizon);
        if since > REST {
            let what = self.describe();
            self.env.violate(4, format!("no rest: {what}"));
            return;
        }
        let current = env.cluster.current();
        let empty =
            current.is_none_or(|(leader, _)| env.cluster.members[leader].range().first.is_none());
        if (since <= 3_000 || empty) && !self.deleted {
            // A log that lost everything stays empty until somebody writes.
            let (now, clock) = (env.now, env.clock());
            for _ in 0..3 {
                env.cluster.write(&mut env.rng, now, clock);
            }
        }
        if self.env.rng.chance(30) {
            // Clocks go on to be set.
            self.env.coverage.hit("clock set back at rest");
            self.env.skew -= 10_000;
        }
        for node in 0..MEMBERS {
            self.env.after(0, Event::Reconcile(node));
        }
        if self.rested.is_none() && self.is_at_rest() {
            self.rested = Some(self.env.now);
        }
        self.env.after(500, Event::Look);
    }

    fn is_at_rest(&self) -> bool {
        let env = &self.env;
        if self.deleted {
            return self.readers.is_empty()
                && env.tasks.is_empty()
                && env.nodes.iter().all(|node| node.attempts.is_empty())
                && env.metadata.root.is_none()
                && !env.metadata.anchored;
        }
        let Some((leader, writer)) = env.cluster.current() else {
            return false;
        };
        let complete = env.cluster.members[leader].range().next == env.oracle.end();
        let tiered = env
            .oracle
            .tier
            .as_ref()
            .is_some_and(|tier| tier.manifest.next_offset.0 == env.oracle.end());
        let idle = self
            .readers
            .values()
            .all(|reader| reader.writer.id == writer.id && reader.is_idle());
        complete && tiered && idle && self.readers.len() == 1 && env.oracle.forgotten().is_none()
    }

    fn describe(&self) -> String {
        let env = &self.env;
        let tier = env.oracle.tier.as_ref().map(|tier| {
            let manifest = &tier.manifest;
            (manifest.first_offset, manifest.next_offset)
        });
        let log = env.cluster.current().map(|(leader, writer)| {
            let range = env.cluster.members[leader].range();
            (leader, writer, range)
        });
        let readers: Vec<String> = self.readers.values().map(Reader::describe).collect();
        format!(
            "committed up to {}, tier {tier:?}, log {log:?}; {readers:?}",
            env.oracle.end()
        )
    }
}

fn store_apply(
    env: &mut Env,
    op: StoreOp,
    origin: Origin,
    reply: Option<(u64, Option<TransferError>)>,
) {
    match &op {
        StoreOp::Put { key, body } => {
            env.note(|| format!("stored {key}"));
            env.stored(key, body);
        }
        StoreOp::Delete { keys } => {
            env.note(|| format!("deleted {}", keys.join(" ")));
            env.deleted(keys);
        }
        StoreOp::Get { .. } | StoreOp::List { .. } => {}
    }
    let answer = env.bucket.perform(&op, env.now);
    if let Some((delay, error)) = reply {
        let answer = match error {
            Some(error) => Err(StoreError::Failed(error)),
            None => answer,
        };
        env.after(delay, Event::StoreReply(origin, answer));
    }
}

fn meta_apply(env: &mut Env, op: MetaOp, origin: Origin, reply: Option<u64>) {
    let before = env.metadata.root;
    let answer = env.metadata.perform(op, env.twin);
    env.note(|| format!("meta   {op:?}: {answer:?}"));
    if env.metadata.anchored {
        env.anchored();
    }
    if let (MetaOp::Put { entry, .. }, Ok(MetaValue::Written(revision))) = (op, answer)
        && before != Some((entry, revision))
    {
        env.swapped(before, entry, revision);
    }
    if let Some(delay) = reply {
        env.after(delay, Event::MetaReply(origin, answer));
    }
}

/// A call took too long: whatever it was, nobody waits any more.
fn call_timeout(env: &mut Env, task: u64, call: u32) {
    let Some(waiting) = env.tasks.get(&task).filter(|task| task.call == call) else {
        return;
    };
    let answer = if waiting.waits_for_metadata() {
        Answer::Meta(Err(MetaError::Timeout))
    } else {
        Answer::Store(Err(StoreError::Failed(TransferError::Timeout)))
    };
    tasks::proceed(env, task, answer);
}
