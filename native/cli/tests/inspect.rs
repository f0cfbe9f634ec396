//! `inspect` and `streams`: what is shown, and when it counts as not whole.

mod support;

use support::{Bucket, ROOT, TIME, manifest};

#[test]
fn the_tree_is_shown_level_by_level() {
    let ran = Bucket::grouped(1).run(&["inspect", "demo"]);
    assert_eq!(ran.status, 0, "{}", ran.err);
    let tree: Vec<Vec<&str>> = ran
        .out
        .lines()
        .skip_while(|line| !line.starts_with("tree "))
        .map(|line| line.split_whitespace().collect())
        .collect();
    let shown: Vec<_> = tree[1..]
        .iter()
        .map(|row| (row[0], row[1], row[2], row[3]))
        .collect();
    assert_eq!(
        shown,
        [
            ("kilo-group", "0", "60", "0"),
            ("group", "0", "30", "0"),
            ("fragment", "0", "15", "420"),
            ("fragment", "15", "30", "420"),
            ("group", "30", "60", "0"),
            ("fragment", "30", "45", "420"),
            ("fragment", "45", "60", "420"),
            ("fragment", "60", "75", "420"),
        ]
    );
    assert_eq!(tree[3].last(), Some(&"consumed"));
    assert_eq!(
        tree[4][5..],
        [
            "2023-11-14T22:13:20.015Z",
            "2023-11-14T22:13:20.025Z",
            "00000002"
        ]
    );
    assert!(
        ran.out.contains("range   offsets [15, 75)\n"),
        "{}",
        ran.out
    );
    assert!(
        ran.out
            .contains("total   1680 bytes in 4 fragments, 3 groups\n"),
        "{}",
        ran.out
    );
}

#[test]
fn the_choice_of_the_root_is_shown() {
    let bucket = Bucket::flat(2);
    bucket.put_root(
        "rabbitmq/stream/demo/metadata/root.2.00000001.manifest",
        &manifest(0, 60, vec![bucket.fragments[0]], 420),
    );
    let ran = bucket.run(&["inspect", "demo"]);
    assert!(
        ran.out.contains(&format!(
            "root    {ROOT}\n        one of 2 found; the newest unless --root was given"
        )),
        "{}",
        ran.out
    );
    let named = bucket.run(&["inspect", "demo", "--root", "2.00000001"]);
    assert!(
        named
            .out
            .contains("root    rabbitmq/stream/demo/metadata/root.2.00000001.manifest\n"),
        "{}",
        named.out
    );
}

#[test]
fn chunks_are_counted_where_indexes_are_read() {
    let bucket = Bucket::flat(3);
    bucket.damage(&bucket.key(&bucket.fragments[1]), |bytes| {
        bytes.truncate(100)
    });
    bucket.remove(&bucket.key(&bucket.fragments[2]));
    let ran = bucket.run(&["inspect", "demo", "--fragments", "--json"]);
    let tree = &ran.documents()[0]["tree"];
    assert_eq!(
        (&tree[0]["state"], &tree[0]["chunks"]),
        (&"read".into(), &3.into())
    );
    assert_eq!(
        (&tree[1]["state"], &tree[1]["error"]),
        (
            &"unreadable".into(),
            &"no index: the object ends before byte 428".into()
        )
    );
    assert_eq!(
        (&tree[2]["state"], &tree[2]["error"]),
        (&"unreadable".into(), &"no object".into())
    );
    assert_eq!(ran.status, 1);
}

#[test]
fn the_json_document_has_roots_and_tree() {
    let bucket = Bucket::grouped(0);
    bucket.remove("rabbitmq/stream/demo/metadata/00000000000000000030.0000000b.group");
    let ran = bucket.run(&["inspect", "demo", "--json"]);
    assert_eq!(ran.status, 1);
    let document = ran.documents().remove(0);
    assert_eq!(
        (
            &document["stream"],
            &document["fragments"],
            &document["groups"]
        ),
        (&"demo".into(), &3.into(), &3.into())
    );
    assert_eq!(document["roots"][0]["key"], ROOT);
    assert_eq!(document["roots"][0]["chosen"], true);
    let kilo = &document["tree"][0];
    assert_eq!(
        (&kilo["kind"], &kilo["state"]),
        (&"kilo-group".into(), &"read".into())
    );
    assert_eq!(kilo["entries"][1]["state"], "missing");
    let expected = serde_json::json!({
        "kind": "fragment", "first_offset": 15, "next_offset": 30, "first_timestamp": TIME + 15, "last_timestamp": TIME + 25,
        "size": 420, "uid": "00000002", "key": "rabbitmq/stream/demo/data/00000000000000000015.00000002.fragment", "state": "named"
    });
    assert_eq!(kilo["entries"][0]["entries"][1], expected);
}

#[test]
fn a_root_that_cannot_be_decoded_is_shown_as_such() {
    let bucket = Bucket::unlisted(1);
    bucket.put(ROOT, b"OSIR");
    let ran = bucket.run(&["inspect", "demo"]);
    assert_eq!(ran.status, 1);
    assert!(
        ran.out
            .contains("root    none of those found can be decoded\n"),
        "{}",
        ran.out
    );
    assert!(
        ran.out
            .contains("cannot be decoded: expected 49 bytes, got 4 at byte 4\n"),
        "{}",
        ran.out
    );
}

#[test]
fn streams_are_listed_once_each() {
    let bucket = Bucket::flat(2);
    bucket.put(
        "rabbitmq/stream/demo-2/data/00000000000000000000.00000001.fragment",
        b"",
    );
    bucket.put("rabbitmq/stream/a=b/metadata/root.1.00000001.manifest", b"");
    bucket.put("rabbitmq/history/run.1/00000000000000000001.segment", b"");
    bucket.put("rabbitmq/stream/no key of ours", b"");
    let ran = bucket.run(&["streams"]);
    assert_eq!((ran.status, ran.out.as_str()), (0, "a=b\ndemo\ndemo-2\n"));
    let json = bucket.run(&["streams", "--json"]).documents().remove(0);
    assert_eq!(
        json,
        serde_json::json!({ "streams": ["a=b", "demo", "demo-2"] })
    );
}
