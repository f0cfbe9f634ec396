//! Searches over small buckets.

use super::*;
use crate::manifest::{encode_group, encode_root};
use crate::units::{Revision, TimestampMs};

fn stream() -> StreamId {
    StreamId::parse("s").unwrap()
}

fn entry(kind: EntryKind, first: u64, uid: u32) -> Entry {
    Entry {
        first_offset: Offset(first),
        first_timestamp: TimestampMs(1),
        last_timestamp: TimestampMs(1),
        kind,
        size: if kind == EntryKind::Fragment { 100 } else { 0 },
        uid: Uid(uid),
    }
}

fn fragment(first: u64, uid: u32) -> Entry {
    entry(EntryKind::Fragment, first, uid)
}

fn object(entry: &Entry, size: u64) -> Object {
    let key = ParsedKey::Fragment {
        stream: stream(),
        first_offset: entry.first_offset,
        uid: entry.uid,
    };
    Object {
        key,
        size,
        modified_ms: None,
    }
}

fn root(epoch: u64, uid: u32) -> Object {
    let key = ParsedKey::Root {
        stream: stream(),
        epoch: Epoch(epoch),
        uid: Uid(uid),
    };
    Object {
        key,
        size: 0,
        modified_ms: None,
    }
}

fn bytes(first: u64, next: u64, fragments: u64, entries: &[Entry]) -> Vec<u8> {
    encode_root(&Manifest {
        first_offset: Offset(first),
        first_timestamp: TimestampMs(1),
        first_last_timestamp: TimestampMs(1),
        next_offset: Offset(next),
        total_size: u128::from(fragments * 100),
        revision: Revision(0),
        entries: entries.iter().copied().collect(),
    })
    .unwrap()
}

/// Drives a search over a bucket of roots and groups by uid.
fn run(mut search: Search, bucket: &BTreeMap<u32, Vec<u8>>) -> Step {
    loop {
        let uid = match search.next() {
            Step::Read(ParsedKey::Root { uid, .. } | ParsedKey::Group { uid, .. }) => uid,
            done @ (Step::Read(_) | Step::Take(_) | Step::Refuse(_)) => return done,
        };
        search.found(bucket.get(&uid.0).map(Vec::as_slice));
    }
}

fn take(step: Step) -> Choice {
    match step {
        Step::Take(choice) => *choice,
        other @ (Step::Read(_) | Step::Refuse(_)) => panic!("{other:?}"),
    }
}

#[test]
fn the_highest_epoch_wins_though_another_reaches_further() {
    let entries = [fragment(0, 1), fragment(10, 2)];
    let objects = [
        object(&entries[0], 128),
        object(&entries[1], 128),
        root(4, 7),
        root(3, 8),
    ];
    let bucket = BTreeMap::from([
        (7, bytes(0, 10, 1, &entries[..1])),
        (8, bytes(0, 20, 2, &entries)),
    ]);
    let choice = take(run(Search::new(stream(), objects.clone(), None), &bucket));
    assert_eq!(
        (choice.epoch, choice.uid, choice.fragments),
        (Epoch(4), Uid(7), 1)
    );
    assert_eq!(
        choice.why,
        "it is the newest: its epoch 4 is the highest, and all that it lists is there"
    );
    let named = Search::new(stream(), objects, Some((Epoch(3), Uid(8))));
    assert_eq!(take(run(named, &bucket)).epoch, Epoch(3));
}

#[test]
fn within_an_epoch_the_one_that_reaches_furthest_wins() {
    let entries = [fragment(0, 1), fragment(10, 2)];
    let objects = [
        object(&entries[0], 128),
        object(&entries[1], 128),
        root(4, 7),
        root(4, 8),
    ];
    let bucket = BTreeMap::from([
        (7, bytes(0, 10, 1, &entries[..1])),
        (8, bytes(0, 20, 2, &entries)),
    ]);
    assert_eq!(
        take(run(Search::new(stream(), objects, None), &bucket)).uid,
        Uid(8)
    );
}

