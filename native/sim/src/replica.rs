//! Manifests on the nodes that have a replica, as `rabbitmq_stream_s3_replicas` keeps them: they follow the edits that the writer's node sends,
//! over a network that loses, repeats, reorders and damages them, and are read anew where that fails.

use std::rc::Rc;

use stream_s3_core::decisions::local_retention::{deletable_segments, replica_floor};
use stream_s3_core::decisions::replica::{Acceptance, Broadcast, ResyncReason, accept};
use stream_s3_core::decisions::resolution::{
    Fetched, Metadata as Known, Resolve, resolve, resolved,
};
use stream_s3_core::decisions::retry::retry_delay;
use stream_s3_core::error::ErrorClass;
use stream_s3_core::invariants;
use stream_s3_core::key;
use stream_s3_core::manifest::{Edit, Manifest, decode_root};
use stream_s3_core::units::{Epoch, Offset, Revision, Uid};

use crate::env::{Cached, Env, Event};
use crate::twin::Twin;

/// Chance that a message is lost, and that it comes twice.
const LOSS: u64 = 80;
/// Chance that it is not what was sent.
const DAMAGE: u64 = 15;
/// How soon a failed reading is tried again at the earliest.
const SOON: u64 = 50;

/// What is told of one persist.
#[derive(Debug, Clone)]
pub(crate) struct Sent {
    epoch: Epoch,
    news: News,
}

/// How the tier has changed.
#[derive(Debug, Clone)]
pub(crate) enum News {
    /// Another tier is in the place of the one so far.
    Reset,
    Edits {
        previous: Revision,
        revision: Revision,
        edits: Vec<Edit>,
    },
}

