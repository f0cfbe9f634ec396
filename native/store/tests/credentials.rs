//! Credentials that come from the environment. The environment belongs to the whole process, so the store runs in a child: this very
//! test program, told to run one test.

mod support;

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use stream_s3_s3local::{Action, Fault, Operation};
use stream_s3_store::{
    Body, Credentials, ErrorKind, Failure, ObjectStore, PutOptions, S3Settings, S3Store,
};
use support::*;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

const ENDPOINT: &str = "STREAM_S3_TEST_ENDPOINT";
const CASE: &str = "STREAM_S3_TEST_CASE";

/// A place that hands out credentials, as containers have it, and counts how often.
async fn issuer() -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!(
        "http://{}/credentials",
        listener.local_addr().expect("an address")
    );
    let asked = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&asked);
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            let mut head = vec![0; 16_384];
            assert!(stream.read(&mut head).await.expect("a request") > 0);
            counted.fetch_add(1, Ordering::SeqCst);
            let body = r#"{"AccessKeyId": "s3local", "SecretAccessKey": "s3local-secret", "Token": "t", "Expiration": "2099-01-01T00:00:00Z"}"#;
            let len = body.len();
            let answer = format!(
                "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {len}\r\n\r\n{body}"
            );
            stream.write_all(answer.as_bytes()).await.expect("sent");
        }
    });
    (url, asked)
}

/// Runs `case` in a child that finds no credentials but those at `url`.
async fn run_child(case: &str, endpoint: &str, url: Option<&str>) {
    let home = TempDir::new().expect("a folder");
    let mut child = Command::new(std::env::current_exe().expect("this program"));
    child
        .args(["--exact", "child", "--nocapture"])
        .env_clear()
        .env("HOME", home.path())
        .env("AWS_EC2_METADATA_DISABLED", "true")
        .env(ENDPOINT, endpoint)
        .env(CASE, case)
        .stdin(Stdio::null());
    if let Some(url) = url {
        child.env("AWS_CONTAINER_CREDENTIALS_FULL_URI", url);
    }
    let ended = tokio::task::spawn_blocking(move || child.output())
        .await
        .expect("no panic")
        .expect("it runs");
    assert!(
        ended.status.success(),
        "{}{}",
        String::from_utf8_lossy(&ended.stdout),
        String::from_utf8_lossy(&ended.stderr)
    );
}

/// Does nothing unless it is run by one of the tests below.
#[tokio::test]
async fn child() {
    let (Ok(endpoint), Ok(case)) = (std::env::var(ENDPOINT), std::env::var(CASE)) else {
        return;
    };
    let store = S3Store::open(S3Settings {
        credentials: Credentials::Chain,
        ..settings(&endpoint)
    })
    .expect("a store");
    let put = || {
        store.put(
            "k",
            Body::Bytes(Bytes::from_static(b"x")),
            PutOptions::default(),
        )
    };
    if case == "none" {
        let error = put().await.expect_err("no credentials");
        assert_eq!(
            (error.kind, &error.failure),
            (ErrorKind::Invalid, &Failure::Setting("access_key_id")),
            "{error}"
        );
        return;
    }
    put().await.expect("stored");
    put().await.expect("stored");
    // The server calls the third one's credentials expired.
    let error = put().await.expect_err("expired");
    assert_eq!(
        (error.kind, &error.failure),
        (ErrorKind::Transient, &Failure::ExpiredToken),
        "{error}"
    );
    put().await.expect("stored");
}

#[tokio::test]
async fn credentials_are_looked_for_once_and_again_when_they_have_expired() {
    let server = Server::start().await;
    let expired = Action::Status {
        status: 400,
        code: "ExpiredToken".to_owned(),
    };
    server
        .local
        .faults()
        .add(Fault::new(Operation::Put, expired).after(2).times(1));
    let (url, asked) = issuer().await;
    run_child("expired", server.local.endpoint(), Some(&url)).await;
    assert_eq!(asked.load(Ordering::SeqCst), 2);
    assert_eq!(server.local.counters().of(Operation::Put).requests, 4);
}

#[tokio::test]
async fn without_credentials_the_setting_is_named() {
    let server = Server::start().await;
    run_child("none", server.local.endpoint(), None).await;
    assert_eq!(server.local.counters().of(Operation::Put).requests, 0);
}
