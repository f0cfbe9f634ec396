//! A node's governor around the core's admission, and the transfers that it runs.

use std::rc::Rc;

use stream_s3_core::admission::{Cancelled, Next};
use stream_s3_core::chunk::ChunkHeader;
use stream_s3_core::error::TransferError;
use stream_s3_core::fragment::{FragmentMeta, IndexRecord, OBJECT_HEADER, object_len};
use stream_s3_core::key;
use stream_s3_core::units::{MonotonicUs, Uid};

use crate::bucket::{StoreAnswer, StoreError, StoreOp};
use crate::env::{Attempt, AttemptId, Env, Event, Origin, Pid};
use crate::pins;
use crate::reader::Msg;
use crate::twin::Twin;

fn micros(env: &Env) -> MonotonicUs {
    MonotonicUs(env.now * 1000)
}

/// Queues an attempt.
pub(crate) fn submit(
    env: &mut Env,
    node: usize,
    attempt: AttemptId,
    reader: Pid,
    meta: Rc<FragmentMeta>,
) {
    let now = micros(env);
    let size = meta.size;
    let stream = env.at();
    let part = &mut env.nodes[node];
    let of = Attempt {
        stream,
        reader,
        meta,
    };
    part.attempts.insert(attempt, of);
    part.governor.submit(now, attempt, size);
    pump(env, node);
}

/// Drops what is queued, and aborts what runs: that ends a moment later, unless its answer comes first. What was sent already may arrive all
/// the same.
pub(crate) fn cancel(env: &mut Env, node: usize, attempts: &[AttemptId]) {
    for attempt in attempts {
        match env.nodes[node].governor.cancel(attempt) {
            Cancelled::Running => {
                env.coverage.hit("cancel running");
                let delay = env.rng.between(0, 40);
                env.after(delay, Event::Aborted(node, *attempt));
            }
            Cancelled::Queued => {
                env.coverage.hit("cancel queued");
                env.nodes[node].attempts.remove(attempt);
            }
            Cancelled::Unknown => {}
        }
    }
    pump(env, node);
}

/// An aborted transfer is gone.
pub(crate) fn aborted(env: &mut Env, node: usize, attempt: AttemptId) {
    finish(env, node, attempt, Err(TransferError::Cancelled));
}

/// Looks for attempts whose requesters are dead.
pub(crate) fn sweep(env: &mut Env, node: usize, reader: Pid) {
    let attempts = env.nodes[node].attempts.iter();
    let dead: Vec<AttemptId> = attempts
        .filter(|(_, attempt)| attempt.reader == reader)
        .map(|(id, _)| *id)
        .collect();
    if !dead.is_empty() {
        env.coverage.hit("dead requester dropped");
    }
    cancel(env, node, &dead);
}

/// Admits what may start now.
pub(crate) fn pump(env: &mut Env, node: usize) {
    loop {
        let now = micros(env);
        match env.nodes[node].governor.next(now) {
            Next::Admit { key, oversized, .. } => {
                env.coverage.hit(if oversized {
                    "admit oversized"
                } else {
                    "admit"
                });
                if let Some(attempt) = env.nodes[node].attempts.get(&key) {
                    let (stream, reader) = (attempt.stream, attempt.reader);
                    if stream != env.at() {
                        env.coverage.hit("admit another stream");
                    }
                    env.send_to(stream, reader, Msg::Admitted(key));
                    let delay = env.rng.between(0, 4);
                    env.after_for(stream, delay, Event::OpenFiles(node, key));
                }
            }
            Next::WaitUntil(at) => {
                env.coverage.hit("wait for tokens");
                let delay = at.0.div_ceil(1000).saturating_sub(env.now).max(1);
                env.after(delay, Event::Governor(node));
                return;
            }
            Next::Idle => return,
        }
    }
}

