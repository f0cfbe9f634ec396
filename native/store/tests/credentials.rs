//! Credentials that come from the environment. The environment belongs to the whole process, so the store runs in a child: this very
//! test program, told to run one test.

mod support;

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use stream_s3_s3local::{Action, Fault, Operation};
use stream_s3_store::{
    Body, Credentials, ErrorKind, Failure, ObjectStore, PutOptions, S3Settings, S3Store, StoreError,
};
use support::raw::{Proxy, STORED, server};
use support::*;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

const ENDPOINT: &str = "STREAM_S3_TEST_ENDPOINT";
const CASE: &str = "STREAM_S3_TEST_CASE";
const PROXY: &str = "STREAM_S3_TEST_PROXY";
const PROCESS: &str = "a profile of the shared config files has a credential_process, which is never run, because no program is \
                       started from inside the VM; set access_key_id and secret_key, or give the node a role";

const CONTAINER: &str = "AWS_CONTAINER_CREDENTIALS_FULL_URI";

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

/// A stand-in for the service that takes a web identity and gives credentials for it, and what it was asked.
async fn sts() -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let asked = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&asked);
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            let mut request = Vec::new();
            // The token is the last of the form's fields that are looked at here.
            while !String::from_utf8_lossy(&request).contains("WebIdentityToken=") {
                assert!(stream.read_buf(&mut request).await.expect("a request") > 0);
            }
            seen.lock()
                .expect("no panic")
                .push(String::from_utf8_lossy(&request).into_owned());
            let body = "<AssumeRoleWithWebIdentityResponse xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\">\
                        <AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>s3local</AccessKeyId>\
                        <SecretAccessKey>s3local-secret</SecretAccessKey><SessionToken>t</SessionToken>\
                        <Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></AssumeRoleWithWebIdentityResult>\
                        </AssumeRoleWithWebIdentityResponse>";
            let len = body.len();
            let answer = format!(
                "HTTP/1.1 200 OK\r\nContent-Type: text/xml\r\nConnection: close\r\nContent-Length: {len}\r\n\r\n{body}"
            );
            stream.write_all(answer.as_bytes()).await.expect("sent");
        }
    });
    (url, asked)
}

/// Runs `case` in a child whose home is `home`, and that finds no credentials but those of `env`.
async fn run_child(case: &str, endpoint: &str, home: &Path, env: &[(&str, &str)]) {
    let mut child = Command::new(std::env::current_exe().expect("this program"));
    child
        .args(["--exact", "child", "--nocapture"])
        .env_clear()
        .env("HOME", home)
        .env("AWS_EC2_METADATA_DISABLED", "true")
        .env(ENDPOINT, endpoint)
        .env(CASE, case)
        .envs(env.iter().copied())
        .stdin(Stdio::null());
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
        proxy: std::env::var(PROXY).ok(),
        ..settings(&endpoint)
    })
    .expect("a store");
    let put = || {
        let body = Body::Bytes(Bytes::from_static(b"x"));
        store.put("k", body, PutOptions::default())
    };
    let expired = |error: StoreError| {
        assert_eq!(
            (error.kind, &error.failure),
            (ErrorKind::Transient, &Failure::ExpiredToken),
            "{error}"
        );
    };
    match case.as_str() {
        "works" => drop(put().await.expect("stored")),
        "none" | "process" => {
            let error = put().await.expect_err("no credentials");
            assert_eq!(
                (error.kind, &error.failure),
                (ErrorKind::Invalid, &Failure::Setting("access_key_id")),
                "{error}"
            );
            if case == "process" {
                assert_eq!(
                    error.message,
                    format!("put s3://bucket/k at {endpoint}: {PROCESS}")
                );
            }
        }
        "expired" => {
            put().await.expect("stored");
            put().await.expect("stored");
            // The server calls the third one's credentials expired.
            expired(put().await.expect_err("expired"));
            put().await.expect("stored");
        }
        "file" => {
            expired(put().await.expect_err("expired"));
            // Whoever keeps the file fresh does so now.
            let home = std::env::var("HOME").expect("a home");
            profile(Path::new(&home), "s3local", "s3local-secret");
            put().await.expect("stored");
        }
        other => panic!("no such case: {other}"),
    }
}

/// Writes the shared credentials file.
fn profile(home: &Path, key: &str, secret: &str) {
    std::fs::create_dir_all(home.join(".aws")).expect("a folder");
    let text = format!("[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n");
    std::fs::write(home.join(".aws/credentials"), text).expect("written");
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
    let home = TempDir::new().expect("a folder");
    let env = [(CONTAINER, url.as_str())];
    run_child("expired", server.local.endpoint(), home.path(), &env).await;
    assert_eq!(asked.load(Ordering::SeqCst), 2);
    assert_eq!(server.local.counters().of(Operation::Put).requests, 4);
}

