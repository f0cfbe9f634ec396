//! NIFs of the pure part. All of them run on normal schedulers, unless they say otherwise.

use std::sync::Arc;

use rustler::{Binary, Encoder as _, Env, Error, NifResult, ResourceArc, Term};
use stream_s3_core::fragment::{Added, Assembly, AssemblyError};
use stream_s3_core::manifest::{self, FetchFailed};
use stream_s3_core::replica_reader::{Effect, Machine};

use crate::handle::{AssemblyHandle, ContHandle, Context, CoreHandle, Opaque};
use crate::term::{self, Effects, atoms};

type AssemblyRef = ResourceArc<AssemblyHandle>;
type CoreRef = ResourceArc<CoreHandle>;

/// Chunks that one call takes: a quarter of a microsecond each.
const CHUNKS_PER_CALL: usize = 128;

/// Version of the interface. Constant time.
#[rustler::nif]
fn abi_version() -> u32 {
    crate::ABI_VERSION
}

/// An empty assembly. Constant time.
#[rustler::nif]
fn assembly_new(target: Term, expected: Term) -> NifResult<AssemblyRef> {
    let target = term::unsigned(target, "target size")?;
    let assembly = match term::offset_or_undefined(expected, "expected offset")? {
        Some(expected) => Assembly::expecting(target, expected),
        None => Assembly::new(target),
    };
    Ok(ResourceArc::new(AssemblyHandle(assembly)))
}

/// Adds one chunk, to a fragment that has reached its target too. About a microsecond.
#[rustler::nif]
fn assembly_add_chunk(chunk: Term, assembly: AssemblyRef) -> NifResult<AssemblyRef> {
    let chunk = term::chunk(chunk)?;
    let mut next = assembly.0.clone();
    match next.add_past_target(&chunk).map_err(assembly_error)? {
        Added::Taken => Ok(ResourceArc::new(AssemblyHandle(next))),
        Added::Left => Err(term::misuse(format!(
            "chunk {}: no fragment can hold it too; it belongs to the next one",
            chunk.chunk_id
        ))),
    }
}

/// Adds chunks until one cuts the fragment, at most 128 of them: some thirty microseconds.
#[rustler::nif]
fn assembly_add_chunks<'a>(
    env: Env<'a>,
    chunks: Term<'a>,
    assembly: AssemblyRef,
) -> NifResult<Term<'a>> {
    let mut next = assembly.0.clone();
    let mut rest = chunks;
    for _ in 0..CHUNKS_PER_CALL {
        if rest.is_empty_list() {
            break;
        }
        let (head, tail) = rest
            .list_get_cell()
            .map_err(|_| term::misuse("chunks: expected a list"))?;
        match next.add(&term::chunk(head)?).map_err(assembly_error)? {
            Added::Taken => rest = tail,
            Added::Left => break,
        }
    }
    Ok((ResourceArc::new(AssemblyHandle(next)), rest).encode(env))
}

fn assembly_error(error: AssemblyError) -> Error {
    match error {
        AssemblyError::Gap { expected, got } => {
            Error::RaiseTerm(Box::new((atoms::gap(), expected.0, got.0)))
        }
        AssemblyError::Backwards { .. } => term::misuse(error.to_string()),
    }
}

/// Whether the fragment is full. Constant time.
#[rustler::nif]
fn assembly_is_cut(assembly: AssemblyRef) -> bool {
    assembly.0.is_cut()
}

/// What has been assembled. Linear in the number of spans.
#[rustler::nif]
fn assembly_metadata<'a>(env: Env<'a>, assembly: AssemblyRef) -> NifResult<Term<'a>> {
    let meta = assembly
        .0
        .metadata()
        .ok_or_else(|| term::misuse("assembly: there is no chunk in it"))?;
    term::meta(env, &meta)
}

/// The index records. Dirty CPU: copies up to 5 MiB.
#[rustler::nif(schedule = "DirtyCpu")]
fn assembly_index_records<'a>(env: Env<'a>, assembly: AssemblyRef) -> Term<'a> {
    term::binary(env, &assembly.0.index_records())
}

/// A view for people. Constant time.
#[rustler::nif]
fn assembly_info<'a>(env: Env<'a>, assembly: AssemblyRef) -> NifResult<Term<'a>> {
    term::info(env, &assembly.0)
}

