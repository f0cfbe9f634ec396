//! NIFs of the runtime part: store requests and the governor.

use std::future::Future;
use std::sync::{Arc, LazyLock};

use rustler::{Env, LocalPid, NifResult, ResourceArc, Term};
use stream_s3_runtime::{Executor, Governor, StartError, Store, Work};
use stream_s3_store::{Body, Op, RequestCounts, StoreError};

use crate::handle::{GovernorHandle, Opaque, StoreHandle, Watch};
use crate::mailbox::{self, OwnerMailbox, TransferMailbox};
use crate::term::{self, StoreAnswer, atoms};

pub(crate) type StoreRef = ResourceArc<StoreHandle>;
type GovernorRef = ResourceArc<GovernorHandle>;
pub(crate) type Answer = Result<StoreAnswer, StoreError>;

/// Of all stores that this library has opened.
static REQUESTS: LazyLock<Arc<RequestCounts>> = LazyLock::new(Arc::default);

/// Opens a store; sends no request. Dirty I/O: reads certificates, and starts the library's threads if need be.
#[rustler::nif(schedule = "DirtyIo")]
fn store_open<'a>(env: Env<'a>, config: Term<'a>) -> NifResult<Term<'a>> {
    use rustler::Encoder as _;
    let refused = |key: Term<'a>, text: String| (atoms::error(), (key, text)).encode(env);
    let executor = match Executor::global() {
        Ok(executor) => executor,
        Err(error) => return Ok(refused(atoms::store().encode(env), error.to_string())),
    };
    let (settings, prefix) = match term::settings(env, config)? {
        Ok(settings) => settings,
        Err((key, text)) => return Ok(refused(key, text)),
    };
    // Clients may want to know the runtime they will live on.
    let _context = executor.tokio().enter();
    Ok(match Store::open(settings, prefix, &REQUESTS) {
        Ok(store) => (atoms::ok(), ResourceArc::new(StoreHandle(store))).encode(env),
        Err(error) => refused(term::setting_of(env, &error), error.message),
    })
}

/// Tries out what the store allows and supports; the handle remembers it. Normal scheduler, microseconds.
#[rustler::nif]
fn store_probe<'a>(
    env: Env<'a>,
    store: StoreRef,
    to: LocalPid,
    reference: Term<'a>,
) -> NifResult<rustler::Atom> {
    ask(env, to, reference, Op::Probe, &store, |store| async move {
        store.probe().await.map(StoreAnswer::Capabilities)
    })
}

/// Stores an object. Normal scheduler; copies the body, so meant for at most a few hundred kilobytes.
#[rustler::nif]
fn store_put<'a>(
    env: Env<'a>,
    store: StoreRef,
    to: LocalPid,
    reference: Term<'a>,
    key: String,
    body: Term<'a>,
    options: Term<'a>,
) -> NifResult<rustler::Atom> {
    let body = term::iodata(body)?;
    let options = term::put_options(options, &body)?;
    ask(env, to, reference, Op::Put, &store, |store| async move {
        store
            .objects()
            .put(&key, Body::Bytes(body), options)
            .await
            .map(StoreAnswer::Stored)
    })
}

/// Reads an object or a part of it, at most 64 MiB. Normal scheduler, microseconds.
#[rustler::nif]
fn store_get<'a>(
    env: Env<'a>,
    store: StoreRef,
    to: LocalPid,
    reference: Term<'a>,
    key: String,
    part: Term<'a>,
) -> NifResult<rustler::Atom> {
    let part = term::part(part)?;
    ask(env, to, reference, Op::Get, &store, |store| async move {
        store.get(&key, part).await.map(StoreAnswer::Read)
    })
}

/// Deletes objects. Normal scheduler; copies the keys, so meant for at most a few thousand.
#[rustler::nif]
fn store_delete<'a>(
    env: Env<'a>,
    store: StoreRef,
    to: LocalPid,
    reference: Term<'a>,
    keys: Term<'a>,
) -> NifResult<rustler::Atom> {
    let keys = term::texts(keys, "keys")?;
    ask(env, to, reference, Op::Delete, &store, |store| async move {
        store.delete(&keys).await.map(StoreAnswer::Undeleted)
    })
}

