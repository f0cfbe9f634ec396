//! Sealed history segments as objects:
//!
//! ```text
//! "OSIH" | u32 1 | u32 length of the run id | run id | seq u64 | payload length u64 | CRC-32 u32 of the payload | payload
//! ```

use crate::bytes::{array, u32_at, u64_at};
use crate::error::{FormatError, FormatProblem};
use crate::key::RunId;

const WHAT: &str = "history segment";
const MAGIC: [u8; 4] = *b"OSIH";
const VERSION: u32 = 1;
const RUN_AT: usize = 12;
/// Of the fields between run id and payload.
const FIXED: usize = 20;

/// A segment as read back. The payload stays where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HistorySegment<'a> {
    /// Whose it is.
    pub run: RunId,
    /// Its number in the run.
    pub seq: u64,
    /// CRC-32/IEEE of the payload; verified.
    pub crc: u32,
    /// The sealed bytes.
    pub payload: &'a [u8],
}

/// Length in bytes of the object of a payload of `payload_len` bytes.
#[must_use]
pub fn encoded_len(run: &RunId, payload_len: u64) -> u64 {
    ((RUN_AT + run.as_str().len() + FIXED) as u64).saturating_add(payload_len)
}

/// Everything in front of the payload. `crc` is the payload's CRC-32/IEEE, `payload_len` its length in bytes.
#[must_use]
pub fn encode_header(run: &RunId, seq: u64, payload_len: u64, crc: u32) -> Vec<u8> {
    let name = run.as_str().as_bytes();
    // A run id has 255 bytes at most.
    let name_len = u32::try_from(name.len()).unwrap_or(u32::MAX);
    let mut out = Vec::with_capacity(RUN_AT + name.len() + FIXED);
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&VERSION.to_be_bytes());
    out.extend_from_slice(&name_len.to_be_bytes());
    out.extend_from_slice(name);
    out.extend_from_slice(&seq.to_be_bytes());
    out.extend_from_slice(&payload_len.to_be_bytes());
    out.extend_from_slice(&crc.to_be_bytes());
    out
}

/// The whole object. The same run, number and payload always give the same bytes. Copies the payload.
#[must_use]
pub fn encode(run: &RunId, seq: u64, payload: &[u8]) -> Vec<u8> {
    let mut out = encode_header(run, seq, payload.len() as u64, crc32fast::hash(payload));
    out.extend_from_slice(payload);
    out
}

/// Reads a whole object and verifies its checksum. The error says which byte is wrong, and how. One pass; copies the run id only.
pub fn decode(bytes: &[u8]) -> Result<HistorySegment<'_>, FormatError> {
    let got = bytes.len() as u64;
    let fail = |at: usize, problem| Err(FormatError::new(WHAT, at as u64, problem));
    let length = |expected| fail(bytes.len(), FormatProblem::Length { expected, got });
    if bytes.len() < RUN_AT {
        return length(RUN_AT as u64);
    }
    if bytes[..4] != MAGIC {
        return fail(0, FormatProblem::Magic(array(bytes, 0)));
    }
    let version = u32_at(bytes, 4);
    if version != VERSION {
        return fail(4, FormatProblem::Version(version));
    }
    let name_len = u32_at(bytes, 8);
    let header = RUN_AT as u64 + u64::from(name_len) + FIXED as u64;
    if got < header {
        return length(header);
    }
    // Not beyond the input, so it fits.
    let fixed_at = RUN_AT + name_len as usize;
    let run = parse_run(&bytes[RUN_AT..fixed_at])?;
    let seq = u64_at(bytes, fixed_at);
    let payload_len = u64_at(bytes, fixed_at + 8);
    let stored = u32_at(bytes, fixed_at + 16);
    let payload = &bytes[fixed_at + FIXED..];
    if payload.len() as u64 != payload_len {
        return length(header.saturating_add(payload_len));
    }
    let computed = crc32fast::hash(payload);
    if computed != stored {
        return fail(fixed_at + 16, FormatProblem::Checksum { stored, computed });
    }
    Ok(HistorySegment {
        run,
        seq,
        crc: stored,
        payload,
    })
}

fn parse_run(bytes: &[u8]) -> Result<RunId, FormatError> {
    let bad = |at: usize| {
        FormatError::new(
            WHAT,
            (RUN_AT + at) as u64,
            FormatProblem::InvalidText("run id"),
        )
    };
    let text = std::str::from_utf8(bytes).map_err(|error| bad(error.valid_up_to()))?;
    RunId::parse(text).map_err(|error| bad(usize::try_from(error.at).unwrap_or(0)))
}

/// What a create-only write that found an object there has to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Existing {
    /// It holds this segment: acknowledge it with its stored size.
    AlreadyPresent {
        /// Length of the object in bytes.
        stored_size: u64,
    },
    /// It is damaged, or something else: replace it, provided that it is still that object, and report it.
    Replace,
}

/// Judges the object under the key of segment `seq` of `run`, where `crc` is the CRC-32/IEEE of the payload that was to be stored. One pass.
#[must_use]
pub fn judge_existing(existing: &[u8], run: &RunId, seq: u64, crc: u32) -> Existing {
    match decode(existing) {
        Ok(segment) if segment.run == *run && segment.seq == seq && segment.crc == crc => {
            Existing::AlreadyPresent {
                stored_size: existing.len() as u64,
            }
        }
        Ok(_) | Err(_) => Existing::Replace,
    }
}
