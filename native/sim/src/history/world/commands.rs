//! What is committed, by whom, and when the members that owners live beside get to know of it.

use std::rc::Rc;

use stream_s3_core::history::{Event, encode, postpone_retention};
use stream_s3_core::key;
use stream_s3_core::units::TimestampMs;

use super::{Happening, RETENTION_AGAIN, World};
use crate::history::host::{Command, Committed, Host, Phase};
use crate::history::owner::Owner;
use crate::history::twin::HistoryTwin;

/// A snapshot is taken after so many commands.
const SNAPSHOT_EACH: usize = 15;
/// So many are kept.
const SNAPSHOTS: usize = 3;

impl World {
    /// Commits a command. The members hear of it a little later.
    pub(super) fn commit(&mut self, command: Command) -> Committed {
        let committed = self.host.apply(&command);
        if let Command::Purge { run } = command
            && self.is(HistoryTwin::CatalogOfPurge)
        {
            self.answer(self.leader, run, Event::Purge);
        }
        self.log.push(command);
        if self.log.len().is_multiple_of(SNAPSHOT_EACH) {
            self.snapshots
                .push_back((self.log.len(), self.host.clone()));
            if self.snapshots.len() > SNAPSHOTS {
                self.snapshots.pop_front();
            }
        }
        let owners: Vec<u64> = self.owners.keys().copied().collect();
        for owner in owners {
            self.follow_soon(owner);
        }
        committed
    }

    fn follow_soon(&mut self, owner: u64) {
        let Some(of) = self.owners.get_mut(&owner) else {
            return;
        };
        if !std::mem::replace(&mut of.follows, true) {
            let most = if of.slow { 300 } else { 20 };
            let delay = self.rng.between(0, most);
            self.after(delay, Happening::Follow { owner });
        }
    }

    /// A member applies some of what it does not know yet. The one beside the leading uploader tells it of what it applies.
    pub(super) fn follow(&mut self, owner: u64) {
        let some = self.rng.between(1, 6) as usize;
        let Some(of) = self.owners.get_mut(&owner) else {
            return;
        };
        of.follows = false;
        let upto = self.log.len().min(of.applied + some);
        let commands = self.log[of.applied..upto].to_vec();
        for command in &commands {
            of.view.apply(command);
        }
        of.applied = upto;
        if upto < self.log.len() {
            self.follow_soon(owner);
        } else {
            let was_slow = std::mem::replace(&mut of.slow, false);
            let differs = of.view != self.host;
            if was_slow {
                self.hit("caught up");
            }
            if differs {
                self.violate(format!(
                    "the member of owner {owner} has applied everything, and has another state"
                ));
            }
        }
        if owner == self.leader {
            for command in commands {
                self.tell_of(owner, command);
            }
        }
    }

    fn tell_of(&mut self, owner: u64, command: Command) {
        match command {
            Command::Seal {
                run, content, at, ..
            } => {
                if self.rng.chance(900) {
                    let event = Event::Sealed {
                        size: content.len() as u64,
                        sealed: TimestampMs(at as i64),
                    };
                    self.answer(owner, run, event);
                } else {
                    self.hit("hint lost");
                }
            }
            Command::Purge { run } => {
                if !self.is(HistoryTwin::CatalogOfPurge) {
                    self.answer(owner, run, Event::Purge);
                }
            }
            Command::Open
            | Command::Close { .. }
            | Command::Acknowledge { .. }
            | Command::Purged { .. } => {}
        }
    }

    /// What the member beside an owner knows; of an owner that is gone nobody waits for the answer.
    pub(super) fn view(&self, owner: u64) -> &Host {
        self.owners.get(&owner).map_or(&self.host, |of| &of.view)
    }

    pub(super) fn is_behind(&self, owner: u64) -> bool {
        self.owners
            .get(&owner)
            .is_some_and(|of| of.applied < self.log.len())
    }

    pub(super) fn open(&mut self) {
        self.commit(Command::Open);
        let run = self.host.next_run;
        if let Some(known) = self.host.runs.get(&run) {
            self.numbers.insert(known.id.as_str().to_owned(), run);
            self.ids.insert(run, known.id.clone());
        }
    }

    pub(super) fn seal(&mut self) {
        if self.calm {
            return;
        }
        if self.rng.chance(100) {
            self.open();
        }
        let runs = self.host.runs_in(&[Phase::Open]);
        if let Some(run) = (!runs.is_empty()).then(|| self.rng.pick(&runs)) {
            self.seal_in(run);
        }
        let delay = self.rng.between(20, 400);
        self.after(delay, Happening::Seal);
    }

