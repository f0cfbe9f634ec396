//! Keys: how they are built, and what is told from them.

#![allow(clippy::disallowed_methods)]

use stream_s3_core::key::{self, ParsedKey, Prefix, RunId, StreamId};
use stream_s3_core::manifest::EntryKind;
use stream_s3_core::units::{Epoch, Offset, Uid};

fn names() -> (Prefix, StreamId) {
    (
        Prefix::parse("a/b").unwrap(),
        StreamId::parse("__st1_17").unwrap(),
    )
}

#[test]
fn keys_sort_by_offset_and_name_their_kind() {
    let (prefix, stream) = names();
    let (at, uid) = (Offset(1_024), Uid(0xab));
    let keys = [
        (
            key::fragment(&prefix, &stream, at, uid),
            "a/b/stream/__st1_17/data/00000000000000001024.000000ab.fragment",
        ),
        (
            key::root(&prefix, &stream, Epoch(12), uid),
            "a/b/stream/__st1_17/metadata/root.12.000000ab.manifest",
        ),
        (
            key::group(&prefix, &stream, EntryKind::Group, at, uid),
            "a/b/stream/__st1_17/metadata/00000000000000001024.000000ab.group",
        ),
        (
            key::group(&prefix, &stream, EntryKind::KiloGroup, at, uid),
            "a/b/stream/__st1_17/metadata/00000000000000001024.000000ab.kgroup",
        ),
        (
            key::group(&prefix, &stream, EntryKind::MegaGroup, at, uid),
            "a/b/stream/__st1_17/metadata/00000000000000001024.000000ab.mgroup",
        ),
        (
            key::history_segment(&prefix, &RunId::parse("r.1").unwrap(), u64::MAX),
            "a/b/history/r.1/18446744073709551615.segment",
        ),
    ];
    for (built, expected) in keys {
        assert_eq!(built, expected);
        assert_eq!(key::parse(&prefix, &built).unwrap().to_key(&prefix), built);
    }
    assert_eq!(key::stream_prefix(&prefix, &stream), "a/b/stream/__st1_17/");
    assert_eq!(key::streams_prefix(&prefix), "a/b/stream/");
    assert_eq!(Prefix::default().as_str(), "rabbitmq");
}

#[test]
fn an_entry_of_fragment_kind_has_a_fragments_key() {
    let (prefix, stream) = names();
    assert_eq!(
        key::entry(&prefix, &stream, EntryKind::Fragment, Offset(1), Uid(2)),
        key::fragment(&prefix, &stream, Offset(1), Uid(2))
    );
}

#[test]
fn a_key_that_was_never_built_is_nothing() {
    let prefix = Prefix::default();
    for name in [
        "",
        "stream",
        "stream/s",
        "stream/s/data",
        "stream/s/data/",
        "stream/s/data/00000000000000000001.0000000a.fragment/x",
        "stream/s/data/00000000000000000001.0000000A.fragment",
        "stream/s/data/00000000000000000001.000000a.fragment",
        "stream/s/data/0000000000000000001.0000000a.fragment",
        "stream/s/data/+0000000000000000001.0000000a.fragment",
        "stream/s/data/99999999999999999999.0000000a.fragment",
        "stream/s/data/00000000000000000001.0000000a.group",
        "stream/s/metadata/00000000000000000001.0000000a.fragment",
        "stream/s/metadata/00000000000000000001.0000000a.ggroup",
        "stream/s/metadata/root.01.0000000a.manifest",
        "stream/s/metadata/root.+1.0000000a.manifest",
        "stream/s/metadata/root.1.0000000a",
        "stream/s/metadata/root.1.2.0000000a.manifest",
        "stream/../data/00000000000000000001.0000000a.fragment",
        "stream/a.b/data/00000000000000000001.0000000a.fragment",
        "history/../00000000000000000001.segment",
        "history/r/1.segment",
        "history/r/00000000000000000001.segment/x",
        "other/s/data/00000000000000000001.0000000a.fragment",
    ] {
        assert_eq!(
            key::parse(&prefix, &format!("rabbitmq/{name}")),
            None,
            "{name}"
        );
    }
    assert_eq!(
        key::parse(
            &prefix,
            "rabbit/stream/s/data/00000000000000000001.0000000a.fragment"
        ),
        None
    );
    let good = "rabbitmq/stream/s/data/00000000000000000001.0000000a.fragment";
    assert!(matches!(
        key::parse(&prefix, good),
        Some(ParsedKey::Fragment {
            first_offset: Offset(1),
            uid: Uid(10),
            ..
        })
    ));
}

#[test]
fn names_that_could_leave_their_place_are_refused() {
    let long = "x".repeat(256);
    for bad in [
        "",
        ".",
        "..",
        "a/b",
        "a b",
        "a.b",
        "ä",
        "a\0",
        "a\n",
        "a%",
        long.as_str(),
    ] {
        assert!(StreamId::parse(bad).is_err(), "{bad:?}");
    }
    for good in ["a", "__st1_1795962989599376068", "A-Z=_09", &long[..255]] {
        assert_eq!(StreamId::parse(good).unwrap().as_str(), good);
    }
    for bad in ["", ".", "..", "a/b", "a b", long.as_str()] {
        assert!(RunId::parse(bad).is_err(), "{bad:?}");
    }
    for good in ["a.b", "...", ".a"] {
        assert!(RunId::parse(good).is_ok(), "{good:?}");
    }
    for bad in [
        "",
        "/",
        "/a",
        "a/",
        "a//b",
        "a/../b",
        "./a",
        "a b",
        "a\\b",
        &"x".repeat(513),
    ] {
        assert!(Prefix::parse(bad).is_err(), "{bad:?}");
    }
    for good in ["rabbitmq", "a/b/c", "a.b-c_d=e"] {
        assert!(Prefix::parse(good).is_ok(), "{good:?}");
    }
    let error = StreamId::parse("ab/c").unwrap_err();
    assert_eq!(
        (error.at, error.to_string().as_str()),
        (2, "stream id, byte 2: invalid stream id")
    );
}
