//! Fragments of real files, uploaded to real stores.

mod support;

use std::fs;
use std::sync::atomic::{AtomicU32, Ordering};

use stream_s3_core::error::TransferError;
use stream_s3_core::units::{Offset, Uid};
use stream_s3_runtime::buffers::BUFFER_SIZE;
use stream_s3_runtime::{Event, Fragment, Store};
use stream_s3_s3local::{Action, Fault, Operation, Options, S3Local};
use stream_s3_store::fs::FsStore;
use stream_s3_store::s3::{Credentials, S3Settings, S3Store};
use support::{Before, Log, flip, keys, object, store, upload};
use tempfile::TempDir;

fn folder() -> (TempDir, Store) {
    let dir = TempDir::new().expect("a folder");
    let objects = store(FsStore::open(dir.path()).expect("a store"));
    (dir, objects)
}

async fn s3() -> (TempDir, S3Local, Store) {
    let dir = TempDir::new().expect("a folder");
    let server = S3Local::start(Options::new(dir.path(), "bucket"))
        .await
        .expect("a server");
    let settings = S3Settings {
        bucket: "bucket".to_owned(),
        endpoint: Some(server.endpoint().to_owned()),
        credentials: Credentials::Static {
            access_key_id: "s3local".to_owned(),
            secret_key: "s3local-secret".to_owned(),
            session_token: None,
        },
        ..S3Settings::default()
    };
    let objects = store(S3Store::open(settings).expect("a store"));
    (dir, server, objects)
}

fn stored(end: &Event) -> Uid {
    match end {
        Event::Finished(Ok(uid)) => *uid,
        Event::Finished(Err(_)) | Event::Admitted | Event::Abandoned => {
            panic!("not stored: {end:?}")
        }
    }
}

fn failed(end: Event) -> TransferError {
    match &end {
        Event::Finished(Err(error)) => error.clone(),
        Event::Finished(Ok(_)) | Event::Admitted | Event::Abandoned => {
            panic!("not failed: {end:?}")
        }
    }
}

fn key(fragment: &Fragment, uid: Uid) -> String {
    format!(
        "rabbitmq/stream/{}/data/{:020}.{:08x}.fragment",
        support::STREAM,
        fragment.meta.first_offset.0,
        uid.0
    )
}

/// Longer than the buffers of a transfer together, over two segments, with chunks that cross the ends of buffers.
fn long_log() -> Log {
    let mut log = Log::new();
    for n in 0..40 {
        log.chunk(n + 1, BUFFER_SIZE / 7 + n as usize);
        if n == 25 {
            log.roll();
        }
    }
    log
}

