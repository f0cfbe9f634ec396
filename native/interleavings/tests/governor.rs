//! Requesters that submit, cancel and die, hosts that run work of their own, and stops, in all kinds of orders.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use shuttle::rand::Rng as _;
use shuttle::sync::atomic::{AtomicBool, Ordering};
use shuttle::thread;
use stream_s3_core::admission::Rate;
use stream_s3_interleavings::governor::{Event, Governor, Limits, Mailbox, Work};
use stream_s3_interleavings::store::Store;
use stream_s3_interleavings::transfer::{End, Fragment, Meter};
use stream_s3_interleavings::{Executor, orders};

const PERMITS: usize = 2;

/// What everybody was told, and what ran.
#[derive(Default)]
struct Told {
    events: Vec<(u64, Event)>,
    /// Submissions that hold a permit, as far as they were told.
    admitted: Vec<u64>,
    most: usize,
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Told>>);

impl Log {
    fn lock(&self) -> MutexGuard<'_, Told> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, key: u64, which: impl Fn(&Event) -> bool) -> usize {
        let told = self.lock();
        let of_key = told
            .events
            .iter()
            .filter(|(of, event)| *of == key && which(event));
        of_key.count()
    }
}

/// The flag is flipped by another thread at any time, as the VM's monitors do.
struct Requester {
    key: u64,
    alive: Arc<AtomicBool>,
    log: Log,
}

impl Mailbox for Requester {
    fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Relaxed)
    }

    fn deliver(&self, event: Event) {
        let mut told = self.log.lock();
        match &event {
            Event::Admitted => told.admitted.push(self.key),
            Event::Finished(_) | Event::Abandoned => told.admitted.retain(|key| *key != self.key),
        }
        told.most = told.most.max(told.admitted.len());
        told.events.push((self.key, event));
    }
}

fn limits(rate: Rate) -> Limits {
    Limits {
        rate,
        burst: 500,
        permits: PERMITS,
    }
}

fn transfer(end: End, meter: &Meter) -> Work {
    let fragment = Fragment {
        meter: meter.clone(),
        buffers: 3,
        end,
    };
    Work::Transfer(Box::new((Store, fragment)))
}

fn any_end() -> End {
    match shuttle::rand::thread_rng().gen_range(0..3) {
        0 => End::Refused,
        1 => End::Hangs,
        _ => End::Stored(7),
    }
}

/// Submits, and then cancels or dies, or neither.
fn requester(governor: &Governor<u64>, log: &Log, meter: &Meter, key: u64) {
    let alive = Arc::new(AtomicBool::new(true));
    let mailbox = Requester {
        key,
        alive: Arc::clone(&alive),
        log: log.clone(),
    };
    governor.submit(key, 100, transfer(any_end(), meter), Box::new(mailbox));
    thread::yield_now();
    match shuttle::rand::thread_rng().gen_range(0..3) {
        0 => governor.cancel(vec![key]),
        1 => alive.store(false, Ordering::Relaxed),
        _ => {}
    }
}

/// Every submission is told at most once that it runs, and exactly once that it is over; nothing is left of it.
fn explore(rate: Rate) {
    let (executor, log, meter) = (Executor::default(), Log::default(), Meter::default());
    let governor = Governor::start(&executor, limits(rate), || true);
    let clients: Vec<_> = (0..3)
        .map(|client| {
            let (governor, log, meter) = (governor.clone(), log.clone(), meter.clone());
            thread::spawn(move || {
                requester(&governor, &log, &meter, 2 * client);
                requester(&governor, &log, &meter, 2 * client + 1);
            })
        })
        .collect();
    for client in clients {
        client.join().expect("a client panicked");
    }
    let watcher = governor.clone();
    let stopped = Arc::new(Mutex::new(0));
    if shuttle::rand::thread_rng().gen_bool(0.5) {
        let stopped = Arc::clone(&stopped);
        governor.stop(move || *stopped.lock().unwrap() += 1);
    } else {
        *stopped.lock().unwrap() += 1;
    }
    drop(governor);
    // Its task ends with the last handle, and aborts what hangs.
    let info = watcher.info();
    assert_eq!(info.governor_submissions_received, 6);
    drop(watcher);
    shuttle::future::block_on(executor.ended());
    for key in 0..6 {
        let admitted = log.count(key, |event| *event == Event::Admitted);
        assert!(admitted <= 1, "{key} was admitted {admitted} times");
        let over = log.count(key, |event| *event != Event::Admitted);
        assert_eq!(over, 1, "{key} was told {over} times that it is over");
    }
    let most = meter.most().max(log.lock().most);
    assert!(most <= PERMITS, "{most} ran at once");
    assert_eq!(
        *stopped.lock().unwrap(),
        1,
        "the stop was not answered once"
    );
}

#[test]
fn each_submission_is_answered_once_whoever_cancels_dies_or_stops() {
    shuttle::check_random(|| explore(Rate::Unlimited), orders(1_500));
}

#[test]
fn the_same_holds_where_tokens_have_to_be_waited_for() {
    shuttle::check_random(|| explore(Rate::BytesPerSec(1_000)), orders(800));
}

#[test]
fn the_same_holds_in_orders_with_few_changes_of_thread() {
    shuttle::check_pct(|| explore(Rate::Unlimited), orders(800), 3);
}

/// The last handle may go while the stop still waits for transfers.
#[test]
fn a_stop_is_answered_though_nobody_holds_the_governor_any_more() {
    shuttle::check_random(
        || {
            let (executor, log) = (Executor::default(), Log::default());
            let governor = Governor::start(&executor, limits(Rate::Unlimited), || true);
            let mailbox = Requester {
                key: 1,
                alive: Arc::new(AtomicBool::new(true)),
                log: log.clone(),
            };
            governor.submit(
                1,
                1,
                transfer(End::Hangs, &Meter::default()),
                Box::new(mailbox),
            );
            let stopped = Arc::new(Mutex::new(0));
            let answer = Arc::clone(&stopped);
            governor.stop(move || *answer.lock().unwrap() += 1);
            drop(governor);
            shuttle::future::block_on(executor.ended());
            assert_eq!(*stopped.lock().unwrap(), 1);
        },
        orders(200),
    );
}

/// Host work gives its permit back by itself; what waits behind it is admitted then.
#[test]
fn permits_of_host_work_come_back_however_its_end_and_its_cancelling_meet() {
    shuttle::check_random(
        || {
            let (executor, log) = (Executor::default(), Log::default());
            let governor = Governor::start(&executor, limits(Rate::Unlimited), || true);
            let alive = Arc::new(AtomicBool::new(true));
            for key in 0..4 {
                let mailbox = Requester {
                    key,
                    alive: Arc::clone(&alive),
                    log: log.clone(),
                };
                governor.submit(key, 1, Work::Host, Box::new(mailbox));
            }
            let hosts: Vec<_> = (0..4)
                .map(|key| {
                    let (governor, log) = (governor.clone(), log.clone());
                    thread::spawn(move || {
                        if key == 0 {
                            governor.cancel(vec![0]);
                        }
                        while log.count(key, |_| true) == 0 {
                            thread::yield_now();
                        }
                        log.lock().admitted.retain(|of| *of != key);
                        governor.finished(key);
                    })
                })
                .collect();
            for host in hosts {
                host.join().expect("a host panicked");
            }
            drop(governor);
            shuttle::future::block_on(executor.ended());
            for key in 0..4 {
                assert_eq!(log.count(key, |_| true), 1, "{key}");
            }
            assert!(log.lock().most <= PERMITS);
        },
        orders(800),
    );
}
