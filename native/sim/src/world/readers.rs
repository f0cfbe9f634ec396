//! Readers: who starts them, and who calls them.

use super::World;
use crate::cluster::Writer;
use crate::env::{Event, Pid};
use crate::reader::{Life, Msg, Reader};

/// So often a supervisor restarts a reader within [`RESTARTS_WITHIN`] milliseconds: `rabbitmq_stream_s3_reader_sup`.
const RESTARTS: usize = 5;
const RESTARTS_WITHIN: u64 = 60_000;

impl World {
    /// Starts a reader where a writer has none.
    pub(super) fn reconcile(&mut self, node: usize) {
        let Some(writer) = self.env.cluster.members[node].writer else {
            return;
        };
        let stream = self.env.at();
        if self.ignored.contains(&(stream, writer.id)) {
            return;
        }
        if let Some(reader) = self.readers.values().find(|r| r.is_of(stream, node)) {
            // It may be about to end, with its writer.
            if reader.writer.id != writer.id {
                self.periodically(400, 600, Event::Reconcile(node));
            }
            return;
        }
        // Under a new supervisor.
        self.restarts.remove(&(stream, writer.id));
        self.start_reader(node, writer);
    }

    fn start_reader(&mut self, node: usize, writer: Writer) -> Pid {
        let pid = self.env.fresh();
        self.env
            .note(|| format!("node {node}: reader {pid} of epoch {}", writer.epoch));
        let reader = Reader::new(pid, node, writer, &mut self.env);
        self.readers.insert(pid, reader);
        pid
    }

    /// A reader has failed, and its supervisor starts it again, unless it has done so too often.
    fn failed(&mut self, node: usize, writer: Writer) {
        let key = (self.env.at(), writer.id);
        let now = self.env.now;
        let times = self.restarts.entry(key).or_default();
        times.retain(|at| at + RESTARTS_WITHIN > now);
        if times.len() >= RESTARTS {
            self.env.coverage.hit("restarts used up");
            self.env
                .note(|| format!("node {node}: restarts are used up"));
            // Until the next look.
            let every = self.env.plan.reconcile_every;
            self.periodically(0, every, Event::Reconcile(node));
        } else {
            times.push(now);
            self.periodically(0, 2, Event::Restart(node, writer.id));
        }
    }

    /// A supervisor starts its reader again, for the same writer.
    pub(super) fn restart(&mut self, node: usize, writer: u64) {
        let stream = self.env.at();
        if self.readers.values().any(|r| r.is_of(stream, node)) || self.env.cluster.is_down(node) {
            return;
        }
        match self.env.cluster.members[node].writer {
            Some(found) if found.id == writer => {
                self.start_reader(node, found);
            }
            // It finds its writer dead, and ends.
            Some(_) | None => self.periodically(400, 600, Event::Reconcile(node)),
        }
    }

    pub(super) fn message(&mut self, pid: Pid, msg: Msg) {
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
                    self.ignored.insert((reader.stream(), reader.writer.id));
                }
                let node = reader.node;
                reader.ended(&mut self.env);
                self.periodically(400, 600, Event::Reconcile(node));
            }
        }
    }

    pub(super) fn kill_reader(&mut self, pid: Pid) {
        if let Some(reader) = self.readers.remove(&pid) {
            self.env.focus(reader.stream());
            self.env.note(|| format!("reader {pid} is killed"));
            let (node, writer) = (reader.node, reader.writer);
            self.end_reader(reader);
            self.failed(node, writer);
        }
    }

    /// Without a word of its own.
    pub(super) fn end_reader(&mut self, reader: Reader) {
        let pid = reader.pid;
        reader.ended(&mut self.env);
        self.env.listeners.retain(|(_, reader, _)| *reader != pid);
    }

    /// Kills the reader of a node as often as was asked for.
    pub(super) fn keep_failing(&mut self, node: usize, times: u32) {
        let stream = self.env.at();
        let reader = self.readers.values().find(|r| r.is_of(stream, node));
        if let Some(pid) = reader.map(|reader| reader.pid) {
            self.kill_reader(pid);
        }
        if times > 0 && !self.env.calm {
            self.periodically(5, 60, Event::KeepFailing(node, times - 1));
        }
    }

    pub(super) fn client(&mut self) {
        if self.env.calm {
            return;
        }
        self.periodically(100, 1_500, Event::Client);
        if self.env.rng.chance(15) {
            self.pause();
        }
        let Some(pid) = self.current_reader() else {
            return;
        };
        let env = &mut self.env;
        match env.rng.between(0, 19) {
            0..=2 => env.send(pid, Msg::ForceCut),
            3 | 4 => {
                let waiter = env.fresh();
                env.send(pid, Msg::Flush(waiter));
            }
            _ => {
                let offset = env.oracle.end().saturating_sub(env.rng.between(0, 20));
                let waiter = env.fresh();
                env.oracle.asked(waiter, offset);
                env.send(pid, Msg::Await(waiter, offset));
            }
        }
    }

    /// The reader on the leader's node.
    fn current_reader(&self) -> Option<Pid> {
        let (leader, _) = self.env.cluster.current()?;
        let stream = self.env.at();
        let reader = self.readers.values().find(|r| r.is_of(stream, leader))?;
        Some(reader.pid)
    }

    /// An operator pauses the stream for a while.
    fn pause(&mut self) {
        let env = &mut self.env;
        if !env.paused {
            env.coverage.hit("stream paused");
            env.paused = true;
            let length = env.rng.between(100, 4_000);
            env.after(length, Event::Resume);
        }
    }

    pub(super) fn resume(&mut self) {
        self.env.paused = false;
        let stream = self.env.at();
        let readers = self.readers.values().filter(|r| r.stream() == stream);
        for pid in readers.map(|reader| reader.pid).collect::<Vec<_>>() {
            self.env.send(pid, Msg::PauseChanged);
        }
    }
}
