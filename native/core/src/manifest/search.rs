//! Finding the fragment that holds an offset, or the first one that is young enough.
//!
//! Where the answer lies inside a group, the search stops and says which group to fetch; the caller fetches it and resumes.

use super::{Entry, FragmentRef, GroupRef, Manifest, ObjectRef};
use crate::units::{Offset, TimestampMs};

/// What a search has come to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lookup {
    /// The fragment.
    Found(FragmentRef),
    /// The answer is inside this group: fetch and decode it, then [`LookupContinuation::resume`].
    Fetch(GroupRef, LookupContinuation),
    /// No tiered fragment answers.
    NotFound,
}

/// A search that waits for a group. A value: it may be resumed more than once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LookupContinuation {
    query: Query,
    group: GroupRef,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Query {
    /// The fragment that holds the offset.
    Offset(Offset),
    /// The oldest fragment whose last timestamp is not below `at_least`, leaving out those that retention has dropped: everything wholly
    /// below `floor`.
    Timestamp {
        at_least: TimestampMs,
        floor: Offset,
    },
}

/// A group that does not hold what its entry promised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the {:?} at offset {} does not hold what its entry promises", .0.kind, .0.offset)]
pub struct SearchError(pub GroupRef);

/// Finds the fragment that holds `offset`. Logarithmic in the number of entries.
#[must_use]
pub fn lookup_offset(manifest: &Manifest, offset: Offset) -> Lookup {
    if offset < manifest.first_offset || offset >= manifest.next_offset {
        return Lookup::NotFound;
    }
    let found = manifest
        .entries
        .binary_search_by(|entry| entry.first_offset.cmp(&offset));
    let entry = holder(found).and_then(|index| manifest.entries.get(index));
    entry.map_or(Lookup::NotFound, |entry| {
        descend(entry, Query::Offset(offset))
    })
}

/// Finds the oldest fragment whose last timestamp is at or after `at_least`: where a reader has to start that wants every record from
/// then on. One pass over the entries, since nothing keeps timestamps from going back.
#[must_use]
pub fn lookup_timestamp(manifest: &Manifest, at_least: TimestampMs) -> Lookup {
    let query = Query::Timestamp {
        at_least,
        floor: manifest.first_offset,
    };
    oldest_since(&manifest.entries, at_least, manifest.first_offset)
        .map_or(Lookup::NotFound, |entry| descend(&entry, query))
}

impl LookupContinuation {
    /// The group that is waited for.
    #[must_use]
    pub fn group(&self) -> GroupRef {
        self.group
    }

    /// Goes on with the entries of [`group`](Self::group). Fails where they cannot be that group's: they begin elsewhere, none answers, or the
    /// answer is not of a lower level (following it might never end). Cost as that of the call that was interrupted.
    pub fn resume(&self, entries: &[Entry]) -> Result<Lookup, SearchError> {
        if entries
            .first()
            .is_none_or(|first| first.first_offset != self.group.offset)
        {
            return Err(SearchError(self.group));
        }
        let found = match self.query {
            Query::Offset(offset) => {
                holder(entries.binary_search_by(|entry| entry.first_offset.cmp(&offset)))
                    .and_then(|index| entries.get(index).copied())
            }
            Query::Timestamp { at_least, floor } => oldest_since(entries, at_least, floor),
        };
        match found {
            Some(entry) if entry.kind < self.group.kind => Ok(descend(&entry, self.query)),
            Some(_) | None => Err(SearchError(self.group)),
        }
    }
}

/// The index of the last entry that starts at or before what was searched.
fn holder(found: Result<usize, usize>) -> Option<usize> {
    match found {
        Ok(index) => Some(index),
        Err(index) => index.checked_sub(1),
    }
}

fn descend(entry: &Entry, query: Query) -> Lookup {
    match entry.object() {
        ObjectRef::Fragment(fragment) => Lookup::Found(fragment),
        ObjectRef::Group(group) => Lookup::Fetch(group, LookupContinuation { query, group }),
    }
}

/// The oldest entry that is young enough and reaches beyond `floor`. The last one always does: its manifest or group is still in use.
fn oldest_since<'a, I>(entries: I, at_least: TimestampMs, floor: Offset) -> Option<Entry>
where
    I: IntoIterator<Item = &'a Entry>,
{
    let mut entries = entries.into_iter().peekable();
    while let Some(entry) = entries.next() {
        let alive = entries.peek().is_none_or(|next| next.first_offset > floor);
        if alive && entry.last_timestamp >= at_least {
            return Some(*entry);
        }
    }
    None
}
