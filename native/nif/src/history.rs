//! NIFs of the history uploader: the machine of a run, and requests for its objects.

use rustler::{Atom, Encoder, Env, LocalPid, NifResult, ResourceArc, Term};
use stream_s3_core::history::{Machine, POSTPONE_RETENTION_MS, may_sweep, postpone_retention};
use stream_s3_core::key;
use stream_s3_store::Op;

use crate::handle::{HistoryHandle, Lent, StoreHandle};
use crate::requests::{ask, threads};
use crate::term::{self, StoreAnswer, atoms};

type HistoryRef = ResourceArc<HistoryHandle>;
type StoreRef = ResourceArc<StoreHandle>;

/// A machine for a run of which nothing is known. Constant time.
#[rustler::nif]
fn history_new(options: Term) -> NifResult<HistoryRef> {
    let options = term::history_options(options)?;
    Ok(ResourceArc::new(HistoryHandle(Machine::new(options))))
}

/// An event: the next state, and the effects. Clones a state of at most sixteen segments; a listing of more is refused before it is
/// read.
#[rustler::nif]
fn history_handle<'a>(
    env: Env<'a>,
    machine: HistoryRef,
    now: Term<'a>,
    event: Term<'a>,
) -> NifResult<Term<'a>> {
    let now = term::unsigned(now, "now")?;
    let mut machine = machine.0.clone();
    let effects = machine.handle(now, term::history_event(event)?);
    let effects: Vec<Term> = effects
        .iter()
        .map(|effect| term::history_effect(env, effect))
        .collect();
    Ok((ResourceArc::new(HistoryHandle(machine)), effects).encode(env))
}

/// A state, for people and for gauges. At most sixteen segments are summed.
#[rustler::nif]
fn history_status<'a>(env: Env<'a>, machine: HistoryRef) -> NifResult<Term<'a>> {
    term::history_status(env, &machine.0.status())
}

/// Stores a segment. Normal scheduler, microseconds: the payload, a binary, is lent to the request, not copied.
#[rustler::nif]
fn history_put<'a>(
    env: Env<'a>,
    store: StoreRef,
    to: LocalPid,
    reference: Term<'a>,
    segment: Term<'a>,
    payload: Term<'a>,
    replaces: Term<'a>,
) -> NifResult<Atom> {
    let (run, seq) = term::history_segment(segment)?;
    let replaces = term::text_or_undefined(replaces, "replaces")?;
    let payload = Lent::bytes(payload)?;
    let executor = threads()?;
    ask(env, to, reference, Op::Put, &store, |store| async move {
        store
            .put_history(executor, &run, seq, payload, replaces)
            .await
            .map(StoreAnswer::HistoryPut)
    })
}

/// Compares what lies under the key of a segment with a payload of this checksum and length. Normal scheduler, microseconds.
#[rustler::nif]
fn history_examine<'a>(
    env: Env<'a>,
    store: StoreRef,
    to: LocalPid,
    reference: Term<'a>,
    segment: Term<'a>,
    crc: Term<'a>,
    payload_len: Term<'a>,
) -> NifResult<Atom> {
    let (run, seq) = term::history_segment(segment)?;
    let crc = term::unsigned32(crc, "crc")?;
    let payload_len = term::unsigned(payload_len, "payload length")?;
    let executor = threads()?;
    ask(env, to, reference, Op::Get, &store, |store| async move {
        store
            .examine_history(executor, &run, seq, crc, payload_len)
            .await
            .map(StoreAnswer::HistoryObject)
    })
}

/// Reads a segment's payload. Normal scheduler, microseconds.
#[rustler::nif]
fn history_get<'a>(
    env: Env<'a>,
    store: StoreRef,
    to: LocalPid,
    reference: Term<'a>,
    segment: Term<'a>,
) -> NifResult<Atom> {
    let (run, seq) = term::history_segment(segment)?;
    let executor = threads()?;
    ask(env, to, reference, Op::Get, &store, |store| async move {
        store
            .get_history(executor, &run, seq)
            .await
            .map(StoreAnswer::HistoryPayload)
    })
}

/// Bytes of payloads that requests hold. Constant time.
#[rustler::nif]
fn history_body_bytes() -> u64 {
    Lent::held()
}

/// The key of a segment. Constant time.
#[rustler::nif]
fn history_key(prefix: Term, segment: Term) -> NifResult<String> {
    let (run, seq) = term::history_segment(segment)?;
    Ok(key::history_segment(&term::prefix(prefix)?, &run, seq))
}

/// What the keys of one run, or of all runs, begin with. Constant time.
#[rustler::nif]
fn history_prefix(prefix: Term, runs: Term) -> NifResult<String> {
    let prefix = term::prefix(prefix)?;
    Ok(match term::run_or_all(runs)? {
        Some(run) => key::history_prefix(&prefix, &run),
        None => key::histories_prefix(&prefix),
    })
}

/// Whether this can be a run id. False for every other term too. Constant time.
#[rustler::nif]
fn valid_run_id(run: Term) -> bool {
    term::run_id(run).is_ok()
}

/// Whether retention of a run has to wait, and how long. Constant time.
#[rustler::nif]
fn history_postpone<'a>(env: Env<'a>, sealed: Term<'a>) -> NifResult<Term<'a>> {
    Ok(
        if postpone_retention(term::count_or_undefined(sealed, "sealed")?) {
            (atoms::postpone(), POSTPONE_RETENTION_MS).encode(env)
        } else {
            atoms::proceed().encode(env)
        },
    )
}

/// Whether an object of a run may be swept. Constant time.
#[rustler::nif]
fn history_may_sweep(run_is_gone: bool, age_ms: Term, min_age_ms: Term) -> NifResult<bool> {
    Ok(may_sweep(
        run_is_gone,
        term::count_or_undefined(age_ms, "age")?,
        term::unsigned(min_age_ms, "smallest age")?,
    ))
}
