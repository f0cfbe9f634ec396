//! The garbage collection around the core's verdict, as `rabbitmq_stream_s3_gc_pass` does it: lists, asks the metadata store, reads the
//! manifest, judges, and asks the metadata store once more before it deletes.

use std::collections::BTreeSet;

use stream_s3_core::decisions::discard::DiscardNote;
use stream_s3_core::decisions::gc::{
    Candidate, DeleteReason, Discard, GcLimits, KeepReason, Stream, Tier, Verdict, verdict,
};
use stream_s3_core::key;
use stream_s3_core::manifest::{Entry, Manifest, ObjectRef, decode_group, decode_root};
use stream_s3_core::units::{Epoch, Offset, Uid};

use crate::bucket::{StoreAnswer, StoreOp, StoreValue};
use crate::env::{CLOCK_ERROR, Env, Event, Origin};
use crate::metadata::RootEntry;
use crate::oracle::Collected;
use crate::twin::Twin;

/// Longer than a persist or a transfer of these worlds may take, however wrong the clocks are.
pub(crate) const MIN_AGE: u64 = 12_000 + 2 * CLOCK_ERROR as u64;
/// How often a stream is looked at whose root changes between look and deletion.
const LOOKS: u32 = 3;

/// What a majority of the metadata store says of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Facts {
    Unknown,
    Deleted,
    NeverPersisted,
    Live {
        root: (RootEntry, u64),
        discarded: Option<DiscardNote>,
    },
}

/// One walk over the objects of a stream.
#[derive(Debug)]
pub(crate) struct Pass {
    /// Keys, and when they were stored.
    listing: Vec<(String, u64)>,
    facts: Facts,
    doomed: Vec<String>,
    looks: u32,
}

/// What a manifest lists.
struct View {
    manifest: Manifest,
    stored: u64,
    /// Keys, groups included; none where a group could not be read.
    listed: Option<BTreeSet<String>>,
}

/// Asks for a listing.
pub(crate) fn start(env: &mut Env) {
    let prefix = key::stream_prefix(&env.prefix, &env.stream);
    env.store(StoreOp::List { prefix }, Origin::Gc);
}

/// The listing is there.
pub(crate) fn listed(env: &mut Env, answer: StoreAnswer) {
    let Ok(StoreValue::Listing(listing)) = answer else {
        env.coverage.hit("gc listing failed");
        return;
    };
    env.coverage.hit("gc round");
    let pass = Pass {
        listing,
        facts: facts(env),
        doomed: Vec::new(),
        looks: LOOKS,
    };
    look_soon(env, pass);
}

/// Manifest and groups take a while.
fn look_soon(env: &mut Env, pass: Pass) {
    let delay = env.rng.between(1, 400);
    env.after(delay, Event::GcLook(pass));
}

fn facts(env: &mut Env) -> Facts {
    if env.minority_until > env.now || env.fault(env.plan.metadata_faults / 2) {
        return Facts::Unknown;
    }
    match env.metadata.root {
        Some(root) => Facts::Live {
            root,
            discarded: if env.is(Twin::DiscardFence) {
                as_if_of(root, env.metadata.discarded)
            } else {
                env.metadata.discarded
            },
        },
        None if env.metadata.anchored => Facts::NeverPersisted,
        None => Facts::Deleted,
    }
}

/// A note as if it were of the writer of this root.
fn as_if_of(root: (RootEntry, u64), note: Option<DiscardNote>) -> Option<DiscardNote> {
    note.map(|note| DiscardNote {
        epoch: Epoch(root.0.1),
        ..note
    })
}

/// Judges.
pub(crate) fn look(env: &mut Env, mut pass: Pass) {
    let view = match pass.facts {
        Facts::Live { root, .. } => view(env, root.0),
        Facts::Unknown | Facts::Deleted | Facts::NeverPersisted => None,
    };
    let limits = GcLimits {
        min_age_ms: if env.is(Twin::GcAge) { 0 } else { MIN_AGE },
        discarded_tier_grace_ms: env.plan.discarded_grace,
    };
    let now = env.rough_clock();
    let mut doomed = Vec::new();
    for (key, stored) in &pass.listing {
        let candidate = Candidate {
            key: key::parse(&env.prefix, key),
            age_ms: Some(age(now, *stored as i64)),
        };
        let stream = stream(&pass.facts, view.as_ref(), key, now);
        match verdict(&candidate, &stream, &limits) {
            Verdict::Keep(reason) => env.coverage.hit(kept(reason)),
            Verdict::Delete(reason) => {
                env.coverage.hit(garbage(reason));
                if env.plan.gc_orphans || !reason.is_optional() {
                    doomed.push(key.clone());
                }
            }
        }
    }
    env.note(|| format!("gc looked at {now}: {:?}, dooms {doomed:?}", pass.facts));
    if !doomed.is_empty() {
        pass.doomed = doomed;
        let delay = env.rng.between(1, 400);
        env.after(delay, Event::GcDelete(pass));
    }
}

/// Asks again, and deletes if nothing has changed.
pub(crate) fn delete(env: &mut Env, mut pass: Pass) {
    let facts = facts(env);
    if !env.is(Twin::GcRecheck) && (facts != pass.facts || facts == Facts::Unknown) {
        env.coverage.hit("gc looks again");
        pass.looks -= 1;
        if pass.looks > 0 {
            pass.facts = facts;
            look_soon(env, pass);
        }
        return;
    }
    env.coverage.hit("gc deletes");
    env.collected(&Collected {
        proof: facts != Facts::Unknown && facts == pass.facts,
        keys: &pass.doomed,
    });
    let op = StoreOp::Delete {
        keys: pass.doomed,
        refused: 0,
    };
    env.store(op, Origin::Nobody);
}

