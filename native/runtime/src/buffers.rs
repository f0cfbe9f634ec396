//! The memory through which uploads flow.
//!
//! A transfer holds at most [`BUFFERS_PER_TRANSFER`] buffers of [`BUFFER_SIZE`] bytes, whatever the size of its fragment.
//! A buffer fits into a core's own cache, so what has been copied out of the page cache is still there when it is copied into the
//! socket; with a mebibyte both copies went through memory. A few of them let the socket drain while the next one is filled.

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::sync::{AtomicU64, Mutex, Ordering};

/// Bytes that one buffer takes from files.
pub const BUFFER_SIZE: usize = 256 << 10;
/// Alignment of buffers. The copy out of the page cache is several times slower into memory whose place in its page is a few bytes behind
/// that of the source in its own (the processor takes the two for overlapping), and segments begin with 8 bytes of header.
const PAGE: usize = 4096;
/// Bytes of memory that a buffer takes, so that it can begin anywhere in an aligned page.
pub const BUFFER_MEMORY: usize = BUFFER_SIZE + 2 * PAGE;
/// Buffers that one transfer holds at most.
pub const BUFFERS_PER_TRANSFER: usize = 4;
/// Buffers that are kept for reuse; any beyond that go back to the allocator.
pub const BUFFERS_KEPT: usize = 64;

/// Buffers of all transfers of a governor. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct BufferPool {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    free: Mutex<Vec<Box<[u8]>>>,
    held: AtomicU64,
}

/// The share of one transfer in the pool.
#[derive(Clone, Debug)]
pub(crate) struct Share {
    pool: BufferPool,
    permits: Arc<Semaphore>,
}

/// Memory of [`BUFFER_SIZE`] bytes from `start` on, of which the first `len` are in use. Goes back to the pool when dropped.
#[derive(Debug)]
pub(crate) struct Buffer {
    data: Box<[u8]>,
    start: usize,
    len: usize,
    held: Held,
    _permit: OwnedSemaphorePermit,
}

/// Counts bytes as held until it is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    shared: Arc<Shared>,
    bytes: u64,
}

impl BufferPool {
    /// Bytes held for transfers right now: buffers in use, buffers kept for reuse, index records.
    #[must_use]
    pub fn bytes_held(&self) -> u64 {
        let kept = self.shared.free.lock().len() * BUFFER_MEMORY;
        self.shared.held.load(Ordering::Relaxed) + kept as u64
    }

    pub(crate) fn share(&self) -> Share {
        Share {
            pool: self.clone(),
            permits: Arc::new(Semaphore::new(BUFFERS_PER_TRANSFER)),
        }
    }

    /// Counts `bytes` that a transfer holds outside of buffers.
    pub(crate) fn hold(&self, bytes: u64) -> Held {
        self.shared.held.fetch_add(bytes, Ordering::Relaxed);
        Held {
            shared: Arc::clone(&self.shared),
            bytes,
        }
    }
}

impl Share {
    /// An empty buffer for bytes that come from `position` of a file; waits while the transfer holds its full share.
    pub(crate) async fn buffer(&self, position: u64) -> Buffer {
        let Ok(permit) = Arc::clone(&self.permits).acquire_owned().await else {
            unreachable!("the semaphore of a share is never closed");
        };
        let kept = self.pool.shared.free.lock().pop();
        let data = kept.unwrap_or_else(|| vec![0; BUFFER_MEMORY].into_boxed_slice());
        // At the same place in a page as the source.
        let start = data.as_ptr().align_offset(PAGE) + (position % PAGE as u64) as usize;
        Buffer {
            data,
            start,
            len: 0,
            held: self.pool.hold(BUFFER_MEMORY as u64),
            _permit: permit,
        }
    }
}

impl Buffer {
    /// The memory that is not in use yet.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        &mut self.data[self.start + self.len..self.start + BUFFER_SIZE]
    }

    /// How many of `bytes` there is room for.
    pub(crate) fn room_for(&self, bytes: u64) -> usize {
        let room = BUFFER_SIZE - self.len;
        usize::try_from(bytes).map_or(room, |bytes| bytes.min(room))
    }

    /// Takes so many bytes of the room into use.
    pub(crate) fn advance(&mut self, bytes: usize) {
        self.len = (self.len + bytes).min(BUFFER_SIZE);
    }

    /// The bytes in use, without a copy; the buffer goes back when the last clone is dropped.
    pub(crate) fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.data[self.start..self.start + self.len]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut free = self.held.shared.free.lock();
        if free.len() < BUFFERS_KEPT {
            free.push(std::mem::take(&mut self.data));
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.shared.held.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_transfer_waits_for_its_own_buffers_not_for_those_of_others() {
        let pool = BufferPool::default();
        let (a, b) = (pool.share(), pool.share());
        let mut all = Vec::new();
        while all.len() < BUFFERS_PER_TRANSFER {
            all.push(a.buffer(8).await);
        }
        assert!(futures::poll!(std::pin::pin!(a.buffer(8))).is_pending());
        let other = b.buffer(8).await;
        let held = (BUFFERS_PER_TRANSFER + 1) * BUFFER_MEMORY;
        assert_eq!(pool.bytes_held(), held as u64);
        all.pop();
        let again = a.buffer(8).await;
        drop((all, again, other));
        assert_eq!(pool.shared.held.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn bytes_give_their_buffer_back_with_the_last_clone() {
        let pool = BufferPool::default();
        let mut buffer = pool.share().buffer(8).await;
        buffer.room()[..3].copy_from_slice(b"abc");
        buffer.advance(3);
        let bytes = buffer.into_bytes();
        let tail = bytes.slice(1..);
        drop(bytes);
        assert_eq!(&tail[..], b"bc");
        assert_eq!(
            pool.shared.held.load(Ordering::Relaxed),
            BUFFER_MEMORY as u64
        );
        drop(tail);
        assert_eq!(pool.shared.held.load(Ordering::Relaxed), 0);
        assert_eq!(pool.bytes_held(), BUFFER_MEMORY as u64, "kept for reuse");
    }
}
