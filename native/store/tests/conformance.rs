//! The same functions against every store: what the trait promises.

mod support;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use futures::StreamExt;
use stream_s3_store::{
    Body, ErrorKind, Failure, FsStore, ObjectStore, Part, Precondition, PutOptions, S3Store,
};
use support::*;
use tempfile::TempDir;

/// Makes a test of each function for one store. `$place` opens one that is empty, with whatever must outlive it.
macro_rules! against {
    ($module:ident, $place:path, $($name:ident),* $(,)?) => {
        mod $module {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                let Some((store, _kept)) = $place().await else {
                    return;
                };
                super::$name(store).await;
            })*
        }
    };
}

/// For every store that verifies checksums and decides rival conditional writes.
macro_rules! conformance {
    ($module:ident, $place:path) => {
        against![
            $module,
            $place,
            objects_of_all_sizes_come_back_as_they_went,
            a_streamed_body_is_stored_as_one_in_memory,
            an_overwritten_object_has_another_tag,
            create_only_fails_where_something_is,
            a_replacement_needs_the_tag_of_what_it_replaces,
            only_one_of_many_rival_creations_wins,
            only_one_of_many_rival_replacements_wins,
            parts_are_cut_off_at_the_end_of_the_object,
            a_part_without_a_byte_is_refused,
            a_missing_object_is_not_found,
            pages_are_ascending_and_complete,
            a_prefix_is_taken_to_the_letter,
            odd_keys_are_keys,
            deleting_what_is_not_there_succeeds,
            more_keys_than_a_batch_holds_are_deleted,
            wrong_bytes_are_refused_and_not_stored,
            a_body_that_fails_is_not_stored_and_says_why,
            a_body_of_another_length_is_not_stored,
            a_dropped_put_is_not_stored,
            a_probe_leaves_nothing_behind,
            probes_at_once_find_out_the_same,
        ];
    };
}

conformance!(fs, super::folder);
conformance!(s3, super::s3local);
conformance!(tls, super::s3local_with_tls);

// It has no checksums, and decides nothing between rivals: what it looks at may have changed when it acts.
against![
    moto,
    super::support::moto::bucket,
    objects_of_all_sizes_come_back_as_they_went,
    a_streamed_body_is_stored_as_one_in_memory,
    an_overwritten_object_has_another_tag,
    create_only_fails_where_something_is,
    a_replacement_needs_the_tag_of_what_it_replaces,
    parts_are_cut_off_at_the_end_of_the_object,
    a_part_without_a_byte_is_refused,
    a_missing_object_is_not_found,
    pages_are_ascending_and_complete,
    a_prefix_is_taken_to_the_letter,
    odd_keys_are_keys,
    deleting_what_is_not_there_succeeds,
    more_keys_than_a_batch_holds_are_deleted,
    a_body_that_fails_is_not_stored_and_says_why,
    a_body_of_another_length_is_not_stored,
    a_dropped_put_is_not_stored,
    a_store_without_checksums_is_known_as_one,
];

/// Nothing here holds an object of this size in memory.
macro_rules! deep {
    ($module:ident, $place:path, $($mebibytes:literal),*) => {
        mod $module {
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            #[ignore = "writes and reads a gigabyte"]
            async fn large_objects_flow_through_little_memory() {
                for mebibytes in [$($mebibytes),*] {
                    let Some((store, _kept)) = $place().await else {
                        return;
                    };
                    super::a_large_object_comes_back_as_it_went(store, mebibytes << 20).await;
                }
            }
        }
    };
}

deep!(deep_fs, super::folder, 64, 1024);
deep!(deep_s3, super::s3local, 64, 1024);
deep!(deep_tls, super::s3local_with_tls, 64, 1024);
// moto itself keeps whole bodies in memory.
deep!(deep_moto, super::support::moto::bucket, 64);

type Kept = Box<dyn std::any::Any + Send>;

async fn folder() -> Option<(Store, Kept)> {
    let dir = TempDir::new().expect("a folder");
    let store = FsStore::open(dir.path()).expect("a store");
    Some((Arc::new(store), Box::new(dir)))
}

async fn s3local() -> Option<(Store, Kept)> {
    let server = Server::start().await;
    Some((Arc::new(server.store()), Box::new(server)))
}

