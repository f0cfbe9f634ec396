//! NIFs of the registry of pinned segments. All of them run on normal schedulers and take a lock that is never held while a disk is
//! waited for; what may block runs on the library's reader threads, and is answered with `{pins_result, Ref, Answer}`.

use std::future::Future;

use rustler::{Encoder, Env, LocalPid, NifResult, OwnedBinary, Term};
use stream_s3_runtime::Executor;

use crate::handle::{Opaque, Watch};
use crate::mailbox;
use crate::requests::threads;
use crate::term::{self, PinsAnswer, atoms};

/// Enters the log of a stream. Microseconds.
#[rustler::nif]
fn pins_enter<'a>(
    env: Env<'a>,
    stream: Term<'a>,
    dir: Term<'a>,
    writer: LocalPid,
    budget: Term<'a>,
    to: LocalPid,
    reference: Term<'a>,
) -> NifResult<rustler::Atom> {
    let (stream, dir) = (term::stream_id(stream)?, term::path(dir)?);
    let budget = term::unsigned(budget, "budget")?;
    let executor = threads()?;
    let watch = Watch::over(env, &writer);
    let job = executor.pins().enter(
        stream,
        &dir,
        &name(env, writer),
        move || watch.is_alive(),
        budget,
    );
    answer(executor, to, reference, async move {
        match executor.read(job).await {
            Ok(()) => PinsAnswer::Done,
            Err(text) => PinsAnswer::Failed(text),
        }
    });
    Ok(atoms::ok())
}

/// Everything below an offset is in the tier. Microseconds.
#[rustler::nif]
fn pins_persisted(dir: Term, persisted: Term) -> NifResult<rustler::Atom> {
    let (dir, persisted) = (term::path(dir)?, term::offset(persisted, "persisted")?);
    let executor = threads()?;
    run(executor, executor.pins().persisted(&dir, persisted));
    Ok(atoms::ok())
}

/// Keeps one segment of a log open until something of it is persisted. Microseconds.
#[rustler::nif]
fn pins_hold(dir: Term, segment: Term, to: LocalPid, reference: Term) -> NifResult<rustler::Atom> {
    let (dir, segment) = (term::path(dir)?, term::offset(segment, "segment")?);
    let executor = threads()?;
    let job = executor.pins().hold(&dir, segment);
    answer(executor, to, reference, async move {
        match executor.read(job).await {
            Ok(Ok(())) => PinsAnswer::Done,
            Ok(Err(error)) => PinsAnswer::Failed(error.to_string()),
            Err(text) => PinsAnswer::Failed(text),
        }
    });
    Ok(atoms::ok())
}

/// Looks at the directory of a log. Microseconds.
#[rustler::nif]
fn pins_look(dir: Term) -> NifResult<rustler::Atom> {
    let (dir, executor) = (term::path(dir)?, threads()?);
    run(executor, move || executor.pins().look(&dir));
    Ok(atoms::ok())
}

/// Lets go of a log, unless it has another writer by now. Microseconds.
#[rustler::nif]
fn pins_leave<'a>(env: Env<'a>, dir: Term<'a>, writer: LocalPid) -> NifResult<rustler::Atom> {
    let (dir, writer, executor) = (term::path(dir)?, name(env, writer), threads()?);
    run(executor, move || executor.pins().leave(&dir, &writer));
    Ok(atoms::ok())
}

/// Lets go of the logs whose writers are gone. Microseconds.
#[rustler::nif]
fn pins_sweep() -> NifResult<rustler::Atom> {
    let executor = threads()?;
    run(executor, || executor.pins().sweep());
    Ok(atoms::ok())
}

/// Lets go of all logs. Microseconds.
#[rustler::nif]
fn pins_clear(to: LocalPid, reference: Term) -> NifResult<rustler::Atom> {
    let executor = threads()?;
    answer(executor, to, reference, async {
        match executor.read(|| executor.pins().clear()).await {
            Ok(()) => PinsAnswer::Done,
            Err(text) => PinsAnswer::Failed(text),
        }
    });
    Ok(atoms::ok())
}

/// From where on the pinned segments reach up to a log. Microseconds.
#[rustler::nif]
fn pins_joining(dir: Term, first: Term, to: LocalPid, reference: Term) -> NifResult<rustler::Atom> {
    let (dir, first) = (term::path(dir)?, term::offset(first, "first")?);
    let executor = threads()?;
    answer(executor, to, reference, async move {
        let found = executor.pins().joining(executor, &dir, first).await;
        PinsAnswer::of(found, PinsAnswer::Joining)
    });
    Ok(atoms::ok())
}

/// What the pinned segments have where a chunk should be. Microseconds.
#[rustler::nif]
fn pins_identity(
    dir: Term,
    chunk_id: Term,
    to: LocalPid,
    reference: Term,
) -> NifResult<rustler::Atom> {
    let (dir, chunk_id) = (term::path(dir)?, term::offset(chunk_id, "chunk id")?);
    let executor = threads()?;
    answer(executor, to, reference, async move {
        let found = executor.pins().identity(executor, &dir, chunk_id).await;
        PinsAnswer::of(found, PinsAnswer::Identity)
    });
    Ok(atoms::ok())
}

/// Chunks of a segment, pinned or not. Microseconds.
#[rustler::nif]
fn pins_headers<'a>(
    dir: Term<'a>,
    place: Term<'a>,
    max: Term<'a>,
    to: LocalPid,
    reference: Term<'a>,
) -> NifResult<rustler::Atom> {
    let (dir, place, max) = (term::path(dir)?, term::place(place)?, term::page_size(max)?);
    let executor = threads()?;
    answer(executor, to, reference, async move {
        let found = executor.pins().headers(executor, &dir, place, max).await;
        PinsAnswer::of(found, PinsAnswer::Headers)
    });
    Ok(atoms::ok())
}

/// The registry's numbers. Some microseconds, and some nanoseconds a pin.
#[rustler::nif]
fn pins_info(env: Env<'_>) -> NifResult<Term<'_>> {
    term::pins_info(env, &threads()?.pins().info())
}

/// What tells one writer from another.
fn name(env: Env, writer: LocalPid) -> Vec<u8> {
    let name: OwnedBinary = writer.encode(env).to_binary();
    name.as_slice().to_vec()
}

/// Runs what may block on a reader thread. A panic in it has been reported by the panic hook, and there is nobody to be told.
fn run(executor: &'static Executor, job: impl FnOnce() + Send + 'static) {
    executor.tokio().spawn(async move {
        let _ = executor.read(job).await;
    });
}

fn answer(
    executor: &'static Executor,
    to: LocalPid,
    reference: Term,
    work: impl Future<Output = PinsAnswer> + Send + 'static,
) {
    let reference = Opaque::save(reference);
    executor.tokio().spawn(async move {
        let answer = stream_s3_runtime::caught_async(work)
            .await
            .unwrap_or_else(PinsAnswer::Failed);
        mailbox::send(&to, (atoms::pins_result(), &reference, answer));
    });
}
