//! The machine under random interleavings, against the model, with every invariant checked after every step.

use proptest::prelude::*;

use crate::config;
use crate::world::{Start, Step, World};

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (1u64..4, 0u64..5_000).prop_map(|(records, size)| Step::Cut { records, size }),
        9 => any::<usize>().prop_map(Step::Stored),
        1 => any::<usize>().prop_map(Step::StoredAgain),
        2 => any::<(usize, bool)>().prop_map(|(index, transient)| Step::Failed(index, transient)),
        5 => Just(Step::Persisted),
        2 => Just(Step::PersistFailed),
        1 => (0u8..6).prop_map(Step::Stale),
        3 => (0i64..80).prop_map(Step::Tick),
        2 => (0u64..20).prop_map(Step::Await),
        5 => Just(Step::Grouped),
        1 => any::<bool>().prop_map(Step::GroupFailed),
        3 => (0u64..40_000, 0u64..400).prop_map(|(bytes, age)| Step::Retain(bytes, age)),
        3 => Just(Step::RetentionDone),
        1 => Just(Step::RetentionFailed),
    ]
}

fn start() -> impl Strategy<Value = Start> {
    let fragments = 0u64..20;
    prop_oneof![
        2 => Just(Start::Resume(0)),
        2 => fragments.clone().prop_map(Start::Resume),
        1 => (fragments.clone(), 1u64..300).prop_map(|(count, below)| Start::RemoteAhead(count, below)),
        1 => (fragments, 1u64..300).prop_map(|(count, above)| Start::LocalAhead(count, above)),
    ]
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn every_interleaving_keeps_the_invariants_and_settles(
        persist_threshold in 1u64..6,
        rebalance_threshold in 2usize..6,
        start in start(),
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let mut world = World::new(persist_threshold, rebalance_threshold, start);
        for step in steps {
            prop_assert!(world.step(step));
        }
        world.settle();
    }

    #[test]
    fn a_machine_asks_to_be_thrown_away_only_after_a_conflict_or_a_loss(
        persist_threshold in 1u64..6,
        start in start(),
        steps in prop::collection::vec(step(), 1..40),
        which in 6u8..8,
    ) {
        let mut world = World::new(persist_threshold, 3, start);
        for step in steps {
            prop_assert!(world.step(step));
        }
        prop_assert!(!world.step(Step::Stale(which)));
    }
}
