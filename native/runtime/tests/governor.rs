//! Who may run, when, and what becomes of those who may not.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use stream_s3_core::admission::Rate;
use stream_s3_core::error::TransferError;
use stream_s3_runtime::buffers::{BUFFER_MEMORY, BUFFER_SIZE, BUFFERS_KEPT, BUFFERS_PER_TRANSFER};
use stream_s3_runtime::{Event, Executor, Governor, Limits, Work};
use support::{Answers, Before, Gate, Log, governor, limited, mailbox, store, transfer};
use tokio::sync::oneshot;
use tokio::time::Instant;

const CANCELLED: Event = Event::Finished(Err(TransferError::Cancelled));

fn host(governor: &Governor<&'static str>, key: &'static str, size: u64) -> Answers {
    let (to, answers, _) = mailbox();
    governor.submit(key, size, Work::Host, to);
    answers
}

#[tokio::test]
async fn no_more_run_than_there_are_permits() {
    let governor = governor(2);
    let (mut a, mut b, mut c) = (
        host(&governor, "a", 1),
        host(&governor, "b", 1),
        host(&governor, "c", 1),
    );
    assert_eq!(
        (a.next().await, b.next().await),
        (Event::Admitted, Event::Admitted)
    );
    let info = governor.info();
    assert_eq!(info.governor_submissions_received, 3);
    assert_eq!(
        (
            info.governor_tasks_in_flight,
            info.upload_permits_in_use,
            info.governor_pending_submissions
        ),
        (2, 2, 1)
    );
    assert!(c.is_empty());
    governor.finished("a");
    assert_eq!(c.next().await, Event::Admitted);
    assert!(a.are_over().await);
}

#[tokio::test]
async fn more_permits_let_those_in_who_wait() {
    let governor = governor(1);
    let (mut a, mut b) = (host(&governor, "a", 1), host(&governor, "b", 1));
    assert_eq!(a.next().await, Event::Admitted);
    governor.set_permits(2);
    assert_eq!(b.next().await, Event::Admitted);
}

#[tokio::test(start_paused = true)]
async fn the_rate_holds_submissions_back_in_the_order_in_which_they_came() {
    let governor = limited(Limits {
        rate: Rate::BytesPerSec(100),
        burst: 100,
        permits: 10,
    });
    let start = Instant::now();
    let (mut a, mut b, mut c) = (
        host(&governor, "a", 100),
        host(&governor, "b", 50),
        host(&governor, "c", 10),
    );
    assert_eq!(a.next().await, Event::Admitted);
    assert_eq!(start.elapsed().as_millis(), 0);
    assert_eq!(b.next().await, Event::Admitted);
    assert_eq!(start.elapsed().as_millis(), 500);
    assert_eq!(c.next().await, Event::Admitted);
    assert_eq!(start.elapsed().as_millis(), 600);
}

#[tokio::test(start_paused = true)]
async fn one_that_is_larger_than_the_burst_goes_when_the_bucket_is_full_and_leaves_a_debt() {
    let governor = limited(Limits {
        rate: Rate::BytesPerSec(100),
        burst: 100,
        permits: 10,
    });
    let start = Instant::now();
    let (mut a, mut b, mut c) = (
        host(&governor, "a", 50),
        host(&governor, "b", 300),
        host(&governor, "c", 100),
    );
    assert_eq!(a.next().await, Event::Admitted);
    assert_eq!(b.next().await, Event::Admitted);
    assert_eq!(start.elapsed().as_millis(), 500);
    assert_eq!(c.next().await, Event::Admitted);
    assert_eq!(start.elapsed().as_millis(), 3500);
    assert_eq!(governor.info().governor_oversized_admissions, 1);
}

#[tokio::test(start_paused = true)]
async fn a_new_rate_applies_to_those_who_wait_already() {
    let governor = limited(Limits {
        rate: Rate::BytesPerSec(1),
        burst: 1,
        permits: 10,
    });
    let start = Instant::now();
    let (mut a, mut b) = (host(&governor, "a", 1), host(&governor, "b", 1000));
    assert_eq!(a.next().await, Event::Admitted);
    governor.set_rate(Rate::Unlimited, 1);
    assert_eq!(b.next().await, Event::Admitted);
    assert_eq!(start.elapsed().as_millis(), 0);
}