async fn s3local_with_tls() -> Option<(Store, Kept)> {
    let (server, settings) = Server::with_tls().await;
    let store = S3Store::open(settings).expect("a store");
    Some((Arc::new(store), Box::new(server)))
}

type Store = Arc<dyn ObjectStore>;

async fn objects_of_all_sizes_come_back_as_they_went(store: Store) {
    let large = if cfg!(debug_assertions) { 9 } else { 64 };
    for size in [0, 1, 65_535, 65_536, 65_537, 5 << 20, (large << 20) + 1] {
        let content = bytes(size);
        let key = format!("sizes/{size}");
        let stored = store
            .put(&key, Body::Bytes(content.clone()), with_crc(&content))
            .await
            .expect("stored");
        let object = store.get(&key, Part::Whole).await.expect("found");
        assert_eq!(object.size, size as u64);
        assert!(object.etag.is_some());
        assert_eq!(object.etag, stored.etag);
        assert!(
            collect(object.body).await.expect("whole") == content,
            "{size}"
        );
    }
}

async fn a_streamed_body_is_stored_as_one_in_memory(store: Store) {
    for (size, piece) in [(0, 1), (1, 1), (100_000, 7_001), (3 << 20, 256 << 10)] {
        let content = bytes(size);
        store
            .put("streamed", stream(&content, piece), with_crc(&content))
            .await
            .expect("stored");
        assert!(
            read(&*store, "streamed", Part::Whole).await.expect("found") == content,
            "{size}"
        );
    }
}

async fn an_overwritten_object_has_another_tag(store: Store) {
    let mut seen = Vec::new();
    for content in ["one", "two", "six", "ten"] {
        let body = Body::Bytes(Bytes::from_static(content.as_bytes()));
        let etag = store
            .put("k", body, PutOptions::default())
            .await
            .expect("stored")
            .etag
            .expect("a tag");
        assert!(!seen.contains(&etag));
        seen.push(etag);
        assert_eq!(
            read(&*store, "k", Part::Whole).await.expect("found"),
            content
        );
    }
}

async fn create_only_fails_where_something_is(store: Store) {
    let create = |content: &'static str| {
        store.put(
            "a/b",
            Body::Bytes(Bytes::from_static(content.as_bytes())),
            on(Precondition::Absent),
        )
    };
    create("first").await.expect("created");
    let refused = create("second").await.expect_err("taken");
    assert_eq!(
        (refused.kind, &refused.failure),
        (ErrorKind::Conflict, &Failure::Http(412))
    );
    assert_eq!(
        read(&*store, "a/b", Part::Whole).await.expect("found"),
        "first"
    );
    assert!(
        store
            .delete(&["a/b".to_owned()])
            .await
            .expect("deleted")
            .is_empty()
    );
    create("third").await.expect("created again");
}

async fn a_replacement_needs_the_tag_of_what_it_replaces(store: Store) {
    let replace = |etag: &str| {
        store.put(
            "k",
            Body::Bytes(Bytes::from_static(b"new")),
            on(Precondition::Matches(etag.to_owned())),
        )
    };
    let refused = replace("\"0123456789abcdef\"")
        .await
        .expect_err("nothing is there");
    assert_eq!(refused.kind, ErrorKind::Conflict);
    let first = store
        .put(
            "k",
            Body::Bytes(Bytes::from_static(b"old")),
            PutOptions::default(),
        )
        .await
        .expect("stored");
    let first = first.etag.expect("a tag");
    let second = replace(&first)
        .await
        .expect("replaced")
        .etag
        .expect("a tag");
    let refused = replace(&first).await.expect_err("no longer there");
    assert_eq!(refused.kind, ErrorKind::Conflict);
    replace(&second).await.expect("replaced again");
}

async fn only_one_of_many_rival_creations_wins(store: Store) {
    let mut rivals = Vec::new();
    for rival in 0..12 {
        let store = Arc::clone(&store);
        rivals.push(tokio::spawn(async move {
            let content = Bytes::from(vec![rival; 10_000]);
            let created = store
                .put(
                    "deep/er/key",
                    Body::Bytes(content),
                    on(Precondition::Absent),
                )
                .await;
            created.map(|_| rival)
        }));
    }
    let mut winners = Vec::new();
    for rival in rivals {
        match rival.await.expect("no panic") {
            Ok(rival) => winners.push(rival),
            Err(error) => assert_eq!(error.kind, ErrorKind::Conflict, "{error}"),
        }
    }
    assert_eq!(winners.len(), 1);
    assert_eq!(
        read(&*store, "deep/er/key", Part::Whole)
            .await
            .expect("found"),
        vec![winners[0]; 10_000]
    );
}

