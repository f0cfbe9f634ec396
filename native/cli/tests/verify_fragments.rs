//! `verify` on fragment objects: one thing is damaged at a time, and exactly that is reported.

mod support;

use stream_s3_core::units::TimestampMs;
use support::{
    Bucket, CHUNK_LEN, FIRST, OBJECT_LEN, ROOT, SECOND, SIZE, TIME, chunk, fragment_of, manifest,
};

#[test]
fn a_flipped_bit_in_the_data_of_a_chunk_is_found() {
    let bucket = Bucket::flat(2);
    bucket.damage(SECOND, |bytes| bytes[8 + 140 + 48 + 16 + 33] ^= 0x10);
    let (header, mut bytes) = chunk(20, 3);
    bytes[48 + 16 + 33] ^= 0x10;
    let found = crc32fast::hash(&bytes[48 + 16..48 + 16 + 70]);
    let expected = format!(
        "{SECOND} byte 148 (offset 20): chunk data does not fit its CRC: expected {:#010x}, found {found:#010x}",
        header.crc
    );
    bucket.assert_wrong(&[expected]);
}

#[test]
fn a_flipped_bit_in_a_chunk_header_is_found() {
    let bucket = Bucket::flat(2);
    bucket.damage(SECOND, |bytes| bytes[8 + 140] ^= 0x10);
    bucket.assert_wrong(&[format!(
            "{SECOND} byte 148 (offset 20): no chunk header: expected a chunk header, found other bytes: wrong magic [40, 00, 00, 05]"
        )],
    );
}

#[test]
fn a_wrong_chunk_id_is_found() {
    let bucket = Bucket::flat(2);
    let chunks = [chunk(15, 3), chunk(21, 3), chunk(26, 3)];
    bucket.put(SECOND, &fragment_of(chunks.into_iter()));
    bucket.assert_wrong(&[
            format!("{SECOND} byte 148 (offset 20): wrong chunk id: expected 20, found 21"),
            format!(
                "{SECOND} (offset 15): wrong timestamp in the entry: expected last timestamp {} as in the entry, found {} in the last chunk",
                TIME + 25,
                TIME + 26
            ),
            format!(
                "{SECOND} (offset 30): offsets are there twice: expected chunks up to 30, where the tree goes on or ends, found chunks up to 31"
            ),
        ],
    );
}

#[test]
fn an_epoch_that_goes_back_is_found() {
    let bucket = Bucket::flat(2);
    bucket.put(
        FIRST,
        &fragment_of([chunk(0, 3), chunk(5, 4), chunk(10, 2)].into_iter()),
    );
    bucket.put(
        SECOND,
        &fragment_of([chunk(15, 1), chunk(20, 1), chunk(25, 1)].into_iter()),
    );
    bucket.assert_wrong(&[
            format!(
                "{FIRST} byte 288 (offset 10): epoch goes back: expected epoch 4 or above, found epoch 2"
            ),
            format!(
                "{SECOND} (offset 15): epoch goes back: expected epoch 2 or above, as in the fragment before, found epoch 1"
            ),
        ],
    );
}

#[test]
fn an_object_cut_off_in_its_data_is_found() {
    let bucket = Bucket::flat(2);
    bucket.damage(FIRST, |bytes| bytes.truncate(200));
    bucket.assert_wrong(&[format!(
        "{FIRST}: wrong object size: expected 428 bytes and 20 for each chunk, found 200 bytes"
    )]);
}

#[test]
fn an_object_cut_off_in_its_index_is_found() {
    for len in [OBJECT_LEN - 1, OBJECT_LEN - 20, 8 + SIZE] {
        let bucket = Bucket::flat(2);
        bucket.damage(FIRST, |bytes| bytes.truncate(len as usize));
        bucket.assert_wrong(&[format!(
            "{FIRST}: wrong object size: expected 488 bytes, found {len} bytes"
        )]);
    }
}

#[test]
fn an_object_with_too_many_bytes_is_found() {
    let bucket = Bucket::flat(2);
    bucket.damage(FIRST, |bytes| bytes.extend_from_slice(&[0; 20]));
    bucket.assert_wrong(&[format!(
        "{FIRST}: wrong object size: expected 488 bytes, found 508 bytes"
    )]);
}