/// The role of a pod: a token in a file, exchanged for credentials, and once more when those have expired.
#[tokio::test]
async fn a_web_identity_is_exchanged_for_credentials_and_again_when_they_have_expired() {
    let server = Server::start().await;
    let expired = Action::Status {
        status: 400,
        code: "ExpiredToken".to_owned(),
    };
    server
        .local
        .faults()
        .add(Fault::new(Operation::Put, expired).after(2).times(1));
    let (url, asked) = sts().await;
    let home = TempDir::new().expect("a folder");
    let token = home.path().join("token");
    std::fs::write(&token, "the-identity").expect("written");
    let env = [
        ("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/tiering"),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", token.to_str().expect("text")),
        ("AWS_ENDPOINT_URL_STS", url.as_str()),
    ];
    run_child("expired", server.local.endpoint(), home.path(), &env).await;
    let asked = asked.lock().expect("no panic");
    assert_eq!(asked.len(), 2, "{asked:?}");
    for request in asked.iter() {
        assert!(
            request.contains("Action=AssumeRoleWithWebIdentity"),
            "{request}"
        );
        assert!(
            request.contains("WebIdentityToken=the-identity"),
            "{request}"
        );
    }
    assert_eq!(server.local.counters().of(Operation::Put).requests, 4);
}

#[tokio::test]
async fn without_credentials_the_setting_is_named() {
    let server = Server::start().await;
    let home = TempDir::new().expect("a folder");
    run_child("none", server.local.endpoint(), home.path(), &[]).await;
    assert_eq!(server.local.counters().of(Operation::Put).requests, 0);
}

#[tokio::test]
async fn credentials_of_the_environment_are_used_with_their_token() {
    let (endpoint, seen) = server(STORED).await;
    let env = [
        ("AWS_ACCESS_KEY_ID", "AKIDENV"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_SESSION_TOKEN", "the-token"),
    ];
    let home = TempDir::new().expect("a folder");
    run_child("works", &endpoint, home.path(), &env).await;
    let seen = seen.await.expect("a request");
    let authorization = seen.header("authorization").expect("signed");
    assert!(
        authorization.contains("Credential=AKIDENV/"),
        "{authorization}"
    );
    assert_eq!(seen.header("x-amz-security-token"), Some("the-token"));
}

#[tokio::test]
async fn a_shared_credentials_file_is_read_again_when_its_token_has_expired() {
    let local = Server::start().await;
    let expired = Action::Status {
        status: 400,
        code: "ExpiredToken".to_owned(),
    };
    local
        .local
        .faults()
        .add(Fault::new(Operation::Put, expired).times(1));
    let home = TempDir::new().expect("a folder");
    profile(home.path(), "stale", "stale");
    run_child("file", local.local.endpoint(), home.path(), &[]).await;
    assert_eq!(local.local.counters().of(Operation::Put).requests, 2);
}

/// A program of the profile's would be started by a fork of the VM. This one would leave a mark.
#[tokio::test]
async fn a_credential_process_is_refused_and_never_started() {
    let local = Server::start().await;
    let home = TempDir::new().expect("a folder");
    let mark = home.path().join("mark");
    std::fs::create_dir(home.path().join(".aws")).expect("a folder");
    let text = format!(
        "[default]\ncredential_process = /bin/sh -c 'touch {}'\n",
        mark.display()
    );
    std::fs::write(home.path().join(".aws/config"), text).expect("written");
    run_child("process", local.local.endpoint(), home.path(), &[]).await;
    assert!(!mark.exists(), "it was started");
    assert_eq!(local.local.counters().of(Operation::Put).requests, 0);
}

/// A proxy is for the store; it could not reach the addresses at which a machine offers its own credentials.
#[tokio::test]
async fn credentials_of_the_machine_are_not_fetched_through_the_proxy() {
    let local = Server::start().await;
    let proxy = Proxy::start(Some(local.local.address())).await;
    let (url, asked) = issuer().await;
    let address = format!("http://{}", proxy.address);
    let env = [(CONTAINER, url.as_str()), (PROXY, address.as_str())];
    let home = TempDir::new().expect("a folder");
    run_child("works", "http://store.invalid", home.path(), &env).await;
    assert_eq!(asked.load(Ordering::SeqCst), 1);
    let heads = proxy.heads();
    assert_eq!(heads.len(), 1, "{heads:?}");
    assert!(
        heads[0].starts_with("PUT http://store.invalid/"),
        "{}",
        heads[0]
    );
}
