//! How quick the path from memory to a file of the local server is. Not a test of correctness; run it by hand:
//! `cargo test --release -p stream_s3_store --test throughput -- --ignored --nocapture`.

mod support;

use std::sync::Arc;
use std::time::Instant;

use stream_s3_store::{ObjectStore, Part};
use support::*;

const OBJECT: usize = 64 << 20;
const OBJECTS: usize = 16;
const AT_A_TIME: usize = 4;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures, and takes a gigabyte of disk"]
async fn puts_and_gets_in_mebibytes_per_second() {
    let server = Server::start().await;
    let store = Arc::new(server.store());
    let content = bytes(OBJECT);
    let mebibytes = ((OBJECTS * OBJECT) >> 20) as f64;
    let start = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..OBJECTS {
        if tasks.len() == AT_A_TIME {
            tasks.join_next().await.expect("a task").expect("stored");
        }
        let (store, content) = (Arc::clone(&store), content.clone());
        tasks.spawn(async move {
            let body = stream(&content, 256 << 10);
            store
                .put(&format!("k/{number}"), body, with_crc(&content))
                .await
                .expect("stored");
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.expect("stored");
    }
    println!(
        "put: {:.0} MiB/s",
        mebibytes / start.elapsed().as_secs_f64()
    );
    let start = Instant::now();
    for number in 0..OBJECTS {
        let got = read(&*store, &format!("k/{number}"), Part::Whole)
            .await
            .expect("found");
        assert_eq!(got.len(), OBJECT);
    }
    println!(
        "get: {:.0} MiB/s",
        mebibytes / start.elapsed().as_secs_f64()
    );
}
