//! Worlds in which the history uploader lacks one guard.

macro_rules! twins {
    ($($(#[$doc:meta])* $twin:ident = $name:literal,)*) => {
        /// A guard that can be taken out.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum HistoryTwin {
            $($(#[$doc])* $twin,)*
        }

        impl HistoryTwin {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$twin,)*];

            /// Its name on the command line.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$twin => $name,)*
                }
            }

            /// The twin of a name.
            #[must_use]
            pub fn of_name(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|twin| twin.name() == name)
            }
        }
    };
}

twins! {
    /// A segment counts as stored before it is.
    PutBeforeAck = "history-put-before-ack",
    /// Whatever lies under a segment's key is taken for the segment.
    CompareExisting = "history-compare-existing",
    /// A put takes effect whatever is there.
    CreateOnly = "history-create-only",
    /// A replacement takes effect whatever is there meanwhile.
    IfMatch = "history-if-match",
    /// A purge deletes at once.
    PurgeWait = "history-purge-wait",
    /// The index is read from anywhere.
    SeqOrder = "history-seq-order",
    /// Answers to what was given up count.
    OldAnswers = "history-old-answers",
    /// The index is never scanned.
    Rescan = "history-rescan",
    /// Objects are swept whatever is known of their run.
    SweepProof = "history-sweep-proof",
    /// Purged runs are forgotten, and what comes late stays.
    OrphanSweep = "history-orphan-sweep",
    /// Retention takes a closed run whatever is sealed of it.
    RetentionPostponed = "history-retention-postponed",
    /// A scan ends at a run that it cannot read.
    UnreadableSkipped = "history-unreadable-skipped",
    /// A permit is not given back.
    PermitBack = "history-permit-back",
    /// For the host every acknowledgment counts, not only the first one of a segment.
    AcknowledgedOnce = "history-acknowledged-once",
    /// The catalog comes from a state that may not know of the purge yet.
    CatalogOfPurge = "history-catalog-of-purge",
}
