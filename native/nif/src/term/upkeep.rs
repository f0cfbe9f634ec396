//! What retention and garbage collection take and answer.

use rustler::types::tuple;
use rustler::{Encoder, Env, NifResult, Term};
use stream_s3_core::decisions::gc::{
    Candidate, DeleteReason, Discard, GcLimits, KeepReason, Stream, Tier, Verdict,
};
use stream_s3_core::key::{self, ParsedKey, Prefix, StreamId};
use stream_s3_core::units::Offset;

use super::{
    epoch, field, is, list, misuse, need, offset, optional, stream_id, tuple_of, uid, unsigned,
};

mod atoms {
    rustler::atoms! {
        all, unknown, history, fragment, root, group,
        key, prefix, age_ms, epoch, root_uid, root_age_ms, next_offset, listed, discarded, gc_min_age_ms, discarded_tier_grace_ms,
        deleted, never_persisted, live,
        keep, delete, not_ours, young, in_use, ahead, grace, orphan, discarded_tier, stream_deleted, optional, always,
    }
}

/// What all keys of a deployment begin with.
pub(crate) fn prefix(term: Term) -> NifResult<Prefix> {
    let text: &str = need(term, "prefix", "a binary")?;
    Prefix::parse(text).map_err(|error| misuse(format!("prefix: {error}")))
}

/// A stream id, or `all`.
pub(crate) fn one_or_all(term: Term) -> NifResult<Option<StreamId>> {
    if is(term, atoms::all()) {
        Ok(None)
    } else {
        stream_id(term).map(Some)
    }
}

/// A list of offsets.
pub(crate) fn offsets(term: Term, what: &str) -> NifResult<Vec<Offset>> {
    list(term, what)?.map(|one| offset(one, what)).collect()
}

/// `{fragment, Stream, Offset, Uid}`, `{root, Stream, Epoch, Uid}`, `{group, Stream, Kind, Offset, Uid}`, `{history, Run, Seq}`, or
/// `unknown`.
pub(crate) fn parsed_key<'a>(env: Env<'a>, parsed: Option<&ParsedKey>) -> Term<'a> {
    match parsed {
        None => atoms::unknown().encode(env),
        Some(ParsedKey::Fragment {
            stream,
            first_offset,
            uid,
        }) => (atoms::fragment(), stream.as_str(), first_offset.0, uid.0).encode(env),
        Some(ParsedKey::Root { stream, epoch, uid }) => {
            (atoms::root(), stream.as_str(), epoch.0, uid.0).encode(env)
        }
        Some(ParsedKey::Group {
            stream,
            kind,
            first_offset,
            uid,
        }) => tuple_of(
            env,
            &[
                atoms::group().encode(env),
                stream.as_str().encode(env),
                kind.code().encode(env),
                first_offset.0.encode(env),
                uid.0.encode(env),
            ],
        ),
        Some(ParsedKey::History { run, seq }) => (atoms::history(), run.as_str(), *seq).encode(env),
    }
}

/// `#{prefix, key, age_ms}`; the age may be `undefined`.
pub(crate) fn candidate(term: Term) -> NifResult<Candidate> {
    let text: &str = need(
        field(term, atoms::key(), "object.key")?,
        "object.key",
        "a binary",
    )?;
    let prefix = prefix(field(term, atoms::prefix(), "object.prefix")?)?;
    Ok(Candidate {
        key: key::parse(&prefix, text),
        age_ms: age(
            field(term, atoms::age_ms(), "object.age_ms")?,
            "object.age_ms",
        )?,
    })
}

fn age(term: Term, what: &str) -> NifResult<Option<u64>> {
    optional(term, |term| unsigned(term, what))
}

/// `unknown`, `deleted`, `never_persisted` or `{live, #{epoch, root_uid, root_age_ms, next_offset, listed, discarded}}`, the last
/// one `{AgeMs, Epoch}` or `undefined`.
pub(crate) fn gc_stream(term: Term) -> NifResult<Stream> {
    if is(term, atoms::unknown()) {
        return Ok(Stream::Unknown);
    }
    if is(term, atoms::deleted()) {
        return Ok(Stream::Deleted);
    }
    if is(term, atoms::never_persisted()) {
        return Ok(Stream::NeverPersisted);
    }
    match tuple::get_tuple(term).unwrap_or_default().as_slice() {
        [tag, known] if is(*tag, atoms::live()) => tier(*known).map(Stream::Live),
        _ => Err(misuse(format!(
            "stream: expected unknown, deleted, never_persisted or {{live, Tier}}, got {term:?}"
        ))),
    }
}

fn tier(term: Term) -> NifResult<Tier> {
    Ok(Tier {
        epoch: epoch(field(term, atoms::epoch(), "tier.epoch")?, "tier.epoch")?,
        root: uid(
            field(term, atoms::root_uid(), "tier.root_uid")?,
            "tier.root_uid",
        )?,
        root_age_ms: age(
            field(term, atoms::root_age_ms(), "tier.root_age_ms")?,
            "tier.root_age_ms",
        )?,
        next_offset: offset(
            field(term, atoms::next_offset(), "tier.next_offset")?,
            "tier.next_offset",
        )?,
        listed: optional(field(term, atoms::listed(), "tier.listed")?, |term| {
            need(term, "tier.listed", "a boolean or undefined")
        })?,
        discarded: optional(field(term, atoms::discarded(), "tier.discarded")?, discard)?,
    })
}

fn discard(term: Term) -> NifResult<Discard> {
    match tuple::get_tuple(term).unwrap_or_default().as_slice() {
        [age_ms, of] => Ok(Discard {
            age_ms: unsigned(*age_ms, "tier.discarded")?,
            epoch: epoch(*of, "tier.discarded")?,
        }),
        _ => Err(misuse(format!(
            "tier.discarded: expected undefined or {{AgeMs, Epoch}}, got {term:?}"
        ))),
    }
}

/// The limits, under the names of the configuration.
pub(crate) fn gc_limits(term: Term) -> NifResult<GcLimits> {
    let get = |key, what| unsigned(field(term, key, what)?, what);
    Ok(GcLimits {
        min_age_ms: get(atoms::gc_min_age_ms(), "gc_min_age_ms")?,
        discarded_tier_grace_ms: get(atoms::discarded_tier_grace_ms(), "discarded_tier_grace_ms")?,
    })
}

/// `{keep, Reason}` or `{delete, Reason, always | optional}`.
pub(crate) fn verdict<'a>(env: Env<'a>, verdict: Verdict) -> Term<'a> {
    match verdict {
        Verdict::Keep(reason) => {
            let reason = match reason {
                KeepReason::NotOurs => atoms::not_ours(),
                KeepReason::Unknown => atoms::unknown(),
                KeepReason::Young => atoms::young(),
                KeepReason::InUse => atoms::in_use(),
                KeepReason::Ahead => atoms::ahead(),
                KeepReason::Grace => atoms::grace(),
            };
            (atoms::keep(), reason).encode(env)
        }
        Verdict::Delete(reason) => {
            let when = if reason.is_optional() {
                atoms::optional()
            } else {
                atoms::always()
            };
            let reason = match reason {
                DeleteReason::Orphan => atoms::orphan(),
                DeleteReason::DiscardedTier => atoms::discarded_tier(),
                DeleteReason::StreamDeleted => atoms::stream_deleted(),
            };
            (atoms::delete(), reason, when).encode(env)
        }
    }
}
