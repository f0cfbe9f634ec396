//! What an operator reads when a store cannot be used: whole sentences.

mod support;

use std::time::Duration;

use stream_s3_s3local::{Action, Fault, Operation, Options, S3Local};
use stream_s3_store::{
    Credentials, ErrorKind, Failure, ObjectStore, S3Settings, S3Store, StoreError,
};
use support::raw::{refusal, server};
use support::*;
use tempfile::TempDir;

async fn probe(settings: S3Settings) -> StoreError {
    let store = S3Store::open(settings).expect("a store");
    store.probe("rabbitmq").await.expect_err("not usable")
}

fn credentials(access_key_id: &str, secret_key: &str) -> Credentials {
    Credentials::Static {
        access_key_id: access_key_id.to_owned(),
        secret_key: secret_key.to_owned(),
        session_token: None,
    }
}

fn assert_says(error: &StoreError, kind: ErrorKind, failure: &Failure, sentence: &str) {
    assert_eq!(error.message, sentence);
    assert_eq!((error.kind, &error.failure), (kind, failure));
}

#[tokio::test]
async fn of_a_missing_bucket() {
    let local = Server::start().await;
    let at = local.local.endpoint();
    let error = probe(S3Settings {
        bucket: "absent".to_owned(),
        ..local.settings()
    })
    .await;
    let sentence = format!(
        "list s3://absent/rabbitmq at {at} was answered with 404 NoSuchBucket: The specified bucket does not exist \
         (create the bucket, or correct the setting bucket)"
    );
    assert_says(&error, ErrorKind::NotFound, &Failure::Http(404), &sentence);
}

#[tokio::test]
async fn of_credentials_that_do_not_fit() {
    let local = Server::start().await;
    let at = local.local.endpoint();
    let error = probe(S3Settings {
        credentials: credentials("s3local", "wrong"),
        ..local.settings()
    })
    .await;
    let sentence = format!(
        "list s3://bucket/rabbitmq at {at} was answered with 403 SignatureDoesNotMatch \
         (secret_key does not belong to access_key_id)"
    );
    assert_says(&error, ErrorKind::Invalid, &Failure::Http(403), &sentence);
    let error = probe(S3Settings {
        credentials: credentials("stranger", "wrong"),
        ..local.settings()
    })
    .await;
    let sentence = format!(
        "list s3://bucket/rabbitmq at {at} was answered with 403 InvalidAccessKeyId: The AWS Access Key Id you provided \
         does not exist in our records. (the store does not know this access_key_id)"
    );
    assert_says(&error, ErrorKind::Invalid, &Failure::Http(403), &sentence);
}

/// A probe's object has a random name, so what is compared comes before and after it.
#[tokio::test]
async fn of_a_permission_that_is_missing() {
    let local = Server::start().await;
    let denied = Action::Status {
        status: 403,
        code: "AccessDenied".to_owned(),
    };
    let hint = |op, action| {
        format!(
            " was answered with 403 AccessDenied: as ordered by a fault (the credentials need the IAM action {action}){op}"
        )
    };
    for (op, what, kms, advice) in [
        (
            Operation::List,
            "list s3://bucket/rabbitmq at ",
            false,
            hint("", "s3:ListBucket"),
        ),
        (
            Operation::Put,
            "put s3://bucket/rabbitmq/probe-",
            false,
            hint("", "s3:PutObject"),
        ),
        (
            Operation::Get,
            "get s3://bucket/rabbitmq/probe-",
            false,
            hint("", "s3:GetObject"),
        ),
        (
            Operation::MultiDelete,
            "delete s3://bucket/ at ",
            false,
            hint("", "s3:DeleteObject"),
        ),
        (
            Operation::Put,
            "put s3://bucket/rabbitmq/probe-",
            true,
            hint(
                " (and, on the key kms_key_id, kms:GenerateDataKey)",
                "s3:PutObject",
            ),
        ),
        (
            Operation::Get,
            "get s3://bucket/rabbitmq/probe-",
            true,
            hint(" (and, on the key kms_key_id, kms:Decrypt)", "s3:GetObject"),
        ),
        (
            Operation::List,
            "list s3://bucket/rabbitmq at ",
            true,
            hint("", "s3:ListBucket"),
        ),
    ] {
        local.local.faults().clear();
        local.local.faults().add(Fault::new(op, denied.clone()));
        let error = probe(S3Settings {
            kms_key_id: kms.then(|| "key-1".to_owned()),
            ..local.settings()
        })
        .await;
        assert!(error.message.starts_with(what), "{op:?}: {error}");
        assert!(error.message.ends_with(&advice), "{op:?}: {error}");
        assert_eq!(
            (error.kind, &error.failure),
            (ErrorKind::Invalid, &Failure::Http(403))
        );
    }
}

