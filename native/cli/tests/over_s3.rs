//! The same commands over the S3 protocol, against a server that checks signatures and can be told to fail.

mod support;

use std::path::PathBuf;

use stream_s3_s3local::fault::{Action, Fault, Operation};
use stream_s3_s3local::{Options, S3Local};
use support::{Bucket, Ran, SECOND, stream_s3};

/// A server over a bucket.
async fn serve(bucket: &Bucket) -> S3Local {
    let dir: PathBuf = bucket.dir().parent().unwrap().to_owned();
    S3Local::start(Options::new(dir, support::BUCKET))
        .await
        .unwrap()
}

/// Runs the command against a server.
async fn run(server: &S3Local, secret: &str, arguments: &[&str]) -> Ran {
    let store = [
        "--bucket",
        support::BUCKET,
        "--endpoint",
        server.endpoint(),
        "--access-key-id",
        "s3local",
        "--secret-key",
        secret,
    ];
    let arguments: Vec<String> = store
        .iter()
        .chain(arguments)
        .map(ToString::to_string)
        .collect();
    let run = move || stream_s3(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    tokio::task::spawn_blocking(run).await.unwrap()
}

const SECRET: &str = "s3local-secret";

#[tokio::test]
async fn streams_are_listed_inspected_and_verified() {
    let bucket = Bucket::grouped(1);
    let server = serve(&bucket).await;
    assert_eq!(run(&server, SECRET, &["streams"]).await.out, "demo\n");
    let inspected = run(&server, SECRET, &["inspect", "demo", "--fragments"]).await;
    assert_eq!((inspected.status, inspected.err.as_str()), (0, ""));
    let verified = run(&server, SECRET, &["verify", "demo"]).await;
    assert_eq!(
        verified.verdict(),
        "verify: ok, 4 fragments, 12 chunks, 60 records, 1680 bytes"
    );
    assert_eq!(verified.status, 0);
}

#[tokio::test]
async fn an_index_that_is_not_there_is_shown_as_such() {
    let bucket = Bucket::flat(2);
    bucket.damage(SECOND, |bytes| bytes.truncate(428));
    let server = serve(&bucket).await;
    let ran = run(&server, SECRET, &["inspect", "demo", "--fragments"]).await;
    assert!(
        ran.out
            .contains("unreadable: no index: the object ends before byte 428"),
        "{}{}",
        ran.out,
        ran.err
    );
    assert_eq!(ran.status, 1);
}

#[tokio::test]
async fn a_store_that_fails_for_a_while_is_asked_again() {
    let bucket = Bucket::flat(2);
    let server = serve(&bucket).await;
    server.faults().add(
        Fault::new(
            Operation::Get,
            Action::Status {
                status: 503,
                code: "SlowDown".to_owned(),
            },
        )
        .on(SECOND)
        .times(2),
    );
    let ran = run(&server, SECRET, &["verify", "demo"]).await;
    assert_eq!((ran.status, ran.err.as_str()), (0, ""), "{}", ran.out);
}

#[tokio::test]
async fn an_answer_that_ends_early_is_asked_for_again_and_no_finding() {
    let bucket = Bucket::flat(2);
    let server = serve(&bucket).await;
    let truncated = Action::Truncate { after_bytes: 100 };
    server
        .faults()
        .add(Fault::new(Operation::Get, truncated).on(SECOND).times(1));
    let ran = run(&server, SECRET, &["verify", "demo"]).await;
    assert_eq!((ran.status, ran.err.as_str()), (0, ""), "{}", ran.out);
}

#[tokio::test]
async fn a_wrong_secret_is_named_as_a_matter_of_credentials() {
    let bucket = Bucket::flat(1);
    let server = serve(&bucket).await;
    let ran = run(&server, "another", &["verify", "demo"]).await;
    assert_eq!((ran.status, ran.out.as_str()), (2, ""));
    assert!(
        ran.err.contains("SignatureDoesNotMatch") && ran.err.contains("check the credentials"),
        "{}",
        ran.err
    );
}

#[tokio::test]
async fn a_bucket_that_is_not_there_is_named() {
    let bucket = Bucket::flat(1);
    let server = serve(&bucket).await;
    let store = [
        "--bucket",
        "nowhere",
        "--endpoint",
        server.endpoint(),
        "--access-key-id",
        "s3local",
        "--secret-key",
        SECRET,
    ];
    let arguments: Vec<String> = store
        .iter()
        .chain(&["streams"])
        .map(ToString::to_string)
        .collect();
    let run = move || stream_s3(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    let ran = tokio::task::spawn_blocking(run).await.unwrap();
    assert_eq!((ran.status, ran.out.as_str()), (2, ""));
    assert!(
        ran.err.contains("nowhere") && ran.err.contains("check --bucket, --endpoint and --prefix"),
        "{}",
        ran.err
    );
}
