//! The entries of a root, as a value that is cheap to clone and to append to.
//!
//! Full blocks are shared and never change; only the last, partial one is copied by an append to a shared value. All blocks but the last have
//! the same length, so an index finds its entry without a search. Changes in the middle rebuild everything: they happen once in hundreds of
//! appends, and copying is fast. (A balanced tree makes those cheaper and all else several times dearer.)

use std::cmp::Ordering;
use std::fmt;
use std::slice;
use std::sync::Arc;

use super::Entry;

const BLOCK: usize = 64;

/// Entries of a root, oldest first. Cloning costs two reference counts; appending copies 64 entries at most, and a pointer for each
/// 64 entries once in 64 times.
#[derive(Clone, Default)]
pub struct Entries {
    /// Each has exactly `BLOCK` entries.
    blocks: Arc<Vec<Arc<[Entry]>>>,
    /// Fewer than `BLOCK` entries.
    tail: Arc<Vec<Entry>>,
}

impl Entries {
    /// No entries.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks.len() * BLOCK + self.tail.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The entry at `index`, counted from the oldest. Constant time.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<&Entry> {
        match self.blocks.get(index / BLOCK) {
            Some(block) => block.get(index % BLOCK),
            None => self.tail.get(index - self.blocks.len() * BLOCK),
        }
    }

    /// The oldest entry.
    #[must_use]
    pub fn front(&self) -> Option<&Entry> {
        self.get(0)
    }

    /// The newest entry.
    #[must_use]
    pub fn back(&self) -> Option<&Entry> {
        self.get(self.len().checked_sub(1)?)
    }

    /// Appends an entry.
    pub fn push_back(&mut self, entry: Entry) {
        match Arc::get_mut(&mut self.tail) {
            Some(tail) => tail.push(entry),
            // Not by cloning: a clone has no room left, and the push would move everything once more.
            None => {
                let mut tail = Vec::with_capacity(self.tail.len() + 1);
                tail.extend_from_slice(&self.tail);
                tail.push(entry);
                self.tail = Arc::new(tail);
            }
        }
        if self.tail.len() == BLOCK {
            let block = Arc::from(self.tail.as_slice());
            self.tail = Arc::default();
            Arc::make_mut(&mut self.blocks).push(block);
        }
    }

    /// All of them, oldest first; also from the other end.
    #[must_use]
    pub fn iter(&self) -> Iter<'_> {
        Iter {
            front: [].iter(),
            blocks: self.blocks.iter(),
            back: self.tail.iter(),
        }
    }

    /// They lie in memory in these pieces.
    pub(super) fn pieces(&self) -> impl Iterator<Item = &[Entry]> {
        self.blocks
            .iter()
            .map(|block| &**block)
            .chain([self.tail.as_slice()])
    }

    /// A copy in one piece.
    #[must_use]
    pub fn to_vec(&self) -> Vec<Entry> {
        let mut all = Vec::with_capacity(self.len());
        self.pieces().for_each(|piece| all.extend_from_slice(piece));
        all
    }

    /// How many at the beginning `holds` is true of, given that it is of none that follow the first of which it is not. Logarithmic.
    pub fn partition_point(&self, holds: impl Fn(&Entry) -> bool) -> usize {
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = low + (high - low) / 2;
            if self.get(middle).is_some_and(&holds) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low
    }

    /// Where `order` says `Equal`, or where such an entry would have to be. Logarithmic.
    pub fn binary_search_by(&self, order: impl Fn(&Entry) -> Ordering) -> Result<usize, usize> {
        let at = self.partition_point(|entry| order(entry) == Ordering::Less);
        match self.get(at) {
            Some(entry) if order(entry) == Ordering::Equal => Ok(at),
            Some(_) | None => Err(at),
        }
    }

    /// With `insert` in place of the entries `[start, end)`, where `start <= end <= len`. An append takes the time of what is appended,
    /// anything else one copy.
    pub(super) fn splice(&self, start: usize, end: usize, insert: &[Entry]) -> Self {
        if start == self.len() {
            let mut appended = self.clone();
            appended.extend(insert.iter().copied());
            return appended;
        }
        if start == end && insert.is_empty() {
            return self.clone();
        }
        let mut all = self.to_vec();
        all.splice(start..end, insert.iter().copied());
        all.into()
    }
}

