//! What is counted of requests, beside what a server has seen.

mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use stream_s3_core::key::Prefix;
use stream_s3_s3local::{Action, Fault, Operation as Served};
use stream_s3_store::meter::{ObjectKind, Operation, Outcome, RequestSnapshot};
use stream_s3_store::{
    Body, FsStore, Meter, ObjectStore, Part, Precondition, PutOptions, RequestCounts,
};
use support::*;

const FRAGMENT: &str = "rabbitmq/stream/s/data/00000000000000000007.0000000a.fragment";
const ROOT: &str = "rabbitmq/stream/s/metadata/root.3.0000000b.manifest";

fn meter() -> (Arc<RequestCounts>, Meter) {
    let counts = Arc::new(RequestCounts::default());
    let meter = Meter::new(Arc::clone(&counts), Prefix::default());
    (counts, meter)
}

async fn sends(store: &dyn ObjectStore, key: &str, len: usize) {
    let content = bytes(len);
    // What becomes of it is looked up in the counts.
    let _ = store
        .put(key, stream(&content, 10_000), with_crc(&content))
        .await;
}

fn answer(status: u16, code: &str) -> Action {
    Action::Status {
        status,
        code: code.to_owned(),
    }
}

fn rows(snapshot: &RequestSnapshot) -> BTreeMap<(Operation, Outcome, ObjectKind), u64> {
    snapshot
        .requests
        .iter()
        .map(|(operation, outcome, kind, count)| ((*operation, *outcome, *kind), *count))
        .collect()
}

/// Every histogram holds the requests of its operation, in buckets that only grow.
fn histograms_hold_what_was_counted(snapshot: &RequestSnapshot) {
    for duration in &snapshot.durations {
        let counted: u64 = rows(snapshot)
            .iter()
            .filter(|((operation, _, _), _)| *operation == duration.operation)
            .map(|(_, count)| *count)
            .sum();
        assert_eq!(duration.cumulative.last(), Some(&counted), "{duration:?}");
        assert!(duration.cumulative.is_sorted(), "{duration:?}");
        assert_eq!(duration.sum > 0.0, counted > 0, "{duration:?}");
    }
}

