//! Small buckets in a directory, made by the core's codecs and damaged on purpose, and the command run on them.

#![allow(dead_code, reason = "each test binary uses its own part")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use stream_s3_core::chunk::{ChunkHeader, ChunkType};
use stream_s3_core::fragment::{IndexRecord, OBJECT_HEADER};
use stream_s3_core::key::{self, Prefix, StreamId};
use stream_s3_core::manifest::{Entry, EntryKind, Manifest, encode_group, encode_root};
use stream_s3_core::units::{Epoch, Offset, Revision, TimestampMs, Uid};
use tempfile::TempDir;

/// Records of a chunk, each of ten bytes.
pub(crate) const RECORDS: u32 = 5;
/// Chunks of a fragment.
pub(crate) const CHUNKS: u32 = 3;
/// Offsets of a fragment.
pub(crate) const OFFSETS: u64 = 15;
/// Bytes of a chunk: 48 header, 16 filter, 5 * 14 data, 6 trailer.
pub(crate) const CHUNK_LEN: u64 = 140;
/// Data bytes of a fragment.
pub(crate) const SIZE: u64 = 420;
/// Bytes of a fragment object: 8 header, data, 3 * 20 index.
pub(crate) const OBJECT_LEN: u64 = 488;
/// Timestamp of the chunk at offset 0; that of any other is as much later as its id says.
pub(crate) const TIME: i64 = 1_700_000_000_000;
/// Key of the root that a bucket is made with.
pub(crate) const ROOT: &str = "rabbitmq/stream/demo/metadata/root.3.0a1b2c3d.manifest";

/// Key of the fragment at offset 0.
pub(crate) const FIRST: &str = "rabbitmq/stream/demo/data/00000000000000000000.00000001.fragment";
/// Key of the fragment at offset 15.
pub(crate) const SECOND: &str = "rabbitmq/stream/demo/data/00000000000000000015.00000002.fragment";

/// Name of the bucket: that of its directory.
pub(crate) const BUCKET: &str = "tiered";

/// A bucket with one stream, `demo`.
pub(crate) struct Bucket {
    /// Holds the bucket's directory.
    _parent: TempDir,
    dir: PathBuf,
    /// Entries of its fragments.
    pub(crate) fragments: Vec<Entry>,
}

/// How a command ended.
pub(crate) struct Ran {
    pub(crate) status: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Ran {
    /// The findings of `verify`, one a line.
    pub(crate) fn wrong(&self) -> Vec<&str> {
        self.out
            .lines()
            .filter_map(|line| line.strip_prefix("wrong: "))
            .collect()
    }

    /// Expects exactly these findings, and the status and verdict that go with them.
    pub(crate) fn assert_wrong(&self, expected: &[String]) {
        assert_eq!(self.wrong(), expected, "{}", self.err);
        assert_eq!(self.status, 1);
        let verdict = format!("verify: {} wrong, ", expected.len());
        assert!(self.verdict().starts_with(&verdict), "{}", self.verdict());
    }

    /// The last line.
    pub(crate) fn verdict(&self) -> &str {
        self.out.lines().last().unwrap_or_default()
    }

    /// Its JSON documents.
    pub(crate) fn documents(&self) -> Vec<serde_json::Value> {
        self.out
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }
}

impl Bucket {
    /// A stream of `count` fragments, listed in a flat root.
    pub(crate) fn flat(count: u64) -> Self {
        let bucket = Self::unlisted(count);
        bucket.put_root(
            ROOT,
            &manifest(
                0,
                count * OFFSETS,
                bucket.fragments.clone(),
                u128::from(count * SIZE),
            ),
        );
        bucket
    }

    /// Fragments without a root.
    pub(crate) fn unlisted(count: u64) -> Self {
        let parent = TempDir::new().unwrap();
        let dir = parent.path().join(BUCKET);
        fs::create_dir(&dir).unwrap();
        let mut bucket = Self {
            _parent: parent,
            dir,
            fragments: Vec::new(),
        };
        for number in 0..count {
            let entry = entry(number);
            bucket.put(&bucket.key(&entry), &fragment(number));
            bucket.fragments.push(entry);
        }
        bucket
    }

