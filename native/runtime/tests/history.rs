//! Objects of history segments in a store that gives no entity tags, and on which threads they are decoded.

mod support;

use std::pin::pin;
use std::sync::{Arc, Mutex, mpsc};

use async_trait::async_trait;
use bytes::Bytes;
use futures::poll;
use stream_s3_core::history::encode;
use stream_s3_core::key::{Prefix, RunId};
use stream_s3_runtime::{Executor, HistoryObject, HistoryPut, Store};
use stream_s3_store::fs::FsStore;
use stream_s3_store::{
    Body, Capabilities, ErrorKind, Object, ObjectStore, Page, Part, PutOptions, Result, StoreError,
    Stored,
};
use support::keys;
use tempfile::TempDir;

/// More than there are reader threads.
const READERS: usize = 16;

/// A store that says nothing of entity tags, and whose answers are whole at once where they are in memory.
struct Untagged<S> {
    store: S,
    in_memory: Option<Bytes>,
}

#[async_trait]
impl<S: ObjectStore> ObjectStore for Untagged<S> {
    async fn put(&self, key: &str, body: Body, options: PutOptions) -> Result<Stored> {
        self.store.put(key, body, options).await?;
        Ok(Stored { etag: None })
    }

    async fn get(&self, key: &str, part: Part) -> Result<Object> {
        if let Some(bytes) = self.in_memory.clone() {
            return Ok(Object {
                size: bytes.len() as u64,
                etag: None,
                body: Box::pin(futures::stream::iter([Ok(bytes)])),
            });
        }
        let object = self.store.get(key, part).await?;
        Ok(Object {
            etag: None,
            ..object
        })
    }

    async fn delete(&self, keys: &[String]) -> Result<Vec<(String, StoreError)>> {
        self.store.delete(keys).await
    }

    async fn list(&self, prefix: &str, from: Option<&str>, max: usize) -> Result<Page> {
        self.store.list(prefix, from, max).await
    }

    async fn probe(&self, prefix: &str) -> Result<Capabilities> {
        self.store.probe(prefix).await
    }
}

fn run() -> RunId {
    RunId::parse("run.1").expect("a run id")
}

fn untagged(dir: &TempDir, in_memory: Option<Bytes>) -> Store {
    let store = FsStore::open(dir.path()).expect("a folder");
    Store::over(
        Arc::new(Untagged { store, in_memory }),
        Prefix::parse("p").expect("a prefix"),
    )
}

#[tokio::test]
async fn what_is_not_the_segment_and_has_no_entity_tag_is_left_alone() {
    let (dir, run) = (TempDir::new().expect("a folder"), run());
    let store = untagged(&dir, None);
    let executor = Executor::current().expect("threads");
    let put = |bytes: &'static [u8]| {
        store.put_history(&executor, &run, 1, Bytes::from_static(bytes), None)
    };
    let stored = put(b"other").await.expect("stored");
    assert!(matches!(stored, HistoryPut::Stored { .. }));
    let HistoryPut::Exists { crc, payload_len } = put(b"mine!").await.expect("answered") else {
        panic!("nothing was there");
    };
    let error = store
        .examine_history(&executor, &run, 1, crc, payload_len)
        .await
        .expect_err("nothing to hold on to");
    // Permanent: it waits for somebody who mends it.
    assert_eq!(error.kind, ErrorKind::Invalid);
    assert!(error.message.contains("without an entity tag"), "{error}");
    let kept = store.get_history(&executor, &run, 1).await;
    assert_eq!(kept.expect("still there"), b"other".as_slice());
    assert_eq!(keys(&store).await.len(), 1);
}

#[tokio::test]
async fn what_is_the_segment_needs_no_entity_tag() {
    let (dir, run) = (TempDir::new().expect("a folder"), run());
    let store = untagged(&dir, None);
    let executor = Executor::current().expect("threads");
    let payload = Bytes::from_static(b"rows");
    let put = || store.put_history(&executor, &run, 1, payload.clone(), None);
    let HistoryPut::Stored { size, .. } = put().await.expect("stored") else {
        panic!("something was there");
    };
    let HistoryPut::Exists { crc, payload_len } = put().await.expect("answered") else {
        panic!("it is gone");
    };
    let found = store
        .examine_history(&executor, &run, 1, crc, payload_len)
        .await;
    assert_eq!(found.expect("answered"), HistoryObject::Same { size });
}

/// The answer is there in full when it is asked for, so all that is left to wait for is the decoding: as long as every reader thread is busy, it does
/// not happen on this one, which is tokio's.
#[tokio::test]
async fn an_object_is_decoded_by_a_reader_thread() {
    let (dir, run) = (TempDir::new().expect("a folder"), run());
    let payload = vec![7u8; 1 << 20];
    let object = Bytes::from(encode(&run, 1, &payload));
    let size = object.len() as u64;
    let store = untagged(&dir, Some(object));
    let executor = Executor::current().expect("threads");
    let (release, blocked) = mpsc::channel::<()>();
    let blocked = Arc::new(Mutex::new(blocked));
    let mut busy = Vec::new();
    for _ in 0..READERS {
        let blocked = Arc::clone(&blocked);
        let mut job = Box::pin(executor.read(move || {
            blocked
                .lock()
                .map(|channel| channel.recv().is_err())
                .is_ok()
        }));
        // In the queue now, and first come is first served.
        assert!(poll!(job.as_mut()).is_pending());
        busy.push(job);
    }
    let examined = store.examine_history(
        &executor,
        &run,
        1,
        crc32fast::hash(&payload),
        payload.len() as u64,
    );
    let mut examined = pin!(examined);
    assert!(poll!(examined.as_mut()).is_pending());
    let read = store.get_history(&executor, &run, 1);
    let mut read = pin!(read);
    assert!(poll!(read.as_mut()).is_pending());
    drop(release);
    for job in busy {
        job.await.expect("no panic");
    }
    assert_eq!(
        examined.await.expect("answered"),
        HistoryObject::Same { size }
    );
    assert_eq!(read.await.expect("answered"), payload);
}