async fn only_one_of_many_rival_replacements_wins(store: Store) {
    let first = store
        .put(
            "k",
            Body::Bytes(Bytes::from_static(b"old")),
            PutOptions::default(),
        )
        .await
        .expect("stored");
    let etag = first.etag.expect("a tag");
    let mut rivals = Vec::new();
    for rival in 0..12 {
        let (store, etag) = (Arc::clone(&store), etag.clone());
        rivals.push(tokio::spawn(async move {
            let content = Bytes::from(vec![rival; 1000]);
            store
                .put("k", Body::Bytes(content), on(Precondition::Matches(etag)))
                .await
                .is_ok()
        }));
    }
    let mut winners = 0;
    for rival in rivals {
        winners += usize::from(rival.await.expect("no panic"));
    }
    assert_eq!(winners, 1);
}

async fn parts_are_cut_off_at_the_end_of_the_object(store: Store) {
    put(&*store, "k", "0123456789").await;
    let part = |part| {
        let store = Arc::clone(&store);
        async move {
            let object = store.get("k", part).await.expect("found");
            assert_eq!(object.size, 10);
            collect(object.body).await.expect("whole")
        }
    };
    assert_eq!(part(Part::Range(0..1)).await, "0");
    assert_eq!(part(Part::Range(3..7)).await, "3456");
    assert_eq!(part(Part::Range(0..10)).await, "0123456789");
    assert_eq!(part(Part::Range(8..1000)).await, "89");
    assert_eq!(part(Part::Last(3)).await, "789");
    assert_eq!(part(Part::Last(10)).await, "0123456789");
    assert_eq!(part(Part::Last(1000)).await, "0123456789");
    let content = bytes(1 << 20);
    store
        .put("large", Body::Bytes(content.clone()), PutOptions::default())
        .await
        .expect("stored");
    let middle = read(&*store, "large", Part::Range(300_000..900_001))
        .await
        .expect("found");
    assert!(middle == content.slice(300_000..900_001));
}

async fn a_part_without_a_byte_is_refused(store: Store) {
    put(&*store, "k", "0123456789").await;
    put(&*store, "empty", "").await;
    for (key, part) in [
        ("k", Part::Range(10..11)),
        ("k", Part::Range(5..5)),
        ("k", Part::Last(0)),
        ("empty", Part::Range(0..1)),
        ("empty", Part::Last(1)),
    ] {
        let refused = read(&*store, key, part.clone()).await.expect_err("no byte");
        assert_eq!(
            (refused.kind, &refused.failure),
            (ErrorKind::Invalid, &Failure::Http(416)),
            "{key} {part:?}"
        );
    }
}

async fn a_missing_object_is_not_found(store: Store) {
    put(&*store, "folder/k", "").await;
    for key in ["k", "folder", "folder/k/l", "folder/l"] {
        let missing = read(&*store, key, Part::Whole).await.expect_err("missing");
        assert_eq!(
            (missing.kind, &missing.failure),
            (ErrorKind::NotFound, &Failure::Http(404)),
            "{key}"
        );
    }
}

async fn pages_are_ascending_and_complete(store: Store) {
    // Slashes sort after dots and hyphens and before digits and letters.
    let mut all: Vec<String> = [
        "p/a", "p/a.b", "p/a-b/c", "p/a0", "p/b/c/d", "p/b/c.d", "p/b.c", "p/B", "p/b0/x", "p/~",
        "p/é", "p/bb",
    ]
    .map(str::to_owned)
    .to_vec();
    all.extend((0..30).map(|number| format!("p/many/{number:03}")));
    for key in &all {
        put(&*store, key, key).await;
    }
    all.sort_unstable();
    for page in [1, 2, 5, 7, 1000] {
        assert_eq!(keys(&*store, "p/", page).await, all, "pages of {page}");
    }
    let page = store.list("p/many/", None, 2).await.expect("a page");
    assert_eq!(page.objects[0].size, "p/many/000".len() as u64);
    assert!(page.objects[0].modified_ms.expect("a time") > 1_600_000_000_000);
}

