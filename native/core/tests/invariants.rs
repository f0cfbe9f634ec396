//! Each invariant notices what it is there to notice.

#![allow(clippy::disallowed_methods)]

mod support;

use stream_s3_core::invariants::{self, Check, Listed};
use stream_s3_core::manifest::{EntryKind, Manifest};
use stream_s3_core::replica_reader::{Machine, Options};
use stream_s3_core::units::{Epoch, Offset, Revision, TimestampMs};
use support::{altered, group_entry, manifest_of, tens};

/// The number of the invariant that does not hold.
fn violated(check: Check) -> Option<u8> {
    check.err().map(|violation| violation.invariant)
}

fn listed(first: u64, next: u64) -> Listed {
    Listed {
        first: Offset(first),
        next: Offset(next),
        size: (next - first) * 100,
    }
}

fn tier() -> Manifest {
    manifest_of(&[(0, 10), (10, 20), (20, 30)], 3)
}

#[test]
fn coverage_notices_gaps_overlaps_and_wrong_ends() {
    let tier = tier();
    let check = |fragments: &[Listed]| violated(invariants::coverage(&tier, fragments));
    assert_eq!(
        check(&[listed(0, 10), listed(10, 20), listed(20, 30)]),
        None
    );
    assert_eq!(check(&[listed(0, 10), listed(20, 30)]), Some(1));
    assert_eq!(
        check(&[listed(0, 10), listed(5, 20), listed(20, 30)]),
        Some(1)
    );
    assert_eq!(check(&[listed(0, 10), listed(10, 20)]), Some(1));
    assert_eq!(check(&[listed(10, 20), listed(20, 30)]), Some(1));
    assert_eq!(check(&[listed(0, 0), listed(0, 30)]), Some(1));
    let light = Listed {
        size: 1,
        ..listed(10, 20)
    };
    assert_eq!(check(&[listed(0, 10), light, listed(20, 30)]), Some(9));
}

#[test]
fn a_root_is_checked_as_far_as_it_can_tell() {
    let check = |manifest: &Manifest| violated(invariants::root_coverage(manifest));
    assert_eq!(check(&tier()), None);
    assert_eq!(
        check(&altered(&tier(), |entries| entries.swap(0, 1))),
        Some(1)
    );
    assert_eq!(
        check(&Manifest {
            total_size: 2_999,
            ..tier()
        }),
        Some(9)
    );
    assert_eq!(
        check(&Manifest {
            total_size: 3_001,
            ..tier()
        }),
        Some(9)
    );
    let range = Manifest {
        next_offset: Offset(1),
        ..Manifest::default()
    };
    assert_eq!(check(&range), Some(1));
    let grouped = altered(&tier(), |entries| {
        let moved: Vec<_> = entries.drain(..2).collect();
        entries.insert(0, group_entry(EntryKind::Group, &moved, 9));
    });
    assert_eq!(check(&grouped), None);
    assert_eq!(
        check(&Manifest {
            total_size: 999,
            ..grouped
        }),
        Some(9)
    );
}

#[test]
fn durability_notices_an_object_that_is_not_stored() {
    let tier = tier();
    assert_eq!(violated(invariants::durability(&tier, |_| true)), None);
    let all_but_one = |object: &stream_s3_core::manifest::ObjectRef| object.offset() != Offset(10);
    assert_eq!(
        violated(invariants::durability(&tier, all_but_one)),
        Some(2)
    );
}

#[test]
fn committed_only_notices_a_chunk_above_the_committed_one() {
    assert_eq!(violated(invariants::committed_only(Offset(4), 4)), None);
    assert_eq!(violated(invariants::committed_only(Offset(5), 4)), Some(3));
    assert_eq!(violated(invariants::committed_only(Offset(0), -1)), Some(3));
}

#[test]
fn advance_notices_an_end_that_goes_back() {
    let before = manifest_of(&[(0, 10), (10, 20)], 3);
    assert_eq!(
        violated(invariants::contiguous_advance(&before, &tier())),
        None
    );
    assert_eq!(
        violated(invariants::contiguous_advance(&before, &before)),
        None
    );
    assert_eq!(
        violated(invariants::contiguous_advance(&tier(), &before)),
        Some(4)
    );
}

