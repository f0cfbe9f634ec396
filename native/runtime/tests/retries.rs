//! What the next attempt of an upload knows of the one before.

mod support;

use std::fs;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use stream_s3_core::error::TransferError;
use stream_s3_core::units::Offset;
use stream_s3_runtime::{Event, Fragment};
use stream_s3_store::fs::FsStore;
use stream_s3_store::s3::{Credentials, S3Settings, S3Store};
use stream_s3_store::{
    Body, Capabilities, Failure, Object, ObjectStore, Op, Page, Part, PutOptions, Result,
    StoreError, Stored,
};
use support::{Log, flip, governor, keys, object, store, upload_by};
use tempfile::TempDir;

/// A store that cannot be reached so many times.
struct Away<S>(Arc<AtomicUsize>, S);

#[async_trait]
impl<S: ObjectStore> ObjectStore for Away<S> {
    async fn put(&self, key: &str, body: Body, options: PutOptions) -> Result<Stored> {
        let left = |times: usize| times.checked_sub(1);
        if self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, left)
            .is_ok()
        {
            return Err(StoreError::new(Op::Put, Failure::Connection, "away"));
        }
        self.1.put(key, body, options).await
    }

    async fn get(&self, key: &str, part: Part) -> Result<Object> {
        self.1.get(key, part).await
    }

    async fn delete(&self, keys: &[String]) -> Result<Vec<(String, StoreError)>> {
        self.1.delete(keys).await
    }

    async fn list(&self, prefix: &str, from: Option<&str>, max: usize) -> Result<Page> {
        self.1.list(prefix, from, max).await
    }

    async fn probe(&self, prefix: &str) -> Result<Capabilities> {
        self.1.probe(prefix).await
    }
}

fn log() -> (Log, Fragment) {
    let mut log = Log::new();
    let fragment = log.chunk(5, 20_000).chunk(5, 100).fragment();
    (log, fragment)
}

const LOST: Event = Event::Finished(Err(TransferError::Connection));

/// Without its files an attempt that reads anything fails with `OpenFailed`.
#[tokio::test(flavor = "multi_thread")]
async fn the_next_attempt_reads_nothing_before_a_store_that_refuses_connections_takes_a_byte() {
    let (log, fragment) = log();
    let refuses = TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .expect("a port that nobody listens on");
    let settings = S3Settings {
        bucket: "bucket".to_owned(),
        endpoint: Some(format!("http://{refuses}")),
        credentials: Credentials::Static {
            access_key_id: "id".to_owned(),
            secret_key: "secret".to_owned(),
            session_token: None,
        },
        ..S3Settings::default()
    };
    let store = store(S3Store::open(settings).expect("a store"));
    let governor = governor(1);
    assert_eq!(upload_by(&governor, &store, &fragment).await, LOST);
    fs::remove_file(log.file(Offset(0))).expect("a file");
    for _ in 0..2 {
        assert_eq!(upload_by(&governor, &store, &fragment).await, LOST);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_stored_after_failures_is_what_the_first_attempt_would_have_stored() {
    let (log, fragment) = log();
    for verifies in [true, false] {
        let dir = TempDir::new().expect("a folder");
        let away = Arc::new(AtomicUsize::new(3));
        let store = store(Away(
            Arc::clone(&away),
            FsStore::open(dir.path()).expect("a store"),
        ));
        if verifies {
            away.store(0, Ordering::Relaxed);
            store.probe().await.expect("a store that works");
            away.store(3, Ordering::Relaxed);
        }
        let governor = governor(1);
        for _ in 0..3 {
            assert_eq!(upload_by(&governor, &store, &fragment).await, LOST);
        }
        let Event::Finished(Ok(_)) = upload_by(&governor, &store, &fragment).await else {
            panic!("not stored, verifies: {verifies}");
        };
        let found = object(&store, &keys(&store).await[0]).await;
        assert!(found == log.object(&fragment.meta), "verifies: {verifies}");
    }
}

/// A byte of a header that no CRC of osiris covers: only the memory of the first attempt tells that it has changed.
#[tokio::test(flavor = "multi_thread")]
async fn other_bytes_than_those_of_the_first_attempt_are_not_stored() {
    let (log, fragment) = log();
    let dir = TempDir::new().expect("a folder");
    let away = Arc::new(AtomicUsize::new(1));
    let store = store(Away(
        Arc::clone(&away),
        FsStore::open(dir.path()).expect("a store"),
    ));
    let governor = governor(1);
    assert_eq!(upload_by(&governor, &store, &fragment).await, LOST);
    let epoch = log.chunks[1].position + 20;
    flip(&log.file(Offset(0)), epoch);
    assert_eq!(
        upload_by(&governor, &store, &fragment).await,
        Event::Finished(Err(TransferError::ChecksumMismatch))
    );
    assert_eq!(keys(&store).await, Vec::<String>::new());
}