#[tokio::test]
async fn cancelled_work_that_waits_is_answered_and_never_runs() {
    let governor = governor(1);
    let (mut a, mut b) = (host(&governor, "a", 1), host(&governor, "b", 1));
    assert_eq!(a.next().await, Event::Admitted);
    governor.cancel(vec!["b", "unknown"]);
    assert_eq!(b.next().await, CANCELLED);
    assert!(b.are_over().await);
    governor.finished("a");
    let mut c = host(&governor, "b", 1);
    assert_eq!(c.next().await, Event::Admitted, "the name is free again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transfer_that_runs_is_aborted_and_gives_permit_and_memory_back() {
    let gate = Gate::closed();
    let store = store(gate.clone());
    let mut log = Log::new();
    let fragment = log.chunk(5, 3 * BUFFER_SIZE).fragment();
    let governor = governor(1);
    let (to, mut answers, _) = mailbox();
    governor.submit("a", fragment.meta.size, transfer(&store, &fragment), to);
    let (to, mut next, _) = mailbox();
    governor.submit("b", fragment.meta.size, transfer(&store, &fragment), to);
    assert_eq!(answers.next().await, Event::Admitted);
    gate.has_begun(1).await;
    assert!(next.is_empty());
    governor.cancel(vec!["a"]);
    assert_eq!(answers.next().await, CANCELLED);
    assert!(answers.are_over().await);
    assert_eq!(next.next().await, Event::Admitted);
    gate.has_begun(1).await;
    gate.open.add_permits(1);
    assert!(matches!(next.next().await, Event::Finished(Ok(_))));
    assert!(governor.info().upload_buffer_bytes <= (BUFFERS_KEPT * BUFFER_MEMORY) as u64);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transfer_holds_its_few_buffers_whatever_the_size_of_its_fragment() {
    let gate = Gate::closed();
    let store = store(gate.clone());
    let mut log = Log::new();
    let fragment = log.chunk(5, 20 * BUFFER_SIZE).fragment();
    let governor = governor(1);
    let (to, mut answers, _) = mailbox();
    governor.submit("a", fragment.meta.size, transfer(&store, &fragment), to);
    assert_eq!(answers.next().await, Event::Admitted);
    gate.has_begun(1).await;
    // 24 bytes for the only chunk: its index record, and its checksum.
    assert!(
        governor.info().upload_buffer_bytes <= (BUFFERS_PER_TRANSFER * BUFFER_MEMORY) as u64 + 24
    );
    gate.open.add_permits(1);
    assert!(matches!(answers.next().await, Event::Finished(Ok(_))));
    assert_eq!(governor.info().bytes_sent, 8 + fragment.meta.size + 20);
}

#[tokio::test(start_paused = true)]
async fn work_of_a_dead_requester_is_dropped_when_its_turn_comes() {
    let governor = governor(1);
    let mut a = host(&governor, "a", 1);
    let (to, mut answers, alive) = mailbox();
    governor.submit("b", 1, Work::Host, to);
    let mut c = host(&governor, "c", 1);
    assert_eq!(a.next().await, Event::Admitted);
    alive.store(false, Ordering::Relaxed);
    governor.finished("a");
    assert_eq!(c.next().await, Event::Admitted);
    assert_eq!(answers.next().await, Event::Abandoned);
    assert!(answers.are_over().await);
    assert_eq!(governor.info().governor_dropped_dead_replyto, 1);
}

#[tokio::test(start_paused = true)]
async fn work_of_a_dead_requester_does_not_wait_for_its_turn_to_be_dropped() {
    let governor = governor(1);
    let mut a = host(&governor, "a", 1);
    let (to, mut answers, alive) = mailbox();
    governor.submit("b", 1, Work::Host, to);
    assert_eq!(a.next().await, Event::Admitted);
    alive.store(false, Ordering::Relaxed);
    assert_eq!(answers.next().await, Event::Abandoned);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transfer_of_a_dead_requester_is_aborted() {
    let gate = Gate::closed();
    let store = store(gate.clone());
    let mut log = Log::new();
    let fragment = log.chunk(5, 100).fragment();
    let governor = governor(1);
    let (to, mut answers, alive) = mailbox();
    governor.submit("a", 1, transfer(&store, &fragment), to);
    assert_eq!(answers.next().await, Event::Admitted);
    gate.has_begun(1).await;
    alive.store(false, Ordering::Relaxed);
    assert_eq!(answers.next().await, CANCELLED);
    assert_eq!(governor.info().governor_dropped_dead_replyto, 1);
}

#[tokio::test(start_paused = true)]
async fn host_work_of_a_dead_requester_keeps_its_permit_until_the_host_has_ended_it() {
    let governor = governor(1);
    let (to, mut answers, alive) = mailbox();
    governor.submit("a", 1, Work::Host, to);
    let mut b = host(&governor, "b", 1);
    assert_eq!(answers.next().await, Event::Admitted);
    alive.store(false, Ordering::Relaxed);
    assert_eq!(answers.next().await, Event::Abandoned);
    assert!(b.is_empty());
    governor.finished("a");
    assert_eq!(b.next().await, Event::Admitted);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_is_an_answer_and_hurts_nobody_else() {
    let panicking = store(Before(Gate::closed(), || panic!("the store fell over")));
    let gate = Gate::closed();
    gate.open.add_permits(1);
    let mut log = Log::new();
    let fragment = log.chunk(5, 100).fragment();
    let governor = governor(1);
    let (to, mut answers, _) = mailbox();
    governor.submit("a", 1, transfer(&panicking, &fragment), to);
    assert_eq!(answers.next().await, Event::Admitted);
    assert_eq!(
        answers.next().await,
        Event::Finished(Err(TransferError::Panic("the store fell over".to_owned())))
    );
    let (to, mut answers, _) = mailbox();
    governor.submit("b", 1, transfer(&store(gate), &fragment), to);
    assert_eq!(answers.next().await, Event::Admitted);
    assert!(matches!(answers.next().await, Event::Finished(Ok(_))));
}

/// The store never answers, and nobody waits for it.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_aborts_everything_although_the_store_is_dead() {
    let gate = Gate::closed();
    let dead = store(gate.clone());
    let mut log = Log::new();
    let fragment = log.chunk(5, 3 * BUFFER_SIZE).fragment();
    let governor = governor(1);
    let (to, mut runs, _) = mailbox();
    governor.submit("a", 1, transfer(&dead, &fragment), to);
    let (to, mut waits, _) = mailbox();
    governor.submit("b", 1, transfer(&dead, &fragment), to);
    gate.has_begun(1).await;
    let (done, stopped) = oneshot::channel();
    governor.stop(move || done.send(()).expect("the test waits"));
    stopped.await.expect("stopped");
    assert_eq!(
        (runs.next().await, runs.next().await),
        (Event::Admitted, CANCELLED)
    );
    assert_eq!(waits.next().await, CANCELLED);
    let (to, mut late, _) = mailbox();
    governor.submit("c", 1, transfer(&dead, &fragment), to);
    assert_eq!(late.next().await, CANCELLED);
    assert_eq!(governor.info().governor_tasks_in_flight, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_the_last_handle_aborts_everything() {
    let gate = Gate::closed();
    let dead = store(gate.clone());
    let mut log = Log::new();
    let fragment = log.chunk(5, 100).fragment();
    let governor = governor(1);
    let (to, mut answers, _) = mailbox();
    governor.submit("a", 1, transfer(&dead, &fragment), to);
    gate.has_begun(1).await;
    drop(governor);
    assert_eq!(
        (answers.next().await, answers.next().await),
        (Event::Admitted, CANCELLED)
    );
}

#[tokio::test(start_paused = true)]
async fn everything_is_aborted_once_the_owner_is_dead() {
    let lives = Arc::new(AtomicBool::new(true));
    let owner = Arc::clone(&lives);
    let limits = Limits {
        rate: Rate::Unlimited,
        burst: 1,
        permits: 1,
    };
    let governor = Governor::start(&Executor::current().expect("threads"), limits, move || {
        owner.load(Ordering::Relaxed)
    });
    let (mut a, mut b) = (host(&governor, "a", 1), host(&governor, "b", 1));
    assert_eq!(a.next().await, Event::Admitted);
    lives.store(false, Ordering::Relaxed);
    assert_eq!(b.next().await, CANCELLED);
    assert!(a.are_over().await);
}

#[tokio::test]
async fn two_submissions_of_one_name_are_two() {
    let governor = governor(2);
    let (mut a, mut b) = (host(&governor, "a", 1), host(&governor, "a", 1));
    assert_eq!(
        (a.next().await, b.next().await),
        (Event::Admitted, Event::Admitted)
    );
    let mut c = host(&governor, "c", 1);
    governor.finished("a");
    assert_eq!(c.next().await, Event::Admitted);
    assert_eq!(governor.info().governor_tasks_in_flight, 2);
}