async fn a_prefix_is_taken_to_the_letter(store: Store) {
    for key in ["s/a/1", "s/ab/1", "s/a", "t", "sa"] {
        if key != "s/a" {
            put(&*store, key, "").await;
        }
    }
    assert_eq!(keys(&*store, "s/a/", 10).await, ["s/a/1"]);
    assert_eq!(keys(&*store, "s/a", 10).await, ["s/a/1", "s/ab/1"]);
    assert_eq!(keys(&*store, "s", 10).await, ["s/a/1", "s/ab/1", "sa"]);
    assert_eq!(keys(&*store, "", 10).await, ["s/a/1", "s/ab/1", "sa", "t"]);
    assert!(keys(&*store, "s/a/1/", 10).await.is_empty());
    assert!(keys(&*store, "../", 10).await.is_empty());
    assert!(keys(&*store, "nothing", 10).await.is_empty());
}

async fn odd_keys_are_keys(store: Store) {
    let mut odd = [
        "a b",
        "a+b",
        "a%2Fb",
        "a&b<c>\"'",
        "a=b;c",
        "ü/ö",
        "x/.hidden",
        "x/..y",
        "(a)*",
        "a?b#c",
        "@:,",
        "tab\tand\u{1}control",
    ]
    .map(|key| format!("odd/{key}"))
    .to_vec();
    odd.push(format!("odd/{}", "n".repeat(250)));
    odd.sort_unstable();
    for key in &odd {
        put(&*store, key, key).await;
        assert_eq!(read(&*store, key, Part::Whole).await.expect("found"), *key);
    }
    assert_eq!(keys(&*store, "odd/", 3).await, odd);
    assert!(store.delete(&odd).await.expect("deleted").is_empty());
    assert!(keys(&*store, "", 10).await.is_empty());
}

async fn deleting_what_is_not_there_succeeds(store: Store) {
    put(&*store, "a/b/c", "").await;
    let names = ["a/b/c", "a/b", "nothing", "a/b/c/d"].map(str::to_owned);
    assert!(store.delete(&names).await.expect("deleted").is_empty());
    assert!(store.delete(&[]).await.expect("deleted").is_empty());
    assert!(keys(&*store, "", 10).await.is_empty());
}

async fn more_keys_than_a_batch_holds_are_deleted(store: Store) {
    let mut names: Vec<String> = (0..2300).map(|number| format!("gone/{number}")).collect();
    for key in names.iter().step_by(50) {
        put(&*store, key, "").await;
    }
    put(&*store, "kept", "").await;
    names.push("gone/0".to_owned());
    assert!(store.delete(&names).await.expect("deleted").is_empty());
    assert_eq!(keys(&*store, "", 10).await, ["kept"]);
}

async fn wrong_bytes_are_refused_and_not_stored(store: Store) {
    let content = bytes(200_000);
    let mut flipped = content.to_vec();
    flipped[123_456] ^= 4;
    let flipped = Bytes::from(flipped);
    let bodies = [Body::Bytes(flipped.clone()), stream(&flipped, 10_000)];
    for body in bodies {
        let refused = store
            .put("k", body, with_crc(&content))
            .await
            .expect_err("refused");
        assert_eq!(
            (refused.kind, &refused.failure),
            (ErrorKind::Corrupt, &Failure::ChecksumMismatch),
            "{refused}"
        );
        assert!(keys(&*store, "", 10).await.is_empty());
    }
    put(&*store, "k", "before").await;
    store
        .put("k", Body::Bytes(flipped), with_crc(&content))
        .await
        .expect_err("refused");
    assert_eq!(
        read(&*store, "k", Part::Whole).await.expect("found"),
        "before"
    );
}

async fn a_body_that_fails_is_not_stored_and_says_why(store: Store) {
    let pieces = (0..40).map(|number| match number {
        39 => Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "the segment was truncated",
        )),
        _ => Ok(bytes(100_000)),
    });
    let body = Body::Stream {
        len: 4_000_000,
        stream: Box::pin(futures::stream::iter(pieces)),
    };
    let failed = store
        .put("k", body, PutOptions::default())
        .await
        .expect_err("failed");
    assert_eq!(failed.failure, Failure::Body, "{failed}");
    let source = failed
        .source
        .expect("a source")
        .downcast::<io::Error>()
        .expect("that of the body");
    assert_eq!(
        (source.kind(), source.to_string().as_str()),
        (io::ErrorKind::UnexpectedEof, "the segment was truncated")
    );
    assert!(keys(&*store, "", 10).await.is_empty());
}

