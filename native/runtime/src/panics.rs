//! Turns panics into values: one transfer that panics must not take the VM, or another transfer, with it.

use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};

use futures::FutureExt as _;

/// Runs `f`; `Err` has the text of its panic.
pub(crate) fn caught<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    // Whatever `f` had borrowed is dropped with it, so no half-changed state survives.
    catch_unwind(AssertUnwindSafe(f)).map_err(|payload| text(&*payload))
}

/// Drives `f` to its end; `Err` has the text of its panic.
pub async fn caught_async<T>(f: impl Future<Output = T>) -> Result<T, String> {
    AssertUnwindSafe(f)
        .catch_unwind()
        .await
        .map_err(|payload| text(&*payload))
}

fn text(payload: &(dyn Any + Send)) -> String {
    if let Some(text) = payload.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text.clone()
    } else {
        "panic without a text".to_owned()
    }
}
