//! What goes wrong with a real S3 connection, and what comes out of it.

mod support;

use std::net::TcpListener as StdListener;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use stream_s3_s3local::{Action, Fault, Operation, Options, S3Local};
use stream_s3_store::{
    Body, Credentials, ErrorKind, Failure, ObjectStore, Part, Precondition, PutOptions, S3Settings,
    S3Store, StoreError,
};
use support::*;

async fn put_fails(store: &S3Store) -> StoreError {
    let content = bytes(300_000);
    store
        .put("k", Body::Bytes(content.clone()), with_crc(&content))
        .await
        .expect_err("fails")
}

fn store_with(server: &Server, access_key_id: &str, secret_key: &str) -> S3Store {
    let credentials = Credentials::Static {
        access_key_id: access_key_id.to_owned(),
        secret_key: secret_key.to_owned(),
        session_token: None,
    };
    S3Store::open(S3Settings {
        credentials,
        ..server.settings()
    })
    .expect("a store")
}

fn status(status: u16, code: &str) -> Action {
    Action::Status {
        status,
        code: code.to_owned(),
    }
}

#[tokio::test]
async fn a_wrong_secret_is_named_and_not_shown() {
    let server = Server::start().await;
    let store = store_with(&server, "s3local", "not-the-secret");
    let refused = store.probe("p").await.expect_err("refused");
    assert_eq!(
        (refused.kind, &refused.failure),
        (ErrorKind::Invalid, &Failure::Http(403))
    );
    assert!(
        refused.message.contains("SignatureDoesNotMatch"),
        "{refused}"
    );
    assert!(refused.message.contains("secret_key"), "{refused}");
    assert!(!format!("{refused:?}").contains("not-the-secret"));
}

#[tokio::test]
async fn a_refusal_is_seen_even_while_a_large_body_is_being_sent() {
    let server = Server::start().await;
    let store = store_with(&server, "s3local", "not-the-secret");
    let content = bytes(20 << 20);
    let refused = store
        .put("k", stream(&content, 1 << 18), PutOptions::default())
        .await
        .expect_err("refused");
    assert_eq!(refused.failure, Failure::Http(403), "{refused}");
}

#[tokio::test]
async fn an_unknown_access_key_is_named() {
    let server = Server::start().await;
    let store = store_with(&server, "stranger", "s");
    let refused = store.probe("p").await.expect_err("refused");
    assert_eq!(refused.kind, ErrorKind::Invalid);
    assert!(refused.message.contains("access_key_id"), "{refused}");
}

#[tokio::test]
async fn a_missing_bucket_is_named() {
    let server = Server::start().await;
    let store = S3Store::open(S3Settings {
        bucket: "absent".to_owned(),
        ..server.settings()
    })
    .expect("a store");
    for error in [
        store.probe("p").await.expect_err("missing"),
        store.get("k", Part::Whole).await.expect_err("missing"),
        store.delete(&["k".to_owned()]).await.expect_err("missing"),
        put_fails(&store).await,
    ] {
        assert_eq!(
            (error.kind, &error.failure),
            (ErrorKind::NotFound, &Failure::Http(404)),
            "{error}"
        );
        assert!(
            error.message.contains("NoSuchBucket") && error.message.contains("s3://absent/"),
            "{error}"
        );
    }
}

#[tokio::test]
async fn an_endpoint_nobody_listens_on_is_named() {
    let port = StdListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .expect("a port")
        .port();
    let store = S3Store::open(settings(&format!("http://127.0.0.1:{port}"))).expect("a store");
    let refused = store.probe("p").await.expect_err("refused");
    assert_eq!(
        (refused.kind, &refused.failure),
        (ErrorKind::Transient, &Failure::Connection)
    );
    assert!(
        refused.message.contains(&format!("127.0.0.1:{port}")),
        "{refused}"
    );
    assert!(
        refused.message.to_lowercase().contains("refused"),
        "{refused}"
    );
}