/// Starts a machine. Dirty CPU, since it happens once for a stream and is linear in the entries of the manifest: some ten nanoseconds each.
#[rustler::nif(schedule = "DirtyCpu")]
fn core_init<'a>(
    env: Env<'a>,
    manifest: Term<'a>,
    options: Term<'a>,
    now: Term<'a>,
) -> NifResult<Term<'a>> {
    let manifest = term::whole_manifest(manifest)?;
    let (options, context) = term::options(options)?;
    let (machine, effects) = Machine::init(manifest, options, term::timestamp(now, "now")?)
        .map_err(|error| term::misuse(error.to_string()))?;
    Ok(started(env, machine, context, &effects))
}

/// Starts a machine that replaces the tier of `manifest` by an empty one. Dirty CPU, as `core_init`.
#[rustler::nif(schedule = "DirtyCpu")]
fn core_init_reset<'a>(
    env: Env<'a>,
    manifest: Term<'a>,
    at: Term<'a>,
    when: Term<'a>,
    options: Term<'a>,
    now: Term<'a>,
) -> NifResult<Term<'a>> {
    let (manifest, at, when) = (
        term::whole_manifest(manifest)?,
        term::offset(at, "at")?,
        term::reset_persist(when)?,
    );
    let (options, context) = term::options(options)?;
    let (machine, effects) =
        Machine::init_reset(manifest, at, when, options, term::timestamp(now, "now")?)
            .map_err(|error| term::misuse(error.to_string()))?;
    Ok(started(env, machine, context, &effects))
}

fn started<'a>(
    env: Env<'a>,
    machine: Machine<Opaque>,
    context: Arc<Context>,
    effects: &[Effect<Opaque>],
) -> Term<'a> {
    let effects = Effects {
        context: &context,
        effects,
    }
    .encode(env);
    (ResourceArc::new(CoreHandle { machine, context }), effects).encode(env)
}

/// The speculative manifest. Linear in its entries.
#[rustler::nif]
fn core_manifest<'a>(env: Env<'a>, core: CoreRef) -> Term<'a> {
    term::manifest_term(env, core.machine.manifest())
}

/// The persisted manifest. Linear in its entries.
#[rustler::nif]
fn core_persisted_manifest<'a>(env: Env<'a>, core: CoreRef) -> Term<'a> {
    term::manifest_term(env, core.machine.persisted_manifest())
}

/// Whether a group is being uploaded. Constant time.
#[rustler::nif]
fn core_rebalance_in_flight(core: CoreRef) -> bool {
    core.machine.rebalance_in_flight()
}

/// The state for people. Linear in the transfers in flight and the edits that wait, which are few.
#[rustler::nif]
fn core_format_state<'a>(env: Env<'a>, core: CoreRef) -> NifResult<Term<'a>> {
    term::format_state(env, &core.machine)
}

/// Lets a clone of the machine handle one event; answers `{Next, Effects}`. Costs what the effects carry: a root's entries where a
/// persist starts, nothing that grows with the stream otherwise.
fn step<'a>(
    env: Env<'a>,
    core: &CoreHandle,
    event: impl FnOnce(&mut Machine<Opaque>) -> NifResult<Vec<Effect<Opaque>>>,
) -> NifResult<Term<'a>> {
    let mut machine = core.machine.clone();
    let effects = event(&mut machine)?;
    Ok(started(env, machine, core.context.clone(), &effects))
}

/// A fragment has been cut. Copies the map once.
#[rustler::nif]
fn core_fragment_cut<'a>(
    env: Env<'a>,
    meta: Term<'a>,
    id: Term<'a>,
    core: CoreRef,
) -> NifResult<Term<'a>> {
    let fragment = term::fragment(meta)?;
    let id = term::transfer_id(id)
        .ok_or_else(|| term::misuse("id: expected a non-negative integer below 2^64"))?;
    step(env, &core, |machine| {
        machine
            .fragment_cut(id, fragment, Opaque::save(meta))
            .map_err(|error| term::misuse(error.to_string()))
    })
}

/// A fragment is in the store. See `step`.
#[rustler::nif]
fn core_transfer_complete<'a>(
    env: Env<'a>,
    reference: Term<'a>,
    uid: Term<'a>,
    core: CoreRef,
) -> NifResult<Term<'a>> {
    let uid = term::uid(uid, "uid")?;
    step(env, &core, |machine| {
        Ok(term::transfer_id(reference)
            .map_or_else(Vec::new, |id| machine.transfer_complete(id, uid)))
    })
}

