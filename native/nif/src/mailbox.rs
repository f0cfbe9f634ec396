//! Messages to Erlang processes. They leave from threads of the runtime alone: a scheduler must not wait for another
//! process' mailbox, and the VM forbids it there.

use std::future::Future;
use std::sync::LazyLock;
use std::time::Duration;

use rustler::{Encoder, LocalPid, OwnedEnv, ResourceArc};
use stream_s3_runtime::{Event, Executor, Mailbox, Running};
use stream_s3_store::{Op, StoreError};

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

/// Requests that run, by what their requester calls them.
static REQUESTS: LazyLock<Running<Opaque>> = LazyLock::new(Running::default);

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
    let name = reference.clone();
    REQUESTS.start(executor, name, async move {
        let guarded = stream_s3_runtime::caught_async(request);
        let outcome = tokio::select! {
            outcome = guarded => outcome,
            () = death_of(&watch) => return,
        };
        match outcome {
            Ok(Ok(answer)) => send(
                &to,
                (atoms::store_result(), &reference, (atoms::ok(), answer)),
            ),
            Ok(Err(error)) => send(
                &to,
                (
                    atoms::store_result(),
                    &reference,
                    (atoms::error(), Failed(&error)),
                ),
            ),
            Err(text) => send(
                &to,
                (
                    atoms::store_result(),
                    &reference,
                    (atoms::error(), Panicked(op, text)),
                ),
            ),
        }
    });
}

/// Aborts requests; unknown references are ignored.
pub(crate) fn cancel(references: &[Opaque]) {
    for reference in references {
        REQUESTS.cancel(reference);
    }
}

async fn death_of(watch: &Watch) {
    while watch.is_alive() {
        tokio::time::sleep(WATCH_INTERVAL).await;
    }
}
