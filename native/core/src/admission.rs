//! The governor's queue: who may transfer next, on this node.
//!
//! A submission is admitted when a permit is free and the bucket holds its size. First come, first served: nobody overtakes, so a large
//! fragment cannot be starved by small ones. The bucket is charged once, at admission, whatever becomes of the transfer.

use std::collections::{BTreeMap, BTreeSet};

use crate::congestion::Congestion;
use crate::token_bucket::{Taken, TokenBucket};
use crate::units::MonotonicUs;

/// How fast a node may transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rate {
    /// As fast as it can: no bucket at all.
    Unlimited,
    /// Bytes a second, on average. With 0 nothing is admitted once the burst is used up.
    BytesPerSec(u64),
}

/// What may be done now.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Next<K> {
    /// Start this one; it holds a permit until [`Admission::finished`].
    Admit {
        /// As submitted.
        key: K,
        /// As submitted, in bytes.
        size: u64,
        /// Whether it is larger than the burst, and has left a debt.
        oversized: bool,
    },
    /// Ask again at this time, or when something has changed.
    WaitUntil(MonotonicUs),
    /// Ask again when something has changed: nothing is queued, or no permit is free.
    Idle,
}

/// What a cancelled submission was doing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cancelled {
    /// Waiting. It is gone.
    Queued,
    /// Running. It keeps its permit until [`Admission::finished`]: the caller has to end it.
    Running,
    /// Nothing: it is not there, or no longer.
    Unknown,
}

/// The queue, its permits and its bucket. `K` names a submission and is unique among those that have not finished.
#[derive(Debug, Clone)]
pub struct Admission<K> {
    bucket: Option<TokenBucket>,
    burst: u64,
    permits: Congestion,
    /// In the order of submission, by ticket.
    queue: BTreeMap<u64, (K, u64)>,
    tickets: BTreeMap<K, u64>,
    next_ticket: u64,
    running: BTreeSet<K>,
    oversized: u64,
    /// Set until the first call that brings a time: the bucket cannot begin before that.
    pending_rate: Option<u64>,
}

impl<K: Ord + Clone> Admission<K> {
    /// An empty queue with a full bucket of `burst` bytes; at most `permits` submissions run at a time.
    #[must_use]
    pub fn new(rate: Rate, burst: u64, permits: usize) -> Self {
        Self {
            bucket: None,
            burst,
            permits: Congestion::new(permits),
            queue: BTreeMap::new(),
            tickets: BTreeMap::new(),
            next_ticket: 0,
            running: BTreeSet::new(),
            oversized: 0,
            pending_rate: match rate {
                Rate::Unlimited => None,
                Rate::BytesPerSec(rate) => Some(rate),
            },
        }
    }

    /// Queues a submission of `size` bytes. Ignored where the key is queued or running.
    pub fn submit(&mut self, now: MonotonicUs, key: K, size: u64) {
        self.start_bucket(now);
        if self.tickets.contains_key(&key) || self.running.contains(&key) {
            return;
        }
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.tickets.insert(key.clone(), ticket);
        self.queue.insert(ticket, (key, size));
    }

    /// Admits the oldest submission if it may start at `now`. Call it until it admits no more, after every other call and at the time it
    /// names. Logarithmic.
    pub fn next(&mut self, now: MonotonicUs) -> Next<K> {
        self.start_bucket(now);
        if self.running.len() >= self.permits.effective() {
            return Next::Idle;
        }
        let Some(oldest) = self.queue.first_entry() else {
            return Next::Idle;
        };
        let size = oldest.get().1;
        let taken = match &mut self.bucket {
            None => Taken::Now { oversized: false },
            Some(bucket) => bucket.take(size, now),
        };
        match taken {
            Taken::Now { oversized } => {
                let (key, size) = oldest.remove();
                self.tickets.remove(&key);
                self.running.insert(key.clone());
                self.oversized += u64::from(oversized);
                Next::Admit {
                    key,
                    size,
                    oversized,
                }
            }
            Taken::At(at) => Next::WaitUntil(at),
            Taken::Never => Next::Idle,
        }
    }

