//! The threads of the library: one tokio runtime for requests, and a few threads of its own for reading files.
//!
//! Both are started by the first call that needs them and live until the VM ends. Tearing them down would race with
//! library unloading, and there is nothing to gain: idle threads cost no CPU time.

use std::sync::{Arc, LazyLock};
use std::thread;

use parking_lot::Mutex;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::{mpsc, oneshot};

use crate::panics;
use crate::pins::Pins;

/// Threads that drive requests. They never block: every file operation goes to the readers.
const WORKERS: usize = 2;
/// Threads that read segment files. Reads from the page cache are short; a few threads keep a cold disk busy.
const READERS: usize = 4;
/// Jobs that wait for a reader; a submitter beyond that waits in turn, without blocking a thread.
const READER_QUEUE: usize = 64;

type Job = Box<dyn FnOnce() + Send + 'static>;

/// Handle on the threads of this process. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Executor {
    tokio: Handle,
    readers: mpsc::Sender<Job>,
    pins: Pins,
}

/// Why there are no threads.
#[derive(Debug, Clone, thiserror::Error)]
#[error("cannot start the threads of the library: {0}")]
pub struct StartError(Arc<std::io::Error>);

impl Executor {
    /// The threads of this process, started now if need be.
    ///
    /// # Errors
    /// The system refuses new threads. The answer stays the same for the life of the process.
    pub fn global() -> Result<&'static Self, StartError> {
        struct Process {
            executor: Executor,
            _tokio: Runtime,
        }
        static PROCESS: LazyLock<Result<Process, StartError>> = LazyLock::new(|| {
            let start = || {
                let tokio = Builder::new_multi_thread()
                    .worker_threads(WORKERS)
                    .thread_name("stream_s3_io")
                    .enable_all()
                    .build()?;
                let executor = Executor {
                    tokio: tokio.handle().clone(),
                    readers: start_readers()?,
                    pins: Pins::default(),
                };
                Ok(Process {
                    executor,
                    _tokio: tokio,
                })
            };
            start().map_err(|error: std::io::Error| StartError(Arc::new(error)))
        });
        PROCESS
            .as_ref()
            .map(|process| &process.executor)
            .map_err(Clone::clone)
    }

    /// An executor on the calling tokio runtime with readers and pins of its own, which end with the last clone: for tests.
    ///
    /// # Errors
    /// The system refuses new threads.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn current() -> Result<Self, StartError> {
        let readers = start_readers().map_err(|error| StartError(Arc::new(error)))?;
        Ok(Self {
            tokio: Handle::current(),
            readers,
            pins: Pins::default(),
        })
    }

    /// Where tasks are spawned.
    #[must_use]
    pub fn tokio(&self) -> &Handle {
        &self.tokio
    }

    /// The segments that are kept open: one registry for all that runs on these threads.
    #[must_use]
    pub fn pins(&self) -> &Pins {
        &self.pins
    }

    /// Runs `job`, which may block, on a reader thread. A caller that goes away meanwhile leaves the job to end by itself.
    ///
    /// # Errors
    /// The text of the panic, where `job` panics.
    pub async fn read<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, String> {
        let (tx, rx) = oneshot::channel();
        let job: Job = Box::new(move || {
            // Nobody listening is no error: the transfer was cancelled.
            let _ = tx.send(panics::caught(job));
        });
        if self.readers.send(job).await.is_err() {
            return Err("the reader threads are gone".to_owned());
        }
        rx.await
            .unwrap_or_else(|_| Err("a reader thread ended in the middle of a job".to_owned()))
    }
}

fn start_readers() -> std::io::Result<mpsc::Sender<Job>> {
    let (tx, rx) = mpsc::channel::<Job>(READER_QUEUE);
    let queue = Arc::new(Mutex::new(rx));
    for n in 0..READERS {
        let queue = Arc::clone(&queue);
        thread::Builder::new()
            .name(format!("stream_s3_read{n}"))
            .spawn(move || {
                loop {
                    // The lock covers the wait, not the job: one thread waits for work, the others for their turn to wait.
                    let job = queue.lock().blocking_recv();
                    match job {
                        Some(job) => job(),
                        None => break,
                    }
                }
            })?;
    }
    Ok(tx)
}