/// A transfer opens its files, reads them, and sends the object.
pub(crate) fn open_files(env: &mut Env, node: usize, id: AttemptId) {
    let Some(attempt) = env.nodes[node].attempts.get(&id) else {
        return;
    };
    let meta = attempt.meta.clone();
    if env.fault(env.plan.store_faults / 4) {
        let error = broken(env, &meta);
        finish(env, node, id, Err(error));
        return;
    }
    match object(env, node, &meta) {
        Ok(body) => {
            let uid = if env.is(Twin::UidPerAttempt) {
                Uid(7)
            } else {
                Uid(env.rng.bits32())
            };
            let key = key::fragment(&env.prefix, &env.stream, meta.first_offset, uid);
            let body = body.into();
            env.store(StoreOp::Put { key, body }, Origin::Attempt(node, id, uid));
        }
        Err(error) => {
            env.coverage.hit("segment gone or changed");
            finish(env, node, id, Err(error));
        }
    }
}

/// How a transfer fails before it has sent anything.
fn broken(env: &mut Env, meta: &FragmentMeta) -> TransferError {
    let file = format!("{:020}.segment", meta.first_offset.0);
    match env.rng.between(0, 4) {
        0 => TransferError::OpenFailed {
            file,
            posix: "emfile".to_string(),
        },
        1 => TransferError::OpenFailed {
            file,
            posix: "eio".to_string(),
        },
        // A bit that flips on its way from the disk, and not at the next time.
        2 => TransferError::CorruptChunk(meta.first_offset),
        3 => TransferError::Panic("a transfer panics".to_string()),
        // A file that ends too early.
        _ => TransferError::Other,
    }
}

/// The answer to a transfer's request.
pub(crate) fn answered(env: &mut Env, node: usize, id: AttemptId, uid: Uid, answer: StoreAnswer) {
    let result = match answer {
        Ok(_) => Ok(uid),
        Err(StoreError::Failed(error)) => Err(error),
        Err(StoreError::NotFound) => Err(TransferError::Http(404)),
    };
    finish(env, node, id, result);
}

fn finish(env: &mut Env, node: usize, id: AttemptId, result: Result<Uid, TransferError>) {
    // One that was cancelled has nobody to tell.
    if let Some(attempt) = env.nodes[node].attempts.remove(&id) {
        env.nodes[node].governor.finished(&id);
        env.send(attempt.reader, Msg::Transferred(id, result));
        pump(env, node);
    }
}

/// The object of a fragment, from the segment files as they are now, by name unless they are pinned; the index follows from the headers on the way.
fn object(env: &mut Env, node: usize, meta: &FragmentMeta) -> Result<Vec<u8>, TransferError> {
    let mut out = Vec::with_capacity(object_len(meta.size, meta.num_chunks) as usize);
    out.extend_from_slice(&OBJECT_HEADER);
    let mut pinned_alone = false;
    for span in &meta.spans {
        let segments = &env.cluster.members[node].segments;
        let first = span.segment_offset.0;
        let pinned = pins::file(env, node, first);
        let file = pinned.or_else(|| segments.iter().find(|file| file.borrow().first == first));
        let Some(file) = file else {
            return Err(TransferError::OpenFailed {
                file: format!("{first:020}.segment"),
                posix: "enoent".to_string(),
            });
        };
        pinned_alone |= !segments.iter().any(|other| Rc::ptr_eq(file, other));
        let bytes = file.borrow().read(span.start, span.end);
        out.extend_from_slice(&bytes.ok_or(TransferError::Other)?);
    }
    if pinned_alone {
        env.coverage.hit("pinned segment uploaded");
    }
    let mut index = Vec::new();
    let (mut at, mut expected) = (OBJECT_HEADER.len(), meta.first_offset);
    while at < out.len() {
        let header = ChunkHeader::decode(&out[at..]).map_err(|_| TransferError::Other)?;
        if header.chunk_id != expected && !env.is(Twin::GapCheck) {
            return Err(TransferError::Other);
        }
        let record = IndexRecord {
            chunk_id: header.chunk_id,
            timestamp: header.timestamp,
            position: (at - OBJECT_HEADER.len()) as u32,
        };
        index.extend_from_slice(&record.encode());
        at += header.len_in_segment() as usize;
        expected = header.next_chunk_id();
    }
    if expected != meta.next_offset && !env.is(Twin::GapCheck) {
        return Err(TransferError::Other);
    }
    out.extend_from_slice(&index);
    Ok(out)
}
