//! Buffers that several transfers take and give back at once, and requests that end while they are called off.

use std::sync::{Arc, Mutex};

use shuttle::future::yield_now;
use shuttle::thread;
use stream_s3_interleavings::metrics::Metrics;
use stream_s3_interleavings::{Executor, Running, buffers, orders, transfer};

/// Buffers go back whoever drops them, and no byte of them is counted twice in the end.
#[test]
fn what_is_held_is_nothing_once_all_transfers_have_ended() {
    shuttle::check_random(
        || {
            let executor = Executor::default();
            let metrics = Arc::new(Metrics::default());
            for number in 0..3 {
                let metrics = Arc::clone(&metrics);
                let of = executor.clone();
                let task = executor.tokio().spawn(async move {
                    let fragment = transfer::Fragment {
                        meter: transfer::Meter::default(),
                        buffers: buffers::BUFFERS_PER_TRANSFER + 1,
                        end: transfer::End::Stored(number),
                    };
                    transfer::run(&of, &metrics, &fragment).await;
                });
                if number == 0 {
                    thread::spawn(move || task.abort());
                }
            }
            shuttle::future::block_on(executor.ended());
            let kept = metrics.snapshot().upload_buffer_bytes;
            let most = 3 * 2 * buffers::BUFFER_MEMORY as u64;
            assert!(kept <= most, "{kept} bytes are kept");
            assert_eq!(kept % buffers::BUFFER_MEMORY as u64, 0, "{kept}");
        },
        orders(800),
    );
}

/// A name is forgotten with its task, whether that ends, is called off, or both at once; and what was not called off has run to its end.
#[test]
fn no_request_stays_registered_and_none_is_lost() {
    shuttle::check_random(
        || {
            let executor = Executor::default();
            let running: Running<u32> = Running::default();
            let done: Arc<Mutex<Vec<u32>>> = Arc::default();
            let starters: Vec<_> = (0..3u32)
                .map(|name| {
                    let (executor, running) = (executor.clone(), running.clone());
                    let done = Arc::clone(&done);
                    thread::spawn(move || {
                        // Two of the same name.
                        for _ in 0..2 {
                            let done = Arc::clone(&done);
                            running.start(&executor, name, async move {
                                yield_now().await;
                                done.lock().unwrap().push(name);
                            });
                        }
                    })
                })
                .collect();
            let canceller = {
                let running = running.clone();
                thread::spawn(move || {
                    running.cancel(&0);
                    running.cancel(&9);
                })
            };
            for starter in starters {
                starter.join().expect("a starter panicked");
            }
            canceller.join().expect("the canceller panicked");
            shuttle::future::block_on(executor.ended());
            assert!(running.is_empty(), "{} names are left", running.len());
            let done = done.lock().unwrap();
            for name in 1..3 {
                let times = done.iter().filter(|of| **of == name).count();
                assert_eq!(times, 2, "{name} ended {times} times");
            }
        },
        orders(3_000),
    );
}
