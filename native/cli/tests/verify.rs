//! `verify` on trees: roots, groups, and what they say of each other.

mod support;

use stream_s3_core::manifest::EntryKind;
use stream_s3_core::units::{Offset, TimestampMs};
use support::{Bucket, FIRST, OFFSETS, ROOT, SECOND, TIME, manifest};

#[test]
fn a_flat_tree_is_ok() {
    let ran = Bucket::flat(4).run(&["verify", "demo"]);
    assert_eq!(
        ran.verdict(),
        "verify: ok, 4 fragments, 12 chunks, 60 records, 1680 bytes"
    );
    assert!(
        ran.out.contains("\norphans: 0 objects, 0 bytes\n"),
        "{}",
        ran.out
    );
    assert_eq!((ran.status, ran.err.as_str()), (0, ""));
}

#[test]
fn a_tree_of_groups_is_ok() {
    let ran = Bucket::grouped(0).run(&["verify", "demo"]);
    assert_eq!(
        ran.verdict(),
        "verify: ok, 5 fragments, 15 chunks, 75 records, 2100 bytes"
    );
    assert_eq!(ran.status, 0);
}

#[test]
fn what_retention_has_consumed_of_a_group_may_be_gone() {
    let bucket = Bucket::grouped(3);
    bucket.remove("rabbitmq/stream/demo/metadata/00000000000000000000.0000000a.group");
    let ran = bucket.run(&["verify", "demo"]);
    assert_eq!(
        ran.verdict(),
        "verify: ok, 2 fragments, 6 chunks, 30 records, 840 bytes"
    );
    assert_eq!(ran.status, 0);
}

#[test]
fn an_empty_tree_is_ok() {
    let bucket = Bucket::unlisted(0);
    let empty = stream_s3_core::manifest::Manifest::empty_at(Offset(7), Default::default());
    bucket.put_root(ROOT, &empty);
    let ran = bucket.run(&["verify", "demo"]);
    assert_eq!(
        ran.verdict(),
        "verify: ok, 0 fragments, 0 chunks, 0 records, 0 bytes"
    );
    assert_eq!(ran.status, 0);
}

#[test]
fn an_empty_root_with_a_range_is_wrong() {
    let bucket = Bucket::unlisted(0);
    bucket.put_root(ROOT, &manifest(0, 15, Vec::new(), 0));
    bucket.assert_wrong(&[format!(
            "{ROOT}: wrong first offset in the root: expected first offset 15 of a root without fragments, found 0"
        )],
    );
}

#[test]
fn objects_that_the_root_does_not_name_are_no_fault() {
    let bucket = Bucket::flat(2);
    bucket.put(
        "rabbitmq/stream/demo/data/00000000000000000015.000000ff.fragment",
        &[0; 100],
    );
    bucket.put(
        "rabbitmq/stream/demo/metadata/00000000000000000015.000000ff.group",
        &[0; 10],
    );
    bucket.put("rabbitmq/stream/demo/notes.txt", b"x");
    bucket.put(
        "rabbitmq/stream/demo-2/data/00000000000000000015.000000ff.fragment",
        &[0; 100],
    );
    bucket.put_root(
        "rabbitmq/stream/demo/metadata/root.2.00000001.manifest",
        &manifest(0, 15, vec![bucket.fragments[0]], 420),
    );
    let ran = bucket.run(&["verify", "demo"]);
    assert_eq!(ran.status, 0);
    assert!(
        ran.out.contains("\norphans: 4 objects, 194 bytes\n"),
        "{}",
        ran.out
    );
}

#[test]
fn a_fragment_that_the_root_leaves_out_is_a_gap() {
    let bucket = Bucket::flat(3);
    bucket.put_root(
        ROOT,
        &manifest(0, 45, vec![bucket.fragments[0], bucket.fragments[2]], 840),
    );
    let expected = "chunks up to 30, where the tree goes on or ends";
    bucket.assert_wrong(&[format!(
        "{FIRST} (offset 15): offsets are missing: expected {expected}, found chunks up to 15"
    )]);
}

#[test]
fn a_root_that_ends_too_late_or_too_early_is_found() {
    let bucket = Bucket::flat(2);
    for (next, at, what) in [
        (31, 30, "offsets are missing"),
        (29, 29, "offsets are there twice"),
    ] {
        bucket.put_root(ROOT, &manifest(0, next, bucket.fragments.clone(), 840));
        let expected = format!("chunks up to {next}, where the tree goes on or ends");
        bucket.assert_wrong(&[format!(
            "{SECOND} (offset {at}): {what}: expected {expected}, found chunks up to 30"
        )]);
    }
}