fn age(now: i64, stored: i64) -> u64 {
    u64::try_from(now - stored).unwrap_or(0)
}

fn stream(facts: &Facts, view: Option<&View>, key: &String, now: i64) -> Stream {
    match (facts, view) {
        (Facts::Live { root, discarded }, Some(view)) => Stream::Live(Tier {
            epoch: Epoch(root.0.1),
            root: Uid(root.0.0),
            root_age_ms: Some(age(now, view.stored as i64)),
            next_offset: view.manifest.next_offset,
            listed: view.listed.as_ref().map(|listed| listed.contains(key)),
            discarded: discarded.and_then(|note| {
                let age_ms = age(now, note.at?.0);
                Some(Discard {
                    age_ms,
                    epoch: note.epoch,
                })
            }),
        }),
        (Facts::Live { .. } | Facts::Unknown, _) => Stream::Unknown,
        (Facts::Deleted, _) => Stream::Deleted,
        (Facts::NeverPersisted, _) => Stream::NeverPersisted,
    }
}

fn view(env: &mut Env, root: RootEntry) -> Option<View> {
    let root = key::root(&env.prefix, &env.stream, Epoch(root.1), Uid(root.0));
    if env.fault(env.plan.store_faults) {
        return None;
    }
    let (bytes, stored) = env.bucket.objects.get(&root).cloned()?;
    let manifest = decode_root(&bytes).ok()?;
    let mut listed = BTreeSet::new();
    let entries = manifest.entries.to_vec();
    let first = manifest.first_offset;
    let complete = collect(env, &entries, None, first, &mut listed);
    Some(View {
        manifest,
        stored,
        listed: complete.then_some(listed),
    })
}

/// Keys of all that is listed from `first` on, groups included; false where a group could not be read. What ends at or below `first` has been
/// dropped, and may be gone.
fn collect(
    env: &mut Env,
    entries: &[Entry],
    end: Option<Offset>,
    first: Offset,
    listed: &mut BTreeSet<String>,
) -> bool {
    entries.iter().enumerate().all(|(index, entry)| {
        let next = entries
            .get(index + 1)
            .map_or(end, |next| Some(next.first_offset));
        if next.is_some_and(|next| next <= first) {
            return true;
        }
        let key = key::entry(
            &env.prefix,
            &env.stream,
            entry.kind,
            entry.first_offset,
            entry.uid,
        );
        let inner = env.bucket.objects.get(&key).cloned();
        listed.insert(key);
        match entry.object() {
            ObjectRef::Fragment(_) => true,
            ObjectRef::Group(_) => {
                !env.fault(env.plan.store_faults)
                    && inner
                        .and_then(|(bytes, _)| decode_group(&bytes).ok())
                        .is_some_and(|group| collect(env, &group.entries, next, first, listed))
            }
        }
    })
}

/// What would stay in the bucket for ever: of the objects that nothing refers to those that the collection keeps although all times are
/// over and the root is newer than all of them. Fragments beyond the manifest wait for it, and are left out.
pub(crate) fn leftovers(env: &mut Env, used: &BTreeSet<String>) -> Vec<String> {
    let prefix = key::stream_prefix(&env.prefix, &env.stream);
    let grace = env.plan.discarded_grace;
    let later = env.rough_clock() + (MIN_AGE + grace) as i64 + 2 * CLOCK_ERROR;
    let limits = GcLimits {
        min_age_ms: MIN_AGE,
        discarded_tier_grace_ms: grace,
    };
    let (facts, view) = match env.metadata.root {
        Some(root) => {
            // As if a persist came last of all.
            let discarded = as_if_of(root, env.metadata.discarded);
            (Facts::Live { root, discarded }, view(env, root.0))
        }
        None => (Facts::Deleted, None),
    };
    let view = view.map(|view| View {
        stored: later as u64,
        ..view
    });
    let all = env.bucket.perform(&StoreOp::List { prefix }, env.now);
    let Ok(StoreValue::Listing(listing)) = all else {
        return Vec::new();
    };
    let kept = listing.into_iter().filter(|(key, stored)| {
        let candidate = Candidate {
            key: key::parse(&env.prefix, key),
            age_ms: Some(age(later, *stored as i64)),
        };
        match verdict(
            &candidate,
            &stream(&facts, view.as_ref(), key, later),
            &limits,
        ) {
            Verdict::Keep(KeepReason::Ahead) | Verdict::Delete(_) => false,
            Verdict::Keep(_) => !used.contains(key),
        }
    });
    kept.map(|(key, _)| key).collect()
}

fn kept(reason: KeepReason) -> &'static str {
    match reason {
        KeepReason::NotOurs => "gc keeps what is not ours",
        KeepReason::Unknown => "gc keeps what it does not know",
        KeepReason::Young => "gc keeps young",
        KeepReason::InUse => "gc keeps what is in use",
        KeepReason::Ahead => "gc keeps what is ahead",
        KeepReason::Grace => "gc keeps a discarded tier",
    }
}

fn garbage(reason: DeleteReason) -> &'static str {
    match reason {
        DeleteReason::Orphan => "gc finds an orphan",
        DeleteReason::DiscardedTier => "gc finds a discarded tier",
        DeleteReason::StreamDeleted => "gc finds a deleted stream",
    }
}
