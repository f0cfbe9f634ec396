//! Messages to Erlang processes. They leave from threads of the runtime alone: a scheduler must not wait for another
//! process' mailbox, and the VM forbids it there.

use std::collections::HashMap;
use std::future::Future;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rustler::{Encoder, LocalPid, OwnedEnv, ResourceArc};
use stream_s3_runtime::{Event, Executor, Mailbox};
use stream_s3_store::{Op, StoreError};
use tokio::task::AbortHandle;

use crate::handle::{Opaque, Watch};
use crate::term::{Failed, Panicked, Reason, StoreAnswer, atoms};

/// How often a request looks whether the process that waits for it still lives.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// Sends `message` from a thread of the runtime. A process that is gone is no error.
pub(crate) fn send(to: &LocalPid, message: impl Encoder) {
    let _ = OwnedEnv::new().send_and_clear(to, |env| message.encode(env));
}

/// Answers the requester of a transfer.
pub(crate) struct TransferMailbox {
    pub(crate) reply_to: LocalPid,
    pub(crate) reference: Opaque,
    pub(crate) watch: ResourceArc<Watch>,
}

impl Mailbox for TransferMailbox {
    fn is_alive(&self) -> bool {
        self.watch.is_alive()
    }

    fn deliver(&self, event: Event) {
        match event {
            Event::Admitted => send(
                &self.reply_to,
                (atoms::transfer_admitted(), &self.reference),
            ),
            Event::Finished(Ok(uid)) => send(
                &self.reply_to,
                (
                    atoms::transfer_result(),
                    &self.reference,
                    (atoms::ok(), uid.0),
                ),
            ),
            Event::Finished(Err(error)) => {
                send(
                    &self.reply_to,
                    (
                        atoms::transfer_result(),
                        &self.reference,
                        (atoms::error(), Reason(&error)),
                    ),
                );
            }
            // Nobody is left to be told.
            Event::Abandoned => {}
        }
    }
}

/// Tells the owner of a governor when to run its work, and when not to.
pub(crate) struct OwnerMailbox {
    pub(crate) owner: LocalPid,
    pub(crate) reference: Opaque,
    /// Over the process that wants the result, not over the owner.
    pub(crate) watch: ResourceArc<Watch>,
}

impl Mailbox for OwnerMailbox {
    fn is_alive(&self) -> bool {
        self.watch.is_alive()
    }

    fn deliver(&self, event: Event) {
        match event {
            Event::Admitted => send(&self.owner, (atoms::governor_run(), &self.reference)),
            // Host work has no other end than being cancelled before it runs.
            Event::Finished(_) => send(
                &self.owner,
                (
                    atoms::governor_dropped(),
                    &self.reference,
                    atoms::cancelled(),
                ),
            ),
            Event::Abandoned => send(
                &self.owner,
                (atoms::governor_dropped(), &self.reference, atoms::dead()),
            ),
        }
    }
}

/// Requests that run, by what their requester calls them; two may have the same name.
type Running = HashMap<Opaque, Vec<(u64, AbortHandle)>>;

static REQUESTS: LazyLock<Mutex<Running>> = LazyLock::new(Mutex::default);
static NEXT_REQUEST: AtomicU64 = AtomicU64::new(0);

/// Runs a store request and sends `{store_result, Ref, Result}` when it has ended. Nothing is sent once it has been
/// cancelled; a requester that dies cancels it.
pub(crate) fn request<F>(
    executor: &Executor,
    to: LocalPid,
    watch: ResourceArc<Watch>,
    reference: Opaque,
    op: Op,
    request: F,
) where
    F: Future<Output = Result<StoreAnswer, StoreError>> + Send + 'static,
{
    let number = NEXT_REQUEST.fetch_add(1, Ordering::Relaxed);
    let mut running = REQUESTS.lock();
    // Taken before the task can end, so that it finds its own entry.
    let entry = Entry {
        reference: reference.clone(),
        number,
    };
    let task = executor.tokio().spawn(async move {
        let entry = entry;
        let guarded = stream_s3_runtime::caught_async(request);
        let outcome = tokio::select! {
            outcome = guarded => outcome,
            () = death_of(&watch) => return,
        };
        let reference = &entry.reference;
        match outcome {
            Ok(Ok(answer)) => send(
                &to,
                (atoms::store_result(), reference, (atoms::ok(), answer)),
            ),
            Ok(Err(error)) => send(
                &to,
                (
                    atoms::store_result(),
                    reference,
                    (atoms::error(), Failed(&error)),
                ),
            ),
            Err(text) => send(
                &to,
                (
                    atoms::store_result(),
                    reference,
                    (atoms::error(), Panicked(op, text)),
                ),
            ),
        }
    });
    running
        .entry(reference)
        .or_default()
        .push((number, task.abort_handle()));
}

/// Aborts requests; unknown references are ignored.
pub(crate) fn cancel(references: &[Opaque]) {
    for reference in references {
        let tasks = REQUESTS.lock().remove(reference);
        for (_, task) in tasks.into_iter().flatten() {
            task.abort();
        }
    }
}

/// The entry of one request, which goes when the request does.
struct Entry {
    reference: Opaque,
    number: u64,
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut running = REQUESTS.lock();
        if let Some(tasks) = running.get_mut(&self.reference) {
            tasks.retain(|(number, _)| *number != self.number);
            if tasks.is_empty() {
                running.remove(&self.reference);
            }
        }
    }
}

async fn death_of(watch: &Watch) {
    while watch.is_alive() {
        tokio::time::sleep(WATCH_INTERVAL).await;
    }
}
