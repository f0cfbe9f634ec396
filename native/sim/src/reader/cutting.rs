//! Draining, and where fragments end.

use std::rc::Rc;

use stream_s3_core::error::TransferError;
use stream_s3_core::fragment::FragmentMeta;
use stream_s3_core::units::{TimestampMs, TransferId};

use super::drain::Turn;
use super::{Host, Reader, Timer, Verdict};
use crate::env::Env;

/// Turns of the drain that a forced cut takes first.
const FORCE_CUT_TURNS: usize = 16;

impl Reader {
    pub(super) fn drain(&mut self, env: &mut Env) {
        if !self.has_room(env) {
            env.coverage.hit("drain paused");
            self.paused = true;
            return;
        }
        match self.turn(env) {
            Some(Turn::Cut(meta)) => {
                self.cut(env, meta);
                self.go_on(env);
            }
            Some(Turn::More) => {
                self.watch_age(env);
                self.first_cut(env);
                self.go_on(env);
            }
            Some(Turn::EndOfLog) => {
                self.watch_age(env);
                self.first_cut(env);
                self.end_of_log(env);
            }
            Some(Turn::Gap) => self.behind_gap(env),
            None => {}
        }
    }

    fn turn(&mut self, env: &mut Env) -> Option<Turn> {
        self.drain.as_mut().map(|drain| drain.turn(env))
    }

    pub(super) fn has_room(&self, env: &Env) -> bool {
        // Of a paused stream nothing is cut; what has been cut is uploaded and persisted. Behind a gap nothing is of use.
        !env.paused && self.gap.is_none() && self.cut.len() < env.plan.max_in_flight
    }

    pub(super) fn go_on(&mut self, env: &mut Env) {
        if !self.draining {
            self.draining = true;
            env.send(self.pid, super::Msg::Drain);
        }
    }

    fn end_of_log(&mut self, env: &mut Env) {
        if self.listening {
            return;
        }
        let next = self.drain.as_ref().map_or(0, |drain| drain.next_offset());
        env.listen(self.node, self.pid, next);
        self.listening = true;
        // And look again: a commit that came before the writer knew of us is announced to nobody.
        self.go_on(env);
    }

    /// The log does not have what must come next, and neither do the pins.
    fn behind_gap(&mut self, env: &mut Env) {
        if let Some(meta) = self.drain.as_mut().and_then(|drain| drain.cut(env)) {
            self.cut(env, meta);
        }
        let at = self.drain.as_ref().map_or(0, |drain| drain.start());
        self.lost(env, at);
    }

    /// Retention has deleted what must come next before it was uploaded. What is on its way in front of it may still arrive.
    pub(super) fn lost(&mut self, env: &mut Env, at: u64) {
        self.gap = Some(self.gap.map_or(at, |before| before.min(at)));
        self.settle(env);
    }

    /// Resolves anew because of a gap, as soon as all that lies in front of it is persisted.
    pub(super) fn settle(&mut self, env: &mut Env) {
        let (Some(at), Some(core)) = (self.gap, &self.core) else {
            return;
        };
        let (status, nothing_yet) = (core.status(), core.manifest().total_size == 0);
        if self.any_before(at) || status.persist_in_flight {
            return;
        }
        // A new beginning of which nothing has been uploaded: there is nothing to be persisted.
        let reset = self.discarded.is_some();
        if nothing_yet && reset || status.edits_waiting == 0 {
            env.coverage.hit("gap settled");
            self.cut_early = nothing_yet;
            self.verdict = Verdict::Resolve(TransferError::Timeout);
        } else if self.persist_failures.0 == 0 {
            let now = TimestampMs(env.clock() + env.plan.persist_interval as i64);
            self.tell(env, |core| core.tick(now));
        }
    }

    /// Where a beginning came to nothing, the next one's first fragment does not wait for more data: what it has is deleted next.
    fn first_cut(&mut self, env: &mut Env) {
        if self.cut_early
            && let Some(meta) = self.drain.as_mut().and_then(|drain| drain.cut(env))
        {
            env.coverage.hit("cut early");
            self.cut(env, meta);
        }
    }

