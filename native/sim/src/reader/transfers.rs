//! The uploads of one stream, as `rabbitmq_stream_s3_replica_reader_transfers` keeps them.

use std::collections::BTreeMap;
use std::rc::Rc;

use stream_s3_core::decisions::retry::{Outlook, outlook};
use stream_s3_core::error::TransferError;
use stream_s3_core::fragment::FragmentMeta;
use stream_s3_core::units::{TransferId, Uid};

use super::{Reader, Timer};
use crate::env::{AttemptId, Env, TimerId};
use crate::governor;
use crate::twin::Twin;

/// A fragment on its way.
#[derive(Debug)]
struct Fragment {
    meta: Rc<FragmentMeta>,
    failures: u32,
    cause: TransferError,
    /// The newest attempt; none while the next one waits for its time.
    current: Option<AttemptId>,
    admitted: bool,
    /// Whether it waits for what becomes of the one that is tried for all.
    held: bool,
    timer: Option<TimerId>,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Transfers {
    fragments: BTreeMap<TransferId, Fragment>,
    /// All attempts whose result may still be of use, the given-up ones among them.
    attempts: BTreeMap<AttemptId, TransferId>,
    /// The fragment that is tried for all, while the store is away.
    probe: Option<TransferId>,
}

impl Reader {
    pub(super) fn submit(&mut self, env: &mut Env, id: TransferId, meta: Rc<FragmentMeta>) {
        let fragment = Fragment {
            meta,
            failures: 0,
            cause: TransferError::Timeout,
            current: None,
            admitted: false,
            held: self.transfers.probe.is_some(),
            timer: None,
        };
        let held = fragment.held;
        self.transfers.fragments.insert(id, fragment);
        if !held {
            self.attempt(env, id);
        }
    }

    /// Another attempt, as soon as the failure allows.
    pub(super) fn retry(&mut self, env: &mut Env, id: TransferId) {
        let probe = self.transfers.probe;
        let Some(fragment) = self.transfers.fragments.get_mut(&id) else {
            return;
        };
        let (cause, failures) = (fragment.cause.clone(), fragment.failures);
        let alone = probe.is_none() || probe == Some(id);
        if !alone && outlook(&cause, failures) != Outlook::There {
            fragment.held = true;
            return;
        }
        match Self::retry_delay(env, &cause, failures) {
            0 => self.attempt(env, id),
            delay => {
                let timer = self.timer(env, delay, Timer::NextAttempt(id));
                if let Some(fragment) = self.transfers.fragments.get_mut(&id) {
                    fragment.timer = Some(timer);
                }
            }
        }
    }

    fn attempt(&mut self, env: &mut Env, id: TransferId) {
        let attempt = env.fresh();
        let Some(fragment) = self.transfers.fragments.get_mut(&id) else {
            return;
        };
        fragment.current = Some(attempt);
        fragment.admitted = false;
        fragment.held = false;
        fragment.timer = None;
        let meta = fragment.meta.clone();
        self.transfers.attempts.insert(attempt, id);
        governor::submit(env, self.node, attempt, self.pid, meta);
    }

    pub(super) fn admitted(&mut self, env: &mut Env, attempt: AttemptId) {
        let Some(id) = self.transfers.attempts.get(&attempt).copied() else {
            return;
        };
        // Every fragment of these worlds is smaller than the unit that deadlines grow with.
        let delay = env.plan.transfer_deadline;
        let waits = self
            .transfers
            .fragments
            .get(&id)
            .is_some_and(|fragment| fragment.current == Some(attempt) && !fragment.admitted);
        if !waits || env.is(Twin::TransferDeadline) {
            return;
        }
        let timer = self.timer(env, delay, Timer::Deadline(id));
        if let Some(fragment) = self.transfers.fragments.get_mut(&id) {
            fragment.admitted = true;
            fragment.timer = Some(timer);
        }
    }

