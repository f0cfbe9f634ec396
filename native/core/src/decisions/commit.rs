//! Whether a chunk may leave the local log.

use crate::units::Offset;

/// Whether the chunk is committed, where `committed` is the id of the last committed chunk, or -1 where none is known to be. It
/// is an id and not an offset: a committed chunk is committed with all its records. A value below what was tiered before is no error: a
/// new writer begins at -1 and learns.
#[must_use]
pub fn chunk_is_committed(chunk_id: Offset, committed: i64) -> bool {
    u64::try_from(committed).is_ok_and(|committed| chunk_id.0 <= committed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_committed_up_to_and_including_the_committed_id() {
        assert!(chunk_is_committed(Offset(0), 0));
        assert!(chunk_is_committed(Offset(3), 3));
        assert!(!chunk_is_committed(Offset(4), 3));
    }

    #[test]
    fn nothing_is_committed_at_minus_one() {
        assert!(!chunk_is_committed(Offset(0), -1));
        assert!(!chunk_is_committed(Offset(u64::MAX), i64::MIN));
    }
}
