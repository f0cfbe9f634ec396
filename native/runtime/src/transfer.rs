//! One attempt to upload one fragment: segment files in, one object out.

use std::fs::File;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};

use bytes::Bytes;
use futures::{Stream, stream};
use parking_lot::Mutex;
use stream_s3_core::error::TransferError;
use stream_s3_core::fragment::{FragmentMeta, OBJECT_HEADER, Span};
use stream_s3_core::key::{self, StreamId};
use stream_s3_core::units::Uid;
use stream_s3_store::{Body, ByteStream, Failure, PutOptions};

use crate::buffers::{Buffer, BufferPool, Held, Share};
use crate::checksums::Checksum;
pub(crate) use crate::checksums::Checksums;
use crate::executor::Executor;
use crate::integrity::{Check, Plan, Planner, Unplanned};
use crate::metrics::Metrics;
use crate::panics::caught_async;
use crate::segment::{Segments, read_at, read_cached};
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

/// Uploads `fragment` to `store` under a key of its own, and answers the uid in that key.
///
/// Reads around the data of each chunk first, to know the CRC that the object must have, then everything once, to send
/// it. After a failure that CRC is remembered, and the next attempt reads nothing before the store takes its first byte. Where the store is known to compare
/// the object with that CRC, nothing here does, until it refuses; elsewhere the bytes are checked on their way, and the body stops short of its length if
/// one of them is wrong. Takes four buffers, and 24 bytes a chunk. Dropping the future aborts the upload; nothing is stored then.
///
/// # Errors
/// `OpenFailed` (also for a failed read), `CorruptChunk` (which covers a file that ends too early), or what the store answered.
pub(crate) async fn upload(
    executor: &Executor,
    metrics: &Metrics,
    checksums: &Checksums,
    store: &Store,
    fragment: &Fragment,
) -> Result<Uid, TransferError> {
    let mut reader = Reader {
        executor: executor.clone(),
        share: metrics.buffers.share(),
        segments: Segments::new(&fragment.dir),
        meta: Arc::new(fragment.meta.clone()),
    };
    let (checksum, plan) = match checksums.take(fragment) {
        Some(checksum) => (checksum, None),
        None => {
            let plan = reader.plan().await?;
            (Checksum::from(&plan), Some(Arc::new(plan)))
        }
    };
    let uid = Uid(rand::random());
    let key = key::fragment(
        store.prefix(),
        &fragment.stream,
        fragment.meta.first_offset,
        uid,
    );
    let checked = !store.verifies_checksums();
    let sent = Arc::new(Sent::default());
    let unread = Unread {
        reader: reader.clone(),
        buffers: metrics.buffers.clone(),
        plan: plan.clone(),
        checksum,
        checked,
    };
    let _held = plan
        .as_ref()
        .map(|plan| metrics.buffers.hold(plan.memory()));
    let body = Body::Stream {
        len: checksum.len,
        stream: body(unread, Arc::downgrade(&sent)),
    };
    let options = PutOptions {
        crc32: Some(checksum.crc),
        ..PutOptions::default()
    };
    let stored = store.objects().put(&key, body, options).await;
    let ended = sent.0.lock().take();
    match (stored, ended) {
        // What became of the body is the cause, whatever the store made of it.
        (_, Some(Err(error))) => Err(error),
        (Ok(_), Some(Ok(()))) => {
            metrics
                .bytes_sent
                .fetch_add(checksum.len, Ordering::Relaxed);
            Ok(uid)
        }
        // An answer before the whole body was read: whatever it says, it is not about this object.
        (Ok(_), None) => Err(TransferError::Connection),
        (Err(error), Some(Ok(())) | None) => {
            let reason = reason(&error.failure);
            // Stores have more than one way to say that a checksum does not fit.
            let refused = matches!(
                reason,
                TransferError::ChecksumMismatch | TransferError::Http(400)
            );
            if !refused {
                checksums.keep(fragment, checksum);
            } else if !checked {
                let plan = match plan {
                    Some(plan) => plan,
                    None => Arc::new(reader.plan().await?),
                };
                reader.check(plan).await?;
            }
            Err(reason)
        }
    }
}

