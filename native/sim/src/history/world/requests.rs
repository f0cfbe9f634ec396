//! What becomes of requests to the store and to the host, and whether it may.

use std::rc::Rc;

use stream_s3_core::error::ErrorClass;
use stream_s3_core::history::{encode, may_sweep};
use stream_s3_core::key::{self, ParsedKey};

use super::{
    Call, DEADLINE, Happening, LATEST, LIFETIME, MIN_AGE, Origin, PURGE_WAIT, Reply, World,
};
use crate::history::bucket::{Write, Written};
use crate::history::coverage::failure_name;
use crate::history::host::{Catalog, Command, Committed, Phase};
use crate::history::owner::CLASSES;
use crate::history::twin::HistoryTwin;

impl World {
    /// Sends a request, with a fate.
    pub(in crate::history) fn ask(&mut self, owner: u64, run: u64, attempt: u64, call: Call) {
        let origin = Origin {
            owner,
            run,
            attempt,
            life: self.life(owner, run).unwrap_or(0),
            request: self.fresh(),
            sent: self.now,
        };
        self.under_way.insert(origin.request, (owner, run));
        let is_write = matches!(call, Call::Put(_) | Call::Delete | Call::Sweep);
        let after = self.rng.between(1, 40);
        let answer = self.rng.between(0, 20);
        let goes_wrong = self.rng.chance(self.faults) && !self.calm;
        let (after, answer) = match self.rng.between(0, 9) {
            _ if !goes_wrong => (after, Some((answer, None))),
            0..=3 => {
                let class = self.rng.pick(&CLASSES);
                self.hit(failure_name(&call, class));
                let reply = Reply::Failed(class);
                return self.after(after, Happening::Answer { origin, reply });
            }
            4 | 5 => {
                self.hit("lost reply");
                (after, Some((answer, Some(ErrorClass::Transient))))
            }
            6 => {
                self.hit("lost request");
                let reply = Reply::Failed(ErrorClass::Transient);
                return self.after(DEADLINE, Happening::Answer { origin, reply });
            }
            7 if is_write => {
                self.hit("stored by the store, but late");
                let reply = Reply::Failed(ErrorClass::Transient);
                self.after(DEADLINE, Happening::Answer { origin, reply });
                (self.rng.between(PURGE_WAIT + LIFETIME, LATEST), None)
            }
            8 => {
                self.hit("late");
                let reply = Reply::Failed(ErrorClass::Transient);
                self.after(DEADLINE, Happening::Answer { origin, reply });
                // The answer comes too, when nobody waits for it any more.
                (self.rng.between(DEADLINE, LIFETIME), Some((answer, None)))
            }
            _ => (self.rng.between(100, 400), Some((answer, None))),
        };
        self.after(
            after,
            Happening::Apply {
                origin,
                call,
                answer,
            },
        );
    }

    /// An owner gives up what it has under way, for one run or for all. What has arrived in the store already may take effect.
    /// Whether there was anything.
    pub(in crate::history) fn abandon(&mut self, owner: u64, run: Option<u64>) -> bool {
        let mut any = false;
        for (request, (of, its)) in &self.under_way {
            if *of == owner && run.is_none_or(|run| run == *its) {
                any = true;
                self.abandoned.insert(*request);
            }
        }
        any
    }

    pub(super) fn judge(&mut self, listed: Vec<(String, u64)>) {
        for (key, stored) in listed {
            let gone = self.is(HistoryTwin::SweepProof)
                || self
                    .run_of(&key)
                    .is_some_and(|(run, _)| !self.host.runs.contains_key(&run));
            if may_sweep(gone, Some(self.now.saturating_sub(stored)), MIN_AGE) {
                self.hit("orphan swept");
                self.delete(&key);
            }
        }
    }

