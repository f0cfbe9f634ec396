//! Deleting everything of a run.

use super::event::Effect;
use super::machine::{Machine, Phase, Then};
use crate::error::ErrorClass;

/// How long a purge waits after the store has refused something for good, in milliseconds: until somebody has mended it.
pub const PURGE_RETRY_MS: u64 = 60_000;

/// What a purge does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Ask the host whether there may be anything. Nothing is deleted before this moment.
    Catalog { not_before: u64 },
    /// Delete by key.
    Delete,
    /// Delete by prefix.
    Sweep,
    /// Tell the host.
    Tell,
}

/// Whether an object of the prefix of all histories may be deleted: its run is known to be gone, by a read that was made after the object was
/// listed, and it is `age_ms` old, which is unknown where the store does not say.
#[must_use]
pub fn may_sweep(run_is_gone: bool, age_ms: Option<u64>, min_age_ms: u64) -> bool {
    run_is_gone && age_ms.is_some_and(|age| age >= min_age_ms)
}

impl Machine {
    pub(super) fn purge(&mut self) {
        match &self.phase {
            Phase::Purging(_)
            | Phase::Pausing {
                then: Then::Purge(_),
                ..
            } => return,
            Phase::Queued { .. }
            | Phase::Reading { .. }
            | Phase::Storing { .. }
            | Phase::Examining { .. } => {
                self.emit(Effect::Abort);
                self.emit(Effect::GivePermitBack);
            }
            Phase::Idle
            | Phase::Listing
            | Phase::Acknowledging(_)
            | Phase::Pausing { .. }
            | Phase::Blocked
            | Phase::Gone
            | Phase::Purged => self.emit(Effect::Abort),
        }
        self.window.clear();
        self.failures = 0;
        // Other owners' requests end by themselves, and within this time.
        let not_before = self.now.saturating_add(self.options.purge_wait_ms);
        self.begin(Step::Catalog { not_before });
    }

    pub(super) fn begin(&mut self, step: Step) {
        let attempt = self.fresh();
        self.emit(match step {
            Step::Catalog { .. } => Effect::Catalog { attempt },
            Step::Delete => Effect::Delete { attempt },
            Step::Sweep => Effect::Sweep { attempt },
            Step::Tell => Effect::TellHost { attempt },
        });
        self.phase = Phase::Purging(step);
    }

    pub(super) fn catalog_read(&mut self, had_segments: bool) {
        let Phase::Purging(Step::Catalog { not_before }) = self.phase else {
            return;
        };
        self.failures = 0;
        if had_segments {
            let wait = not_before.saturating_sub(self.now);
            self.pause_for(wait, Then::Purge(Step::Delete));
        } else {
            // Nothing was ever to be uploaded, so there is nothing to wait for.
            self.begin(Step::Sweep);
        }
    }

    pub(super) fn step_done(&mut self) {
        let Phase::Purging(step) = &self.phase else {
            return;
        };
        self.failures = 0;
        match step {
            Step::Catalog { .. } => {}
            Step::Delete => self.begin(Step::Sweep),
            Step::Sweep => self.begin(Step::Tell),
            Step::Tell => self.phase = Phase::Purged,
        }
    }

    pub(super) fn step_failed(&mut self, step: Step, class: ErrorClass, jitter: u32) {
        match class {
            ErrorClass::Transient | ErrorClass::Throttled => {
                self.pause(class, jitter, Then::Purge(step));
            }
            ErrorClass::Permanent => self.pause_for(PURGE_RETRY_MS, Then::Purge(step)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_old_objects_of_runs_that_are_gone_are_swept() {
        assert!(may_sweep(true, Some(10), 10));
        assert!(!may_sweep(true, Some(9), 10));
        assert!(!may_sweep(true, None, 10));
        assert!(!may_sweep(false, Some(10), 10));
    }
}
