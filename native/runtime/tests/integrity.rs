//! Bits that flip on the way from osiris' writer to the store, wherever and whenever they do.

mod support;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use stream_s3_core::error::TransferError;
use stream_s3_core::units::Offset;
use stream_s3_runtime::buffers::BUFFER_SIZE;
use stream_s3_runtime::{Event, Fragment, Store};
use stream_s3_s3local::{Action, Fault, Operation, Options, S3Local};
use stream_s3_store::fs::FsStore;
use stream_s3_store::s3::{Credentials, S3Settings, S3Store};
use stream_s3_store::{
    Body, Capabilities, Object, ObjectStore, Page, Part, PutOptions, Result, StoreError, Stored,
};
use support::{Before, Log, flip, keys, object, store, upload};
use tempfile::TempDir;

/// A store that takes whatever comes, as those do that know no checksums.
struct Blind<S>(S);

#[async_trait]
impl<S: ObjectStore> ObjectStore for Blind<S> {
    async fn put(&self, key: &str, body: Body, options: PutOptions) -> Result<Stored> {
        let options = PutOptions {
            crc32: None,
            ..options
        };
        self.0.put(key, body, options).await
    }

    async fn get(&self, key: &str, part: Part) -> Result<Object> {
        self.0.get(key, part).await
    }

    async fn delete(&self, keys: &[String]) -> Result<Vec<(String, StoreError)>> {
        self.0.delete(keys).await
    }

    async fn list(&self, prefix: &str, from: Option<&str>, max: usize) -> Result<Page> {
        self.0.list(prefix, from, max).await
    }

    async fn probe(&self, prefix: &str) -> Result<Capabilities> {
        let found = self.0.probe(prefix).await?;
        Ok(Capabilities {
            verifies_checksums: false,
            ..found
        })
    }
}

/// What every test here is tried with.
struct Place {
    name: &'static str,
    store: Store,
    /// Flip the bit with the next PUT, after the plan and before the body.
    armed: Arc<AtomicBool>,
    _dir: TempDir,
    _server: Option<S3Local>,
}

/// A folder and a bucket that compare checksums, a folder that does not, and a folder that nobody has asked.
async fn places(victim: PathBuf, at: u64) -> Vec<Place> {
    let mut places = Vec::new();
    for name in ["folder", "bucket", "blind", "unprobed"] {
        let dir = TempDir::new().expect("a folder");
        let armed = Arc::new(AtomicBool::new(false));
        let (fire, victim) = (Arc::clone(&armed), victim.clone());
        let before = move || {
            if fire.swap(false, Ordering::Relaxed) {
                flip(&victim, at);
            }
        };
        let folder = || FsStore::open(dir.path()).expect("a store");
        let (store, server) = match name {
            "bucket" => {
                let (server, bucket) = bucket(&dir).await;
                (store(Before(bucket, before)), Some(server))
            }
            "blind" => (store(Blind(Before(folder(), before))), None),
            _ => (store(Before(folder(), before)), None),
        };
        if name != "unprobed" {
            store.probe().await.expect("a store that works");
        }
        assert_eq!(
            store.verifies_checksums(),
            matches!(name, "folder" | "bucket"),
            "{name}"
        );
        places.push(Place {
            name,
            store,
            armed,
            _dir: dir,
            _server: server,
        });
    }
    places
}

async fn bucket(dir: &TempDir) -> (S3Local, S3Store) {
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
    (server, S3Store::open(settings).expect("a store"))
}

/// Three chunks that are longer than the buffers, shorter than a read, and in between; the second is the one that gets hurt.
fn log() -> (Log, Fragment) {
    let mut log = Log::new();
    let fragment = log
        .chunk(5, 2 * BUFFER_SIZE)
        .chunk(5, 100)
        .chunk(5, 20_000)
        .fragment();
    (log, fragment)
}

/// First and last byte of each part of the second chunk, by what they belong to.
const PARTS: [(&str, u64); 8] = [
    ("epoch in the header", 20),
    ("last byte of the header", 47),
    ("first byte of the filter", 48),
    ("last byte of the filter", 63),
    ("first byte of the data", 64),
    ("last byte of the data", 163),
    ("first byte of the trailer", 164),
    ("last byte of the trailer", 168),
];

