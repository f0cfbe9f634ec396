//! One type for each quantity, so that no signature carries a naked integer whose meaning must be guessed.

use std::fmt;

macro_rules! unit {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub $inner);

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

unit! {
    /// Position of a record in a stream, counted from 0. A chunk id is the offset of the chunk's first record.
    Offset(u64)
}
unit! {
    /// Term of a stream's writer; grows with each election.
    Epoch(u64)
}
unit! {
    /// Khepri's `payload_version` of a stream's `manifest` node; 0 means that the node is not there yet.
    Revision(u64)
}
unit! {
    /// Milliseconds since the Unix epoch. -1 stands for 'no timestamp' in an empty manifest.
    TimestampMs(i64)
}
unit! {
    /// The 32 random bits that keep the keys of rival writers and of repeated attempts apart.
    Uid(u32)
}
unit! {
    /// Names one fragment in the machine from its cut until it is applied; unique on the node.
    TransferId(u64)
}
unit! {
    /// Microseconds of a clock that never goes back; only differences mean anything.
    MonotonicUs(u64)
}

impl Offset {
    /// The offset `records` further on. Saturates: an offset that wraps would look like one already tiered.
    #[must_use]
    pub fn advanced_by(self, records: u64) -> Self {
        Self(self.0.saturating_add(records))
    }
}

impl TimestampMs {
    /// What an empty manifest holds instead of a timestamp.
    pub const NONE: Self = Self(-1);
}
