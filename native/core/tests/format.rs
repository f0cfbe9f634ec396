//! Golden bytes: what is stored today must be readable for ever, and by others.

#![allow(clippy::disallowed_methods)]

mod support;

use stream_s3_core::chunk::{
    CHUNK_HEADER_SIZE, ChunkHeader, ChunkType, SEGMENT_HEADER, check_segment_header,
};
use stream_s3_core::error::{FormatError, FormatProblem};
use stream_s3_core::fragment::{
    INDEX_RECORD_SIZE, IndexRecord, OBJECT_HEADER, check_object_header, decode_index, index_len,
    object_len,
};
use stream_s3_core::history::{self, Existing, HistorySegment, judge_existing};
use stream_s3_core::key::RunId;
use stream_s3_core::manifest::{
    ENTRY_SIZE, Entries, Entry, EntryKind, Header, MANIFEST_HEADER_SIZE, Manifest, decode_entries,
    decode_group, decode_root, encode_entries, encode_group, encode_root, encode_root_of,
};
use stream_s3_core::units::{Epoch, Offset, Revision, TimestampMs, Uid};
use support::{altered, entry, manifest_of, tens};

/// The bytes written as hex, blanks between them as one likes.
fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text
        .bytes()
        .filter(|byte| !byte.is_ascii_whitespace())
        .collect();
    digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

fn problem<T: std::fmt::Debug>(result: Result<T, FormatError>) -> (u64, FormatProblem) {
    let error = result.unwrap_err();
    (error.at, error.problem)
}

/// `bytes` with others from `at` on.
fn with(bytes: &[u8], at: usize, others: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at..at + others.len()].copy_from_slice(others);
    bytes
}

// --- Chunks ------------------------------------------------------------------------------------------------------------------------

const CHUNK: &str = "50 01 0203 04050607 fffffffffffffffe 08090a0b0c0d0e0f 1011121314151617
                     18191a1b 1c1d1e1f 20212223 24 252627";

fn chunk() -> ChunkHeader {
    ChunkHeader {
        kind: ChunkType::TrackingDelta,
        num_entries: 0x0203,
        num_records: 0x0405_0607,
        timestamp: TimestampMs(-2),
        epoch: Epoch(0x0809_0a0b_0c0d_0e0f),
        chunk_id: Offset(0x1011_1213_1415_1617),
        crc: 0x1819_1a1b,
        data_size: 0x1c1d_1e1f,
        trailer_size: 0x2021_2223,
        filter_size: 0x24,
        reserved: [0x25, 0x26, 0x27],
    }
}

#[test]
fn a_chunk_header_has_48_bytes() {
    assert_eq!(hex(CHUNK).len(), CHUNK_HEADER_SIZE);
    assert_eq!(chunk().encode().to_vec(), hex(CHUNK));
    assert_eq!(ChunkHeader::decode(&hex(CHUNK)), Ok(chunk()));
    let followed = [hex(CHUNK), vec![1, 2, 3]].concat();
    assert_eq!(ChunkHeader::decode(&followed), Ok(chunk()));
}

#[test]
fn a_chunks_length_counts_every_part_of_it() {
    let len = 48 + 0x24 + 0x1c1d_1e1f + 0x2021_2223;
    assert_eq!(chunk().len_in_segment(), len);
    assert_eq!(
        chunk().next_chunk_id(),
        Offset(0x1011_1213_1415_1617 + 0x0405_0607)
    );
}

#[test]
fn every_chunk_type_is_read() {
    for (code, kind) in [
        (0, ChunkType::User),
        (1, ChunkType::TrackingDelta),
        (2, ChunkType::TrackingSnapshot),
    ] {
        assert_eq!(
            ChunkHeader::decode(&with(&hex(CHUNK), 1, &[code]))
                .unwrap()
                .kind,
            kind
        );
        assert_eq!(kind.code(), code);
    }
}

#[test]
fn a_damaged_chunk_header_is_refused() {
    let bytes = hex(CHUNK);
    let decode = |bytes: &[u8]| problem(ChunkHeader::decode(bytes));
    assert_eq!(
        decode(&bytes[..47]),
        (
            47,
            FormatProblem::Length {
                expected: 48,
                got: 47
            }
        )
    );
    assert_eq!(
        decode(&[]),
        (
            0,
            FormatProblem::Length {
                expected: 48,
                got: 0
            }
        )
    );
    assert_eq!(
        decode(&with(&bytes, 0, &[0x60])),
        (0, FormatProblem::Magic([0x60, 1, 2, 3]))
    );
    assert_eq!(
        decode(&with(&bytes, 0, &[0x51])),
        (0, FormatProblem::Version(1))
    );
    let unknown = FormatProblem::UnknownValue {
        field: "chunk type",
        value: 3,
    };
    assert_eq!(decode(&with(&bytes, 1, &[3])), (1, unknown));
}