#[tokio::test]
async fn each_request_is_counted_once_by_what_it_was_for_and_how_it_ended() {
    let server = Server::start().await;
    let (counts, meter) = meter();
    let store = server.store().metered(meter);
    sends(&store, FRAGMENT, 70_000).await;
    let faults = server.local.faults();
    for action in [
        answer(503, "SlowDown"),
        answer(500, "InternalError"),
        answer(403, "AccessDenied"),
        Action::WrongChecksum,
    ] {
        faults.add(Fault::new(Served::Put, action).times(1));
        sends(&store, FRAGMENT, 1_000).await;
    }
    put(&store, ROOT, "a root").await;
    let again = store.put(
        ROOT,
        Body::Bytes(Bytes::from_static(b"b")),
        on(Precondition::Absent),
    );
    again.await.expect_err("it is there");
    assert_eq!(
        read(&store, FRAGMENT, Part::Last(10))
            .await
            .expect("read")
            .len(),
        10
    );
    for suffix in ["group", "kgroup", "mgroup"] {
        let key = format!("rabbitmq/stream/s/metadata/00000000000000000001.0000000c.{suffix}");
        store.get(&key, Part::Whole).await.expect_err("not there");
    }
    put(
        &store,
        "rabbitmq/history/run/00000000000000000001.segment",
        "h",
    )
    .await;
    put(&store, "elsewhere", "").await;
    assert_eq!(
        read(&store, "elsewhere", Part::Whole).await.expect("read"),
        ""
    );
    keys(&store, "rabbitmq/", 1000).await;
    // One batch, and one request of its own for a key that no batch can name.
    let odd = "elsewhere\u{1}".to_owned();
    store
        .delete(&[FRAGMENT.to_owned(), odd])
        .await
        .expect("deleted");
    store
        .delete(&[FRAGMENT.to_owned(), ROOT.to_owned()])
        .await
        .expect("deleted");

    let snapshot = counts.snapshot();
    use ObjectKind::{Fragment, Group, History, KiloGroup, MegaGroup, Root, Unknown};
    let expected = [
        ((Operation::Put, Outcome::Ok, Fragment), 1),
        ((Operation::Put, Outcome::Throttled, Fragment), 1),
        ((Operation::Put, Outcome::Transient, Fragment), 1),
        ((Operation::Put, Outcome::Invalid, Fragment), 1),
        ((Operation::Put, Outcome::Corrupt, Fragment), 1),
        ((Operation::Put, Outcome::Ok, Root), 1),
        ((Operation::Put, Outcome::Conflict, Root), 1),
        ((Operation::Put, Outcome::Ok, History), 1),
        ((Operation::Put, Outcome::Ok, Unknown), 1),
        ((Operation::Get, Outcome::Ok, Fragment), 1),
        ((Operation::Get, Outcome::NotFound, Group), 1),
        ((Operation::Get, Outcome::NotFound, KiloGroup), 1),
        ((Operation::Get, Outcome::NotFound, MegaGroup), 1),
        ((Operation::Get, Outcome::Ok, Unknown), 1),
        ((Operation::List, Outcome::Ok, Unknown), 1),
        ((Operation::MultiDelete, Outcome::Ok, Fragment), 1),
        ((Operation::MultiDelete, Outcome::Ok, Unknown), 1),
        ((Operation::Delete, Outcome::Ok, Unknown), 1),
    ];
    assert_eq!(rows(&snapshot), BTreeMap::from(expected));
    for (operation, served) in [
        (Operation::Put, Served::Put),
        (Operation::Get, Served::Get),
        (Operation::List, Served::List),
        (Operation::Delete, Served::Delete),
        (Operation::MultiDelete, Served::MultiDelete),
    ] {
        let counted: u64 = snapshot
            .requests
            .iter()
            .filter(|row| row.0 == operation)
            .map(|row| row.3)
            .sum();
        let seen = server.local.counters().of(served).requests;
        assert_eq!(counted, seen, "{operation:?}");
    }
    assert_eq!(snapshot.bytes_sent, 70_000 + 4 * 1_000 + 6 + 1 + 1);
    assert_eq!(snapshot.bytes_received, 10);
    histograms_hold_what_was_counted(&snapshot);
}

#[tokio::test]
async fn whatever_a_probe_asks_for_is_counted_as_the_probe_s() {
    let server = Server::start().await;
    let (counts, meter) = meter();
    let store = server.store().metered(meter);
    store.probe("rabbitmq").await.expect("a good store");
    let snapshot = counts.snapshot();
    assert!(
        snapshot
            .requests
            .iter()
            .all(|row| row.0 == Operation::Probe),
        "{snapshot:?}"
    );
    let counted: u64 = snapshot.requests.iter().map(|row| row.3).sum();
    let seen = server.local.counters().all();
    let seen: u64 = seen
        .iter()
        .filter(|(operation, _)| *operation != Served::DeleteKey)
        .map(|(_, row)| row.requests)
        .sum();
    assert_eq!(counted, seen);
    // Two conditional writes and a wrong checksum.
    let ended = |outcome| {
        rows(&snapshot)
            .get(&(Operation::Probe, outcome, ObjectKind::Unknown))
            .copied()
    };
    assert_eq!(
        (ended(Outcome::Conflict), ended(Outcome::Corrupt)),
        (Some(2), Some(1))
    );
    histograms_hold_what_was_counted(&snapshot);
}