async fn stores_byte_for_byte(store: &Store) {
    let log = long_log();
    let fragment = log.fragment();
    assert_eq!(fragment.meta.spans.len(), 2);
    let uid = stored(&upload(store, &fragment).await);
    assert_eq!(keys(store).await, [key(&fragment, uid)]);
    let (found, expected) = (
        object(store, &key(&fragment, uid)).await,
        log.object(&fragment.meta),
    );
    assert_eq!(found.len(), expected.len());
    assert!(found == expected, "bytes differ");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fragment_of_two_segments_is_stored_byte_for_byte_in_a_folder() {
    let (_dir, store) = folder();
    stores_byte_for_byte(&store).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fragment_of_two_segments_is_stored_byte_for_byte_in_s3() {
    let (_dir, _server, store) = s3().await;
    stores_byte_for_byte(&store).await;
}

/// Of short spans a store has many in hands before it goes on; a transfer whose buffers each held one of them never ended.
#[tokio::test(flavor = "multi_thread")]
async fn a_fragment_of_many_short_segments_is_stored_whole() {
    let mut log = Log::new();
    for n in 0..40 {
        log.chunk(3, 5_000 + 37 * n).chunk(1, 70_000).roll();
    }
    let fragment = log.fragment();
    assert_eq!(fragment.meta.spans.len(), 40);
    let ((_dir, folder), (_dir2, _server, bucket)) = (folder(), s3().await);
    for store in [folder, bucket] {
        let uid = stored(&upload(&store, &fragment).await);
        let found = object(&store, &key(&fragment, uid)).await;
        assert!(found == log.object(&fragment.meta), "bytes differ");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_attempt_has_a_key_of_its_own() {
    let (_dir, store) = folder();
    let mut log = Log::new();
    let fragment = log.chunk(1, 10).fragment();
    let (one, two) = (
        stored(&upload(&store, &fragment).await),
        stored(&upload(&store, &fragment).await),
    );
    assert_ne!(one, two);
    assert_eq!(keys(&store).await.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chunk_without_data_is_part_of_the_object() {
    let (_dir, store) = folder();
    let mut log = Log::new();
    let fragment = log.chunk(1, 0).chunk(2, 100).chunk(1, 0).fragment();
    let uid = stored(&upload(&store, &fragment).await);
    assert_eq!(
        object(&store, &key(&fragment, uid)).await,
        log.object(&fragment.meta)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_corrupt_chunk_is_named_and_nothing_is_stored() {
    let (_dir, store) = folder();
    let mut log = Log::new();
    let fragment = log.chunk(5, 100).chunk(5, 100).chunk(5, 100).fragment();
    // In the data of the second chunk.
    flip(&log.file(Offset(0)), log.chunks[1].position + 48 + 16 + 50);
    assert_eq!(
        failed(upload(&store, &fragment).await),
        TransferError::CorruptChunk(Offset(5))
    );
    assert_eq!(keys(&store).await, [] as [String; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_chunk_header_is_named_by_the_chunk_that_should_be_there() {
    let (_dir, store) = folder();
    let mut log = Log::new();
    let fragment = log.chunk(5, 100).chunk(5, 100).fragment();
    for in_header in [0, 1, 31, 36] {
        let at = log.chunks[1].position + in_header;
        flip(&log.file(Offset(0)), at);
        assert_eq!(
            failed(upload(&store, &fragment).await),
            TransferError::CorruptChunk(Offset(5)),
            "byte {in_header}"
        );
        flip(&log.file(Offset(0)), at);
    }
    stored(&upload(&store, &fragment).await);
}

/// Nothing but the second read can see it, and no store is asked to help.
#[tokio::test(flavor = "multi_thread")]
async fn a_bit_that_flips_after_the_first_read_is_found_and_the_chunk_named() {
    let mut log = Log::new();
    let fragment = log
        .chunk(5, 2 * BUFFER_SIZE)
        .chunk(5, 100)
        .chunk(5, 100)
        .fragment();
    let file = log.file(Offset(0));
    // Header, filter, data, trailer of the second chunk.
    for at in [20, 48, 48 + 16 + 3, 48 + 16 + 100 + 1] {
        let (_dir, inner) = {
            let dir = TempDir::new().expect("a folder");
            let inner = FsStore::open(dir.path()).expect("a store");
            (dir, inner)
        };
        let (flipped, at) = (file.clone(), log.chunks[1].position + at);
        let store = store(Before(inner, move || flip(&flipped, at)));
        assert_eq!(
            failed(upload(&store, &fragment).await),
            TransferError::CorruptChunk(Offset(5)),
            "byte {at}"
        );
        assert_eq!(keys(&store).await, [] as [String; 0]);
        flip(&file, at);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_segment_is_named() {
    let (_dir, store) = folder();
    let mut log = Log::new();
    log.chunk(5, 100).roll().chunk(5, 100);
    let fragment = log.fragment();
    let gone = log.file(Offset(5));
    fs::remove_file(&gone).expect("removed");
    let file = gone.to_string_lossy().into_owned();
    assert_eq!(
        failed(upload(&store, &fragment).await),
        TransferError::OpenFailed {
            file,
            posix: "enoent".to_owned()
        }
    );
    assert_eq!(keys(&store).await, [] as [String; 0]);
}

/// The open descriptor serves the second read.
#[tokio::test(flavor = "multi_thread")]
async fn a_segment_that_is_deleted_while_it_is_uploaded_is_uploaded() {
    let mut log = Log::new();
    let fragment = log.chunk(5, 100).fragment();
    let expected = log.object(&fragment.meta);
    let dir = TempDir::new().expect("a folder");
    let file = log.file(Offset(0));
    let store = store(Before(
        FsStore::open(dir.path()).expect("a store"),
        move || fs::remove_file(&file).expect("removed"),
    ));
    let uid = stored(&upload(&store, &fragment).await);
    assert_eq!(object(&store, &key(&fragment, uid)).await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_truncated_segment_names_the_chunk_that_is_not_whole() {
    let (_dir, store) = folder();
    let mut log = Log::new();
    let fragment = log.chunk(5, 100).chunk(5, 100).fragment();
    let file = fs::File::options()
        .write(true)
        .open(log.file(Offset(0)))
        .expect("a file");
    file.set_len(log.chunks[1].position + 60)
        .expect("truncated");
    assert_eq!(
        failed(upload(&store, &fragment).await),
        TransferError::CorruptChunk(Offset(5))
    );
    assert_eq!(keys(&store).await, [] as [String; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_segment_that_is_truncated_while_it_is_uploaded_aborts_the_put() {
    let mut log = Log::new();
    let fragment = log.chunk(5, 3 * BUFFER_SIZE).chunk(5, 100).fragment();
    let dir = TempDir::new().expect("a folder");
    let (path, len) = (log.file(Offset(0)), log.chunks[1].position + 60);
    let truncate = move || {
        fs::File::options()
            .write(true)
            .open(&path)
            .and_then(|file| file.set_len(len))
            .expect("truncated")
    };
    let store = store(Before(
        FsStore::open(dir.path()).expect("a store"),
        truncate,
    ));
    assert_eq!(
        failed(upload(&store, &fragment).await),
        TransferError::CorruptChunk(Offset(5))
    );
    assert_eq!(keys(&store).await, [] as [String; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn chunks_that_do_not_join_on_are_refused() {
    let (_dir, store) = folder();
    let mut log = Log::new();
    let mut fragment = log.chunk(5, 100).chunk(5, 100).fragment();
    fragment.meta.next_offset = Offset(11);
    assert_eq!(
        failed(upload(&store, &fragment).await),
        TransferError::CorruptChunk(Offset(10))
    );
    fragment.meta.next_offset = Offset(10);
    fragment.meta.first_offset = Offset(1);
    assert_eq!(
        failed(upload(&store, &fragment).await),
        TransferError::CorruptChunk(Offset(1))
    );
    assert_eq!(keys(&store).await, [] as [String; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_store_answers_is_the_reason() {
    let (_dir, server, store) = s3().await;
    let mut log = Log::new();
    let fragment = log.chunk(5, 3 * BUFFER_SIZE).fragment();
    let status = |status, code: &str| Action::Status {
        status,
        code: code.to_owned(),
    };
    for (action, expected) in [
        (status(500, "InternalError"), TransferError::Http(500)),
        (status(403, "AccessDenied"), TransferError::Http(403)),
        (status(503, "SlowDown"), TransferError::Throttled),
        (status(400, "RequestTimeout"), TransferError::Timeout),
        (Action::ResetBefore, TransferError::Connection),
        (
            Action::ResetBody {
                after_bytes: BUFFER_SIZE as u64 + 1,
            },
            TransferError::Connection,
        ),
        (Action::LostReply, TransferError::Connection),
        (Action::WrongChecksum, TransferError::ChecksumMismatch),
    ] {
        server
            .faults()
            .add(Fault::new(Operation::Put, action.clone()).times(1));
        assert_eq!(
            failed(upload(&store, &fragment).await),
            expected,
            "{action:?}"
        );
    }
    stored(&upload(&store, &fragment).await);
}

/// Nothing repeats a PUT but the caller, who has to give it a new key.
#[tokio::test(flavor = "multi_thread")]
async fn a_failed_put_is_not_repeated_behind_the_callers_back() {
    let dir = TempDir::new().expect("a folder");
    let puts = std::sync::Arc::new(AtomicU32::new(0));
    let counted = std::sync::Arc::clone(&puts);
    let mut log = Log::new();
    let fragment = log.chunk(5, 100).fragment();
    fs::write(dir.path().join("file"), b"").expect("a file");
    let inner = FsStore::open(dir.path().join("file")).expect("a store");
    let store = store(Before(inner, move || {
        counted.fetch_add(1, Ordering::Relaxed);
    }));
    failed(upload(&store, &fragment).await);
    assert_eq!(puts.load(Ordering::Relaxed), 1);
}
