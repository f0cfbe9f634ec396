//! The committed log. It is told by its newest chunk: whatever was in front of that when it was written is part of it, even where no member has
//! it any more. So a log that was lost and comes back, and is lost again, is always known as a whole.

use std::collections::BTreeMap;
use std::rc::Rc;

use stream_s3_core::manifest::Manifest;

use super::{Oracle, Tier};
use crate::cluster::{Cluster, Identity, StoredChunk};
use crate::env::Env;

impl Oracle {
    /// The end of the committed log.
    pub(crate) fn end(&self) -> u64 {
        self.truth.last_key_value().map_or(0, |(_, c)| c.next())
    }

    /// Bytes of the committed log.
    pub(crate) fn bytes(&self) -> u64 {
        let chunks = self.truth.values();
        chunks.map(|chunk| chunk.bytes.len() as u64).sum()
    }

    /// A chunk of the tier that the committed log does not have. In front of the log's beginning, as far as it is known after
    /// a loss, nothing can be said.
    pub(super) fn is_phantom(&self, tier: &Tier) -> Option<Identity> {
        let begin = self.truth.first_key_value().map_or(0, |(id, _)| *id);
        let mut all = tier.fragments.iter().flat_map(|live| &live.parsed.chunks);
        all.find(|identity| match self.truth.get(&identity.0) {
            Some(chunk) => chunk.identity() != **identity,
            None => self
                .chunks
                .get(identity)
                .is_none_or(|chunk| chunk.next() > begin),
        })
        .copied()
    }

    /// Whether no chunk of the committed log ends where the manifest does.
    pub(super) fn ends_nowhere(&self, manifest: &Manifest) -> bool {
        let next = manifest.next_offset.0;
        let begin = self.truth.first_key_value().map_or(0, |(id, _)| *id);
        next > begin && next != self.end() && !self.truth.contains_key(&next)
    }

    /// A chunk and all in front of it, from the newest to the oldest.
    fn ancestry<'a>(
        &'a self,
        cluster: &'a Cluster,
        newest: Option<Identity>,
    ) -> impl Iterator<Item = &'a Rc<StoredChunk>> {
        let mut next = newest;
        std::iter::from_fn(move || {
            let (chunk, before) = cluster.written(next?)?;
            let graft = self.grafts.get(&chunk.identity()).copied();
            next = graft.or(*before);
            Some(chunk)
        })
    }

    /// Tells the committed log by that of its leader, whose newest chunk that was ever committed vouches for all in front of it. From where on
    /// it is not the one that it was, if so.
    fn tell(&mut self, cluster: &Cluster, leader: usize) -> Option<u64> {
        let last = cluster.members[leader].last().map(|chunk| chunk.identity());
        let truth: BTreeMap<u64, Rc<StoredChunk>> = self
            .ancestry(cluster, last)
            .skip_while(|chunk| !self.chunks.contains_key(&chunk.identity()))
            .map(|chunk| (chunk.id, chunk.clone()))
            .collect();
        let differs = |(id, chunk): &(&u64, &Rc<StoredChunk>)| {
            truth.get(id).map(|now| now.identity()) != Some(chunk.identity())
        };
        let lost = self.truth.iter().find(differs).map(|(id, _)| *id);
        let all = truth
            .values()
            .map(|chunk| (chunk.identity(), chunk.clone()));
        self.chunks.extend(all);
        self.truth = truth;
        lost
    }
}

impl Env {
    /// The commit offset has moved.
    pub(crate) fn committed(&mut self) {
        let Some((leader, writer)) = self.cluster.current() else {
            return;
        };
        let committed = u64::try_from(writer.committed).unwrap_or(0);
        let segments = self.cluster.members[leader].segments.iter();
        let newest = segments.rev().find_map(|segment| {
            let segment = segment.borrow();
            let mut chunks = segment.chunks.iter().rev().map(|(chunk, _)| chunk);
            let newest = chunks.find(|chunk| chunk.id <= committed);
            newest.map(|chunk| chunk.identity())
        });
        let oracle = &self.oracle;
        let fresh: Vec<Rc<StoredChunk>> = oracle
            .ancestry(&self.cluster, newest)
            .take_while(|chunk| {
                let known = oracle.truth.get(&chunk.id);
                known.map(|known| known.identity()) != Some(chunk.identity())
            })
            .cloned()
            .collect();
        for chunk in fresh {
            self.oracle.chunks.insert(chunk.identity(), chunk.clone());
            self.oracle.truth.insert(chunk.id, chunk);
        }
    }

