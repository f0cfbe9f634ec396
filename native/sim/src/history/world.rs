//! One world of one seed.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use stream_s3_core::decisions::retry::RetryDelays;
use stream_s3_core::error::ErrorClass;
use stream_s3_core::history::{Event, Examined, Listing, Options, encode, may_sweep};
use stream_s3_core::key::{self, ParsedKey, Prefix, RunId};
use stream_s3_core::units::TimestampMs;

use super::bucket::{Bucket, Write, Written};
use super::host::{Content, Host, Sealed};
use super::owner::{CLASSES, Owner};
use super::twin::HistoryTwin;
use crate::coverage::Coverage;
use crate::rng::Rng;

/// How long a request may take effect after it was sent, in milliseconds, unless the store had taken it in already.
const LIFETIME: u64 = 2_000;
/// How long a purge waits: longer than that, and than the reading of a body before it.
const PURGE_WAIT: u64 = 3_000;
/// What the store had taken in takes effect within this time.
const LATEST: u64 = 9_000;
/// When a request is given up.
const DEADLINE: u64 = 500;
/// How old an object has to be to be swept.
const MIN_AGE: u64 = 1_000;
/// Two retries of a purge that was refused, and what comes after them.
const CALM: u64 = 150_000;

/// What an owner asks for.
#[derive(Debug, Clone)]
pub(super) enum Call {
    List,
    Read(u64),
    Examine(u64, u32, u64),
    Acknowledge(u64),
    Catalog,
    Purged,
    Write(Write),
}

/// What it is answered.
#[derive(Debug, Clone)]
pub(super) enum Reply {
    Failed(ErrorClass),
    Gone,
    Listed(Listing),
    Read(Content),
    Put(Write, Written),
    Examined(Examined),
    Acknowledged,
    Catalog(Option<Vec<u64>>),
    Done,
}

/// Who asked.
#[derive(Debug, Clone, Copy)]
pub(super) struct Origin {
    owner: u64,
    run: u64,
    attempt: u64,
    life: u64,
    request: u64,
    sent: u64,
}

/// What happens at a moment.
#[derive(Debug)]
pub(super) enum Happening {
    Seal,
    Purge,
    Takeover,
    Stop {
        owner: u64,
    },
    Scan {
        owner: u64,
    },
    Orphans {
        owner: u64,
    },
    Judge {
        owner: u64,
        listed: Vec<(String, u64)>,
    },
    Tell {
        owner: u64,
        run: u64,
        /// Of the machine that it is for, where it answers something.
        life: Option<u64>,
        event: Event,
    },
    Wake {
        owner: u64,
        run: u64,
    },
    Apply {
        origin: Origin,
        call: Call,
        /// After how long it is answered, and whether that is a failure whatever it came to.
        answer: Option<(u64, Option<ErrorClass>)>,
    },
    Answer {
        origin: Origin,
        reply: Reply,
    },
}

/// What a world came to.
#[derive(Debug, Clone)]
pub struct HistoryOutcome {
    /// Events that happened.
    pub events: u64,
    /// What was violated.
    pub violation: Option<String>,
    /// What happened.
    pub coverage: Coverage,
    /// Its story, where somebody wanted it.
    pub trace: Vec<String>,
}

/// See the module.
pub(super) struct World {
    pub(super) now: u64,
    pub(super) rng: Rng,
    pub(super) options: Options,
    pub(super) permits: usize,
    pub(super) prefix: Prefix,
    pub(super) host: Host,
    pub(super) bucket: Bucket,
    pub(super) owners: BTreeMap<u64, Owner>,
    /// The one that the host has started last.
    leader: u64,
    twin: Option<HistoryTwin>,
    calm: bool,
    faults: u64,
    horizon: u64,
    scan_every: u64,
    queue: BTreeMap<(u64, u64), Happening>,
    next_id: u64,
    /// Requests that wait for their effect, and those whose owner does not wait any more.
    under_way: BTreeMap<u64, (u64, u64)>,
    abandoned: BTreeSet<u64>,
    ids: BTreeMap<u64, RunId>,
    numbers: BTreeMap<String, u64>,
    violation: Option<String>,
    coverage: Coverage,
    trace: Option<Vec<String>>,
}

/// Runs the world of a seed.
#[must_use]
pub fn run(seed: u64, twin: Option<HistoryTwin>, traced: bool) -> HistoryOutcome {
    let mut world = World::new(seed, twin, traced);
    let mut events = 0;
    let end = world.horizon + CALM;
    while world.violation.is_none() {
        let Some(((at, _), happening)) = world.queue.pop_first() else {
            break;
        };
        if at > end {
            break;
        }
        world.now = at;
        world.calm |= at > world.horizon;
        events += 1;
        world.happen(happening);
    }
    world.check_the_end();
    HistoryOutcome {
        events,
        violation: world.violation,
        coverage: world.coverage,
        trace: world.trace.unwrap_or_default(),
    }
}