#[test]
fn a_segment_starts_with_its_magic() {
    assert_eq!(SEGMENT_HEADER.to_vec(), hex("4f53494c 00000001"));
    assert_eq!(check_segment_header(&SEGMENT_HEADER), Ok(()));
    let check = |bytes: &[u8]| problem(check_segment_header(bytes));
    assert_eq!(check(&SEGMENT_HEADER[..7]).0, 7);
    assert_eq!(
        check(b"OSIF\0\0\0\x01"),
        (0, FormatProblem::Magic(*b"OSIF"))
    );
    assert_eq!(check(b"OSIL\0\0\0\x02"), (4, FormatProblem::Version(2)));
}

// --- Fragments ---------------------------------------------------------------------------------------------------------------------

#[test]
fn a_fragment_object_is_header_chunks_and_index() {
    assert_eq!(OBJECT_HEADER.to_vec(), hex("4f534946 00000001"));
    assert_eq!(object_len(1_000, 3), 8 + 1_000 + 60);
    assert_eq!(object_len(1 << 32, 262_144), 8 + (1 << 32) + 5_242_880);
    assert_eq!(index_len(2), 40);
    assert_eq!(check_object_header(&OBJECT_HEADER), Ok(()));
    assert_eq!(problem(check_object_header(b"OSIF")).0, 4);
    assert_eq!(problem(check_object_header(b"OSIL\0\0\0\x01")).0, 0);
    let version = (4, FormatProblem::Version(0x0100_0000));
    assert_eq!(problem(check_object_header(b"OSIF\x01\0\0\0")), version);
}

#[test]
fn an_index_record_has_20_bytes() {
    let record = IndexRecord {
        chunk_id: Offset(1),
        timestamp: TimestampMs(-1),
        position: 0x0102_0304,
    };
    let bytes = hex("0000000000000001 ffffffffffffffff 01020304");
    assert_eq!(record.encode().to_vec(), bytes);
    assert_eq!(bytes.len(), INDEX_RECORD_SIZE);
    assert_eq!(IndexRecord::decode(&record.encode()), record);
}

#[test]
fn an_index_ascends_from_position_zero() {
    let record = |chunk_id, position| IndexRecord {
        chunk_id: Offset(chunk_id),
        timestamp: TimestampMs(0),
        position,
    };
    let index = |records: &[IndexRecord]| {
        decode_index(
            &records
                .iter()
                .flat_map(|record| record.encode())
                .collect::<Vec<u8>>(),
        )
    };
    let good = [record(5, 0), record(7, 60), record(9, 200)];
    assert_eq!(index(&good), Ok(good.to_vec()));
    assert_eq!(index(&[]), Ok(vec![]));
    assert_eq!(
        problem(decode_index(&[0; 19])),
        (
            19,
            FormatProblem::Length {
                expected: 20,
                got: 19
            }
        )
    );
    assert_eq!(problem(index(&[record(5, 1)])).0, 16);
    let same = FormatProblem::NotAscending {
        previous: 5,
        next: 5,
    };
    assert_eq!(problem(index(&[record(5, 0), record(5, 60)])), (20, same));
    let back = FormatProblem::NotAscending {
        previous: 60,
        next: 60,
    };
    assert_eq!(
        problem(index(&[record(5, 0), record(7, 60), record(9, 60)])),
        (56, back)
    );
}

// --- Manifests ---------------------------------------------------------------------------------------------------------------------

const ENTRY: &str = "0102030405060708 090a0b0c0d0e0f10 1112131415161718 00 191a1b1c1d 1e1f2021";

#[test]
fn an_entry_has_34_bytes() {
    let entry = Entry {
        first_offset: Offset(0x0102_0304_0506_0708),
        first_timestamp: TimestampMs(0x090a_0b0c_0d0e_0f10),
        last_timestamp: TimestampMs(0x1112_1314_1516_1718),
        kind: EntryKind::Fragment,
        size: 0x0019_1a1b_1c1d,
        uid: Uid(0x1e1f_2021),
    };
    assert_eq!(entry.encode().to_vec(), hex(ENTRY));
    assert_eq!(hex(ENTRY).len(), ENTRY_SIZE);
    assert_eq!(Entry::decode(&entry.encode()), Ok(entry));
    let largest = Entry {
        size: (1 << 40) - 1,
        first_timestamp: TimestampMs(-1),
        ..entry
    };
    assert_eq!(Entry::decode(&largest.encode()), Ok(largest));
}

