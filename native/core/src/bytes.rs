//! Reading big-endian integers at fixed places of a slice that is known to be long enough.

/// The `N` bytes at `at`. Bytes beyond the slice read as zero: callers check the length first, and a panic would take a
/// node's stream down for a damaged object.
pub(crate) fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    debug_assert!(
        at + N <= bytes.len(),
        "the length is checked before fields are read"
    );
    let mut out = [0; N];
    if let Some(found) = bytes.get(at..at + N) {
        out.copy_from_slice(found);
    }
    out
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(array(bytes, at))
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(array(bytes, at))
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(array(bytes, at))
}

pub(crate) fn i64_at(bytes: &[u8], at: usize) -> i64 {
    i64::from_be_bytes(array(bytes, at))
}

/// The 40 bits at `at`.
pub(crate) fn u40_at(bytes: &[u8], at: usize) -> u64 {
    let mut wide = [0; 8];
    wide[3..].copy_from_slice(&array::<5>(bytes, at));
    u64::from_be_bytes(wide)
}

/// The 72 bits at `at`.
pub(crate) fn u72_at(bytes: &[u8], at: usize) -> u128 {
    let mut wide = [0; 16];
    wide[7..].copy_from_slice(&array::<9>(bytes, at));
    u128::from_be_bytes(wide)
}
