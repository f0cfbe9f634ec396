//! Bodies of known length, so that a request carries Content-Length and a signature that does not hash the payload.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use futures::Stream;
use http_body::{Body as HttpBody, Frame, SizeHint};

use crate::meter::Meter;
use crate::{Body, ByteStream};

/// Where a body leaves the error that stopped it: an HTTP client hands on a copy of its text at best.
#[derive(Debug, Clone, Default)]
pub(crate) struct Failed(Arc<Mutex<Option<io::Error>>>);

impl Failed {
    pub(crate) fn take(&self) -> Option<io::Error> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn set(&self, error: io::Error) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
    }
}

/// A stream that must yield exactly `left` bytes more. Bytes in memory go through it too: a client that sees them whole hashes them for
/// the signature.
pub(crate) struct SizedBody {
    stream: ByteStream,
    len: u64,
    left: u64,
    failed: Failed,
    meter: Meter,
}

impl SizedBody {
    pub(crate) fn new(body: Body, meter: Meter) -> (Self, Failed) {
        let (len, stream): (u64, ByteStream) = match body {
            Body::Bytes(bytes) => {
                let len = bytes.len() as u64;
                (
                    len,
                    Box::pin(futures::stream::iter((len > 0).then_some(Ok(bytes)))),
                )
            }
            Body::Stream { len, stream } => (len, stream),
        };
        let failed = Failed::default();
        (
            Self {
                stream,
                len,
                left: len,
                failed: failed.clone(),
                meter,
            },
            failed,
        )
    }

    /// Bytes of the whole body.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    fn fail(&mut self, error: io::Error) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let text = error.to_string();
        let kind = error.kind();
        self.failed.set(error);
        Poll::Ready(Some(Err(io::Error::new(kind, text))))
    }
}

impl HttpBody for SizedBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match self.stream.as_mut().poll_next(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Some(Ok(bytes))) => match self.left.checked_sub(bytes.len() as u64) {
                Some(left) => {
                    self.left = left;
                    self.meter.sent(bytes.len());
                    Poll::Ready(Some(Ok(Frame::data(bytes))))
                }
                None => {
                    let text = format!("the body has more than the announced {} bytes", self.len);
                    self.fail(io::Error::new(io::ErrorKind::InvalidData, text))
                }
            },
            Poll::Ready(Some(Err(error))) => self.fail(error),
            Poll::Ready(None) if self.left == 0 => Poll::Ready(None),
            Poll::Ready(None) => {
                let text = format!(
                    "the body ended {} bytes before the announced {}",
                    self.left, self.len
                );
                self.fail(io::Error::new(io::ErrorKind::UnexpectedEof, text))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

/// A stream that ends with an error where it yields fewer bytes than announced.
pub(crate) struct Announced<S> {
    inner: S,
    left: u64,
}

impl<S> Announced<S> {
    pub(crate) fn new(inner: S, len: u64) -> Self {
        Self { inner, left: len }
    }
}

impl<S: Stream<Item = io::Result<Bytes>> + Unpin> Stream for Announced<S> {
    type Item = io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        match Pin::new(&mut self.inner).poll_next(cx) {
            Poll::Ready(Some(Ok(bytes))) => match self.left.checked_sub(bytes.len() as u64) {
                Some(left) => {
                    self.left = left;
                    Poll::Ready(Some(Ok(bytes)))
                }
                None => Poll::Ready(Some(Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "the store sent more bytes than it announced",
                )))),
            },
            Poll::Ready(None) if self.left > 0 => {
                let text = format!(
                    "the store sent {} bytes less than it announced",
                    std::mem::take(&mut self.left)
                );
                Poll::Ready(Some(Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    text,
                ))))
            }
            Poll::Ready(None) => Poll::Ready(None),
            Poll::Ready(Some(Err(error))) => Poll::Ready(Some(Err(error))),
            Poll::Pending => Poll::Pending,
        }
    }
}
