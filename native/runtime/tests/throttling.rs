//! A store that asks to slow down: fewer uploads at a time, and all of them again once it has had enough rest.

mod rig;
mod support;

use std::time::Duration;

use rig::{Call, Rig, eventually};
use stream_s3_core::error::TransferError;
use stream_s3_runtime::{Event, Snapshot};
use stream_s3_s3local::Action;
use support::Answers;
use tokio::time::Instant;

const KEYS: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];
const ALL: u64 = KEYS.len() as u64;
/// Far more than it takes.
const PATIENCE: Duration = Duration::from_secs(60);

fn slow_down() -> Action {
    Action::Status {
        status: 503,
        code: "SlowDown".to_owned(),
    }
}

async fn end(answers: &mut Answers) -> Event {
    match answers.next().await {
        Event::Admitted => answers.next().await,
        end @ (Event::Finished(_) | Event::Abandoned) => end,
    }
}

/// Submits as many as there are permits to a store that never answers: so many run at a time. Then gives them all up.
async fn run_at_a_time(rig: &Rig) -> u64 {
    rig.fault(Call::Upload, Action::Stall, u64::MAX);
    let mut answers = KEYS.map(|key| rig.submit_upload(key));
    let settled =
        |info: &Snapshot| info.governor_tasks_in_flight + info.governor_pending_submissions == ALL;
    eventually("all are known", || settled(&rig.governor.info())).await;
    let info = rig.governor.info();
    assert_eq!(info.upload_permits_in_use, info.governor_tasks_in_flight);
    rig.governor.cancel(KEYS.to_vec());
    for answers in &mut answers {
        assert_eq!(
            end(answers).await,
            Event::Finished(Err(TransferError::Cancelled))
        );
    }
    eventually("all permits are back", || {
        rig.governor.info().upload_permits_in_use == 0
    })
    .await;
    rig.server.faults().clear();
    info.governor_tasks_in_flight
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_of_slow_down_halves_the_concurrency_and_successes_bring_it_back() {
    let rig = Rig::new().await;
    rig.governor.set_permits(KEYS.len());
    let effective = || rig.governor.info().upload_permits_effective;
    eventually("the permits are known", || effective() == ALL).await;
    assert_eq!(run_at_a_time(&rig).await, ALL);

    // All that run are refused at once. Not a counted number: one that was given up above may still arrive, and take one.
    rig.fault(Call::Upload, slow_down(), u64::MAX);
    let mut answers = KEYS.map(|key| rig.submit_upload(key));
    for answers in &mut answers {
        assert_eq!(
            end(answers).await,
            Event::Finished(Err(TransferError::Throttled))
        );
    }
    rig.server.faults().clear();
    // One halving; a machine that needs seconds for eight refusals may see more than one burst in them.
    let left = effective();
    assert!((1..=ALL / 2).contains(&left), "{left} of {ALL}");
    assert_eq!(
        run_at_a_time(&rig).await,
        left,
        "cancelled ones change nothing"
    );

    let mut successes = 0;
    let begun = Instant::now();
    while effective() < ALL {
        assert!(
            begun.elapsed() < PATIENCE,
            "{} after {successes}",
            effective()
        );
        let before = effective();
        let mut upload = rig.submit_upload("one");
        assert!(matches!(end(&mut upload).await, Event::Finished(Ok(_))));
        successes += 1;
        assert!((before..=before + 1).contains(&effective()), "one by one");
    }
    assert!(
        successes >= (left..ALL).sum::<u64>(),
        "{successes} successes"
    );
    assert_eq!(run_at_a_time(&rig).await, ALL);
    rig.leaves_nothing().await;
}

/// Other failures say nothing of how much the store can take.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failures_of_other_kinds_leave_the_concurrency_alone() {
    let rig = Rig::new().await;
    for (status, code) in [
        (500, "InternalError"),
        (503, "ServiceUnavailable"),
        (403, "AccessDenied"),
    ] {
        let action = Action::Status {
            status,
            code: code.to_owned(),
        };
        rig.fault(Call::Upload, action, 1);
        rig.call(Call::Upload).await.expect_err("refused");
        assert_eq!(rig.governor.info().upload_permits_effective, 4, "{code}");
    }
    rig.leaves_nothing().await;
}
