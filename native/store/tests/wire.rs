//! What is on the wire, seen by a server that only reads bytes.

mod support;

use base64::Engine;
use bytes::Bytes;
use md5::Digest;
use stream_s3_store::{
    Body, Failure, ObjectStore, Part, Precondition, PutOptions, S3Settings, S3Store,
};
use support::raw::{STORED, server};
use support::*;

#[tokio::test]
async fn a_put_is_plain_of_known_length_and_unsigned_with_the_checksum_in_a_header() {
    for size in [0, 1, 700_000, 3 << 20] {
        let content = bytes(size);
        for body in [Body::Bytes(content.clone()), stream(&content, 50_000)] {
            let (endpoint, seen) = server(STORED).await;
            let store = S3Store::open(settings(&endpoint)).expect("a store");
            let stored = store
                .put("a/k", body, with_crc(&content))
                .await
                .expect("stored");
            assert_eq!(stored.etag.as_deref(), Some("\"tag\""));
            let seen = seen.await.expect("a request");
            assert!(seen.head.starts_with("PUT /bucket/a/k"), "{}", seen.head);
            assert_eq!(
                seen.header("content-length"),
                Some(size.to_string().as_str())
            );
            assert_eq!(
                seen.header("x-amz-content-sha256"),
                Some("UNSIGNED-PAYLOAD")
            );
            assert_eq!(seen.header("x-amz-checksum-crc32").map(str::len), Some(8));
            for absent in [
                "transfer-encoding",
                "content-encoding",
                "x-amz-trailer",
                "x-amz-decoded-content-length",
                "expect",
                "content-md5",
                "if-match",
                "if-none-match",
            ] {
                assert_eq!(seen.header(absent), None, "{}", seen.head);
            }
            assert!(seen.body == content);
        }
    }
}

#[tokio::test]
async fn settings_and_conditions_become_headers() {
    let (endpoint, seen) = server(STORED).await;
    let store = S3Store::open(S3Settings {
        kms_key_id: Some("key-1".to_owned()),
        storage_class: Some("STANDARD_IA".to_owned()),
        expected_bucket_owner: Some("123456789012".to_owned()),
        region: Some("eu-north-1".to_owned()),
        ..settings(&endpoint)
    })
    .expect("a store");
    let options = on(Precondition::Matches("tag".to_owned()));
    store
        .put("k", Body::Bytes(Bytes::from_static(b"x")), options)
        .await
        .expect("stored");
    let seen = seen.await.expect("a request");
    assert_eq!(seen.header("x-amz-server-side-encryption"), Some("aws:kms"));
    assert_eq!(
        seen.header("x-amz-server-side-encryption-aws-kms-key-id"),
        Some("key-1")
    );
    assert_eq!(seen.header("x-amz-storage-class"), Some("STANDARD_IA"));
    assert_eq!(
        seen.header("x-amz-expected-bucket-owner"),
        Some("123456789012")
    );
    assert_eq!(seen.header("if-match"), Some("\"tag\""));
    assert!(
        seen.header("authorization")
            .expect("signed")
            .contains("/eu-north-1/s3/")
    );
}

#[tokio::test]
async fn a_batch_delete_carries_its_md5() {
    let answer = "HTTP/1.1 200 OK\r\nContent-Length: 31\r\n\r\n<DeleteResult></DeleteResult>\n\n";
    let (endpoint, seen) = server(answer).await;
    let store = S3Store::open(settings(&endpoint)).expect("a store");
    assert!(
        store
            .delete(&["k".to_owned()])
            .await
            .expect("deleted")
            .is_empty()
    );
    let seen = seen.await.expect("a request");
    assert!(seen.head.starts_with("POST /bucket"), "{}", seen.head);
    let digest = base64::engine::general_purpose::STANDARD.encode(md5::Md5::digest(&seen.body));
    assert_eq!(seen.header("content-md5"), Some(&*digest));
    // A batch answers with the keys that failed, and with nothing where none did.
    let body = String::from_utf8(seen.body).expect("text");
    assert!(
        body.contains("<Quiet>true</Quiet>") && body.contains("<Key>k</Key>"),
        "{body}"
    );
}

#[tokio::test]
async fn a_range_is_asked_for_as_the_protocol_has_it() {
    for (part, header) in [
        (Part::Range(5..10), "bytes=5-9"),
        (Part::Last(7), "bytes=-7"),
    ] {
        let answer = "HTTP/1.1 206 Partial Content\r\nETag: \"t\"\r\nContent-Range: bytes 1-2/20\r\nContent-Length: 2\r\n\r\nab";
        let (endpoint, seen) = server(answer).await;
        let store = S3Store::open(settings(&endpoint)).expect("a store");
        let wrong = store
            .get("k", part)
            .await
            .expect_err("another part than asked for");
        assert_eq!(wrong.failure, Failure::Http(502));
        assert_eq!(seen.await.expect("a request").header("range"), Some(header));
    }
}

#[tokio::test]
async fn an_answer_that_is_no_store_s_is_no_success() {
    let answer =
        "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 13\r\n\r\n<html></html>";
    let (endpoint, _) = server(answer).await;
    let store = S3Store::open(settings(&endpoint)).expect("a store");
    let content = Bytes::from_static(b"x");
    let error = store
        .put("k", Body::Bytes(content), PutOptions::default())
        .await
        .expect_err("not stored");
    assert_eq!(error.failure, Failure::Http(502), "{error}");
    let (endpoint, _) = server(answer).await;
    let store = S3Store::open(settings(&endpoint)).expect("a store");
    let error = store.list("p", None, 1).await.expect_err("no list");
    assert_eq!(error.failure, Failure::Connection, "{error}");
}
