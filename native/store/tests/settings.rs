//! Each setting, seen on the wire.

mod support;

use bytes::Bytes;
use stream_s3_s3local::{Operation, Options, S3Local};
use stream_s3_store::{
    Body, Credentials, ErrorKind, Failure, ObjectStore, Part, PutOptions, S3Settings, S3Store,
    StoreError,
};
use support::raw::{Proxy, STORED, server};
use support::*;
use tempfile::TempDir;

async fn put_x(settings: S3Settings) -> Result<(), StoreError> {
    let store = S3Store::open(settings).expect("a store");
    let body = Body::Bytes(Bytes::from_static(b"x"));
    store
        .put("a/k", body, PutOptions::default())
        .await
        .map(|_| ())
}

#[tokio::test]
async fn a_session_token_goes_along_with_each_request_and_is_signed() {
    let (endpoint, seen) = server(STORED).await;
    let credentials = Credentials::Static {
        access_key_id: "AKIDTEMP".to_owned(),
        secret_key: "secret".to_owned(),
        session_token: Some("the-token".to_owned()),
    };
    put_x(S3Settings {
        credentials,
        ..settings(&endpoint)
    })
    .await
    .expect("stored");
    let seen = seen.await.expect("a request");
    assert_eq!(seen.header("x-amz-security-token"), Some("the-token"));
    let authorization = seen.header("authorization").expect("signed");
    assert!(authorization.contains("Credential=AKIDTEMP/"));
    assert!(authorization.contains("x-amz-security-token"));
    assert!(!seen.head.contains("secret"));
}

#[tokio::test]
async fn nothing_is_said_of_what_is_not_set() {
    let (endpoint, seen) = server(STORED).await;
    put_x(settings(&endpoint)).await.expect("stored");
    let seen = seen.await.expect("a request");
    for header in [
        "x-amz-security-token",
        "x-amz-storage-class",
        "x-amz-server-side-encryption",
        "x-amz-server-side-encryption-aws-kms-key-id",
        "x-amz-expected-bucket-owner",
        "x-amz-acl",
        "proxy-authorization",
    ] {
        assert_eq!(seen.header(header), None, "{}", seen.head);
    }
}

/// The owner is checked with every request, not with PUTs alone.
#[tokio::test]
async fn the_expected_owner_of_the_bucket_is_named_in_every_request() {
    for call in ["get", "list", "delete"] {
        let (endpoint, seen) = server("HTTP/1.1 500 Odd\r\nContent-Length: 0\r\n\r\n").await;
        let store = S3Store::open(S3Settings {
            expected_bucket_owner: Some("123456789012".to_owned()),
            ..settings(&endpoint)
        })
        .expect("a store");
        match call {
            "get" => drop(store.get("k", Part::Whole).await.expect_err("500")),
            "list" => drop(store.list("p", None, 1).await.expect_err("500")),
            _ => drop(store.delete(&["k".to_owned()]).await.expect_err("500")),
        }
        let seen = seen.await.expect("a request");
        assert_eq!(
            seen.header("x-amz-expected-bucket-owner"),
            Some("123456789012"),
            "{call}"
        );
    }
}

#[tokio::test]
async fn an_endpoint_gets_the_bucket_in_the_path_unless_it_is_told_otherwise() {
    let (endpoint, seen) = server(STORED).await;
    put_x(settings(&endpoint)).await.expect("stored");
    let seen = seen.await.expect("a request");
    assert!(seen.head.starts_with("PUT /bucket/a/k"), "{}", seen.head);
    assert_eq!(
        Some(&*format!("http://{}", seen.header("host").expect("a host"))),
        Some(&*endpoint)
    );
    let proxy = Proxy::start(Some(canned().await)).await;
    put_x(S3Settings {
        path_style: Some(false),
        proxy: Some(format!("http://{}", proxy.address)),
        ..settings("http://store.example:9000")
    })
    .await
    .expect("stored");
    let head = &proxy.heads()[0];
    assert!(
        head.starts_with("PUT http://bucket.store.example:9000/a/k"),
        "{head}"
    );
    assert!(
        head.contains("host: bucket.store.example:9000\r\n"),
        "{head}"
    );
}

