//! The memory through which uploads flow.
//!
//! A transfer holds at most [`BUFFERS_PER_TRANSFER`] buffers of [`BUFFER_SIZE`] bytes, whatever the size of its fragment:
//! one that the store is sending, one that is being filled. Smaller buffers would mean more hops between threads,
//! larger ones gain nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes of one buffer.
pub const BUFFER_SIZE: usize = 1 << 20;
/// Buffers that one transfer holds at most.
pub const BUFFERS_PER_TRANSFER: usize = 2;
/// Buffers that are kept for reuse; any beyond that go back to the allocator.
const KEPT: usize = 16;

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

/// Memory of [`BUFFER_SIZE`] bytes, of which the first `len` are in use. Goes back to the pool when dropped.
#[derive(Debug)]
pub(crate) struct Buffer {
    data: Box<[u8]>,
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
        let kept = self.shared.free.lock().len() * BUFFER_SIZE;
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
    /// An empty buffer; waits while the transfer holds its full share.
    pub(crate) async fn buffer(&self) -> Buffer {
        let Ok(permit) = Arc::clone(&self.permits).acquire_owned().await else {
            unreachable!("the semaphore of a share is never closed");
        };
        let kept = self.pool.shared.free.lock().pop();
        let data = kept.unwrap_or_else(|| vec![0; BUFFER_SIZE].into_boxed_slice());
        Buffer {
            data,
            len: 0,
            held: self.pool.hold(BUFFER_SIZE as u64),
            _permit: permit,
        }
    }
}

impl Buffer {
    /// The memory that is not in use yet.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        &mut self.data[self.len..]
    }

    /// How many of `bytes` there is room for.
    pub(crate) fn room_for(&self, bytes: u64) -> usize {
        let room = self.data.len() - self.len;
        usize::try_from(bytes).map_or(room, |bytes| bytes.min(room))
    }

    /// Whether there is no room left.
    pub(crate) fn is_full(&self) -> bool {
        self.len == self.data.len()
    }

    /// Takes so many bytes of the room into use.
    pub(crate) fn advance(&mut self, bytes: usize) {
        self.len = (self.len + bytes).min(self.data.len());
    }

    /// Makes all of it room again.
    pub(crate) fn clear(&mut self) {
        self.len = 0;
    }

    /// The bytes in use, without a copy; the buffer goes back when the last clone is dropped.
    pub(crate) fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        &self.data[..self.len]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut free = self.held.shared.free.lock();
        if free.len() < KEPT {
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
        let (one, two) = (a.buffer().await, a.buffer().await);
        assert!(futures::poll!(std::pin::pin!(a.buffer())).is_pending());
        let other = b.buffer().await;
        assert_eq!(pool.bytes_held(), 3 * BUFFER_SIZE as u64);
        drop(one);
        let again = a.buffer().await;
        drop((two, again, other));
        assert_eq!(pool.shared.held.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn bytes_give_their_buffer_back_with_the_last_clone() {
        let pool = BufferPool::default();
        let mut buffer = pool.share().buffer().await;
        buffer.room()[..3].copy_from_slice(b"abc");
        buffer.advance(3);
        let bytes = buffer.into_bytes();
        let tail = bytes.slice(1..);
        drop(bytes);
        assert_eq!(&tail[..], b"bc");
        assert_eq!(pool.shared.held.load(Ordering::Relaxed), BUFFER_SIZE as u64);
        drop(tail);
        assert_eq!(pool.shared.held.load(Ordering::Relaxed), 0);
        assert_eq!(pool.bytes_held(), BUFFER_SIZE as u64, "kept for reuse");
    }
}
