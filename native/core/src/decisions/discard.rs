//! Who may note that a stream's tier is discarded.
//!
//! What was stored before the noted moment, and is not listed, goes as a discarded tier once its grace is over. A note of a deposed writer would so take
//! what the live one has uploaded and not persisted yet. So a note has the epoch of its writer, each writer takes it over before it uploads anything,
//! whether there was a discard or not, and nobody replaces the note of a later one.

use crate::units::{Epoch, TimestampMs};

/// What the metadata store has besides a manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiscardNote {
    /// What was stored before belongs to a discarded tier, unless the manifest lists it; `None` where no tier was discarded.
    pub at: Option<TimestampMs>,
    /// Of the writer that noted it, or took it over.
    pub epoch: Epoch,
}

/// What a writer that begins has to do about the note.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    /// It is its own.
    Own,
    /// Replace it by this one, if it is still the same.
    TakeOver(DiscardNote),
    /// A writer of this later epoch has it: this one must not write.
    Fenced(Epoch),
}

/// How the writer of `epoch`, which has uploaded nothing before `now`, takes the note over. Constant time.
#[must_use]
pub fn claim(note: Option<&DiscardNote>, epoch: Epoch, now: TimestampMs) -> Claim {
    match note {
        Some(note) if note.epoch == epoch => Claim::Own,
        Some(note) if note.epoch > epoch => Claim::Fenced(note.epoch),
        // The other one's clock may be ahead: what this writer will upload is no part of what was discarded.
        Some(_) | None => Claim::TakeOver(DiscardNote {
            at: note.and_then(|note| note.at).map(|at| at.min(now)),
            epoch,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: TimestampMs = TimestampMs(1_000);

    fn note(at: Option<i64>, epoch: u64) -> DiscardNote {
        DiscardNote {
            at: at.map(TimestampMs),
            epoch: Epoch(epoch),
        }
    }

    fn claimed(before: Option<DiscardNote>) -> Claim {
        claim(before.as_ref(), Epoch(5), NOW)
    }

    #[test]
    fn a_writer_takes_over_what_earlier_ones_have_noted_or_have_not() {
        assert_eq!(claimed(None), Claim::TakeOver(note(None, 5)));
        assert_eq!(claimed(Some(note(None, 4))), Claim::TakeOver(note(None, 5)));
        assert_eq!(
            claimed(Some(note(Some(900), 4))),
            Claim::TakeOver(note(Some(900), 5))
        );
    }

    #[test]
    fn a_moment_that_is_yet_to_come_becomes_now() {
        assert_eq!(
            claimed(Some(note(Some(1_001), 4))),
            Claim::TakeOver(note(Some(1_000), 5))
        );
    }

    #[test]
    fn its_own_note_stays_and_that_of_a_later_writer_fences_it() {
        assert_eq!(claimed(Some(note(Some(900), 5))), Claim::Own);
        assert_eq!(claimed(Some(note(None, 6))), Claim::Fenced(Epoch(6)));
    }
}
