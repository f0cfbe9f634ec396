//! Lengths and checksums of objects that no store has taken yet.
//!
//! To know them takes a look at every chunk: thousands of reads a fragment. Without this, a store that cannot be reached would ask for them with each attempt,
//! and take that time from the writer beside it.

use std::collections::VecDeque;

use parking_lot::Mutex;
use stream_s3_core::key::StreamId;
use stream_s3_core::units::Offset;

use crate::integrity::Plan;
use crate::transfer::Fragment;

/// Fragments that are remembered, those that failed last; the others are looked at again. About 100 bytes each.
const REMEMBERED: usize = 1024;

/// What an object will be like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Checksum {
    /// Bytes of the whole object.
    pub(crate) len: u64,
    /// CRC-32 of the whole object.
    pub(crate) crc: u32,
}

impl From<&Plan> for Checksum {
    fn from(plan: &Plan) -> Self {
        Self {
            len: plan.object_len,
            crc: plan.object_crc,
        }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Checksums(Mutex<VecDeque<(Name, Checksum)>>);

/// Chunks of a stream. After an election the same offsets may be other chunks: whoever uses what is remembered compares it in the end.
#[derive(Debug, PartialEq, Eq)]
struct Name {
    stream: StreamId,
    first: Offset,
    next: Offset,
}

impl Name {
    fn of(fragment: &Fragment) -> Self {
        Self {
            stream: fragment.stream.clone(),
            first: fragment.meta.first_offset,
            next: fragment.meta.next_offset,
        }
    }
}

impl Checksums {
    /// Remembers a fragment whose upload has failed.
    pub(crate) fn keep(&self, fragment: &Fragment, checksum: Checksum) {
        let mut all = self.0.lock();
        if all.len() == REMEMBERED {
            all.pop_front();
        }
        all.push_back((Name::of(fragment), checksum));
    }

    /// What is remembered of a fragment, and forgets it.
    pub(crate) fn take(&self, fragment: &Fragment) -> Option<Checksum> {
        let name = Name::of(fragment);
        let mut all = self.0.lock();
        let at = all.iter().position(|(other, _)| *other == name)?;
        all.remove(at).map(|(_, checksum)| checksum)
    }
}

#[cfg(test)]
mod tests {
    use stream_s3_core::fragment::FragmentMeta;
    use stream_s3_core::units::TimestampMs;

    use super::*;

    fn fragment(first: u64) -> Fragment {
        Fragment {
            stream: StreamId::parse("stream").expect("an id"),
            dir: "dir".into(),
            meta: FragmentMeta {
                first_offset: Offset(first),
                first_timestamp: TimestampMs(0),
                last_timestamp: TimestampMs(0),
                next_offset: Offset(first + 1),
                size: 0,
                num_chunks: 1,
                spans: Vec::new(),
            },
        }
    }

    #[test]
    fn what_failed_last_is_remembered_once_and_no_more_than_fits() {
        let checksums = Checksums::default();
        let checksum = |first: u64| Checksum { len: first, crc: 7 };
        for first in 0..=REMEMBERED as u64 {
            checksums.keep(&fragment(first), checksum(first));
        }
        assert_eq!(checksums.take(&fragment(0)), None);
        assert_eq!(checksums.take(&fragment(1)), Some(checksum(1)));
        assert_eq!(checksums.take(&fragment(1)), None);
        let last = REMEMBERED as u64;
        assert_eq!(checksums.take(&fragment(last)), Some(checksum(last)));
    }
}
