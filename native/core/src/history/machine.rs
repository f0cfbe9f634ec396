//! One run.

use super::event::{Effect, Event, Outcome, Stored};
use super::purge::Step;
use super::window::{Backlog, Window};
use crate::decisions::retry::{RetryDelays, retry_delay};
use crate::error::ErrorClass;

/// Settings. Times are in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Between attempts.
    pub delays: RetryDelays,
    /// How long a purge waits for requests that nobody waits for any more.
    pub purge_wait_ms: u64,
}

/// What is to be acknowledged. All that is kept of a stored segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Acknowledgment {
    pub(super) seq: u64,
    pub(super) crc: u32,
    pub(super) size: u64,
    pub(super) stored: Stored,
}

/// What follows a pause.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Then {
    /// Look what is to be done.
    GoOn,
    /// Propose this once more.
    Acknowledge(Acknowledgment),
    /// Do this step of a purge.
    Purge(Step),
}

/// Where the machine stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Phase {
    /// Nothing is pending.
    Idle,
    /// The index is being read.
    Listing,
    /// Waits for a permit.
    Queued { seq: u64 },
    /// Has a permit, as in the next two: the segment is being read.
    Reading { seq: u64, replaces: Option<String> },
    /// It is being put.
    Storing { seq: u64, replaces: Option<String> },
    /// What is there already is being fetched and compared.
    Examining { seq: u64, crc: u32 },
    /// The host is to commit it.
    Acknowledging(Acknowledgment),
    /// Waits until then.
    Pausing { until: u64, then: Then },
    /// Waits for the next scan.
    Blocked,
    /// The host does not want anything of this run uploaded.
    Gone,
    /// Everything of the run is being deleted.
    Purging(Step),
    /// That is done.
    Purged,
}

/// What a status shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// Where the machine stands, in a word.
    pub phase: &'static str,
    /// The segment it is about.
    pub seq: Option<u64>,
    /// What is pending.
    pub backlog: Backlog,
    /// Failures since something succeeded.
    pub failures: u32,
    /// Nothing is pending or under way: whoever holds the machine may drop it.
    pub is_idle: bool,
}

/// See the module. A value: a clone is an older state that stays usable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    pub(super) options: Options,
    pub(super) window: Window,
    pub(super) phase: Phase,
    /// Of the last effect that wants an answer.
    pub(super) attempt: u64,
    pub(super) failures: u32,
    pub(super) now: u64,
    pub(super) effects: Vec<Effect>,
}

impl Machine {
    /// A run of which nothing is known.
    #[must_use]
    pub fn new(options: Options) -> Self {
        Self {
            options,
            window: Window::default(),
            phase: Phase::Idle,
            attempt: 0,
            failures: 0,
            now: 0,
            effects: Vec::new(),
        }
    }

    /// Takes an event at `now_ms`, of a clock that never goes back, and answers what is to be done, in order. At most linear in the
    /// window.
    pub fn handle(&mut self, now_ms: u64, event: Event) -> Vec<Effect> {
        self.now = now_ms;
        match event {
            Event::Sealed { size, sealed } => {
                if !self.is_ended() {
                    self.window.sealed(size, sealed);
                    self.go_on_if_idle();
                }
            }
            Event::Listed { attempt, listing } => {
                if self.answers(attempt) && self.phase == Phase::Listing {
                    self.window.listed(listing, false);
                    self.go_on_listed();
                }
            }
            Event::Rescanned { listing } => {
                if !self.is_ended() {
                    self.window.listed(listing, true);
                    if self.phase == Phase::Blocked {
                        self.phase = Phase::Idle;
                    }
                    self.go_on_if_idle();
                }
            }
            Event::Permit { attempt } => self.when(attempt, Self::permitted),
            Event::Read { attempt, read } => self.when(attempt, |machine| machine.was_read(read)),
            Event::Put { attempt, put } => self.when(attempt, |machine| machine.was_put(put)),
            Event::Examined { attempt, examined } => {
                self.when(attempt, |machine| machine.was_examined(examined));
            }
            Event::Acknowledged { attempt } => self.when(attempt, Self::acknowledged),
            Event::Catalog {
                attempt,
                had_segments,
            } => self.when(attempt, |machine| machine.catalog_read(had_segments)),
            Event::Done { attempt } => self.when(attempt, Self::step_done),
            Event::Gone { attempt } => self.when(attempt, Self::gone),
            Event::Failed {
                attempt,
                class,
                jitter,
            } => self.when(attempt, |machine| machine.failed(class, jitter)),
            Event::Tick => self.ticked(),
            Event::Purge => self.purge(),
        }
        std::mem::take(&mut self.effects)
    }

