//! `export`: what comes out is what went in, and damage is named.

mod support;

use std::fs;

use support::{Bucket, FIRST, OFFSETS, SECOND, TIME, record};

/// Records with a length before each, as `export` writes them.
fn prefixed(offsets: impl Iterator<Item = u64>) -> Vec<u8> {
    let mut all = Vec::new();
    for record in offsets.map(record) {
        all.extend_from_slice(&(record.len() as u32).to_be_bytes());
        all.extend_from_slice(&record);
    }
    all
}

/// Exports with these options, and expects status and records.
fn assert_exported(bucket: &Bucket, options: &[&str], offsets: impl Iterator<Item = u64>) {
    let ran = bucket.run(&[&["export", "demo"], options].concat());
    assert_eq!(ran.status, 0, "{}", ran.err);
    // The records of these buckets are digits, and lengths below 128 are text as well.
    assert_eq!(
        ran.out.as_bytes(),
        prefixed(offsets),
        "{options:?} {}",
        ran.err
    );
}

#[test]
fn all_records_are_written_in_order_also_from_groups() {
    assert_exported(&Bucket::flat(4), &[], 0..4 * OFFSETS);
    assert_exported(&Bucket::grouped(0), &[], 0..5 * OFFSETS);
    // What retention has taken is no damage.
    assert_exported(&Bucket::grouped(1), &[], OFFSETS..5 * OFFSETS);
    assert_exported(
        &Bucket::grouped(2),
        &["--from", "3"],
        2 * OFFSETS..5 * OFFSETS,
    );
}

#[test]
fn a_range_of_offsets_may_begin_and_end_inside_chunks() {
    let bucket = Bucket::grouped(0);
    for (from, to) in [(0, 75), (1, 2), (14, 16), (17, 44), (30, 31), (74, 75)] {
        let options = ["--from", &from.to_string(), "--to", &to.to_string()];
        assert_exported(&bucket, &options, from..to);
    }
    assert_exported(&bucket, &["--from", "75"], 0..0);
}

#[test]
fn a_range_of_time_is_one_of_chunks() {
    // The chunk at an offset has that offset as its milliseconds behind TIME, and five records.
    let bucket = Bucket::flat(4);
    for (since, until, offsets) in [
        (0, 60, 0..60),
        (1, 60, 5..60),
        (15, 20, 15..20),
        (16, 31, 20..35),
        (56, 90, 0..0),
    ] {
        let since = (TIME + since).to_string();
        let until = (TIME + until).to_string();
        assert_exported(&bucket, &["--since", &since, "--until", &until], offsets);
    }
    assert_exported(&bucket, &["--since", "2023-11-14T22:13:20.030Z"], 30..60);
    assert_exported(
        &bucket,
        &[
            "--since",
            "2023-11-14T23:13:20.030+01:00",
            "--from",
            "41",
            "--to",
            "43",
        ],
        41..43,
    );
}

#[test]
fn json_lines_carry_offset_and_timestamp() {
    let ran = Bucket::flat(1).run(&["export", "demo", "--json", "--from", "7", "--to", "9"]);
    let lines = ran.documents();
    assert_eq!(lines.len(), 2);
    assert_eq!(lines[0]["offset"], 7);
    assert_eq!(lines[0]["timestamp"], TIME + 5);
    // Ten digits, no AMQP message.
    assert_eq!(lines[0]["raw"], "MDAwMDAwMDAwNw==");
    assert!(
        ran.err.contains("export: 2 records, 20 bytes"),
        "{}",
        ran.err
    );
}

#[test]
fn a_file_is_made_once_and_added_to_on_request() {
    let bucket = Bucket::flat(2);
    let file = bucket.dir().parent().unwrap().join("records");
    let name = file.to_str().unwrap();
    let export =
        |options: &[&str]| bucket.run(&[&["export", "demo", "-o", name], options].concat());
    let ran = export(&["--to", "7"]);
    assert_eq!((ran.status, ran.out.as_str()), (0, ""));
    assert!(ran.err.contains("go on with --from 7"), "{}", ran.err);
    let again = export(&[]);
    assert_eq!(again.status, 2);
    assert!(again.err.contains("--append"), "{}", again.err);
    assert_eq!(export(&["--from", "7", "--append"]).status, 0);
    assert_eq!(fs::read(&file).unwrap(), prefixed(0..2 * OFFSETS));
}