/// Where something listens that stores whatever it gets.
async fn canned() -> std::net::SocketAddr {
    let (endpoint, _) = server(STORED).await;
    let address = endpoint.strip_prefix("http://").expect("a URL");
    address.parse().expect("an address")
}

/// The host is nowhere to be found, so whatever arrives came through the proxy.
#[tokio::test]
async fn all_requests_to_a_plain_endpoint_go_through_the_proxy() {
    let local = Server::start().await;
    let proxy = Proxy::start(Some(local.local.address())).await;
    let store = S3Store::open(S3Settings {
        proxy: Some(format!("http://user:pass%20word@{}", proxy.address)),
        ..settings("http://store.invalid")
    })
    .expect("a store");
    store.probe("p").await.expect("usable");
    assert!(local.local.counters().of(Operation::Put).requests >= 4);
    let heads = proxy.heads();
    assert!(
        heads[0].starts_with("GET http://store.invalid/bucket"),
        "{}",
        heads[0]
    );
    // user:pass word
    assert!(
        heads
            .iter()
            .all(|head| head.contains("proxy-authorization: Basic dXNlcjpwYXNzIHdvcmQ=\r\n")),
        "{heads:?}"
    );
}

/// The proxy sees host and port, and nothing of what is said; the certificate is that of the store.
#[tokio::test]
async fn tls_goes_through_the_proxy_from_end_to_end() {
    let dir = TempDir::new().expect("a folder");
    let (tls, ca_file) = certificate(&dir, "store.invalid");
    let local = S3Local::start(Options {
        tls: Some(tls),
        ..Options::new(dir.path().join("data"), BUCKET)
    })
    .await
    .expect("a server");
    let proxy = Proxy::start(Some(local.address())).await;
    let settings = S3Settings {
        proxy: Some(format!("http://user:pass@{}", proxy.address)),
        ca_file: Some(ca_file),
        ..settings("https://store.invalid:9443")
    };
    put_x(settings.clone()).await.expect("stored");
    let heads = proxy.heads();
    assert_eq!(heads.len(), 1);
    assert!(
        heads[0].starts_with("CONNECT store.invalid:9443 HTTP/1.1\r\n"),
        "{}",
        heads[0]
    );
    assert!(
        heads[0]
            .to_lowercase()
            .contains("proxy-authorization: basic "),
        "{}",
        heads[0]
    );
    assert!(!heads[0].contains("authorization: AWS4"));
}

/// Without an endpoint the store is AWS, in the region of the settings, with the bucket as a host.
#[tokio::test]
async fn a_region_without_an_endpoint_means_aws() {
    let proxy = Proxy::start(None).await;
    let error = put_x(S3Settings {
        endpoint: None,
        region: Some("eu-north-1".to_owned()),
        proxy: Some(format!("http://{}", proxy.address)),
        ..settings("")
    })
    .await
    .expect_err("refused by the proxy");
    let heads = proxy.heads();
    assert!(
        heads[0].starts_with("CONNECT bucket.s3.eu-north-1.amazonaws.com:443 HTTP/1.1\r\n"),
        "{}",
        heads[0]
    );
    assert_eq!(
        (error.kind, &error.failure),
        (ErrorKind::Transient, &Failure::Connection),
        "{error}"
    );
    assert!(error.message.contains("proxy"), "{error}");
}

#[tokio::test]
async fn a_proxy_that_refuses_is_told_from_a_store_that_does() {
    let proxy = Proxy::start(None).await;
    let error = put_x(S3Settings {
        proxy: Some(format!("http://{}", proxy.address)),
        ..settings("http://store.invalid")
    })
    .await
    .expect_err("refused");
    assert_eq!(
        error.message,
        "put s3://bucket/a/k at http://store.invalid was answered with 407 \
         (put the user and password that the proxy wants into proxy)"
    );
    let error = put_x(S3Settings {
        proxy: Some(format!("http://user:hidden@{}", nobody())),
        ..settings("http://store.invalid")
    })
    .await
    .expect_err("no proxy");
    assert_eq!(
        error.message,
        "put s3://bucket/a/k at http://store.invalid: no connection: tcp connect error: Connection refused (os error 111) \
         (is proxy right, and can it reach the store?)"
    );
    assert!(!format!("{error:?}").contains("hidden"));
}