    /// For people, for gauges, and for the decision whether the machine is needed any longer.
    #[must_use]
    pub fn status(&self) -> Status {
        let (phase, seq) = match &self.phase {
            Phase::Idle => ("idle", None),
            Phase::Listing => ("listing", None),
            Phase::Queued { seq } => ("queued", Some(*seq)),
            Phase::Reading { seq, .. } => ("reading", Some(*seq)),
            Phase::Storing { seq, .. } => ("storing", Some(*seq)),
            Phase::Examining { seq, .. } => ("examining", Some(*seq)),
            Phase::Acknowledging(of) => ("acknowledging", Some(of.seq)),
            Phase::Pausing {
                then: Then::Acknowledge(of),
                ..
            } => ("pausing", Some(of.seq)),
            Phase::Pausing {
                then: Then::GoOn, ..
            } => ("pausing", self.window.next().map(|next| next.seq)),
            Phase::Blocked => ("blocked", self.window.next().map(|next| next.seq)),
            Phase::Gone => ("gone", None),
            Phase::Purging(_)
            | Phase::Pausing {
                then: Then::Purge(_),
                ..
            } => ("purging", None),
            Phase::Purged => ("purged", None),
        };
        Status {
            phase,
            seq,
            backlog: self.window.backlog(),
            failures: self.failures,
            is_idle: match self.phase {
                Phase::Idle => self.window.next().is_none() && !self.window.has_more(),
                Phase::Gone | Phase::Purged => true,
                Phase::Listing
                | Phase::Queued { .. }
                | Phase::Reading { .. }
                | Phase::Storing { .. }
                | Phase::Examining { .. }
                | Phase::Acknowledging(_)
                | Phase::Pausing { .. }
                | Phase::Blocked
                | Phase::Purging(_) => false,
            },
        }
    }

    fn answers(&self, attempt: u64) -> bool {
        attempt == self.attempt
    }

    fn when(&mut self, attempt: u64, then: impl FnOnce(&mut Self)) {
        if self.answers(attempt) {
            then(self);
        }
    }

    /// Uploads are over for good.
    fn is_ended(&self) -> bool {
        matches!(
            self.phase,
            Phase::Gone
                | Phase::Purging(_)
                | Phase::Purged
                | Phase::Pausing {
                    then: Then::Purge(_),
                    ..
                }
        )
    }

    /// The number of an effect that wants an answer; answers to all earlier ones are old now.
    pub(super) fn fresh(&mut self) -> u64 {
        self.attempt += 1;
        self.attempt
    }

    pub(super) fn emit(&mut self, effect: Effect) {
        self.effects.push(effect);
    }

    pub(super) fn count(&mut self, outcome: Outcome, bytes: u64) {
        self.emit(Effect::Count { outcome, bytes });
    }

    fn go_on_if_idle(&mut self) {
        if self.phase == Phase::Idle {
            self.go_on();
        }
    }

    /// The next segment, or the next part of the index, or nothing.
    pub(super) fn go_on(&mut self) {
        if let Some(next) = self.window.next() {
            self.phase = Phase::Queued { seq: next.seq };
            let attempt = self.fresh();
            self.emit(Effect::AskPermit { attempt });
        } else if self.window.has_more() {
            self.window.asked();
            self.phase = Phase::Listing;
            let attempt = self.fresh();
            self.emit(Effect::List { attempt });
        } else {
            self.phase = Phase::Idle;
        }
    }

