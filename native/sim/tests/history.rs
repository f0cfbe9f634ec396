//! Worlds of the history uploader that must be all right, and worlds in which a guard is missing.

use stream_s3_sim::{HISTORY_REQUIRED, HistoryTwin, run_history, search_history};

/// Worlds of a run with all guards in place.
const WORLDS: u64 = 3_000;
/// Within so many the damage of a missing guard has to show.
const PATIENCE: u64 = 5_000;

#[test]
fn nothing_is_violated_in_three_thousand_worlds_of_the_history_uploader() {
    let report = search_history(0, WORLDS, None);
    assert!(report.finding.is_none(), "{:?}", report.finding);
    assert_eq!(report.seeds, WORLDS);
    // What the worlds are for must have happened in them.
    assert_eq!(report.coverage.missing(HISTORY_REQUIRED, WORLDS), []);
}

#[test]
fn a_seed_is_a_world_of_the_history_uploader() {
    for seed in [1, 77, 2_321] {
        let (one, other) = (run_history(seed, None, true), run_history(seed, None, true));
        assert_eq!(one.trace, other.trace);
        assert_eq!(one.events, other.events);
    }
}

macro_rules! twins {
    ($($name:ident: $twin:ident,)*) => {
        $(
            #[test]
            fn $name() {
                let report = search_history(0, PATIENCE, Some(HistoryTwin::$twin));
                assert!(report.finding.is_some(), "nothing found in {PATIENCE} worlds");
            }
        )*

        #[test]
        fn every_twin_of_the_history_uploader_has_a_test() {
            assert_eq!(HistoryTwin::ALL, [$(HistoryTwin::$twin,)*]);
        }
    };
}

twins! {
    an_acknowledgment_without_a_put_is_noticed: PutBeforeAck,
    an_existing_object_that_is_not_compared_is_noticed: CompareExisting,
    a_put_that_overwrites_is_noticed: CreateOnly,
    a_replacement_of_whatever_is_there_is_noticed: IfMatch,
    a_purge_that_does_not_wait_is_noticed: PurgeWait,
    an_acknowledgment_out_of_order_is_noticed: SeqOrder,
    an_old_answer_that_counts_is_noticed: OldAnswers,
    an_index_that_is_never_scanned_is_noticed: Rescan,
    a_sweep_without_proof_is_noticed: SweepProof,
    a_late_write_that_is_never_swept_is_noticed: OrphanSweep,
    retention_of_what_is_not_uploaded_is_noticed: RetentionPostponed,
    a_scan_that_ends_at_an_unreadable_run_is_noticed: UnreadableSkipped,
    a_permit_that_is_not_given_back_is_noticed: PermitBack,
    a_second_acknowledgment_that_counts_is_noticed: AcknowledgedOnce,
    a_catalog_that_knows_nothing_of_the_purge_is_noticed: CatalogOfPurge,
}
