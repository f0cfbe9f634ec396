//! The governor's queue: no rate is exceeded, nobody overtakes, and nobody waits for ever.

use proptest::prelude::*;
use stream_s3_core::admission::{Admission, Cancelled, Next, Rate};
use stream_s3_core::congestion::WINDOW_US;
use stream_s3_core::units::MonotonicUs;

use crate::config;

#[derive(Debug, Clone, Copy)]
enum Step {
    Submit(u64),
    Pass(u64),
    Finish(usize),
    Cancel(usize),
    Permits(usize),
    Throttled,
    Succeeded,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0u64..300).prop_map(Step::Submit),
        4 => (0u64..2_000_000).prop_map(Step::Pass),
        3 => any::<usize>().prop_map(Step::Finish),
        1 => any::<usize>().prop_map(Step::Cancel),
        1 => (1usize..9).prop_map(Step::Permits),
        2 => Just(Step::Throttled),
        3 => Just(Step::Succeeded),
    ]
}

/// The queue and what is known of it.
struct World {
    admission: Admission<u32>,
    now: u64,
    rate: u64,
    burst: u64,
    permits: usize,
    queue: Vec<(u32, u64)>,
    running: Vec<u32>,
    next_key: u32,
    /// When the store's wish was last followed.
    halved: Option<u64>,
    /// When, and how many bytes.
    admitted: Vec<(u64, u64)>,
}

impl World {
    fn new(rate: u64, burst: u64, permits: usize) -> Self {
        Self {
            admission: Admission::new(Rate::BytesPerSec(rate), burst, permits),
            now: 0,
            rate,
            burst,
            permits,
            queue: Vec::new(),
            running: Vec::new(),
            next_key: 0,
            halved: None,
            admitted: Vec::new(),
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Submit(size) => {
                self.next_key += 1;
                self.admission
                    .submit(MonotonicUs(self.now), self.next_key, size);
                self.queue.push((self.next_key, size));
            }
            Step::Pass(us) => self.now += us,
            Step::Finish(index) => {
                if !self.running.is_empty() {
                    let key = self.running.remove(index % self.running.len());
                    self.admission.finished(&key);
                }
            }
            Step::Cancel(index) => {
                if !self.queue.is_empty() {
                    let (key, _) = self.queue.remove(index % self.queue.len());
                    assert_eq!(self.admission.cancel(&key), Cancelled::Queued);
                }
            }
            Step::Permits(permits) => {
                self.permits = permits;
                self.admission.set_permits(permits);
            }
            Step::Throttled => self.throttled(),
            Step::Succeeded => self.succeeded(),
        }
        let effective = self.admission.effective_permits();
        assert!((1..=self.permits).contains(&effective));
        assert_eq!(self.admission.permits(), self.permits);
        self.admit();
    }

    /// Half of what may run, but one goes on; and one burst is one halving.
    fn throttled(&mut self) {
        let before = self.admission.effective_permits();
        self.admission.throttled(MonotonicUs(self.now));
        let burst = self
            .halved
            .is_some_and(|halved| self.now - halved < WINDOW_US);
        let expected = if burst { before } else { (before / 2).max(1) };
        assert_eq!(self.admission.effective_permits(), expected);
        if !burst {
            self.halved = Some(self.now);
        }
    }

    fn succeeded(&mut self) {
        let before = self.admission.effective_permits();
        self.admission.succeeded(MonotonicUs(self.now));
        let after = self.admission.effective_permits();
        assert!(after == before || after == before + 1);
    }

    /// Whatever the store took, transfers that succeed bring it back.
    fn recover(&mut self) {
        self.now += WINDOW_US;
        for _ in 0..self.permits * self.permits {
            self.succeeded();
        }
        assert_eq!(self.admission.effective_permits(), self.permits);
    }

    fn admit(&mut self) {
        loop {
            match self.admission.next(MonotonicUs(self.now)) {
                Next::Admit {
                    key,
                    size,
                    oversized,
                } => {
                    assert_eq!(
                        self.queue.remove(0),
                        (key, size),
                        "first come, first served"
                    );
                    assert_eq!(oversized, size > self.burst);
                    self.running.push(key);
                    self.admitted.push((self.now, size));
                    assert!(self.running.len() <= self.admission.effective_permits());
                }
                Next::WaitUntil(at) => {
                    assert!(at.0 > self.now);
                    let permits = self.admission.effective_permits();
                    assert!(self.running.len() < permits && !self.queue.is_empty());
                    break;
                }
                Next::Idle => {
                    let permits = self.admission.effective_permits();
                    assert!(self.running.len() >= permits || self.queue.is_empty());
                    break;
                }
            }
        }
        assert_eq!(
            (self.admission.queued(), self.admission.running()),
            (self.queue.len(), self.running.len())
        );
    }

    /// Between any two admissions no more than the burst and the refill was admitted, leaving out the last: it may leave a debt.
    fn check_rate(&self) {
        for (index, (from, _)) in self.admitted.iter().enumerate() {
            let mut sum = 0;
            for (until, size) in &self.admitted[index..] {
                let refill = u128::from(until - from) * u128::from(self.rate) / 1_000_000;
                assert!(sum <= u128::from(self.burst) + refill + 1);
                sum += u128::from(*size);
            }
        }
    }

    /// With time and finished transfers everybody gets through.
    fn drain(&mut self) {
        for _ in 0..10_000 {
            if self.queue.is_empty() {
                return;
            }
            while !self.running.is_empty() {
                self.step(Step::Finish(0));
            }
            if let Next::WaitUntil(at) = self.admission.next(MonotonicUs(self.now)) {
                self.now = at.0;
            }
            self.admit();
        }
        panic!("never drains");
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn rates_hold_and_everybody_gets_through(
        rate in 1u64..500,
        burst in 0u64..200,
        permits in 1usize..9,
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let mut world = World::new(rate, burst, permits);
        for step in steps {
            world.step(step);
        }
        world.drain();
        world.check_rate();
        world.recover();
    }
}
