//! What happened in worlds: a simulation that never meets a fault proves nothing about it.

use std::collections::BTreeMap;

/// Counters by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Coverage(BTreeMap<&'static str, u64>);

impl Coverage {
    /// One more.
    pub fn hit(&mut self, what: &'static str) {
        *self.0.entry(what).or_insert(0) += 1;
    }

    /// Adds another world's counters.
    pub fn merge(&mut self, other: &Self) {
        for (what, count) in &other.0 {
            *self.0.entry(what).or_insert(0) += count;
        }
    }

    /// How often.
    #[must_use]
    pub fn count(&self, what: &str) -> u64 {
        self.0.get(what).copied().unwrap_or(0)
    }

    /// All counters, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        self.0.iter().map(|(what, count)| (*what, *count))
    }
}
