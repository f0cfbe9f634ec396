//! What happens to the logs: writes, retention, elections, machines that come back.

use super::World;
use crate::cluster::MEMBERS;
use crate::env::{Event, Pid};
use crate::pins;
use crate::reader::Msg;
use crate::replica;

impl World {
    pub(super) fn write(&mut self) {
        let env = &mut self.env;
        if env.calm {
            return;
        }
        let (now, clock) = (env.now, env.clock());
        for _ in 0..env.rng.between(1, 3) {
            env.cluster.write(&mut env.rng, now, clock);
            for node in 0..MEMBERS {
                pins::look(env, node);
            }
        }
        let every = env.plan.write_every;
        self.periodically(every / 2, every, Event::Write);
    }

    pub(super) fn trim(&mut self) {
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
            pins::look(env, member);
            env.coverage.hit("user retention");
            env.note(|| format!("retention trims the log of member {member}"));
        }
        let every = env.plan.trim_every.unwrap_or(1_000);
        self.periodically(every / 2, every, Event::Trim);
    }

    pub(super) fn elect(&mut self) {
        if self.env.oracle.deleted || self.env.cluster.healthy() {
            return;
        }
        self.elect_now();
    }

    pub(super) fn elect_now(&mut self) {
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
            replica::left(&mut self.env, member);
            if let Some(writer) = writers[member] {
                self.writer_down(member, writer);
            }
            self.periodically(3, 100, Event::Join(member));
        }
        let within = self.env.plan.attach_within;
        self.periodically(0, within, Event::Reconcile(winner));
    }

    pub(super) fn writer_of(&self, member: usize) -> Option<u64> {
        self.env.cluster.members[member].writer.map(|w| w.id)
    }

    /// The reader of a writer hears that it has ended.
    pub(super) fn writer_down(&mut self, node: usize, writer: u64) {
        let stream = self.env.at();
        let readers: Vec<Pid> = self
            .readers
            .values()
            .filter(|reader| reader.is_of(stream, node) && reader.writer.id == writer)
            .map(|reader| reader.pid)
            .collect();
        for pid in readers {
            self.env.send(pid, Msg::WriterDown);
        }
        self.env.listeners.retain(|(at, _, _)| *at != node);
    }

    pub(super) fn stop_writer(&mut self, node: usize) {
        if let Some(writer) = self.writer_of(node) {
            self.env.cluster.members[node].writer = None;
            self.writer_down(node, writer);
        }
    }

    pub(super) fn join(&mut self, member: usize) {
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
        let before = self.env.cluster.members[member].joined;
        self.env.cluster.join(member);
        if !before && self.env.cluster.members[member].joined {
            // Within about the time that an election takes.
            self.periodically(0, 500, Event::ReplicaLook(member));
        }
    }

    /// A machine, with all that is on it.
    pub(super) fn up(&mut self, member: usize) {
        if self.env.cluster.members[member].up {
            return;
        }
        self.env.note(|| format!("machine {member} is up again"));
        self.env.forget_node(member);
        self.of_all_streams(|world| {
            world.env.cluster.members[member].up = true;
            world.periodically(0, 50, Event::Elect);
            world.periodically(10, 200, Event::Join(member));
        });
    }

    pub(super) fn reconnect(&mut self, member: usize) {
        self.env
            .note(|| format!("machine {member} is in touch again"));
        self.of_all_streams(|world| {
            world.env.cluster.members[member].cut_off = false;
            world.periodically(0, 50, Event::Elect);
            world.periodically(10, 200, Event::Join(member));
        });
    }

    /// The same for each stream, the one at hand last.
    pub(super) fn of_all_streams(&mut self, mut what: impl FnMut(&mut Self)) {
        let at_hand = self.env.at();
        for stream in (0..self.env.plan.streams).filter(|stream| *stream != at_hand) {
            self.env.focus(stream);
            what(self);
        }
        self.env.focus(at_hand);
        what(self);
    }
}
