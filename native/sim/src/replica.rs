//! Manifests on the other nodes, which follow the edits that the writer's node sends, over a network that loses, repeats and reorders
//! them.

use std::rc::Rc;

use stream_s3_core::decisions::replica::{Acceptance, Broadcast, accept};
use stream_s3_core::invariants;
use stream_s3_core::key;
use stream_s3_core::manifest::{Edit, Manifest, decode_root};
use stream_s3_core::units::{Epoch, Revision, Uid};

use crate::env::{Env, Event};
use crate::twin::Twin;

/// Chance that a message is lost, and that it comes twice.
const LOSS: u64 = 80;

/// The edits of one persist, on their way.
#[derive(Debug)]
pub(crate) struct Sent {
    epoch: Epoch,
    previous: Revision,
    revision: Revision,
    edits: Vec<Edit>,
}

/// What a node has.
#[derive(Debug, Default)]
pub(crate) struct Replica {
    have: Option<(Epoch, Manifest)>,
}

/// Sends edits to the other nodes.
pub(crate) fn broadcast(
    env: &mut Env,
    from: usize,
    epoch: u64,
    (previous, revision): (Revision, Revision),
    edits: Vec<Edit>,
) {
    let sent = Rc::new(Sent {
        epoch: Epoch(epoch),
        previous,
        revision,
        edits,
    });
    for node in 0..env.nodes.len() {
        if node == from || env.cluster.members[node].cut_off {
            continue;
        }
        for _ in 0..1 + u64::from(env.fault(LOSS)) {
            if env.fault(LOSS) {
                env.coverage.hit("broadcast lost");
                continue;
            }
            let delay = env.rng.between(1, 60);
            env.after(delay, Event::Replica(node, sent.clone()));
        }
    }
}

/// Edits arrive.
pub(crate) fn received(env: &mut Env, node: usize, sent: &Sent) {
    if !env.cluster.members[node].up {
        return;
    }
    let Some((epoch, have)) = &env.nodes[node].replica.have else {
        resync_soon(env, node);
        return;
    };
    let blind = env.is(Twin::ReplicaSequence);
    let broadcast = Broadcast {
        epoch: if blind { *epoch } else { sent.epoch },
        previous: if blind { have.revision } else { sent.previous },
        revision: sent.revision,
        edits: &sent.edits,
    };
    match accept(have, *epoch, &broadcast) {
        Acceptance::Accept(manifest) => {
            env.coverage.hit("replica accepts");
            let check = invariants::replica_prefix(&manifest, &env.oracle.history);
            env.check(check);
            env.nodes[node].replica.have = Some((broadcast.epoch, manifest));
        }
        Acceptance::Stale => env.coverage.hit("replica stale"),
        Acceptance::Resync(_) => {
            env.coverage.hit("replica resync");
            resync_soon(env, node);
        }
    }
}

fn resync_soon(env: &mut Env, node: usize) {
    let delay = env.rng.between(1, 100);
    env.after(delay, Event::Resync(node));
}

/// Reads the whole manifest again.
pub(crate) fn resync(env: &mut Env, node: usize) {
    let Some(((uid, epoch), revision)) = env.metadata.root else {
        return;
    };
    let key = key::root(&env.prefix, &env.stream, Epoch(epoch), Uid(uid));
    let Some((bytes, _)) = env.bucket.objects.get(&key) else {
        return;
    };
    if let Ok(manifest) = decode_root(bytes) {
        let manifest = Manifest {
            revision: Revision(revision),
            ..manifest
        };
        env.nodes[node].replica.have = Some((Epoch(epoch), manifest));
    }
}
