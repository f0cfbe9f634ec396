//! How a world comes to rest.

use super::World;
use crate::cluster::MEMBERS;
use crate::env::Event;
use crate::reader::Reader;
use crate::replica;

/// How long a world may take to come to rest once nothing goes wrong any more, besides the time that its bytes take.
const REST: u64 = 300_000;

impl World {
    /// Nothing goes wrong from here on, and nothing new comes but a last chunk.
    pub(super) fn calm(&mut self) {
        let env = &mut self.env;
        env.note(|| "calm".into());
        env.bucket.down_until = 0;
        env.minority_until = 0;
        env.cut_from_metadata = [0; MEMBERS];
        for member in 0..MEMBERS {
            env.after(1, Event::Up(member));
            env.after(2, Event::Reconnect(member));
        }
        env.calm = true;
        env.after(3_000, Event::Look);
    }

    /// Is all at rest?
    pub(super) fn look(&mut self) {
        let env = &mut self.env;
        let since = env.now.saturating_sub(env.plan.horizon);
        if since > REST && since > REST + self.time_of_bytes() {
            let what = self.describe();
            self.env.violate(4, format!("no rest: {what}"));
            return;
        }
        self.of_all_streams(|world| world.last_words(since));
        if self.env.rng.chance(30) {
            // Clocks go on to be set.
            self.env.coverage.hit("clock set back at rest");
            self.env.skew -= 10_000;
        }
        if self.rested.is_none() && self.is_at_rest() {
            self.rested = Some(self.env.now);
        }
        self.env.after(500, Event::Look);
    }

    /// How long it takes to upload the logs of all streams at the slowest rate that a governor was ever given, in milliseconds.
    fn time_of_bytes(&mut self) -> u64 {
        let Some(rate) = self.env.slowest else {
            return 0;
        };
        let mut bytes = 0;
        self.of_all_streams(|world| bytes += world.env.oracle.bytes());
        bytes.saturating_mul(1_000) / rate.max(1)
    }

    fn last_words(&mut self, since: u64) {
        if self.env.paused {
            self.resume();
        }
        let env = &mut self.env;
        let current = env.cluster.current();
        let empty =
            current.is_none_or(|(leader, _)| env.cluster.members[leader].range().first.is_none());
        if (since <= 3_000 || empty) && !env.oracle.deleted {
            // A log that lost everything stays empty until somebody writes.
            let (now, clock) = (env.now, env.clock());
            for _ in 0..3 {
                env.cluster.write(&mut env.rng, now, clock);
            }
        }
        for node in 0..MEMBERS {
            self.env.after(0, Event::Reconcile(node));
        }
    }

    pub(super) fn is_at_rest(&mut self) -> bool {
        if self.env.nodes.iter().any(|node| !node.reaper.is_idle()) {
            return false;
        }
        let mut rests = true;
        self.of_all_streams(|world| rests = rests && world.stream_is_at_rest());
        rests
    }

    fn stream_is_at_rest(&self) -> bool {
        let env = &self.env;
        let stream = env.at();
        let mut readers = self.readers.values().filter(|r| r.stream() == stream);
        if env.oracle.deleted {
            let works = env.tasks.values().any(|task| task.stream == stream);
            let mut attempts = env.nodes.iter().flat_map(|node| node.attempts.values());
            return readers.next().is_none()
                && !works
                && attempts.all(|attempt| attempt.stream != stream)
                && env.metadata.root.is_none()
                && !env.metadata.anchored;
        }
        let Some((leader, writer)) = env.cluster.current() else {
            return false;
        };
        let complete = env.cluster.members[leader].range().next == env.oracle.end();
        let tier = env.oracle.tier.as_ref();
        let tiered = tier.is_some_and(|tier| tier.manifest.next_offset.0 == env.oracle.end());
        // What replicas know, too.
        let known = tier.is_some_and(|tier| {
            let revision = tier.manifest.revision;
            (0..MEMBERS).all(|node| node == leader || replica::is_current(env, node, revision))
        });
        let idle = readers
            .next()
            .is_some_and(|reader| reader.writer.id == writer.id && reader.is_idle())
            && readers.next().is_none();
        complete && tiered && known && idle && env.oracle.forgotten().is_none()
    }

    pub(super) fn describe(&self) -> String {
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

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use stream_s3_core::admission::Rate;

    use super::*;
    use crate::env::Env;
    use crate::plan::Limits;

    /// Found at seed 63521: three streams of tiny fragments behind a governor of a thousand bytes a second had not come to an end.
    #[test]
    fn a_world_has_the_time_that_its_bytes_take_at_the_slowest_rate() {
        let mut world = World {
            env: Env::new(1, Limits::NONE, false),
            readers: BTreeMap::new(),
            ignored: BTreeSet::new(),
            restarts: BTreeMap::new(),
            rested: None,
            deposed: None,
        };
        let env = &mut world.env;
        assert!(env.cluster.elect(0, 0).is_some());
        for member in 0..MEMBERS {
            env.cluster.join(member);
        }
        for _ in 0..20 {
            env.cluster.write(&mut env.rng, 0, 0);
        }
        env.cluster.replicate(0, 20);
        env.committed();
        let bytes = env.oracle.bytes();
        assert!(bytes > 0);
        assert_eq!(world.time_of_bytes(), 0, "nothing was ever limited");
        world.env.limited(Rate::BytesPerSec(2_000));
        world.env.limited(Rate::Unlimited);
        world.env.limited(Rate::BytesPerSec(100));
        world.env.limited(Rate::BytesPerSec(500));
        assert_eq!(world.time_of_bytes(), bytes * 10);
    }
}
