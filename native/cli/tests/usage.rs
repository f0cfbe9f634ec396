//! What a user does wrong, and what the command says then: exit status 2 and a sentence that names the remedy.

mod support;

use std::net::TcpListener;

use support::{Bucket, stream_s3};

/// Runs, and expects a refusal that holds all of `parts`.
fn assert_refused(ran: support::Ran, parts: &[&str]) {
    assert_eq!((ran.status, ran.out.as_str()), (2, ""), "{}", ran.err);
    for part in parts {
        assert!(ran.err.contains(part), "{part:?} is not in {}", ran.err);
    }
    assert!(!ran.err.contains("panicked"), "{}", ran.err);
}

#[test]
fn an_unknown_stream_is_named_with_the_way_to_find_others() {
    for command in ["verify", "inspect"] {
        let ran = Bucket::flat(1).run(&[command, "dem"]);
        assert_refused(
            ran,
            &[
                "stream-s3: there is no stream dem here",
                "rabbitmq/stream/dem/",
                "`stream-s3 streams`",
            ],
        );
    }
}

#[test]
fn a_bad_stream_id_is_refused_before_any_request() {
    for id in ["", "../etc", "a b", "a/b"] {
        assert_refused(Bucket::flat(1).run(&["verify", id]), &["is no stream id"]);
    }
}

#[test]
fn an_unknown_root_is_named_with_the_way_to_find_others() {
    let ran = Bucket::flat(1).run(&["verify", "demo", "--root", "3.00000009"]);
    assert_refused(
        ran,
        &[
            "stream demo has no root 3.00000009",
            "`stream-s3 inspect demo`",
        ],
    );
}

#[test]
fn a_root_in_another_form_is_refused_with_an_example() {
    for root in ["3", "3.9", "x.00000009", "3.0000000g", "3.+0000009"] {
        assert_refused(
            Bucket::flat(1).run(&["verify", "demo", "--root", root]),
            &["such as 3.0a1b2c3d"],
        );
    }
}

#[test]
fn a_missing_directory_is_named() {
    assert_refused(
        stream_s3(&["--fs", "/nowhere/at/all", "streams"]),
        &["--fs /nowhere/at/all: there is no such directory"],
    );
}

#[test]
fn one_store_and_only_one_must_be_named() {
    assert_refused(
        stream_s3(&["streams"]),
        &["either --fs DIR or --bucket NAME"],
    );
    assert_refused(
        stream_s3(&["--fs", "/", "--bucket", "b", "streams"]),
        &["either --fs DIR or --bucket NAME"],
    );
}

#[test]
fn half_a_pair_of_credentials_is_refused() {
    let ran = stream_s3(&[
        "--bucket",
        "b",
        "--endpoint",
        "http://127.0.0.1:1",
        "--access-key-id",
        "id",
        "streams",
    ]);
    assert_refused(ran, &["--access-key-id", "without --secret-key"]);
}

#[test]
fn a_bad_prefix_is_refused() {
    assert_refused(
        Bucket::flat(1).run(&["--prefix", "a//b", "streams"]),
        &["--prefix \"a//b\""],
    );
}

#[test]
fn an_endpoint_that_refuses_connections_is_named_with_a_remedy() {
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let endpoint = format!("http://127.0.0.1:{port}");
    let ran = stream_s3(&[
        "--bucket",
        "b",
        "--endpoint",
        &endpoint,
        "--access-key-id",
        "id",
        "--secret-key",
        "hush-hush",
        "verify",
        "demo",
    ]);
    assert!(!ran.err.contains("hush-hush"), "{}", ran.err);
    assert_refused(ran, &["check that the endpoint is right and reachable"]);
}

#[test]
fn verify_wants_a_stream_or_all_of_them() {
    assert_refused(Bucket::flat(1).run(&["verify"]), &["--all"]);
    assert_refused(
        Bucket::flat(1).run(&["verify", "demo", "--all"]),
        &["cannot be used with"],
    );
}

#[test]
fn verifying_all_of_nothing_is_refused() {
    assert_refused(
        Bucket::unlisted(0).run(&["verify", "--all"]),
        &["no stream under rabbitmq/stream/"],
    );
}

#[test]
fn options_may_stand_before_and_behind_the_command() {
    let bucket = Bucket::flat(1);
    let dir = bucket.dir().to_str().unwrap();
    assert_eq!(
        stream_s3(&["verify", "demo", "--fs", dir, "--quiet"]).status,
        0
    );
    assert_eq!(
        stream_s3(&["--quiet", "--fs", dir, "verify", "demo"]).status,
        0
    );
}
