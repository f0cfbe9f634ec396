//! One attempt to upload one fragment: segment files in, one object out.

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use futures::stream;
use stream_s3_core::error::TransferError;
use stream_s3_core::fragment::{FragmentMeta, OBJECT_HEADER, Span};
use stream_s3_core::key::{self, StreamId};
use stream_s3_core::units::Uid;
use stream_s3_store::{Body, ByteStream, Failure, PutOptions};
use tokio::sync::mpsc;

use crate::buffers::{BUFFER_SIZE, Buffer, Share};
use crate::executor::Executor;
use crate::metrics::Metrics;
use crate::scan::{Check, Plan, Scan};
use crate::segment::{Segments, read_at};
use crate::store::Store;

/// A fragment that is to be uploaded.
#[derive(Debug, Clone)]
pub struct Fragment {
    /// Whose fragment it is.
    pub stream: StreamId,
    /// Where its segment files are.
    pub dir: PathBuf,
    /// Which chunks, and where they are in the segment files. `size` is not trusted: the spans are read, and add up to it.
    pub meta: FragmentMeta,
}

/// What the pieces of the object travel through: one waits while another is being sent.
type Pipe = mpsc::Sender<std::io::Result<Bytes>>;

/// Why the body ended early.
enum Stopped {
    /// The store takes no more: its own answer says why.
    ByStore,
    /// The bytes cannot be had, or must not be sent.
    Failed(TransferError),
}

/// Uploads `fragment` to `store` under a key of its own, and answers the uid in that key.
///
/// Reads every byte twice: once to know the object's CRC before the first byte is sent, once to send it. The second read
/// is checked against the first, so nothing is stored of a fragment that changed on the way. Takes two buffers, and 24
/// bytes a chunk. Dropping the future aborts the upload; nothing is stored then.
///
/// # Errors
/// `OpenFailed` (also for a failed read), `CorruptChunk` (which covers a file that ends too early), or what the store answered.
pub(crate) async fn upload(
    executor: &Executor,
    metrics: &Metrics,
    store: &Store,
    fragment: &Fragment,
) -> Result<Uid, TransferError> {
    let share = metrics.buffers.share();
    let mut segments = Segments::new(&fragment.dir);
    let plan = plan(executor, &share, &mut segments, fragment).await?;
    let _held = metrics.buffers.hold(plan.memory());
    let uid = Uid(rand::random());
    let key = key::fragment(
        store.prefix(),
        &fragment.stream,
        fragment.meta.first_offset,
        uid,
    );
    let (pipe, pieces) = mpsc::channel(1);
    let body = Body::Stream {
        len: plan.object_len,
        stream: pieces_of(pieces),
    };
    let options = PutOptions {
        crc32: Some(plan.object_crc),
        ..PutOptions::default()
    };
    let put = store.objects().put(&key, body, options);
    let send = send(executor, &share, &mut segments, fragment, &plan, pipe);
    let (stored, sent) = tokio::join!(put, send);
    match (stored, sent) {
        (Ok(_), Ok(())) => {
            metrics
                .bytes_sent
                .fetch_add(plan.object_len, Ordering::Relaxed);
            Ok(uid)
        }
        (_, Err(Stopped::Failed(error))) => Err(error),
        (Err(error), Ok(()) | Err(Stopped::ByStore)) => Err(reason(&error.failure)),
        // An answer before the whole body was read: whatever it says, it is not about this object.
        (Ok(_), Err(Stopped::ByStore)) => Err(TransferError::Connection),
    }
}

/// The first pass.
async fn plan(
    executor: &Executor,
    share: &Share,
    segments: &mut Segments,
    fragment: &Fragment,
) -> Result<Plan, TransferError> {
    let meta = &fragment.meta;
    let mut scan = Box::new(Scan::new(meta.first_offset, meta.next_offset));
    let mut buffer = share.buffer().await;
    for span in &meta.spans {
        let file = segments.file(executor, span.segment_offset).await?;
        for (position, len) in blocks(span) {
            let file = file.clone();
            let job = move || {
                let outcome = read_at(&file, &mut buffer.space()[..len], position);
                let fed = outcome.map(|have| {
                    buffer.set_len(have);
                    scan.feed(buffer.as_ref()).and_then(|()| {
                        if have < len {
                            Err(TransferError::CorruptChunk(scan.current()))
                        } else {
                            Ok(())
                        }
                    })
                });
                (scan, buffer, fed)
            };
            let fed;
            (scan, buffer, fed) = executor.read(job).await.map_err(TransferError::Panic)?;
            fed.map_err(|error| segments.failed(span.segment_offset, &error))??;
        }
        if let Some(chunk) = scan.torn() {
            return Err(TransferError::CorruptChunk(chunk));
        }
    }
    scan.finish()
}

