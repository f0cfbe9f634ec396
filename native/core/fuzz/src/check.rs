//! One function a decoder. Each panics where the decoder broke a promise.

use stream_s3_core::chunk::{CHUNK_HEADER_SIZE, ChunkHeader, check_segment_header};
use stream_s3_core::error::FormatError;
use stream_s3_core::fragment::{
    INDEX_RECORD_SIZE, IndexRecord, OBJECT_HEADER, check_object_header, decode_index, object_len,
};
use stream_s3_core::history;
use stream_s3_core::manifest::{
    Manifest, RetentionLimits, decode_entries, decode_group, decode_root, encode_entries,
    encode_group, encode_root, evaluate_remote_retention, lookup_offset, lookup_timestamp,
};
use stream_s3_core::units::{Offset, TimestampMs};

use crate::memory::bounded;

/// Errors are read by people: they must print, and point into the input or right behind it.
fn refused(error: &FormatError) {
    assert!(!error.to_string().is_empty());
}

/// The header in front of a chunk, and the one of a segment file.
pub fn chunk_header(input: &[u8]) {
    if bounded(input, check_segment_header).is_ok() {
        assert_eq!(input[..8], stream_s3_core::chunk::SEGMENT_HEADER);
    }
    match bounded(input, ChunkHeader::decode) {
        Ok(header) => {
            assert_eq!(header.encode(), input[..CHUNK_HEADER_SIZE]);
            assert!(header.len_in_segment() >= CHUNK_HEADER_SIZE as u64);
            assert!(header.next_chunk_id() >= header.chunk_id);
        }
        Err(error) => refused(&error),
    }
}

/// A whole fragment object. The first two bytes say how many bytes of chunks there are, which a reader knows from the manifest.
pub fn fragment(input: &[u8]) {
    let Some((size, object)) = input.split_first_chunk::<2>() else {
        return;
    };
    let size = usize::from(u16::from_be_bytes(*size));
    if let Err(error) = bounded(object, check_object_header) {
        return refused(&error);
    }
    let body = &object[OBJECT_HEADER.len()..];
    let Some((data, index)) = body.split_at_checked(size) else {
        return;
    };
    let records = match bounded(index, decode_index) {
        Ok(records) => records,
        Err(error) => return refused(&error),
    };
    for record in &records {
        // A position beyond the data, or one where no chunk is, is the chunk decoder's to refuse.
        let at = usize::try_from(record.position).unwrap_or(usize::MAX);
        if let Some(bytes) = data.get(at..) {
            chunk_header(bytes);
        }
    }
    let mut again = OBJECT_HEADER.to_vec();
    again.extend_from_slice(data);
    again.extend_from_slice(&encoded(&records));
    assert_eq!(again, object);
    let chunks = u32::try_from(records.len()).unwrap_or(u32::MAX);
    assert_eq!(object_len(size as u64, chunks), object.len() as u64);
}

/// The index at the end of a fragment.
pub fn index(input: &[u8]) {
    match bounded(input, decode_index) {
        Ok(records) => {
            assert_eq!(encoded(&records), input);
            assert!(
                records.is_sorted_by(|a, b| a.chunk_id < b.chunk_id && a.position < b.position)
            );
        }
        Err(error) => refused(&error),
    }
}

fn encoded(records: &[IndexRecord]) -> Vec<u8> {
    let mut out = Vec::with_capacity(records.len() * INDEX_RECORD_SIZE);
    for record in records {
        out.extend_from_slice(&record.encode());
    }
    out
}

/// A root, what is done with one, and entries by themselves.
pub fn root(input: &[u8]) {
    match bounded(input, decode_entries) {
        Ok(entries) => assert_eq!(encode_entries(&entries), input),
        Err(error) => refused(&error),
    }
    match bounded(input, decode_root) {
        Ok(manifest) => {
            assert_eq!(encode_root(&manifest).as_deref(), Ok(input));
            assert!(manifest.is_well_formed());
            used(&manifest);
        }
        Err(error) => refused(&error),
    }
}

/// What is well-formed may be searched and shortened, whatever it says.
fn used(manifest: &Manifest) {
    for offset in [0, manifest.first_offset.0, manifest.next_offset.0, u64::MAX] {
        let _ = lookup_offset(manifest, Offset(offset));
    }
    for timestamp in [i64::MIN, 0, manifest.first_timestamp.0, i64::MAX] {
        let _ = lookup_timestamp(manifest, TimestampMs(timestamp));
        for (max_bytes, max_age_ms) in [
            (Some(0), None),
            (None, Some(0)),
            (Some(manifest.total_size / 2), Some(u64::MAX)),
        ] {
            let limits = RetentionLimits {
                max_bytes,
                max_age_ms,
            };
            let _ = evaluate_remote_retention(manifest, limits, TimestampMs(timestamp));
        }
    }
}

/// A group of any level.
pub fn group(input: &[u8]) {
    match bounded(input, decode_group) {
        Ok(group) => assert_eq!(
            encode_group(group.kind, &group.entries).as_deref(),
            Ok(input)
        ),
        Err(error) => refused(&error),
    }
}

/// A history segment, as it is and with its checksum put right: a fuzzer does not guess those.
pub fn history(input: &[u8]) {
    segment(input);
    let name_at = 12;
    let name_len = input.get(8..name_at).map_or(0, |bytes| {
        bytes
            .iter()
            .fold(0, |sum, byte| sum << 8 | usize::from(*byte))
    });
    let crc_at = name_at + name_len + 16;
    if let Some(payload) = input.get(crc_at + 4..) {
        let crc = crc_of(payload).to_be_bytes();
        let mut mended = input.to_vec();
        mended[crc_at..crc_at + 4].copy_from_slice(&crc);
        segment(&mended);
    }
}

fn segment(input: &[u8]) {
    match bounded(input, history::decode) {
        Ok(found) => {
            assert_eq!(history::encode(&found.run, found.seq, found.payload), input);
            let stored_size = input.len() as u64;
            assert_eq!(
                history::judge_existing(input, &found.run, found.seq, found.crc),
                history::Existing::AlreadyPresent { stored_size }
            );
        }
        Err(error) => refused(&error),
    }
}

/// CRC-32/IEEE, through the encoder: the last four bytes in front of the payload.
fn crc_of(payload: &[u8]) -> u32 {
    let Ok(run) = stream_s3_core::key::RunId::parse("r") else {
        return 0;
    };
    let encoded = history::encode(&run, 0, payload);
    let at = encoded.len() - payload.len();
    encoded[..at]
        .last_chunk::<4>()
        .map_or(0, |bytes| u32::from_be_bytes(*bytes))
}
