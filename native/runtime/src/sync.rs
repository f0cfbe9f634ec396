//! Locks, atomics, tasks and timers of those parts that several threads share, in one place: `native/interleavings` compiles these parts with
//! others in their stead, to try the orders in which threads may come.

pub(crate) use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) use parking_lot::Mutex;
pub(crate) use tokio::task::AbortHandle;
pub(crate) use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};
