//! From cut to edit.

use stream_s3_core::error::TransferError;
use stream_s3_core::fragment::Fragment;
use stream_s3_core::manifest::Manifest;
use stream_s3_core::replica_reader::{Effect, Event, FragmentError};
use stream_s3_core::units::{Offset, Revision, TimestampMs, TransferId, Uid};

use crate::rig::*;
use crate::support::{fragment, manifest_of};

#[test]
fn a_first_fragment_is_submitted_and_arms_the_persist_timer() {
    assert_eq!(Rig::empty().cut(0, 10), [submit(0), TIMER]);
}

#[test]
fn a_fragment_behind_another_one_arms_no_timer() {
    let mut rig = Rig::empty();
    rig.cut(0, 10);
    assert_eq!(rig.cut(10, 20), [submit(10)]);
}

#[test]
fn a_fragment_behind_a_waiting_edit_arms_no_timer() {
    let mut rig = Rig::empty();
    rig.add(0, 1);
    assert_eq!(rig.cut(10, 20), [submit(10)]);
}

#[test]
fn a_fragment_behind_nothing_but_a_persist_in_flight_arms_the_timer() {
    let mut rig = Rig::empty();
    rig.add(0, 2);
    assert_eq!(rig.cut(20, 30), [submit(20), TIMER]);
}

#[test]
fn a_stored_fragment_becomes_one_edit() {
    let mut rig = Rig::empty();
    assert_eq!(rig.add(0, 1), [TIMER]);
    assert_eq!(rig.machine.manifest(), &manifest_of(&[(0, 10)], 0));
    assert_eq!(
        rig.machine.unpersisted_edits().collect::<Vec<_>>(),
        [&appended(0, 10, 0)]
    );
}

#[test]
fn an_empty_manifest_takes_the_first_fragments_offsets_and_timestamps() {
    let mut rig = Rig::empty();
    rig.cut(700, 710);
    rig.stored(700);
    let manifest = rig.machine.manifest();
    assert_eq!(
        (manifest.first_offset, manifest.next_offset),
        (Offset(700), Offset(710))
    );
    assert_eq!(manifest.first_timestamp, TimestampMs(7_000));
    assert_eq!(manifest.first_last_timestamp, TimestampMs(7_090));
    assert_eq!(manifest.total_size, 1_000);
}

#[test]
fn an_empty_manifest_accepts_any_first_fragment() {
    let mut rig = Rig::new(Manifest::empty_at(Offset(50), Revision(4)), OPTIONS);
    rig.cut(60, 70);
    assert_eq!(rig.stored(60), [TIMER]);
    assert_eq!(rig.machine.manifest().first_offset, Offset(60));
}

#[test]
fn fragments_stored_out_of_order_are_applied_in_cut_order() {
    let mut rig = Rig::empty();
    for first in [0, 10, 20] {
        rig.cut(first, first + 10);
    }
    assert_eq!(rig.stored(20), []);
    assert_eq!(rig.stored(10), []);
    let status = rig.status();
    assert_eq!(
        (status.transfers_in_flight, status.transfers_pending_order),
        (1, 2)
    );
    assert_eq!(status.bytes_in_transfer, 3_000);
    let manifest = manifest_of(&[(0, 10), (10, 20), (20, 30)], 0);
    let edits = vec![appended(0, 10, 0), appended(10, 20, 1), appended(20, 30, 2)];
    assert_eq!(rig.stored(0), [start_persist(&manifest, 0, edits)]);
    let status = rig.status();
    assert_eq!(
        (status.transfers_in_flight, status.transfers_pending_order),
        (0, 0)
    );
}

/// INV-4: a fragment stored ahead of a gap is durable, yet not listed.
#[test]
fn a_fragment_uploaded_ahead_of_a_gap_is_not_published() {
    let mut rig = Rig::resumed();
    assert_eq!(rig.cut(60, 70), [submit(60), TIMER]);
    assert_eq!(rig.stored(60), []);
    assert_eq!(rig.machine.manifest(), rig.machine.persisted_manifest());
    assert_eq!(rig.tick(9_000), []);
    assert_eq!(rig.status().transfers_pending_order, 1);
}

/// INV-4: nor is one that overlaps what is listed.
#[test]
fn a_fragment_that_starts_below_the_manifests_end_is_not_applied() {
    let mut rig = Rig::resumed();
    rig.cut(40, 60);
    assert_eq!(rig.stored(40), []);
    assert_eq!(rig.machine.manifest().next_offset, Offset(50));
}