#[tokio::test]
async fn answers_are_sorted_by_their_code() {
    let server = Server::start().await;
    let store = server.store();
    for (answer, kind, failure) in [
        (
            status(503, "SlowDown"),
            ErrorKind::Transient,
            Failure::Throttled,
        ),
        (
            status(503, "ServiceUnavailable"),
            ErrorKind::Transient,
            Failure::Http(503),
        ),
        (
            status(500, "InternalError"),
            ErrorKind::Transient,
            Failure::Http(500),
        ),
        (
            status(400, "RequestTimeout"),
            ErrorKind::Transient,
            Failure::Timeout,
        ),
        (
            status(403, "RequestTimeTooSkewed"),
            ErrorKind::Transient,
            Failure::ClockSkew,
        ),
        (
            status(400, "ExpiredToken"),
            ErrorKind::Transient,
            Failure::ExpiredToken,
        ),
        (
            status(403, "AccessDenied"),
            ErrorKind::Invalid,
            Failure::Http(403),
        ),
        (status(409, "Odd"), ErrorKind::Invalid, Failure::Http(409)),
        (status(400, "Odd"), ErrorKind::Invalid, Failure::Http(400)),
        (
            Action::ErrorBody {
                code: "InternalError".to_owned(),
            },
            ErrorKind::Transient,
            Failure::Http(500),
        ),
        (
            Action::ErrorBody {
                code: "SlowDown".to_owned(),
            },
            ErrorKind::Transient,
            Failure::Throttled,
        ),
    ] {
        server
            .local
            .faults()
            .add(Fault::new(Operation::Put, answer.clone()).times(1));
        let error = put_fails(&store).await;
        assert_eq!(
            (error.kind, &error.failure),
            (kind, &failure),
            "{answer:?}: {error}"
        );
        server
            .local
            .faults()
            .add(Fault::new(Operation::List, answer.clone()).times(1));
        let error = store.list("p", None, 1).await.expect_err("fails");
        assert_eq!(
            (error.kind, &error.failure),
            (kind, &failure),
            "{answer:?}: {error}"
        );
        server
            .local
            .faults()
            .add(Fault::new(Operation::MultiDelete, answer.clone()).times(1));
        let error = store.delete(&["k".to_owned()]).await.expect_err("fails");
        assert_eq!(
            (error.kind, &error.failure),
            (kind, &failure),
            "{answer:?}: {error}"
        );
    }
    assert!(keys(&store, "", 10).await.is_empty());
}

#[tokio::test]
async fn one_call_is_one_attempt() {
    let server = Server::start().await;
    server
        .local
        .faults()
        .add(Fault::new(Operation::Put, status(503, "SlowDown")));
    put_fails(&server.store()).await;
    assert_eq!(server.local.counters().of(Operation::Put).requests, 1);
}

#[tokio::test]
async fn a_denied_operation_names_its_permission() {
    let server = Server::start().await;
    let store = server.store();
    for (op, action) in [
        (Operation::List, "s3:ListBucket"),
        (Operation::Put, "s3:PutObject"),
        (Operation::Get, "s3:GetObject"),
    ] {
        server.local.faults().clear();
        server
            .local
            .faults()
            .add(Fault::new(op, status(403, "AccessDenied")));
        let denied = store.probe("p").await.expect_err("denied");
        assert!(denied.message.contains(action), "{denied}");
        server.local.faults().clear();
        assert!(keys(&store, "", 10).await.is_empty(), "{op:?}");
    }
    server.local.faults().add(Fault::new(
        Operation::DeleteKey,
        status(403, "AccessDenied"),
    ));
    let denied = store.probe("p").await.expect_err("denied");
    assert!(denied.message.contains("s3:DeleteObject"), "{denied}");
}

#[tokio::test]
async fn a_conflict_on_a_conditional_write_is_transient() {
    let server = Server::start().await;
    server.local.faults().add(Fault::new(
        Operation::Put,
        status(409, "ConditionalRequestConflict"),
    ));
    let put = server
        .store()
        .put("k", Body::Bytes(Bytes::new()), on(Precondition::Absent))
        .await;
    let error = put.expect_err("conflict");
    assert_eq!(
        (error.kind, error.failure),
        (ErrorKind::Transient, Failure::WriteConflict)
    );
}

#[tokio::test]
async fn a_wrong_echo_of_the_checksum_is_noticed() {
    let server = Server::start().await;
    server
        .local
        .faults()
        .add(Fault::new(Operation::Put, Action::WrongChecksum));
    let error = put_fails(&server.store()).await;
    assert_eq!(
        (error.kind, error.failure),
        (ErrorKind::Corrupt, Failure::ChecksumMismatch)
    );
}

#[tokio::test]
async fn broken_connections_are_transient() {
    let server = Server::start().await;
    let store = server.store();
    for action in [
        Action::ResetBefore,
        Action::ResetBody {
            after_bytes: 100_000,
        },
        Action::LostReply,
    ] {
        server
            .local
            .faults()
            .add(Fault::new(Operation::Put, action.clone()).times(1));
        let error = put_fails(&store).await;
        assert_eq!(
            (error.kind, &error.failure),
            (ErrorKind::Transient, &Failure::Connection),
            "{action:?}: {error}"
        );
        let stored = keys(&store, "", 10).await;
        assert_eq!(
            stored.len(),
            usize::from(action == Action::LostReply),
            "{action:?}"
        );
    }
}