/// Lists a page of keys. Normal scheduler, microseconds.
#[rustler::nif]
fn store_list<'a>(
    env: Env<'a>,
    store: StoreRef,
    to: LocalPid,
    reference: Term<'a>,
    prefix: String,
    from: Term<'a>,
    max: Term<'a>,
) -> NifResult<rustler::Atom> {
    let from = term::text_or_undefined(from, "from")?;
    let max = term::page_size(max)?;
    ask(env, to, reference, Op::List, &store, |store| async move {
        store
            .objects()
            .list(&prefix, from.as_deref(), max)
            .await
            .map(StoreAnswer::Page)
    })
}

/// What has been asked of all stores so far, and how it went. Normal scheduler; reads some five hundred numbers, a few microseconds.
#[rustler::nif]
fn store_metrics(env: Env) -> NifResult<Term> {
    term::store_metrics(env, &REQUESTS.snapshot())
}

/// Aborts requests by reference. Normal scheduler; a copy of each reference.
#[rustler::nif]
fn store_cancel(references: Term) -> NifResult<rustler::Atom> {
    let references = term::list(references, "references")?;
    mailbox::cancel(&references.map(Opaque::save).collect::<Vec<_>>());
    Ok(atoms::ok())
}

/// Stores a manifest root. Normal scheduler; copies the entries, a few nanoseconds each.
#[rustler::nif]
fn put_root<'a>(
    env: Env<'a>,
    store: StoreRef,
    to: LocalPid,
    reference: Term<'a>,
    stream: Term<'a>,
    epoch: Term<'a>,
    manifest: Term<'a>,
) -> NifResult<rustler::Atom> {
    let (stream, epoch) = (term::stream_id(stream)?, term::epoch(epoch, "epoch")?);
    let root = term::root(manifest)?;
    ask(env, to, reference, Op::Put, &store, |store| async move {
        store
            .put_root(&stream, epoch, root.into())
            .await
            .map(StoreAnswer::Uid)
    })
}

/// Reads a manifest root. Normal scheduler, microseconds.
#[rustler::nif]
fn get_root<'a>(
    env: Env<'a>,
    store: StoreRef,
    to: LocalPid,
    reference: Term<'a>,
    stream: Term<'a>,
    epoch: Term<'a>,
    uid: Term<'a>,
) -> NifResult<rustler::Atom> {
    let (stream, epoch, uid) = (
        term::stream_id(stream)?,
        term::epoch(epoch, "epoch")?,
        term::uid(uid, "uid")?,
    );
    ask(env, to, reference, Op::Get, &store, |store| async move {
        store
            .get_root(&stream, epoch, uid)
            .await
            .map(|manifest| StoreAnswer::Manifest(Box::new(manifest)))
    })
}

/// Stores a group. Normal scheduler; decodes the entries, some tens of nanoseconds an entry.
#[rustler::nif]
fn put_group<'a>(
    env: Env<'a>,
    store: StoreRef,
    to: LocalPid,
    reference: Term<'a>,
    stream: Term<'a>,
    kind: Term<'a>,
    entries: Term<'a>,
) -> NifResult<rustler::Atom> {
    let (stream, kind, entries) = (
        term::stream_id(stream)?,
        term::group_kind(kind)?,
        term::entries_list(entries, "entries")?,
    );
    ask(env, to, reference, Op::Put, &store, |store| async move {
        store
            .put_group(&stream, kind, &entries)
            .await
            .map(StoreAnswer::Uid)
    })
}

/// Reads the entries of a group. Normal scheduler, microseconds.
#[rustler::nif]
#[allow(clippy::too_many_arguments)]
fn get_group<'a>(
    env: Env<'a>,
    store: StoreRef,
    to: LocalPid,
    reference: Term<'a>,
    stream: Term<'a>,
    kind: Term<'a>,
    offset: Term<'a>,
    uid: Term<'a>,
) -> NifResult<rustler::Atom> {
    let (stream, kind) = (term::stream_id(stream)?, term::group_kind(kind)?);
    let (offset, uid) = (term::offset(offset, "offset")?, term::uid(uid, "uid")?);
    ask(env, to, reference, Op::Get, &store, |store| async move {
        store
            .get_group(&stream, kind, offset, uid)
            .await
            .map(StoreAnswer::Entries)
    })
}

/// Makes a request of the store, on a thread of the library.
pub(crate) fn ask<'a, F: Future<Output = Answer> + Send + 'static>(
    env: Env<'a>,
    to: LocalPid,
    reference: Term<'a>,
    op: Op,
    store: &StoreRef,
    request: impl FnOnce(Store) -> F,
) -> NifResult<rustler::Atom> {
    mailbox::request(
        threads()?,
        to,
        Watch::over(env, &to),
        Opaque::save(reference),
        op,
        request(store.0.clone()),
    );
    Ok(atoms::ok())
}

