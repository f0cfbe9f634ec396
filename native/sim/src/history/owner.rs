//! The shell of an uploader.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use stream_s3_core::error::ErrorClass;
use stream_s3_core::history::{
    Effect, Event, Examined, Existing, Machine, Precondition, Put, Read, encode, encoded_len,
    judge_existing,
};
use stream_s3_core::key;

use super::bucket::{Write, Written};
use super::coverage::{effect_name, event_name};
use super::host::{Content, Host};
use super::twin::HistoryTwin;
use super::world::{Call, Happening, Reply, World};

/// One run of an owner.
#[derive(Debug)]
pub(super) struct Task {
    machine: Machine,
    /// The body that was read, while it is held, and whether whoever read it did not know yet of a purge.
    body: Option<(Rc<[u8]>, bool)>,
    permit: Permit,
    /// Of the last effect that wants an answer.
    last: u64,
    /// Tells it from an earlier machine of the same run, as a pid does: answers reach the machine that has asked, or nobody.
    pub(super) life: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Permit {
    None,
    Waits,
    Held,
}

/// An uploader on a node, beside a member of the host's cluster.
#[derive(Debug, Default)]
pub(super) struct Owner {
    pub(super) tasks: BTreeMap<u64, Task>,
    permits: usize,
    waiting: VecDeque<(u64, u64)>,
    /// What the member knows: the commands up to this one.
    pub(super) view: Host,
    pub(super) applied: usize,
    /// It is about to apply more.
    pub(super) follows: bool,
    /// It began from a snapshot, and is still far behind.
    pub(super) slow: bool,
}

impl World {
    /// An event for the machine of a run, which is made if need be.
    pub(super) fn tell(&mut self, owner: u64, run: u64, event: Event) {
        let options = self.options;
        let now = self.now;
        let old_answers = self.is(HistoryTwin::OldAnswers);
        let life = self.fresh();
        let Some(of) = self.owners.get_mut(&owner) else {
            return;
        };
        let task = of.tasks.entry(run).or_insert_with(|| Task {
            machine: Machine::new(options),
            body: None,
            permit: Permit::None,
            last: 0,
            life,
        });
        let event = if old_answers {
            with_attempt(event, task.last)
        } else {
            event
        };
        let name = event_name(&event);
        let effects = task.machine.handle(now, event);
        self.hit(name);
        for effect in effects {
            self.hit(effect_name(&effect));
            self.perform(owner, run, effect);
        }
        if let Some(of) = self.owners.get_mut(&owner)
            && of
                .tasks
                .get(&run)
                .is_some_and(|task| task.machine.status().is_idle)
            && let Some(task) = of.tasks.remove(&run)
            && task.permit != Permit::None
        {
            self.violate(format!("run {run} has nothing to do, and keeps its permit"));
        }
    }

    fn task(&mut self, owner: u64, run: u64) -> Option<&mut Task> {
        self.owners.get_mut(&owner)?.tasks.get_mut(&run)
    }

    fn perform(&mut self, owner: u64, run: u64, effect: Effect) {
        self.note(|| format!("owner {owner} run {run}: {effect:?}"));
        let (attempt, call) = match effect {
            Effect::List { attempt } => (attempt, Call::List),
            Effect::AskPermit { attempt } => {
                self.remember(owner, run, attempt);
                return self.ask_permit(owner, run, attempt);
            }
            Effect::GivePermitBack => return self.give_permit_back(owner, run),
            Effect::Read { attempt, seq } => {
                self.check_permit(owner, run);
                (attempt, Call::Read(seq))
            }
            Effect::Put { attempt, seq, when } => {
                self.check_permit(owner, run);
                self.remember(owner, run, attempt);
                return self.put(owner, run, attempt, seq, when);
            }
            Effect::Examine {
                attempt,
                seq,
                crc,
                payload_len,
            } => {
                self.check_permit(owner, run);
                (attempt, Call::Examine(seq, crc, payload_len))
            }
            Effect::ReportMismatch { .. } | Effect::Count { .. } => return,
            Effect::Acknowledge { attempt, seq, .. } => (attempt, Call::Acknowledge(seq)),
            Effect::WakeAt { ms } => {
                let delay = ms.saturating_sub(self.now);
                return self.after(delay, Happening::Wake { owner, run });
            }
            Effect::Abort => {
                if let Some(task) = self.task(owner, run) {
                    task.body = None;
                }
                self.abandon(owner, Some(run));
                return;
            }
            Effect::Catalog { attempt } => (attempt, Call::Catalog),
            Effect::Delete { attempt } => (attempt, Call::Delete),
            Effect::Sweep { attempt } => (attempt, Call::Sweep),
            Effect::TellHost { attempt } => (attempt, Call::Purged),
        };
        self.remember(owner, run, attempt);
        self.ask(owner, run, attempt, call);
    }