    fn run_of(&self, key: &str) -> Option<(u64, u64)> {
        match key::parse(&self.prefix, key)? {
            ParsedKey::History { run, seq } => Some((*self.numbers.get(run.as_str())?, seq)),
            ParsedKey::Fragment { .. } | ParsedKey::Root { .. } | ParsedKey::Group { .. } => None,
        }
    }

    pub(super) fn apply(
        &mut self,
        origin: Origin,
        call: Call,
        answer: Option<(u64, Option<ErrorClass>)>,
    ) {
        let given_up = self.abandoned.contains(&origin.request);
        if given_up && self.rng.chance(500) {
            return;
        }
        let reply = self.perform_call(origin, call);
        if let Some((delay, failure)) = answer {
            let reply = failure.map_or(reply, Reply::Failed);
            self.after(delay, Happening::Answer { origin, reply });
        }
    }

    fn perform_call(&mut self, origin: Origin, call: Call) -> Reply {
        let Origin { owner, run, .. } = origin;
        if self.is_behind(owner) {
            self.hit("works before it has caught up");
        }
        match call {
            Call::List | Call::Read(_) if self.is_unreadable(run) => {
                Reply::Failed(ErrorClass::Permanent)
            }
            Call::List => Reply::Listed(self.listing(owner, run)),
            Call::Read(seq) => {
                let behind = !self.host.wants(run);
                Reply::Read(self.view(owner).read(run, seq, behind))
            }
            Call::Examine(seq, crc, len) => Reply::Examined(self.examine(run, seq, crc, len)),
            Call::Acknowledge(seq) => self.acknowledge(run, seq),
            Call::Catalog => match self.view(owner).catalog(run) {
                Catalog::Gone => Reply::Gone,
                Catalog::None => Reply::Catalog(false),
                Catalog::Segments(_) => Reply::Catalog(true),
            },
            Call::Put(write) => self.put_arrives(origin, write),
            Call::Delete => self.delete_by_key(owner, run),
            Call::Sweep => {
                let prefix = key::history_prefix(&self.prefix, &self.run_id(run));
                for (key, _) in self.bucket.under(&prefix) {
                    self.delete(&key);
                }
                Reply::Done
            }
            Call::Purged => {
                if self.commit(Command::Purged { run }) == Committed::Changed {
                    self.hit("purged");
                    self.note(|| format!("run {run} is purged"));
                    self.purged.insert(run, self.now);
                }
                Reply::Done
            }
        }
    }

    /// Page after page; any of them may fail.
    fn delete_by_key(&mut self, owner: u64, run: u64) -> Reply {
        let seqs = match self.view(owner).catalog(run) {
            Catalog::Gone => return Reply::Gone,
            Catalog::None => Vec::new(),
            Catalog::Segments(seqs) => seqs,
        };
        let fails = !self.calm && seqs.len() > 1 && self.rng.chance(self.faults);
        let upto = if fails { seqs.len() / 2 } else { seqs.len() };
        for key in self.keys(run, &seqs[..upto]) {
            self.delete(&key);
        }
        if fails {
            self.hit("deleted in part");
            Reply::Failed(self.rng.pick(&CLASSES))
        } else {
            Reply::Done
        }
    }

    fn acknowledge(&mut self, run: u64, seq: u64) -> Reply {
        let right = self.right(run, seq);
        let next = self.host.runs.get(&run).and_then(|known| {
            let mut segments = known.segments.iter();
            let next = segments.find(|(_, segment)| !segment.uploaded);
            next.map(|(first, _)| *first)
        });
        match self.commit(Command::Acknowledge { run, seq }) {
            Committed::Gone => return Reply::Gone,
            Committed::NeverSealed => {
                self.violate(format!(
                    "{seq} of run {run} is acknowledged, which was never sealed"
                ));
                return Reply::Acknowledged;
            }
            Committed::Same => {
                self.hit("acknowledged again");
                return Reply::Acknowledged;
            }
            Committed::Changed => {}
        }
        self.hit("acknowledged");
        self.note(|| format!("{seq} of run {run} is uploaded"));
        let times = self.acknowledged.entry((run, seq)).or_insert(0);
        *times += 1;
        if *times > 1 {
            self.violate(format!("{seq} of run {run} is acknowledged twice"));
        }
        if next != Some(seq) {
            self.violate(format!(
                "{seq} of run {run} is acknowledged before {next:?}"
            ));
        }
        let key = self.keys(run, &[seq]).remove(0);
        let there = self.bucket.objects.get(&key).map(|object| &object.bytes);
        if there != right.as_ref() {
            self.violate(format!(
                "{seq} of run {run} is acknowledged, but is not what lies in the bucket"
            ));
        }
        Reply::Acknowledged
    }

