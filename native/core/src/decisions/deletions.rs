//! When objects that retention has dropped may be deleted: never while a persisted manifest may list them.

use crate::manifest::ObjectRef;
use crate::units::Offset;

/// Whether objects that lie wholly below `dropped_below` may be deleted, now that a manifest with `persisted_first` is persisted.
#[must_use]
pub fn may_delete(dropped_below: Offset, persisted_first: Offset) -> bool {
    dropped_below <= persisted_first
}

/// Objects that wait for the persist that drops them. Belongs to one generation of a stream's reader: whatever is left when that ends was
/// perhaps never dropped, and is the garbage collection's to judge.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeletionQueue {
    batches: Vec<(Offset, Vec<ObjectRef>)>,
}

impl DeletionQueue {
    /// Adds objects that an edit has dropped; `first_offset` is the edit's.
    pub fn add(&mut self, first_offset: Offset, objects: Vec<ObjectRef>) {
        if !objects.is_empty() {
            self.batches.push((first_offset, objects));
        }
    }

    /// Takes the objects that may be deleted, now that a manifest with `first_offset` is persisted. In the order in which they came.
    pub fn persisted(&mut self, first_offset: Offset) -> Vec<ObjectRef> {
        let (ready, waiting) = std::mem::take(&mut self.batches)
            .into_iter()
            .partition(|(dropped_below, _)| may_delete(*dropped_below, first_offset));
        self.batches = waiting;
        let ready: Vec<(Offset, Vec<ObjectRef>)> = ready;
        ready.into_iter().flat_map(|(_, objects)| objects).collect()
    }

    /// Objects that wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.batches.iter().map(|(_, objects)| objects.len()).sum()
    }

    /// Whether none waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::FragmentRef;
    use crate::units::Uid;

    fn fragment(offset: u64) -> ObjectRef {
        ObjectRef::Fragment(FragmentRef {
            offset: Offset(offset),
            uid: Uid(1),
            size: 1,
        })
    }

    #[test]
    fn objects_wait_until_the_persisted_manifest_begins_after_them() {
        let mut queue = DeletionQueue::default();
        queue.add(Offset(20), vec![fragment(0), fragment(10)]);
        queue.add(Offset(40), vec![fragment(20), fragment(30)]);
        queue.add(Offset(40), Vec::new());
        assert_eq!(queue.persisted(Offset(19)), []);
        assert_eq!(queue.persisted(Offset(20)), [fragment(0), fragment(10)]);
        assert_eq!(queue.persisted(Offset(20)), []);
        assert_eq!(queue.len(), 2);
        assert_eq!(queue.persisted(Offset(50)), [fragment(20), fragment(30)]);
        assert!(queue.is_empty());
    }
}