async fn assert_refused_and_named(place: &Place, fragment: &Fragment, what: &str) {
    assert_eq!(
        upload(&place.store, fragment).await,
        Event::Finished(Err(TransferError::CorruptChunk(Offset(5)))),
        "{what}, {}",
        place.name
    );
    assert_eq!(
        keys(&place.store).await,
        [] as [String; 0],
        "{what}, {}",
        place.name
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn data_that_changed_since_the_writer_saw_it_is_refused_and_named_by_every_store() {
    let (log, fragment) = log();
    let file = log.file(Offset(0));
    for at in [64, 100, 163] {
        let at = log.chunks[1].position + at;
        for place in places(file.clone(), at).await {
            flip(&file, at);
            assert_refused_and_named(&place, &fragment, "before the first read").await;
            flip(&file, at);
        }
    }
}

/// The CRC that the writer left cannot be told from a damaged one: either way it does not fit the data.
#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_crc_in_a_header_is_refused_and_named_by_every_store() {
    let (log, fragment) = log();
    let (file, at) = (log.file(Offset(0)), log.chunks[1].position + 33);
    for place in places(file.clone(), at).await {
        flip(&file, at);
        assert_refused_and_named(&place, &fragment, "before the first read").await;
        flip(&file, at);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn any_byte_that_changes_after_the_first_read_is_refused_and_named_by_every_store() {
    let (log, fragment) = log();
    let file = log.file(Offset(0));
    for (what, at) in PARTS {
        let at = log.chunks[1].position + at;
        for place in places(file.clone(), at).await {
            place.armed.store(true, Ordering::Relaxed);
            assert_refused_and_named(&place, &fragment, what).await;
            assert!(!place.armed.load(Ordering::Relaxed), "the bit was flipped");
            flip(&file, at);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_nobody_touched_is_stored_by_every_store() {
    let (log, fragment) = log();
    for place in places(log.file(Offset(0)), 0).await {
        let Event::Finished(Ok(_)) = upload(&place.store, &fragment).await else {
            panic!("not stored in the {}", place.name);
        };
        let keys = keys(&place.store).await;
        let found = object(&place.store, &keys[0]).await;
        assert!(found == log.object(&fragment.meta), "{}", place.name);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_are_compared_in_one_place_and_not_in_two() {
    let (log, fragment) = log();
    flip(&log.file(Offset(0)), log.chunks[1].position + 70);
    for probed in [true, false] {
        let whole = Arc::new(AtomicBool::new(false));
        let store = store(Believed(Arc::clone(&whole), fragment.meta.size));
        if probed {
            store.probe().await.expect("an answer");
        }
        drop(upload(&store, &fragment).await);
        assert_eq!(whole.load(Ordering::Relaxed), probed);
    }
}

/// Says that it compares checksums, and notes whether more than the data came: the index, and so the whole body.
struct Believed(Arc<AtomicBool>, u64);

#[async_trait]
impl ObjectStore for Believed {
    async fn put(&self, _key: &str, body: Body, _options: PutOptions) -> Result<Stored> {
        use futures::StreamExt as _;
        let mut bytes = 0;
        if let Body::Stream { mut stream, .. } = body {
            while let Some(Ok(piece)) = stream.next().await {
                bytes += piece.len() as u64;
            }
        }
        self.0.store(bytes > self.1, Ordering::Relaxed);
        Ok(Stored { etag: None })
    }

    async fn get(&self, _key: &str, _part: Part) -> Result<Object> {
        panic!("no test reads")
    }

    async fn delete(&self, _keys: &[String]) -> Result<Vec<(String, StoreError)>> {
        panic!("no test deletes")
    }

    async fn list(&self, _prefix: &str, _from: Option<&str>, _max: usize) -> Result<Page> {
        panic!("no test lists")
    }

    async fn probe(&self, _prefix: &str) -> Result<Capabilities> {
        Ok(Capabilities {
            conditional_writes: true,
            verifies_checksums: true,
        })
    }
}

/// The files are sound, so the damage came after them: no chunk is to blame.
#[tokio::test(flavor = "multi_thread")]
async fn damage_on_the_wire_is_no_chunks_fault() {
    let (_log, fragment) = log();
    let dir = TempDir::new().expect("a folder");
    let (server, objects) = bucket(&dir).await;
    let store = store(objects);
    store.probe().await.expect("a store that works");
    server
        .faults()
        .add(Fault::new(Operation::Put, Action::WrongChecksum).times(1));
    assert_eq!(
        upload(&store, &fragment).await,
        Event::Finished(Err(TransferError::ChecksumMismatch))
    );
}

/// A segment that ends inside of the data: only the second read comes there.
#[tokio::test(flavor = "multi_thread")]
async fn data_that_is_cut_off_names_its_chunk_on_every_store() {
    let (log, fragment) = log();
    let file = log.file(Offset(0));
    let whole = std::fs::read(&file).expect("a file");
    for place in places(file.clone(), 0).await {
        std::fs::write(&file, &whole[..log.chunks[1].position as usize + 100]).expect("a file");
        assert_refused_and_named(&place, &fragment, "cut off").await;
        std::fs::write(&file, &whole).expect("a file");
    }
}
