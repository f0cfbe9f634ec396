//! Whatever bytes come, decoding answers, and what it accepts is what encoding gives.

use proptest::prelude::*;
use stream_s3_core::chunk::{ChunkHeader, ChunkType};
use stream_s3_core::fragment::decode_index;
use stream_s3_core::history;
use stream_s3_core::key::{self, ParsedKey, Prefix, RunId, StreamId};
use stream_s3_core::manifest::{
    Entry, EntryKind, Header, MANIFEST_HEADER_SIZE, Manifest, decode_entries, decode_group,
    decode_root, encode_entries, encode_group, encode_root, encode_root_of,
};
use stream_s3_core::units::{Epoch, Offset, Revision, TimestampMs, Uid};

use crate::config;

fn kind() -> impl Strategy<Value = EntryKind> {
    (0u8..4).prop_map(|code| EntryKind::from_code(code).unwrap())
}

/// Entries that ascend, and an offset after the last one.
pub(crate) fn entries(max: usize) -> impl Strategy<Value = (Vec<Entry>, Offset)> {
    let row = (
        1u64..1_000,
        any::<i64>(),
        any::<i64>(),
        kind(),
        0u64..1 << 40,
        any::<u32>(),
    );
    (any::<u32>(), prop::collection::vec(row, 1..max)).prop_map(|(start, rows)| {
        let mut at = u64::from(start);
        let mut entries = Vec::new();
        for (records, first, last, kind, size, uid) in rows {
            entries.push(Entry {
                first_offset: Offset(at),
                first_timestamp: TimestampMs(first),
                last_timestamp: TimestampMs(last),
                kind,
                size,
                uid: Uid(uid),
            });
            at += records;
        }
        (entries, Offset(at))
    })
}

fn manifest() -> impl Strategy<Value = Manifest> {
    (entries(30), any::<i64>(), any::<i64>(), 0u128..1 << 70).prop_map(
        |((entries, next_offset), first, last, total_size)| Manifest {
            first_offset: entries[0].first_offset,
            first_timestamp: TimestampMs(first),
            first_last_timestamp: TimestampMs(last),
            next_offset,
            total_size,
            revision: Revision(0),
            entries: entries.into_iter().collect(),
        },
    )
}

/// Some bytes with some of them changed, cut off or added.
fn damaged(bytes: impl Strategy<Value = Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
    (
        bytes,
        changes,
        any::<prop::sample::Index>(),
        prop::collection::vec(any::<u8>(), 0..3),
    )
        .prop_map(|(mut bytes, changes, cut, added)| {
            for (at, byte) in changes {
                if !bytes.is_empty() {
                    let at = at.index(bytes.len());
                    bytes[at] = byte;
                }
            }
            if cut.index(4) == 0 {
                bytes.truncate(cut.index(bytes.len() + 1));
            }
            bytes.extend(added);
            bytes
        })
}