    /// A writer was elected. What it lacks of the committed log is lost.
    pub(crate) fn elected(&mut self) {
        let Some((leader, writer)) = self.cluster.current() else {
            return;
        };
        self.oracle.nodes.insert(writer.epoch, leader);
        if let Some(lost) = self.oracle.tell(&self.cluster, leader) {
            self.oracle.losses += 1;
            self.oracle.lacking.insert(writer.epoch);
            self.coverage.hit("committed chunks lost");
            self.note(|| format!("all committed chunks from {lost} on are lost"));
        }
    }

    /// A reader goes on with a tier whose newest chunk its log has trimmed. If the log was lost and grew to fit, nobody can tell: what is
    /// tiered counts as the truth from now on, as if what follows it had been written behind it.
    pub(crate) fn resumed_blindly(&mut self, node: usize) {
        // What a writer that has been deposed goes on with says nothing of the log that took the place of its own.
        if self
            .cluster
            .current()
            .is_none_or(|(leader, _)| leader != node)
        {
            return;
        }
        let Some(tier) = &self.oracle.tier else {
            return;
        };
        let member = &self.cluster.members[node];
        let next = tier.manifest.next_offset.0;
        if member.range().first.is_none_or(|first| next > first)
            || self.oracle.is_phantom(tier).is_none()
        {
            return;
        }
        let newest = tier.fragments.last();
        let newest = newest.and_then(|live| live.parsed.chunks.last()).copied();
        let last = member.last().map(|chunk| chunk.identity());
        let follows = self
            .oracle
            .ancestry(&self.cluster, last)
            .take_while(|chunk| chunk.id >= next)
            .last()
            .map(|chunk| chunk.identity());
        if let (Some(newest), Some(follows)) = (newest, follows) {
            self.coverage.hit("another timeline that nobody can tell");
            self.oracle.grafts.insert(follows, newest);
            self.oracle.tell(&self.cluster, node);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::MEMBERS;
    use crate::plan::Limits;

    fn lead(env: &mut Env, expected: usize) {
        assert_eq!(
            env.cluster.elect(0, 0).map(|(leader, _)| leader),
            Some(expected)
        );
        env.elected();
        for member in 0..MEMBERS {
            env.cluster.join(member);
        }
    }

    fn write(env: &mut Env, chunks: usize) {
        for _ in 0..chunks {
            env.cluster.write(&mut env.rng, 0, 0);
        }
        for member in 0..MEMBERS {
            env.cluster.replicate(member, chunks as u64);
        }
        env.committed();
    }

    fn truth(env: &Env) -> Vec<Identity> {
        let chunks = env.oracle.truth.values();
        chunks.map(|chunk| chunk.identity()).collect()
    }

    /// Member 0 is away while the others lose what it has, and write something else that they lose in turn. Where retention has left its log to
    /// begin, some chunk of theirs may reach across.
    #[test]
    fn a_log_that_comes_back_is_told_as_a_whole_wherever_it_begins_by_then() {
        for trimmed in 0..10 {
            let mut env = Env::new(trimmed, Limits::NONE, false);
            env.cluster.segment_bytes = 60;
            lead(&mut env, 2);
            write(&mut env, 30);
            let first = truth(&env);
            assert!(first.len() > 10, "{first:?}");
            env.cluster.crash(0, false);
            for member in [1, 2] {
                env.cluster.crash(member, true);
                env.cluster.members[member].up = true;
            }
            lead(&mut env, 2);
            write(&mut env, 30);
            assert_eq!(env.oracle.losses, 1);
            assert_ne!(truth(&env), first);
            env.cluster.crash(2, false);
            env.cluster.crash(1, true);
            for member in [0, 1] {
                env.cluster.members[member].up = true;
            }
            env.cluster.members[0].trim(trimmed as usize);
            lead(&mut env, 0);
            assert_eq!(env.oracle.losses, 2);
            assert_eq!(truth(&env), first, "{trimmed} segments trimmed");
        }
    }
}
