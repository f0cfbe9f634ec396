//! Verification on a store that fails, and on one that changes meanwhile.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream;
use stream_s3_core::manifest::{Manifest, encode_root};
use stream_s3_core::units::Revision;
use stream_s3_store::{
    Body, Capabilities, ErrorKind, Failure, Listed, Object, ObjectStore, Op, Page, PutOptions,
    Result, StoreError, Stored,
};

use super::*;
use crate::walk::tests::fragment;

const FRAGMENT: &str = "rabbitmq/stream/demo/data/00000000000000000000.00000001.fragment";

/// Objects in memory, and what is to happen to them.
#[derive(Default)]
struct Store {
    objects: BTreeMap<String, Vec<u8>>,
    /// Happens before the next read of a key, once.
    before_get: Option<(String, Change)>,
    /// Bodies of a key that break off.
    broken: Option<(String, u32)>,
    /// Listings that fail.
    failing_lists: u32,
}

type Change = Box<dyn FnOnce(&mut Store) + Send>;

#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Store>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Store> {
        self.0.lock().unwrap()
    }

    async fn verify(&self) -> std::result::Result<Verified, Failed> {
        let reader = Reader::new(Arc::new(self.clone()));
        let options = Options {
            concurrency: 2,
            root: None,
            progress: Progress::new(true),
        };
        verify(
            &reader,
            &Prefix::default(),
            &StreamId::parse("demo").unwrap(),
            &options,
        )
        .await
    }
}

fn failed(op: Op, kind: ErrorKind, failure: Failure) -> StoreError {
    StoreError {
        kind,
        op,
        failure,
        message: "as told".to_owned(),
        source: None,
    }
}

#[async_trait]
impl ObjectStore for Shared {
    async fn put(&self, _: &str, _: Body, _: PutOptions) -> Result<Stored> {
        unreachable!("verify writes nothing")
    }

    async fn get(&self, key: &str, part: Part) -> Result<Object> {
        assert_eq!(part, Part::Whole);
        let mut store = self.lock();
        if store.before_get.as_ref().is_some_and(|(of, _)| of == key)
            && let Some((_, change)) = store.before_get.take()
        {
            change(&mut store);
        }
        let Some(bytes) = store.objects.get(key).cloned() else {
            return Err(failed(Op::Get, ErrorKind::NotFound, Failure::Http(404)));
        };
        let size = bytes.len() as u64;
        let mut pieces: Vec<std::io::Result<Bytes>> = bytes
            .chunks(100)
            .map(|piece| Ok(Bytes::copy_from_slice(piece)))
            .collect();
        if let Some((_, left)) = store
            .broken
            .as_mut()
            .filter(|(of, left)| of == key && *left > 0)
        {
            *left -= 1;
            pieces.truncate(1);
            pieces.push(Err(std::io::Error::other("reset")));
        }
        Ok(Object {
            size,
            etag: None,
            body: Box::pin(stream::iter(pieces)),
        })
    }

    async fn delete(&self, _: &[String]) -> Result<Vec<(String, StoreError)>> {
        unreachable!("verify deletes nothing")
    }

    async fn list(&self, prefix: &str, from: Option<&str>, _: usize) -> Result<Page> {
        let mut store = self.lock();
        if store.failing_lists > 0 {
            store.failing_lists -= 1;
            return Err(failed(Op::List, ErrorKind::Transient, Failure::Http(503)));
        }
        // Pages of one row, so that every listing has to turn them.
        let after =
            |key: &&String| key.starts_with(prefix) && from.is_none_or(|from| key.as_str() > from);
        let mut keys = store.objects.keys().filter(after);
        let Some(key) = keys.next() else {
            return Ok(Page::default());
        };
        let row = Listed {
            key: key.clone(),
            size: store.objects[key].len() as u64,
            modified_ms: None,
        };
        Ok(Page {
            objects: vec![row],
            next: keys.next().map(|_| key.clone()),
        })
    }

    async fn probe(&self, _: &str) -> Result<Capabilities> {
        unreachable!("verify probes nothing")
    }
}

fn root_key(uid: u32) -> String {
    key::root(
        &Prefix::default(),
        &StreamId::parse("demo").unwrap(),
        Epoch(1),
        Uid(uid),
    )
}

/// A root of one fragment of `chunks` offsets.
fn root(chunks: u64) -> Vec<u8> {
    let (entry, _) = fragment(chunks, |_| 7);
    let manifest = Manifest {
        first_offset: Offset(0),
        first_timestamp: entry.first_timestamp,
        first_last_timestamp: entry.last_timestamp,
        next_offset: Offset(chunks),
        total_size: u128::from(entry.size),
        revision: Revision(0),
        entries: [entry].into_iter().collect(),
    };
    encode_root(&manifest).unwrap()
}

/// One fragment of ten chunks under root 1.
fn store() -> Shared {
    let shared = Shared::default();
    let (_, object) = fragment(10, |_| 7);
    shared
        .lock()
        .objects
        .extend([(FRAGMENT.to_owned(), object), (root_key(1), root(10))]);
    shared
}

#[tokio::test]
async fn a_body_that_breaks_off_is_read_again() {
    for key in [FRAGMENT.to_owned(), root_key(1)] {
        let shared = store();
        shared.lock().broken = Some((key, 1));
        let verified = shared.verify().await.unwrap();
        assert_eq!(
            (verified.findings.len(), verified.chunks, verified.orphans),
            (0, 10, Orphans::default())
        );
    }
}

#[tokio::test]
async fn a_body_that_always_breaks_off_is_a_failure_of_the_store_and_no_finding() {
    let shared = store();
    shared.lock().broken = Some((FRAGMENT.to_owned(), u32::MAX));
    let failed = shared.verify().await.unwrap_err().to_string();
    assert!(
        failed.starts_with(&format!(
            "read {FRAGMENT}: the store broke off: reset; try again"
        )),
        "{failed}"
    );
}

#[tokio::test]
async fn a_listing_that_fails_for_a_while_is_made_again() {
    let shared = store();
    shared.lock().failing_lists = 1;
    assert_eq!(shared.verify().await.unwrap().chunks, 10);
}

#[tokio::test]
async fn a_root_that_is_replaced_while_roots_are_read_is_not_mistaken_for_an_older_one() {
    let shared = store();
    let replace = |store: &mut Store| {
        store.objects.remove(&root_key(1));
        store.objects.insert(root_key(2), root(10));
    };
    shared.lock().objects.insert(root_key(3), root(5));
    shared.lock().before_get = Some((root_key(1), Box::new(replace)));
    let verified = shared.verify().await.unwrap();
    assert_eq!(verified.roots[verified.chosen.unwrap()].uid, Uid(2));
    assert!(verified.findings.is_empty());
}

#[tokio::test]
async fn what_is_missing_is_noted_as_such_when_the_root_was_replaced_meanwhile() {
    let shared = store();
    let retain = |store: &mut Store| {
        store.objects.remove(&root_key(1));
        store.objects.remove(FRAGMENT);
    };
    shared.lock().before_get = Some((FRAGMENT.to_owned(), Box::new(retain)));
    let verified = shared.verify().await.unwrap();
    assert_eq!(verified.findings[0].kind, FindingKind::FragmentMissing);
    assert!(
        verified.notes[0].starts_with("the root was replaced while it was verified"),
        "{:?}",
        verified.notes
    );
}
