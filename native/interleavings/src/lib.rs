//! The parts of `native/runtime` that several threads share, compiled with locks, atomics, tasks and timers that belong to a scheduler which
//! tries one order of steps after the other (`shuttle`). The sources are the production ones; what they use of the rest of that crate,
//! above all the transfers, is stood in for here. The explorations are in `tests/`.
//!
//! A crate of its own, so that nothing of the store's client has to be compiled for it.

#[path = "../../runtime/src/buffers.rs"]
#[expect(dead_code, reason = "buffers are not filled here")]
pub mod buffers;
pub mod executor;
#[path = "../../runtime/src/governor/mod.rs"]
pub mod governor;
#[path = "../../runtime/src/metrics.rs"]
pub mod metrics;
#[path = "../../runtime/src/panics.rs"]
#[expect(dead_code, unreachable_pub, reason = "part of it is for others")]
mod panics;
pub mod pins;
#[path = "../../runtime/src/running.rs"]
mod running;
#[path = "../../runtime/src/segment.rs"]
#[expect(dead_code, unreachable_pub, reason = "part of it is for transfers")]
mod segment;
pub mod store;
mod sync;
pub mod transfer;

pub use executor::Executor;
pub use running::Running;

/// Tries so many orders of what `world` does, in two ways: with a switch at any step, and with few switches at steps far apart.
pub fn explore(world: impl Fn() + Copy + Send + Sync + 'static, count: usize) {
    shuttle::check_random(world, count);
    shuttle::check_pct(world, count, SWITCHES);
}

/// Switches of an exploration with few of them.
const SWITCHES: usize = 3;

/// How many orders an exploration tries: `quick` of them, and many more where `STREAM_S3_DEEP` is set.
#[must_use]
pub fn orders(quick: usize) -> usize {
    match std::env::var_os("STREAM_S3_DEEP") {
        Some(_) => quick * 50,
        None => quick,
    }
}