/// How a body ended: nothing while it goes on, `Ok` once its last byte was handed over. Gone once nobody wants the upload any more.
#[derive(Default)]
struct Sent(Mutex<Option<Result<(), TransferError>>>);

/// Reads the spans of one fragment. Clones share descriptors and buffers.
#[derive(Clone)]
struct Reader {
    executor: Executor,
    share: Share,
    segments: Segments,
    meta: Arc<FragmentMeta>,
}

impl Reader {
    /// Reads what is around the data of the chunks.
    async fn plan(&mut self) -> Result<Plan, TransferError> {
        let meta = Arc::clone(&self.meta);
        let mut planner = Box::new(Planner::new(meta.first_offset, meta.next_offset));
        let mut buffer = self.share.buffer(0).await;
        for span in &meta.spans {
            let mut at = span.start;
            while at < span.end {
                let file = self.file(span).await?;
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

    /// Reads everything again and says which chunk is not what it should be, if any is.
    async fn check(&self, plan: Arc<Plan>) -> Result<(), TransferError> {
        let mut source = Source::new(self.clone(), plan, true);
        while source.data().await?.is_some() {}
        Ok(())
    }

    async fn file(&mut self, span: &Span) -> Result<Arc<File>, TransferError> {
        self.segments
            .file(&self.executor, span.segment_offset)
            .await
    }

    /// Appends `len` bytes of the span's file to the buffer, or what there is before the file ends.
    ///
    /// What is in the page cache is copied by whoever asks, so that it is still in this core's cache when it goes into
    /// the socket: that costs half of what a trip to another thread does. Only a read that would wait makes that trip.
    async fn read(
        &mut self,
        span: &Span,
        at: u64,
        len: usize,
        mut buffer: Buffer,
    ) -> Result<Buffer, TransferError> {
        let file = self.file(span).await?;
        let have = read_cached(&file, &mut buffer.room()[..len], at);
        buffer.advance(have);
        if have == len {
            return Ok(buffer);
        }
        let job = move || {
            let room = &mut buffer.room()[..len - have];
            let more = read_at(&file, room, at + have as u64)?;
            buffer.advance(more);
            Ok::<_, std::io::Error>(buffer)
        };
        let done = self
            .executor
            .read(job)
            .await
            .map_err(TransferError::Panic)?;
        done.map_err(|error| self.segments.failed(span.segment_offset, &error))
    }
}

/// An object of which nobody has asked for a byte.
struct Unread {
    reader: Reader,
    buffers: BufferPool,
    plan: Option<Arc<Plan>>,
    checksum: Checksum,
    /// Whether the bytes are compared with the plan on their way.
    checked: bool,
}

impl Unread {
    async fn open(mut self) -> Result<Source, TransferError> {
        if let Some(plan) = self.plan {
            return Ok(Source::new(self.reader, plan, self.checked));
        }
        let plan = self.reader.plan().await?;
        // Other bytes around the data than those of an earlier attempt: the store has been promised another object.
        if Checksum::from(&plan) != self.checksum {
            return Err(TransferError::ChecksumMismatch);
        }
        let held = self.buffers.hold(plan.memory());
        let mut source = Source::new(self.reader, Arc::new(plan), self.checked);
        source.held = Some(held);
        Ok(source)
    }
}

/// The object behind its header, piece by piece.
struct Source {
    reader: Reader,
    plan: Arc<Plan>,
    check: Option<Check>,
    stage: Stage,
    /// The span that is being read, and how far.
    span: usize,
    at: u64,
    /// Position of the next byte, counted from the first data byte of the object.
    position: u64,
    /// Memory of a plan that was made for this source alone.
    held: Option<Held>,
}

/// What comes next.
enum Stage {
    Data,
    Index,
    End,
}

impl Source {
    fn new(reader: Reader, plan: Arc<Plan>, checked: bool) -> Self {
        let at = reader.meta.spans.first().map_or(0, |span| span.start);
        let check = checked.then(|| Check::new(Arc::clone(&plan)));
        Self {
            reader,
            plan,
            check,
            stage: Stage::Data,
            span: 0,
            at,
            position: 0,
            held: None,
        }
    }

    /// The next piece; `None` after the last one.
    async fn next(&mut self) -> Result<Option<Bytes>, TransferError> {
        loop {
            match self.stage {
                Stage::Data => match self.data().await? {
                    Some(bytes) => return Ok(Some(bytes)),
                    None => self.stage = Stage::Index,
                },
                // Only now, with every chunk read and found unchanged where that is done here, may the body reach its full length.
                Stage::Index => {
                    self.stage = Stage::End;
                    return Ok(Some(self.plan.index.clone()));
                }
                Stage::End => return Ok(None),
            }
        }
    }

    /// The next data. Every buffer is filled before it is handed out, from several spans where they are short: a store may gather
    /// some before it goes on, and would wait for ever if all of the transfer's buffers held less than that.
    async fn data(&mut self) -> Result<Option<Bytes>, TransferError> {
        let meta = Arc::clone(&self.reader.meta);
        let spans = &meta.spans;
        if self.span == spans.len() {
            return Ok(None);
        }
        let mut buffer = self.reader.share.buffer(self.at).await;
        while let Some(span) = spans.get(self.span) {
            let (start, len) = (
                buffer.as_ref().len(),
                buffer.room_for(span.end.saturating_sub(self.at)),
            );
            buffer = self.reader.read(span, self.at, len, buffer).await?;
            self.take(&buffer.as_ref()[start..], len)?;
            self.at += len as u64;
            if self.at < span.end {
                break;
            }
            self.span += 1;
            self.at = spans.get(self.span).map_or(0, |span| span.start);
        }
        Ok(Some(buffer.into_bytes()))
    }

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

/// A body, from its first byte on.
enum Pieces {
    Header(Box<Unread>),
    /// Nothing is read for a store that takes the header, and answers that it is busy.
    Unread(Box<Unread>),
    Open(Box<Source>),
}

impl Pieces {
    /// The next one, and those that follow.
    async fn next(self) -> Result<Option<(Bytes, Self)>, TransferError> {
        let mut source = match self {
            Self::Header(unread) => {
                let header = Bytes::from_static(&OBJECT_HEADER);
                return Ok(Some((header, Self::Unread(unread))));
            }
            Self::Unread(unread) => Box::new(unread.open().await?),
            Self::Open(source) => source,
        };
        Ok(source
            .next()
            .await?
            .map(|bytes| (bytes, Self::Open(source))))
    }

    fn are_over(&self) -> bool {
        match self {
            Self::Header(_) | Self::Unread(_) => false,
            Self::Open(source) => matches!(source.stage, Stage::End),
        }
    }
}

/// The object as a body, read by whoever sends it, when there is room in the socket.
fn body(unread: Unread, sent: Weak<Sent>) -> ByteStream {
    let first = Pieces::Header(Box::new(unread));
    let pieces = stream::unfold(Some(first), move |pieces| {
        let sent = sent.clone();
        async move {
            let piece = caught_async(pieces?.next()).await;
            // An upload that nobody wants any more is not read to its end, even if its connection lives on for a while.
            let Some(sent) = sent.upgrade() else {
                return Some((Err(std::io::Error::other("cancelled")), None));
            };
            let error = match piece {
                Ok(Ok(Some((bytes, rest)))) => {
                    if rest.are_over() {
                        *sent.0.lock() = Some(Ok(()));
                    }
                    return Some((Ok(bytes), Some(rest)));
                }
                Ok(Ok(None)) => return None,
                Ok(Err(error)) => error,
                Err(text) => TransferError::Panic(text),
            };
            let text = error.to_string();
            *sent.0.lock() = Some(Err(error));
            // The error ends the body, so the store aborts the request.
            Some((Err(std::io::Error::other(text)), None))
        }
    });
    Box::pin(Exclusive(Mutex::new(Box::pin(pieces))))
}

/// Makes a stream fit for places that want `Sync`. The lock is never taken: whoever polls has it for itself.
struct Exclusive<S>(Mutex<Pin<Box<S>>>);

impl<S: Stream> Stream for Exclusive<S> {
    type Item = S::Item;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<S::Item>> {
        self.0.get_mut().as_mut().poll_next(cx)
    }
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