    pub(super) fn transfer_result(
        &mut self,
        env: &mut Env,
        attempt: AttemptId,
        result: Result<Uid, TransferError>,
    ) {
        let Some(id) = self.transfers.attempts.remove(&attempt) else {
            env.coverage.hit("old transfer result");
            return;
        };
        let Some(fragment) = self.transfers.fragments.get(&id) else {
            return;
        };
        match result {
            Ok(uid) => {
                if fragment.current != Some(attempt) {
                    env.coverage.hit("given-up attempt succeeded");
                }
                self.drop_fragment(env, id);
                self.attempt_held(env);
                self.stored(env, id, uid);
            }
            Err(error) if fragment.current == Some(attempt) => self.attempt_failed(env, id, error),
            // Of an attempt that was given up only success counts.
            Err(_) => {}
        }
    }

    pub(super) fn deadline(&mut self, env: &mut Env, timer: TimerId, id: TransferId) {
        let Some(fragment) = self.transfers.fragments.get(&id) else {
            return;
        };
        if fragment.timer != Some(timer) {
            return;
        }
        env.coverage.hit("transfer deadline");
        let attempt = fragment.current;
        // It stays in `attempts`: if it did succeed, that counts.
        governor::cancel(env, self.node, attempt.as_slice());
        self.attempt_failed(env, id, TransferError::Timeout);
    }

    pub(super) fn next_attempt(&mut self, env: &mut Env, timer: TimerId, id: TransferId) {
        let due = self
            .transfers
            .fragments
            .get(&id)
            .is_some_and(|fragment| fragment.timer == Some(timer));
        if due {
            self.attempt(env, id);
        }
    }

    fn attempt_failed(&mut self, env: &mut Env, id: TransferId, error: TransferError) {
        if let Some(fragment) = self.transfers.fragments.get_mut(&id) {
            fragment.failures += 1;
            fragment.cause = error.clone();
            fragment.current = None;
            fragment.admitted = false;
            fragment.timer = None;
            match outlook(&error, fragment.failures) {
                Outlook::There => self.probe_ended(env, id),
                Outlook::Away if self.transfers.probe.is_none() => {
                    env.coverage.hit("one fragment is tried for all");
                    self.transfers.probe = Some(id);
                }
                Outlook::Doubtful | Outlook::Away => {}
            }
        }
        self.not_stored(env, id, error);
    }

    fn probe_ended(&mut self, env: &mut Env, id: TransferId) {
        if self.transfers.probe == Some(id) {
            self.attempt_held(env);
        }
    }

    fn attempt_held(&mut self, env: &mut Env) {
        self.transfers.probe = None;
        if env.is(Twin::ReleaseHeld) {
            return;
        }
        let fragments = &self.transfers.fragments;
        let mut held: Vec<_> = fragments.iter().filter(|(_, one)| one.held).collect();
        held.sort_by_key(|(_, one)| one.meta.first_offset);
        for id in held.into_iter().map(|(id, _)| *id).collect::<Vec<_>>() {
            self.attempt(env, id);
        }
    }

    /// First offset of a fragment on its way.
    pub(super) fn first_of(&self, id: TransferId) -> Option<u64> {
        let fragment = self.transfers.fragments.get(&id)?;
        Some(fragment.meta.first_offset.0)
    }

    /// Whether a fragment in front of an offset is on its way.
    pub(super) fn any_before(&self, at: u64) -> bool {
        let mut fragments = self.transfers.fragments.values();
        fragments.any(|fragment| fragment.meta.first_offset.0 < at)
    }

    /// No attempt of a fragment can succeed any more.
    pub(super) fn give_up(&mut self, env: &mut Env, id: TransferId) {
        self.drop_fragment(env, id);
        self.probe_ended(env, id);
    }

    /// All its other attempts are superfluous.
    fn drop_fragment(&mut self, env: &mut Env, id: TransferId) {
        self.transfers.fragments.remove(&id);
        let others: Vec<AttemptId> = self
            .transfers
            .attempts
            .iter()
            .filter(|(_, of)| **of == id)
            .map(|(attempt, _)| *attempt)
            .collect();
        governor::cancel(env, self.node, &others);
        self.transfers.attempts.retain(|_, of| *of != id);
    }

    pub(super) fn cancel_transfers(&mut self, env: &mut Env) {
        let all: Vec<AttemptId> = self.transfers.attempts.keys().copied().collect();
        governor::cancel(env, self.node, &all);
        self.transfers = Transfers::default();
    }
}