impl World {
    fn new(seed: u64, twin: Option<HistoryTwin>, traced: bool) -> Self {
        let mut rng = Rng::new(seed ^ 0x4157_0000);
        let purge_wait_ms = if twin == Some(HistoryTwin::PurgeWait) {
            0
        } else {
            PURGE_WAIT
        };
        let mut world = Self {
            now: 0,
            options: Options {
                delays: RetryDelays {
                    transient_ms: 10,
                    transient_max_ms: 500,
                    permanent_ms: 100,
                    permanent_max_ms: 2_000,
                },
                purge_wait_ms,
            },
            permits: rng.between(1, 3) as usize,
            prefix: Prefix::default(),
            host: Host::default(),
            bucket: Bucket::default(),
            owners: BTreeMap::new(),
            leader: 0,
            twin,
            calm: false,
            faults: rng.between(0, 300),
            horizon: rng.between(4_000, 20_000),
            scan_every: rng.between(500, 4_000),
            queue: BTreeMap::new(),
            next_id: 1,
            under_way: BTreeMap::new(),
            abandoned: BTreeSet::new(),
            ids: BTreeMap::new(),
            numbers: BTreeMap::new(),
            violation: None,
            coverage: Coverage::default(),
            trace: traced.then(Vec::new),
            rng,
        };
        for _ in 0..world.rng.between(1, 4) {
            world.open();
        }
        world.after(0, Happening::Takeover);
        world.after(10, Happening::Seal);
        world.after(2_000, Happening::Purge);
        world
    }

    fn open(&mut self) {
        let run = self.host.open();
        if let Some(known) = self.host.runs.get(&run) {
            self.numbers.insert(known.id.as_str().to_owned(), run);
            self.ids.insert(run, known.id.clone());
        }
    }

    pub(super) fn is(&self, twin: HistoryTwin) -> bool {
        self.twin == Some(twin)
    }

    /// A number that nothing else in this world has.
    pub(super) fn fresh(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn life(&self, owner: u64, run: u64) -> Option<u64> {
        let task = self.owners.get(&owner)?.tasks.get(&run)?;
        Some(task.life)
    }

    pub(super) fn after(&mut self, delay: u64, happening: Happening) {
        self.next_id += 1;
        self.queue
            .insert((self.now + delay, self.next_id), happening);
    }

    pub(super) fn hit(&mut self, what: &'static str) {
        self.coverage.hit(what);
    }

    pub(super) fn note(&mut self, line: impl FnOnce() -> String) {
        let now = self.now;
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{now:>7} {}", line()));
        }
    }

    pub(super) fn violate(&mut self, what: String) {
        self.note(|| format!("VIOLATION {what}"));
        self.violation.get_or_insert(what);
    }

    /// Of a run that is, or was, known.
    pub(super) fn run_id(&self, run: u64) -> RunId {
        self.ids
            .get(&run)
            .cloned()
            .unwrap_or_else(|| unreachable!("a run without a name"))
    }

    pub(super) fn keys(&self, run: u64, seqs: &[u64]) -> Vec<String> {
        let id = self.run_id(run);
        seqs.iter()
            .map(|seq| key::history_segment(&self.prefix, &id, *seq))
            .collect()
    }

    /// What the index answers.
    pub(super) fn listing(&mut self, run: u64) -> Listing {
        let mut listing = self.host.listing(run);
        if self.is(HistoryTwin::SeqOrder) && listing.first.len() > 1 {
            listing.first.remove(0);
        }
        listing
    }

    /// A message, which takes a moment.
    pub(super) fn answer(&mut self, owner: u64, run: u64, event: Event) {
        let delay = self.rng.between(0, 2);
        let life = None;
        self.after(
            delay,
            Happening::Tell {
                owner,
                run,
                life,
                event,
            },
        );
    }

