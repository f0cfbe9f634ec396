//! Every shape that crosses between Rust and Erlang, and nothing else. The shapes are those of the term contract; what
//! they mean is documented where the Rust types are.

mod adoption;
mod assembly;
mod core;
mod decision;
mod failure;
mod history;
mod manifest;
mod metrics;
mod pins;
mod upkeep;
mod work;

use rustler::types::tuple;
use rustler::{Atom, Decoder, Encoder, Env, Error, ListIterator, NewBinary, NifResult, Term};
use stream_s3_core::key::StreamId;
use stream_s3_core::units::{Epoch, Offset, Revision, TimestampMs, Uid};

pub(crate) use adoption::{listed_objects, named_root, step};
pub(crate) use assembly::{chunk, chunk_term, fragment, fragment_meta, info, meta};
pub(crate) use core::{Effects, format_state, options, persist_error, reset_persist, transfer_id};
pub(crate) use decision::acceptance;
pub(crate) use decision::{
    cached, chunk_identity, claim, discard_note, error_class, error_class_term, fetched_root,
    jitter, local_chunk, log, metadata, optional_chunk_identity, outlook, resolve, resolved,
    retry_delays, start, timeline,
};
pub(crate) use failure::{Failed, Panicked, Reason, transfer_error};
pub(crate) use history::{
    count_or_undefined, history_effect, history_event, history_options, history_segment,
    history_status, run_id, run_or_all,
};
pub(crate) use manifest::{
    apply_edit_bytes, edit, entries_list, entries_term, fetched, format_error, group_kind, limits,
    lookup, manifest, manifest_term, new_edit, object_key, retention, root, whole_manifest,
};
pub(crate) use metrics::store_metrics;
pub(crate) use pins::{Answer as PinsAnswer, pins_info, place};
pub(crate) use upkeep::{
    candidate, gc_limits, gc_stream, offsets, one_or_all, parsed_key, prefix, verdict,
};
pub(crate) use work::{
    StoreAnswer, burst, concurrency, governor_info, governor_options, iodata, page_size, part,
    path, put_options, rate, setting_of, settings, text_or_undefined, work,
};

/// Atoms of the shapes. A closed list: nothing here makes an atom of foreign text.
pub(crate) mod atoms {
    rustler::atoms! {
        ok, error, undefined, badarg, gap, corrupt, corrupt_group, other, dead,
        // Records
        manifest, edit, fragment_ref, group_ref,
        // Chunks and fragments
        chunk_id, timestamp, num_records, data_size, position, next_position, segment_offset, crc,
        first_offset, first_timestamp, last_timestamp, next_offset, size, num_chunks, spans, target_size, expected_offset, is_cut,
        // Options and state of the core
        stream, dir, epoch, reference, persist_threshold, persist_interval_ms, rebalance_threshold,
        manifest_first_offset, manifest_next_offset, manifest_total_size, persisted_next_offset, transfers_in_flight,
        transfers_pending_order, since_persist, in_persist_count, persist_in_flight, last_persist_ts, rebalance_in_flight,
        retention_in_flight, waiters,
        // Effects
        submit_transfer, resubmit_transfer, resubmit_transfer_delayed, start_persist, start_persist_timer, cancel_persist_timer,
        upload_group, update_range, broadcast, evaluate_retention, reply_waiters, reinitialize, stop,
        // Manifest calls
        fetch, not_found, unchanged, max_bytes, max_age, fragment, root, group,
        // Decisions
        fresh, resume, remote_ahead, local_ahead, wait_for_log, first, next, pinned_first, permanent, there, doubtful, away,
        // Reasons and kinds of errors
        http, timeout, connection, throttled, checksum_mismatch, corrupt_chunk, open_failed, panic, cancelled, clock_skew, expired_token,
        write_conflict, transient, conflict, closed, postpone, proceed, invalid, op, reason, message, open, put, get, delete, list, probe,
        // Store
        store, s3, fs, fs_dir, bucket, region, endpoint, path_style, prefix, access_key_id, secret_key, session_token, ca_file, proxy,
        kms_key_id, storage_class, expected_bucket_owner, store_result, conditional_writes, verifies_checksums, etag, body, objects,
        whole, last, if_none_match, if_match,
        // Governor
        external, rate, burst, concurrency, owner, unlimited, transfer_admitted, transfer_result, governor_run, governor_dropped,
        governor_stopped, governor_submissions_received, governor_tasks_in_flight, governor_pending_submissions,
        governor_oversized_admissions, governor_dropped_dead_replyto, upload_permits_in_use, upload_permits_effective, upload_buffer_bytes, bytes_sent,
        // Metrics of the store
        requests, durations, bytes_received, infinity, multi_delete, kilo_group, mega_group, history, unknown,
        absent, present, failed, empty, use_cache, superseded, retry, inside_another, trimmed, same, different, unverifiable, task_retry_delay_ms, task_retry_delay_max_ms, upload_retry_delay_ms,
        upload_retry_delay_max_ms, at_once, with_first_fragment, accept, stale, resync, bytes_in_transfer, bytes_in_persist, edits_waiting, persist_failures,
        own, take_over, fenced,
        // Pins
        pins_result, not_pinned, segments, unlinked_bytes, streams, unwatched, problem, none,
    }
}

