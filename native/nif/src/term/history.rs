//! Events and effects of the history machine, and what requests for its objects answer.

use rustler::types::tuple;
use rustler::{Encoder, Env, NifResult, Term};
use stream_s3_core::history::{
    Backlog, Effect, Event, Examined, Listing, Options, Outcome, Precondition, Put, Read, Segment,
    Status, Stored, WINDOW,
};
use stream_s3_core::key::RunId;
use stream_s3_runtime::{HistoryObject, HistoryPut};

use super::{
    error_class, field, is, jitter, map_of, misuse, need, optional, or_undefined, retry_delays,
    timestamp, unsigned, unsigned32,
};

mod atoms {
    rustler::atoms! {
        all, undefined, history_purge_wait_ms,
        // Events
        sealed, listed, rescanned, permit, read, put, examined, acknowledged, catalog, done, gone, failed, tick, purge,
        ready, not_sealed, stored, exists, changed, same, other, vanished,
        // Effects
        list, ask_permit, give_permit_back, examine, report_mismatch, acknowledge, wake_at, count, abort, delete, sweep, tell_host,
        absent, matches, uploaded, already_present, replaced, retryable_error, permanent_error,
        // Status
        phase, seq, segments, bytes, oldest_ms, failures, is_idle,
    }
}

/// A run id, or badarg.
pub(crate) fn run_id(term: Term) -> NifResult<RunId> {
    let text: &str = need(term, "run id", "a binary")?;
    RunId::parse(text).map_err(|error| misuse(format!("run id: {error}")))
}

/// A run id, or `all`.
pub(crate) fn run_or_all(term: Term) -> NifResult<Option<RunId>> {
    if is(term, atoms::all()) {
        Ok(None)
    } else {
        run_id(term).map(Some)
    }
}

/// `{Run, Seq}`.
pub(crate) fn history_segment(term: Term) -> NifResult<(RunId, u64)> {
    let (run, seq): (Term, Term) = need(term, "segment", "{Run, Seq}")?;
    Ok((run_id(run)?, unsigned(seq, "seq")?))
}

/// A number, or `undefined`.
pub(crate) fn count_or_undefined(term: Term, what: &str) -> NifResult<Option<u64>> {
    optional(term, |term| unsigned(term, what))
}

/// The settings of a machine, under the names of the configuration.
pub(crate) fn history_options(term: Term) -> NifResult<Options> {
    let wait = field(
        term,
        atoms::history_purge_wait_ms(),
        "history_purge_wait_ms",
    )?;
    Ok(Options {
        delays: retry_delays(term)?,
        purge_wait_ms: unsigned(wait, "history_purge_wait_ms")?,
    })
}

/// An event: `tick`, `purge`, or a tuple named after it, with the attempt that it answers where there is one.
pub(crate) fn history_event(term: Term) -> NifResult<Event> {
    if is(term, atoms::tick()) {
        return Ok(Event::Tick);
    }
    if is(term, atoms::purge()) {
        return Ok(Event::Purge);
    }
    let unknown = || misuse(format!("event: not one of a history machine: {term:?}"));
    let parts = tuple::get_tuple(term).map_err(|_| unknown())?;
    match parts.as_slice() {
        [tag, listed] if is(*tag, atoms::rescanned()) => Ok(Event::Rescanned {
            listing: listing(*listed)?,
        }),
        [tag, number] => simple_answer(*tag, attempt(*number)?).ok_or_else(unknown),
        [tag, size, at] if is(*tag, atoms::sealed()) => Ok(Event::Sealed {
            size: unsigned(*size, "size")?,
            sealed: timestamp(*at, "sealed")?,
        }),
        [tag, number, what] => answer(*tag, attempt(*number)?, *what)?.ok_or_else(unknown),
        [tag, number, class, random] if is(*tag, atoms::failed()) => Ok(Event::Failed {
            attempt: attempt(*number)?,
            class: error_class(*class)?,
            jitter: jitter(*random)?,
        }),
        _ => Err(unknown()),
    }
}

fn attempt(term: Term) -> NifResult<u64> {
    unsigned(term, "attempt")
}