#[test]
fn repeated_and_unknown_completions_change_nothing() {
    let mut rig = Rig::empty();
    rig.cut(0, 10);
    rig.cut(10, 20);
    rig.stored(10);
    assert_eq!(
        rig.on(Event::TransferComplete {
            id: TransferId(10),
            uid: Uid(99)
        }),
        []
    );
    assert_eq!(rig.stored(77), []);
    rig.stored(0);
    let uids: Vec<_> = rig
        .machine
        .manifest()
        .entries
        .iter()
        .map(|entry| entry.uid)
        .collect();
    assert_eq!(uids, [Uid(0), Uid(10)]);
    assert_eq!(rig.stored(0), []);
    assert_eq!(rig.machine.manifest().entries.len(), 2);
}

#[test]
fn a_transient_failure_is_resubmitted_at_once() {
    let mut rig = Rig::empty();
    rig.cut(0, 10);
    for error in [
        TransferError::Http(500),
        TransferError::Http(503),
        TransferError::Http(429),
        TransferError::Http(408),
        TransferError::Timeout,
        TransferError::Connection,
        TransferError::Throttled,
        TransferError::ClockSkew,
        TransferError::ExpiredToken,
        TransferError::WriteConflict,
    ] {
        let expected = Effect::ResubmitTransfer {
            id: TransferId(0),
            detail: "meta",
        };
        assert_eq!(rig.failed(0, error), [expected]);
    }
}

#[test]
fn any_other_failure_is_resubmitted_later_and_never_dropped() {
    let mut rig = Rig::empty();
    rig.cut(0, 10);
    for error in [
        TransferError::Http(403),
        TransferError::Http(409),
        TransferError::ChecksumMismatch,
        TransferError::CorruptChunk(Offset(4)),
        TransferError::OpenFailed {
            file: "f".into(),
            posix: "enoent".into(),
        },
        TransferError::Panic("p".into()),
        TransferError::Cancelled,
        TransferError::Other,
    ] {
        let expected = Effect::ResubmitTransferDelayed {
            id: TransferId(0),
            detail: "meta",
            reason: "why",
        };
        assert_eq!(rig.failed(0, error), [expected]);
    }
    assert_eq!(rig.stored(0), [TIMER]);
}

#[test]
fn a_failure_of_an_unknown_or_stored_fragment_has_no_effects() {
    let mut rig = Rig::empty();
    rig.cut(0, 10);
    rig.cut(10, 20);
    rig.stored(10);
    assert_eq!(rig.failed(10, TransferError::Timeout), []);
    assert_eq!(rig.failed(77, TransferError::Timeout), []);
    rig.stored(0);
    assert_eq!(rig.failed(0, TransferError::Http(403)), []);
}

#[test]
fn a_fragment_that_cannot_be_listed_is_refused() {
    let mut rig = Rig::empty();
    rig.cut(0, 10);
    let cut = |id, fragment| Event::FragmentCut {
        id: TransferId(id),
        fragment,
        detail: "meta",
    };
    let empty = Fragment {
        next_offset: Offset(10),
        ..fragment(10, 20)
    };
    let error = FragmentError::Empty {
        first: Offset(10),
        next: Offset(10),
    };
    assert_eq!(rig.refused(cut(10, empty)), error.into());
    let large = Fragment {
        size: 1 << 40,
        ..fragment(10, 20)
    };
    assert_eq!(
        rig.refused(cut(10, large)),
        FragmentError::TooLarge(1 << 40).into()
    );
    assert_eq!(
        rig.refused(cut(0, fragment(10, 20))),
        FragmentError::IdInUse(TransferId(0)).into()
    );
    let largest = Fragment {
        size: (1 << 40) - 1,
        ..fragment(10, 20)
    };
    assert_eq!(rig.on(cut(10, largest)), [submit(10)]);
}

#[test]
fn an_id_may_be_used_again_once_its_fragment_is_applied() {
    let mut rig = Rig::empty();
    rig.add(0, 1);
    let again = Event::FragmentCut {
        id: TransferId(0),
        fragment: fragment(10, 20),
        detail: "meta",
    };
    assert_eq!(rig.on(again), [submit(0)]);
    assert_eq!(rig.stored(0).len(), 1);
    assert_eq!(rig.machine.manifest().next_offset, Offset(20));
}

#[test]
fn ids_need_not_ascend() {
    let mut rig = Rig::empty();
    for (id, first) in [(9, 0), (3, 10), (7, 20)] {
        let fragment = fragment(first, first + 10);
        rig.on(Event::FragmentCut {
            id: TransferId(id),
            fragment,
            detail: "meta",
        });
    }
    for id in [7, 3, 9] {
        rig.on(Event::TransferComplete {
            id: TransferId(id),
            uid: Uid(1),
        });
    }
    assert_eq!(rig.machine.manifest().next_offset, Offset(30));
}
