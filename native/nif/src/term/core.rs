//! Options, effects and state of the replica-reader machine, and the other decisions.

use std::sync::Arc;

use rustler::{Encoder, Env, NifResult, Term};
use stream_s3_core::replica_reader::{Effect, Machine, Options, PersistError, ResetPersist};
use stream_s3_core::units::TransferId;

use super::manifest::{edit_term, entries_term, manifest_term};
use super::{atoms, epoch, field, is, map_of, misuse, unsigned};
use crate::handle::{Context, Opaque};

/// Effects as the contract writes them, in order.
pub(crate) struct Effects<'e> {
    pub(crate) context: &'e Context,
    pub(crate) effects: &'e [Effect<Opaque>],
}

impl Encoder for Effects<'_> {
    fn encode<'a>(&self, env: Env<'a>) -> Term<'a> {
        self.effects
            .iter()
            .map(|effect| effect_term(env, self.context, effect))
            .collect::<Vec<_>>()
            .encode(env)
    }
}

fn effect_term<'a>(env: Env<'a>, context: &Context, effect: &Effect<Opaque>) -> Term<'a> {
    let Context {
        stream,
        dir,
        reference,
    } = context;
    match effect {
        Effect::SubmitTransfer { id, detail } => {
            (atoms::submit_transfer(), id.0, stream, dir, detail).encode(env)
        }
        Effect::ResubmitTransfer { id, detail } => {
            (atoms::resubmit_transfer(), id.0, stream, dir, detail).encode(env)
        }
        Effect::ResubmitTransferDelayed { id, detail, reason } => (
            atoms::resubmit_transfer_delayed(),
            id.0,
            stream,
            dir,
            detail,
            reason,
        )
            .encode(env),
        Effect::StartPersist {
            manifest,
            epoch,
            expected,
            edits,
        } => {
            let edits: Vec<Term> = edits.iter().map(|edit| edit_term(env, edit)).collect();
            (
                atoms::start_persist(),
                manifest_term(env, manifest),
                epoch.0,
                reference,
                expected.0,
                edits,
            )
                .encode(env)
        }
        Effect::StartPersistTimer { ms } => (atoms::start_persist_timer(), ms).encode(env),
        Effect::CancelPersistTimer => atoms::cancel_persist_timer().encode(env),
        Effect::UploadGroup {
            kind,
            entries,
            pos,
            len,
        } => (
            atoms::upload_group(),
            stream,
            kind.code(),
            entries_term(env, entries.iter()),
            pos,
            len,
        )
            .encode(env),
        Effect::UpdateRange {
            first_offset,
            next_offset,
        } => (atoms::update_range(), first_offset.0, next_offset.0).encode(env),
        Effect::Broadcast { edits } => {
            let edits: Vec<Term> = edits.iter().map(|edit| edit_term(env, edit)).collect();
            (atoms::broadcast(), stream, edits).encode(env)
        }
        Effect::EvaluateRetention => (atoms::evaluate_retention(), stream, dir).encode(env),
        Effect::ReplyWaiters { waiters } => {
            let replies: Vec<Term> = waiters
                .iter()
                .map(|from| (from, atoms::ok()).encode(env))
                .collect();
            (atoms::reply_waiters(), replies).encode(env)
        }
        Effect::Reinitialize => atoms::reinitialize().encode(env),
        Effect::Stop => atoms::stop().encode(env),
    }
}

/// The options of a machine, and those that only effects repeat.
pub(crate) fn options(term: Term) -> NifResult<(Options, Arc<Context>)> {
    let get = |key, what| field(term, key, what);
    let number = |key, what| unsigned(get(key, what)?, what);
    let rebalance_threshold = number(atoms::rebalance_threshold(), "rebalance_threshold")?;
    let options = Options {
        epoch: epoch(get(atoms::epoch(), "epoch")?, "epoch")?,
        persist_threshold: number(atoms::persist_threshold(), "persist_threshold")?,
        persist_interval_ms: number(atoms::persist_interval_ms(), "persist_interval_ms")?,
        rebalance_threshold: usize::try_from(rebalance_threshold)
            .map_err(|error| misuse(format!("rebalance_threshold: {error}")))?,
    };
    let context = Context {
        stream: Opaque::save(get(atoms::stream(), "stream")?),
        dir: Opaque::save(get(atoms::dir(), "dir")?),
        reference: Opaque::save(get(atoms::reference(), "reference")?),
    };
    Ok((options, Arc::new(context)))
}

/// When a reset is persisted.
pub(crate) fn reset_persist(term: Term) -> NifResult<ResetPersist> {
    if is(term, atoms::at_once()) {
        Ok(ResetPersist::AtOnce)
    } else if is(term, atoms::with_first_fragment()) {
        Ok(ResetPersist::WithFirstFragment)
    } else {
        Err(misuse(format!(
            "when: expected at_once or with_first_fragment, got {term:?}"
        )))
    }
}

/// The name of a transfer; `None` for terms that no transfer is called by.
pub(crate) fn transfer_id(term: Term) -> Option<TransferId> {
    term.decode().ok().map(TransferId)
}

/// How a persist failed. Total: everything that is not a conflict and not a missing node may pass.
pub(crate) fn persist_error(term: Term) -> PersistError {
    if is(term, atoms::conflict()) {
        PersistError::Conflict
    } else if is(term, atoms::not_found()) {
        PersistError::NotFound
    } else {
        PersistError::Other
    }
}

/// The state of a machine, for people.
pub(crate) fn format_state<'a>(env: Env<'a>, machine: &Machine<Opaque>) -> NifResult<Term<'a>> {
    let status = machine.status();
    map_of(
        env,
        &[
            (
                atoms::manifest_first_offset(),
                status.manifest_first_offset.0.encode(env),
            ),
            (
                atoms::manifest_next_offset(),
                status.manifest_next_offset.0.encode(env),
            ),
            (
                atoms::manifest_total_size(),
                status.manifest_total_size.encode(env),
            ),
            (
                atoms::persisted_next_offset(),
                status.persisted_next_offset.0.encode(env),
            ),
            (
                atoms::transfers_in_flight(),
                status.transfers_in_flight.encode(env),
            ),
            (
                atoms::transfers_pending_order(),
                status.transfers_pending_order.encode(env),
            ),
            (
                atoms::bytes_in_transfer(),
                status.bytes_in_transfer.encode(env),
            ),
            (atoms::since_persist(), status.since_persist.encode(env)),
            (
                atoms::in_persist_count(),
                status.in_persist_count.encode(env),
            ),
            (
                atoms::bytes_in_persist(),
                status.bytes_in_persist.encode(env),
            ),
            (atoms::edits_waiting(), status.edits_waiting.encode(env)),
            (
                atoms::persist_in_flight(),
                status.persist_in_flight.encode(env),
            ),
            (
                atoms::persist_failures(),
                status.persist_failures.encode(env),
            ),
            (
                atoms::last_persist_ts(),
                status.last_persist_ts.0.encode(env),
            ),
            (
                atoms::rebalance_in_flight(),
                status.rebalance_in_flight.encode(env),
            ),
            (
                atoms::retention_in_flight(),
                status.retention_in_flight.encode(env),
            ),
            (atoms::waiters(), status.waiters.encode(env)),
        ],
    )
}
