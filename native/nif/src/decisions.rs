//! NIFs of the small decisions and of names. All of them run on normal schedulers, in constant time unless they say otherwise.

use rustler::{Env, NifResult, Term};
use stream_s3_core::decisions::commit;
use stream_s3_core::decisions::discard;
use stream_s3_core::decisions::local_log;
use stream_s3_core::decisions::replica::{self, Broadcast};
use stream_s3_core::decisions::resolution;
use stream_s3_core::decisions::retry;
use stream_s3_core::decisions::timeline;

use crate::term;

/// Whether a chunk may be drained.
#[rustler::nif]
fn chunk_is_committed(chunk_id: Term, committed: Term) -> NifResult<bool> {
    Ok(commit::chunk_is_committed(
        term::offset(chunk_id, "chunk id")?,
        term::signed(committed, "committed")?,
    ))
}

/// Where to start on a local log. Linear in the entries of the manifest.
#[rustler::nif]
fn compare_log<'a>(env: Env<'a>, manifest: Term<'a>, log: Term<'a>) -> NifResult<Term<'a>> {
    Ok(term::start(
        env,
        &local_log::compare(&term::whole_manifest(manifest)?, &term::log(log)?),
    ))
}

/// Where to start on a local log that has turned out to be of another timeline. Linear in the entries of the manifest.
#[rustler::nif]
fn start_on_other_timeline<'a>(
    env: Env<'a>,
    manifest: Term<'a>,
    log: Term<'a>,
) -> NifResult<Term<'a>> {
    Ok(term::start(
        env,
        &local_log::on_other_timeline(&term::whole_manifest(manifest)?, &term::log(log)?),
    ))
}

/// Whether tier and log are of one timeline.
#[rustler::nif]
fn check_timeline<'a>(env: Env<'a>, remote: Term<'a>, local: Term<'a>) -> NifResult<Term<'a>> {
    Ok(term::timeline(
        env,
        timeline::check_timeline(&term::chunk_identity(remote)?, &term::local_chunk(local)?),
    ))
}

/// Whether a log that has trimmed the tier's newest chunk may begin where it does. Normal scheduler, constant.
#[rustler::nif]
fn check_beginning<'a>(env: Env<'a>, end: Term<'a>, first: Term<'a>) -> NifResult<Term<'a>> {
    let end = term::offset(end, "end")?;
    let first = term::offset_or_undefined(first, "first")?;
    Ok(term::timeline(env, timeline::check_beginning(end, first)))
}

/// Whether the log may go on where the tier ends, for what `check_timeline` cannot tell. Normal scheduler, constant.
#[rustler::nif]
fn check_continuation<'a>(env: Env<'a>, newest: Term<'a>, next: Term<'a>) -> NifResult<Term<'a>> {
    let newest = term::optional_chunk_identity(newest)?;
    Ok(term::timeline(
        env,
        timeline::check_continuation(newest.as_ref(), &term::local_chunk(next)?),
    ))
}

/// How a writer takes the note of discarded tiers over.
#[rustler::nif]
fn claim_discard<'a>(
    env: Env<'a>,
    note: Term<'a>,
    epoch: Term<'a>,
    now: Term<'a>,
) -> NifResult<Term<'a>> {
    let note = term::discard_note(note)?;
    let (epoch, now) = (term::epoch(epoch, "epoch")?, term::timestamp(now, "now")?);
    Ok(term::claim(env, discard::claim(note.as_ref(), epoch, now)))
}

/// Where the manifest of a stream comes from.
#[rustler::nif]
fn resolve_manifest<'a>(
    env: Env<'a>,
    metadata: Term<'a>,
    cached: Term<'a>,
    own: Term<'a>,
) -> NifResult<Term<'a>> {
    let (metadata, cached, own) = (
        term::metadata(metadata)?,
        term::cached(cached)?,
        term::epoch(own, "own epoch")?,
    );
    Ok(term::resolve(
        env,
        resolution::resolve(metadata, cached, own),
    ))
}

/// What a fetched root means. Linear in the entries of the manifest.
#[rustler::nif]
fn resolve_root<'a>(env: Env<'a>, fetched: Term<'a>, revision: Term<'a>) -> NifResult<Term<'a>> {
    let (fetched, revision) = (
        term::fetched_root(fetched)?,
        term::revision(revision, "revision")?,
    );
    Ok(term::resolved(
        env,
        &resolution::resolved(fetched, revision),
    ))
}

/// What kind of failure a reason is.
#[rustler::nif]
fn error_class<'a>(env: Env<'a>, reason: Term<'a>) -> Term<'a> {
    term::error_class_term(env, term::transfer_error(reason).class())
}

/// What a failed attempt says of the store.
#[rustler::nif]
fn outlook<'a>(env: Env<'a>, reason: Term<'a>, failures: Term<'a>) -> NifResult<Term<'a>> {
    // Beyond that many failures the store has long been away.
    let failures = u32::try_from(term::unsigned(failures, "failures")?).unwrap_or(u32::MAX);
    let outlook = retry::outlook(&term::transfer_error(reason), failures);
    Ok(term::outlook(env, outlook))
}

/// How long to wait before the next attempt.
#[rustler::nif]
fn retry_delay<'a>(
    class: Term<'a>,
    failures: Term<'a>,
    delays: Term<'a>,
    random: Term<'a>,
) -> NifResult<u64> {
    // Beyond that many failures the delay has long been at its maximum.
    let failures = u32::try_from(term::unsigned(failures, "failures")?).unwrap_or(u32::MAX);
    Ok(retry::retry_delay(
        term::error_class(class)?,
        failures,
        &term::retry_delays(delays)?,
        term::jitter(random)?,
    ))
}

/// Whether this can be a stream id. False for every other term too.
#[rustler::nif]
fn valid_stream_id(stream: Term) -> bool {
    term::stream_id(stream).is_ok()
}

/// The key of an object.
#[rustler::nif]
fn object_key(prefix: Term, stream: Term, object: Term) -> NifResult<String> {
    term::object_key(prefix, &term::stream_id(stream)?, object)
}

/// Whether a replica takes the edits that the writer of an epoch has sent. Linear in the entries of the manifest that results.
#[rustler::nif]
fn accept_edits<'a>(
    env: Env<'a>,
    have: Term<'a>,
    have_epoch: Term<'a>,
    epoch: Term<'a>,
    revisions: (Term<'a>, Term<'a>),
    edits: Term<'a>,
) -> NifResult<Term<'a>> {
    let edits = term::list(edits, "edits")?
        .map(term::edit)
        .collect::<NifResult<Vec<_>>>()?;
    let broadcast = Broadcast {
        epoch: term::epoch(epoch, "epoch")?,
        previous: term::revision(revisions.0, "previous revision")?,
        revision: term::revision(revisions.1, "revision")?,
        edits: &edits,
    };
    let (have, have_epoch) = (
        term::whole_manifest(have)?,
        term::epoch(have_epoch, "own epoch")?,
    );
    Ok(term::acceptance(
        env,
        &replica::accept(&have, have_epoch, &broadcast),
    ))
}