    fn cut(&mut self, env: &mut Env, meta: FragmentMeta) {
        self.cut_early = false;
        self.cut.push_back(meta.next_offset.0);
        self.watch_age(env);
        let id = TransferId(env.fresh());
        env.note(|| {
            format!(
                "reader {} cuts [{}, {}) as {id}",
                self.pid, meta.first_offset, meta.next_offset
            )
        });
        env.drained(self.node, &meta);
        env.coverage.hit("event fragment_cut");
        let fragment = meta.fragment();
        let detail = Host::Meta(Rc::new(meta));
        let Some(core) = &mut self.core else {
            return;
        };
        match core.fragment_cut(id, fragment, detail) {
            Ok(effects) => self.perform_all(env, effects),
            Err(error) => env.violate(0, error.to_string()),
        }
    }

    pub(super) fn force_cut(&mut self, env: &mut Env) {
        env.coverage.hit("force cut");
        for _ in 0..FORCE_CUT_TURNS {
            if !self.has_room(env) {
                break;
            }
            match self.turn(env) {
                Some(Turn::Cut(meta)) => self.cut(env, meta),
                Some(Turn::More) => {}
                Some(Turn::EndOfLog) | None => break,
                Some(Turn::Gap) => {
                    self.behind_gap(env);
                    return;
                }
            }
        }
        if let Some(meta) = self.drain.as_mut().and_then(|drain| drain.cut(env)) {
            self.cut(env, meta);
        }
        self.go_on(env);
    }

    /// The fragment that is being assembled has reached the age at which it is cut.
    pub(super) fn too_old(&mut self, env: &mut Env) {
        if !self.has_room(env) {
            self.paused = true;
            return;
        }
        if let Some(meta) = self.drain.as_mut().and_then(|drain| drain.cut(env)) {
            env.coverage.hit("age cut");
            self.cut(env, meta);
        }
    }

    fn watch_age(&mut self, env: &mut Env) {
        let since = self.drain.as_ref().and_then(|drain| drain.since());
        if self.age_timer.map(|(_, since)| since) == since {
            return;
        }
        self.age_timer = since.map(|since| {
            let left = (since + env.plan.fragment_max_age).saturating_sub(env.now);
            (self.timer(env, left, Timer::Age), since)
        });
    }

    /// Goes on draining, if that waits for something that may have come.
    pub(super) fn resume(&mut self, env: &mut Env) {
        if self.paused && self.has_room(env) {
            self.paused = false;
            self.go_on(env);
        }
    }

    /// Everything that is committed now is to be cut and persisted without waiting for more.
    pub(super) fn ask_to_flush(&mut self, env: &mut Env, waiter: u64) {
        if self.core.is_none() || env.paused {
            env.coverage.hit("flush refused");
            env.oracle.reader_down(waiter);
            return;
        }
        env.coverage.hit("flush");
        let writer = env.cluster.members[self.node].writer;
        let to = writer.map_or(0, |writer| (writer.committed + 1) as u64);
        self.flush = Some(to);
        env.oracle.asked(waiter, to);
        self.wait_for(env, waiter, to);
    }

    /// Brings a flush on: ends the fragment that has the last of what is to be flushed as soon as that is drained, and has it persisted as
    /// soon as it is uploaded.
    pub(super) fn flush(&mut self, env: &mut Env) {
        let (Some(to), Some(core)) = (self.flush, &self.core) else {
            return;
        };
        let status = core.status();
        if core.persisted_manifest().next_offset.0 >= to {
            self.flush = None;
        } else if core.manifest().next_offset.0 >= to {
            // Not after a failure, which has to wait for its delay like any other.
            if status.edits_waiting > 0 && !status.persist_in_flight && self.persist_failures.0 == 0
            {
                env.coverage.hit("flush persists");
                let now = TimestampMs(env.clock() + env.plan.persist_interval as i64);
                self.tell(env, |core| core.tick(now));
            }
        } else {
            self.cut_now(env, to);
        }
    }

    fn cut_now(&mut self, env: &mut Env, to: u64) {
        let complete = self
            .drain
            .as_ref()
            .is_some_and(|drain| drain.start() < to && drain.end() >= to);
        if complete
            && self.has_room(env)
            && let Some(meta) = self.drain.as_mut().and_then(|drain| drain.cut(env))
        {
            env.coverage.hit("flush cuts");
            self.cut(env, meta);
        }
    }
}
