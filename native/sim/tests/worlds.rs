//! Worlds that must be all right, and worlds in which something is missing.

use stream_s3_sim::{Limits, REQUIRED, Twin, run, search};

/// Worlds of a run with all guards in place.
const WORLDS: u64 = 5_000;
/// Within so many the damage of a missing guard has to show.
const PATIENCE: u64 = 20_000;

#[test]
fn no_invariant_is_violated_in_five_thousand_worlds() {
    let report = search(0, WORLDS, Limits::NONE);
    assert!(report.finding.is_none(), "{:?}", report.finding);
    assert_eq!(report.seeds, WORLDS);
    // What the worlds are for must have happened in them.
    assert_eq!(report.coverage.missing(REQUIRED, WORLDS), []);
}

#[test]
fn a_seed_is_a_world() {
    for seed in [1, 77, 4_321] {
        let (one, other) = (run(seed, Limits::NONE, true), run(seed, Limits::NONE, true));
        assert_eq!(one.trace, other.trace);
        assert_eq!(
            (one.events, one.faults, one.ended),
            (other.events, other.faults, other.ended)
        );
    }
}

/// Worlds in which something was found once, as they have become since: each change of the worlds changes what a seed means.
macro_rules! found {
    ($($name:ident: $seed:literal,)*) => {
        $(
            #[test]
            fn $name() {
                let outcome = run($seed, Limits::NONE, false);
                assert_eq!(outcome.violation, None);
            }
        )*
    };
}

found! {
    an_empty_tier_says_nothing_of_a_log_that_was_lost: 19_522,
    a_deposed_reader_says_nothing_of_the_log_that_took_the_place_of_its_own: 20_267,
    what_took_the_place_of_a_lost_log_may_be_lost_in_turn: 62_638,
    bytes_take_their_time_at_the_slowest_rate_before_a_world_rests: 63_521,
    what_counts_as_true_since_nobody_could_tell_still_does_after_another_election: 74_804,
    a_log_that_comes_back_is_known_as_a_whole_where_a_chunk_reached_across_its_beginning: 86_378,
    a_member_that_was_out_of_touch_in_an_election_does_not_go_on_as_if_it_had_joined: 123_792,
    a_waiter_is_not_concerned_with_what_a_deposed_writer_tiers_behind_its_offset: 418_123,
    what_a_writer_decided_on_a_log_that_lacked_something_may_land_when_that_log_is_back: 827_573,
    a_waiter_of_a_log_that_came_back_is_not_concerned_with_it_either: 927_165,
    a_tier_may_begin_anew_just_where_one_of_another_timeline_ended: 967_057,
}

macro_rules! twins {
    ($($name:ident: $twin:ident,)*) => {
        $(
            #[test]
            fn $name() {
                let limits = Limits {
                    twin: Some(Twin::$twin),
                    ..Limits::NONE
                };
                let report = search(0, PATIENCE, limits);
                assert!(report.finding.is_some(), "nothing found in {PATIENCE} worlds");
            }
        )*

        #[test]
        fn every_twin_has_a_test() {
            assert_eq!(Twin::ALL, [$(Twin::$twin,)*]);
        }
    };
}

twins! {
    an_uncommitted_chunk_that_is_drained_is_noticed: CommitCheck,
    a_gap_that_is_jumped_is_noticed: GapCheck,
    an_old_result_that_counts_is_noticed: GenerationCheck,
    a_deletion_before_its_persist_is_noticed: DeleteAfterPersist,
    an_old_root_that_is_deleted_too_early_is_noticed: OldRootAfterSwap,
    a_root_of_unknown_outcome_that_is_deleted_is_noticed: KeepUnknownRoot,
    a_conflict_with_oneself_is_noticed: OwnConflictIsSuccess,
    a_write_on_an_old_revision_is_noticed: RevisionCheck,
    a_write_of_an_old_epoch_is_noticed: EpochCheck,
    an_object_without_an_anchor_is_noticed: AnchorFirst,
    retention_beside_a_group_is_noticed: MutatorExclusion,
    edits_that_wait_without_a_timer_are_noticed: TimerOnExit,
    a_tick_that_is_not_repeated_for_edits_is_noticed: RearmForEdits,
    a_speculative_manifest_that_is_published_is_noticed: PersistedOnlyCache,
    a_reset_that_is_published_before_it_is_persisted_is_noticed: ResetPersistedFirst,
    another_timeline_that_is_continued_is_noticed: TimelineCheck,
    a_log_that_never_opens_is_noticed: ContinuationCheck,
    an_unreadable_root_that_counts_as_empty_is_noticed: ErrorIsNotEmpty,
    a_fragment_that_is_dropped_is_noticed: NeverDropped,
    an_object_that_is_overwritten_is_noticed: UidPerAttempt,
    a_caller_that_is_answered_too_early_is_noticed: WaitersAfterPersist,
    an_attempt_that_never_ends_is_noticed: TransferDeadline,
    a_fragment_that_waits_for_another_one_for_ever_is_noticed: ReleaseHeld,
    a_young_object_that_is_collected_is_noticed: GcAge,
    a_deletion_on_an_old_proof_is_noticed: GcRecheck,
    a_discard_that_a_deposed_writer_notes_is_noticed: DiscardFence,
    an_edit_that_is_applied_out_of_order_is_noticed: ReplicaSequence,
    a_replica_that_trims_by_an_old_manifest_is_noticed: ReplicaFloor,
    a_local_segment_that_goes_too_early_is_noticed: LocalFloor,
    a_segment_that_is_pinned_too_late_is_noticed: PinBeforeUnlink,
}
