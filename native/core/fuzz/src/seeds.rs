//! Valid encodings to start from. A fuzzer writes its own when it begins: a program without a fuzzer in it cannot be linked with the
//! coverage that all of this crate is built with.

use std::path::PathBuf;

use stream_s3_core::chunk::{ChunkHeader, ChunkType, SEGMENT_HEADER};
use stream_s3_core::fragment::{IndexRecord, OBJECT_HEADER};
use stream_s3_core::history;
use stream_s3_core::key::RunId;
use stream_s3_core::manifest::{Entry, EntryKind, Manifest, encode_group, encode_root};
use stream_s3_core::units::{Epoch, Offset, TimestampMs, Uid};

/// Writes the inputs of one fuzzer to the folder that `STREAM_S3_FUZZ_SEEDS` names, where it does.
pub fn write(fuzzer: &str) {
    let Some(dir) = std::env::var_os("STREAM_S3_FUZZ_SEEDS").map(PathBuf::from) else {
        return;
    };
    for (number, (_, bytes)) in all()
        .into_iter()
        .filter(|(name, _)| *name == fuzzer)
        .enumerate()
    {
        let file = dir.join(format!("seed-{number:02}"));
        if let Err(error) = std::fs::write(&file, bytes) {
            panic!("{}: {error}", file.display());
        }
    }
}

/// Pairs of a fuzzer's name and an input.
fn all() -> Vec<(&'static str, Vec<u8>)> {
    let mut seeds = vec![
        ("chunk_header", SEGMENT_HEADER.to_vec()),
        ("index", Vec::new()),
    ];
    for (number, kind) in [
        ChunkType::User,
        ChunkType::TrackingDelta,
        ChunkType::TrackingSnapshot,
    ]
    .into_iter()
    .enumerate()
    {
        seeds.push(("chunk_header", chunk(number as u64, kind).encode().to_vec()));
    }
    for count in [1, 2, 70] {
        seeds.push(("index", index(count)));
        seeds.push(("fragment", fragment(count)));
        let entries: Vec<_> = (0..count).map(entry).collect();
        for kind in [EntryKind::Group, EntryKind::KiloGroup, EntryKind::MegaGroup] {
            seeds.extend(encode_group(kind, &entries).map(|bytes| ("group", bytes)));
        }
        seeds.extend(encode_root(&manifest(&entries)).map(|bytes| ("root", bytes)));
    }
    seeds.extend(encode_root(&Manifest::default()).map(|bytes| ("root", bytes)));
    for (name, payload) in [("run", &b""[..]), ("a-longer.run_id=", b"sealed bytes")] {
        seeds.extend(RunId::parse(name).map(|run| ("history", history::encode(&run, 7, payload))));
    }
    seeds
}

fn chunk(number: u64, kind: ChunkType) -> ChunkHeader {
    ChunkHeader {
        kind,
        num_entries: 3,
        num_records: 5,
        timestamp: TimestampMs(1_700_000_000_000),
        epoch: Epoch(2),
        chunk_id: Offset(number * 5),
        crc: 0xdead_beef,
        data_size: 100,
        trailer_size: 0,
        filter_size: 16,
        reserved: [0; 3],
    }
}

fn index(count: u64) -> Vec<u8> {
    (0..count)
        .flat_map(|number| {
            let record = IndexRecord {
                chunk_id: Offset(number * 5),
                timestamp: TimestampMs(1_700_000_000_000),
                position: u32::try_from(number * 48).unwrap_or(u32::MAX),
            };
            record.encode()
        })
        .collect()
}

fn fragment(count: u64) -> Vec<u8> {
    let size = u16::try_from(count * 48).unwrap_or(u16::MAX);
    let mut out = size.to_be_bytes().to_vec();
    out.extend_from_slice(&OBJECT_HEADER);
    for number in 0..count {
        out.extend_from_slice(&chunk(number, ChunkType::User).encode());
    }
    out.extend_from_slice(&index(count));
    out
}

fn entry(number: u64) -> Entry {
    // The first ones of a root are groups.
    let kind = match number {
        0 => EntryKind::MegaGroup,
        1 => EntryKind::Group,
        _ => EntryKind::Fragment,
    };
    Entry {
        first_offset: Offset(number * 10),
        first_timestamp: TimestampMs(100),
        last_timestamp: TimestampMs(200),
        kind,
        size: if kind == EntryKind::Fragment {
            1_000
        } else {
            0
        },
        uid: Uid(7),
    }
}

fn manifest(entries: &[Entry]) -> Manifest {
    Manifest {
        first_timestamp: TimestampMs(100),
        first_last_timestamp: TimestampMs(200),
        next_offset: Offset(entries.len() as u64 * 10),
        total_size: 1 << 66,
        entries: entries.iter().copied().collect(),
        ..Manifest::default()
    }
}
