//! The fragments between cut and manifest, in cut order.

use std::sync::Arc;

use crate::fragment::Fragment;
use crate::units::{TransferId, Uid};

/// A queue in cut order with access by id. Persistent: a clone shares everything.
#[derive(Debug, Clone)]
pub(super) struct Transfers<T> {
    /// By reference: the vector copies 64 elements when one changes.
    queue: imbl::Vector<Arc<Transfer<T>>>,
    /// Number of transfers that have left the queue: the sequence number of its front.
    left: u64,
    /// Sequence numbers.
    by_id: imbl::OrdMap<TransferId, u64>,
}

#[derive(Debug, Clone)]
pub(super) struct Transfer<T> {
    pub(super) id: TransferId,
    pub(super) fragment: Fragment,
    pub(super) detail: T,
    /// Set once it is in the object store.
    pub(super) stored: Option<Uid>,
}

impl<T: Clone> Transfers<T> {
    pub(super) fn new() -> Self {
        Self {
            queue: imbl::Vector::new(),
            left: 0,
            by_id: imbl::OrdMap::new(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Transfer<T>> {
        self.queue.iter().map(Arc::as_ref)
    }

    /// Appends a transfer; false, and no change, where the id is in use.
    pub(super) fn push(&mut self, id: TransferId, fragment: Fragment, detail: T) -> bool {
        if self.by_id.contains_key(&id) {
            return false;
        }
        self.by_id.insert(id, self.left + self.queue.len() as u64);
        self.queue.push_back(Arc::new(Transfer {
            id,
            fragment,
            detail,
            stored: None,
        }));
        true
    }

    fn index(&self, id: TransferId) -> Option<usize> {
        let sequence = self.by_id.get(&id)?;
        usize::try_from(sequence.checked_sub(self.left)?).ok()
    }

    pub(super) fn get(&self, id: TransferId) -> Option<&Transfer<T>> {
        self.queue.get(self.index(id)?).map(Arc::as_ref)
    }

    /// Records that a fragment is stored; false, and no change, where that is known or the id is not.
    pub(super) fn set_stored(&mut self, id: TransferId, uid: Uid) -> bool {
        let Some(index) = self.index(id) else {
            return false;
        };
        if self
            .queue
            .get(index)
            .is_none_or(|transfer| transfer.stored.is_some())
        {
            return false;
        }
        match self.queue.get_mut(index) {
            Some(transfer) => {
                Arc::make_mut(transfer).stored = Some(uid);
                true
            }
            None => false,
        }
    }

    /// Takes the oldest transfer where it is stored and `fits`.
    pub(super) fn pop_stored(
        &mut self,
        fits: impl Fn(&Fragment) -> bool,
    ) -> Option<(Fragment, Uid)> {
        let front = self.queue.front()?;
        let (id, fragment, uid) = (front.id, front.fragment, front.stored?);
        if !fits(&fragment) {
            return None;
        }
        self.queue.pop_front();
        self.left += 1;
        self.by_id.remove(&id);
        Some((fragment, uid))
    }
}