    /// Sends a request, with a fate.
    pub(super) fn ask(&mut self, owner: u64, run: u64, attempt: u64, call: Call) {
        let origin = Origin {
            owner,
            run,
            attempt,
            life: self.life(owner, run).unwrap_or(0),
            request: self.fresh(),
            sent: self.now,
        };
        self.under_way.insert(origin.request, (owner, run));
        let is_write = matches!(call, Call::Write(_));
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
    pub(super) fn abandon(&mut self, owner: u64, run: Option<u64>) {
        for (request, (of, its)) in &self.under_way {
            if *of == owner && run.is_none_or(|run| run == *its) {
                self.abandoned.insert(*request);
            }
        }
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Seal => self.seal(),
            Happening::Purge => self.purge(),
            Happening::Takeover => self.take_over(),
            Happening::Stop { owner } => {
                if owner != self.leader || !self.calm {
                    self.note(|| format!("owner {owner} ends"));
                    self.abandon(owner, None);
                    self.owners.remove(&owner);
                }
            }
            Happening::Scan { owner } => {
                if self.owners.contains_key(&owner) {
                    self.scan(owner);
                    self.after(self.scan_every, Happening::Scan { owner });
                }
            }
            Happening::Orphans { owner } => {
                if self.owners.contains_key(&owner) && !self.is(HistoryTwin::OrphanSweep) {
                    let listed = self.bucket.under(&key::histories_prefix(&self.prefix));
                    let delay = self.rng.between(1, 100);
                    self.after(delay, Happening::Judge { owner, listed });
                    self.after(4 * self.scan_every, Happening::Orphans { owner });
                }
            }
            Happening::Judge { owner, listed } => {
                if self.owners.contains_key(&owner) {
                    self.judge(listed);
                }
            }
            Happening::Tell {
                owner,
                run,
                life,
                event,
            } => {
                if life.is_none() || self.life(owner, run) == life {
                    self.note(|| format!("owner {owner} run {run}: {event:?}"));
                    self.tell(owner, run, event);
                }
            }
            Happening::Wake { owner, run } => {
                if let Some(of) = self.owners.get(&owner)
                    && of.tasks.contains_key(&run)
                {
                    self.tell(owner, run, Event::Tick);
                }
            }
            Happening::Apply {
                origin,
                call,
                answer,
            } => self.apply(origin, call, answer),
            Happening::Answer { origin, reply } => {
                let Origin {
                    owner,
                    run,
                    attempt,
                    ..
                } = origin;
                self.under_way.remove(&origin.request);
                let known = self.life(owner, run) == Some(origin.life);
                if known && !self.abandoned.contains(&origin.request) {
                    self.note(|| format!("owner {owner} run {run} attempt {attempt}: {reply:?}"));
                    self.replied(owner, run, attempt, reply);
                }
            }
        }
    }

    fn seal(&mut self) {
        if self.calm {
            return;
        }
        if self.rng.chance(100) {
            self.open();
        }
        let runs = self.host.open_runs();
        if let Some(run) = (!runs.is_empty()).then(|| self.rng.pick(&runs)) {
            self.seal_in(run);
        }
        let delay = self.rng.between(20, 400);
        self.after(delay, Happening::Seal);
    }

    fn seal_in(&mut self, run: u64) {
        let (now, len) = (self.now, self.rng.between(0, 40));
        let content: Vec<u8> = (0..len).map(|_| self.rng.bits() as u8).collect();
        let id = self.run_id(run);
        let Some(known) = self.host.runs.get_mut(&run) else {
            return;
        };
        let seq = known.segments.keys().last().map_or(0, |last| last + 1) + now % 2;
        let sealed = Sealed {
            content: content.clone(),
            at: now,
            uploaded: false,
        };
        known.segments.insert(seq, sealed);
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
        }
        let event = Event::Sealed {
            size: len,
            sealed: TimestampMs(now as i64),
        };
        // A hint may be lost.
        if self.rng.chance(900) {
            self.answer(self.leader, run, event);
        }
    }

    fn purge(&mut self) {
        let runs = self.host.open_runs();
        if self.calm || runs.is_empty() {
            return;
        }
        let run = self.rng.pick(&runs);
        let now = self.now;
        if let Some(known) = self.host.runs.get_mut(&run) {
            known.purging = Some(now);
        }
        self.hit("purge");
        self.note(|| format!("run {run} is purging"));
        self.answer(self.leader, run, Event::Purge);
        let delay = self.rng.between(1_000, 6_000);
        self.after(delay, Happening::Purge);
    }

    fn take_over(&mut self) {
        if self.calm && self.owners.contains_key(&self.leader) {
            return;
        }
        let old = self.leader;
        self.next_id += 1;
        self.leader = self.next_id;
        let owner = self.leader;
        self.owners.insert(owner, Owner::default());
        self.note(|| format!("owner {owner} begins"));
        if self.rng.chance(500) {
            self.after(0, Happening::Stop { owner: old });
        } else {
            self.hit("two owners at once");
            let delay = self.rng.between(1, 3_000);
            self.after(delay, Happening::Stop { owner: old });
        }
        self.after(0, Happening::Scan { owner });
        self.after(2_000, Happening::Orphans { owner });
        let purging: Vec<u64> = self
            .host
            .runs
            .iter()
            .filter(|(_, run)| run.purging.is_some())
            .map(|(run, _)| *run)
            .collect();
        for run in purging {
            self.answer(owner, run, Event::Purge);
        }
        let delay = self.rng.between(300, 6_000);
        self.after(delay, Happening::Takeover);
    }

    fn judge(&mut self, listed: Vec<(String, u64)>) {
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

    fn apply(&mut self, origin: Origin, call: Call, answer: Option<(u64, Option<ErrorClass>)>) {
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
                Some(known) if known.segments.is_empty() => Reply::Catalog(None),
                Some(known) => Reply::Catalog(Some(known.segments.keys().copied().collect())),
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
            Write::Delete { keys } => {
                for key in keys {
                    self.delete(key);
                }
                Reply::Done
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

    fn check_the_end(&mut self) {
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
