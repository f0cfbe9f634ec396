//! Greater misfortunes.

use stream_s3_core::admission::Rate;

use super::World;
use crate::cluster::MEMBERS;
use crate::env::{Event, Node, Pid};
use crate::governor;
use crate::reader::Msg;
use crate::replica;

impl World {
    pub(super) fn misfortune(&mut self) {
        if self.env.calm {
            return;
        }
        let every = self.env.plan.nemesis_every.unwrap_or(1_000);
        self.periodically(every / 2, every, Event::Nemesis);
        let stream = self.env.rng.between(0, self.env.plan.streams as u64 - 1);
        self.env.focus(stream as usize);
        let kind = self.env.rng.between(0, 14);
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
                env.note(|| format!("machine {member} is cut off for {length}"));
                env.after(length, Event::Reconnect(member));
                self.of_all_streams(|world| {
                    world.env.cluster.members[member].cut_off = true;
                    world.periodically(200, 1_500, Event::Elect);
                });
            }
            3 if !env.oracle.deleted => {
                env.coverage.hit("leader moves");
                self.elect_now();
            }
            4 | 5 => {
                let number = env.rng.between(0, 2) as usize;
                if let Some(pid) = self.readers.keys().nth(number % self.readers.len().max(1)) {
                    let pid = *pid;
                    self.env.coverage.hit("reader killed");
                    self.kill_reader(pid);
                }
            }
            6 => {
                if let Some((id, task)) = env.tasks.pop_last() {
                    env.coverage.hit("task killed");
                    env.note(|| format!("task {id} is killed"));
                    env.send_to(task.stream, task.reader, Msg::TaskExit(id));
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
                env.minority_until = env.now + length;
            }
            10 | 3 => self.change_rate(member),
            12 => {
                self.env.coverage.hit("reader keeps failing");
                let times = self.env.rng.between(5, 9) as u32;
                self.env.after(0, Event::KeepFailing(member, times));
            }
            _ => self.kill_governor(member),
        }
    }

    pub(super) fn change_rate(&mut self, node: usize) {
        let env = &mut self.env;
        env.coverage.hit("rate changed");
        let rate = if env.rng.chance(500) {
            Rate::Unlimited
        } else {
            Rate::BytesPerSec(env.rng.between(500, 20_000))
        };
        let burst = env.rng.between(100, 4_000);
        env.limited(rate);
        let now = stream_s3_core::units::MonotonicUs(env.now * 1000);
        env.nodes[node].governor.set_rate(now, rate, burst);
        governor::pump(env, node);
    }

    pub(super) fn crash(&mut self, member: usize, length: u64) {
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
        self.end_readers(member);
        self.env.forget_node(member);
        self.env.after(length, Event::Up(member));
        self.of_all_streams(|world| {
            let env = &mut world.env;
            env.listeners.retain(|(node, _, _)| *node != member);
            env.cluster.crash(member, lose);
            world.periodically(200, 1_500, Event::Elect);
        });
    }

    /// All readers of a node end at once, of all streams.
    fn end_readers(&mut self, node: usize) {
        let at_hand = self.env.at();
        let readers = self.readers.values().filter(|reader| reader.node == node);
        for pid in readers.map(|reader| reader.pid).collect::<Vec<Pid>>() {
            if let Some(reader) = self.readers.remove(&pid) {
                self.env.focus(reader.stream());
                self.end_reader(reader);
            }
        }
        self.env.focus(at_hand);
    }

    /// What depends on the governor is restarted with it: readers, reconciler, reaper, and what follows other nodes. What is published stays.
    fn kill_governor(&mut self, node: usize) {
        if !self.env.cluster.members[node].up {
            return;
        }
        self.env.coverage.hit("governor killed");
        self.env
            .note(|| format!("node {node}: the governor is killed"));
        self.end_readers(node);
        let fresh = Node::new(&self.env.plan);
        let table = std::mem::replace(&mut self.env.nodes[node], fresh).table;
        self.env.nodes[node].table = table;
        self.of_all_streams(|world| {
            replica::left(&mut world.env, node);
            world.periodically(0, 50, Event::Reconcile(node));
            world.periodically(0, 50, Event::ReplicaLook(node));
        });
    }
}
