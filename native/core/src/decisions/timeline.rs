//! Whether tier and log tell the same story, where their offsets would fit.

use crate::chunk::ChunkHeader;
use crate::units::{Epoch, Offset};

/// What tells two chunks at the same place apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkIdentity {
    /// Offset of its first record.
    pub chunk_id: Offset,
    /// Term of the writer that wrote it.
    pub epoch: Epoch,
    /// CRC-32/IEEE of its data.
    pub crc: u32,
}

impl From<&ChunkHeader> for ChunkIdentity {
    fn from(header: &ChunkHeader) -> Self {
        Self {
            chunk_id: header.chunk_id,
            epoch: header.epoch,
            crc: header.crc,
        }
    }
}

/// What the local log has where the tier's newest chunk should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LocalChunk {
    /// A chunk begins there.
    Found(ChunkIdentity),
    /// The offset is in the log, but inside another chunk.
    InsideAnother,
    /// The log begins later.
    Trimmed,
}

/// What the comparison says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timeline {
    /// The tier is a prefix of the log.
    Same,
    /// It is not: another writer's records were tiered, and truncated here.
    Different,
    /// Nothing contradicts it, and nothing is left to compare.
    Unverifiable,
}

/// Compares the tier's newest chunk with the log.
#[must_use]
pub fn check_timeline(remote: &ChunkIdentity, local: &LocalChunk) -> Timeline {
    match local {
        LocalChunk::Found(found) if found == remote => Timeline::Same,
        LocalChunk::Found(_) | LocalChunk::InsideAnother => Timeline::Different,
        LocalChunk::Trimmed => Timeline::Unverifiable,
    }
}

/// Compares a tier with what the log has where the tier ends, for what [`check_timeline`] cannot tell: the log has trimmed the newest chunk, or an
/// empty tier has none (`newest` is `None`). A log whose chunk reaches across the tier's end was not the one that was tiered, nor is one
/// whose next chunk is of an earlier epoch, because epochs ascend. Without this a reader would try for ever to open a log at an offset
/// where no chunk begins.
#[must_use]
pub fn check_continuation(newest: Option<&ChunkIdentity>, next: &LocalChunk) -> Timeline {
    match next {
        LocalChunk::InsideAnother => Timeline::Different,
        LocalChunk::Found(found) if newest.is_some_and(|newest| found.epoch < newest.epoch) => {
            Timeline::Different
        }
        // `Trimmed` is also the end of the log.
        LocalChunk::Found(_) | LocalChunk::Trimmed => Timeline::Unverifiable,
    }
}

/// Compares where a tier ends, exclusive, with where a log begins that has trimmed the tier's newest chunk. That chunk reaches up to `end`, so a log
/// that begins in front of `end` has another chunk in its place. For a tier with entries, where [`check_timeline`] cannot tell.
#[must_use]
pub fn check_beginning(end: Offset, first: Option<Offset>) -> Timeline {
    match first {
        Some(first) if first < end => Timeline::Different,
        Some(_) | None => Timeline::Unverifiable,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: ChunkIdentity = ChunkIdentity {
        chunk_id: Offset(9),
        epoch: Epoch(2),
        crc: 7,
    };

    #[test]
    fn an_equal_chunk_is_the_same_timeline() {
        assert_eq!(
            check_timeline(&CHUNK, &LocalChunk::Found(CHUNK)),
            Timeline::Same
        );
    }

    #[test]
    fn another_id_epoch_or_checksum_is_another_timeline() {
        for other in [
            ChunkIdentity {
                chunk_id: Offset(8),
                ..CHUNK
            },
            ChunkIdentity {
                epoch: Epoch(3),
                ..CHUNK
            },
            ChunkIdentity { crc: 8, ..CHUNK },
        ] {
            assert_eq!(
                check_timeline(&CHUNK, &LocalChunk::Found(other)),
                Timeline::Different
            );
        }
        assert_eq!(
            check_timeline(&CHUNK, &LocalChunk::InsideAnother),
            Timeline::Different
        );
    }

    #[test]
    fn a_trimmed_log_cannot_tell() {
        assert_eq!(
            check_timeline(&CHUNK, &LocalChunk::Trimmed),
            Timeline::Unverifiable
        );
    }

    #[test]
    fn a_chunk_across_the_end_of_the_tier_is_another_timeline() {
        assert_eq!(
            check_continuation(Some(&CHUNK), &LocalChunk::InsideAnother),
            Timeline::Different
        );
        assert_eq!(
            check_continuation(None, &LocalChunk::InsideAnother),
            Timeline::Different
        );
    }

    #[test]
    fn what_follows_the_tier_is_of_no_earlier_epoch() {
        let next = |epoch| {
            LocalChunk::Found(ChunkIdentity {
                chunk_id: Offset(12),
                epoch: Epoch(epoch),
                crc: 0,
            })
        };
        assert_eq!(
            check_continuation(Some(&CHUNK), &next(1)),
            Timeline::Different
        );
        assert_eq!(
            check_continuation(Some(&CHUNK), &next(2)),
            Timeline::Unverifiable
        );
        assert_eq!(
            check_continuation(Some(&CHUNK), &next(3)),
            Timeline::Unverifiable
        );
        assert_eq!(check_continuation(None, &next(0)), Timeline::Unverifiable);
    }

    #[test]
    fn a_log_that_ends_with_the_tier_cannot_tell() {
        assert_eq!(
            check_continuation(Some(&CHUNK), &LocalChunk::Trimmed),
            Timeline::Unverifiable
        );
    }

    #[test]
    fn a_log_that_begins_inside_the_newest_chunk_is_another_timeline() {
        assert_eq!(
            check_beginning(Offset(12), Some(Offset(11))),
            Timeline::Different
        );
        assert_eq!(
            check_beginning(Offset(12), Some(Offset(12))),
            Timeline::Unverifiable
        );
        assert_eq!(check_beginning(Offset(12), None), Timeline::Unverifiable);
    }
}
