//! One attempt to upload one fragment: segment files in, one object out.

use std::path::PathBuf;
use std::sync::Arc;
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
use crate::integrity::{Check, Plan, Planner, Unplanned};
use crate::metrics::Metrics;
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
/// Reads around the data of each chunk first, to know the CRC that the object must have, then everything once, to send
/// it. Where the store is known to compare the object with that CRC, nothing here does, until it refuses; elsewhere the bytes are
/// checked on their way, and the body stops short of its length if one of them is wrong. Takes two buffers, and 24
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
    let plan = Arc::new(reader.plan(&fragment.meta).await?);
    let _held = metrics.buffers.hold(plan.memory());
    let uid = Uid(rand::random());
    let key = key::fragment(
        store.prefix(),
        &fragment.stream,
        fragment.meta.first_offset,
        uid,
    );
    let check = (!store.verifies_checksums()).then(|| Check::new(Arc::clone(&plan)));
    let unchecked = check.is_none();
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
    let (stored, sent) = tokio::join!(put, reader.send(&plan, check, pipe));
    match (stored, sent) {
        (Ok(_), Ok(())) => {
            metrics
                .bytes_sent
                .fetch_add(plan.object_len, Ordering::Relaxed);
            Ok(uid)
        }
        (_, Err(Stopped::Failed(error))) => Err(error),
        (Err(error), Ok(()) | Err(Stopped::ByStore)) => {
            let reason = reason(&error.failure);
            // Stores have more than one way to say that a checksum does not fit.
            let refused = matches!(
                reason,
                TransferError::ChecksumMismatch | TransferError::Http(400)
            );
            if refused && unchecked {
                reader.check(&plan).await?;
            }
            Err(reason)
        }
        // An answer before the whole body was read: whatever it says, it is not about this object.
        (Ok(_), Err(Stopped::ByStore)) => Err(TransferError::Connection),
    }
}

/// Reads the spans of one fragment.
struct Reader<'t> {
    executor: &'t Executor,
    share: Share,
    segments: Segments,
    spans: &'t [Span],
}

impl Reader<'_> {
    /// Reads what is around the data of the chunks.
    async fn plan(&mut self, meta: &FragmentMeta) -> Result<Plan, TransferError> {
        let mut planner = Box::new(Planner::new(meta.first_offset, meta.next_offset));
        let mut buffer = self.share.buffer().await;
        for span in self.spans {
            let mut at = span.start;
            while at < span.end {
                let file = self
                    .segments
                    .file(self.executor, span.segment_offset)
                    .await?;
                let (from, end) = (at, span.end);
                let job = move || {
                    let reached = planner.walk(&file, from, end, buffer.room());
                    (reached, planner, buffer)
                };
                let reached;
                (reached, planner, buffer) = self
                    .executor
                    .read(job)
                    .await
                    .map_err(TransferError::Panic)?;
                at = reached.map_err(|error| match error {
                    Unplanned::Corrupt(chunk) => TransferError::CorruptChunk(chunk),
                    Unplanned::Unreadable(error) => {
                        self.segments.failed(span.segment_offset, &error)
                    }
                })?;
            }
        }
        planner.finish()
    }

    /// Writes the whole object into `pipe`.
    async fn send(
        &mut self,
        plan: &Arc<Plan>,
        check: Option<Check>,
        pipe: Pipe,
    ) -> Result<(), Stopped> {
        let failed = match self.write(plan, check, &pipe).await {
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
    async fn write(
        &mut self,
        plan: &Arc<Plan>,
        check: Option<Check>,
        pipe: &Pipe,
    ) -> Result<(), Stopped> {
        let mut source = Source {
            plan: Arc::clone(plan),
            check,
            position: 0,
        };
        push(pipe, Bytes::from_static(&OBJECT_HEADER)).await?;
        let mut buffer = self.share.buffer().await;
        for span in self.spans {
            let mut at = span.start;
            while at < span.end {
                if buffer.is_full() {
                    push(pipe, buffer.into_bytes()).await?;
                    buffer = self.share.buffer().await;
                }
                let len = buffer.room_for(span.end - at);
                let read = self.read(span, at, len, buffer, source).await;
                (buffer, source) = read.map_err(Stopped::Failed)?;
                at += len as u64;
            }
        }
        push(pipe, buffer.into_bytes()).await?;
        // Only now, with every chunk read and found unchanged where that is done here, may the body reach its full length.
        push(pipe, plan.index.clone()).await
    }

    /// Reads everything again and says which chunk is not what it should be, if any is.
    async fn check(&mut self, plan: &Arc<Plan>) -> Result<(), TransferError> {
        let mut source = Source {
            plan: Arc::clone(plan),
            check: Some(Check::new(Arc::clone(plan))),
            position: 0,
        };
        let mut buffer = self.share.buffer().await;
        for span in self.spans {
            let mut at = span.start;
            while at < span.end {
                buffer.clear();
                let len = buffer.room_for(span.end - at);
                (buffer, source) = self.read(span, at, len, buffer, source).await?;
                at += len as u64;
            }
        }
        Ok(())
    }

    /// Appends `len` bytes of the span's file to the buffer.
    async fn read(
        &mut self,
        span: &Span,
        at: u64,
        len: usize,
        mut buffer: Buffer,
        mut source: Source,
    ) -> Result<(Buffer, Source), TransferError> {
        let segment = span.segment_offset;
        let file = self.segments.file(self.executor, segment).await?;
        let job = move || {
            let start = buffer.as_ref().len();
            let have = read_at(&file, &mut buffer.room()[..len], at)?;
            buffer.advance(have);
            let taken = source.take(&buffer.as_ref()[start..], len);
            Ok::<_, std::io::Error>(taken.map(|()| (buffer, source)))
        };
        let done = self
            .executor
            .read(job)
            .await
            .map_err(TransferError::Panic)?;
        done.map_err(|error| self.segments.failed(segment, &error))?
    }
}

/// How far the fragment has been read, and what looks at its bytes on the thread that reads them.
struct Source {
    plan: Arc<Plan>,
    check: Option<Check>,
    position: u64,
}

impl Source {
    /// Takes the next bytes, of which there should be `wanted`.
    fn take(&mut self, bytes: &[u8], wanted: usize) -> Result<(), TransferError> {
        if let Some(check) = &mut self.check {
            check.feed(bytes)?;
        }
        self.position += bytes.len() as u64;
        if bytes.len() < wanted {
            return Err(self.plan.corrupt_at(self.position));
        }
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
