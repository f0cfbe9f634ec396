//! Deletion of what nothing refers to, as `rabbitmq_stream_s3_reaper` does it on each node: one request at a time, until it succeeds.

use std::collections::VecDeque;

use stream_s3_core::decisions::retry::retry_delay;
use stream_s3_core::error::TransferError;

use crate::bucket::{StoreAnswer, StoreError, StoreOp, StoreValue};
use crate::env::{Env, Event, Origin};

/// Keys of one request.
const BATCH: usize = 8;
/// Of a request, in milliseconds.
const REQUEST_TIMEOUT: u64 = 3_000;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Reaper {
    waiting: VecDeque<String>,
    /// What the store did not delete.
    failed: Vec<String>,
    request: Option<(u64, Vec<String>)>,
    /// Number of the timer of the next attempt.
    retry: Option<u64>,
    /// Nothing is asked for until the next attempt.
    blocked: bool,
    failures: u32,
}

impl Reaper {
    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.failed.is_empty() && self.request.is_none()
    }
}

/// Deletes objects, some time.
pub(crate) fn delete(env: &mut Env, node: usize, keys: Vec<String>) {
    env.nodes[node].reaper.waiting.extend(keys);
    request(env, node);
}

fn request(env: &mut Env, node: usize) {
    let reaper = &mut env.nodes[node].reaper;
    if reaper.request.is_some() || reaper.blocked || reaper.waiting.is_empty() {
        return;
    }
    let count = reaper.waiting.len().min(BATCH);
    let keys: Vec<String> = reaper.waiting.drain(..count).collect();
    let number = env.fresh();
    env.nodes[node].reaper.request = Some((number, keys.clone()));
    let refused = if env.fault(env.plan.store_faults / 4) {
        env.coverage.hit("store deletes in part");
        1
    } else {
        0
    };
    let op = StoreOp::Delete { keys, refused };
    env.store(op, Origin::Reaper(node, number));
    env.after(REQUEST_TIMEOUT, Event::Reaper(node, number));
}

/// A request took too long, or it is time for the next attempt.
pub(crate) fn due(env: &mut Env, node: usize, number: u64) {
    let reaper = &mut env.nodes[node].reaper;
    if reaper.retry == Some(number) {
        reaper.retry = None;
        reaper.blocked = false;
        let again = std::mem::take(&mut reaper.failed);
        reaper.waiting.extend(again);
        request(env, node);
    } else {
        answered(
            env,
            node,
            number,
            Err(StoreError::Failed(TransferError::Timeout)),
        );
    }
}

/// The store has answered.
pub(crate) fn answered(env: &mut Env, node: usize, number: u64, answer: StoreAnswer) {
    let reaper = &mut env.nodes[node].reaper;
    let Some((_, keys)) = reaper.request.take_if(|(request, _)| *request == number) else {
        return;
    };
    match answer {
        Ok(StoreValue::Undeleted(left)) if left.is_empty() => {
            if reaper.failed.is_empty() {
                reaper.failures = 0;
            }
            env.coverage.hit("reaper deletes");
        }
        Ok(StoreValue::Undeleted(left)) => {
            env.coverage.hit("reaper deletes in part");
            failed(env, node, left, &TransferError::Http(500));
        }
        Ok(StoreValue::Done | StoreValue::Body(_) | StoreValue::Listing(_)) => {}
        Err(StoreError::NotFound) => failed(env, node, keys, &TransferError::Http(404)),
        Err(StoreError::Failed(error)) => {
            env.coverage.hit("reaper fails");
            env.nodes[node].reaper.blocked = true;
            failed(env, node, keys, &error);
        }
    }
    request(env, node);
}

fn failed(env: &mut Env, node: usize, left: Vec<String>, error: &TransferError) {
    let jitter = env.rng.bits32();
    let number = env.fresh();
    let reaper = &mut env.nodes[node].reaper;
    reaper.failed.extend(left);
    reaper.failures += 1;
    if reaper.retry.is_none() {
        // Never at once: a key that cannot be deleted would be asked for without a pause.
        let delays = &env.plan.delays;
        let delay = retry_delay(error.class(), reaper.failures, delays, jitter);
        reaper.retry = Some(number);
        env.after(
            delay.max(env.plan.delays.permanent_ms),
            Event::Reaper(node, number),
        );
    }
}