#[test]
fn entries_are_read_one_by_one_and_not_judged_together() {
    let mut rows = tens(0, 3);
    rows.reverse();
    let bytes = encode_entries(&rows);
    assert_eq!(
        decode_entries(&bytes),
        Ok(rows.into_iter().collect::<Entries>())
    );
    assert_eq!(problem(decode_entries(&bytes[..67])).0, 67);
    let unknown = FormatProblem::UnknownValue {
        field: "entry kind",
        value: 4,
    };
    assert_eq!(
        problem(decode_entries(&with(&bytes, 34 + 24, &[4]))),
        (58, unknown)
    );
}

const ROOT: &str = "4f534952 00000001 000000000000000a 000000000000001e
                    0000000000000064 00000000000000be 0000000000000007d0
                    000000000000000a 0000000000000064 00000000000000be 00 00000003e8 0000000a
                    0000000000000014 00000000000000c8 0000000000000122 00 00000003e8 00000014";

#[test]
fn a_root_is_a_header_of_49_bytes_and_entries() {
    let manifest = manifest_of(&[(10, 20), (20, 30)], 0);
    let bytes = encode_root(&manifest).unwrap();
    assert_eq!(bytes, hex(ROOT));
    assert_eq!(bytes.len(), MANIFEST_HEADER_SIZE + 2 * ENTRY_SIZE);
    assert_eq!(decode_root(&bytes), Ok(manifest));
}

#[test]
fn the_revision_is_not_stored() {
    let manifest = manifest_of(&[(10, 20), (20, 30)], 9);
    let read = decode_root(&encode_root(&manifest).unwrap()).unwrap();
    assert_eq!(read.revision, Revision(0));
    assert_eq!(
        Manifest {
            revision: Revision(9),
            ..read
        },
        manifest
    );
}