async fn a_body_of_another_length_is_not_stored(store: Store) {
    for len in [99_999, 100_001] {
        let pieces = [Ok(bytes(50_000)), Ok(bytes(50_000))];
        let body = Body::Stream {
            len,
            stream: Box::pin(futures::stream::iter(pieces)),
        };
        let failed = store
            .put("k", body, PutOptions::default())
            .await
            .expect_err("failed");
        assert_eq!(
            (failed.kind, &failed.failure),
            (ErrorKind::Invalid, &Failure::Body),
            "{len}: {failed}"
        );
        assert!(keys(&*store, "", 10).await.is_empty());
    }
}

async fn a_dropped_put_is_not_stored(store: Store) {
    let (sent, started) = tokio::sync::oneshot::channel();
    let first = futures::stream::once(async move {
        sent.send(()).expect("somebody waits");
        Ok(bytes(1000))
    });
    let never = futures::stream::once(std::future::pending());
    let body = Body::Stream {
        len: 2000,
        stream: Box::pin(first.chain(never)),
    };
    let put = {
        let store = Arc::clone(&store);
        tokio::spawn(async move { store.put("k", body, PutOptions::default()).await })
    };
    started.await.expect("the body is asked for");
    put.abort();
    assert!(put.await.expect_err("aborted").is_cancelled());
    assert!(keys(&*store, "", 10).await.is_empty());
    // The store goes on as before.
    put_again(&*store).await;
}

async fn put_again(store: &dyn ObjectStore) {
    put(store, "again", "x").await;
    assert_eq!(read(store, "again", Part::Whole).await.expect("found"), "x");
}

async fn a_probe_leaves_nothing_behind(store: Store) {
    for prefix in ["rabbitmq", "rabbitmq/", ""] {
        let found = store.probe(prefix).await.expect("usable");
        assert!(
            found.conditional_writes && found.verifies_checksums,
            "{found:?}"
        );
    }
    assert!(keys(&*store, "", 10).await.is_empty());
}

/// They use the same objects, and one that deletes them must not be in another's way.
async fn probes_at_once_find_out_the_same(store: Store) {
    let probes = (0..16).map(|_| store.probe("rabbitmq"));
    for found in futures::future::join_all(probes).await {
        let found = found.expect("usable");
        assert!(
            found.conditional_writes && found.verifies_checksums,
            "{found:?}"
        );
    }
    assert!(keys(&*store, "", 10).await.is_empty());
}

async fn a_store_without_checksums_is_known_as_one(store: Store) {
    let found = store.probe("rabbitmq").await.expect("usable");
    assert!(
        found.conditional_writes && !found.verifies_checksums,
        "{found:?}"
    );
    assert!(keys(&*store, "", 10).await.is_empty());
}

/// The piece number `number` of a body that is made up while it is sent.
fn piece(number: usize) -> Bytes {
    let mut piece = bytes(PIECE).to_vec();
    piece[..8].copy_from_slice(&number.to_be_bytes());
    piece.into()
}

const PIECE: usize = 1 << 18;
/// How much larger this program may become meanwhile; other tests run beside this one.
const LITTLE: u64 = 300 << 20;