#[tokio::test]
async fn of_an_endpoint_that_cannot_be_reached() {
    let at = format!("http://{}", nobody());
    let error = probe(settings(&at)).await;
    let sentence = format!(
        "list s3://bucket/rabbitmq at {at}: no connection: tcp connect error: Connection refused (os error 111) \
         (is endpoint right, and is the store up?)"
    );
    assert_says(
        &error,
        ErrorKind::Transient,
        &Failure::Connection,
        &sentence,
    );
    let error = probe(settings("http://no-such-host.invalid")).await;
    assert_eq!(
        (error.kind, &error.failure),
        (ErrorKind::Transient, &Failure::Connection)
    );
    // What the resolver says differs from machine to machine.
    assert!(
        error.message.starts_with(
            "list s3://bucket/rabbitmq at http://no-such-host.invalid: no connection: dns error: "
        ) && error
            .message
            .ends_with(" (is endpoint right, and is the store up?)"),
        "{error}"
    );
}

/// A listener whose queue is full drops what else comes, as a firewall does.
#[tokio::test]
async fn of_an_endpoint_behind_which_packets_vanish() {
    let hole = support::black_hole();
    let at = format!("http://{}", hole.address);
    let begun = std::time::Instant::now();
    let error = probe(settings(&at)).await;
    assert!(
        begun.elapsed() < Duration::from_secs(8),
        "{:?}",
        begun.elapsed()
    );
    assert_eq!(
        (error.kind, &error.failure),
        (ErrorKind::Transient, &Failure::Timeout),
        "{error}"
    );
    assert_eq!(
        error.message,
        format!(
            "list s3://bucket/rabbitmq at {at}: no connection in time: HTTP connect timeout occurred after 5s (is endpoint right, and is the store up?)"
        )
    );
}

#[tokio::test]
async fn of_a_certificate_that_is_not_trusted() {
    let (local, trusting) = Server::with_tls().await;
    let at = local.local.endpoint();
    S3Store::open(trusting.clone())
        .expect("a store")
        .probe("rabbitmq")
        .await
        .expect("usable");
    let elsewhere = TempDir::new().expect("a folder");
    let (_, renewed) = certificate(&elsewhere, "127.0.0.1");
    // The second one is an authority of the same name with another key.
    for (ca_file, why) in [(None, "UnknownIssuer"), (Some(renewed), "BadSignature")] {
        let error = probe(S3Settings {
            ca_file,
            ..trusting.clone()
        })
        .await;
        let sentence = format!(
            "list s3://bucket/rabbitmq at {at}: no connection: TLS handshake failed: invalid peer certificate: {why} \
             (set ca_file to the authority that issued the store's certificate)"
        );
        assert_says(
            &error,
            ErrorKind::Transient,
            &Failure::Connection,
            &sentence,
        );
    }
}

#[tokio::test]
async fn of_a_certificate_for_another_host() {
    let dir = TempDir::new().expect("a folder");
    let (tls, ca_file) = certificate(&dir, "store.example");
    let local = S3Local::start(Options {
        tls: Some(tls),
        ..Options::new(dir.path().join("data"), BUCKET)
    })
    .await
    .expect("a server");
    let error = probe(S3Settings {
        ca_file: Some(ca_file),
        ..settings(local.endpoint())
    })
    .await;
    assert!(
        error
            .message
            .ends_with(" (the store's certificate is for another host than endpoint names)"),
        "{error}"
    );
}