impl From<Vec<Entry>> for Entries {
    /// One copy.
    fn from(all: Vec<Entry>) -> Self {
        let (blocks, tail) = all.as_chunks::<BLOCK>();
        Self {
            blocks: Arc::new(
                blocks
                    .iter()
                    .map(|block| Arc::from(block.as_slice()))
                    .collect(),
            ),
            tail: Arc::new(tail.to_vec()),
        }
    }
}

impl Entries {
    /// `count` entries, the one at an index made by `entry`: without a copy.
    pub(super) fn build(count: usize, entry: impl Fn(usize) -> Entry) -> Self {
        let whole = count / BLOCK;
        let block = |number| (number * BLOCK..(number + 1) * BLOCK).map(&entry).collect();
        Self {
            blocks: Arc::new((0..whole).map(block).collect()),
            tail: Arc::new((whole * BLOCK..count).map(&entry).collect()),
        }
    }
}

impl FromIterator<Entry> for Entries {
    fn from_iter<I: IntoIterator<Item = Entry>>(entries: I) -> Self {
        entries.into_iter().collect::<Vec<_>>().into()
    }
}

impl Extend<Entry> for Entries {
    fn extend<I: IntoIterator<Item = Entry>>(&mut self, entries: I) {
        for entry in entries {
            self.push_back(entry);
        }
    }
}

impl PartialEq for Entries {
    fn eq(&self, other: &Self) -> bool {
        self.blocks == other.blocks && self.tail == other.tail
    }
}

impl Eq for Entries {}

impl fmt::Debug for Entries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self).finish()
    }
}

impl<'a> IntoIterator for &'a Entries {
    type Item = &'a Entry;
    type IntoIter = Iter<'a>;

    fn into_iter(self) -> Iter<'a> {
        self.iter()
    }
}

impl IntoIterator for Entries {
    type Item = Entry;
    type IntoIter = std::vec::IntoIter<Entry>;

    fn into_iter(self) -> Self::IntoIter {
        self.to_vec().into_iter()
    }
}

/// Goes through entries, from either end.
#[derive(Debug, Clone)]
pub struct Iter<'a> {
    front: slice::Iter<'a, Entry>,
    blocks: slice::Iter<'a, Arc<[Entry]>>,
    back: slice::Iter<'a, Entry>,
}

impl<'a> Iterator for Iter<'a> {
    type Item = &'a Entry;

    #[inline]
    fn next(&mut self) -> Option<&'a Entry> {
        loop {
            if let Some(entry) = self.front.next() {
                return Some(entry);
            }
            match self.blocks.next() {
                Some(block) => self.front = block.iter(),
                None => return self.back.next(),
            }
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.front.len() + self.blocks.len() * BLOCK + self.back.len();
        (left, Some(left))
    }

    fn nth(&mut self, count: usize) -> Option<&'a Entry> {
        let Some(mut beyond) = count.checked_sub(self.front.len()) else {
            return self.front.nth(count);
        };
        self.front = [].iter();
        let skipped = (beyond / BLOCK).min(self.blocks.len());
        beyond -= skipped * BLOCK;
        // With a block left, `beyond` is less than a block.
        match self.blocks.nth(skipped) {
            Some(block) => {
                self.front = block.iter();
                self.front.nth(beyond)
            }
            None => self.back.nth(beyond),
        }
    }

    fn fold<B, F: FnMut(B, &'a Entry) -> B>(self, init: B, mut each: F) -> B {
        let mut sum = self.front.fold(init, &mut each);
        for block in self.blocks {
            sum = block.iter().fold(sum, &mut each);
        }
        self.back.fold(sum, each)
    }
}