#[tokio::test]
async fn a_truncated_answer_is_an_error() {
    let server = Server::start().await;
    let store = server.store();
    let content = bytes(500_000);
    store
        .put("k", Body::Bytes(content), PutOptions::default())
        .await
        .expect("stored");
    server.local.faults().add(
        Fault::new(
            Operation::Get,
            Action::Truncate {
                after_bytes: 200_000,
            },
        )
        .times(1),
    );
    let object = store.get("k", Part::Whole).await.expect("begins well");
    assert_eq!(object.size, 500_000);
    collect(object.body).await.expect_err("is cut off");
    server.local.faults().add(
        Fault::new(
            Operation::Get,
            Action::ResetBody {
                after_bytes: 200_000,
            },
        )
        .times(1),
    );
    // A reset may overtake what was sent before it.
    match store.get("k", Part::Whole).await {
        Ok(object) => collect(object.body)
            .await
            .map(|_| ())
            .expect_err("is cut off"),
        Err(error) => {
            assert_eq!(
                (error.kind, &error.failure),
                (ErrorKind::Transient, &Failure::Connection),
                "{error}"
            );
            std::io::ErrorKind::ConnectionReset.into()
        }
    };
    server.local.faults().add(
        Fault::new(
            Operation::Get,
            Action::ErrorBody {
                code: "InternalError".to_owned(),
            },
        )
        .times(1),
    );
    let error = store
        .get("k", Part::Whole)
        .await
        .map(|_| ())
        .expect_err("no object");
    assert_eq!(error.kind, ErrorKind::Transient);
}

#[tokio::test]
async fn failed_keys_of_a_batch_are_reported() {
    let server = Server::start().await;
    let store = server.store();
    let names: Vec<String> = (0..5).map(|number| format!("k/{number}")).collect();
    for key in &names {
        put(&store, key, "").await;
    }
    server
        .local
        .faults()
        .add(Fault::new(Operation::DeleteKey, status(500, "InternalError")).on("k/3"));
    server
        .local
        .faults()
        .add(Fault::new(Operation::DeleteKey, status(403, "AccessDenied")).on("k/1"));
    let failed = store.delete(&names).await.expect("answered");
    let rows: Vec<_> = failed
        .iter()
        .map(|(key, error)| (key.as_str(), error.kind))
        .collect();
    assert_eq!(
        rows,
        [("k/1", ErrorKind::Invalid), ("k/3", ErrorKind::Transient)]
    );
    assert_eq!(keys(&store, "", 10).await, ["k/1", "k/3"]);
}

#[tokio::test]
async fn a_store_without_batches_deletes_one_by_one() {
    let server = Server::start().await;
    let store = server.store();
    let names: Vec<String> = (0..20).map(|number| format!("k/{number}")).collect();
    for key in &names {
        put(&store, key, "").await;
    }
    server.local.faults().add(Fault::new(
        Operation::MultiDelete,
        status(501, "NotImplemented"),
    ));
    server
        .local
        .faults()
        .add(Fault::new(Operation::Delete, status(503, "SlowDown")).on("k/7"));
    let failed = store.delete(&names).await.expect("answered");
    assert_eq!(failed.len(), 1);
    assert_eq!(
        (failed[0].0.as_str(), &failed[0].1.failure),
        ("k/7", &Failure::Throttled)
    );
    assert_eq!(keys(&store, "", 10).await, ["k/7"]);
    store.delete(&["k/8".to_owned()]).await.expect("answered");
    assert_eq!(
        server.local.counters().of(Operation::MultiDelete).requests,
        1,
        "asked only once"
    );
}

/// Some stores have the call, and choke on what is in it: a key that XML cannot hold, say. Then the next batch may succeed.
#[tokio::test]
async fn a_batch_that_the_store_cannot_read_is_deleted_one_by_one_and_the_next_is_tried_again() {
    let server = Server::start().await;
    let store = server.store();
    let names: Vec<String> = (0..20).map(|number| format!("k/{number}")).collect();
    for key in &names {
        put(&store, key, "").await;
    }
    server
        .local
        .faults()
        .add(Fault::new(Operation::MultiDelete, status(400, "MalformedXML")).times(1));
    assert!(
        store
            .delete(&names[..10])
            .await
            .expect("answered")
            .is_empty()
    );
    assert!(
        store
            .delete(&names[10..])
            .await
            .expect("answered")
            .is_empty()
    );
    let counts = |op| server.local.counters().of(op).requests;
    assert_eq!(counts(Operation::Delete), 10);
    assert_eq!(counts(Operation::MultiDelete), 2);
    assert!(keys(&store, "", 30).await.is_empty());
}

