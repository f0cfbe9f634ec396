//! In the place of the runtime's threads: tasks of the scheduler.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};

use futures::future::Abortable;
use shuttle::future::{JoinHandle, yield_now};

use crate::pins::Pins;
use crate::sync::AbortHandle;

/// Starts tasks, and knows all that it has started. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Executor {
    tasks: Tasks,
    pins: Pins,
}

/// Where tasks are spawned.
#[derive(Clone, Debug, Default)]
pub struct Tasks {
    all: Arc<Mutex<Vec<JoinHandle<()>>>>,
}

/// A task that was started.
#[derive(Debug)]
pub struct Spawned(AbortHandle);

impl Executor {
    /// Where tasks are spawned.
    #[must_use]
    pub fn tokio(&self) -> &Tasks {
        &self.tasks
    }

    /// The segments that are kept open.
    #[must_use]
    pub fn pins(&self) -> &Pins {
        &self.pins
    }

    /// Runs `job`, before and after which others may come, as on a thread of its own.
    ///
    /// # Errors
    /// None here.
    pub async fn read<T>(&self, job: impl FnOnce() -> T) -> Result<T, String> {
        yield_now().await;
        let done = job();
        yield_now().await;
        Ok(done)
    }

    /// Waits until all tasks have ended, those too that are started meanwhile.
    pub async fn ended(&self) {
        loop {
            let next = self.tasks.lock().pop();
            let Some(task) = next else {
                return;
            };
            let _ = task.await;
        }
    }
}

impl Tasks {
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a task.
    pub fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) -> Spawned {
        let (abort, registration) = futures::future::AbortHandle::new_pair();
        let task = shuttle::future::spawn(async move {
            // What is aborted is dropped here, at its next step.
            let _ = Abortable::new(work, registration).await;
        });
        self.lock().push(task);
        Spawned(AbortHandle(abort))
    }
}

impl Spawned {
    /// Aborts it at its next step.
    pub fn abort(&self) {
        self.0.abort();
    }

    pub(crate) fn abort_handle(&self) -> AbortHandle {
        self.0.clone()
    }
}