#[test]
fn an_empty_root_is_a_header() {
    let bytes = encode_root(&Manifest::default()).unwrap();
    assert_eq!(
        bytes,
        hex("4f534952 00000001 0000000000000000 0000000000000000
             ffffffffffffffff ffffffffffffffff 000000000000000000")
    );
    assert_eq!(decode_root(&bytes), Ok(Manifest::default()));
}

#[test]
fn a_root_is_not_made_of_bytes_that_are_no_entries() {
    let header = Header {
        first_offset: Offset(0),
        next_offset: Offset(10),
        first_timestamp: TimestampMs(0),
        first_last_timestamp: TimestampMs(0),
        total_size: 0,
    };
    let mut entries = [0; 2 * ENTRY_SIZE];
    assert!(encode_root_of(&header, &entries).is_ok());
    let (at, found) = problem(encode_root_of(&header, &entries[1..]));
    assert!(at == 67 && matches!(found, FormatProblem::Length { .. }));
    entries[ENTRY_SIZE + 24] = 4;
    let (at, found) = problem(encode_root_of(&header, &entries));
    assert!(at == 34 + 24 && matches!(found, FormatProblem::UnknownValue { .. }));
}

#[test]
fn the_total_size_has_70_bits() {
    let largest = Manifest {
        total_size: (1 << 70) - 1,
        ..Manifest::default()
    };
    let bytes = encode_root(&largest).unwrap();
    assert_eq!(bytes[40..], hex("3fffffffffffffffff"));
    assert_eq!(decode_root(&bytes), Ok(largest.clone()));
    let larger = Manifest {
        total_size: 1 << 70,
        ..largest
    };
    let too_large = FormatProblem::TooLarge {
        field: "total size",
        value: 1 << 70,
    };
    assert_eq!(problem(encode_root(&larger)), (40, too_large));
    assert!(!larger.is_well_formed());
    for byte in [0x40, 0x80] {
        let (at, found) = problem(decode_root(&with(&bytes, 40, &[byte])));
        assert!(at == 40 && matches!(found, FormatProblem::NotZero(_)));
    }
}

#[test]
fn a_root_begins_inside_its_first_group() {
    let mut manifest = altered(&manifest_of(&[(10, 20), (20, 30)], 0), |entries| {
        entries[0].kind = EntryKind::Group
    });
    manifest.first_offset = Offset(15);
    assert_eq!(
        decode_root(&encode_root(&manifest).unwrap()),
        Ok(manifest.clone())
    );
    manifest.first_offset = Offset(20);
    assert_eq!(problem(decode_root(&encode_root(&manifest).unwrap())).0, 8);
}

#[test]
fn a_damaged_root_is_refused_with_the_place_of_the_damage() {
    let bytes = hex(ROOT);
    let decode = |bytes: &[u8]| problem(decode_root(bytes));
    assert_eq!(
        decode(&[]),
        (
            0,
            FormatProblem::Length {
                expected: 49,
                got: 0
            }
        )
    );
    assert_eq!(
        decode(&bytes[..48]),
        (
            48,
            FormatProblem::Length {
                expected: 49,
                got: 48
            }
        )
    );
    assert_eq!(
        decode(&bytes[..100]),
        (
            100,
            FormatProblem::Length {
                expected: 117,
                got: 100
            }
        )
    );
    let long = [bytes.clone(), vec![0]].concat();
    assert_eq!(
        decode(&long),
        (
            118,
            FormatProblem::Length {
                expected: 151,
                got: 118
            }
        )
    );
    assert_eq!(
        decode(&with(&bytes, 0, b"OSIG")),
        (0, FormatProblem::Magic(*b"OSIG"))
    );
    assert_eq!(
        decode(&with(&bytes, 7, &[2])),
        (4, FormatProblem::Version(2))
    );
    let kind = FormatProblem::UnknownValue {
        field: "entry kind",
        value: 9,
    };
    assert_eq!(decode(&with(&bytes, 49 + 24, &[9])), (73, kind));
    let repeated = FormatProblem::NotAscending {
        previous: 10,
        next: 10,
    };
    assert_eq!(decode(&with(&bytes, 49 + 34 + 7, &[10])), (83, repeated));
    let back = FormatProblem::NotAscending {
        previous: 10,
        next: 9,
    };
    assert_eq!(decode(&with(&bytes, 49 + 34 + 7, &[9])), (83, back));
    assert_eq!(
        decode(&with(&bytes, 8 + 7, &[11])).0,
        8,
        "first offset inside a fragment"
    );
    assert_eq!(
        decode(&with(&bytes, 8 + 7, &[31])).0,
        8,
        "first offset beyond next offset"
    );
    assert_eq!(
        decode(&with(&bytes, 16 + 7, &[20])).0,
        16,
        "next offset inside the entries"
    );
}

#[test]
fn groups_have_the_roots_header_with_magics_of_their_own() {
    for (kind, magic) in [
        (EntryKind::Group, "4f534947"),
        (EntryKind::KiloGroup, "4f53494b"),
        (EntryKind::MegaGroup, "4f53494d"),
    ] {
        let bytes = encode_group(kind, &[entry(10, 20)]).unwrap();
        let rest = "00000001 000000000000000a 0000000000000000
                    0000000000000064 0000000000000000 000000000000000000
                    000000000000000a 0000000000000064 00000000000000be 00 00000003e8 0000000a";
        assert_eq!(bytes, [hex(magic), hex(rest)].concat());
        let group = decode_group(&bytes).unwrap();
        assert_eq!((group.kind, group.entries), (kind, vec![entry(10, 20)]));
    }
}

#[test]
fn there_is_no_group_of_nothing_and_none_of_the_kind_of_fragments() {
    assert!(encode_group(EntryKind::Fragment, &tens(0, 2)).is_err());
    assert!(encode_group(EntryKind::Group, &[]).is_err());
    let header = &encode_group(EntryKind::Group, &tens(0, 1)).unwrap()[..49];
    assert_eq!(
        problem(decode_group(header)),
        (
            49,
            FormatProblem::Length {
                expected: 83,
                got: 49
            }
        )
    );
}

#[test]
fn a_damaged_group_is_refused_with_the_place_of_the_damage() {
    let bytes = encode_group(EntryKind::KiloGroup, &tens(1, 3)).unwrap();
    let decode = |bytes: &[u8]| problem(decode_group(bytes));
    assert_eq!(decode(&bytes[..10]).0, 10);
    assert_eq!(decode(&bytes[..bytes.len() - 1]).0, 116);
    assert_eq!(
        decode(&with(&bytes, 0, b"OSIR")),
        (0, FormatProblem::Magic(*b"OSIR"))
    );
    assert_eq!(
        decode(&with(&bytes, 4, &[1])),
        (4, FormatProblem::Version(0x0100_0001))
    );
    assert_eq!(decode(&with(&bytes, 15, &[9])).0, 8);
    assert_eq!(decode(&with(&bytes, 23, &[1])).0, 16);
    assert_eq!(decode(&with(&bytes, 31, &[9])).0, 24);
    assert_eq!(decode(&with(&bytes, 39, &[1])).0, 32);
    assert_eq!(decode(&with(&bytes, 48, &[1])).0, 40);
    assert_eq!(decode(&with(&bytes, 49 + 34 + 7, &[10])).0, 83);
}

// --- History -----------------------------------------------------------------------------------------------------------------------

#[test]
fn a_history_segment_carries_its_name_and_checksum() {
    let run = RunId::parse("run.1").unwrap();
    let bytes = history::encode(&run, 7, b"123456789");
    let expected = "4f534948 00000001 00000005 72756e2e31 0000000000000007 0000000000000009
                    cbf43926 313233343536373839";
    assert_eq!(bytes, hex(expected));
    let segment = HistorySegment {
        run,
        seq: 7,
        crc: 0xcbf4_3926,
        payload: b"123456789",
    };
    assert_eq!(history::decode(&bytes), Ok(segment));
}

#[test]
fn an_empty_history_segment_is_one() {
    let run = RunId::parse("r").unwrap();
    let bytes = history::encode(&run, 0, b"");
    assert_eq!(history::decode(&bytes).unwrap().payload, b"");
}

#[test]
fn a_damaged_history_segment_is_refused_with_the_place_of_the_damage() {
    let bytes = history::encode(&RunId::parse("run.1").unwrap(), 7, b"123456789");
    let decode = |bytes: &[u8]| problem(history::decode(bytes));
    assert_eq!(
        decode(&bytes[..11]),
        (
            11,
            FormatProblem::Length {
                expected: 12,
                got: 11
            }
        )
    );
    assert_eq!(
        decode(&bytes[..30]),
        (
            30,
            FormatProblem::Length {
                expected: 37,
                got: 30
            }
        )
    );
    assert_eq!(
        decode(&bytes[..45]),
        (
            45,
            FormatProblem::Length {
                expected: 46,
                got: 45
            }
        )
    );
    assert_eq!(decode(&[&bytes[..], b"0"].concat()).0, 47);
    assert_eq!(
        decode(&with(&bytes, 3, b"R")),
        (0, FormatProblem::Magic(*b"OSIR"))
    );
    assert_eq!(
        decode(&with(&bytes, 7, &[0])),
        (4, FormatProblem::Version(0))
    );
    let huge = FormatProblem::Length {
        expected: 12 + 0xffff_ffff + 20,
        got: 46,
    };
    assert_eq!(decode(&with(&bytes, 8, &[0xff; 4])), (46, huge));
    assert_eq!(decode(&with(&bytes, 25, &[0xff; 8])).0, 46);
    assert_eq!(
        decode(&with(&bytes, 14, b"/")),
        (14, FormatProblem::InvalidText("run id"))
    );
    assert_eq!(
        decode(&with(&bytes, 15, &[0xff])),
        (15, FormatProblem::InvalidText("run id"))
    );
    let (at, found) = decode(&with(&bytes, 40, b"x"));
    assert!(
        at == 33
            && matches!(
                found,
                FormatProblem::Checksum {
                    stored: 0xcbf4_3926,
                    ..
                }
            )
    );
}

#[test]
fn an_object_that_is_there_is_kept_only_where_it_is_the_same() {
    let run = RunId::parse("r").unwrap();
    let bytes = history::encode(&run, 7, b"123456789");
    let crc = 0xcbf4_3926;
    let same = Existing::AlreadyPresent {
        stored_size: bytes.len() as u64,
    };
    assert_eq!(judge_existing(&bytes, &run, 7, crc), same);
    assert_eq!(judge_existing(&bytes, &run, 8, crc), Existing::Replace);
    assert_eq!(judge_existing(&bytes, &run, 7, crc + 1), Existing::Replace);
    let other = RunId::parse("s").unwrap();
    assert_eq!(judge_existing(&bytes, &other, 7, crc), Existing::Replace);
    assert_eq!(judge_existing(&bytes[..9], &run, 7, crc), Existing::Replace);
}