    fn seal_in(&mut self, run: u64) {
        let (now, len) = (self.now, self.rng.between(0, 40));
        let content: Rc<[u8]> = (0..len).map(|_| self.rng.bits() as u8).collect();
        let id = self.run_id(run);
        let Some(known) = self.host.runs.get(&run) else {
            return;
        };
        let seq = known.segments.keys().last().map_or(0, |last| last + 1) + now % 2;
        self.note(|| format!("sealed {seq} of run {run}"));
        let key = key::history_segment(&self.prefix, &id, seq);
        if self.rng.chance(150) {
            // Left by somebody who had another history, or damaged.
            let mut bytes = encode(&id, seq, &content);
            let last = bytes.len() - 1;
            if self.rng.chance(500) {
                bytes[last] ^= 1;
            } else {
                bytes = encode(&id, seq, b"another history");
            }
            self.bucket.put(&key, bytes.into(), now);
            self.hit("something else is there");
            if let Some(etag) = self.bucket.objects.get(&key).map(|object| object.etag)
                && self.rng.chance(150)
            {
                // Whoever left it takes it away again, at about the time when it is found.
                let delay = self.rng.between(1, 300);
                self.after(delay, Happening::Remove { key, etag });
            }
        }
        if self.rng.chance(20) {
            self.cannot_be_read(run);
        }
        self.commit(Command::Seal {
            run,
            seq,
            content,
            at: now,
        });
    }

    /// The rows of a run cannot be read for a while, or never again.
    fn cannot_be_read(&mut self, run: u64) {
        let until = if self.rng.chance(200) {
            self.hit("run that stays unreadable");
            u64::MAX
        } else {
            self.now + self.rng.between(100, 8_000)
        };
        self.note(|| format!("run {run} cannot be read until {until}"));
        let known = self.unreadable.entry(run).or_insert(until);
        *known = (*known).max(until);
    }

    pub(in crate::history) fn is_unreadable(&self, run: u64) -> bool {
        self.unreadable
            .get(&run)
            .is_some_and(|until| *until > self.now)
    }

    pub(super) fn close(&mut self) {
        let runs = self.host.runs_in(&[Phase::Open]);
        if self.calm {
            return;
        }
        if let Some(run) = (!runs.is_empty()).then(|| self.rng.pick(&runs)) {
            self.note(|| format!("run {run} is closed"));
            self.commit(Command::Close { run });
            let delay = self.rng.between(1, 2_000);
            self.after(delay, Happening::Retention { run });
        }
        let delay = self.rng.between(1_000, 5_000);
        self.after(delay, Happening::Close);
    }

    /// Retention would like to take a closed run.
    pub(super) fn retention(&mut self, run: u64) {
        if !self.host.wants(run) {
            return;
        }
        let known = self.calm || !self.rng.chance(self.faults);
        let sealed = self.host.sealed(run).filter(|_| known);
        if postpone_retention(sealed) && !self.is(HistoryTwin::RetentionPostponed) {
            self.hit(if known {
                "retention postponed"
            } else {
                "retention knows nothing"
            });
            return self.after(RETENTION_AGAIN, Happening::Retention { run });
        }
        if self.host.sealed(run).is_some_and(|sealed| sealed > 0) {
            self.violate(format!(
                "retention takes run {run}, of which something is sealed and not uploaded"
            ));
        }
        self.hit("retention purges");
        self.begin_purge(run);
    }

    pub(super) fn purge(&mut self) {
        let runs = self.host.runs_in(&[Phase::Open, Phase::Closed]);
        if self.calm || runs.is_empty() {
            return;
        }
        let run = self.rng.pick(&runs);
        self.begin_purge(run);
        let delay = self.rng.between(1_000, 6_000);
        self.after(delay, Happening::Purge);
    }

    fn begin_purge(&mut self, run: u64) {
        self.hit("purge");
        self.note(|| format!("run {run} is purging"));
        self.commit(Command::Purge { run });
    }

    pub(super) fn take_over(&mut self) {
        if self.calm && self.owners.contains_key(&self.leader) {
            return;
        }
        let old = self.leader;
        self.leader = self.fresh();
        let owner = self.leader;
        let mut new = Owner::default();
        new.view = self.host.clone();
        new.applied = self.log.len();
        self.hit("takeover");
        if self.rng.chance(400) {
            // A standby that was restored from a snapshot, and has to apply what came after it.
            let at = self.rng.between(0, SNAPSHOTS as u64 - 1) as usize;
            if let Some((applied, view)) = self.snapshots.get(at) {
                new.view = view.clone();
                new.applied = *applied;
                new.slow = true;
                self.hit("takeover from a snapshot");
            }
        }
        let applied = new.applied;
        let known_to_purge = if self.is(HistoryTwin::CatalogOfPurge) {
            self.host.runs_in(&[Phase::Purging])
        } else {
            new.view.runs_in(&[Phase::Purging])
        };
        self.owners.insert(owner, new);
        self.note(|| format!("owner {owner} begins at command {applied}"));
        if applied < self.log.len() {
            self.follow_soon(owner);
        }
        let delay = if self.rng.chance(500) {
            0
        } else {
            self.hit("two owners at once");
            self.rng.between(1, 3_000)
        };
        self.after(delay, Happening::Stop { owner: old });
        self.after(0, Happening::Scan { owner });
        self.after(2_000, Happening::Orphans { owner });
        for run in known_to_purge {
            self.answer(owner, run, Event::Purge);
        }
        let delay = self.rng.between(300, 6_000);
        self.after(delay, Happening::Takeover);
    }
}