/// An attempt has failed. See `step`.
#[rustler::nif]
fn core_transfer_failed<'a>(
    env: Env<'a>,
    reference: Term<'a>,
    reason: Term<'a>,
    core: CoreRef,
) -> NifResult<Term<'a>> {
    let error = term::transfer_error(reason);
    step(env, &core, |machine| {
        Ok(term::transfer_id(reference).map_or_else(Vec::new, |id| {
            machine.transfer_failed(id, &error, Opaque::save(reason))
        }))
    })
}

/// A group is in the store. See `step`.
#[rustler::nif]
fn core_group_upload_complete<'a>(
    env: Env<'a>,
    uid: Term<'a>,
    core: CoreRef,
) -> NifResult<Term<'a>> {
    let uid = term::uid(uid, "uid")?;
    step(env, &core, |machine| Ok(machine.group_upload_complete(uid)))
}

/// A group could not be stored. See `step`.
#[rustler::nif]
fn core_group_upload_failed<'a>(
    env: Env<'a>,
    reason: Term<'a>,
    core: CoreRef,
) -> NifResult<Term<'a>> {
    let error = term::transfer_error(reason);
    step(
        env,
        &core,
        |machine| Ok(machine.group_upload_failed(&error)),
    )
}

/// A persist has succeeded. See `step`.
#[rustler::nif]
fn core_persist_complete<'a>(
    env: Env<'a>,
    revision: Term<'a>,
    now: Term<'a>,
    core: CoreRef,
) -> NifResult<Term<'a>> {
    let (revision, now) = (
        term::revision(revision, "revision")?,
        term::timestamp(now, "now")?,
    );
    step(env, &core, |machine| {
        Ok(machine.persist_complete(revision, now))
    })
}

/// A persist has failed. See `step`.
#[rustler::nif]
fn core_persist_failed<'a>(env: Env<'a>, reason: Term<'a>, core: CoreRef) -> NifResult<Term<'a>> {
    step(env, &core, |machine| {
        Ok(machine.persist_failed(term::persist_error(reason)))
    })
}

/// The persist timer has fired. See `step`.
#[rustler::nif]
fn core_tick<'a>(env: Env<'a>, now: Term<'a>, core: CoreRef) -> NifResult<Term<'a>> {
    let now = term::timestamp(now, "now")?;
    step(env, &core, |machine| Ok(machine.tick(now)))
}

/// Somebody waits for an offset. See `step`.
#[rustler::nif]
fn core_await_offset<'a>(
    env: Env<'a>,
    offset: Term<'a>,
    from: Term<'a>,
    core: CoreRef,
) -> NifResult<Term<'a>> {
    let offset = term::offset(offset, "offset")?;
    step(env, &core, |machine| {
        Ok(machine.await_offset(offset, Opaque::save(from)))
    })
}

/// Remote retention is being evaluated. Constant time.
#[rustler::nif]
fn core_retention_started<'a>(env: Env<'a>, core: CoreRef) -> Term<'a> {
    let mut machine = core.machine.clone();
    machine.retention_started();
    ResourceArc::new(CoreHandle {
        machine,
        context: core.context.clone(),
    })
    .encode(env)
}

/// Remote retention has decided on an edit. See `step`.
#[rustler::nif]
fn core_retention_complete<'a>(env: Env<'a>, edit: Term<'a>, core: CoreRef) -> NifResult<Term<'a>> {
    let edit = term::edit(edit)?;
    step(env, &core, |machine| {
        machine
            .retention_complete(&edit)
            .map_err(|error| term::misuse(error.to_string()))
    })
}

/// Remote retention came to nothing. See `step`.
#[rustler::nif]
fn core_retention_failed<'a>(
    env: Env<'a>,
    _reason: Term<'a>,
    core: CoreRef,
) -> NifResult<Term<'a>> {
    step(env, &core, |machine| Ok(machine.retention_failed()))
}

/// An edit that changes nothing. Constant time.
#[rustler::nif]
fn manifest_new_edit<'a>(env: Env<'a>, manifest: Term<'a>) -> NifResult<Term<'a>> {
    term::new_edit(env, manifest)
}

/// Applies an edit. Copies the entries: microseconds for a root of usual size.
#[rustler::nif]
fn manifest_apply_edit<'a>(
    env: Env<'a>,
    edit: Term<'a>,
    manifest: Term<'a>,
) -> NifResult<Term<'a>> {
    term::apply_edit_bytes(env, edit, manifest)
}

