//! Whatever a store does wrong, for whatever is asked of it: how the call ends, with how many requests, and what is left behind.
//!
//! The faults are made on the wire, by a server that answers, or does not, as it is told.

mod rig;
mod support;

use std::net::SocketAddr;
use std::time::Duration;

use rig::{Call, Rig};
use stream_s3_core::error::{ErrorClass, TransferError};
use stream_s3_runtime::Event;
use stream_s3_s3local::Action;

fn status(status: u16, code: &str) -> Action {
    Action::Status {
        status,
        code: code.to_owned(),
    }
}

/// The call meets the fault once: this is the answer, after one request; and the next attempt succeeds.
async fn ends(rig: &Rig, call: Call, action: Action, expected: &Result<(), TransferError>) {
    rig.fault(call, action.clone(), 1);
    let before = rig.counts(call).requests;
    assert_eq!(&rig.call(call).await, expected, "{call:?} {action:?}");
    let requests = rig.counts(call).requests - before;
    assert_eq!(requests, 1, "{call:?} {action:?}: one attempt, one request");
    assert_eq!(rig.call(call).await, Ok(()), "{call:?} after {action:?}");
}

async fn ends_everywhere(rig: &Rig, action: Action, expected: TransferError, class: ErrorClass) {
    assert_eq!(expected.class(), class);
    for call in Call::ALL {
        ends(rig, call, action.clone(), &Err(expected.clone())).await;
    }
}

/// Answers that come as they should, and say no.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_is_an_answer_to_one_request() {
    use ErrorClass::{Permanent, Throttled, Transient};
    use TransferError::{ClockSkew, ExpiredToken, Http, Timeout};
    let rig = Rig::new().await;
    for (status_code, code, expected, class) in [
        (500, "InternalError", Http(500), Transient),
        (503, "ServiceUnavailable", Http(503), Transient),
        (503, "SlowDown", TransferError::Throttled, Throttled),
        (429, "TooManyRequests", TransferError::Throttled, Throttled),
        (408, "Odd", Http(408), Transient),
        (400, "RequestTimeout", Timeout, Transient),
        (400, "ExpiredToken", ExpiredToken, Transient),
        (403, "RequestTimeTooSkewed", ClockSkew, Transient),
        (403, "AccessDenied", Http(403), Permanent),
        (409, "Odd", Http(409), Permanent),
    ] {
        ends_everywhere(&rig, status(status_code, code), expected, class).await;
    }
    rig.leaves_nothing().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_in_the_body_of_a_success_is_no_success() {
    let rig = Rig::new().await;
    for (code, expected, class) in [
        (
            "InternalError",
            TransferError::Http(500),
            ErrorClass::Transient,
        ),
        ("SlowDown", TransferError::Throttled, ErrorClass::Throttled),
        (
            "AccessDenied",
            TransferError::Http(403),
            ErrorClass::Permanent,
        ),
    ] {
        assert_eq!(expected.class(), class);
        for call in [
            Call::Upload,
            Call::Root,
            Call::List,
            Call::Delete,
            Call::MultiDelete,
        ] {
            let action = Action::ErrorBody {
                code: code.to_owned(),
            };
            ends(&rig, call, action, &Err(expected.clone())).await;
        }
        // What comes instead of an object is not read as an error, which an object might look like: it has no tag.
        let action = Action::ErrorBody {
            code: code.to_owned(),
        };
        ends(&rig, Call::Get, action, &Err(TransferError::Http(502))).await;
    }
    rig.leaves_nothing().await;
}