/// What a reading has come to.
#[derive(Debug)]
pub(crate) enum Synced {
    Read(Manifest, Epoch),
    Unchanged,
    /// Nothing is persisted, or the stream is deleted.
    NotThere,
    Failed,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Sync {
    #[default]
    None,
    Running(u64),
    Waiting(u64),
}

/// What a node follows; its manifest is in the node's table.
#[derive(Debug, Default)]
pub(crate) struct Replica {
    /// Whether there is a replica of the stream.
    follows: bool,
    /// Of the writer that persisted the manifest; none is known where this is none.
    epoch: Option<Epoch>,
    sync: Sync,
    failures: u32,
    /// What has come meanwhile, oldest first.
    later: Vec<Rc<Sent>>,
    /// Whether the local log is being trimmed, and whether there has been news since that began.
    trim: Option<bool>,
}

/// Sends news to the other nodes.
pub(crate) fn broadcast(env: &mut Env, from: usize, epoch: u64, news: News) {
    let sent = Rc::new(Sent {
        epoch: Epoch(epoch),
        news,
    });
    for node in 0..env.nodes.len() {
        if node == from || env.cluster.members[node].cut_off || env.cluster.members[from].cut_off {
            continue;
        }
        for _ in 0..1 + u64::from(env.fault(LOSS)) {
            if env.fault(LOSS) {
                env.coverage.hit("broadcast lost");
                continue;
            }
            let sent = if env.fault(DAMAGE) {
                env.coverage.hit("broadcast damaged");
                Rc::new(damaged(env, &sent))
            } else {
                sent.clone()
            };
            let delay = env.rng.between(1, 60);
            env.after(delay, Event::Replica(node, sent));
        }
    }
}

/// As another version of this program might send it.
fn damaged(env: &mut Env, sent: &Sent) -> Sent {
    let mut sent = sent.clone();
    if let News::Edits { edits, .. } = &mut sent.news
        && let Some(edit) = edits.last_mut()
    {
        if env.rng.chance(500) {
            edit.pos += 1;
        } else {
            edit.next_offset = Some(Offset(0));
            edit.first_offset = Offset(1);
        }
    }
    sent
}

/// Looks which nodes have a replica, and whether what they know is still current.
pub(crate) fn look(env: &mut Env, node: usize) {
    let member = &env.cluster.members[node];
    if !member.up || !member.joined || member.writer.is_some() {
        left(env, node);
        return;
    }
    if !env.nodes[node].table.replica.follows {
        forget(env, node);
        pending(env, node);
        env.nodes[node].table.replica = Replica {
            follows: true,
            ..Replica::default()
        };
    }
    sync(env, node);
    trim(env, node);
}

/// The replica has ended.
pub(crate) fn left(env: &mut Env, node: usize) {
    if env.nodes[node].table.replica.follows {
        env.nodes[node].table.replica = Replica::default();
        forget(env, node);
    }
}

/// A stream whose writer is here is its reader's concern.
fn forget(env: &mut Env, node: usize) {
    let table = &mut env.nodes[node].table;
    if !table.reader {
        table.cached = Cached::Unknown;
    }
}

fn pending(env: &mut Env, node: usize) {
    let table = &mut env.nodes[node].table;
    if table.cached == Cached::Unknown {
        table.cached = Cached::Pending;
    }
}

/// News arrive.
pub(crate) fn received(env: &mut Env, node: usize, sent: &Rc<Sent>) {
    if !env.nodes[node].table.replica.follows {
        return;
    }
    let replica = &mut env.nodes[node].table.replica;
    let Some(epoch) = replica.epoch else {
        replica.later.push(sent.clone());
        sync(env, node);
        return;
    };
    match &sent.news {
        News::Reset => {
            env.coverage.hit("replica reset");
            unresolved(env, node);
        }
        News::Edits {
            previous,
            revision,
            edits,
        } => {
            let broadcast = Broadcast {
                epoch: sent.epoch,
                previous: *previous,
                revision: *revision,
                edits,
            };
            follow(env, node, epoch, broadcast);
        }
    }
}

fn follow(env: &mut Env, node: usize, epoch: Epoch, mut broadcast: Broadcast<'_>) {
    let Cached::Known(have) = &env.nodes[node].table.cached else {
        unresolved(env, node);
        return;
    };
    if env.is(Twin::ReplicaSequence) {
        broadcast.epoch = epoch;
        broadcast.previous = have.revision;
    }
    match accept(have, epoch, &broadcast) {
        Acceptance::Accept(manifest) => {
            env.coverage.hit("replica accepts");
            publish(env, node, manifest);
            trim(env, node);
        }
        Acceptance::Stale => env.coverage.hit("replica stale"),
        Acceptance::Resync(reason) => {
            env.coverage.hit(match reason {
                ResyncReason::Epoch { .. } => "replica resync epoch",
                ResyncReason::Gap { .. } => "replica resync gap",
                ResyncReason::BadEdit(_) => "replica resync bad edit",
                ResyncReason::BadManifest(_) => "replica resync bad manifest",
            });
            unresolved(env, node);
        }
    }
}

fn publish(env: &mut Env, node: usize, manifest: Manifest) {
    let check = invariants::replica_prefix(&manifest, &env.oracle.history);
    env.check(check);
    env.publish(node, manifest);
}

/// Old as it may be, it was persisted; but nobody can tell any more how old it is.
fn unresolved(env: &mut Env, node: usize) {
    forget(env, node);
    pending(env, node);
    let replica = &mut env.nodes[node].table.replica;
    replica.epoch = None;
    replica.later.clear();
    // One that is under way may find that nothing has changed since what is not known any more.
    replica.sync = Sync::None;
    sync(env, node);
}

/// Reads the manifest anew.
fn sync(env: &mut Env, node: usize) {
    if env.nodes[node].table.replica.sync == Sync::None {
        let tag = env.fresh();
        env.nodes[node].table.replica.sync = Sync::Running(tag);
        let delay = env.rng.between(1, 60);
        env.after(delay, Event::ReplicaSync(node, tag));
    }
}

/// It is time to read, or to try again.
pub(crate) fn read(env: &mut Env, node: usize, tag: u64) {
    match env.nodes[node].table.replica.sync {
        Sync::Running(running) if running == tag => {
            let result = persisted(env, node);
            let delay = env.rng.between(1, 40);
            env.after(delay, Event::ReplicaSynced(node, tag, result));
        }
        Sync::Waiting(waiting) if waiting == tag => {
            env.nodes[node].table.replica.sync = Sync::None;
            sync(env, node);
        }
        Sync::None | Sync::Running(_) | Sync::Waiting(_) => {}
    }
}

/// `rabbitmq_stream_s3_replica_reader_resolve:persisted/3`.
fn persisted(env: &mut Env, node: usize) -> Synced {
    let have = match (
        &env.nodes[node].table.replica.epoch,
        &env.nodes[node].table.cached,
    ) {
        (Some(_), Cached::Known(manifest)) => Some(manifest.revision),
        (Some(_), Cached::Unknown | Cached::Pending) | (None, _) => None,
    };
    let known = if env.minority_until > env.now || env.fault(env.plan.metadata_faults) {
        Known::Failed
    } else {
        match env.metadata.root {
            Some(((uid, epoch), revision)) => Known::Present {
                uid: Uid(uid),
                epoch: Epoch(epoch),
                revision: Revision(revision),
            },
            None => Known::Absent,
        }
    };
    // Who only reads is fenced by nobody.
    let own = match known {
        Known::Present { epoch, .. } => epoch,
        Known::Absent | Known::Failed => Epoch(0),
    };
    match resolve(known, have, own) {
        Resolve::UseCache => Synced::Unchanged,
        Resolve::Fetch {
            uid,
            epoch,
            revision,
        } => {
            let key = key::root(&env.prefix, &env.stream, epoch, uid);
            let down = env.bucket.down_until > env.now || env.fault(env.plan.store_faults);
            let fetched = match env.bucket.objects.get(&key) {
                _ if down => Fetched::Failed,
                Some((bytes, _)) => decode_root(bytes).map_or(Fetched::Failed, Fetched::Manifest),
                None => Fetched::NotFound,
            };
            match resolved(fetched, revision) {
                stream_s3_core::decisions::resolution::Resolved::Manifest(manifest) => {
                    Synced::Read(manifest, epoch)
                }
                stream_s3_core::decisions::resolution::Resolved::Retry => Synced::Failed,
            }
        }
        Resolve::Empty => Synced::NotThere,
        Resolve::Superseded { .. } | Resolve::Retry => Synced::Failed,
    }
}

/// A reading has ended.
pub(crate) fn synced(env: &mut Env, node: usize, tag: u64, result: Synced) {
    let table = &mut env.nodes[node].table;
    if table.replica.sync != Sync::Running(tag) {
        env.coverage.hit("replica reading given up");
        return;
    }
    table.replica.sync = Sync::None;
    match result {
        Synced::Read(..) if table.reader => again(env, node),
        Synced::Read(manifest, epoch) => newer(env, node, manifest, epoch),
        Synced::Unchanged => {
            env.coverage.hit("replica is current");
            table.replica.failures = 0;
        }
        // Nothing to ask for until there is news.
        Synced::NotThere if table.replica.later.is_empty() => table.replica.failures = 0,
        Synced::NotThere | Synced::Failed => again(env, node),
    }
}

/// Edits may have been taken since it was read.
fn newer(env: &mut Env, node: usize, manifest: Manifest, epoch: Epoch) {
    let table = &mut env.nodes[node].table;
    table.replica.failures = 0;
    if let (Some(_), Cached::Known(have)) = (table.replica.epoch, &table.cached)
        && have.revision >= manifest.revision
    {
        env.coverage.hit("replica read what is old");
        return;
    }
    env.coverage.hit("replica reads anew");
    table.replica.epoch = Some(epoch);
    let later = std::mem::take(&mut table.replica.later);
    publish(env, node, manifest);
    trim(env, node);
    for sent in later {
        received(env, node, &sent);
    }
}

/// Each member of a stream trims its own log.
fn trim(env: &mut Env, node: usize) {
    let table = &mut env.nodes[node].table;
    let Some(epoch) = table.replica.epoch.filter(|_| env.plan.local_uploaded) else {
        return;
    };
    if let Some(again) = &mut table.replica.trim {
        *again = true;
        return;
    }
    if let Cached::Known(manifest) = &table.cached
        && !manifest.entries.is_empty()
    {
        let persisted = (manifest.next_offset, epoch);
        table.replica.trim = Some(false);
        let delay = env.rng.between(0, 60);
        env.after(delay, Event::ReplicaTrim(node, persisted));
    }
}

/// Osiris' process has come to it.
pub(crate) fn trim_now(env: &mut Env, node: usize, (next, epoch): (Offset, Epoch)) {
    let Some(again) = env.nodes[node].table.replica.trim.take() else {
        return;
    };
    if let Some(committed) = env.cluster.known_committed(node) {
        let segments = &env.cluster.members[node].segments;
        let firsts: Vec<Offset> = segments
            .iter()
            .map(|segment| Offset(segment.borrow().first))
            .collect();
        let log = if env.is(Twin::ReplicaFloor) {
            epoch
        } else {
            Epoch(env.cluster.epoch)
        };
        let floor = replica_floor(next, epoch, log, Offset(committed));
        let count = deletable_segments(&firsts, floor);
        if count > 0 {
            env.coverage.hit("local retention of a replica");
            env.replica_trimmed(node, firsts[count]);
            env.cluster.members[node].trim(count);
        }
    }
    if again {
        trim(env, node);
    }
}

fn again(env: &mut Env, node: usize) {
    env.coverage.hit("replica reading failed");
    let (jitter, tag) = (env.rng.bits32(), env.fresh());
    let replica = &mut env.nodes[node].table.replica;
    replica.failures += 1;
    replica.sync = Sync::Waiting(tag);
    let delays = &env.plan.delays;
    let delay = retry_delay(ErrorClass::Transient, replica.failures, delays, jitter);
    env.after(delay.max(SOON), Event::ReplicaSync(node, tag));
}

/// Whether a node that has a replica knows this revision, or has none.
pub(crate) fn is_current(env: &Env, node: usize, revision: Revision) -> bool {
    let table = &env.nodes[node].table;
    !table.replica.follows
        || matches!(&table.cached, Cached::Known(manifest) if manifest.revision == revision)
}
