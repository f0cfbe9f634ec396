//! Whether an object of the bucket is garbage.
//!
//! A wrong 'delete' loses records for good; a wrong 'keep' costs a little money until the next round. So an object goes only on
//! proof, and everything unknown stays. The proof rests on a strongly consistent read of the stream's metadata that was made *after* the
//! object was listed, and it has to be made again just before the object is deleted.
//!
//! Age is not enough for proof. A fragment or group that is stored but not yet listed may wait for hours behind a persist that keeps failing.
//! What tells is the age of the *root*: a persist takes up everything that was applied before it, so whatever was stored long before the
//! current root, and is not listed by it, never will be.

use crate::key::ParsedKey;
use crate::units::{Epoch, Offset, Uid};

/// What a listing says of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// What its key names; `None` where that is not known.
    pub key: Option<ParsedKey>,
    /// Milliseconds since it was stored, by the store's clock; `None` where the store does not say.
    pub age_ms: Option<u64>,
}

/// What is known of the stream that the key names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Nothing: no answer, or none that is sure to be current.
    Unknown,
    /// The metadata store has no trace of it. (A stream is entered there before its first object is stored.)
    Deleted,
    /// It is there, but was never persisted.
    NeverPersisted,
    /// It is there, with this tier.
    Live(Tier),
}

/// The persisted tier of a stream, and how one object stands to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tier {
    /// Of the current root.
    pub epoch: Epoch,
    /// Of the current root.
    pub root: Uid,
    /// Milliseconds since the current root was stored, by the store's clock; `None` where it was not listed.
    pub root_age_ms: Option<u64>,
    /// Of the persisted manifest.
    pub next_offset: Offset,
    /// Whether the manifest, groups included, lists the object; `None` where not all groups could be read.
    pub listed: Option<bool>,
    /// When the stream's tier was discarded for the last time; `None` where it never was.
    pub discarded: Option<Discard>,
}

/// What is noted of the discard of a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Discard {
    /// Milliseconds since then.
    pub age_ms: u64,
    /// Of the writer that noted it, or took it over.
    pub epoch: Epoch,
}

/// The settings behind the verdict, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GcLimits {
    /// Younger objects stay. Much longer than a persist or a transfer may take.
    pub min_age_ms: u64,
    /// How long the objects of a discarded tier stay.
    pub discarded_tier_grace_ms: u64,
}

/// What to do with an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// Leave it.
    Keep(KeepReason),
    /// Delete it, after checking once more.
    Delete(DeleteReason),
}

/// Why an object stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KeepReason {
    /// Its key is none of those that this program makes, or one that others look after.
    NotOurs,
    /// The stream's state, the manifest's content or the object's age is not known.
    Unknown,
    /// It was stored too recently, or the root was.
    Young,
    /// It is in use.
    InUse,
    /// It may be in use soon: it belongs to what comes after the persisted manifest, or to a later writer.
    Ahead,
    /// It is of a discarded tier whose time is not over.
    Grace,
}

/// Why an object goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeleteReason {
    /// Nothing lists it, and nothing ever will.
    Orphan,
    /// It is of a discarded tier whose time is over.
    DiscardedTier,
    /// Its stream is gone.
    StreamDeleted,
}

impl DeleteReason {
    /// Whether such objects go only where the collection of orphans is enabled. The others always go: somebody has decided that already.
    #[must_use]
    pub fn is_optional(self) -> bool {
        match self {
            Self::Orphan => true,
            Self::DiscardedTier | Self::StreamDeleted => false,
        }
    }
}

/// Judges one object. Constant time.
#[must_use]
pub fn verdict(candidate: &Candidate, stream: &Stream, limits: &GcLimits) -> Verdict {
    let Some(key) = &candidate.key else {
        return Verdict::Keep(KeepReason::NotOurs);
    };
    if matches!(key, ParsedKey::History { .. }) {
        return Verdict::Keep(KeepReason::NotOurs);
    }
    let Some(age_ms) = candidate.age_ms else {
        return Verdict::Keep(KeepReason::Unknown);
    };
    if age_ms < limits.min_age_ms {
        return Verdict::Keep(KeepReason::Young);
    }
    match stream {
        Stream::Unknown => Verdict::Keep(KeepReason::Unknown),
        Stream::NeverPersisted => Verdict::Keep(KeepReason::Ahead),
        Stream::Deleted => Verdict::Delete(DeleteReason::StreamDeleted),
        Stream::Live(tier) => tier.verdict(key, age_ms, limits),
    }
}