/// As many attempts as it takes, each a request of its own and each with a key of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_of_errors_ends_when_the_store_has_recovered() {
    let rig = Rig::new().await;
    for call in Call::ALL {
        for action in [status(500, "InternalError"), status(503, "SlowDown")] {
            rig.fault(call, action.clone(), 5);
            let (before, stored) = (rig.counts(call), rig.stored());
            let mut attempts = 1;
            while let Err(error) = rig.call(call).await {
                assert!(error.is_transient(), "{call:?}: {error}");
                attempts += 1;
            }
            let after = rig.counts(call);
            assert_eq!(attempts, 6, "{call:?} {action:?}");
            assert_eq!(after.requests - before.requests, 6, "{call:?} {action:?}");
            assert_eq!(after.succeeded - before.succeeded, 1, "{call:?} {action:?}");
            assert_eq!(rig.stored() - stored, usize::from(call.is_put()));
        }
    }
    rig.leaves_nothing().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_is_a_lost_connection() {
    let lost = TransferError::Connection;
    let rig = Rig::new().await;
    ends_everywhere(
        &rig,
        Action::ResetBefore,
        lost.clone(),
        ErrorClass::Transient,
    )
    .await;
    let halfway = Action::ResetBody {
        after_bytes: 100_000,
    };
    for call in [Call::Upload, Call::Get] {
        ends(&rig, call, halfway.clone(), &Err(lost.clone())).await;
    }
    let early = Action::ResetBody { after_bytes: 20 };
    for call in [Call::Root, Call::List, Call::MultiDelete] {
        ends(&rig, call, early.clone(), &Err(lost.clone())).await;
    }
    rig.leaves_nothing().await;
}