#[test]
fn a_damaged_chunk_ends_it_and_one_may_go_on_behind() {
    let bucket = Bucket::flat(4);
    // The second chunk of the second fragment: offsets 20 to 24.
    bucket.damage(SECOND, |bytes| bytes[8 + 140 + 48 + 16 + 3] ^= 1);
    let ran = bucket.run(&["export", "demo"]);
    assert_eq!(ran.status, 1);
    assert_eq!(ran.out.as_bytes(), prefixed(0..20));
    for part in [
        "from offset 20 on",
        SECOND,
        "checksum",
        "the 20 wanted ones",
        "--from 25",
    ] {
        assert!(ran.err.contains(part), "{part}: {}", ran.err);
    }
    assert_exported(&bucket, &["--from", "25"], 25..60);
}

#[test]
fn a_fragment_that_is_gone_cut_or_another_is_damage() {
    for (change, why) in [
        (None, "there is no such object"),
        (Some(100), "too few"),
        (Some(5), "too few"),
    ] {
        let bucket = Bucket::flat(3);
        match change {
            None => bucket.remove(SECOND),
            Some(len) => bucket.damage(SECOND, |bytes| bytes.truncate(len)),
        }
        let ran = bucket.run(&["export", "demo"]);
        assert_eq!(ran.status, 1, "{}", ran.err);
        assert_eq!(ran.out.as_bytes(), prefixed(0..15));
        assert!(
            ran.err.contains(why) && ran.err.contains("--from 30"),
            "{}",
            ran.err
        );
    }
    let bucket = Bucket::flat(2);
    let other = fs::read(bucket.path(SECOND)).unwrap();
    bucket.put(FIRST, &other);
    let ran = bucket.run(&["export", "demo"]);
    assert_eq!(ran.status, 1);
    assert!(ran.err.contains("offset 15"), "{}", ran.err);
}

#[test]
fn a_group_that_is_gone_is_damage_where_it_is_wanted() {
    let bucket = Bucket::grouped(0);
    bucket.remove("rabbitmq/stream/demo/metadata/00000000000000000030.0000000b.group");
    let ran = bucket.run(&["export", "demo"]);
    assert_eq!(ran.status, 1);
    assert_eq!(ran.out.as_bytes(), prefixed(0..30));
    assert!(
        ran.err.contains(".group: there is no such object"),
        "{}",
        ran.err
    );
    assert!(ran.err.contains("--from 60"), "{}", ran.err);
    assert_exported(&bucket, &["--to", "30"], 0..30);
    assert_exported(&bucket, &["--from", "60"], 60..75);
}

#[test]
fn tracking_chunks_are_no_records() {
    let bucket = Bucket::flat(1);
    // Type 1 of the second chunk.
    bucket.damage(FIRST, |bytes| bytes[8 + 140 + 1] = 1);
    assert_exported(&bucket, &[], (0..5).chain(10..15));
}

#[test]
fn the_source_of_a_restoration_is_a_bucket_or_a_file() {
    let bucket = Bucket::flat(1);
    let ran = bucket.run(&["restore", "--into", "there"]);
    assert_eq!(ran.status, 2);
    let ran = bucket.run(&["restore", "demo", "--input", "x", "--into", "there"]);
    assert_eq!(ran.status, 2);
    // Port 1 of the loopback: nobody listens there.
    let ran = bucket.run(&[
        "restore",
        "demo",
        "--into",
        "there",
        "--broker",
        "127.0.0.1:1",
    ]);
    assert_eq!(ran.status, 2);
    assert!(ran.err.contains("rabbitmq_stream"), "{}", ran.err);
}
