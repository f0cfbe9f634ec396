//! What becomes of requests to the store and to the host, and whether it may.

use std::rc::Rc;

use stream_s3_core::error::ErrorClass;
use stream_s3_core::history::{encode, may_sweep};
use stream_s3_core::key::{self, ParsedKey};

use super::{
    Call, DEADLINE, Happening, LATEST, LIFETIME, MIN_AGE, Origin, PURGE_WAIT, Reply, World,
};
use crate::history::bucket::{Write, Written};
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
        let is_write = matches!(call, Call::Write(_) | Call::Delete);
        let after = self.rng.between(1, 40);
        let answer = self.rng.between(0, 20);
        let goes_wrong = self.rng.chance(self.faults) && !self.calm;
        let (after, answer) = match self.rng.between(0, 9) {
            _ if !goes_wrong => (after, Some((answer, None))),
            0..=3 => {
                self.hit("refused");
                let class = self.rng.pick(&CLASSES);
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
    pub(in crate::history) fn abandon(&mut self, owner: u64, run: Option<u64>) {
        for (request, (of, its)) in &self.under_way {
            if *of == owner && run.is_none_or(|run| run == *its) {
                self.abandoned.insert(*request);
            }
        }
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
        let run = origin.run;
        match call {
            Call::List => Reply::Listed(self.listing(run)),
            Call::Read(seq) => Reply::Read(self.host.read(run, seq)),
            Call::Examine(seq, crc, len) => Reply::Examined(self.examine(run, seq, crc, len)),
            Call::Acknowledge(seq) => self.acknowledge(run, seq),
            Call::Catalog => match self.host.runs.get(&run) {
                None => Reply::Gone,
                Some(known) => Reply::Catalog(!known.segments.is_empty()),
            },
            Call::Delete => match self.host.runs.get(&run) {
                None => Reply::Gone,
                Some(known) => {
                    let seqs: Vec<u64> = known.segments.keys().copied().collect();
                    for key in self.keys(run, &seqs) {
                        self.delete(&key);
                    }
                    Reply::Done
                }
            },
            Call::Purged => {
                if self.host.runs.remove(&run).is_some() {
                    self.hit("purged");
                    self.note(|| format!("run {run} is purged"));
                    self.host.purged.insert(run, self.now);
                }
                Reply::Done
            }
            Call::Write(write) => self.write(origin, write),
        }
    }

    fn acknowledge(&mut self, run: u64, seq: u64) -> Reply {
        let right = self.right(run, seq);
        let Some(known) = self.host.runs.get_mut(&run) else {
            return Reply::Gone;
        };
        if known.purging.is_some() {
            return Reply::Gone;
        }
        let before = known
            .segments
            .iter()
            .find(|(_, segment)| !segment.uploaded)
            .map(|(first, _)| *first);
        let Some(segment) = known.segments.get_mut(&seq) else {
            self.violate(format!(
                "{seq} of run {run} is acknowledged, which was never sealed"
            ));
            return Reply::Acknowledged;
        };
        if segment.uploaded {
            return Reply::Acknowledged;
        }
        segment.uploaded = true;
        self.hit("acknowledged");
        self.note(|| format!("{seq} of run {run} is uploaded"));
        if before != Some(seq) {
            self.violate(format!(
                "{seq} of run {run} is acknowledged before {before:?}"
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

    fn write(&mut self, origin: Origin, write: Write) -> Reply {
        match &write {
            Write::Put {
                key,
                bytes,
                when,
                checked,
            } => {
                if *checked && !self.bucket.allows(key, when) {
                    return Reply::Put(write, Written::Refused);
                }
                self.put_takes_effect(origin, &key.clone(), bytes.clone());
                Reply::Put(write, Written::Done)
            }
            Write::Sweep { prefix } => {
                for (key, _) in self.bucket.under(prefix) {
                    self.delete(&key);
                }
                Reply::Done
            }
        }
    }

    fn put_takes_effect(&mut self, origin: Origin, key: &str, bytes: Rc<[u8]>) {
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
        if self.host.purged.contains_key(&run) {
            let age = self.now - origin.sent;
            if age <= PURGE_WAIT {
                self.violate(format!(
                    "{seq} of run {run} comes {age} ms after it was sent, and after the purge"
                ));
            }
            self.hit("a write after the purge");
        }
        self.bucket.put(key, bytes, self.now);
    }

    fn delete(&mut self, key: &str) {
        if self.bucket.objects.remove(key).is_none() {
            return;
        }
        self.note(|| format!("{key} is deleted"));
        let live = self
            .run_of(key)
            .and_then(|(run, _)| self.host.runs.get(&run))
            .is_some_and(|run| run.purging.is_none());
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
            if known.purging.is_some() {
                self.violate(format!("run {run} is still not purged in the end"));
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
