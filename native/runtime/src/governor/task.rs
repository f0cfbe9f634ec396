//! The task that owns a governor's state.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

use stream_s3_core::admission::{Admission, Next, Rate};
use stream_s3_core::error::{ErrorClass, TransferError};
use stream_s3_core::units::{MonotonicUs, Uid};
use tokio::sync::mpsc;

use super::{Command, Event, Limits, Mailbox, Work};
use crate::executor::Executor;
use crate::metrics::Metrics;
use crate::panics;
use crate::store::Store;
use crate::sync::{AbortHandle, Instant, MissedTickBehavior, Ordering, interval, sleep_until};
use crate::transfer::{self, Checksums, Fragment};

/// How often dead requesters are looked for while there is work.
const SWEEP: Duration = Duration::from_secs(1);
/// How long a stop waits for aborted transfers. They end at their next step, so this is met only on a starved machine.
const STOP_WAIT: Duration = Duration::from_secs(2);

/// Numbers submissions; never reused.
type Ticket = u64;

pub(super) struct Task<K> {
    executor: Executor,
    metrics: Arc<Metrics>,
    checksums: Arc<Checksums>,
    owner_lives: Box<dyn Fn() -> bool + Send + Sync>,
    started: Instant,
    admission: Admission<Ticket>,
    jobs: HashMap<Ticket, Job<K>>,
    tickets: HashMap<K, Vec<Ticket>>,
    next_ticket: Ticket,
    ended: mpsc::UnboundedSender<Ended>,
    stopping: Option<Stopping>,
}

struct Job<K> {
    key: K,
    mailbox: Box<dyn Mailbox>,
    state: State,
}

enum State {
    Queued(Work),
    Transfer(AbortHandle),
    Host,
    /// The requester is dead and its host work has been told; the permit stays taken until the host says that it ended.
    HostAbandoned,
}

struct Stopping {
    deadline: Instant,
    done: Vec<Box<dyn FnOnce() + Send>>,
}

/// Tells the task how a transfer ended, also when it is aborted: then it is dropped with no result in it.
struct Ending {
    ticket: Ticket,
    result: Option<Result<Uid, TransferError>>,
    to: mpsc::UnboundedSender<Ended>,
}

struct Ended {
    ticket: Ticket,
    result: Result<Uid, TransferError>,
}

impl Drop for Ending {
    fn drop(&mut self) {
        let result = self.result.take().unwrap_or(Err(TransferError::Cancelled));
        // The governor may be gone, and then nobody waits.
        let _ = self.to.send(Ended {
            ticket: self.ticket,
            result,
        });
    }
}

