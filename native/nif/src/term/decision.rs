//! What the small decisions take and answer.

use rustler::{Encoder, Env, NifResult, Term};
use stream_s3_core::decisions::discard::{Claim, DiscardNote};
use stream_s3_core::decisions::local_log::{Discarded, LocalLog, Start};
use stream_s3_core::decisions::replica::Acceptance;
use stream_s3_core::decisions::resolution::{Fetched, Metadata, Resolve, Resolved};
use stream_s3_core::decisions::retry::{Outlook, RetryDelays};
use stream_s3_core::decisions::timeline::{ChunkIdentity, LocalChunk, Timeline};
use stream_s3_core::error::ErrorClass;

use rustler::types::tuple;
use stream_s3_core::units::Revision;

use super::manifest::{manifest_term, whole_manifest};
use super::{
    atoms, epoch, field, is, misuse, need, offset, offset_or_undefined, optional, revision,
    timestamp, uid, unsigned, unsigned32,
};

/// `#{first, next, pinned_first}` of a local log; `pinned_first` may be left out.
pub(crate) fn log(term: Term) -> NifResult<LocalLog> {
    let pinned = term.map_get(atoms::pinned_first()).ok();
    Ok(LocalLog {
        first: offset_or_undefined(field(term, atoms::first(), "log.first")?, "log.first")?,
        next: offset(field(term, atoms::next(), "log.next")?, "log.next")?,
        pinned_first: pinned.map_or(Ok(None), |pinned| {
            offset_or_undefined(pinned, "log.pinned_first")
        })?,
    })
}

/// Where to start.
pub(crate) fn start<'a>(env: Env<'a>, start: &Start) -> Term<'a> {
    let range = |discarded: &Discarded| (discarded.first.0, discarded.next.0);
    match start {
        Start::Fresh { at } => (atoms::fresh(), at.0).encode(env),
        Start::Resume { at } => (atoms::resume(), at.0).encode(env),
        Start::RemoteAhead { discarded, at } => {
            (atoms::remote_ahead(), range(discarded), at.0).encode(env)
        }
        Start::LocalAhead { discarded, at } => {
            (atoms::local_ahead(), range(discarded), at.0).encode(env)
        }
        Start::WaitForLog => atoms::wait_for_log().encode(env),
    }
}

/// `#{chunk_id, epoch, crc}`; other keys are ignored, so that a header map will do.
pub(crate) fn chunk_identity(term: Term) -> NifResult<ChunkIdentity> {
    Ok(ChunkIdentity {
        chunk_id: offset(
            field(term, atoms::chunk_id(), "chunk.chunk_id")?,
            "chunk.chunk_id",
        )?,
        epoch: epoch(field(term, atoms::epoch(), "chunk.epoch")?, "chunk.epoch")?,
        crc: unsigned32(field(term, atoms::crc(), "chunk.crc")?, "chunk.crc")?,
    })
}

/// The same of a tier, which has none while it is empty: `undefined`.
pub(crate) fn optional_chunk_identity(term: Term) -> NifResult<Option<ChunkIdentity>> {
    if term == atoms::undefined().encode(term.get_env()) {
        Ok(None)
    } else {
        chunk_identity(term).map(Some)
    }
}

/// The same of the local log, or why there is no such chunk.
pub(crate) fn local_chunk(term: Term) -> NifResult<LocalChunk> {
    if is(term, atoms::inside_another()) {
        Ok(LocalChunk::InsideAnother)
    } else if is(term, atoms::trimmed()) {
        Ok(LocalChunk::Trimmed)
    } else {
        chunk_identity(term).map(LocalChunk::Found)
    }
}

/// What a comparison of two chunks says.
pub(crate) fn timeline<'a>(env: Env<'a>, timeline: Timeline) -> Term<'a> {
    match timeline {
        Timeline::Same => atoms::same(),
        Timeline::Different => atoms::different(),
        Timeline::Unverifiable => atoms::unverifiable(),
    }
    .encode(env)
}

/// What the metadata store says: `absent`, `{present, Uid, Epoch, Revision}` or `failed`.
pub(crate) fn metadata(term: Term) -> NifResult<Metadata> {
    if is(term, atoms::absent()) {
        return Ok(Metadata::Absent);
    }
    if is(term, atoms::failed()) {
        return Ok(Metadata::Failed);
    }
    match tuple::get_tuple(term).unwrap_or_default().as_slice() {
        [tag, id, of, at] if is(*tag, atoms::present()) => Ok(Metadata::Present {
            uid: uid(*id, "uid")?,
            epoch: epoch(*of, "epoch")?,
            revision: revision(*at, "revision")?,
        }),
        _ => Err(misuse(format!(
            "metadata: expected absent, {{present, Uid, Epoch, Revision}} or failed, got {term:?}"
        ))),
    }
}

/// `{AtMs | undefined, Epoch}`, or `undefined` where nobody has noted anything.
pub(crate) fn discard_note(term: Term) -> NifResult<Option<DiscardNote>> {
    optional(term, |term| {
        match tuple::get_tuple(term).unwrap_or_default().as_slice() {
            [at, of] => Ok(DiscardNote {
                at: optional(*at, |at| timestamp(at, "note"))?,
                epoch: epoch(*of, "note")?,
            }),
            _ => Err(misuse(format!(
                "note: expected undefined or {{AtMs, Epoch}}, got {term:?}"
            ))),
        }
    })
}

