//! NIFs that panic, to show what becomes of a panic. Only with the feature `panics`, which no library has that is shipped.

use rustler::{Atom, Env, LocalPid, NifResult, Term};
use stream_s3_store::Op;

use crate::requests::{Answer, StoreRef, ask};

/// Panics in the call, on the scheduler of its caller.
#[rustler::nif]
fn panic_in_call() -> Atom {
    panic!("a call panics");
}

/// A store request that panics on a thread of the library, after it has waited once.
#[rustler::nif]
fn panic_in_task<'a>(
    env: Env<'a>,
    store: StoreRef,
    to: LocalPid,
    reference: Term<'a>,
) -> NifResult<Atom> {
    ask(env, to, reference, Op::Get, &store, |_store| panics())
}

async fn panics() -> Answer {
    tokio::task::yield_now().await;
    panic!("a task panics");
}