impl<K: Eq + Hash + Send + Sync + Clone + 'static> Task<K> {
    pub(super) fn new(
        executor: Executor,
        metrics: Arc<Metrics>,
        limits: Limits,
        owner_lives: Box<dyn Fn() -> bool + Send + Sync>,
    ) -> Self {
        // Replaced by `run`, which keeps the other end.
        let (ended, _) = mpsc::unbounded_channel();
        Self {
            executor,
            metrics,
            checksums: Arc::default(),
            owner_lives,
            started: Instant::now(),
            admission: Admission::new(limits.rate, limits.burst, limits.permits),
            jobs: HashMap::new(),
            tickets: HashMap::new(),
            next_ticket: 0,
            ended,
            stopping: None,
        }
    }

    /// Runs until the last handle is dropped, then aborts what is left.
    pub(super) async fn run(mut self, mut inbox: mpsc::UnboundedReceiver<Command<K>>) {
        let mut endings;
        (self.ended, endings) = mpsc::unbounded_channel();
        let mut sweep = interval(SWEEP);
        sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let admit_at = self.admit();
            self.publish();
            let wake = self.complete_stop(admit_at);
            let sleep = async {
                match wake {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                command = inbox.recv() => match command {
                    Some(command) => self.obey(command),
                    None => break,
                },
                Some(ended) = endings.recv() => self.settle(ended),
                _ = sweep.tick(), if !self.jobs.is_empty() => self.sweep(),
                () = sleep => {}
            }
        }
        self.abort_all();
        while !self.jobs.is_empty() {
            let Some(ended) = endings.recv().await else {
                break;
            };
            self.settle(ended);
        }
        self.publish();
        // Whoever asked for a stop may have let go of the last handle before it was complete.
        for done in self.stopping.into_iter().flat_map(|stop| stop.done) {
            done();
        }
    }

    fn obey(&mut self, command: Command<K>) {
        match command {
            Command::Submit { mailbox, .. } if self.stopping.is_some() => {
                mailbox.deliver(Event::Finished(Err(TransferError::Cancelled)))
            }
            Command::Submit {
                key,
                size,
                work,
                mailbox,
            } => self.submit(key, size, work, mailbox),
            Command::Finished(key) => self.host_finished(&key),
            Command::Cancel(keys) => {
                for ticket in keys
                    .iter()
                    .flat_map(|key| self.tickets.get(key).cloned().unwrap_or_default())
                    .collect::<Vec<_>>()
                {
                    self.cancel(ticket);
                }
            }
            Command::SetRate { rate, burst } => self.set_rate(rate, burst),
            Command::SetPermits(permits) => self.admission.set_permits(permits),
            Command::Stop(done) => self.stop(done),
        }
    }

    fn submit(&mut self, key: K, size: u64, work: Work, mailbox: Box<dyn Mailbox>) {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.admission.submit(self.now(), ticket, size);
        self.tickets.entry(key.clone()).or_default().push(ticket);
        self.jobs.insert(
            ticket,
            Job {
                key,
                mailbox,
                state: State::Queued(work),
            },
        );
    }

    /// Starts whatever may start; answers when there is more to start, if time alone brings it.
    fn admit(&mut self) -> Option<Instant> {
        loop {
            match self.admission.next(self.now()) {
                Next::Admit { key, oversized, .. } => {
                    if oversized {
                        self.metrics
                            .oversized_admissions
                            .fetch_add(1, Ordering::Relaxed);
                    }
                    self.start(key);
                }
                Next::WaitUntil(at) => return Some(self.started + Duration::from_micros(at.0)),
                Next::Idle => return None,
            }
        }
    }

    fn start(&mut self, ticket: Ticket) {
        let Some(job) = self.jobs.get_mut(&ticket) else {
            self.admission.finished(&ticket);
            return;
        };
        if !job.mailbox.is_alive() {
            self.metrics
                .dropped_dead_replyto
                .fetch_add(1, Ordering::Relaxed);
            // It has been admitted, so it gives a permit back as it goes.
            job.state = State::Host;
            self.end(ticket, Event::Abandoned);
            return;
        }
        job.mailbox.deliver(Event::Admitted);
        job.state = match std::mem::replace(&mut job.state, State::Host) {
            State::Queued(Work::Transfer(work)) => {
                let (store, fragment) = *work;
                let ending = Ending {
                    ticket,
                    result: None,
                    to: self.ended.clone(),
                };
                let run = run(
                    self.executor.clone(),
                    Arc::clone(&self.metrics),
                    Arc::clone(&self.checksums),
                    store,
                    fragment,
                    ending,
                );
                State::Transfer(self.executor.tokio().spawn(run).abort_handle())
            }
            State::Queued(Work::Host) => State::Host,
            running @ (State::Transfer(_) | State::Host | State::HostAbandoned) => running,
        };
    }

    fn settle(&mut self, ended: Ended) {
        let now = self.now();
        match ended.result.as_ref().map_err(TransferError::class) {
            Ok(_) => self.admission.succeeded(now),
            Err(ErrorClass::Throttled) => self.admission.throttled(now),
            Err(ErrorClass::Transient | ErrorClass::Permanent) => {}
        }
        self.end(ended.ticket, Event::Finished(ended.result));
    }

    fn host_finished(&mut self, key: &K) {
        let running = self
            .tickets
            .get(key)
            .into_iter()
            .flatten()
            .copied()
            .find(|ticket| {
                self.jobs
                    .get(ticket)
                    .is_some_and(|job| matches!(job.state, State::Host | State::HostAbandoned))
            });
        if let Some(ticket) = running {
            self.forget(ticket);
        }
    }

    fn cancel(&mut self, ticket: Ticket) {
        match self.jobs.get(&ticket).map(|job| &job.state) {
            Some(State::Queued(_)) => {
                self.end(ticket, Event::Finished(Err(TransferError::Cancelled)))
            }
            // Its ending comes through the channel, once the request is really gone.
            Some(State::Transfer(abort)) => abort.abort(),
            Some(State::Host | State::HostAbandoned) | None => {}
        }
    }

    /// Drops the work of requesters that have died meanwhile, and everything once the owner has.
    fn sweep(&mut self) {
        if !(self.owner_lives)() {
            self.abort_all();
            return;
        }
        let dead: Vec<Ticket> = self
            .jobs
            .iter()
            .filter(|(_, job)| !job.mailbox.is_alive())
            .map(|(ticket, _)| *ticket)
            .collect();
        for ticket in dead {
            let Some(job) = self.jobs.get_mut(&ticket) else {
                continue;
            };
            match &job.state {
                State::Queued(_) => {
                    self.metrics
                        .dropped_dead_replyto
                        .fetch_add(1, Ordering::Relaxed);
                    self.end(ticket, Event::Abandoned);
                }
                State::Transfer(abort) => {
                    // Counted once: an aborted transfer is gone before the next sweep.
                    self.metrics
                        .dropped_dead_replyto
                        .fetch_add(1, Ordering::Relaxed);
                    abort.abort();
                }
                State::Host => {
                    self.metrics
                        .dropped_dead_replyto
                        .fetch_add(1, Ordering::Relaxed);
                    job.mailbox.deliver(Event::Abandoned);
                    job.state = State::HostAbandoned;
                }
                State::HostAbandoned => {}
            }
        }
    }

    fn stop(&mut self, done: Box<dyn FnOnce() + Send>) {
        self.abort_all();
        let deadline = Instant::now() + STOP_WAIT;
        self.stopping
            .get_or_insert_with(|| Stopping {
                deadline,
                done: Vec::new(),
            })
            .done
            .push(done);
    }

    /// Answers the stop if it is complete or overdue; tells when to look again.
    fn complete_stop(&mut self, admit_at: Option<Instant>) -> Option<Instant> {
        let Some(stopping) = &mut self.stopping else {
            return admit_at;
        };
        let transfers = self
            .jobs
            .values()
            .any(|job| matches!(job.state, State::Transfer(_)));
        if transfers && Instant::now() < stopping.deadline {
            return Some(stopping.deadline);
        }
        for done in stopping.done.drain(..) {
            done();
        }
        None
    }

    /// Host work that runs is the host's to end; its permits no longer matter.
    fn abort_all(&mut self) {
        for ticket in self.jobs.keys().copied().collect::<Vec<_>>() {
            match self.jobs.get(&ticket).map(|job| &job.state) {
                Some(State::Host | State::HostAbandoned) => drop(self.forget(ticket)),
                Some(State::Queued(_) | State::Transfer(_)) | None => self.cancel(ticket),
            }
        }
    }

    fn end(&mut self, ticket: Ticket, event: Event) {
        if let Some(job) = self.forget(ticket) {
            job.mailbox.deliver(event);
        }
    }

    fn forget(&mut self, ticket: Ticket) -> Option<Job<K>> {
        let job = self.jobs.remove(&ticket)?;
        if let Some(tickets) = self.tickets.get_mut(&job.key) {
            tickets.retain(|other| *other != ticket);
            if tickets.is_empty() {
                self.tickets.remove(&job.key);
            }
        }
        match job.state {
            State::Queued(_) => drop(self.admission.cancel(&ticket)),
            State::Transfer(_) | State::Host | State::HostAbandoned => {
                self.admission.finished(&ticket)
            }
        }
        Some(job)
    }

    fn set_rate(&mut self, rate: Rate, burst: u64) {
        let now = self.now();
        self.admission.set_rate(now, rate, burst);
    }

    fn publish(&self) {
        self.metrics
            .tasks_in_flight
            .store(self.admission.running() as u64, Ordering::Relaxed);
        self.metrics
            .pending_submissions
            .store(self.admission.queued() as u64, Ordering::Relaxed);
        self.metrics
            .permits_effective
            .store(self.admission.effective_permits() as u64, Ordering::Relaxed);
    }

    fn now(&self) -> MonotonicUs {
        MonotonicUs(u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX))
    }
}

async fn run(
    executor: Executor,
    metrics: Arc<Metrics>,
    checksums: Arc<Checksums>,
    store: Store,
    fragment: Fragment,
    mut ending: Ending,
) {
    let upload = transfer::upload(&executor, &metrics, &checksums, &store, &fragment);
    let result = panics::caught_async(upload)
        .await
        .unwrap_or_else(|text| Err(TransferError::Panic(text)));
    ending.result = Some(result);
}
