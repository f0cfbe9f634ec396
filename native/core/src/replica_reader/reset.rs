//! Beginning anew on a stream that has a tier of another timeline, or one with a gap before the local log.

use super::persist::{Origin, Pending};
use super::{Effect, Machine, Options, OptionsError};
use crate::manifest::{Edit, Manifest};
use crate::units::{Offset, TimestampMs};

/// When a reset is persisted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ResetPersist {
    /// At once: the tier holds records that the log does not have.
    AtOnce,
    /// Together with the first fragment: the tier's records are good, and stay until there is something better.
    WithFirstFragment,
}

impl<T: Clone> Machine<T> {
    /// A machine whose persisted manifest is `old`, and whose speculative one is empty at `at`. Until the reset is persisted nothing of the new
    /// tier is visible, and no waiter is answered by the old one.
    ///
    /// Effects: `StartPersist` with `AtOnce`, none with `WithFirstFragment`.
    pub fn init_reset(
        old: Manifest,
        at: Offset,
        when: ResetPersist,
        options: Options,
        now: TimestampMs,
    ) -> Result<(Self, Vec<Effect<T>>), OptionsError> {
        let edit = Edit::reset(&old, at);
        let empty = Manifest::empty_at(at, old.revision);
        let (mut machine, _) = Self::init(old, options, now)?;
        machine.replace_manifest(empty);
        machine.edits.push_back(Pending::new(edit, Origin::Reset));
        machine.reset_unpersisted = true;
        let effects = match when {
            ResetPersist::AtOnce => vec![machine.start_persist()],
            ResetPersist::WithFirstFragment => {
                machine.reset_waits = true;
                Vec::new()
            }
        };
        Ok((machine, effects))
    }
}
