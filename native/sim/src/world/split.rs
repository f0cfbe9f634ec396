//! A deposed writer that still reaches the stores, beside a live one that does not reach the metadata store for a long time.
//!
//! What the live one uploads meanwhile waits for its persist. The deposed one finds its log trimmed beyond the tier, and its machine goes down as soon as it has
//! noted that the tier is discarded, before it has put anything in its place.

use super::World;
use crate::env::{Event, Origin};
use crate::metadata::MetaOp;

/// So old are its uploads then that they count as of the discarded tier.
const OLD: u64 = 22_000;
/// Until the grace is over, and the garbage collection has come by.
const COLLECTED: u64 = 9_000;

/// How long the deposed writer's machine is down then.
const DOWN: u64 = 12_000;

/// What comes next in such a world.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Split {
    /// The writer's machine loses touch with the others, and with the metadata store.
    Depose,
    /// That of the next one loses touch with the metadata store, once it may upload.
    Isolate,
    /// The deposed one reaches the metadata store again, and begins anew.
    Restart,
}

impl World {
    pub(super) fn split(&mut self, step: Split) {
        if self.env.calm || self.env.oracle.deleted {
            return;
        }
        let current = self.env.cluster.current().map(|(leader, _)| leader);
        match (step, current) {
            (Split::Depose, Some(leader)) => {
                self.env.note(|| format!("machine {leader} is deposed"));
                self.env.cluster.members[leader].cut_off = true;
                self.env.cut_from_metadata[leader] = u64::MAX;
                self.deposed = Some(leader);
                self.periodically(10, 200, Event::Elect);
                self.periodically(10, 200, Event::Split(Split::Isolate));
            }
            (Split::Isolate, Some(leader)) if self.may_upload(leader) => {
                self.env.coverage.hit("writer without metadata store");
                let until = self.env.now + OLD + COLLECTED;
                self.env
                    .note(|| format!("machine {leader} does not reach the metadata store"));
                self.env.cut_from_metadata[leader] = until;
                self.periodically(OLD, OLD + 500, Event::Split(Split::Restart));
            }
            (Split::Restart, _) => self.begin_anew(),
            // Not yet.
            (Split::Depose | Split::Isolate, _) => {
                self.periodically(50, 150, Event::Split(step));
            }
        }
    }

    fn may_upload(&self, node: usize) -> bool {
        let mut readers = self.readers.values();
        self.deposed != Some(node)
            && readers.any(|reader| reader.node == node && reader.core.is_some())
    }

    fn begin_anew(&mut self) {
        let Some(deposed) = self.deposed else {
            return;
        };
        self.env.cut_from_metadata[deposed] = 0;
        let Some(writer) = self.env.cluster.members[deposed].writer else {
            return;
        };
        self.env.coverage.hit("deposed writer begins anew");
        let kept = self.env.cluster.members[deposed].committed_segments(writer);
        self.env.cluster.members[deposed].trim(kept);
        let readers = self.readers.values();
        let of_it: Vec<_> = readers
            .filter(|reader| reader.node == deposed)
            .map(|reader| reader.pid)
            .collect();
        for pid in of_it {
            self.kill_reader(pid);
        }
    }

    /// What follows from what a machine has just asked of the metadata store.
    pub(super) fn split_after(&mut self, op: MetaOp, origin: Origin) {
        let (Some(deposed), Origin::Task(task, _), false) = (self.deposed, origin, self.env.calm)
        else {
            return;
        };
        let is_its = self
            .env
            .tasks
            .get(&task)
            .is_some_and(|task| task.node == deposed);
        if is_its && matches!(op, MetaOp::Discard { .. }) {
            self.crash(deposed, DOWN);
        }
    }
}