#[tokio::test]
async fn of_https_where_the_store_speaks_plain_http() {
    let local = Server::start().await;
    let at = format!("https://{}", local.local.address());
    let error = probe(settings(&at)).await;
    let sentence = format!(
        "list s3://bucket/rabbitmq at {at}: no connection: TLS handshake failed: received corrupt message of type InvalidContentType \
         (what answers there does not speak TLS: should endpoint begin with http://?)"
    );
    assert_says(
        &error,
        ErrorKind::Transient,
        &Failure::Connection,
        &sentence,
    );
}

#[tokio::test]
async fn of_a_bucket_in_another_region() {
    let document = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>PermanentRedirect</Code><Message>Use another \
                    endpoint.</Message><Endpoint>bucket.s3.eu-west-1.amazonaws.com</Endpoint><Bucket>bucket</Bucket></Error>";
    let len = document.len();
    let (at, _) = server(format!(
        "HTTP/1.1 301 Moved Permanently\r\nx-amz-bucket-region: eu-west-1\r\nContent-Length: {len}\r\n\r\n{document}"
    ))
    .await;
    let error = probe(settings(&at)).await;
    let sentence = format!(
        "list s3://bucket/rabbitmq at {at} was answered with 301 PermanentRedirect: Use another endpoint. (set region to eu-west-1)"
    );
    assert_says(&error, ErrorKind::Invalid, &Failure::Http(301), &sentence);
    let (at, _) = server(refusal(
        400,
        "<Error><Code>AuthorizationHeaderMalformed</Code><Message>The region is wrong</Message><Region>eu-west-1</Region></Error>",
    ))
    .await;
    let error = probe(settings(&at)).await;
    let sentence = format!(
        "list s3://bucket/rabbitmq at {at} was answered with 400 AuthorizationHeaderMalformed: The region is wrong (set region to eu-west-1)"
    );
    assert_says(&error, ErrorKind::Invalid, &Failure::Http(400), &sentence);
}

#[tokio::test]
async fn of_a_clock_that_is_wrong() {
    let (at, _) = server(refusal(
        403,
        "<Error><Code>RequestTimeTooSkewed</Code><Message>The difference is too large.</Message>\
         <RequestTime>20260101T000000Z</RequestTime><ServerTime>2026-01-01T01:00:00Z</ServerTime></Error>",
    ))
    .await;
    let error = probe(settings(&at)).await;
    let sentence = format!(
        "list s3://bucket/rabbitmq at {at} was answered with 403 RequestTimeTooSkewed: The difference is too large. \
         (set this machine's clock: at the store it was 2026-01-01T01:00:00Z)"
    );
    assert_says(&error, ErrorKind::Transient, &Failure::ClockSkew, &sentence);
}

/// Whoever may not delete is told so, again and again, and does not fill the bucket meanwhile.
#[tokio::test]
async fn of_deletes_that_are_denied_is_always_the_same_and_about_the_same_objects() {
    let local = Server::start().await;
    let denied = Action::Status {
        status: 403,
        code: "AccessDenied".to_owned(),
    };
    local
        .local
        .faults()
        .add(Fault::new(Operation::DeleteKey, denied));
    let store = local.store();
    let first = store.probe("rabbitmq").await.expect_err("denied").message;
    assert!(
        first.starts_with("delete s3://bucket/rabbitmq/probe-"),
        "{first}"
    );
    for _ in 0..3 {
        let again = store.probe("rabbitmq").await.expect_err("denied");
        assert_eq!(again.message, first);
    }
    // One that was stored, and none of those that the store refused for their checksum.
    assert_eq!(keys(&store, "", 10).await.len(), 1);
}