#[test]
fn what_is_newer_and_not_whole_is_passed_over_and_said() {
    let entries = [fragment(0, 1), fragment(10, 2)];
    let objects = [object(&entries[0], 128), root(6, 5), root(5, 6), root(4, 7)];
    let bucket = BTreeMap::from([
        (5, b"no root at all".to_vec()),
        (6, bytes(0, 20, 2, &entries)),
        (7, bytes(0, 10, 1, &entries[..1])),
    ]);
    let choice = take(run(Search::new(stream(), objects, None), &bucket));
    assert_eq!(choice.uid, Uid(7));
    let defects: Vec<_> = choice
        .passed_over
        .iter()
        .map(|one| (one.epoch.0, one.defect.clone()))
        .collect();
    assert!(
        matches!(
            &defects[..],
            [
                (6, Defect::Damaged(_)),
                (5, Defect::FragmentMissing(Offset(10)))
            ]
        ),
        "{defects:?}"
    );
}

#[test]
fn groups_are_read_and_what_retention_took_of_them_may_be_gone() {
    let fragments = [fragment(0, 1), fragment(10, 2), fragment(20, 3)];
    let group = entry(EntryKind::Group, 0, 9);
    let bucket = BTreeMap::from([
        (9, encode_group(EntryKind::Group, &fragments[..2]).unwrap()),
        (7, bytes(10, 30, 2, &[group, fragments[2]])),
    ]);
    let objects = [
        object(&fragments[1], 148),
        object(&fragments[2], 128),
        root(1, 7),
    ];
    let choice = take(run(Search::new(stream(), objects.clone(), None), &bucket));
    assert_eq!((choice.fragments, choice.groups), (2, 1));
    let without = BTreeMap::from([(7, bucket[&7].clone())]);
    assert_eq!(
        run(Search::new(stream(), objects, None), &without),
        Step::Refuse(vec![Rejected {
            epoch: Epoch(1),
            uid: Uid(7),
            defect: Defect::GroupMissing(Offset(0))
        }])
    );
}

#[test]
fn an_object_of_the_wrong_length_and_a_wrong_sum_are_defects() {
    let one = [fragment(0, 1)];
    for size in [0, 107, 108, 127] {
        let objects = [object(&one[0], size), root(1, 7)];
        let bucket = BTreeMap::from([(7, bytes(0, 10, 1, &one))]);
        assert!(matches!(
            run(Search::new(stream(), objects, None), &bucket),
            Step::Refuse(all) if matches!(all[0].defect, Defect::FragmentLength { .. })
        ));
    }
    let objects = [object(&one[0], 128), root(1, 7)];
    let bucket = BTreeMap::from([(7, bytes(0, 10, 2, &one))]);
    assert!(matches!(
        run(Search::new(stream(), objects, None), &bucket),
        Step::Refuse(all) if matches!(all[0].defect, Defect::Contradiction(_))
    ));
}

#[test]
fn without_a_root_there_is_nothing_to_take() {
    assert_eq!(
        run(Search::new(stream(), [], None), &BTreeMap::new()),
        Step::Refuse(Vec::new())
    );
    let other = Search::new(stream(), [root(1, 7)], Some((Epoch(1), Uid(8))));
    assert_eq!(run(other, &BTreeMap::new()), Step::Refuse(Vec::new()));
    let gone = run(Search::new(stream(), [root(1, 7)], None), &BTreeMap::new());
    assert!(matches!(gone, Step::Refuse(all) if all[0].defect == Defect::Gone));
}

#[test]
fn an_empty_tier_can_be_taken() {
    let bucket = BTreeMap::from([(7, bytes(10, 10, 0, &[]))]);
    let choice = take(run(Search::new(stream(), [root(1, 7)], None), &bucket));
    assert_eq!(
        (choice.fragments, choice.manifest.next_offset),
        (0, Offset(10))
    );
}