#[test]
fn the_gate_notices_anything_that_is_not_persisted() {
    assert_eq!(violated(invariants::gate(&tier(), &tier())), None);
    let speculative = manifest_of(&[(0, 10), (10, 20), (20, 30), (30, 40)], 3);
    assert_eq!(violated(invariants::gate(&speculative, &tier())), Some(5));
}

#[test]
fn the_anchor_comes_before_any_object() {
    assert_eq!(violated(invariants::anchor_first(false, 0)), None);
    assert_eq!(violated(invariants::anchor_first(true, 5)), None);
    assert_eq!(violated(invariants::anchor_first(false, 1)), Some(6));
}

#[test]
fn fencing_notices_an_older_writer_and_a_revision_that_does_not_grow() {
    let check = |before: Option<(u64, u64)>, after: (u64, u64)| {
        let pair = |(epoch, revision)| (Epoch(epoch), Revision(revision));
        violated(invariants::fencing(before.map(pair), pair(after)))
    };
    assert_eq!(check(None, (1, 1)), None);
    assert_eq!(check(Some((1, 1)), (1, 2)), None);
    assert_eq!(check(Some((1, 1)), (2, 2)), None);
    assert_eq!(check(Some((2, 1)), (1, 2)), Some(7));
    assert_eq!(check(Some((1, 2)), (1, 2)), Some(7));
}

#[test]
fn only_one_of_group_and_retention_may_be_in_flight() {
    let options = Options {
        epoch: Epoch(1),
        persist_threshold: 9,
        persist_interval_ms: 1,
        rebalance_threshold: 2,
    };
    let (mut machine, _) = Machine::<()>::init(tier(), options, TimestampMs(0)).unwrap();
    let id = stream_s3_core::units::TransferId(1);
    machine
        .fragment_cut(id, support::fragment(30, 40), ())
        .unwrap();
    machine.transfer_complete(id, stream_s3_core::units::Uid(1));
    assert!(machine.rebalance_in_flight());
    assert_eq!(violated(invariants::single_mutator(&machine)), None);
    machine.retention_started();
    assert_eq!(violated(invariants::single_mutator(&machine)), Some(8));
    assert_eq!(violated(invariants::machine(&machine)), Some(8));
}

#[test]
fn retention_notices_anything_but_a_prefix() {
    let after = manifest_of(&[(10, 20), (20, 30)], 3);
    let dropped: Vec<_> = tens(0, 1).iter().map(|entry| entry.object()).collect();
    let check = |after: &Manifest| violated(invariants::retention(&tier(), after, &dropped));
    assert_eq!(check(&after), None);
    let hole = manifest_of(&[(0, 10)], 3);
    assert_eq!(
        check(&Manifest {
            next_offset: Offset(30),
            ..hole
        }),
        Some(9)
    );
    assert_eq!(
        check(&Manifest {
            next_offset: Offset(31),
            ..after.clone()
        }),
        Some(9)
    );
    assert_eq!(check(&tier()), Some(9), "dropped, but still listed");
    let earlier = invariants::retention(&after, &tier(), &[]);
    assert_eq!(violated(earlier), Some(9));
}

#[test]
fn deletion_waits_for_the_persist() {
    let persisted = manifest_of(&[(10, 20)], 3);
    assert_eq!(
        violated(invariants::deletion_after_persist(Offset(10), &persisted)),
        None
    );
    assert_eq!(
        violated(invariants::deletion_after_persist(Offset(20), &persisted)),
        Some(9)
    );
}

#[test]
fn a_replica_has_what_was_persisted_under_its_revision() {
    let history = [
        manifest_of(&[(0, 10)], 1),
        manifest_of(&[(0, 10), (10, 20)], 2),
        tier(),
    ];
    for manifest in &history {
        assert_eq!(
            violated(invariants::replica_prefix(manifest, &history)),
            None
        );
    }
    let other = manifest_of(&[(0, 10), (10, 21)], 2);
    assert_eq!(
        violated(invariants::replica_prefix(&other, &history)),
        Some(10)
    );
    let unknown = manifest_of(&[(0, 10)], 9);
    assert_eq!(
        violated(invariants::replica_prefix(&unknown, &history)),
        Some(10)
    );
}
