//! One world of one seed.

mod commands;
mod requests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use stream_s3_core::decisions::retry::RetryDelays;
use stream_s3_core::error::ErrorClass;
use stream_s3_core::history::{Event, Examined, Listing, Options};
use stream_s3_core::key::{self, Prefix, RunId};

use super::bucket::{Bucket, Write, Written};
use super::host::{Command, Content, Host};
use super::owner::Owner;
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
/// When retention that was postponed comes again. It would be an hour; whoever comes earlier is told to wait as well.
const RETENTION_AGAIN: u64 = 2_500;
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
    Put(Write),
    /// By key, of what the catalog has then.
    Delete,
    /// By prefix.
    Sweep,
    Purged,
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
    Catalog(bool),
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
    Close,
    Retention {
        run: u64,
    },
    Purge,
    Takeover,
    Follow {
        owner: u64,
    },
    /// Of an object that is none of ours.
    Remove {
        key: String,
        etag: u64,
    },
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
    /// All commands, in order.
    log: Vec<Command>,
    /// The last ones, with the number of commands that they are made of.
    snapshots: VecDeque<(usize, Host)>,
    /// Runs whose rows cannot be read, until then.
    unreadable: BTreeMap<u64, u64>,
    /// When a run was committed to be purged altogether.
    purged: BTreeMap<u64, u64>,
    /// How often the acknowledgment of a segment has changed something.
    acknowledged: BTreeMap<(u64, u64), u32>,
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
            host: Host {
                acknowledges_twice: twin == Some(HistoryTwin::AcknowledgedOnce),
                ..Host::default()
            },
            log: Vec::new(),
            snapshots: VecDeque::new(),
            unreadable: BTreeMap::new(),
            purged: BTreeMap::new(),
            acknowledged: BTreeMap::new(),
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
        world.after(1_500, Happening::Close);
        world
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
    pub(super) fn listing(&self, owner: u64, run: u64) -> Listing {
        let mut listing = self.view(owner).listing(run);
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

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Seal => self.seal(),
            Happening::Close => self.close(),
            Happening::Retention { run } => self.retention(run),
            Happening::Purge => self.purge(),
            Happening::Takeover => self.take_over(),
            Happening::Follow { owner } => self.follow(owner),
            Happening::Remove { key, etag } => self.bucket.remove(&key, etag),
            Happening::Stop { owner } => {
                if owner != self.leader || !self.calm {
                    self.note(|| format!("owner {owner} ends"));
                    if self.abandon(owner, None) {
                        self.hit("owner ends in the middle");
                    }
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
            Happening::Answer { origin, reply } => self.answered(origin, reply),
        }
    }

    /// An answer reaches the machine that has asked, or nobody.
    fn answered(&mut self, origin: Origin, reply: Reply) {
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