#[test]
fn an_empty_object_is_found() {
    let bucket = Bucket::flat(2);
    bucket.put(FIRST, b"");
    bucket.assert_wrong(&[format!(
        "{FIRST}: wrong object size: expected 428 bytes and 20 for each chunk, found 0 bytes"
    )]);
}

#[test]
fn another_object_header_is_found() {
    let bucket = Bucket::flat(2);
    bucket.damage(FIRST, |bytes| bytes[7] = 2);
    bucket.assert_wrong(&[format!(
        "{FIRST} byte 0: wrong fragment header: expected 4f53494600000001, found 4f53494600000002"
    )]);
}

#[test]
fn a_wrong_index_record_is_found() {
    let bucket = Bucket::flat(2);
    bucket.damage(FIRST, |bytes| bytes[8 + 420 + 20 + 19] += 1);
    let described = |position| format!("chunk 5 at {position}, timestamp {}", TIME + 5);
    let expected = format!(
        "{FIRST} byte 448 (offset 5): wrong index record: expected {}, found {}",
        described(140),
        described(141)
    );
    bucket.assert_wrong(&[expected]);
}

#[test]
fn a_missing_fragment_is_found() {
    let bucket = Bucket::flat(3);
    bucket.remove(SECOND);
    bucket.assert_wrong(&[format!(
            "{SECOND} (offset 15): the fragment is not there: expected a fragment, as its entry says, found no object"
        )],
    );
}

#[test]
fn a_wrong_size_in_an_entry_is_found() {
    let mut entries = Bucket::flat(1).fragments;
    let bucket = Bucket::flat(1);
    entries[0].size = SIZE + 20;
    bucket.put_root(
        ROOT,
        &manifest(0, 15, entries.clone(), u128::from(SIZE + 20)),
    );
    let bounds = "the chunk passes the end of the fragment's data";
    bucket.assert_wrong(&[format!(
            "{FIRST} byte 428 (offset 15): {bounds}: expected a chunk header of 48 bytes, found 20 bytes left of the fragment's data"
        )],
    );
    entries[0].size = SIZE - 1;
    bucket.put_root(ROOT, &manifest(0, 15, entries, u128::from(SIZE - 1)));
    bucket.assert_wrong(&[
            format!(
                "{FIRST} byte 288 (offset 10): {bounds}: expected at most 139 bytes, found {CHUNK_LEN} bytes"
            ),
            format!(
                "{FIRST}: wrong object size: expected 427 bytes and 20 for each chunk, found 488 bytes"
            ),
        ],
    );
}

#[test]
fn wrong_timestamps_in_an_entry_are_found() {
    let bucket = Bucket::flat(2);
    let mut entries = bucket.fragments.clone();
    entries[1].first_timestamp = TimestampMs(5);
    entries[1].last_timestamp = TimestampMs(6);
    bucket.put_root(ROOT, &manifest(0, 30, entries, 840));
    let wrong = "wrong timestamp in the entry: expected";
    bucket.assert_wrong(&[
            format!(
                "{SECOND} byte 8 (offset 15): {wrong} first timestamp 5 as in the entry, found {} in the first chunk",
                TIME + 15
            ),
            format!(
                "{SECOND} (offset 15): {wrong} last timestamp 6 as in the entry, found {} in the last chunk",
                TIME + 25
            ),
        ],
    );
}

#[test]
fn many_faults_in_one_object_are_counted_not_listed() {
    let bucket = Bucket::unlisted(0);
    let object = fragment_of((0..100).map(|place| chunk(place * 5, 3)));
    let mut entry = support::entry(0);
    entry.size = 100 * CHUNK_LEN;
    entry.last_timestamp = TimestampMs(TIME + 495);
    let key = bucket.key(&entry);
    bucket.put(&key, &object);
    bucket.damage(&key, |bytes| {
        let index = 8 + 100 * CHUNK_LEN as usize;
        bytes[index..].fill(0xff);
    });
    let mut root = manifest(0, 500, vec![entry], u128::from(entry.size));
    root.first_last_timestamp = entry.last_timestamp;
    bucket.put_root(ROOT, &root);
    let ran = bucket.run(&["verify", "demo"]);
    assert_eq!(ran.wrong().len(), 17);
    assert_eq!(ran.wrong()[16], "84 more of the same in these objects");
    assert!(
        ran.verdict()
            .starts_with("verify: 100 wrong, 1 fragments, 100 chunks, 500 records, "),
        "{}",
        ran.verdict()
    );
    assert_eq!(ran.status, 1);
}
