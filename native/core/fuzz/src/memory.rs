//! Counts what is allocated, so that a decoder that trusts a length field is found out before the machine is out of memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Most that a decoder may hold at once: so many times the input, and a fixed sum for what even the smallest result takes. An entry takes 34
/// bytes stored and 48 in memory, and a vector that grows holds up to three times its content for a moment.
const TIMES: usize = 6;
const FIXED: usize = 16 << 10;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

fn grown(by: usize) {
    let live = LIVE.fetch_add(by, Relaxed) + by;
    PEAK.fetch_max(live, Relaxed);
}

// SAFETY: every call goes to the system's allocator as it came; counting touches nothing but two atomics.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grown(layout.size());
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Decodes, and panics where that took more memory than the input is worth. One thread at a time.
pub(crate) fn bounded<'i, T>(input: &'i [u8], decode: impl FnOnce(&'i [u8]) -> T) -> T {
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let decoded = decode(input);
    let peak = PEAK.load(Relaxed).saturating_sub(before);
    let most = TIMES * input.len() + FIXED;
    assert!(
        peak <= most,
        "{peak} bytes allocated for {} bytes of input, more than {most}",
        input.len()
    );
    decoded
}
