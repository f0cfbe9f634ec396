//! In the place of the runtime's own module of that name: each of these is a point at which another thread may come.

use std::cell::Cell;
use std::time::Duration;

use shuttle::rand::Rng as _;

pub(crate) use shuttle::sync::atomic::{AtomicU64, Ordering};

/// As `parking_lot` has it: without poison.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(shuttle::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> shuttle::sync::MutexGuard<'_, T> {
        self.0
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Aborts a task at its next step.
#[derive(Debug, Clone)]
pub(crate) struct AbortHandle(pub(crate) futures::future::AbortHandle);

impl AbortHandle {
    pub(crate) fn abort(&self) {
        self.0.abort();
    }
}

/// Another thread may come here.
pub(crate) fn point() {
    // Not a yield, of which some schedulers think that nothing can go on without the others.
    shuttle::sync::atomic::AtomicBool::new(false).load(Ordering::SeqCst);
}

std::thread_local! {
    /// Milliseconds. Each exploration runs on one thread, and its clock only has to go on.
    static CLOCK: Cell<u64> = const { Cell::new(0) };
}

/// A moment. Time passes whenever somebody waits for it, by as much as the scheduler likes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Instant(u64);

impl Instant {
    pub(crate) fn now() -> Self {
        Self(CLOCK.get())
    }

    pub(crate) fn elapsed(self) -> Duration {
        Duration::from_millis(CLOCK.get().saturating_sub(self.0))
    }
}

impl std::ops::Add<Duration> for Instant {
    type Output = Self;

    fn add(self, by: Duration) -> Self {
        Self(self.0 + u64::try_from(by.as_millis()).unwrap_or(u64::MAX))
    }
}

pub(crate) async fn sleep_until(at: Instant) {
    while Instant::now() < at {
        let step = shuttle::rand::thread_rng().gen_range(1..700);
        CLOCK.set(CLOCK.get() + step);
        shuttle::future::yield_now().await;
    }
}

/// What becomes of ticks that were missed: of no account here.
pub(crate) enum MissedTickBehavior {
    Delay,
}

pub(crate) struct Interval {
    period: Duration,
    next: Instant,
}

pub(crate) fn interval(period: Duration) -> Interval {
    Interval {
        period,
        next: Instant::now(),
    }
}

impl Interval {
    pub(crate) fn set_missed_tick_behavior(&mut self, behavior: MissedTickBehavior) {
        match behavior {
            MissedTickBehavior::Delay => {}
        }
    }

    pub(crate) async fn tick(&mut self) {
        sleep_until(self.next).await;
        self.next = Instant::now() + self.period;
    }
}
