//! Whether a replica takes the edits that it is sent.

use crate::error::FormatError;
use crate::manifest::{Edit, EditError, Manifest, apply_edit};
use crate::units::{Epoch, Revision};

/// The edits of one persist, as a writer sends them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Broadcast<'a> {
    /// The writer's term.
    pub epoch: Epoch,
    /// Revision of the manifest in front of the edits.
    pub previous: Revision,
    /// Revision after them.
    pub revision: Revision,
    /// Oldest first.
    pub edits: &'a [Edit],
}

/// What a replica does with a broadcast.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Acceptance {
    /// It has this manifest now.
    Accept(Manifest),
    /// It has seen that before: nothing changes.
    Stale,
    /// It cannot follow: it needs the whole manifest of this stream again.
    Resync(ResyncReason),
}

/// Why a replica cannot follow.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResyncReason {
    /// The edits are of another writer.
    #[error("edits of epoch {got}, have epoch {have}")]
    Epoch {
        /// Of the replica's manifest.
        have: Epoch,
        /// Of the broadcast.
        got: Epoch,
    },
    /// Edits are missing in between.
    #[error("edits continue revision {previous}, have revision {have}")]
    Gap {
        /// Of the replica's manifest.
        have: Revision,
        /// What the broadcast continues.
        previous: Revision,
    },
    /// An edit does not fit.
    #[error(transparent)]
    BadEdit(#[from] EditError),
    /// The result is not a manifest.
    #[error(transparent)]
    BadManifest(#[from] FormatError),
}

/// Decides for a replica whose manifest is `have`, persisted by the writer of `epoch`. The revision is the sequence number: it
/// comes from the metadata store, so no restart can use one twice. One pass over the resulting entries.
#[must_use]
pub fn accept(have: &Manifest, epoch: Epoch, broadcast: &Broadcast<'_>) -> Acceptance {
    if broadcast.epoch != epoch {
        return Acceptance::Resync(ResyncReason::Epoch {
            have: epoch,
            got: broadcast.epoch,
        });
    }
    if broadcast.revision <= have.revision {
        return Acceptance::Stale;
    }
    if broadcast.previous != have.revision {
        let (have, previous) = (have.revision, broadcast.previous);
        return Acceptance::Resync(ResyncReason::Gap { have, previous });
    }
    match follow(have, broadcast) {
        Ok(manifest) => Acceptance::Accept(manifest),
        Err(reason) => Acceptance::Resync(reason),
    }
}

fn follow(have: &Manifest, broadcast: &Broadcast<'_>) -> Result<Manifest, ResyncReason> {
    let mut manifest = have.clone();
    for edit in broadcast.edits {
        manifest = apply_edit(edit, &manifest)?;
    }
    manifest.check()?;
    manifest.revision = broadcast.revision;
    Ok(manifest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::{Entry, EntryKind, new_edit};
    use crate::units::{Offset, TimestampMs, Uid};

    fn append(manifest: &Manifest, next: u64) -> Edit {
        let entry = Entry {
            first_offset: manifest.next_offset,
            first_timestamp: TimestampMs(1),
            last_timestamp: TimestampMs(2),
            kind: EntryKind::Fragment,
            size: 10,
            uid: Uid(1),
        };
        Edit::append(manifest, entry, Offset(next))
    }

    fn broadcast(edits: &[Edit], epoch: u64, previous: u64, revision: u64) -> Broadcast<'_> {
        let (previous, revision) = (Revision(previous), Revision(revision));
        Broadcast {
            epoch: Epoch(epoch),
            previous,
            revision,
            edits,
        }
    }

    #[test]
    fn edits_that_continue_the_manifest_are_taken() {
        let have = Manifest::empty_at(Offset(0), Revision(4));
        let first = append(&have, 10);
        let second = append(&apply_edit(&first, &have).unwrap(), 20);
        let edits = [first, second];
        let Acceptance::Accept(manifest) = accept(&have, Epoch(1), &broadcast(&edits, 1, 4, 5))
        else {
            panic!("refused");
        };
        assert_eq!(manifest.revision, Revision(5));
        assert_eq!(
            (manifest.next_offset, manifest.total_size),
            (Offset(20), 20)
        );
        assert_eq!(
            accept(&manifest, Epoch(1), &broadcast(&edits, 1, 4, 5)),
            Acceptance::Stale
        );
    }

    #[test]
    fn a_gap_or_another_epoch_means_a_full_sync() {
        let have = Manifest::empty_at(Offset(0), Revision(4));
        let edits = [append(&have, 10)];
        let (gap, stale) = (Revision(5), Revision(4));
        assert_eq!(
            accept(&have, Epoch(1), &broadcast(&edits, 1, 5, 6)),
            Acceptance::Resync(ResyncReason::Gap {
                have: stale,
                previous: gap
            })
        );
        for epoch in [0, 2] {
            let expected = ResyncReason::Epoch {
                have: Epoch(1),
                got: Epoch(epoch),
            };
            assert_eq!(
                accept(&have, Epoch(1), &broadcast(&edits, epoch, 4, 5)),
                Acceptance::Resync(expected)
            );
        }
    }

    #[test]
    fn an_edit_that_does_not_fit_means_a_full_sync() {
        let have = Manifest::empty_at(Offset(0), Revision(4));
        let beyond = Edit {
            pos: 34,
            ..append(&have, 10)
        };
        assert!(matches!(
            accept(&have, Epoch(1), &broadcast(&[beyond], 1, 4, 5)),
            Acceptance::Resync(ResyncReason::BadEdit(_))
        ));
        let crooked = Edit {
            first_offset: Offset(7),
            ..new_edit(&have)
        };
        assert!(matches!(
            accept(&have, Epoch(1), &broadcast(&[crooked], 1, 4, 5)),
            Acceptance::Resync(ResyncReason::BadManifest(_))
        ));
    }
}
