//! Worlds in which one guard is missing. The simulation has to notice the damage, or it would not notice a bug either.

macro_rules! twins {
    ($($(#[$doc:meta])* $twin:ident = $name:literal,)*) => {
        /// A guard that can be taken out.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Twin {
            $($(#[$doc])* $twin,)*
        }

        impl Twin {
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
    /// Chunks are drained whether they are committed or not.
    CommitCheck = "commit-check",
    /// The assembly takes any chunk, also one behind a gap.
    GapCheck = "gap-check",
    /// Results of tasks that were given up count.
    GenerationCheck = "generation-check",
    /// What retention drops is deleted at once.
    DeleteAfterPersist = "delete-after-persist",
    /// The replaced root is deleted as soon as the new one is stored.
    OldRootAfterSwap = "old-root-after-swap",
    /// A root whose compare-and-set was not answered is deleted.
    KeepUnknownRoot = "keep-unknown-root",
    /// A conflict with one's own entry is taken for somebody else's.
    OwnConflictIsSuccess = "own-conflict-is-success",
    /// The metadata store takes any revision.
    RevisionCheck = "revision-check",
    /// Neither the metadata store nor the resolution looks at epochs.
    EpochCheck = "epoch-check",
    /// Nothing is anchored.
    AnchorFirst = "anchor-first",
    /// Retention runs whenever it likes, and deletes what it decided, even where the core refuses its edit.
    MutatorExclusion = "mutator-exclusion",
    /// The end of a group or of a retention arms no persist timer.
    TimerOnExit = "timer-on-exit",
    /// A tick that did nothing is repeated for the sake of fragments only, not for edits of groups and retentions.
    RearmForEdits = "rearm-for-edits",
    /// The speculative manifest is published.
    PersistedOnlyCache = "persisted-only-cache",
    /// An emptied manifest is published before it is persisted.
    ResetPersistedFirst = "reset-persisted-first",
    /// The tier's newest chunk is not compared with the log's.
    TimelineCheck = "timeline-check",
    /// Where the newest chunk is trimmed, what follows the tier is not looked at.
    ContinuationCheck = "continuation-check",
    /// A root that cannot be read is taken for an empty one.
    ErrorIsNotEmpty = "error-is-not-empty",
    /// A fragment that failed for another than a passing reason is dropped.
    NeverDropped = "never-dropped",
    /// Every attempt stores under the same uid.
    UidPerAttempt = "uid-per-attempt",
    /// Callers are answered as soon as the fragment is stored.
    WaitersAfterPersist = "waiters-after-persist",
    /// Attempts have no deadline.
    TransferDeadline = "transfer-deadline",
    /// What waits for the fragment that is tried for all waits for ever.
    ReleaseHeld = "release-held",
    /// The garbage collection takes unlisted objects whatever their age.
    GcAge = "gc-age",
    /// The garbage collection deletes what it judged a while ago, without asking once more.
    GcRecheck = "gc-recheck",
    /// Whoever wants to notes that the tier is discarded, and the garbage collection takes anybody's word for it.
    DiscardFence = "discard-fence",
    /// A replica applies edits that do not continue its manifest.
    ReplicaSequence = "replica-sequence",
    /// A replica trims its log by the manifest of whatever writer.
    ReplicaFloor = "replica-floor",
    /// Local segments go up to the speculative end of the tier.
    LocalFloor = "local-floor",
    /// Segments are held open from the moment on in which they are drained, and not as soon as they appear.
    PinBeforeUnlink = "pin-before-unlink",
}
