//! The object store: a map with requests that may fail, hang, or succeed without anybody hearing of it.

use std::collections::BTreeMap;
use std::rc::Rc;

use stream_s3_core::error::TransferError;

use crate::rng::Rng;

/// Bytes of an object.
pub(crate) type Body = Rc<[u8]>;

/// Which part of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Whole,
    /// Inclusive, exclusive.
    Range(u64, u64),
    Last(u64),
}

/// A request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StoreOp {
    Put {
        key: String,
        body: Body,
    },
    Get {
        key: String,
        part: Part,
    },
    Delete {
        keys: Vec<String>,
        /// How many of them the store refuses to delete.
        refused: usize,
    },
    List {
        prefix: String,
    },
}

/// An answer.
pub(crate) type StoreAnswer = Result<StoreValue, StoreError>;

/// What a request came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StoreValue {
    Done,
    Body(Body),
    /// Keys, and when they were stored.
    Listing(Vec<(String, u64)>),
    /// Keys that are not deleted.
    Undeleted(Vec<String>),
}

/// How a request failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StoreError {
    NotFound,
    Failed(TransferError),
}

/// What becomes of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Performed after a while, answered after another.
    Done { after: u64, reply: u64 },
    /// Answered without effect.
    Refused { after: u64, error: TransferError },
    /// Nobody ever hears of it.
    Lost,
    /// Performed, but answered with an error.
    ReplyLost { after: u64, error: TransferError },
    /// Performed much later, and not answered.
    Late { after: u64 },
    /// What is stored are not the bytes that were sent, and the echoed checksum says so.
    Damaged { after: u64 },
}

/// The objects.
#[derive(Debug, Default)]
pub(crate) struct Bucket {
    pub(crate) objects: BTreeMap<String, (Body, u64)>,
    /// Nothing gets through until then.
    pub(crate) down_until: u64,
}

impl Bucket {
    /// Performs a request.
    pub(crate) fn perform(&mut self, op: &StoreOp, now: u64) -> StoreAnswer {
        match op {
            StoreOp::Put { key, body } => {
                self.objects.insert(key.clone(), (body.clone(), now));
                Ok(StoreValue::Done)
            }
            StoreOp::Get { key, part } => match self.objects.get(key) {
                Some((body, _)) => Ok(StoreValue::Body(cut(body, *part))),
                None => Err(StoreError::NotFound),
            },
            StoreOp::Delete { keys, refused } => {
                let (left, gone) = keys.split_at((*refused).min(keys.len()));
                for key in gone {
                    self.objects.remove(key);
                }
                Ok(StoreValue::Undeleted(left.to_vec()))
            }
            StoreOp::List { prefix } => Ok(StoreValue::Listing(
                self.objects
                    .range(prefix.clone()..)
                    .take_while(|(key, _)| key.starts_with(prefix))
                    .map(|(key, (_, stored))| (key.clone(), *stored))
                    .collect(),
            )),
        }
    }
}

fn cut(body: &Body, part: Part) -> Body {
    let len = body.len() as u64;
    let (start, end) = match part {
        Part::Whole => return body.clone(),
        Part::Range(start, end) => (start.min(len), end.min(len)),
        Part::Last(count) => (len.saturating_sub(count), len),
    };
    body[start as usize..end as usize].into()
}

/// Draws the fate of a request that meets no fault.
pub(crate) fn smooth(rng: &mut Rng) -> Fate {
    let slow = rng.chance(50);
    Fate::Done {
        after: if slow {
            rng.between(20, 400)
        } else {
            rng.between(1, 20)
        },
        reply: rng.between(0, 10),
    }
}

/// The same request with other bytes.
pub(crate) fn damaged(op: StoreOp) -> StoreOp {
    match op {
        StoreOp::Put { key, body } => {
            let mut bytes = body.to_vec();
            if let Some(byte) = bytes.last_mut() {
                *byte ^= 0x10;
            }
            let body = bytes.into();
            StoreOp::Put { key, body }
        }
        other @ (StoreOp::Get { .. } | StoreOp::Delete { .. } | StoreOp::List { .. }) => other,
    }
}

/// Draws the fate of one that does; the name is for coverage.
pub(crate) fn misfortune(rng: &mut Rng) -> (&'static str, Fate) {
    let after = rng.between(1, 60);
    let refused = |error| Fate::Refused { after, error };
    match rng.between(0, 19) {
        0 => ("store 500", refused(TransferError::Http(500))),
        1 => ("store 503", refused(TransferError::Http(503))),
        2 => ("store 403", refused(TransferError::Http(403))),
        3 => ("store slow down", refused(TransferError::Throttled)),
        4 => ("store reset", refused(TransferError::Connection)),
        5 => ("store timeout", refused(TransferError::Timeout)),
        6 => ("store clock skew", refused(TransferError::ClockSkew)),
        7 => ("store checksum", refused(TransferError::ChecksumMismatch)),
        8 => ("store expired token", refused(TransferError::ExpiredToken)),
        9 => (
            "store write conflict",
            refused(TransferError::WriteConflict),
        ),
        10 => ("store 429", refused(TransferError::Http(429))),
        // With an error in its body, which says that it is none.
        11 => ("store 200 with error", refused(TransferError::Http(500))),
        12 => ("store black hole", Fate::Lost),
        13 | 14 => {
            let error = rng.pick(&[0, 1, 2]);
            let error = match error {
                0 => TransferError::Timeout,
                1 => TransferError::Connection,
                _ => TransferError::Http(500),
            };
            ("store lost reply", Fate::ReplyLost { after, error })
        }
        15 => ("store wrong checksum echo", Fate::Damaged { after }),
        // Of an answer that ends too early nothing is taken.
        16 => {
            let error = TransferError::Connection;
            ("store truncated answer", Fate::ReplyLost { after, error })
        }
        17 => {
            let after = rng.between(500, 8_000);
            ("store late arrival", Fate::Late { after })
        }
        // Also one that comes byte by byte.
        _ => {
            let (after, reply) = (rng.between(500, 5_000), rng.between(0, 10));
            ("store stall", Fate::Done { after, reply })
        }
    }
}
