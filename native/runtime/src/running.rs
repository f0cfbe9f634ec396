//! Tasks that may be called off by the name that their requester gave them.

use std::collections::HashMap;
use std::future::Future;
use std::hash::Hash;
use std::sync::Arc;

use crate::executor::Executor;
use crate::sync::{AbortHandle, AtomicU64, Mutex, Ordering};

/// Tasks that run, by name; two may have the same one. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Running<K> {
    shared: Arc<Shared<K>>,
}

#[derive(Debug)]
struct Shared<K> {
    tasks: Mutex<HashMap<K, Vec<(u64, AbortHandle)>>>,
    next: AtomicU64,
}

impl<K> Default for Running<K> {
    fn default() -> Self {
        Self {
            shared: Arc::new(Shared {
                tasks: Mutex::new(HashMap::new()),
                next: AtomicU64::new(0),
            }),
        }
    }
}

impl<K: Eq + Hash + Clone + Send + 'static> Running<K> {
    /// Runs `work` as a task of its own. Its name is forgotten when it has ended.
    pub fn start(
        &self,
        executor: &Executor,
        name: K,
        work: impl Future<Output = ()> + Send + 'static,
    ) {
        let number = self.shared.next.fetch_add(1, Ordering::Relaxed);
        let entry = Entry {
            shared: Arc::clone(&self.shared),
            name: name.clone(),
            number,
        };
        // Locked before the task can end, so that it finds its own entry.
        let mut tasks = self.shared.tasks.lock();
        let task = executor.tokio().spawn(async move {
            let entry = entry;
            work.await;
            drop(entry);
        });
        let of_name = tasks.entry(name).or_default();
        of_name.push((number, task.abort_handle()));
    }

    /// Aborts all tasks of a name, each at its next step; unknown names are ignored.
    pub fn cancel(&self, name: &K) {
        let tasks = self.shared.tasks.lock().remove(name);
        for (_, task) in tasks.into_iter().flatten() {
            task.abort();
        }
    }

    /// How many names have a task.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shared.tasks.lock().len()
    }

    /// Whether nothing runs.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The entry of one task, which goes when the task does.
struct Entry<K: Eq + Hash> {
    shared: Arc<Shared<K>>,
    name: K,
    number: u64,
}

impl<K: Eq + Hash> Drop for Entry<K> {
    fn drop(&mut self) {
        let mut running = self.shared.tasks.lock();
        if let Some(tasks) = running.get_mut(&self.name) {
            tasks.retain(|(number, _)| *number != self.number);
            if tasks.is_empty() {
                running.remove(&self.name);
            }
        }
    }
}