/// `own`, `{take_over, Note}` or `{fenced, Epoch}`.
pub(crate) fn claim<'a>(env: Env<'a>, claim: Claim) -> Term<'a> {
    match claim {
        Claim::Own => atoms::own().encode(env),
        Claim::TakeOver(note) => {
            let at = note
                .at
                .map_or_else(|| atoms::undefined().encode(env), |at| at.0.encode(env));
            (atoms::take_over(), (at, note.epoch.0)).encode(env)
        }
        Claim::Fenced(epoch) => (atoms::fenced(), epoch.0).encode(env),
    }
}

/// The revision of a cached manifest, or `undefined`.
pub(crate) fn cached(term: Term) -> NifResult<Option<Revision>> {
    optional(term, |term| revision(term, "cached revision"))
}

/// Where a manifest comes from.
pub(crate) fn resolve<'a>(env: Env<'a>, resolve: Resolve) -> Term<'a> {
    match resolve {
        Resolve::Empty => atoms::empty().encode(env),
        Resolve::UseCache => atoms::use_cache().encode(env),
        Resolve::Fetch {
            uid,
            epoch,
            revision,
        } => (atoms::fetch(), uid.0, epoch.0, revision.0).encode(env),
        Resolve::Superseded { by } => (atoms::superseded(), by.0).encode(env),
        Resolve::Retry => atoms::retry().encode(env),
    }
}

/// What became of reading a root: `{ok, #manifest{}}`, `not_found` or `failed`.
pub(crate) fn fetched_root(term: Term) -> NifResult<Fetched> {
    if is(term, atoms::not_found()) {
        return Ok(Fetched::NotFound);
    }
    if is(term, atoms::failed()) {
        return Ok(Fetched::Failed);
    }
    match tuple::get_tuple(term).unwrap_or_default().as_slice() {
        [tag, manifest] if is(*tag, atoms::ok()) => {
            whole_manifest(*manifest).map(Fetched::Manifest)
        }
        _ => Err(misuse(format!(
            "root: expected {{ok, Manifest}}, not_found or failed, got {term:?}"
        ))),
    }
}

/// Which manifest a stream has: `{ok, #manifest{}}` or `retry`.
pub(crate) fn resolved<'a>(env: Env<'a>, resolved: &Resolved) -> Term<'a> {
    match resolved {
        Resolved::Manifest(manifest) => (atoms::ok(), manifest_term(env, manifest)).encode(env),
        Resolved::Retry => atoms::retry().encode(env),
    }
}

/// A class of errors.
pub(crate) fn error_class(term: Term) -> NifResult<ErrorClass> {
    if is(term, atoms::transient()) {
        Ok(ErrorClass::Transient)
    } else if is(term, atoms::throttled()) {
        Ok(ErrorClass::Throttled)
    } else if is(term, atoms::permanent()) {
        Ok(ErrorClass::Permanent)
    } else {
        Err(misuse(format!(
            "class: expected transient, throttled or permanent, got {term:?}"
        )))
    }
}

/// A class of errors, as its atom.
pub(crate) fn error_class_term<'a>(env: Env<'a>, class: ErrorClass) -> Term<'a> {
    match class {
        ErrorClass::Transient => atoms::transient(),
        ErrorClass::Throttled => atoms::throttled(),
        ErrorClass::Permanent => atoms::permanent(),
    }
    .encode(env)
}

/// An outlook, as its atom.
pub(crate) fn outlook(env: Env, outlook: Outlook) -> Term {
    match outlook {
        Outlook::There => atoms::there(),
        Outlook::Doubtful => atoms::doubtful(),
        Outlook::Away => atoms::away(),
    }
    .encode(env)
}

/// The delays, under the names of the configuration.
pub(crate) fn retry_delays(term: Term) -> NifResult<RetryDelays> {
    let get = |key, what| unsigned(field(term, key, what)?, what);
    Ok(RetryDelays {
        transient_ms: get(atoms::task_retry_delay_ms(), "task_retry_delay_ms")?,
        transient_max_ms: get(atoms::task_retry_delay_max_ms(), "task_retry_delay_max_ms")?,
        permanent_ms: get(atoms::upload_retry_delay_ms(), "upload_retry_delay_ms")?,
        permanent_max_ms: get(
            atoms::upload_retry_delay_max_ms(),
            "upload_retry_delay_max_ms",
        )?,
    })
}

/// A random number of `[0, 1)`, spread over 32 bits.
pub(crate) fn jitter(term: Term) -> NifResult<u32> {
    let random: f64 = need(term, "random", "a float of [0, 1)")?;
    if (0.0..=1.0).contains(&random) {
        // Saturates: 1.0 becomes the largest jitter.
        Ok((random * (f64::from(u32::MAX) + 1.0)) as u32)
    } else {
        Err(misuse(format!(
            "random: expected a float of [0, 1), got {random}"
        )))
    }
}

/// `{accept, Manifest}`, `stale`, or `{resync, Text}`.
pub(crate) fn acceptance<'a>(env: Env<'a>, acceptance: &Acceptance) -> Term<'a> {
    match acceptance {
        Acceptance::Accept(manifest) => (atoms::accept(), manifest_term(env, manifest)).encode(env),
        Acceptance::Stale => atoms::stale().encode(env),
        Acceptance::Resync(reason) => (atoms::resync(), reason.to_string()).encode(env),
    }
}