/// Running already: whoever has a handle got it from a call that started them.
pub(crate) fn threads() -> NifResult<&'static Executor> {
    Executor::global().map_err(|error: StartError| term::misuse(error.to_string()))
}

/// Starts a governor. Dirty I/O: starts the library's threads if need be.
#[rustler::nif(schedule = "DirtyIo")]
fn governor_start<'a>(env: Env<'a>, options: Term<'a>) -> NifResult<Term<'a>> {
    use rustler::Encoder as _;
    let (limits, owner) = match term::governor_options(env, options)? {
        Ok(options) => options,
        Err((key, text)) => return Ok((atoms::error(), (key, text)).encode(env)),
    };
    let watch = Watch::over(env, &owner);
    let governor = Governor::start(threads()?, limits, move || watch.is_alive());
    Ok((
        atoms::ok(),
        ResourceArc::new(GovernorHandle { governor, owner }),
    )
        .encode(env))
}

/// Queues work. Normal scheduler; copies the description, some microseconds for a fragment of a few spans.
#[rustler::nif]
fn governor_submit<'a>(
    env: Env<'a>,
    governor: GovernorRef,
    work: Term<'a>,
    size: Term<'a>,
    reply_to: LocalPid,
    reference: Term<'a>,
) -> NifResult<rustler::Atom> {
    let size = term::unsigned(size, "size")?;
    let watch = Watch::over(env, &reply_to);
    let key = Opaque::save(reference);
    match term::work(work)? {
        Some((store, fragment)) => {
            let work = Work::Transfer(Box::new((store.0.clone(), fragment)));
            governor.governor.submit(
                key.clone(),
                size,
                work,
                Box::new(TransferMailbox {
                    reply_to,
                    reference: key,
                    watch,
                }),
            );
        }
        None => {
            let mailbox = OwnerMailbox {
                owner: governor.owner,
                reference: key.clone(),
                watch,
            };
            governor
                .governor
                .submit(key, size, Work::Host, Box::new(mailbox));
        }
    }
    Ok(atoms::ok())
}

/// External work has ended. Normal scheduler, microseconds.
#[rustler::nif]
fn governor_finished(governor: GovernorRef, reference: Term) -> rustler::Atom {
    governor.governor.finished(Opaque::save(reference));
    atoms::ok()
}

/// Cancels work by reference. Normal scheduler; a copy of each reference.
#[rustler::nif]
fn governor_cancel(governor: GovernorRef, references: Term) -> NifResult<rustler::Atom> {
    let references = term::list(references, "references")?;
    governor
        .governor
        .cancel(references.map(Opaque::save).collect());
    Ok(atoms::ok())
}

/// Changes the rate. Normal scheduler, microseconds.
#[rustler::nif]
fn governor_set_rate<'a>(
    governor: GovernorRef,
    rate: Term<'a>,
    burst: Term<'a>,
) -> NifResult<rustler::Atom> {
    let rate = term::rate(rate).map_err(|text| term::misuse(format!("rate: {text}")))?;
    let burst = term::burst(burst).map_err(|text| term::misuse(format!("burst: {text}")))?;
    governor.governor.set_rate(rate, burst);
    Ok(atoms::ok())
}

/// Changes how much runs at once. Normal scheduler, microseconds.
#[rustler::nif]
fn governor_set_concurrency(governor: GovernorRef, concurrency: Term) -> NifResult<rustler::Atom> {
    let permits = term::concurrency(concurrency)
        .map_err(|text| term::misuse(format!("concurrency: {text}")))?;
    governor.governor.set_permits(permits);
    Ok(atoms::ok())
}

/// Aborts everything and tells when that is done. Normal scheduler, microseconds.
#[rustler::nif]
fn governor_stop(governor: GovernorRef, to: LocalPid, reference: Term) -> rustler::Atom {
    let reference = Opaque::save(reference);
    governor
        .governor
        .stop(move || mailbox::send(&to, (atoms::governor_stopped(), &reference)));
    atoms::ok()
}

/// The governor's numbers. Normal scheduler, microseconds.
#[rustler::nif]
fn governor_info<'a>(env: Env<'a>, governor: GovernorRef) -> NifResult<Term<'a>> {
    term::governor_info(env, &governor.governor.info())
}