fn simple_answer(tag: Term, attempt: u64) -> Option<Event> {
    let known = [
        (atoms::permit(), Event::Permit { attempt }),
        (atoms::acknowledged(), Event::Acknowledged { attempt }),
        (atoms::done(), Event::Done { attempt }),
        (atoms::gone(), Event::Gone { attempt }),
    ];
    known
        .into_iter()
        .find(|(atom, _)| is(tag, *atom))
        .map(|(_, event)| event)
}

fn answer(tag: Term, attempt: u64, what: Term) -> NifResult<Option<Event>> {
    Ok(Some(if is(tag, atoms::listed()) {
        Event::Listed {
            attempt,
            listing: listing(what)?,
        }
    } else if is(tag, atoms::read()) {
        Event::Read {
            attempt,
            read: read(what)?,
        }
    } else if is(tag, atoms::put()) {
        Event::Put {
            attempt,
            put: put(what)?,
        }
    } else if is(tag, atoms::examined()) {
        Event::Examined {
            attempt,
            examined: examined(what)?,
        }
    } else if is(tag, atoms::catalog()) {
        Event::Catalog {
            attempt,
            // The text leaves out what it got: the host's list would be long.
            had_segments: what
                .decode()
                .map_err(|_| misuse("catalog: expected a boolean"))?,
        }
    } else {
        return Ok(None);
    }))
}

/// `{[{Seq, Size, SealedMs}], {Segments, Bytes, OldestMs}}`.
fn listing(term: Term) -> NifResult<Listing> {
    let (first, beyond): (Term, Term) = need(term, "listing", "{First, Beyond}")?;
    let (segments, bytes, oldest): (Term, Term, Term) =
        need(beyond, "listing.beyond", "{Segments, Bytes, OldestMs}")?;
    Ok(Listing {
        first: first_segments(first)?,
        beyond: Backlog {
            segments: unsigned(segments, "beyond.segments")?,
            bytes: unsigned(bytes, "beyond.bytes")?,
            oldest: optional(oldest, |term| timestamp(term, "beyond.oldest"))?,
        },
    })
}

/// At most as many as a machine knows one by one. A longer list is refused after so many steps, whatever its length.
fn first_segments(mut term: Term) -> NifResult<Vec<Segment>> {
    let mut segments = Vec::new();
    while let Ok((head, tail)) = term.list_get_cell() {
        if segments.len() == WINDOW {
            return Err(misuse(format!("listing.first: more than {WINDOW}")));
        }
        segments.push(segment(head)?);
        term = tail;
    }
    if term.is_empty_list() {
        Ok(segments)
    } else {
        Err(misuse(format!("listing.first: no list ends in {term:?}")))
    }
}

fn segment(term: Term) -> NifResult<Segment> {
    let (seq, size, sealed): (Term, Term, Term) = need(term, "segment", "{Seq, Size, SealedMs}")?;
    Ok(Segment {
        seq: unsigned(seq, "seq")?,
        size: unsigned(size, "size")?,
        sealed: timestamp(sealed, "sealed")?,
    })
}

fn read(term: Term) -> NifResult<Read> {
    if is(term, atoms::ready()) {
        Ok(Read::Ready)
    } else if is(term, atoms::not_sealed()) {
        Ok(Read::NotSealed)
    } else {
        Err(misuse(format!(
            "read: expected ready or not_sealed, got {term:?}"
        )))
    }
}

fn put(term: Term) -> NifResult<Put> {
    if is(term, atoms::changed()) {
        return Ok(Put::Changed);
    }
    match tuple::get_tuple(term).unwrap_or_default().as_slice() {
        [tag, crc, size] if is(*tag, atoms::stored()) => Ok(Put::Stored {
            crc: unsigned32(*crc, "crc")?,
            size: unsigned(*size, "size")?,
        }),
        [tag, crc, len] if is(*tag, atoms::exists()) => Ok(Put::Exists {
            crc: unsigned32(*crc, "crc")?,
            payload_len: unsigned(*len, "payload length")?,
        }),
        _ => Err(misuse(format!("put: no outcome: {term:?}"))),
    }
}

fn examined(term: Term) -> NifResult<Examined> {
    if is(term, atoms::vanished()) {
        return Ok(Examined::Vanished);
    }
    match tuple::get_tuple(term).unwrap_or_default().as_slice() {
        [tag, size] if is(*tag, atoms::same()) => Ok(Examined::Same {
            size: unsigned(*size, "size")?,
        }),
        [tag, etag] if is(*tag, atoms::other()) => Ok(Examined::Other {
            etag: need(*etag, "etag", "a binary")?,
        }),
        _ => Err(misuse(format!("examined: no outcome: {term:?}"))),
    }
}

