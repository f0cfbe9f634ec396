//! Telling results of this life of a stream's reader from those of an earlier one.

/// Grows with every reset, stop and resolution. Every task carries the one it was started in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Generation(pub u64);

impl Generation {
    /// The next one: results of all earlier ones are old from now on.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }

    /// Whether a task's result still means something.
    #[must_use]
    pub fn accepts(self, result: Self) -> bool {
        self == result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_other_generations_are_old() {
        let first = Generation::default();
        let second = first.next();
        assert!(second.accepts(second));
        assert!(!second.accepts(first));
        assert!(!first.accepts(second));
    }
}
