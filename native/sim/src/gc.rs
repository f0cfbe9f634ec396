//! The garbage collection around the core's verdict: lists, reads metadata and manifest, judges, and judges again before it
//! deletes.

use std::collections::BTreeSet;

use stream_s3_core::decisions::gc::{Candidate, GcLimits, Stream, Tier, Verdict, verdict};
use stream_s3_core::key;
use stream_s3_core::manifest::{Entry, EntryKind, decode_group, decode_root};
use stream_s3_core::units::{Epoch, Uid};

use crate::bucket::{StoreAnswer, StoreOp, StoreValue};
use crate::env::{Env, Event, Origin};
use crate::twin::Twin;

/// Longer than a persist or a transfer of these worlds may take.
const MIN_AGE: u64 = 12_000;

/// Asks for a listing.
pub(crate) fn start(env: &mut Env) {
    let id = env.fresh();
    let prefix = key::stream_prefix(&env.prefix, &env.stream);
    env.store(StoreOp::List { prefix }, Origin::Gc(id));
}

/// The listing is there.
pub(crate) fn listed(env: &mut Env, answer: StoreAnswer) {
    let Ok(StoreValue::Listing(listing)) = answer else {
        return;
    };
    env.coverage.hit("gc round");
    let garbage = judge(env, &listing);
    if garbage.is_empty() {
        return;
    }
    let delay = env.rng.between(1, 300);
    env.after(delay, Event::GcDelete(garbage));
}

/// Looks again, and deletes.
pub(crate) fn delete(env: &mut Env, listing: Vec<(String, u64)>) {
    let garbage = judge(env, &listing);
    if garbage.is_empty() {
        return;
    }
    env.coverage.hit("gc deletes");
    let keys = garbage.into_iter().map(|(key, _)| key).collect();
    env.store(StoreOp::Delete { keys }, Origin::Nobody);
}

fn judge(env: &mut Env, listing: &[(String, u64)]) -> Vec<(String, u64)> {
    let age = |stored: u64| env.now.saturating_sub(stored);
    let limits = GcLimits {
        min_age_ms: if env.is(Twin::GcAge) { 0 } else { MIN_AGE },
        discarded_tier_grace_ms: 0,
    };
    if env.metadata.minority_until > env.now {
        return Vec::new();
    }
    let root = env.metadata.root;
    let root_key =
        root.map(|((uid, epoch), _)| key::root(&env.prefix, &env.stream, Epoch(epoch), Uid(uid)));
    let stored = root_key
        .as_ref()
        .and_then(|key| env.bucket.objects.get(key));
    let manifest = stored.and_then(|(bytes, _)| decode_root(bytes).ok());
    let mut used = BTreeSet::new();
    let known = manifest
        .as_ref()
        .is_some_and(|manifest| collect(env, &manifest.entries.to_vec(), &mut used));
    let judged = listing.iter().filter(|(key, at)| {
        let candidate = Candidate {
            key: key::parse(&env.prefix, key),
            age_ms: Some(age(*at)),
        };
        let stream = match (root, &manifest) {
            (None, _) if !env.metadata.anchored => Stream::Deleted,
            (None, _) => Stream::NeverPersisted,
            (Some(_), None) => Stream::Unknown,
            (Some(((uid, epoch), _)), Some(manifest)) => Stream::Live(Tier {
                epoch: Epoch(epoch),
                root: Uid(uid),
                root_age_ms: stored.map(|(_, at)| age(*at)),
                next_offset: manifest.next_offset,
                listed: known.then(|| used.contains(key)),
                discarded_ms: None,
            }),
        };
        matches!(verdict(&candidate, &stream, &limits), Verdict::Delete(_))
    });
    judged.cloned().collect()
}

/// Keys of all entries, groups included; false where a group could not be read.
fn collect(env: &Env, entries: &[Entry], used: &mut BTreeSet<String>) -> bool {
    entries.iter().all(|entry| {
        let (kind, first) = (entry.kind, entry.first_offset);
        let key = key::entry(&env.prefix, &env.stream, kind, first, entry.uid);
        let inner = env.bucket.objects.get(&key).cloned();
        used.insert(key);
        match kind {
            EntryKind::Fragment => true,
            EntryKind::Group | EntryKind::KiloGroup | EntryKind::MegaGroup => inner
                .and_then(|(bytes, _)| decode_group(&bytes).ok())
                .is_some_and(|group| collect(env, &group.entries, used)),
        }
    })
}
