//! Chunks taken apart: what osiris and clients write, and what they must not.

use std::io::Write;

use bytes::Bytes;
use stream_s3_core::chunk::{ChunkHeader, ChunkType};
use stream_s3_core::units::{Epoch, Offset, TimestampMs};

use super::*;

fn chunk(entries: u16, records: u32, data: Vec<u8>) -> Chunk {
    Chunk {
        header: ChunkHeader {
            kind: ChunkType::User,
            num_entries: entries,
            num_records: records,
            timestamp: TimestampMs(1),
            epoch: Epoch(1),
            chunk_id: Offset(100),
            crc: 0,
            data_size: data.len() as u32,
            trailer_size: 0,
            filter_size: 0,
            reserved: [0; 3],
        },
        data: data.into(),
        key: "a.fragment".to_owned(),
    }
}

fn record(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u32).to_be_bytes()[..], bytes].concat()
}

fn batch(compression: u8, records: u16, len: usize, body: &[u8]) -> Vec<u8> {
    [
        &[0x80 | compression << 4][..],
        &records.to_be_bytes(),
        &(len as u32).to_be_bytes(),
        &(body.len() as u32).to_be_bytes(),
        body,
    ]
    .concat()
}

fn all(chunk: Chunk) -> Result<Vec<(u64, Bytes)>, String> {
    let mut records = Records::of(chunk);
    let mut found = Vec::new();
    loop {
        match records.next() {
            Ok(Some((Offset(offset), record))) => found.push((offset, record)),
            Ok(None) => return Ok(found),
            Err(failed) => return Err(failed.to_string()),
        }
    }
}

fn records() -> Vec<u8> {
    [record(b"first"), record(b""), record(&[7; 5000])].concat()
}

fn expected() -> Vec<(u64, Bytes)> {
    vec![
        (101, Bytes::from_static(b"first")),
        (102, Bytes::new()),
        (103, Bytes::from(vec![7; 5000])),
    ]
}

#[test]
fn records_and_batches_of_each_compression_come_out_in_order() {
    let plain = records();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&plain).unwrap();
    let mut framed = snap::write::FrameEncoder::new(Vec::new());
    framed.write_all(&plain).unwrap();
    let mut lz4 = lz4_flex::frame::FrameEncoder::new(Vec::new());
    lz4.write_all(&plain).unwrap();
    let zstd =
        ruzstd::encoding::compress_to_vec(&plain[..], ruzstd::encoding::CompressionLevel::Fastest);
    let bodies = [
        (0, plain.clone()),
        (1, gzip.finish().unwrap()),
        (2, framed.into_inner().unwrap()),
        (2, snap::raw::Encoder::new().compress_vec(&plain).unwrap()),
        (3, lz4.finish().unwrap()),
        (4, zstd),
    ];
    for (compression, body) in bodies {
        let data = [
            record(b"before"),
            batch(compression, 3, plain.len(), &body),
            record(b"behind"),
        ]
        .concat();
        let mut wanted = vec![(100, Bytes::from_static(b"before"))];
        wanted.extend(expected());
        wanted.push((104, Bytes::from_static(b"behind")));
        assert_eq!(all(chunk(3, 5, data)), Ok(wanted), "{compression}");
    }
}

#[test]
fn a_compression_that_is_not_known_is_named_with_the_offset_and_where_to_go_on() {
    let data = [record(b"before"), batch(5, 1, 9, b"whatever.")].concat();
    let failed = all(chunk(2, 2, data)).unwrap_err();
    assert!(failed.contains("from offset 101 on"), "{failed}");
    assert!(failed.contains("compression 5"), "{failed}");
    assert!(failed.contains("--from 102"), "{failed}");
}

#[test]
fn a_batch_that_is_not_what_its_head_says_is_refused() {
    let plain = records();
    let cut = &plain[..plain.len() - 1];
    let cases = [
        (batch(0, 3, plain.len() - 1, cut), "more than it can have"),
        (batch(0, 3, plain.len(), cut), "middle of a record"),
        (
            batch(0, 2, plain.len(), &plain),
            "more bytes than its records",
        ),
        (
            batch(0, 4, plain.len() + 4, &plain),
            "cannot be decompressed",
        ),
        (batch(1, 3, plain.len(), &plain), "cannot be decompressed"),
        (batch(2, 3, 10, &plain), "snappy"),
        (batch(4, 3, plain.len(), &plain), "zstd"),
    ];
    for (data, why) in cases {
        let failed = all(chunk(1, 3, data)).unwrap_err();
        assert!(failed.contains(why), "{failed}, not {why}");
    }
}

#[test]
fn a_gzip_bomb_takes_no_more_than_its_head_promises() {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    gzip.write_all(&(1u32 << 30).to_be_bytes()).unwrap();
    for _ in 0..64 {
        gzip.write_all(&[0; 1 << 20]).unwrap();
    }
    let body = gzip.finish().unwrap();
    let failed = all(chunk(1, 1, batch(1, 1, 1000, &body))).unwrap_err();
    assert!(failed.contains("more than it can have"), "{failed}");
}

#[test]
fn entries_that_do_not_fill_the_chunk_are_refused() {
    let short = [record(b"one"), vec![0; 3]].concat();
    for (data, entries, records) in [
        (short.clone(), 1, 1),
        (short, 2, 2),
        (record(b"one"), 1, 2),
        (record(b"one"), 2, 2),
        (vec![0, 0, 0, 9, 1], 1, 1),
        (Vec::new(), 1, 1),
    ] {
        assert!(all(chunk(entries, records, data)).is_err());
    }
}