async fn a_large_object_comes_back_as_it_went(store: Store, size: usize) {
    let pieces = size / PIECE;
    let mut crc = crc32fast::Hasher::new();
    for number in 0..pieces {
        crc.update(&piece(number));
    }
    let crc32 = crc.finalize();
    let before = resident();
    let largest = Arc::new(AtomicU64::new(0));
    let seen = Arc::clone(&largest);
    let stream = futures::stream::iter(0..pieces).map(move |number| {
        if number % 64 == 0 {
            seen.fetch_max(resident(), Ordering::Relaxed);
        }
        Ok(piece(number))
    });
    let body = Body::Stream {
        len: size as u64,
        stream: Box::pin(stream),
    };
    let options = PutOptions {
        crc32: Some(crc32),
        precondition: Precondition::Absent,
    };
    store.put("large", body, options).await.expect("stored");
    let object = store.get("large", Part::Whole).await.expect("found");
    assert_eq!(object.size, size as u64);
    let mut body = object.body;
    let mut crc = crc32fast::Hasher::new();
    let mut read = 0;
    while let Some(bytes) = body.next().await {
        let bytes = bytes.expect("whole");
        crc.update(&bytes);
        read += bytes.len();
        largest.fetch_max(resident(), Ordering::Relaxed);
    }
    assert_eq!((read, crc.finalize()), (size, crc32));
    let last = read_part(&store, size).await;
    assert!(last == piece(pieces - 1));
    let grown = largest.load(Ordering::Relaxed).saturating_sub(before);
    assert!(grown < LITTLE, "{grown} bytes more for {size}");
    assert!(
        store
            .delete(&["large".to_owned()])
            .await
            .expect("deleted")
            .is_empty()
    );
}

async fn read_part(store: &Store, size: usize) -> Bytes {
    let part = Part::Range((size - PIECE) as u64..size as u64);
    read(&**store, "large", part).await.expect("found")
}

/// Bytes of this program in memory.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages: u64 = status
        .split(' ')
        .nth(1)
        .and_then(|pages| pages.parse().ok())
        .expect("a number");
    pages * 4096
}

#[tokio::test]
async fn a_folder_store_refuses_keys_that_are_no_paths() {
    let dir = TempDir::new().expect("a folder");
    let store = FsStore::open(dir.path()).expect("a store");
    let long = "n".repeat(256);
    for key in [
        "",
        "/a",
        "a/",
        "a//b",
        "../a",
        "a/../b",
        ".",
        "a/./b",
        "a\0b",
        ".stream_s3/lock",
        ".stream_s3",
        &long,
    ] {
        let refused = store
            .put(key, Body::Bytes(Bytes::new()), PutOptions::default())
            .await
            .expect_err("refused");
        assert_eq!(refused.kind, ErrorKind::Invalid, "{key:?}: {refused}");
    }
}

#[tokio::test]
async fn a_folder_store_leaves_no_folders_and_no_scratch_files() {
    let dir = TempDir::new().expect("a folder");
    let store = FsStore::open(dir.path()).expect("a store");
    put(&store, "a/b/c", "x").await;
    put(&store, "a/d", "x").await;
    store.delete(&["a/b/c".to_owned()]).await.expect("deleted");
    assert!(!dir.path().join("a/b").exists());
    assert!(dir.path().join("a/d").exists());
    let scratch: Vec<_> = std::fs::read_dir(dir.path().join(".stream_s3"))
        .expect("scratch")
        .collect();
    assert_eq!(scratch.len(), 1, "only the lock: {scratch:?}");
}

#[tokio::test]
async fn a_folder_store_makes_its_folder_but_not_the_one_above() {
    let dir = TempDir::new().expect("a folder");
    let store = FsStore::open(dir.path().join("new")).expect("a store");
    put(&store, "k", "x").await;
    let store = FsStore::open(dir.path().join("lost/mount")).expect("a store");
    let missing = store.probe("p").await.expect_err("missing");
    assert!(
        matches!(&missing.failure, Failure::File(_, posix) if posix == "enoent"),
        "{missing}"
    );
    assert!(missing.message.contains("lost/mount"), "{missing}");
    assert!(matches!(
        FsStore::open("relative").expect_err("relative").failure,
        Failure::Setting("fs_dir")
    ));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_folder_store_stores_while_folders_vanish() {
    let dir = TempDir::new().expect("a folder");
    let store: Store = Arc::new(FsStore::open(dir.path()).expect("a store"));
    let mut tasks = Vec::new();
    for task in 0..4 {
        let store = Arc::clone(&store);
        tasks.push(tokio::spawn(async move {
            for _ in 0..40 {
                let key = format!("deep/down/here/{task}");
                put(&*store, &key, "x").await;
                assert_eq!(read(&*store, &key, Part::Whole).await.expect("found"), "x");
                assert!(store.delete(&[key]).await.expect("deleted").is_empty());
            }
        }));
    }
    for task in tasks {
        task.await.expect("no error");
    }
    assert!(!dir.path().join("deep").exists());
}
