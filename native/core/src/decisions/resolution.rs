//! Which manifest a stream has. The one mistake that must not happen is to take 'could not read it' for 'there is none'.

use crate::manifest::Manifest;
use crate::units::{Epoch, Offset, Revision, Uid};

/// What the metadata store says of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Metadata {
    /// It has never been persisted.
    Absent,
    /// Its root.
    Present {
        /// Part of the root's key.
        uid: Uid,
        /// Part of the root's key: term of the writer that persisted it.
        epoch: Epoch,
        /// Of the metadata.
        revision: Revision,
    },
    /// The question was not answered.
    Failed,
}

/// What to do with that answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resolve {
    /// The stream has no tier.
    Empty,
    /// The cached manifest is the persisted one.
    UseCache,
    /// Read this root.
    Fetch {
        /// Part of its key.
        uid: Uid,
        /// Part of its key.
        epoch: Epoch,
        /// What the manifest gets as its revision.
        revision: Revision,
    },
    /// A later writer has persisted: this one has been replaced and must not write.
    Superseded {
        /// The later writer's term.
        by: Epoch,
    },
    /// Ask again later.
    Retry,
}

/// Decides where the manifest comes from. `cached` is the revision of the manifest at hand, `own` the term of the writer that asks.
#[must_use]
pub fn resolve(metadata: Metadata, cached: Option<Revision>, own: Epoch) -> Resolve {
    match metadata {
        Metadata::Failed => Resolve::Retry,
        Metadata::Absent => Resolve::Empty,
        Metadata::Present { epoch, .. } if epoch > own => Resolve::Superseded { by: epoch },
        Metadata::Present { revision, .. } if cached == Some(revision) => Resolve::UseCache,
        Metadata::Present {
            uid,
            epoch,
            revision,
        } => Resolve::Fetch {
            uid,
            epoch,
            revision,
        },
    }
}

/// What became of reading a root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fetched {
    /// It was read and decoded.
    Manifest(Manifest),
    /// The store says that there is no such object.
    NotFound,
    /// Anything else: no answer, no permission, damaged bytes.
    Failed,
}

/// Which manifest the stream has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resolved {
    /// This one, with its revision; it may be empty.
    Manifest(Manifest),
    /// Nobody knows: ask again later, and tell an operator.
    Retry,
}

/// Decides what a fetched root means. A root that is missing though metadata points to it is a loss that an operator has to look at; only at
/// revision 0, where nothing was ever persisted, does it mean an empty tier.
#[must_use]
pub fn resolved(fetched: Fetched, revision: Revision) -> Resolved {
    match fetched {
        Fetched::Manifest(manifest) => Resolved::Manifest(Manifest {
            revision,
            ..manifest
        }),
        Fetched::NotFound if revision == Revision(0) => {
            Resolved::Manifest(Manifest::empty_at(Offset(0), revision))
        }
        Fetched::NotFound | Fetched::Failed => Resolved::Retry,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRESENT: Metadata = Metadata::Present {
        uid: Uid(7),
        epoch: Epoch(3),
        revision: Revision(5),
    };

    #[test]
    fn only_an_answer_that_nothing_is_there_means_empty() {
        assert_eq!(
            resolve(Metadata::Absent, Some(Revision(5)), Epoch(3)),
            Resolve::Empty
        );
        assert_eq!(
            resolve(Metadata::Failed, Some(Revision(5)), Epoch(3)),
            Resolve::Retry
        );
        assert_eq!(resolve(Metadata::Failed, None, Epoch(3)), Resolve::Retry);
    }

    #[test]
    fn the_cache_is_used_only_at_the_persisted_revision() {
        let fetch = Resolve::Fetch {
            uid: Uid(7),
            epoch: Epoch(3),
            revision: Revision(5),
        };
        assert_eq!(
            resolve(PRESENT, Some(Revision(5)), Epoch(3)),
            Resolve::UseCache
        );
        assert_eq!(resolve(PRESENT, Some(Revision(4)), Epoch(3)), fetch);
        assert_eq!(resolve(PRESENT, Some(Revision(6)), Epoch(3)), fetch);
        assert_eq!(resolve(PRESENT, None, Epoch(4)), fetch);
    }

    #[test]
    fn a_writer_that_was_replaced_does_not_go_on() {
        assert_eq!(
            resolve(PRESENT, Some(Revision(5)), Epoch(2)),
            Resolve::Superseded { by: Epoch(3) }
        );
    }

    #[test]
    fn a_fetched_root_gets_its_revision() {
        let manifest = Manifest::empty_at(Offset(4), Revision(0));
        let expected = Manifest::empty_at(Offset(4), Revision(5));
        assert_eq!(
            resolved(Fetched::Manifest(manifest), Revision(5)),
            Resolved::Manifest(expected)
        );
    }

    #[test]
    fn a_missing_root_is_an_empty_tier_only_where_none_was_persisted() {
        let empty = Manifest::empty_at(Offset(0), Revision(0));
        assert_eq!(
            resolved(Fetched::NotFound, Revision(0)),
            Resolved::Manifest(empty)
        );
        assert_eq!(resolved(Fetched::NotFound, Revision(1)), Resolved::Retry);
        assert_eq!(resolved(Fetched::Failed, Revision(0)), Resolved::Retry);
        assert_eq!(resolved(Fetched::Failed, Revision(1)), Resolved::Retry);
    }
}
