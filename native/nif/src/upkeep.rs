//! NIFs of retention and garbage collection. All of them run on normal schedulers, in constant time unless they say otherwise.

use rustler::{Encoder, Env, NifResult, Term};
use stream_s3_core::decisions::{deletions, gc, local_retention};
use stream_s3_core::key;

use crate::term;

/// Whether what retention dropped may be deleted.
#[rustler::nif]
fn may_delete(dropped_below: Term, persisted_first: Term) -> NifResult<bool> {
    Ok(deletions::may_delete(
        term::offset(dropped_below, "dropped below")?,
        term::offset(persisted_first, "persisted first offset")?,
    ))
}

/// How many of the oldest local segments the tier has made superfluous. Linear in the segments, some nanoseconds each.
#[rustler::nif]
fn deletable_segments(first_offsets: Term, persisted: Term, replicas: Term) -> NifResult<usize> {
    let first_offsets = term::offsets(first_offsets, "first offsets")?;
    let floor = local_retention::floor(
        term::offset(persisted, "persisted next offset")?,
        &term::offsets(replicas, "replicas")?,
    );
    Ok(local_retention::deletable_segments(&first_offsets, floor))
}

/// Below which offset a replica may trim its log. Constant time.
#[rustler::nif]
fn replica_floor(
    persisted: Term,
    persisted_in: Term,
    log: Term,
    committed: Term,
) -> NifResult<u64> {
    let floor = local_retention::replica_floor(
        term::offset(persisted, "persisted next offset")?,
        term::epoch(persisted_in, "epoch of the manifest")?,
        term::epoch(log, "epoch of the log")?,
        term::offset(committed, "committed chunk id")?,
    );
    Ok(floor.0)
}

/// What the keys of one stream, or of all streams, begin with.
#[rustler::nif]
fn key_prefix(prefix: Term, streams: Term) -> NifResult<String> {
    let prefix = term::prefix(prefix)?;
    Ok(match term::one_or_all(streams)? {
        Some(stream) => key::stream_prefix(&prefix, &stream),
        None => key::streams_prefix(&prefix),
    })
}

/// What a key names.
#[rustler::nif]
fn parse_key<'a>(env: Env<'a>, prefix: Term<'a>, key: String) -> NifResult<Term<'a>> {
    let parsed = key::parse(&term::prefix(prefix)?, &key);
    Ok(term::parsed_key(env, parsed.as_ref()))
}

/// Whether an object is garbage.
#[rustler::nif]
fn gc_verdict<'a>(
    env: Env<'a>,
    object: Term<'a>,
    stream: Term<'a>,
    limits: Term<'a>,
) -> NifResult<Term<'a>> {
    let verdict = gc::verdict(
        &term::candidate(object)?,
        &term::gc_stream(stream)?,
        &term::gc_limits(limits)?,
    );
    Ok(term::verdict(env, verdict).encode(env))
}