    fn remember(&mut self, owner: u64, run: u64, attempt: u64) {
        if let Some(task) = self.task(owner, run) {
            task.last = attempt;
        }
    }

    fn ask_permit(&mut self, owner: u64, run: u64, attempt: u64) {
        let only = self.permits == 1;
        let (mut waits, mut second) = (false, false);
        if let Some(of) = self.owners.get_mut(&owner)
            && let Some(task) = of.tasks.get_mut(&run)
        {
            waits = only && of.permits > 0;
            of.waiting.push_back((run, attempt));
            second = std::mem::replace(&mut task.permit, Permit::Waits) != Permit::None;
        }
        if second {
            self.violate(format!("run {run} asks for a second permit"));
        }
        if waits {
            self.hit("waits for the only permit");
        }
        self.grant(owner);
    }

    fn give_permit_back(&mut self, owner: u64, run: u64) {
        if self.is(HistoryTwin::PermitBack) {
            return;
        }
        let mut permit = Permit::None;
        if let Some(of) = self.owners.get_mut(&owner)
            && let Some(task) = of.tasks.get_mut(&run)
        {
            permit = std::mem::replace(&mut task.permit, Permit::None);
            // A body that was not put goes with it.
            task.body = None;
            match permit {
                Permit::None => {}
                Permit::Waits => of.waiting.retain(|(other, _)| *other != run),
                Permit::Held => of.permits -= 1,
            }
        }
        if permit == Permit::None {
            self.violate(format!("run {run} gives a permit back that it has not"));
        }
        self.grant(owner);
    }

    fn check_permit(&mut self, owner: u64, run: u64) {
        if self
            .task(owner, run)
            .is_some_and(|task| task.permit != Permit::Held)
        {
            self.violate(format!("run {run} works without a permit"));
        }
    }

    fn grant(&mut self, owner: u64) {
        let most = self.permits;
        loop {
            let Some(of) = self.owners.get_mut(&owner) else {
                return;
            };
            if of.permits >= most {
                return;
            }
            let Some((run, attempt)) = of.waiting.pop_front() else {
                return;
            };
            if let Some(task) = of.tasks.get_mut(&run) {
                task.permit = Permit::Held;
                of.permits += 1;
                let life = task.life;
                let event = Event::Permit { attempt };
                let delay = self.rng.between(0, 2);
                self.after(
                    delay,
                    Happening::Tell {
                        owner,
                        run,
                        life: Some(life),
                        event,
                    },
                );
            }
        }
    }

    fn put(&mut self, owner: u64, run: u64, attempt: u64, seq: u64, when: Precondition) {
        let id = self.run_id(run);
        let Some((body, behind)) = self.task(owner, run).and_then(|task| task.body.take()) else {
            return self.violate(format!("segment {seq} of run {run} is put without a body"));
        };
        let crc = crc32fast::hash(&body);
        if self.is(HistoryTwin::PutBeforeAck) {
            let size = encoded_len(&id, body.len() as u64);
            let put = Put::Stored { crc, size };
            self.answer(owner, run, Event::Put { attempt, put });
        }
        let bytes: Rc<[u8]> = encode(&id, seq, &body).into();
        let checked = match &when {
            Precondition::Absent => !self.is(HistoryTwin::CreateOnly),
            Precondition::Matches(_) => !self.is(HistoryTwin::IfMatch),
        };
        let key = key::history_segment(&self.prefix, &id, seq);
        let write = Write {
            key,
            bytes,
            when,
            checked,
            behind,
        };
        self.ask(owner, run, attempt, Call::Put(write));
    }