/// The second pass: writes the whole object into `pipe`.
async fn send(
    executor: &Executor,
    share: &Share,
    segments: &mut Segments,
    fragment: &Fragment,
    plan: &Plan,
    pipe: Pipe,
) -> Result<(), Stopped> {
    let failed = match write(executor, share, segments, fragment, plan, &pipe).await {
        Ok(()) => return Ok(()),
        Err(Stopped::ByStore) => return Err(Stopped::ByStore),
        Err(Stopped::Failed(error)) => error,
    };
    // The error ends the body, so the store aborts the request. A pipe that is closed already comes to the same.
    let _ = pipe
        .send(Err(std::io::Error::other(failed.to_string())))
        .await;
    Err(Stopped::Failed(failed))
}

async fn write(
    executor: &Executor,
    share: &Share,
    segments: &mut Segments,
    fragment: &Fragment,
    plan: &Plan,
    pipe: &Pipe,
) -> Result<(), Stopped> {
    let mut check = Box::new(plan.check());
    push(pipe, Bytes::from_static(&OBJECT_HEADER)).await?;
    for span in &fragment.meta.spans {
        let file = segments
            .file(executor, span.segment_offset)
            .await
            .map_err(Stopped::Failed)?;
        for (position, len) in blocks(span) {
            let mut buffer = share.buffer().await;
            let file = file.clone();
            let job = move || {
                let outcome = read_at(&file, &mut buffer.space()[..len], position);
                let fed = outcome.map(|have| fill(&mut check, &mut buffer, have, len));
                (check, buffer, fed)
            };
            let (fed, filled);
            (check, filled, fed) = executor
                .read(job)
                .await
                .map_err(|text| Stopped::Failed(TransferError::Panic(text)))?;
            fed.map_err(|error| segments.failed(span.segment_offset, &error))
                .and_then(|fed| fed)
                .map_err(Stopped::Failed)?;
            push(pipe, filled.into_bytes()).await?;
        }
    }
    // Only now, with every chunk found unchanged, may the body reach its full length.
    push(pipe, plan.index.clone()).await
}

fn fill(
    check: &mut Check,
    buffer: &mut Buffer,
    have: usize,
    wanted: usize,
) -> Result<(), TransferError> {
    buffer.set_len(have);
    check.feed(buffer.as_ref())?;
    if have < wanted {
        Err(check.corrupt())
    } else {
        Ok(())
    }
}

async fn push(pipe: &Pipe, bytes: Bytes) -> Result<(), Stopped> {
    pipe.send(Ok(bytes)).await.map_err(|_| Stopped::ByStore)
}

/// The body: what comes out of the pipe, to its end.
fn pieces_of(pieces: mpsc::Receiver<std::io::Result<Bytes>>) -> ByteStream {
    Box::pin(stream::unfold(pieces, |mut pieces| async move {
        pieces.recv().await.map(|piece| (piece, pieces))
    }))
}

/// Cuts a span into reads of at most a buffer: position in the file, and length.
fn blocks(span: &Span) -> impl Iterator<Item = (u64, usize)> + use<> {
    let (start, end) = (span.start, span.end);
    (start..end).step_by(BUFFER_SIZE).map(move |position| {
        let len = (end - position).min(BUFFER_SIZE as u64);
        // At most BUFFER_SIZE, so it fits.
        (position, usize::try_from(len).unwrap_or(BUFFER_SIZE))
    })
}

/// What a failure of a store is called in the answer to a transfer.
#[must_use]
pub fn reason(failure: &Failure) -> TransferError {
    match failure {
        Failure::Http(status) => TransferError::Http(*status),
        Failure::Timeout => TransferError::Timeout,
        // A body that broke without an error of its own: the connection took it down.
        Failure::Connection | Failure::Body => TransferError::Connection,
        Failure::Throttled => TransferError::Throttled,
        Failure::ChecksumMismatch => TransferError::ChecksumMismatch,
        Failure::ClockSkew => TransferError::ClockSkew,
        Failure::ExpiredToken => TransferError::ExpiredToken,
        Failure::WriteConflict => TransferError::WriteConflict,
        Failure::File(file, posix) => TransferError::OpenFailed {
            file: file.clone(),
            posix: posix.clone(),
        },
        Failure::Setting(_) => TransferError::Other,
        Failure::Closed => TransferError::Cancelled,
    }
}
