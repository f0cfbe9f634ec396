//! Decides when an upload may run, and runs it.
//!
//! One task owns the state; everything else sends it commands, so no caller ever waits for a lock or for the store.
//! What is admitted when is decided by [`stream_s3_core::admission`], a pure machine that the simulation runs as well.

mod task;

use std::hash::Hash;
use std::sync::Arc;

use stream_s3_core::admission::Rate;
use stream_s3_core::error::TransferError;
use stream_s3_core::units::Uid;
use tokio::sync::mpsc;

use crate::executor::Executor;
use crate::metrics::{Metrics, Snapshot};
use crate::store::Store;
use crate::sync::Ordering;
use crate::transfer::Fragment;

/// Where the answers to one submission go. Called from runtime threads only, and must not block.
pub trait Mailbox: Send + Sync + 'static {
    /// Whether anybody is left who wants the answer. Asked before admission and about once a second after that.
    fn is_alive(&self) -> bool;

    /// Tells what became of the submission.
    fn deliver(&self, event: Event);
}

/// What a submission is answered with: at most one `Admitted`, then exactly one of the other two.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Tokens and permit are held. Host work starts now; a transfer has started.
    Admitted,
    /// It is over: the uid in the key of the stored object, or why there is none. Never sent for host work that was admitted.
    Finished(Result<Uid, TransferError>),
    /// [`Mailbox::is_alive`] said no, so the work was dropped. Host work that runs still holds its permit, until [`Governor::finished`].
    Abandoned,
}

/// What to run.
pub enum Work {
    /// An upload, run here.
    Transfer(Box<(Store, Fragment)>),
    /// Something that the host runs, between [`Event::Admitted`] and [`Governor::finished`].
    Host,
}

/// How much may be admitted.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes a second.
    pub rate: Rate,
    /// Bytes that may be admitted at once after a pause.
    pub burst: u64,
    /// Work that may run at once; at least 1.
    pub permits: usize,
}

/// Handle on a governor. Dropping the last clone aborts everything that it runs.
///
/// Every call hands a command over and returns; none waits. `K` is what the host calls a submission.
#[derive(Debug)]
pub struct Governor<K> {
    commands: mpsc::UnboundedSender<Command<K>>,
    metrics: Arc<Metrics>,
}

pub(crate) enum Command<K> {
    Submit {
        key: K,
        size: u64,
        work: Work,
        mailbox: Box<dyn Mailbox>,
    },
    Finished(K),
    Cancel(Vec<K>),
    SetRate {
        rate: Rate,
        burst: u64,
    },
    SetPermits(usize),
    Stop(Box<dyn FnOnce() + Send>),
}

impl<K> Clone for Governor<K> {
    fn clone(&self) -> Self {
        Self {
            commands: self.commands.clone(),
            metrics: Arc::clone(&self.metrics),
        }
    }
}

impl<K: Eq + Hash + Send + Sync + Clone + 'static> Governor<K> {
    /// Starts a governor on the threads of `executor`. `owner` tells whether whoever started it still lives: once it
    /// says no, all work is aborted, as by [`Governor::stop`].
    #[must_use]
    pub fn start(
        executor: &Executor,
        limits: Limits,
        owner: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Self {
        let (commands, inbox) = mpsc::unbounded_channel();
        let metrics = Arc::new(Metrics::default());
        metrics
            .permits_effective
            .store(limits.permits as u64, Ordering::Relaxed);
        let task = task::Task::new(
            executor.clone(),
            Arc::clone(&metrics),
            limits,
            Box::new(owner),
        );
        executor.tokio().spawn(task.run(inbox));
        Self { commands, metrics }
    }

    /// Queues `work`, which costs `size` bytes of the rate, once. Two submissions with the same key are two submissions;
    /// [`Governor::cancel`] takes both.
    pub fn submit(&self, key: K, size: u64, work: Work, mailbox: Box<dyn Mailbox>) {
        self.metrics
            .submissions_received
            .fetch_add(1, Ordering::Relaxed);
        self.tell(Command::Submit {
            key,
            size,
            work,
            mailbox,
        });
    }

    /// Host work has ended: gives its permit back. Unknown keys are ignored.
    pub fn finished(&self, key: K) {
        self.tell(Command::Finished(key));
    }

    /// Drops what is queued and aborts the transfers that run. Each is answered, with `Cancelled` unless it came to its end before the
    /// abort took effect. Host work that runs is left to the host. Unknown keys are ignored.
    pub fn cancel(&self, keys: Vec<K>) {
        self.tell(Command::Cancel(keys));
    }

    /// Changes the rate; what has been charged already stays charged.
    pub fn set_rate(&self, rate: Rate, burst: u64) {
        self.tell(Command::SetRate { rate, burst });
    }

    /// Changes how much may run at once. What runs already is not aborted.
    pub fn set_permits(&self, permits: usize) {
        self.tell(Command::SetPermits(permits));
    }

    /// Cancels everything, and everything that is submitted later; calls `done` when nothing runs any more, or after two seconds,
    /// whichever comes first. Needs no answer from any store.
    pub fn stop(&self, done: impl FnOnce() + Send + 'static) {
        self.tell(Command::Stop(Box::new(done)));
    }

    /// The numbers of this governor. The gauges lag a command by the time that the governor's task takes to run.
    #[must_use]
    pub fn info(&self) -> Snapshot {
        self.metrics.snapshot()
    }

    fn tell(&self, command: Command<K>) {
        if let Err(mpsc::error::SendError(command)) = self.commands.send(command) {
            // The task has ended, which a panic alone can do while a handle exists. Nobody may wait for an answer that never comes.
            match command {
                Command::Submit { mailbox, .. } => {
                    mailbox.deliver(Event::Finished(Err(TransferError::Cancelled)))
                }
                Command::Stop(done) => done(),
                Command::Finished(_)
                | Command::Cancel(_)
                | Command::SetRate { .. }
                | Command::SetPermits(_) => {}
            }
        }
    }
}
