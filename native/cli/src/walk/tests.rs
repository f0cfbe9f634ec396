//! The walk over objects made here, whole and damaged, in pieces of any size.

use stream_s3_core::chunk::ChunkType;
use stream_s3_core::manifest::EntryKind;
use stream_s3_core::units::Uid;

use super::*;

/// A fragment of chunks of one record each, and its entry. Filters, data and trailers of all lengths from 0 up, so that every part
/// is empty somewhere.
pub(crate) fn fragment(chunks: u64, part: impl Fn(u64) -> usize) -> (Entry, Vec<u8>) {
    let mut object = OBJECT_HEADER.to_vec();
    let mut index = Vec::new();
    for id in 0..chunks {
        let (filter, data, trailer) = (
            vec![1; part(id)],
            vec![2; part(id + 1)],
            vec![3; part(id + 2)],
        );
        let header = ChunkHeader {
            kind: ChunkType::User,
            num_entries: 1,
            num_records: 1,
            timestamp: TimestampMs(id as i64),
            epoch: Epoch(1),
            chunk_id: Offset(id),
            crc: crc32fast::hash(&data),
            data_size: data.len() as u32,
            trailer_size: trailer.len() as u32,
            filter_size: filter.len() as u8,
            reserved: [0; 3],
        };
        let position = (object.len() - OBJECT_HEADER.len()) as u32;
        index.extend(
            IndexRecord {
                chunk_id: Offset(id),
                timestamp: TimestampMs(id as i64),
                position,
            }
            .encode(),
        );
        for part in [&header.encode()[..], &filter, &data, &trailer] {
            object.extend_from_slice(part);
        }
    }
    let entry = Entry {
        first_offset: Offset(0),
        first_timestamp: TimestampMs(0),
        last_timestamp: TimestampMs(chunks as i64 - 1),
        kind: EntryKind::Fragment,
        size: (object.len() - OBJECT_HEADER.len()) as u64,
        uid: Uid(1),
    };
    object.extend_from_slice(&index);
    (entry, object)
}

fn walk(entry: &Entry, object: &[u8], piece: usize) -> Outcome {
    let mut walk = Walk::new("key", entry, object.len() as u64);
    for piece in object.chunks(piece) {
        if walk.feed(piece) == Flow::Enough {
            break;
        }
    }
    walk.finish()
}

#[test]
fn the_size_of_the_pieces_does_not_matter() {
    let (entry, whole) = fragment(7, |id| (id % 4) as usize);
    for damaged in [
        None,
        Some(9),
        Some(60),
        Some(8 + 24),
        Some(whole.len() - 5),
        Some(whole.len() - 25),
    ] {
        let mut object = whole.clone();
        if let Some(byte) = damaged {
            object[byte] ^= 0x40;
        }
        let at_once = walk(&entry, &object, object.len());
        assert_eq!(
            at_once.findings.is_empty(),
            damaged.is_none(),
            "{damaged:?}"
        );
        for piece in 1..64 {
            assert_eq!(
                walk(&entry, &object, piece),
                at_once,
                "{damaged:?} in pieces of {piece}"
            );
        }
    }
}

#[test]
fn a_cut_at_any_byte_is_found() {
    let (entry, object) = fragment(3, |id| (id % 4) as usize);
    for len in 0..object.len() {
        let outcome = walk(&entry, &object[..len], 11);
        let kinds: Vec<FindingKind> = outcome
            .findings
            .iter()
            .map(|finding| finding.kind)
            .collect();
        assert_eq!(kinds, [FindingKind::ObjectSize], "{len} bytes");
    }
}

#[test]
fn bytes_behind_the_index_are_not_read() {
    let (entry, object) = fragment(3, |_| 1);
    let mut walk = Walk::new("key", &entry, object.len() as u64 + (1 << 40));
    assert_eq!(walk.feed(&object[..object.len() - 1]), Flow::More);
    assert_eq!(walk.feed(&object[object.len() - 1..]), Flow::Enough);
    assert_eq!(walk.finish().findings[0].kind, FindingKind::ObjectSize);
}

#[test]
fn more_chunks_than_a_fragment_may_hold_are_found_once() {
    let (entry, object) = fragment(u64::from(MAX_CHUNKS) + 2, |_| 0);
    let outcome = walk(&entry, &object, 1 << 20);
    let place = 8 + 48 * u64::from(MAX_CHUNKS);
    assert_eq!(outcome.findings.len(), 1);
    assert_eq!(
        (outcome.findings[0].kind, outcome.findings[0].byte),
        (FindingKind::FragmentLimit, Some(place))
    );
    assert_eq!(outcome.next_offset, Some(Offset(u64::from(MAX_CHUNKS) + 2)));
}

#[test]
fn more_data_than_a_fragment_may_hold_is_found_before_it_is_read() {
    let kind = |chunks| {
        let (mut entry, object) = fragment(chunks, |_| 1);
        entry.size = MAX_DATA + 1;
        walk(&entry, &object, 100).findings[0].kind
    };
    assert_eq!(kind(2), FindingKind::FragmentLimit);
    assert_ne!(
        kind(1),
        FindingKind::FragmentLimit,
        "a single chunk may have any length"
    );
}

#[test]
fn the_largest_fragment_is_not_too_large() {
    let (mut entry, object) = fragment(2, |_| 1);
    entry.size = MAX_DATA;
    let outcome = walk(&entry, &object, 100);
    assert!(
        outcome
            .findings
            .iter()
            .all(|finding| finding.kind != FindingKind::FragmentLimit)
    );
}

#[test]
fn an_entry_without_data_is_found() {
    let (mut entry, object) = fragment(1, |_| 0);
    entry.size = 0;
    assert_eq!(
        walk(&entry, &object, 100).findings[0].kind,
        FindingKind::ChunkBounds
    );
}