    /// What a request came to, as an event.
    pub(super) fn replied(&mut self, owner: u64, run: u64, attempt: u64, reply: Reply) {
        if self
            .task(owner, run)
            .is_some_and(|task| task.last != attempt)
        {
            self.hit("old answer");
        }
        let event = match reply {
            Reply::Failed(class) => Event::Failed {
                attempt,
                class,
                jitter: self.rng.bits32(),
            },
            Reply::Gone => Event::Gone { attempt },
            Reply::Listed(listing) => Event::Listed { attempt, listing },
            Reply::Read(Content::Bytes { bytes, behind }) => {
                let Some(task) = self.task(owner, run) else {
                    return;
                };
                if task.last != attempt && !self.is(HistoryTwin::OldAnswers) {
                    return;
                }
                if let Some(task) = self.task(owner, run) {
                    task.body = Some((bytes, behind));
                }
                let read = Read::Ready;
                Event::Read { attempt, read }
            }
            Reply::Read(Content::NotSealed) => Event::Read {
                attempt,
                read: Read::NotSealed,
            },
            Reply::Read(Content::Gone) => Event::Gone { attempt },
            Reply::Put(write, written) => Event::Put {
                attempt,
                put: self.put_outcome(run, &write, written),
            },
            Reply::Examined(examined) => Event::Examined { attempt, examined },
            Reply::Acknowledged => Event::Acknowledged { attempt },
            Reply::Catalog(had_segments) => Event::Catalog {
                attempt,
                had_segments,
            },
            Reply::Done => Event::Done { attempt },
        };
        self.tell(owner, run, event);
    }

    fn put_outcome(&self, run: u64, write: &Write, written: Written) -> Put {
        let Write { bytes, when, .. } = write;
        let header = encoded_len(&self.run_id(run), 0);
        let payload = &bytes[header as usize..];
        let crc = crc32fast::hash(payload);
        match (written, when) {
            (Written::Done, _) => Put::Stored {
                crc,
                size: bytes.len() as u64,
            },
            (Written::Refused, Precondition::Absent) => Put::Exists {
                crc,
                payload_len: payload.len() as u64,
            },
            (Written::Refused, Precondition::Matches(_)) => Put::Changed,
        }
    }

    /// Compares, as the runtime does.
    pub(super) fn examine(&self, run: u64, seq: u64, crc: u32, payload_len: u64) -> Examined {
        let id = self.run_id(run);
        let key = key::history_segment(&self.prefix, &id, seq);
        let Some(object) = self.bucket.objects.get(&key) else {
            return Examined::Vanished;
        };
        let size = object.bytes.len() as u64;
        if self.is(HistoryTwin::CompareExisting) {
            return Examined::Same { size };
        }
        let verdict = if size == encoded_len(&id, payload_len) {
            judge_existing(&object.bytes, &id, seq, crc)
        } else {
            Existing::Replace
        };
        match verdict {
            Existing::AlreadyPresent { stored_size } => Examined::Same { size: stored_size },
            Existing::Replace => Examined::Other {
                etag: object.etag.to_string(),
            },
        }
    }

    /// A scan of the index comes past all runs.
    pub(super) fn scan(&mut self, owner: u64) {
        if self.is(HistoryTwin::Rescan) {
            return;
        }
        let Some(of) = self.owners.get(&owner) else {
            return;
        };
        let mut runs: Vec<u64> = of.tasks.keys().copied().collect();
        runs.extend(of.view.pending());
        runs.sort_unstable();
        runs.dedup();
        for run in runs {
            if self.is_unreadable(run) {
                // It is in the index, but nobody knows with what.
                self.hit("unreadable run");
                if self.is(HistoryTwin::UnreadableSkipped) {
                    return;
                }
                continue;
            }
            let listing = self.listing(owner, run);
            self.answer(owner, run, Event::Rescanned { listing });
        }
    }
}

fn with_attempt(event: Event, attempt: u64) -> Event {
    match event {
        Event::Listed { listing, .. } => Event::Listed { attempt, listing },
        Event::Permit { .. } => Event::Permit { attempt },
        Event::Read { read, .. } => Event::Read { attempt, read },
        Event::Put { put, .. } => Event::Put { attempt, put },
        Event::Examined { examined, .. } => Event::Examined { attempt, examined },
        Event::Acknowledged { .. } => Event::Acknowledged { attempt },
        Event::Catalog { had_segments, .. } => Event::Catalog {
            attempt,
            had_segments,
        },
        Event::Done { .. } => Event::Done { attempt },
        Event::Gone { .. } => Event::Gone { attempt },
        Event::Failed { class, jitter, .. } => Event::Failed {
            attempt,
            class,
            jitter,
        },
        event @ (Event::Sealed { .. } | Event::Rescanned { .. } | Event::Tick | Event::Purge) => {
            event
        }
    }
}

/// The classes of failures that requests meet.
pub(super) const CLASSES: [ErrorClass; 4] = [
    ErrorClass::Transient,
    ErrorClass::Transient,
    ErrorClass::Throttled,
    ErrorClass::Permanent,
];