#[test]
fn swapped_entries_are_found() {
    let bucket = Bucket::flat(3);
    bucket.damage(ROOT, |bytes| {
        let (head, tail) = bytes[49..].split_at_mut(34);
        head.swap_with_slice(&mut tail[..34]);
    });
    bucket.assert_wrong(&[format!(
            "{ROOT} byte 83: the root cannot be decoded: expected a root, found a damaged one: offset 0 after 15 does not ascend"
        )],
    );
}

#[test]
fn a_wrong_total_size_is_found() {
    let bucket = Bucket::flat(2);
    bucket.put_root(ROOT, &manifest(0, 30, bucket.fragments.clone(), 841));
    bucket.assert_wrong(&[format!(
            "{ROOT}: wrong total size in the root: expected 840 bytes, the sum of its fragments, found 841 bytes"
        )],
    );
}

#[test]
fn a_root_whose_start_is_not_its_oldest_fragment_is_found() {
    let bucket = Bucket::grouped(1);
    let mut root =
        stream_s3_core::manifest::decode_root(&std::fs::read(bucket.path(ROOT)).unwrap()).unwrap();
    root.first_offset = Offset(16);
    root.first_timestamp = TimestampMs(1);
    root.first_last_timestamp = TimestampMs(2);
    bucket.put_root(ROOT, &root);
    let expected = |what, value| {
        format!(
            "wrong {what} in the root: expected {value} as in the oldest surviving fragment, found"
        )
    };
    bucket.assert_wrong(&[
        format!("{ROOT} (offset 15): {} 16", expected("first offset", 15)),
        format!(
            "{ROOT} (offset 15): {} 1",
            expected("first timestamp", TIME + 15)
        ),
        format!(
            "{ROOT} (offset 15): {} 2",
            expected("first-last timestamp", TIME + 25)
        ),
    ]);
}

#[test]
fn a_missing_group_is_found_once() {
    let bucket = Bucket::grouped(0);
    let key = "rabbitmq/stream/demo/metadata/00000000000000000030.0000000b.group";
    bucket.remove(key);
    let kilo = "rabbitmq/stream/demo/metadata/00000000000000000000.0000000c.kgroup";
    bucket.assert_wrong(&[format!(
            "{key} (offset 30): the group is not there: expected a group, as {kilo} says, found no object"
        )],
    );
}

#[test]
fn a_damaged_group_is_found() {
    let bucket = Bucket::grouped(0);
    let key = "rabbitmq/stream/demo/metadata/00000000000000000030.0000000b.group";
    bucket.damage(key, |bytes| bytes.truncate(100));
    bucket.assert_wrong(&[format!(
            "{key} byte 100 (offset 30): the group cannot be decoded: expected a group, found a damaged one: expected 117 bytes, got 100"
        )],
    );
}

#[test]
fn a_group_of_another_kind_is_found() {
    let bucket = Bucket::unlisted(2);
    let mut group = bucket.put_group(EntryKind::Group, 0xa, &bucket.fragments);
    let bytes = std::fs::read(bucket.path(&bucket.key(&group))).unwrap();
    group.kind = EntryKind::KiloGroup;
    let key = bucket.key(&group);
    bucket.put(&key, &bytes);
    bucket.put_root(ROOT, &manifest(0, 30, vec![group], 840));
    bucket.assert_wrong(&[format!(
            "{key} (offset 0): wrong kind of group or entry: expected a kilo-group as its entry says, found a group"
        )],
    );
}

#[test]
fn a_group_with_entries_of_another_kind_is_found() {
    let bucket = Bucket::unlisted(2);
    let kilo = bucket.put_group(EntryKind::KiloGroup, 0xa, &bucket.fragments);
    bucket.put_root(ROOT, &manifest(0, 30, vec![kilo], 840));
    let expected =
        "expected entries of one kind, one below a kilo-group, found a fragment at offset 0";
    bucket.assert_wrong(&[format!(
        "{} (offset 0): wrong kind of group or entry: {expected}",
        bucket.key(&kilo)
    )]);
}

#[test]
fn an_entry_that_does_not_fit_its_group_is_found() {
    let bucket = Bucket::unlisted(2);
    let mut group = bucket.put_group(EntryKind::Group, 0xa, &bucket.fragments);
    group.last_timestamp = TimestampMs(1);
    bucket.put_root(ROOT, &manifest(0, 30, vec![group], 840));
    let wrong = "the group does not fit the entry that names it";
    let expected = format!(
        "{} (offset 0): {wrong}: expected last timestamp {}, found 1 in the entry that names it",
        bucket.key(&group),
        TIME + 25
    );
    bucket.assert_wrong(&[expected]);
}