impl DoubleEndedIterator for Iter<'_> {
    fn next_back(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(entry) = self.back.next_back() {
                return Some(entry);
            }
            match self.blocks.next_back() {
                Some(block) => self.back = block.iter(),
                None => return self.front.next_back(),
            }
        }
    }
}

impl ExactSizeIterator for Iter<'_> {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::EntryKind;
    use crate::units::{Offset, TimestampMs, Uid};

    fn entry(offset: usize) -> Entry {
        Entry {
            first_offset: Offset(offset as u64),
            first_timestamp: TimestampMs(0),
            last_timestamp: TimestampMs(0),
            kind: EntryKind::Fragment,
            size: 0,
            uid: Uid(0),
        }
    }

    #[test]
    fn they_are_what_a_vector_would_be_at_every_length() {
        let mut pushed = Entries::new();
        for len in 0..300 {
            let vector: Vec<_> = (0..len).map(entry).collect();
            assert_eq!(pushed, Entries::from(vector.clone()));
            assert_eq!((pushed.len(), pushed.is_empty()), (len, len == 0));
            assert_eq!(pushed.to_vec(), vector);
            assert!(pushed.iter().eq(&vector) && pushed.iter().rev().eq(vector.iter().rev()));
            assert_eq!(pushed.iter().len(), len);
            assert_eq!(
                (pushed.front(), pushed.back()),
                (vector.first(), vector.last())
            );
            assert_eq!(pushed.get(len), None);
            assert_eq!(pushed.iter().nth(len / 2), vector.get(len / 2));
            for index in 0..len {
                assert_eq!(pushed.get(index), vector.get(index));
                let order = |found: &Entry| found.first_offset.0.cmp(&(index as u64));
                assert_eq!(pushed.binary_search_by(order), Ok(index));
            }
            pushed.push_back(entry(len));
        }
    }

    #[test]
    fn a_clone_goes_its_own_way() {
        for len in [0, 1, 63, 64, 65, 128] {
            let before: Entries = (0..len).map(entry).collect();
            let mut one = before.clone();
            let mut other = before.clone();
            one.push_back(entry(1_000));
            other.extend([entry(2_000), entry(3_000)]);
            assert_eq!(before.len(), len);
            assert_eq!(one.back(), Some(&entry(1_000)));
            assert_eq!(other.get(len), Some(&entry(2_000)));
        }
    }

    #[test]
    fn what_is_not_there_is_searched_to_where_it_would_be() {
        let entries: Entries = (0..200).map(|number| entry(number * 2)).collect();
        for number in 0..400 {
            let found = entries.binary_search_by(|entry| entry.first_offset.0.cmp(&number));
            let half = usize::try_from(number / 2).unwrap();
            assert_eq!(
                found,
                if number % 2 == 0 {
                    Ok(half)
                } else {
                    Err(half + 1)
                }
            );
        }
    }

    #[test]
    fn passing_over_entries_in_any_way_meets_each_once_and_in_order() {
        for count in [0, 1, 63, 64, 65, 128, 130, 200] {
            let all: Vec<_> = (0..count).map(entry).collect();
            let entries = Entries::from(all.clone());
            assert_eq!(entries, Entries::build(count, entry));
            assert!(entries.iter().eq(&all));
            assert!(entries.iter().rev().eq(all.iter().rev()));
            for skip in 0..=count {
                let (mut left, mut right) = (entries.iter(), all.iter());
                left.next_back();
                right.next_back();
                assert_eq!(left.nth(skip), right.nth(skip), "{skip} of {count}");
                assert_eq!(left.len(), right.len());
                assert_eq!(left.next_back(), right.next_back());
                let (mut folded, mut expected) = (Vec::new(), Vec::new());
                left.for_each(|entry| folded.push(*entry));
                right.for_each(|entry| expected.push(*entry));
                assert_eq!(folded, expected);
            }
        }
    }
}