/// Misuse: raised as `{badarg, Text}`, where the text names the field.
pub(crate) fn misuse(text: impl Into<String>) -> Error {
    Error::RaiseTerm(Box::new((atoms::badarg(), text.into())))
}

/// Decodes a value, or says which one is not what it should be.
fn need<'a, T: Decoder<'a>>(term: Term<'a>, what: &str, expected: &str) -> NifResult<T> {
    term.decode()
        .map_err(|_| misuse(format!("{what}: expected {expected}, got {term:?}")))
}

/// The elements of a proper list. Rustler's iterator panics where an improper one ends, so the end is looked at first.
pub(crate) fn list<'a>(term: Term<'a>, what: &str) -> NifResult<ListIterator<'a>> {
    term.list_length()
        .and_then(|_| term.decode())
        .map_err(|_| misuse(format!("{what}: expected a list, got {term:?}")))
}

/// A proper list of binaries with UTF-8 in them.
pub(crate) fn texts(term: Term, what: &str) -> NifResult<Vec<String>> {
    list(term, what)?
        .map(|text| need(text, what, "a list of binaries"))
        .collect()
}

/// A non-negative integer below 2^64.
pub(crate) fn unsigned(term: Term, what: &str) -> NifResult<u64> {
    need(term, what, "a non-negative integer below 2^64")
}

/// A non-negative integer below 2^32.
pub(crate) fn unsigned32(term: Term, what: &str) -> NifResult<u32> {
    need(term, what, "a non-negative integer below 2^32")
}

/// An integer of 64 bits with sign.
pub(crate) fn signed(term: Term, what: &str) -> NifResult<i64> {
    need(term, what, "an integer of at most 64 bits")
}

pub(crate) fn offset(term: Term, what: &str) -> NifResult<Offset> {
    unsigned(term, what).map(Offset)
}

pub(crate) fn timestamp(term: Term, what: &str) -> NifResult<TimestampMs> {
    signed(term, what).map(TimestampMs)
}

pub(crate) fn uid(term: Term, what: &str) -> NifResult<Uid> {
    unsigned32(term, what).map(Uid)
}

pub(crate) fn revision(term: Term, what: &str) -> NifResult<Revision> {
    unsigned(term, what).map(Revision)
}

pub(crate) fn epoch(term: Term, what: &str) -> NifResult<Epoch> {
    unsigned(term, what).map(Epoch)
}

pub(crate) fn offset_or_undefined(term: Term, what: &str) -> NifResult<Option<Offset>> {
    optional(term, |term| offset(term, what))
}

/// A stream id, or badarg: what it may consist of is checked here once, so that no key can leave its stream.
pub(crate) fn stream_id(term: Term) -> NifResult<StreamId> {
    let text: &str = need(term, "stream id", "a binary")?;
    StreamId::parse(text).map_err(|error| misuse(format!("stream id: {error}")))
}

fn optional<'a, T>(
    term: Term<'a>,
    decode: impl FnOnce(Term<'a>) -> NifResult<T>,
) -> NifResult<Option<T>> {
    if is(term, atoms::undefined()) {
        Ok(None)
    } else {
        decode(term).map(Some)
    }
}

fn is(term: Term, atom: Atom) -> bool {
    atom == term
}

/// The fields of a record, without its name.
fn record<'a>(term: Term<'a>, name: Atom, fields: usize, what: &str) -> NifResult<Vec<Term<'a>>> {
    let wrong = || {
        misuse(format!(
            "expected a record {what} with {fields} fields, got {term:?}"
        ))
    };
    let mut found = tuple::get_tuple(term).map_err(|_| wrong())?;
    if found.len() != fields + 1 || name != found[0] {
        return Err(wrong());
    }
    found.remove(0);
    Ok(found)
}

/// A key of a map that must be there.
fn field<'a>(map: Term<'a>, key: Atom, what: &str) -> NifResult<Term<'a>> {
    map.map_get(key)
        .map_err(|_| misuse(format!("{what}: missing, or not in a map: {map:?}")))
}

/// A map of atoms; the values are terms already.
fn map_of<'a>(env: Env<'a>, pairs: &[(Atom, Term<'a>)]) -> NifResult<Term<'a>> {
    Term::map_from_pairs(env, pairs)
}

/// A tuple of more elements than rustler's own encoders take.
fn tuple_of<'a>(env: Env<'a>, elements: &[Term<'a>]) -> Term<'a> {
    tuple::make_tuple(env, elements)
}

/// Bytes as a binary of their own.
pub(crate) fn binary<'a>(env: Env<'a>, bytes: &[u8]) -> Term<'a> {
    NewBinary::from_slice(env, bytes).into()
}

/// Where nothing is, Erlang has `undefined`.
fn or_undefined<'a, T: Encoder>(env: Env<'a>, value: Option<T>) -> Term<'a> {
    value.map_or_else(|| atoms::undefined().encode(env), |value| value.encode(env))
}