fn chunk() -> impl Strategy<Value = ChunkHeader> {
    let kinds = prop_oneof![
        Just(ChunkType::User),
        Just(ChunkType::TrackingDelta),
        Just(ChunkType::TrackingSnapshot)
    ];
    (
        kinds,
        any::<(u16, u32, i64, u64, u64)>(),
        any::<(u32, u32, u32, u8, [u8; 3])>(),
    )
        .prop_map(
            |(kind, (num_entries, num_records, timestamp, epoch, chunk_id), rest)| {
                let (crc, data_size, trailer_size, filter_size, reserved) = rest;
                ChunkHeader {
                    kind,
                    num_entries,
                    num_records,
                    timestamp: TimestampMs(timestamp),
                    epoch: Epoch(epoch),
                    chunk_id: Offset(chunk_id),
                    crc,
                    data_size,
                    trailer_size,
                    filter_size,
                    reserved,
                }
            },
        )
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn a_root_comes_back_as_it_was(manifest in manifest()) {
        let bytes = encode_root(&manifest).unwrap();
        let header = Header {
            first_offset: manifest.first_offset,
            next_offset: manifest.next_offset,
            first_timestamp: manifest.first_timestamp,
            first_last_timestamp: manifest.first_last_timestamp,
            total_size: manifest.total_size,
        };
        prop_assert_eq!(encode_root_of(&header, &bytes[MANIFEST_HEADER_SIZE..]), Ok(bytes.clone()));
        prop_assert_eq!(bytes.len(), 49 + 34 * manifest.entries.len());
        prop_assert_eq!(decode_root(&bytes), Ok(manifest));
    }

    #[test]
    fn a_damaged_root_is_refused_or_is_another_root(
        bytes in damaged(manifest().prop_map(|manifest| encode_root(&manifest).unwrap())),
    ) {
        match decode_root(&bytes) {
            Ok(manifest) => {
                prop_assert!(manifest.is_well_formed());
                prop_assert_eq!(encode_root(&manifest), Ok(bytes));
            }
            Err(error) => prop_assert!(error.at <= bytes.len() as u64),
        }
    }

    #[test]
    fn a_group_comes_back_as_it_was((entries, _) in entries(30), kind in 1u8..4) {
        let kind = EntryKind::from_code(kind).unwrap();
        let group = decode_group(&encode_group(kind, &entries).unwrap()).unwrap();
        prop_assert_eq!((group.kind, group.entries), (kind, entries));
    }

    #[test]
    fn a_damaged_group_is_refused_or_is_another_group(
        bytes in damaged(
            entries(9).prop_map(|(entries, _)| encode_group(EntryKind::Group, &entries).unwrap())
        ),
    ) {
        match decode_group(&bytes) {
            Ok(group) => prop_assert_eq!(encode_group(group.kind, &group.entries), Ok(bytes)),
            Err(error) => prop_assert!(error.at <= bytes.len() as u64),
        }
    }

    #[test]
    fn entries_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(entries) = decode_entries(&bytes) {
            prop_assert_eq!(encode_entries(&entries), bytes);
        }
    }

    #[test]
    fn a_chunk_header_comes_back_as_it_was(chunk in chunk()) {
        prop_assert_eq!(ChunkHeader::decode(&chunk.encode()), Ok(chunk));
    }

    #[test]
    fn a_damaged_chunk_header_is_refused_or_is_another_one(
        bytes in damaged(chunk().prop_map(|chunk| chunk.encode().to_vec())),
    ) {
        if let Ok(chunk) = ChunkHeader::decode(&bytes) {
            prop_assert_eq!(&chunk.encode()[..], &bytes[..48]);
        }
    }

    #[test]
    fn any_bytes_are_an_index_or_not(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
        if let Ok(records) = decode_index(&bytes) {
            prop_assert_eq!(records.iter().flat_map(|record| record.encode()).collect::<Vec<_>>(), bytes);
        }
    }

    #[test]
    fn a_history_segment_comes_back_as_it_was(
        run in "[A-Za-z0-9_=-]{1,255}",
        seq: u64,
        payload in prop::collection::vec(any::<u8>(), 0..100),
    ) {
        let run = RunId::parse(&run).unwrap();
        let bytes = history::encode(&run, seq, &payload);
        let segment = history::decode(&bytes).unwrap();
        prop_assert_eq!((&segment.run, segment.seq, segment.payload), (&run, seq, &payload[..]));
    }

    #[test]
    fn a_damaged_history_segment_is_never_taken_for_another(
        bytes in damaged(
            prop::collection::vec(any::<u8>(), 0..40)
                .prop_map(|payload| history::encode(&RunId::parse("run").unwrap(), 3, &payload))
        ),
    ) {
        if let Ok(segment) = history::decode(&bytes) {
            prop_assert_eq!(history::encode(&segment.run, segment.seq, segment.payload), bytes);
        }
    }

    #[test]
    fn a_key_is_read_as_what_it_was_built_from(
        stream in "[A-Za-z0-9_=-]{1,40}",
        run in "[A-Za-z0-9_=-][A-Za-z0-9_=.-]{0,40}",
        prefix in "[a-z]{1,5}(/[a-z.]{3,5}){0,2}",
        kind in 0u8..4,
        number: u64,
        uid: u32,
    ) {
        let Ok(prefix) = Prefix::parse(&prefix) else { return Ok(()) };
        let stream = StreamId::parse(&stream).unwrap();
        let (first_offset, uid) = (Offset(number), Uid(uid));
        let entry = match EntryKind::from_code(kind).unwrap() {
            EntryKind::Fragment => ParsedKey::Fragment { stream: stream.clone(), first_offset, uid },
            kind @ (EntryKind::Group | EntryKind::KiloGroup | EntryKind::MegaGroup) => ParsedKey::Group { stream: stream.clone(), kind, first_offset, uid },
        };
        let root = ParsedKey::Root { stream, epoch: Epoch(number), uid };
        let history = ParsedKey::History { run: RunId::parse(&run).unwrap(), seq: number };
        for parsed in [entry, root, history] {
            prop_assert_eq!(key::parse(&prefix, &parsed.to_key(&prefix)), Some(parsed));
        }
    }

    #[test]
    fn a_key_that_is_read_is_built_the_same(key in "p/(stream|history)/[a.]{1,2}/[a-z/.0-9]{0,40}") {
        let prefix = Prefix::parse("p").unwrap();
        if let Some(parsed) = key::parse(&prefix, &key) {
            prop_assert_eq!(parsed.to_key(&prefix), key);
        }
    }
}