    /// Five fragments: a kilo-group of two groups of two, and one in the root. Retention has consumed `consumed` fragments.
    pub(crate) fn grouped(consumed: u64) -> Self {
        let bucket = Self::unlisted(5);
        let groups = [
            bucket.put_group(EntryKind::Group, 0xa, &bucket.fragments[0..2]),
            bucket.put_group(EntryKind::Group, 0xb, &bucket.fragments[2..4]),
        ];
        let kilo = bucket.put_group(EntryKind::KiloGroup, 0xc, &groups);
        let total = u128::from((5 - consumed) * SIZE);
        bucket.put_root(
            ROOT,
            &manifest(
                consumed * OFFSETS,
                5 * OFFSETS,
                vec![kilo, bucket.fragments[4]],
                total,
            ),
        );
        for fragment in &bucket.fragments[..consumed as usize] {
            bucket.remove(&bucket.key(fragment));
        }
        bucket
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn key(&self, entry: &Entry) -> String {
        key::entry(
            &Prefix::default(),
            &StreamId::parse("demo").unwrap(),
            entry.kind,
            entry.first_offset,
            entry.uid,
        )
    }

    pub(crate) fn path(&self, key: &str) -> PathBuf {
        self.dir.join(key)
    }

    pub(crate) fn put(&self, key: &str, bytes: &[u8]) {
        let path = self.path(key);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    pub(crate) fn put_root(&self, key: &str, manifest: &Manifest) {
        self.put(key, &encode_root(manifest).unwrap());
    }

    /// Stores a group and returns the entry that names it.
    pub(crate) fn put_group(&self, kind: EntryKind, uid: u32, entries: &[Entry]) -> Entry {
        let entry = Entry {
            kind,
            size: 0,
            uid: Uid(uid),
            last_timestamp: entries.last().unwrap().last_timestamp,
            ..entries[0]
        };
        self.put(&self.key(&entry), &encode_group(kind, entries).unwrap());
        entry
    }

    pub(crate) fn remove(&self, key: &str) {
        fs::remove_file(self.path(key)).unwrap();
    }

    /// Changes the bytes of an object.
    pub(crate) fn damage(&self, key: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = fs::read(self.path(key)).unwrap();
        change(&mut bytes);
        self.put(key, &bytes);
    }

    /// Verifies the stream and expects exactly these findings.
    pub(crate) fn assert_wrong(&self, expected: &[String]) {
        self.run(&["verify", "demo"]).assert_wrong(expected);
    }

    /// Runs the command on this bucket.
    pub(crate) fn run(&self, arguments: &[&str]) -> Ran {
        let dir = self.dir.to_str().unwrap();
        stream_s3(&[&["--fs", dir], arguments].concat())
    }
}

/// Runs the command, without the credentials that the environment may hold.
pub(crate) fn stream_s3(arguments: &[&str]) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stream-s3"));
    for name in [
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_REGION",
    ] {
        command.env_remove(name);
    }
    let output = command.args(arguments).output().unwrap();
    Ran {
        status: output.status.code().unwrap(),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

pub(crate) fn manifest(first: u64, next: u64, entries: Vec<Entry>, total_size: u128) -> Manifest {
    let oldest = entry(first / OFFSETS);
    Manifest {
        first_offset: Offset(first),
        first_timestamp: oldest.first_timestamp,
        first_last_timestamp: oldest.last_timestamp,
        next_offset: Offset(next),
        total_size,
        revision: Revision(0),
        entries: entries.into_iter().collect(),
    }
}

/// Entry of the fragment `number`.
pub(crate) fn entry(number: u64) -> Entry {
    let first = number * OFFSETS;
    Entry {
        first_offset: Offset(first),
        first_timestamp: timestamp(first),
        last_timestamp: timestamp(first + u64::from(RECORDS * (CHUNKS - 1))),
        kind: EntryKind::Fragment,
        size: SIZE,
        uid: Uid(number as u32 + 1),
    }
}

fn timestamp(chunk_id: u64) -> TimestampMs {
    TimestampMs(TIME + chunk_id as i64)
}

/// The record at an offset.
pub(crate) fn record(offset: u64) -> Vec<u8> {
    format!("{offset:010}").into_bytes()
}

/// Header and all other bytes of the chunk that starts at an offset.
pub(crate) fn chunk(chunk_id: u64, epoch: u64) -> (ChunkHeader, Vec<u8>) {
    let records = (chunk_id..chunk_id + u64::from(RECORDS)).map(record);
    let data: Vec<u8> = records
        .flat_map(|record| [&(record.len() as u32).to_be_bytes()[..], &record].concat())
        .collect();
    let header = ChunkHeader {
        kind: ChunkType::User,
        num_entries: RECORDS as u16,
        num_records: RECORDS,
        timestamp: timestamp(chunk_id),
        epoch: Epoch(epoch),
        chunk_id: Offset(chunk_id),
        crc: crc32fast::hash(&data),
        data_size: data.len() as u32,
        trailer_size: 6,
        filter_size: 16,
        reserved: [0; 3],
    };
    let bytes = [&header.encode()[..], &[0xf1; 16], &data, &[0x7a; 6]].concat();
    (header, bytes)
}

/// The object of the fragment `number`.
pub(crate) fn fragment(number: u64) -> Vec<u8> {
    fragment_of(
        (0..u64::from(CHUNKS)).map(|place| chunk(number * OFFSETS + place * u64::from(RECORDS), 3)),
    )
}

/// An object of these chunks.
pub(crate) fn fragment_of(chunks: impl Iterator<Item = (ChunkHeader, Vec<u8>)>) -> Vec<u8> {
    let mut object = OBJECT_HEADER.to_vec();
    let mut index = Vec::new();
    for (header, bytes) in chunks {
        let position = (object.len() - OBJECT_HEADER.len()) as u32;
        let record = IndexRecord {
            chunk_id: header.chunk_id,
            timestamp: header.timestamp,
            position,
        };
        index.extend_from_slice(&record.encode());
        object.extend_from_slice(&bytes);
    }
    object.extend_from_slice(&index);
    object
}