/// An effect: a tuple named after it, the attempt first.
pub(crate) fn history_effect<'a>(env: Env<'a>, effect: &Effect) -> Term<'a> {
    match effect {
        Effect::List { attempt } => (atoms::list(), attempt).encode(env),
        Effect::AskPermit { attempt } => (atoms::ask_permit(), attempt).encode(env),
        Effect::GivePermitBack => atoms::give_permit_back().encode(env),
        Effect::Read { attempt, seq } => (atoms::read(), attempt, seq).encode(env),
        Effect::Put { attempt, seq, when } => {
            let replaces = match when {
                Precondition::Absent => atoms::undefined().encode(env),
                Precondition::Matches(etag) => etag.encode(env),
            };
            (atoms::put(), attempt, seq, replaces).encode(env)
        }
        Effect::Examine {
            attempt,
            seq,
            crc,
            payload_len,
        } => (atoms::examine(), attempt, seq, crc, payload_len).encode(env),
        Effect::ReportMismatch { seq } => (atoms::report_mismatch(), seq).encode(env),
        Effect::Acknowledge {
            attempt,
            seq,
            crc,
            size,
            stored,
        } => (
            atoms::acknowledge(),
            attempt,
            seq,
            crc,
            size,
            stored_atom(*stored),
        )
            .encode(env),
        Effect::WakeAt { ms } => (atoms::wake_at(), ms).encode(env),
        Effect::Count { outcome, bytes } => {
            let outcome = match outcome {
                Outcome::Stored(stored) => stored_atom(*stored),
                Outcome::RetryableError => atoms::retryable_error(),
                Outcome::PermanentError => atoms::permanent_error(),
                Outcome::Gone => atoms::gone(),
            };
            (atoms::count(), outcome, bytes).encode(env)
        }
        Effect::Abort => atoms::abort().encode(env),
        Effect::Catalog { attempt } => (atoms::catalog(), attempt).encode(env),
        Effect::Delete { attempt } => (atoms::delete(), attempt).encode(env),
        Effect::Sweep { attempt } => (atoms::sweep(), attempt).encode(env),
        Effect::TellHost { attempt } => (atoms::tell_host(), attempt).encode(env),
    }
}

fn stored_atom(stored: Stored) -> rustler::Atom {
    match stored {
        Stored::Uploaded => atoms::uploaded(),
        Stored::AlreadyPresent => atoms::already_present(),
        Stored::Replaced => atoms::replaced(),
    }
}

/// `#{phase, seq, segments, bytes, oldest_ms, failures, is_idle}`.
pub(crate) fn history_status<'a>(env: Env<'a>, status: &Status) -> NifResult<Term<'a>> {
    let phase = rustler::Atom::from_str(env, status.phase)?;
    map_of(
        env,
        &[
            (atoms::phase(), phase.encode(env)),
            (atoms::seq(), or_undefined(env, status.seq)),
            (atoms::segments(), status.backlog.segments.encode(env)),
            (atoms::bytes(), status.backlog.bytes.encode(env)),
            (
                atoms::oldest_ms(),
                or_undefined(env, status.backlog.oldest.map(|at| at.0)),
            ),
            (atoms::failures(), status.failures.encode(env)),
            (atoms::is_idle(), status.is_idle.encode(env)),
        ],
    )
}

/// What came of a put, as the event takes it.
pub(crate) fn history_put<'a>(env: Env<'a>, put: HistoryPut) -> Term<'a> {
    match put {
        HistoryPut::Stored { crc, size } => (atoms::stored(), crc, size).encode(env),
        HistoryPut::Exists { crc, payload_len } => (atoms::exists(), crc, payload_len).encode(env),
        HistoryPut::Changed => atoms::changed().encode(env),
    }
}

/// What is there, as the event takes it.
pub(crate) fn history_object<'a>(env: Env<'a>, object: &HistoryObject) -> Term<'a> {
    match object {
        HistoryObject::Same { size } => (atoms::same(), size).encode(env),
        HistoryObject::Other { etag } => (atoms::other(), etag).encode(env),
        HistoryObject::Vanished => atoms::vanished().encode(env),
    }
}