    /// A running submission has ended, however: its permit is free. Ignored where it is not running.
    pub fn finished(&mut self, key: &K) {
        self.running.remove(key);
    }

    /// Takes a submission out of the queue, or says that it runs. What it was charged is not given back: the bytes may have been sent.
    pub fn cancel(&mut self, key: &K) -> Cancelled {
        if let Some(ticket) = self.tickets.remove(key) {
            self.queue.remove(&ticket);
            return Cancelled::Queued;
        }
        if self.running.contains(key) {
            Cancelled::Running
        } else {
            Cancelled::Unknown
        }
    }

    /// Changes rate and burst from `now` on. Tokens and debts stay, as far as they fit; a bucket that was not there before is full.
    pub fn set_rate(&mut self, now: MonotonicUs, rate: Rate, burst: u64) {
        self.start_bucket(now);
        self.burst = burst;
        match (rate, &mut self.bucket) {
            (Rate::Unlimited, bucket) => *bucket = None,
            (Rate::BytesPerSec(rate), Some(bucket)) => bucket.set(rate, burst, now),
            (Rate::BytesPerSec(rate), bucket @ None) => {
                *bucket = Some(TokenBucket::full(rate, burst, now));
            }
        }
    }

    /// Changes the number of permits. Fewer than are held: nothing is admitted until enough have ended.
    pub fn set_permits(&mut self, permits: usize) {
        self.permits.set_limit(permits);
    }

    /// The store has asked a transfer to slow down: fewer run at a time from now on. See [`Congestion::throttled`].
    pub fn throttled(&mut self, now: MonotonicUs) {
        self.permits.throttled(now);
    }

    /// A transfer has succeeded: more may run at a time again. See [`Congestion::succeeded`].
    pub fn succeeded(&mut self, now: MonotonicUs) {
        self.permits.succeeded(now);
    }

    /// Submissions that wait.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Submissions that hold a permit.
    #[must_use]
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// How many larger than the burst have been admitted so far.
    #[must_use]
    pub fn oversized(&self) -> u64 {
        self.oversized
    }

    /// Most submissions that run at a time, as set.
    #[must_use]
    pub fn permits(&self) -> usize {
        self.permits.limit()
    }

    /// The same, after what the store asked for.
    #[must_use]
    pub fn effective_permits(&self) -> usize {
        self.permits.effective()
    }