    fn go_on_listed(&mut self) {
        if self.window.next().is_none() && self.window.has_more() {
            // An index that shows nothing but what is done already lags behind: asked again at once, it would be asked for ever.
            self.pause(ErrorClass::Transient, u32::MAX, Then::GoOn);
        } else {
            self.failures = 0;
            self.go_on();
        }
    }

    fn failed(&mut self, class: ErrorClass, jitter: u32) {
        let then = match std::mem::replace(&mut self.phase, Phase::Idle) {
            Phase::Purging(step) => return self.step_failed(step, class, jitter),
            Phase::Acknowledging(of) => Then::Acknowledge(of),
            // Whatever was sealed meanwhile is in the index as well, when it is asked again.
            Phase::Listing => {
                self.window.ask_again();
                Then::GoOn
            }
            Phase::Queued { .. }
            | Phase::Reading { .. }
            | Phase::Storing { .. }
            | Phase::Examining { .. } => {
                self.emit(Effect::GivePermitBack);
                Then::GoOn
            }
            phase @ (Phase::Idle
            | Phase::Pausing { .. }
            | Phase::Blocked
            | Phase::Gone
            | Phase::Purged) => {
                self.phase = phase;
                return;
            }
        };
        match class {
            ErrorClass::Transient | ErrorClass::Throttled => {
                self.count(Outcome::RetryableError, 0);
                self.pause(class, jitter, then);
            }
            ErrorClass::Permanent => {
                self.count(Outcome::PermanentError, 0);
                self.failures = 0;
                self.phase = Phase::Blocked;
            }
        }
    }

    /// Waits longer and longer.
    pub(super) fn pause(&mut self, class: ErrorClass, jitter: u32, then: Then) {
        self.failures = self.failures.saturating_add(1);
        let delay = retry_delay(class, self.failures, &self.options.delays, jitter);
        self.pause_for(delay, then);
    }

    pub(super) fn pause_for(&mut self, delay: u64, then: Then) {
        let until = self.now.saturating_add(delay);
        self.phase = Phase::Pausing { until, then };
        // Answers to what was given up are old.
        self.fresh();
        self.emit(Effect::WakeAt { ms: until });
    }

    fn ticked(&mut self) {
        match &self.phase {
            Phase::Pausing { until, .. } if *until > self.now => {
                let ms = *until;
                self.emit(Effect::WakeAt { ms });
            }
            Phase::Pausing { then, .. } => match then.clone() {
                Then::GoOn => self.go_on(),
                Then::Acknowledge(of) => self.acknowledge(of),
                Then::Purge(step) => self.begin(step),
            },
            Phase::Idle
            | Phase::Listing
            | Phase::Queued { .. }
            | Phase::Reading { .. }
            | Phase::Storing { .. }
            | Phase::Examining { .. }
            | Phase::Acknowledging(_)
            | Phase::Blocked
            | Phase::Gone
            | Phase::Purging(_)
            | Phase::Purged => {}
        }
    }

    fn gone(&mut self) {
        match &self.phase {
            Phase::Reading { .. } | Phase::Storing { .. } | Phase::Examining { .. } => {
                self.emit(Effect::GivePermitBack);
            }
            Phase::Listing | Phase::Acknowledging(_) => {}
            // A host that has finished with a run while it was purged needs nothing more.
            Phase::Purging(_) => {
                self.phase = Phase::Purged;
                return;
            }
            Phase::Idle
            | Phase::Queued { .. }
            | Phase::Pausing { .. }
            | Phase::Blocked
            | Phase::Gone
            | Phase::Purged => return,
        }
        self.count(Outcome::Gone, 0);
        self.window.clear();
        self.phase = Phase::Gone;
        self.fresh();
    }
}