#[tokio::test]
async fn a_store_that_does_not_allow_batches_is_asked_for_one_once() {
    for code in [405, 501] {
        let server = Server::start().await;
        let store = server.store();
        let names: Vec<String> = (0..1200).map(|number| format!("k/{number}")).collect();
        for key in names.iter().step_by(100) {
            put(&store, key, "").await;
        }
        server.local.faults().add(Fault::new(
            Operation::MultiDelete,
            status(code, "MethodNotAllowed"),
        ));
        assert!(store.delete(&names).await.expect("answered").is_empty());
        let counts = |op| server.local.counters().of(op).requests;
        assert_eq!(
            (counts(Operation::MultiDelete), counts(Operation::Delete)),
            (1, 1200)
        );
        assert!(keys(&store, "", 30).await.is_empty());
    }
}

#[tokio::test]
async fn a_batch_has_a_thousand_keys_at_most() {
    let server = Server::start().await;
    let store = server.store();
    for (keys, requests) in [(1000, 1), (1001, 2), (2500, 3)] {
        let before = server.local.counters().of(Operation::MultiDelete).requests;
        let names: Vec<String> = (0..keys).map(|number| format!("k/{number}")).collect();
        assert!(store.delete(&names).await.expect("answered").is_empty());
        let after = server.local.counters().of(Operation::MultiDelete).requests;
        assert_eq!(after - before, requests, "{keys} keys");
    }
}

#[tokio::test]
async fn a_later_batch_that_fails_does_not_hide_the_one_before() {
    let server = Server::start().await;
    let names: Vec<String> = (0..1500).map(|number| format!("k/{number}")).collect();
    server
        .local
        .faults()
        .add(Fault::new(Operation::MultiDelete, status(503, "SlowDown")).after(1));
    let failed = server.store().delete(&names).await.expect("answered");
    assert_eq!(failed.len(), 500);
    assert!(
        failed
            .iter()
            .all(|(_, error)| error.failure == Failure::Throttled)
    );
}

#[tokio::test]
async fn a_dropped_call_leaves_the_store_usable() {
    let server = Server::start().await;
    let store = server.store();
    server
        .local
        .faults()
        .add(Fault::new(Operation::Get, Action::Stall).times(1));
    put(&store, "k", "x").await;
    let stalled =
        tokio::time::timeout(Duration::from_millis(100), store.get("k", Part::Whole)).await;
    assert!(stalled.is_err());
    assert_eq!(read(&store, "k", Part::Whole).await.expect("found"), "x");
}

#[tokio::test]
async fn a_restarted_server_is_found_again() {
    let server = Server::start().await;
    let store = server.store();
    put(&store, "k", "x").await;
    let address = server.local.address();
    server.local.stop().await;
    let gone = store
        .get("k", Part::Whole)
        .await
        .map(|_| ())
        .expect_err("gone");
    assert_eq!(
        (gone.kind, gone.failure),
        (ErrorKind::Transient, Failure::Connection)
    );
    let again = S3Local::start(Options {
        address,
        ..Options::new(server.dir.path(), BUCKET)
    })
    .await
    .expect("restarts");
    assert_eq!(read(&store, "k", Part::Whole).await.expect("found"), "x");
    again.stop().await;
}

#[tokio::test]
async fn slow_bodies_still_arrive() {
    let server = Server::start().await;
    let store = server.store();
    server.local.faults().add(
        Fault::new(
            Operation::Put,
            Action::Slow {
                bytes_per_sec: 1_000_000,
            },
        )
        .times(1),
    );
    let content = bytes(100_000);
    store
        .put("k", stream(&content, 9_000), with_crc(&content))
        .await
        .expect("stored");
    server.local.faults().add(
        Fault::new(
            Operation::Get,
            Action::Slow {
                bytes_per_sec: 1_000_000,
            },
        )
        .times(1),
    );
    let mut pieces = store.get("k", Part::Whole).await.expect("found").body;
    let mut len = 0;
    while let Some(piece) = pieces.next().await {
        len += piece.expect("whole").len();
    }
    assert_eq!(len, 100_000);
}
