//! Reasons of failed transfers, and failed store requests.

use rustler::types::tuple;
use rustler::{Atom, Encoder, Env, Term};
use stream_s3_core::error::TransferError;
use stream_s3_core::units::Offset;
use stream_s3_store::{ErrorKind, Op, StoreError};

use super::{atoms, is};

/// A reason as the contract writes it.
pub(crate) struct Reason<'e>(pub(crate) &'e TransferError);

impl Encoder for Reason<'_> {
    fn encode<'a>(&self, env: Env<'a>) -> Term<'a> {
        match self.0 {
            TransferError::Http(status) => (atoms::http(), status).encode(env),
            TransferError::Timeout => atoms::timeout().encode(env),
            TransferError::Connection => atoms::connection().encode(env),
            TransferError::Throttled => atoms::throttled().encode(env),
            TransferError::ChecksumMismatch => atoms::checksum_mismatch().encode(env),
            TransferError::CorruptChunk(chunk) => (atoms::corrupt_chunk(), chunk.0).encode(env),
            TransferError::OpenFailed { file, posix } => {
                (atoms::open_failed(), file, posix_atom(env, posix)).encode(env)
            }
            TransferError::Panic(text) => (atoms::panic(), text).encode(env),
            TransferError::Cancelled => atoms::cancelled().encode(env),
            TransferError::ClockSkew => atoms::clock_skew().encode(env),
            TransferError::ExpiredToken => atoms::expired_token().encode(env),
            TransferError::WriteConflict => atoms::write_conflict().encode(env),
            TransferError::Other => atoms::other().encode(env),
        }
    }
}

/// Names come from closed lists (of this library), so they cannot fill the atom table.
fn posix_atom<'a>(env: Env<'a>, posix: &str) -> Term<'a> {
    Atom::from_str(env, posix).map_or_else(|_| posix.encode(env), |atom| atom.encode(env))
}

/// What a host's reason means. Total: what the contract does not name is `Other`. A failed store request stands for its reason.
pub(crate) fn transfer_error(term: Term) -> TransferError {
    if term.is_atom() {
        return atom_reason(term);
    }
    let Ok(parts) = tuple::get_tuple(term) else {
        return TransferError::Other;
    };
    match parts.as_slice() {
        // Decoded as a u16, 66036 would be 500.
        [tag, status] if is(*tag, atoms::http()) => status
            .decode::<u32>()
            .ok()
            .and_then(|status| u16::try_from(status).ok())
            .map_or(TransferError::Other, TransferError::Http),
        [tag, chunk] if is(*tag, atoms::corrupt_chunk()) => {
            chunk.decode().map_or(TransferError::Other, |chunk| {
                TransferError::CorruptChunk(Offset(chunk))
            })
        }
        [tag, text] if is(*tag, atoms::panic()) => {
            TransferError::Panic(text.decode().unwrap_or_else(|_| format!("{text:?}")))
        }
        [tag, file, posix] if is(*tag, atoms::open_failed()) => TransferError::OpenFailed {
            file: file.decode().unwrap_or_else(|_| format!("{file:?}")),
            posix: posix
                .atom_to_string()
                .unwrap_or_else(|_| format!("{posix:?}")),
        },
        [_kind, failed] if failed.is_map() => failed
            .map_get(atoms::reason())
            .map_or(TransferError::Other, transfer_error),
        _ => TransferError::Other,
    }
}

fn atom_reason(term: Term) -> TransferError {
    let known = [
        (atoms::timeout(), TransferError::Timeout),
        (atoms::connection(), TransferError::Connection),
        (atoms::throttled(), TransferError::Throttled),
        (atoms::checksum_mismatch(), TransferError::ChecksumMismatch),
        (atoms::cancelled(), TransferError::Cancelled),
        (atoms::clock_skew(), TransferError::ClockSkew),
        (atoms::expired_token(), TransferError::ExpiredToken),
        (atoms::write_conflict(), TransferError::WriteConflict),
    ];
    known
        .into_iter()
        .find(|(atom, _)| is(term, *atom))
        .map_or(TransferError::Other, |(_, reason)| reason)
}

/// A failed store request: `{Kind, #{op, reason, message}}`.
pub(crate) struct Failed<'e>(pub(crate) &'e StoreError);

impl Encoder for Failed<'_> {
    fn encode<'a>(&self, env: Env<'a>) -> Term<'a> {
        let kind = match self.0.kind {
            ErrorKind::Transient => atoms::transient(),
            ErrorKind::Conflict => atoms::conflict(),
            ErrorKind::NotFound => atoms::not_found(),
            ErrorKind::Corrupt => atoms::corrupt(),
            ErrorKind::Closed => atoms::closed(),
            ErrorKind::Invalid => atoms::invalid(),
        };
        failure(
            env,
            kind,
            self.0.op,
            &stream_s3_runtime::reason(&self.0.failure),
            &self.0.message,
        )
    }
}

/// A store request that panicked.
pub(crate) struct Panicked(pub(crate) Op, pub(crate) String);

impl Encoder for Panicked {
    fn encode<'a>(&self, env: Env<'a>) -> Term<'a> {
        let message = format!(
            "{} panicked, which is a bug of this library: {}",
            self.0.name(),
            self.1
        );
        failure(
            env,
            atoms::invalid(),
            self.0,
            &TransferError::Panic(self.1.clone()),
            &message,
        )
    }
}

fn failure<'a>(
    env: Env<'a>,
    kind: Atom,
    op: Op,
    reason: &TransferError,
    message: &str,
) -> Term<'a> {
    let op = match op {
        Op::Open => atoms::open(),
        Op::Put => atoms::put(),
        Op::Get => atoms::get(),
        Op::Delete => atoms::delete(),
        Op::List => atoms::list(),
        Op::Probe => atoms::probe(),
    };
    let details = Term::map_new(env)
        .map_put(atoms::op(), op)
        .and_then(|map| map.map_put(atoms::reason(), Reason(reason)))
        .and_then(|map| map.map_put(atoms::message(), message));
    match details {
        Ok(details) => (kind, details).encode(env),
        // The empty map is a map, so this cannot be.
        Err(_) => (kind, Reason(reason)).encode(env),
    }
}