    fn start_bucket(&mut self, now: MonotonicUs) {
        if let Some(rate) = self.pending_rate.take() {
            self.bucket = Some(TokenBucket::full(rate, self.burst, now));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(us: u64) -> MonotonicUs {
        MonotonicUs(us)
    }

    fn admitted(admission: &mut Admission<u32>, now: u64) -> Vec<u32> {
        let mut keys = Vec::new();
        while let Next::Admit { key, .. } = admission.next(at(now)) {
            keys.push(key);
        }
        keys
    }

    #[test]
    fn without_a_rate_only_permits_count() {
        let mut admission = Admission::new(Rate::Unlimited, 0, 2);
        for key in [3, 1, 2] {
            admission.submit(at(0), key, u64::MAX);
        }
        assert_eq!(admitted(&mut admission, 0), [3, 1]);
        assert_eq!(admission.next(at(0)), Next::Idle);
        assert_eq!((admission.queued(), admission.running()), (1, 2));
        admission.finished(&1);
        assert_eq!(admitted(&mut admission, 0), [2]);
    }

    #[test]
    fn nobody_overtakes() {
        let mut admission = Admission::new(Rate::BytesPerSec(100), 100, 9);
        admission.submit(at(0), 1, 60);
        admission.submit(at(0), 2, 60);
        admission.submit(at(0), 3, 1);
        assert_eq!(admitted(&mut admission, 0), [1]);
        assert_eq!(admission.next(at(0)), Next::WaitUntil(at(200_000)));
        assert_eq!(admitted(&mut admission, 200_000), [2]);
        assert_eq!(admitted(&mut admission, 210_000), [3]);
    }

    #[test]
    fn tokens_are_charged_once_and_not_given_back() {
        let mut admission = Admission::new(Rate::BytesPerSec(100), 100, 1);
        admission.submit(at(0), 1, 100);
        assert_eq!(admitted(&mut admission, 0), [1]);
        assert_eq!(admission.cancel(&1), Cancelled::Running);
        admission.finished(&1);
        admission.submit(at(0), 1, 100);
        assert_eq!(admission.next(at(0)), Next::WaitUntil(at(1_000_000)));
    }

    #[test]
    fn waiting_for_a_permit_charges_nothing() {
        let mut admission = Admission::new(Rate::BytesPerSec(100), 100, 1);
        admission.submit(at(0), 1, 10);
        admission.submit(at(0), 2, 90);
        assert_eq!(admitted(&mut admission, 0), [1]);
        assert_eq!(admission.next(at(0)), Next::Idle);
        admission.finished(&1);
        assert_eq!(admitted(&mut admission, 0), [2]);
    }

    #[test]
    fn an_oversized_one_goes_when_the_bucket_is_full_and_is_counted() {
        let mut admission = Admission::new(Rate::BytesPerSec(100), 100, 9);
        admission.submit(at(0), 1, 1_000);
        admission.submit(at(0), 2, 1);
        assert_eq!(
            admission.next(at(0)),
            Next::Admit {
                key: 1,
                size: 1_000,
                oversized: true
            }
        );
        assert_eq!(admission.oversized(), 1);
        assert_eq!(admission.next(at(0)), Next::WaitUntil(at(9_010_000)));
    }

    #[test]
    fn a_cancelled_one_leaves_the_queue() {
        let mut admission = Admission::new(Rate::BytesPerSec(1), 1, 9);
        admission.submit(at(0), 1, 1);
        admission.submit(at(0), 2, 1);
        admission.submit(at(0), 3, 1);
        assert_eq!(admitted(&mut admission, 0), [1]);
        assert_eq!(admission.cancel(&2), Cancelled::Queued);
        assert_eq!(admission.cancel(&2), Cancelled::Unknown);
        assert_eq!(admitted(&mut admission, 1_000_000), [3]);
    }

    #[test]
    fn a_key_that_is_there_is_not_queued_twice() {
        let mut admission = Admission::new(Rate::Unlimited, 0, 1);
        admission.submit(at(0), 1, 1);
        admission.submit(at(0), 1, 1);
        assert_eq!(admitted(&mut admission, 0), [1]);
        admission.submit(at(0), 1, 1);
        assert_eq!((admission.queued(), admission.running()), (0, 1));
    }

    #[test]
    fn fewer_permits_than_are_held_admit_nothing_until_enough_have_ended() {
        let mut admission = Admission::new(Rate::Unlimited, 0, 3);
        for key in 0..5 {
            admission.submit(at(0), key, 1);
        }
        assert_eq!(admitted(&mut admission, 0), [0, 1, 2]);
        admission.set_permits(1);
        admission.finished(&0);
        admission.finished(&1);
        assert_eq!(admission.next(at(0)), Next::Idle);
        admission.finished(&2);
        assert_eq!(admitted(&mut admission, 0), [3]);
    }

    #[test]
    fn a_new_rate_holds_at_once() {
        let mut admission = Admission::new(Rate::BytesPerSec(1), 1, 9);
        admission.submit(at(0), 1, 1);
        admission.submit(at(0), 2, 1_000);
        assert_eq!(admitted(&mut admission, 0), [1]);
        admission.set_rate(at(0), Rate::BytesPerSec(1_000), 1_000);
        assert_eq!(admission.next(at(0)), Next::WaitUntil(at(1_000_000)));
        admission.set_rate(at(0), Rate::Unlimited, 0);
        assert_eq!(admitted(&mut admission, 0), [2]);
    }

    #[test]
    fn a_bucket_is_full_at_the_time_of_the_first_call() {
        let mut admission = Admission::new(Rate::BytesPerSec(1), 10, 9);
        admission.submit(at(7_000_000), 1, 10);
        admission.submit(at(7_000_000), 2, 1);
        assert_eq!(admitted(&mut admission, 7_000_000), [1]);
        assert_eq!(
            admission.next(at(7_000_000)),
            Next::WaitUntil(at(8_000_000))
        );
    }
}