#[test]
fn a_group_that_reaches_into_what_follows_is_found() {
    let bucket = Bucket::unlisted(3);
    let group = bucket.put_group(EntryKind::Group, 0xa, &bucket.fragments);
    bucket.put_root(
        ROOT,
        &manifest(0, 45, vec![group, bucket.fragments[2]], 1680),
    );
    let ran = bucket.run(&["verify", "demo"]);
    let expected = "expected a last entry that starts below 30, found one that starts at 30";
    assert_eq!(
        ran.wrong()[0],
        format!(
            "{} (offset 0): the group reaches into what follows it: {expected}",
            bucket.key(&group)
        )
    );
    assert_eq!(ran.status, 1);
}

#[test]
fn a_damaged_root_is_found_although_an_older_one_can_be_read() {
    let bucket = Bucket::flat(2);
    let newer = "rabbitmq/stream/demo/metadata/root.4.00000001.manifest";
    bucket.put(newer, b"not a root, but long enough for the header of one");
    bucket.assert_wrong(&[format!(
            "{newer} byte 0: the root cannot be decoded: expected a root, found a damaged one: wrong magic [6e, 6f, 74, 20]"
        )],
    );
    let named = bucket.run(&["verify", "demo", "--root", "3.0a1b2c3d"]);
    assert_eq!((named.status, named.wrong()), (0, vec![]));
}

#[test]
fn a_stream_without_a_root_is_found() {
    let place = "rabbitmq/stream/demo/";
    Bucket::unlisted(1).assert_wrong(&[format!(
        "{place}: no root names the objects of this stream: expected a root object, found none"
    )]);
}

#[test]
fn the_newest_root_is_verified_unless_another_is_named() {
    let bucket = Bucket::flat(3);
    let shorter = manifest(0, 2 * OFFSETS, bucket.fragments[..2].to_vec(), 840);
    bucket.put_root(
        "rabbitmq/stream/demo/metadata/root.3.00000001.manifest",
        &shorter,
    );
    bucket.put_root(
        "rabbitmq/stream/demo/metadata/root.2.00000001.manifest",
        &manifest(0, 60, vec![bucket.fragments[0]], 420),
    );
    assert!(
        bucket
            .run(&["verify", "demo"])
            .verdict()
            .starts_with("verify: ok, 3 fragments,")
    );
    let named = bucket.run(&["verify", "demo", "--root", "3.00000001"]);
    assert!(named.verdict().starts_with("verify: ok, 2 fragments,"));
}

#[test]
fn all_streams_are_verified_one_after_the_other() {
    let bucket = Bucket::flat(2);
    bucket.put(
        "rabbitmq/stream/other/data/00000000000000000000.00000001.fragment",
        &support::fragment(0),
    );
    let ran = bucket.run(&["verify", "--all", "--json"]);
    let documents = ran.documents();
    assert_eq!(documents.len(), 2);
    assert_eq!(
        (
            documents[0]["stream"].as_str(),
            documents[0]["ok"].as_bool()
        ),
        (Some("demo"), Some(true))
    );
    assert_eq!(
        (
            documents[1]["stream"].as_str(),
            documents[1]["ok"].as_bool()
        ),
        (Some("other"), Some(false))
    );
    assert_eq!(ran.status, 1);
}

#[test]
fn the_json_document_has_all_that_the_text_has() {
    let bucket = Bucket::flat(2);
    bucket.remove(SECOND);
    bucket.put("rabbitmq/stream/demo/notes.txt", b"xyz");
    let ran = bucket.run(&["verify", "demo", "--json"]);
    assert_eq!(ran.status, 1);
    let mut document = ran.documents().remove(0);
    let modified = document["roots"][0]["modified_ms"].take();
    assert!(modified.as_i64().is_some_and(|ms| ms > TIME), "{modified}");
    let expected = serde_json::json!({
        "stream": "demo",
        "ok": false,
        "roots": [{
            "key": ROOT, "epoch": 3, "uid": "0a1b2c3d", "modified_ms": null, "chosen": true, "error": null,
            "first_offset": 0, "next_offset": 30, "first_timestamp": TIME, "first_last_timestamp": TIME + 10,
            "total_size": 840, "entries": 2
        }],
        "fragments": 1, "chunks": 3, "records": 15, "bytes": 420,
        "findings": [{
            "kind": "fragment_missing", "key": SECOND, "offset": 15, "byte": null,
            "expected": "a fragment, as its entry says", "found": "no object"
        }],
        "suppressed": 0,
        "orphans": { "objects": 1, "bytes": 3, "fragments": 0, "groups": 0, "roots": 0, "unknown": 1 },
        "notes": []
    });
    assert_eq!(document, expected);
}