    /// The object that a segment must have.
    fn right(&self, run: u64, seq: u64) -> Option<Rc<[u8]>> {
        let known = self.host.runs.get(&run)?;
        let segment = known.segments.get(&seq)?;
        Some(encode(&known.id, seq, &segment.content).into())
    }

    fn put_arrives(&mut self, origin: Origin, write: Write) -> Reply {
        if write.checked && !self.bucket.allows(&write.key, &write.when) {
            return Reply::Put(write, Written::Refused);
        }
        self.put_takes_effect(origin, &write);
        Reply::Put(write, Written::Done)
    }

    fn put_takes_effect(&mut self, origin: Origin, write: &Write) {
        let key = &write.key;
        let Some((run, seq)) = self.run_of(key) else {
            return self.violate(format!("{key} is put, which is of no run"));
        };
        self.note(|| format!("{key} is there"));
        if let Some(right) = self.right(run, seq)
            && self
                .bucket
                .objects
                .get(key)
                .is_some_and(|object| object.bytes == right)
        {
            self.violate(format!("{seq} of run {run} was right, and is overwritten"));
        }
        if write.behind {
            self.hit("a write of an owner that is behind");
        }
        if self.purged.contains_key(&run) {
            let age = self.now - origin.sent;
            // Whoever does not know yet of the purge may begin a write at any time. It goes with a later sweep.
            if age <= PURGE_WAIT && !write.behind {
                self.violate(format!(
                    "{seq} of run {run} comes {age} ms after it was sent, and after the purge"
                ));
            }
            self.hit("a write after the purge");
        }
        self.bucket.put(key, write.bytes.clone(), self.now);
    }

    fn delete(&mut self, key: &str) {
        if self.bucket.objects.remove(key).is_none() {
            return;
        }
        self.note(|| format!("{key} is deleted"));
        let live = self
            .run_of(key)
            .and_then(|(run, _)| self.host.runs.get(&run))
            .is_some_and(|run| run.phase != Phase::Purging);
        if live {
            self.violate(format!("{key} is deleted, and its run is not purged"));
        }
    }

    pub(super) fn check_the_end(&mut self) {
        if self.violation.is_some() {
            return;
        }
        let runs: Vec<u64> = self.host.runs.keys().copied().collect();
        for run in runs {
            let Some(known) = self.host.runs.get(&run) else {
                continue;
            };
            let open = known.segments.iter().find(|(_, segment)| !segment.uploaded);
            if known.phase == Phase::Purging {
                self.violate(format!("run {run} is still not purged in the end"));
            } else if self.is_unreadable(run) {
                // Nobody can do anything about it.
            } else if known.phase == Phase::Closed && open.is_none() {
                self.violate(format!("run {run} is closed, and retention never takes it"));
            } else if let Some((seq, _)) = open {
                let seq = *seq;
                self.violate(format!(
                    "{seq} of run {run} is still not acknowledged in the end"
                ));
            }
        }
        for (key, _) in self.bucket.under(&key::histories_prefix(&self.prefix)) {
            let known = self
                .run_of(&key)
                .is_some_and(|(run, _)| self.host.runs.contains_key(&run));
            if !known {
                self.violate(format!(
                    "{key} is still there in the end, and its run is gone"
                ));
            }
        }
    }
}