impl Tier {
    fn verdict(&self, key: &ParsedKey, age_ms: u64, limits: &GcLimits) -> Verdict {
        match key {
            ParsedKey::History { .. } => Verdict::Keep(KeepReason::NotOurs),
            ParsedKey::Root { epoch, uid, .. } => self.root_verdict(*epoch, *uid, age_ms, limits),
            ParsedKey::Fragment { first_offset, .. } => {
                self.entry_verdict(*first_offset >= self.next_offset, age_ms, limits)
            }
            // A group that waits for its persist lies inside the persisted range, so only its age against the root's can tell.
            ParsedKey::Group { .. } => self.entry_verdict(false, age_ms, limits),
        }
    }

    fn root_verdict(&self, epoch: Epoch, uid: Uid, age_ms: u64, limits: &GcLimits) -> Verdict {
        if (epoch, uid) == (self.epoch, self.root) {
            Verdict::Keep(KeepReason::InUse)
        } else if epoch > self.epoch {
            Verdict::Keep(KeepReason::Ahead)
        } else {
            // The last root of a discarded tier is the way to its objects.
            self.if_discarded(age_ms, limits)
                .unwrap_or_else(|| self.if_older_than_root(age_ms, limits))
        }
    }

    /// The verdict on an object that was stored before the tier was discarded; `None` for others. Clocks differ, so of what was stored
    /// shortly before nobody knows: once the grace is over it is judged like any other object, or it would stay for ever.
    ///
    /// The writer that is to persist next has the note before it uploads anything, so what it uploads is younger. Until it has persisted
    /// something, objects of the writer before it may still become part of the tier, and nothing says whether a discard of this one was more than noted.
    fn if_discarded(&self, age_ms: u64, limits: &GcLimits) -> Option<Verdict> {
        let discard = self.discarded.filter(|discard| age_ms >= discard.age_ms)?;
        if discard.epoch != self.epoch || discard.age_ms < limits.discarded_tier_grace_ms {
            return Some(Verdict::Keep(KeepReason::Grace));
        }
        let surely_before = age_ms >= discard.age_ms.saturating_add(limits.min_age_ms);
        surely_before.then_some(Verdict::Delete(DeleteReason::DiscardedTier))
    }

    fn entry_verdict(&self, ahead: bool, age_ms: u64, limits: &GcLimits) -> Verdict {
        match self.listed {
            None => return Verdict::Keep(KeepReason::Unknown),
            Some(true) => return Verdict::Keep(KeepReason::InUse),
            Some(false) => {}
        }
        if let Some(verdict) = self.if_discarded(age_ms, limits) {
            return verdict;
        }
        if ahead {
            return Verdict::Keep(KeepReason::Ahead);
        }
        self.if_older_than_root(age_ms, limits)
    }

