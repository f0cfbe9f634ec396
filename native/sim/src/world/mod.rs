//! One world: what happens, in the order in which it happens, until nothing is under way any more.

mod log;
mod misfortune;
mod readers;
mod rest;
mod split;

use std::collections::{BTreeMap, BTreeSet};

use stream_s3_core::error::TransferError;
use stream_s3_core::invariants::Violation;

use crate::bucket::{StoreError, StoreOp};
use crate::cluster::MEMBERS;
use crate::coverage::Coverage;
use crate::env::{Env, Event, Origin, Pid};
use crate::gc;
use crate::governor;
use crate::metadata::{MetaError, MetaOp, MetaValue};
use crate::plan::Limits;
use crate::reader::Reader;
use crate::reaper;
use crate::replica;
use crate::tasks::{self, Answer};

pub(crate) use split::Split;

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
        restarts: BTreeMap::new(),
        rested: None,
        deposed: None,
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
    for stream in 0..world.env.plan.streams {
        world.env.focus(stream);
        if world.env.violation.is_none() {
            let check = world.env.at_rest();
            world.env.check(check);
        }
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
    /// Writers of streams that are deleted, each with the number of its stream.
    ignored: BTreeSet<(usize, u64)>,
    /// When the readers of a writer were restarted by their supervisor.
    restarts: BTreeMap<(usize, u64), Vec<u64>>,
    /// Since when nothing is under way.
    rested: Option<u64>,
    /// The machine of a writer that was deposed and goes on.
    deposed: Option<usize>,
}

impl World {
    fn begin(&mut self, limits: Limits) {
        let env = &mut self.env;
        env.plan.horizon = env.plan.horizon.min(limits.horizon_ms);
        let plan = env.plan.clone();
        env.note(|| format!("{plan:#?}"));
        env.limited(plan.rate);
        for stream in 0..plan.streams {
            env.focus(stream);
            env.after(0, Event::Elect);
            env.after(20, Event::Write);
            env.after(30, Event::Client);
            for member in 0..MEMBERS {
                env.after(25, Event::Replicate(member));
                env.after(100, Event::Flush(member));
                let delay = env.rng.between(0, plan.reconcile_every);
                env.after(delay, Event::ReplicaLook(member));
            }
            let alone = [(plan.trim_every, Event::Trim), (plan.gc_every, Event::Gc)];
            for (delay, event) in alone {
                if let Some(delay) = delay {
                    env.after(delay, event);
                }
            }
        }
        // The others must not notice.
        env.focus(0);
        let once = [
            (plan.nemesis_every, Event::Nemesis),
            (plan.delete_at, Event::DeleteStream),
        ];
        for (delay, event) in once {
            if let Some(delay) = delay {
                env.after(delay, event);
            }
        }
        if plan.split {
            let delay = env.rng.between(3_000, 6_000);
            env.after(delay, Event::Split(Split::Depose));
        }
        env.after(plan.horizon, Event::Calm);
    }

    fn is_over(&mut self) -> bool {
        // A retention by age goes on for ever; between two of its steps is a good time to look.
        self.rested
            .is_some_and(|since| self.env.now >= since + AFTERMATH)
            && self.is_at_rest()
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
            Event::Split(step) => self.split(step),
            Event::Elect => self.elect(),
            Event::Join(member) => self.join(member),
            Event::Up(member) => self.up(member),
            Event::Reconnect(member) => self.reconnect(member),
            Event::Reconcile(node) => self.reconcile(node),
            Event::Restart(node, writer) => self.restart(node, writer),
            Event::KeepFailing(node, times) => self.keep_failing(node, times),
            Event::Client => self.client(),
            Event::Resume => self.resume(),
            Event::DeleteStream => {
                env.note(|| "the stream is deleted".into());
                env.coverage.hit("stream deleted");
                env.metadata.delete_queue();
                env.oracle.tier = None;
                env.oracle.deleted = true;
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
            Event::GcLook(pass) => gc::look(env, pass),
            Event::GcDelete(pass) => gc::delete(env, pass),
            Event::Reaper(node, number) => reaper::due(env, node, number),
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
                Origin::Gc => gc::listed(env, answer),
                Origin::Reaper(node, number) => reaper::answered(env, node, number, answer),
                Origin::Nobody => {}
            },
            Event::MetaApply { op, origin, reply } => {
                meta_apply(env, op, origin, reply);
                self.split_after(op, origin);
            }
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
            Event::Aborted(node, attempt) => governor::aborted(env, node, attempt),
            Event::Sweep(node, reader) => governor::sweep(env, node, reader),
            Event::Replica(node, sent) => replica::received(env, node, &sent),
            Event::ReplicaLook(node) => {
                replica::look(env, node);
                let every = env.plan.reconcile_every;
                self.periodically(every, every, Event::ReplicaLook(node));
            }
            Event::ReplicaTrim(node, persisted) => replica::trim_now(env, node, persisted),
            Event::ReplicaSync(node, tag) => replica::read(env, node, tag),
            Event::ReplicaSynced(node, tag, result) => replica::synced(env, node, tag, result),
        }
    }

    /// Again after some time, unless all has ended.
    fn periodically(&mut self, low: u64, high: u64, event: Event) {
        let delay = self.env.rng.between(low, high);
        self.env.after(delay, event);
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
        StoreOp::Delete { keys, refused } => {
            let gone = keys.get(*refused..).unwrap_or(&[]);
            env.note(|| format!("deleted {}", gone.join(" ")));
            env.deleted(gone);
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
