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

use crate::buffers::{Buffer, Share};
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
    let mut reader = Reader {
        executor,
        share: metrics.buffers.share(),
        segments: Segments::new(&fragment.dir),
        spans: &fragment.meta.spans,
    };
    let plan = reader.plan(&fragment.meta).await?;
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
    let (stored, sent) = tokio::join!(put, reader.send(&plan, pipe));
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

/// Reads the spans of one fragment, twice.
struct Reader<'t> {
    executor: &'t Executor,
    share: Share,
    segments: Segments,
    spans: &'t [Span],
}

/// What looks at the bytes that are read, on the thread that reads them.
trait Pass: Send + 'static {
    /// Takes the next bytes.
    fn feed(&mut self, bytes: &[u8]) -> Result<(), TransferError>;

    /// The chunk that the next byte belongs to, as an error: the bytes end too early.
    fn ends_early(&self) -> TransferError;
}

impl Pass for Scan {
    fn feed(&mut self, bytes: &[u8]) -> Result<(), TransferError> {
        Self::feed(self, bytes)
    }

    fn ends_early(&self) -> TransferError {
        TransferError::CorruptChunk(self.current())
    }
}

impl Pass for Check {
    fn feed(&mut self, bytes: &[u8]) -> Result<(), TransferError> {
        Self::feed(self, bytes)
    }

    fn ends_early(&self) -> TransferError {
        self.corrupt()
    }
}

impl Reader<'_> {
    /// The first pass.
    async fn plan(&mut self, meta: &FragmentMeta) -> Result<Plan, TransferError> {
        let mut scan = Box::new(Scan::new(meta.first_offset, meta.next_offset));
        let mut buffer = self.share.buffer().await;
        for span in self.spans {
            let mut position = span.start;
            while position < span.end {
                buffer.clear();
                let len = buffer.room_for(span.end - position);
                (buffer, scan) = self.read(span, position, len, buffer, scan).await?;
                position += len as u64;
            }
            if let Some(chunk) = scan.torn() {
                return Err(TransferError::CorruptChunk(chunk));
            }
        }
        scan.finish()
    }

    /// The second pass: writes the whole object into `pipe`.
    async fn send(&mut self, plan: &Plan, pipe: Pipe) -> Result<(), Stopped> {
        let failed = match self.write(plan, &pipe).await {
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

    /// Every buffer is filled before it is sent, from several spans where they are short: a store may gather about a
    /// buffer's worth before it goes on, and would wait for ever if all of the transfer's buffers held less than that.
    async fn write(&mut self, plan: &Plan, pipe: &Pipe) -> Result<(), Stopped> {
        let mut check = Box::new(plan.check());
        push(pipe, Bytes::from_static(&OBJECT_HEADER)).await?;
        let mut buffer = self.share.buffer().await;
        for span in self.spans {
            let mut position = span.start;
            while position < span.end {
                if buffer.is_full() {
                    push(pipe, buffer.into_bytes()).await?;
                    buffer = self.share.buffer().await;
                }
                let len = buffer.room_for(span.end - position);
                let read = self.read(span, position, len, buffer, check).await;
                (buffer, check) = read.map_err(Stopped::Failed)?;
                position += len as u64;
            }
        }
        push(pipe, buffer.into_bytes()).await?;
        // Only now, with every chunk found unchanged, may the body reach its full length.
        push(pipe, plan.index.clone()).await
    }

    /// Appends `len` bytes of the span's file to the buffer, and shows them to the pass.
    async fn read<P: Pass>(
        &mut self,
        span: &Span,
        position: u64,
        len: usize,
        mut buffer: Buffer,
        mut pass: Box<P>,
    ) -> Result<(Buffer, Box<P>), TransferError> {
        let segment = span.segment_offset;
        let file = self.segments.file(self.executor, segment).await?;
        let job = move || {
            let start = buffer.as_ref().len();
            let have = read_at(&file, &mut buffer.room()[..len], position)?;
            buffer.advance(have);
            let seen = pass.feed(&buffer.as_ref()[start..]);
            let seen = seen.and_then(|()| match have {
                have if have < len => Err(pass.ends_early()),
                _ => Ok((buffer, pass)),
            });
            Ok::<_, std::io::Error>(seen)
        };
        let done = self
            .executor
            .read(job)
            .await
            .map_err(TransferError::Panic)?;
        done.map_err(|error| self.segments.failed(segment, &error))?
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
