//! Objects with entity tags.

use std::collections::BTreeMap;
use std::rc::Rc;

use stream_s3_core::history::Precondition;

/// An object.
#[derive(Debug, Clone)]
pub(super) struct Object {
    pub(super) bytes: Rc<[u8]>,
    pub(super) etag: u64,
    pub(super) stored: u64,
}

/// A request that stores something.
#[derive(Debug, Clone)]
pub(super) struct Write {
    pub(super) key: String,
    pub(super) bytes: Rc<[u8]>,
    pub(super) when: Precondition,
    /// Whether the condition is looked at.
    pub(super) checked: bool,
    /// Whoever read the content did not know yet that the run is purging.
    pub(super) behind: bool,
}

/// What a write came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Written {
    Done,
    Refused,
}

/// The objects.
#[derive(Debug, Default)]
pub(super) struct Bucket {
    pub(super) objects: BTreeMap<String, Object>,
    etags: u64,
}

impl Bucket {
    /// Whether a put would take effect now.
    pub(super) fn allows(&self, key: &str, when: &Precondition) -> bool {
        match when {
            Precondition::Absent => !self.objects.contains_key(key),
            Precondition::Matches(etag) => self
                .objects
                .get(key)
                .is_some_and(|object| object.etag.to_string() == *etag),
        }
    }

    pub(super) fn put(&mut self, key: &str, bytes: Rc<[u8]>, now: u64) {
        self.etags += 1;
        let object = Object {
            bytes,
            etag: self.etags,
            stored: now,
        };
        self.objects.insert(key.to_owned(), object);
    }

    /// Deletes an object if it is still this one.
    pub(super) fn remove(&mut self, key: &str, etag: u64) {
        if self
            .objects
            .get(key)
            .is_some_and(|object| object.etag == etag)
        {
            self.objects.remove(key);
        }
    }

    pub(super) fn under(&self, prefix: &str) -> Vec<(String, u64)> {
        self.objects
            .range(prefix.to_owned()..)
            .take_while(|(key, _)| key.starts_with(prefix))
            .map(|(key, object)| (key.clone(), object.stored))
            .collect()
    }
}
