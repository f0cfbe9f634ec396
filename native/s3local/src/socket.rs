//! A connection that can be made to end by a reset.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// Says how a connection ends. Shared by everything that works on it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ending(Arc<AtomicBool>);

impl Ending {
    /// When the socket is closed, the peer sees a reset instead of an ordinary end.
    pub(crate) fn reset(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub(crate) fn is_reset(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// A TCP connection with its ending.
pub(crate) struct Socket {
    stream: TcpStream,
    ending: Ending,
}

impl Socket {
    pub(crate) fn new(stream: TcpStream, ending: Ending) -> Self {
        Self { stream, ending }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if self.ending.is_reset()
            && let Err(error) = self.stream.set_zero_linger()
        {
            tracing::warn!(%error, "cannot end a connection by a reset");
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.ending.is_reset() {
            // An orderly end now would forestall the reset.
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