#[tokio::test]
async fn a_request_that_nobody_waits_for_any_more_is_counted_as_cancelled() {
    let server = Server::start().await;
    let (counts, meter) = meter();
    let store = server.store().metered(meter);
    sends(&store, FRAGMENT, 8 << 20).await;
    let object = store.get(FRAGMENT, Part::Whole).await.expect("an object");
    let mut body = object.body;
    let some = body.next().await.expect("a piece").expect("bytes").len();
    drop(body);
    server
        .local
        .faults()
        .add(Fault::new(Served::List, Action::Stall));
    tokio::time::timeout(Duration::from_millis(50), store.list("", None, 1))
        .await
        .expect_err("no answer");
    let snapshot = counts.snapshot();
    let expected = [
        ((Operation::Put, Outcome::Ok, ObjectKind::Fragment), 1),
        (
            (Operation::Get, Outcome::Cancelled, ObjectKind::Fragment),
            1,
        ),
        (
            (Operation::List, Outcome::Cancelled, ObjectKind::Unknown),
            1,
        ),
    ];
    assert_eq!(rows(&snapshot), BTreeMap::from(expected));
    assert_eq!(snapshot.bytes_received, some as u64);
    let list = &snapshot.durations[Operation::List as usize];
    assert!(list.sum >= 0.05 && list.cumulative[0] == 0, "{list:?}");
}

#[tokio::test]
async fn an_answer_that_breaks_off_is_counted_as_transient() {
    let server = Server::start().await;
    let (counts, meter) = meter();
    let store = server.store().metered(meter);
    sends(&store, FRAGMENT, 100_000).await;
    let cut = Action::Truncate { after_bytes: 5_000 };
    server.local.faults().add(Fault::new(Served::Get, cut));
    let object = store.get(FRAGMENT, Part::Whole).await.expect("an object");
    collect(object.body).await.expect_err("broken off");
    let snapshot = counts.snapshot();
    let row = (Operation::Get, Outcome::Transient, ObjectKind::Fragment);
    assert_eq!(rows(&snapshot).get(&row), Some(&1), "{snapshot:?}");
}

#[tokio::test]
async fn a_folder_counts_its_calls() {
    let dir = tempfile::TempDir::new().expect("a folder");
    let (counts, meter) = meter();
    let store = FsStore::open(dir.path()).expect("a store").metered(meter);
    sends(&store, FRAGMENT, 70_000).await;
    let wrong = PutOptions {
        crc32: Some(1),
        ..PutOptions::default()
    };
    let refused = store.put(FRAGMENT, Body::Bytes(bytes(5)), wrong).await;
    refused.expect_err("a wrong checksum");
    read(&store, FRAGMENT, Part::Range(1..21))
        .await
        .expect("read");
    keys(&store, "rabbitmq/", 1000).await;
    store.delete(&[FRAGMENT.to_owned()]).await.expect("deleted");
    store.get(FRAGMENT, Part::Whole).await.expect_err("gone");
    let snapshot = counts.snapshot();
    let expected = [
        ((Operation::Put, Outcome::Ok, ObjectKind::Fragment), 1),
        ((Operation::Put, Outcome::Corrupt, ObjectKind::Fragment), 1),
        ((Operation::Get, Outcome::Ok, ObjectKind::Fragment), 1),
        ((Operation::Get, Outcome::NotFound, ObjectKind::Fragment), 1),
        ((Operation::List, Outcome::Ok, ObjectKind::Unknown), 1),
        (
            (Operation::MultiDelete, Outcome::Ok, ObjectKind::Fragment),
            1,
        ),
    ];
    assert_eq!(rows(&snapshot), BTreeMap::from(expected));
    assert_eq!((snapshot.bytes_sent, snapshot.bytes_received), (70_005, 20));
    histograms_hold_what_was_counted(&snapshot);
}

#[test]
fn labels_are_those_of_the_terms() {
    assert_eq!(
        Operation::ALL.map(Operation::name),
        ["put", "get", "list", "delete", "multi_delete", "probe"]
    );
    assert_eq!(ObjectKind::ALL.len(), 7);
    assert_eq!(
        Outcome::ALL.map(Outcome::name)[7..],
        ["closed", "cancelled"]
    );
    assert_eq!(
        ObjectKind::of(&Prefix::default(), "rabbitmq/x"),
        ObjectKind::Unknown
    );
    assert_eq!(ObjectKind::of(&Prefix::default(), ROOT), ObjectKind::Root);
}