/// The store has done what it was asked. Whoever asks again finds it done; a second upload has a key of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_reply_is_a_lost_connection_although_it_was_done() {
    let rig = Rig::new().await;
    for call in Call::ALL {
        let before = rig.stored();
        ends(
            &rig,
            call,
            Action::LostReply,
            &Err(TransferError::Connection),
        )
        .await;
        let stored = if call.is_put() { 2 } else { 0 };
        assert_eq!(rig.stored() - before, stored, "{call:?}");
    }
    rig.leaves_nothing().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_echo_of_the_checksum_is_a_mismatch_and_nobody_else_minds() {
    let rig = Rig::new().await;
    assert_eq!(
        TransferError::ChecksumMismatch.class(),
        ErrorClass::Permanent
    );
    for call in Call::ALL {
        let expected = if call.is_put() {
            Err(TransferError::ChecksumMismatch)
        } else {
            Ok(())
        };
        ends(&rig, call, Action::WrongChecksum, &expected).await;
    }
    rig.leaves_nothing().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_is_cut_off_is_a_lost_connection() {
    let rig = Rig::new().await;
    for call in [Call::Get, Call::List, Call::MultiDelete] {
        for after_bytes in [0, 10, 90] {
            let action = Action::Truncate { after_bytes };
            ends(&rig, call, action, &Err(TransferError::Connection)).await;
        }
    }
    rig.leaves_nothing().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_connection_is_a_lost_one_at_once() {
    let rig = Rig::new().await;
    let nobody = std::net::TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .expect("a port");
    for call in Call::ALL {
        let begun = tokio::time::Instant::now();
        let answer = rig.call_at(&format!("http://{nobody}"), call).await;
        assert_eq!(answer, Err(TransferError::Connection), "{call:?}");
        assert!(begun.elapsed() < rig::PROMPT, "{call:?}");
    }
    rig.leaves_nothing().await;
}

/// Where connections are neither accepted nor refused: a listener whose queue is full, so that the system drops what else comes.
struct BlackHole {
    address: SocketAddr,
    _listener: std::net::TcpListener,
    _queue: Vec<std::net::TcpStream>,
}

fn black_hole() -> BlackHole {
    let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    socket.bind(any).expect("a port");
    let listener = socket.listen(1).and_then(tokio::net::TcpListener::into_std);
    let listener = listener.expect("a listener");
    let address = listener.local_addr().expect("an address");
    let patience = Duration::from_millis(200);
    let mut queue = Vec::new();
    while let Ok(stream) = std::net::TcpStream::connect_timeout(&address, patience) {
        queue.push(stream);
    }
    BlackHole {
        address,
        _listener: listener,
        _queue: queue,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_into_a_black_hole_ends_when_it_is_given_up() {
    let rig = Rig::new().await;
    let hole = black_hole();
    for call in Call::ALL {
        let endpoint = format!("http://{}", hole.address);
        rig.call_and_cancel(call, Some(&endpoint)).await;
    }
    drop(hole);
    rig.leaves_nothing().await;
}

/// A connection, and that is all: accepted by the system, read by nobody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_to_a_store_that_reads_nothing_ends_when_it_is_given_up() {
    let rig = Rig::new().await;
    let deaf = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let endpoint = format!("http://{}", deaf.local_addr().expect("an address"));
    for call in Call::ALL {
        rig.call_and_cancel(call, Some(&endpoint)).await;
    }
    drop(deaf);
    rig.leaves_nothing().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stalled_call_ends_when_it_is_given_up_and_its_connection_with_it() {
    let rig = Rig::new().await;
    for call in Call::ALL {
        rig.fault(call, Action::Stall, 1);
        let before = rig.counts(call).requests;
        rig.call_and_cancel(call, None).await;
        let noticed = format!("the server has noticed that {call:?} is over");
        rig::eventually(&noticed, || rig.counts(call).in_flight == 0).await;
        assert_eq!(rig.counts(call).requests - before, 1, "{call:?}");
        assert_eq!(rig.call(call).await, Ok(()), "{call:?}");
    }
    rig.leaves_nothing().await;
}

/// A byte now and then in both directions: for ever, unless somebody sets a limit. The server hears of the end when it has read what
/// is on its way already, so nobody waits for that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_trickles_ends_when_it_is_given_up() {
    let rig = Rig::new().await;
    // Neither the request for a single delete nor its answer has a body.
    for call in Call::ALL.into_iter().filter(|call| *call != Call::Delete) {
        rig.fault(call, Action::Slow { bytes_per_sec: 20 }, 1);
        rig.call_and_cancel(call, None).await;
        assert_eq!(rig.call(call).await, Ok(()), "{call:?}");
    }
    rig.leaves_nothing().await;
}

/// Four hang, as many as there are permits, and four more wait for theirs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_ends_uploads_that_hang_and_their_connections() {
    let rig = Rig::new().await;
    rig.fault(Call::Upload, Action::Stall, u64::MAX);
    let before = rig.counts(Call::Upload).requests;
    let mut uploads: Vec<_> = ["a", "b", "c", "d", "e", "f", "g", "h"]
        .map(|name| rig.submit_upload(name))
        .into();
    rig::eventually("four hang", || {
        rig.counts(Call::Upload).requests - before == 4
    })
    .await;
    let begun = tokio::time::Instant::now();
    let (done, stopped) = tokio::sync::oneshot::channel();
    rig.governor
        .stop(move || done.send(()).expect("the test waits"));
    stopped.await.expect("stopped");
    assert!(begun.elapsed() < rig::PROMPT, "{:?}", begun.elapsed());
    for (number, answers) in uploads.iter_mut().enumerate() {
        if number < 4 {
            assert_eq!(answers.next().await, Event::Admitted);
        }
        let cancelled = Event::Finished(Err(TransferError::Cancelled));
        assert_eq!(answers.next().await, cancelled);
        assert!(answers.are_over().await);
    }
    rig::eventually("the server has noticed", || {
        rig.counts(Call::Upload).in_flight == 0
    })
    .await;
    assert_eq!(rig.counts(Call::Upload).requests - before, 4);
    assert_eq!(rig.stored(), 0);
    let info = rig.governor.info();
    assert_eq!(
        (info.governor_tasks_in_flight, info.upload_permits_in_use),
        (0, 0)
    );
}

/// Memory does not grow with the number of attempts, whatever becomes of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_failures_leave_as_little_as_one() {
    let rig = Rig::new().await;
    let rounds = |rounds: u32| {
        let rig = &rig;
        async move {
            for round in 0..rounds {
                let action = match round % 4 {
                    0 => status(503, "SlowDown"),
                    1 => Action::ResetBody {
                        after_bytes: 2_000_000,
                    },
                    2 => Action::LostReply,
                    _ => Action::WrongChecksum,
                };
                rig.fault(Call::Upload, action, 1);
                rig.call(Call::Upload).await.expect_err("a fault");
            }
        }
    };
    rounds(12).await;
    let (before, descriptors) = (rig::resident(), rig::descriptors());
    rounds(60).await;
    let grown = rig::resident().saturating_sub(before);
    assert!(grown < 32 << 20, "{grown} bytes more");
    assert!(rig::descriptors() <= descriptors + 4);
    rig.leaves_nothing().await;
}
