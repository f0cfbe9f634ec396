//! `adopt`: which root is named, and what is said of those that are not.

mod support;

use support::{Bucket, ROOT, SIZE, manifest};

/// A root of a later epoch than the bucket's own.
const LATER: &str = "rabbitmq/stream/demo/metadata/root.4.00000001.manifest";

#[test]
fn the_newest_root_is_named_with_the_call_that_adopts_it() {
    let ran = Bucket::grouped(1).run(&["adopt", "demo"]);
    assert_eq!(ran.status, 0, "{}", ran.err);
    assert!(
        ran.out.starts_with(&format!(
            "root    {ROOT}\nrange   offsets [15, 75)\ntotal   1680 bytes in 4 fragments, 3 groups\nwhy     it is the newest: "
        )),
        "{}",
        ran.out
    );
    let call =
        "rabbitmqctl eval 'rabbitmq_stream_s3:adopt(<<\"demo\">>, #{root => {3, 16#0a1b2c3d}}).'";
    assert!(ran.out.contains(call), "{}", ran.out);
}

#[test]
fn a_root_of_a_later_epoch_that_lists_what_is_not_there_is_passed_over() {
    let bucket = Bucket::flat(2);
    let mut lost = bucket.fragments.clone();
    lost[1].uid.0 = 0xff;
    bucket.put_root(LATER, &manifest(0, 30, lost, u128::from(2 * SIZE)));
    let ran = bucket.run(&["adopt", "demo", "--json"]);
    assert_eq!(ran.status, 0, "{}", ran.err);
    let document = &ran.documents()[0];
    assert_eq!(document["ok"], true);
    assert_eq!(document["root"]["key"], ROOT);
    assert_eq!(document["root"]["next_offset"], 30);
    assert_eq!(document["passed_over"][0]["key"], LATER);
    assert_eq!(
        document["passed_over"][0]["why"],
        "its fragment at offset 15 is not there"
    );
}

#[test]
fn a_named_root_that_is_damaged_is_refused_though_there_is_another() {
    let bucket = Bucket::flat(2);
    bucket.put(LATER, b"no root at all");
    let ran = bucket.run(&["adopt", "demo", "--root", "4.00000001"]);
    assert_eq!(ran.status, 1);
    assert!(
        ran.out
            .starts_with(&format!("wrong: {LATER}: it cannot be read: ")),
        "{}",
        ran.out
    );
    assert!(
        ran.out
            .ends_with("adopt: stream demo has no root that could be adopted\n"),
        "{}",
        ran.out
    );
}

#[test]
fn a_stream_that_is_not_there_has_nothing_to_adopt() {
    let ran = Bucket::flat(1).run(&["adopt", "other"]);
    assert_eq!(ran.status, 1, "{}", ran.err);
}