    fn if_older_than_root(&self, age_ms: u64, limits: &GcLimits) -> Verdict {
        match self.root_age_ms {
            None => Verdict::Keep(KeepReason::Unknown),
            Some(root_ms) if age_ms < root_ms.saturating_add(limits.min_age_ms) => {
                Verdict::Keep(KeepReason::Young)
            }
            // Most likely of the discarded tier, and dead in any case.
            Some(_)
                if self
                    .discarded
                    .is_some_and(|discard| age_ms >= discard.age_ms) =>
            {
                Verdict::Delete(DeleteReason::DiscardedTier)
            }
            Some(_) => Verdict::Delete(DeleteReason::Orphan),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::{RunId, StreamId};
    use crate::manifest::EntryKind;
    use DeleteReason::{DiscardedTier, Orphan, StreamDeleted};
    use KeepReason::{Ahead, Grace, InUse, NotOurs, Unknown, Young};
    use Verdict::{Delete, Keep};

    const LIMITS: GcLimits = GcLimits {
        min_age_ms: 100,
        discarded_tier_grace_ms: 1_000,
    };
    const TIER: Tier = Tier {
        epoch: Epoch(3),
        root: Uid(7),
        root_age_ms: Some(10),
        next_offset: Offset(50),
        listed: Some(false),
        discarded: None,
    };

    fn stream() -> StreamId {
        StreamId::parse("s").unwrap()
    }

    fn fragment(offset: u64, age_ms: u64) -> Candidate {
        let key = ParsedKey::Fragment {
            stream: stream(),
            first_offset: Offset(offset),
            uid: Uid(1),
        };
        Candidate {
            key: Some(key),
            age_ms: Some(age_ms),
        }
    }

    fn group(age_ms: u64) -> Candidate {
        let key = ParsedKey::Group {
            stream: stream(),
            kind: EntryKind::Group,
            first_offset: Offset(0),
            uid: Uid(1),
        };
        Candidate {
            key: Some(key),
            age_ms: Some(age_ms),
        }
    }

    fn root(epoch: u64, uid: u32, age_ms: u64) -> Candidate {
        let key = ParsedKey::Root {
            stream: stream(),
            epoch: Epoch(epoch),
            uid: Uid(uid),
        };
        Candidate {
            key: Some(key),
            age_ms: Some(age_ms),
        }
    }

    fn judge(candidate: &Candidate, tier: Tier) -> Verdict {
        verdict(candidate, &Stream::Live(tier), &LIMITS)
    }

    fn discarded(age_ms: u64, epoch: Epoch) -> Tier {
        Tier {
            discarded: Some(Discard { age_ms, epoch }),
            ..TIER
        }
    }

    #[test]
    fn what_is_not_ours_stays() {
        let unknown = Candidate {
            key: None,
            age_ms: Some(u64::MAX),
        };
        assert_eq!(verdict(&unknown, &Stream::Deleted, &LIMITS), Keep(NotOurs));
        let run = RunId::parse("r").unwrap();
        let history = Candidate {
            key: Some(ParsedKey::History { run, seq: 1 }),
            age_ms: Some(u64::MAX),
        };
        assert_eq!(verdict(&history, &Stream::Deleted, &LIMITS), Keep(NotOurs));
    }

    #[test]
    fn without_an_age_or_an_answer_everything_stays() {
        let ageless = Candidate {
            age_ms: None,
            ..fragment(0, 0)
        };
        assert_eq!(verdict(&ageless, &Stream::Deleted, &LIMITS), Keep(Unknown));
        assert_eq!(
            verdict(&fragment(0, 9_999), &Stream::Unknown, &LIMITS),
            Keep(Unknown)
        );
        assert_eq!(
            judge(
                &fragment(0, 9_999),
                Tier {
                    listed: None,
                    ..TIER
                }
            ),
            Keep(Unknown)
        );
        assert_eq!(
            judge(
                &fragment(0, 9_999),
                Tier {
                    root_age_ms: None,
                    ..TIER
                }
            ),
            Keep(Unknown)
        );
    }

    #[test]
    fn objects_of_a_deleted_stream_go_once_they_are_old_enough() {
        assert_eq!(
            verdict(&fragment(0, 99), &Stream::Deleted, &LIMITS),
            Keep(Young)
        );
        assert_eq!(
            verdict(&fragment(0, 100), &Stream::Deleted, &LIMITS),
            Delete(StreamDeleted)
        );
        assert_eq!(
            verdict(&root(1, 1, 100), &Stream::Deleted, &LIMITS),
            Delete(StreamDeleted)
        );
    }

    #[test]
    fn objects_of_a_stream_that_was_never_persisted_stay() {
        assert_eq!(
            verdict(&fragment(0, 9_999), &Stream::NeverPersisted, &LIMITS),
            Keep(Ahead)
        );
    }

    #[test]
    fn what_is_listed_stays() {
        assert_eq!(
            judge(
                &fragment(0, 9_999),
                Tier {
                    listed: Some(true),
                    ..TIER
                }
            ),
            Keep(InUse)
        );
        assert_eq!(
            judge(
                &group(9_999),
                Tier {
                    listed: Some(true),
                    ..TIER
                }
            ),
            Keep(InUse)
        );
    }

    #[test]
    fn an_unlisted_object_goes_only_where_it_is_much_older_than_the_root() {
        assert_eq!(judge(&fragment(0, 109), TIER), Keep(Young));
        assert_eq!(judge(&fragment(0, 110), TIER), Delete(Orphan));
        let old_root = Tier {
            root_age_ms: Some(5_000),
            ..TIER
        };
        assert_eq!(judge(&group(5_099), old_root), Keep(Young));
        assert_eq!(judge(&group(5_100), old_root), Delete(Orphan));
    }

    #[test]
    fn a_fragment_beyond_the_manifest_waits_for_its_persist_however_long() {
        assert_eq!(judge(&fragment(50, u64::MAX), TIER), Keep(Ahead));
        assert_eq!(judge(&fragment(49, u64::MAX), TIER), Delete(Orphan));
    }

    #[test]
    fn a_discarded_tier_stays_for_its_time_and_then_goes_as_a_whole() {
        let discarded = |age_ms| discarded(age_ms, TIER.epoch);
        assert_eq!(judge(&fragment(90, 5_000), discarded(999)), Keep(Grace));
        assert_eq!(
            judge(&fragment(90, 5_000), discarded(1_000)),
            Delete(DiscardedTier)
        );
        assert_eq!(judge(&fragment(90, 999), discarded(1_000)), Keep(Ahead));
        assert_eq!(judge(&fragment(0, 999), discarded(1_000)), Delete(Orphan));
        assert_eq!(judge(&root(2, 8, 5_000), discarded(999)), Keep(Grace));
        assert_eq!(
            judge(&root(2, 8, 5_000), discarded(1_000)),
            Delete(DiscardedTier)
        );
        assert_eq!(judge(&root(3, 7, 5_000), discarded(1_000)), Keep(InUse));
    }

    #[test]
    fn what_was_stored_shortly_before_the_discard_is_judged_like_others_once_the_grace_is_over() {
        let discarded = |age_ms| discarded(age_ms, TIER.epoch);
        assert_eq!(judge(&fragment(40, 1_050), discarded(999)), Keep(Grace));
        assert_eq!(
            judge(&fragment(40, 1_050), discarded(1_000)),
            Delete(DiscardedTier)
        );
        assert_eq!(judge(&fragment(90, 1_050), discarded(1_000)), Keep(Ahead));
        assert_eq!(
            judge(&root(2, 8, 1_050), discarded(1_000)),
            Delete(DiscardedTier)
        );
        let new_root = Tier {
            root_age_ms: Some(1_040),
            ..discarded(1_000)
        };
        assert_eq!(judge(&fragment(40, 1_050), new_root), Keep(Young));
    }

    /// The last root is of epoch 3. The writer of epoch 4 has uploaded something and persisted nothing yet, that of epoch 2 is deposed.
    #[test]
    fn nothing_goes_by_a_note_of_another_writer_than_the_one_that_persisted_last() {
        for epoch in [2, 4] {
            let noted = discarded(1_000, Epoch(epoch));
            assert_eq!(judge(&fragment(90, 5_000), noted), Keep(Grace));
            assert_eq!(judge(&fragment(0, 5_000), noted), Keep(Grace));
            assert_eq!(judge(&root(2, 8, 5_000), noted), Keep(Grace));
            assert_eq!(judge(&fragment(90, 999), noted), Keep(Ahead));
            assert_eq!(judge(&fragment(0, 999), noted), Delete(Orphan));
        }
    }

    #[test]
    fn of_the_roots_only_the_current_one_and_those_of_later_writers_stay() {
        assert_eq!(judge(&root(3, 7, 9_999), TIER), Keep(InUse));
        assert_eq!(judge(&root(4, 8, 9_999), TIER), Keep(Ahead));
        assert_eq!(judge(&root(3, 8, 109), TIER), Keep(Young));
        assert_eq!(judge(&root(3, 8, 110), TIER), Delete(Orphan));
        assert_eq!(judge(&root(2, 7, 110), TIER), Delete(Orphan));
    }

    #[test]
    fn only_orphans_are_optional() {
        assert!(Orphan.is_optional());
        assert!(!DiscardedTier.is_optional());
        assert!(!StreamDeleted.is_optional());
    }
}