/// Whether a manifest makes sense; no other term does. Linear in its entries.
#[rustler::nif]
fn manifest_is_well_formed(manifest: Term) -> bool {
    term::manifest(manifest).is_ok_and(|read| read.is_ok_and(|manifest| manifest.is_well_formed()))
}

/// The bytes of a root. Linear in its entries, which are copied and not decoded.
#[rustler::nif]
fn manifest_encode_root<'a>(env: Env<'a>, manifest: Term<'a>) -> NifResult<Term<'a>> {
    Ok(term::binary(env, &term::root(manifest)?))
}

/// Reads a root. Linear in its entries.
#[rustler::nif]
fn manifest_decode_root<'a>(env: Env<'a>, bytes: Binary<'a>) -> Term<'a> {
    match manifest::decode_root(&bytes) {
        Ok(manifest) => (atoms::ok(), term::manifest_term(env, &manifest)).encode(env),
        Err(error) => term::format_error(env, &error),
    }
}

/// The bytes of a group. Linear in its entries.
#[rustler::nif]
fn manifest_encode_group<'a>(
    env: Env<'a>,
    kind: Term<'a>,
    entries: Term<'a>,
) -> NifResult<Term<'a>> {
    let (kind, entries) = (
        term::group_kind(kind)?,
        term::entries_list(entries, "entries")?,
    );
    let bytes =
        manifest::encode_group(kind, &entries).map_err(|error| term::misuse(error.to_string()))?;
    Ok(term::binary(env, &bytes))
}

/// Reads a group. Linear in its entries.
#[rustler::nif]
fn manifest_decode_group<'a>(env: Env<'a>, bytes: Binary<'a>) -> Term<'a> {
    match manifest::decode_group(&bytes) {
        Ok(group) => (
            atoms::ok(),
            (
                group.kind.code(),
                term::entries_term(env, group.entries.iter()),
            ),
        )
            .encode(env),
        Err(error) => term::format_error(env, &error),
    }
}

/// Finds the fragment of an offset. Linear in the entries, which have to be read first.
#[rustler::nif]
fn manifest_lookup_offset<'a>(
    env: Env<'a>,
    manifest: Term<'a>,
    offset: Term<'a>,
) -> NifResult<Term<'a>> {
    let found = manifest::lookup_offset(
        &term::whole_manifest(manifest)?,
        term::offset(offset, "offset")?,
    );
    Ok(term::lookup(env, Ok(found)))
}

/// Finds the oldest fragment that is young enough. Linear in the entries.
#[rustler::nif]
fn manifest_lookup_timestamp<'a>(
    env: Env<'a>,
    manifest: Term<'a>,
    timestamp: Term<'a>,
) -> NifResult<Term<'a>> {
    let found = manifest::lookup_timestamp(
        &term::whole_manifest(manifest)?,
        term::timestamp(timestamp, "timestamp")?,
    );
    Ok(term::lookup(env, Ok(found)))
}

/// What retention has to drop. Dirty CPU: linear in the entries and in what goes, a tenth of a millisecond where thousands go at once.
#[rustler::nif(schedule = "DirtyCpu")]
fn manifest_evaluate_remote_retention<'a>(
    env: Env<'a>,
    manifest: Term<'a>,
    limits: Term<'a>,
    now: Term<'a>,
) -> NifResult<Term<'a>> {
    let (manifest, limits, now) = (
        term::whole_manifest(manifest)?,
        term::limits(limits)?,
        term::timestamp(now, "now")?,
    );
    Ok(term::retention(
        env,
        manifest::evaluate_remote_retention(&manifest, limits, now),
    ))
}

/// Goes on with a lookup or an evaluation. Linear in the entries of the group.
#[rustler::nif]
fn manifest_resume<'a>(
    env: Env<'a>,
    fetched: Term<'a>,
    cont: ResourceArc<ContHandle>,
) -> NifResult<Term<'a>> {
    Ok(match (&*cont, term::fetched(fetched)?) {
        (ContHandle::Lookup(cont), Ok(entries)) => term::lookup(env, cont.resume(&entries)),
        (ContHandle::Lookup(_), Err(reason)) => (atoms::error(), reason).encode(env),
        (ContHandle::Retention(cont), Ok(entries)) => {
            term::retention(env, cont.clone().resume(Ok(entries)))
        }
        // Why it failed is known to the caller, who fetched.
        (ContHandle::Retention(cont), Err(_)) => {
            term::retention(env, cont.clone().resume(Err(FetchFailed)))
        }
    })
}
