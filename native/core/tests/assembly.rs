//! Where fragments are cut, and what they say of themselves.

#![allow(clippy::disallowed_methods)]

use stream_s3_core::fragment::{
    Added, Assembly, AssemblyError, AssemblyInfo, Chunk, Fragment, FragmentMeta, MAX_CHUNKS, Span,
    decode_index,
};
use stream_s3_core::units::{Offset, TimestampMs};

const HEADER: u64 = 48;

/// Chunks of ten records, one after the other in one segment.
struct Log {
    next: u64,
    position: u64,
    segment: u64,
}

impl Log {
    fn at(next: u64) -> Self {
        Self {
            next,
            position: 8,
            segment: next,
        }
    }

    fn roll(&mut self) {
        (self.segment, self.position) = (self.next, 8);
    }

    fn chunk(&mut self, data_size: u32) -> Chunk {
        self.chunk_of(data_size, HEADER + u64::from(data_size))
    }

    fn chunk_of(&mut self, data_size: u32, len: u64) -> Chunk {
        let chunk = Chunk {
            chunk_id: Offset(self.next),
            timestamp: TimestampMs(i64::try_from(self.next).unwrap() * 10),
            num_records: 10,
            data_size,
            position: self.position,
            next_position: self.position + len,
            segment_offset: Offset(self.segment),
            crc: 0,
        };
        self.next += 10;
        self.position += len;
        chunk
    }
}

fn span(segment: u64, start: u64, end: u64) -> Span {
    Span {
        segment_offset: Offset(segment),
        start,
        end,
    }
}

#[test]
fn an_assembly_begins_empty() {
    let assembly = Assembly::expecting(100, Offset(7));
    assert_eq!(assembly.metadata(), None);
    assert!(!assembly.is_cut());
    assert_eq!(assembly.index_records(), Vec::<u8>::new());
    assert_eq!(
        assembly.info(),
        AssemblyInfo {
            target: 100,
            expected: Some(Offset(7)),
            is_cut: false,
            data_size: 0,
            size: 0,
            num_chunks: 0,
            first_offset: None,
            next_offset: None,
        }
    );
}

#[test]
fn a_fragment_is_cut_when_its_data_reaches_the_target() {
    let mut log = Log::at(0);
    let mut assembly = Assembly::expecting(100, Offset(0));
    assert_eq!(assembly.add(&log.chunk(99)), Ok(Added::Taken));
    assert!(!assembly.is_cut());
    assert_eq!(assembly.add(&log.chunk(1)), Ok(Added::Taken));
    assert!(assembly.is_cut());
    assert_eq!(assembly.add(&log.chunk(1)), Ok(Added::Left));
    assert_eq!(
        assembly.metadata(),
        Some(FragmentMeta {
            first_offset: Offset(0),
            first_timestamp: TimestampMs(0),
            last_timestamp: TimestampMs(100),
            next_offset: Offset(20),
            size: 100 + 2 * HEADER,
            num_chunks: 2,
            spans: vec![span(0, 8, 8 + 100 + 2 * HEADER)],
        })
    );
}

#[test]
fn a_chunk_larger_than_the_target_is_a_fragment_alone() {
    let mut log = Log::at(0);
    let mut assembly = Assembly::new(100);
    assert_eq!(assembly.add(&log.chunk(1_000)), Ok(Added::Taken));
    assert!(assembly.is_cut());
    assert_eq!(assembly.metadata().unwrap().num_chunks, 1);
}

#[test]
fn what_counts_towards_the_target_is_data_and_what_counts_as_size_is_everything() {
    let mut log = Log::at(0);
    let mut assembly = Assembly::new(100);
    assert_eq!(assembly.add(&log.chunk_of(10, 5_000)), Ok(Added::Taken));
    assert!(!assembly.is_cut());
    let info = assembly.info();
    assert_eq!((info.data_size, info.size), (10, 5_000));
}

#[test]
fn adding_many_stops_at_a_cut_and_leaves_the_rest() {
    let mut log = Log::at(0);
    let chunks: Vec<_> = (0..10).map(|_| log.chunk(30)).collect();
    let mut assembly = Assembly::expecting(100, Offset(0));
    assert_eq!(assembly.add_all(&chunks), Ok(4));
    assert!(assembly.is_cut());
    let mut next = Assembly::expecting(100, assembly.metadata().unwrap().next_offset);
    assert_eq!(next.add_all(&chunks[4..]), Ok(4));
    assert_eq!(assembly.add_all(&chunks[4..]), Ok(0));
}

#[test]
fn a_span_ends_where_the_segment_does() {
    let mut log = Log::at(0);
    let mut assembly = Assembly::expecting(1_000, Offset(0));
    for _ in 0..2 {
        assert_eq!(assembly.add(&log.chunk(52)), Ok(Added::Taken));
    }
    log.roll();
    for _ in 0..2 {
        assert_eq!(assembly.add(&log.chunk(52)), Ok(Added::Taken));
    }
    let meta = assembly.metadata().unwrap();
    assert_eq!(meta.spans, [span(0, 8, 208), span(20, 8, 208)]);
    assert_eq!(meta.size, meta.spans.iter().map(Span::size).sum::<u64>());
}

#[test]
fn chunks_that_do_not_touch_are_spans_of_their_own() {
    let mut log = Log::at(0);
    let mut assembly = Assembly::new(1_000);
    assert_eq!(assembly.add(&log.chunk(52)), Ok(Added::Taken));
    log.position += 1;
    assert_eq!(assembly.add(&log.chunk(52)), Ok(Added::Taken));
    assert_eq!(
        assembly.metadata().unwrap().spans,
        [span(0, 8, 108), span(0, 109, 209)]
    );
}

/// INV-4: osiris' reader skips what is no longer there without a word.
#[test]
fn a_gap_is_named_and_changes_nothing() {
    let mut log = Log::at(0);
    let mut assembly = Assembly::expecting(1_000, Offset(0));
    assert_eq!(assembly.add(&log.chunk(10)), Ok(Added::Taken));
    let before = assembly.info();
    let _lost = log.chunk(10);
    let gap = AssemblyError::Gap {
        expected: Offset(10),
        got: Offset(20),
    };
    assert_eq!(assembly.add(&log.chunk(10)), Err(gap));
    assert_eq!(assembly.info(), before);
    let again = Log::at(0).chunk(10);
    let back = AssemblyError::Gap {
        expected: Offset(10),
        got: Offset(0),
    };
    assert_eq!(assembly.add_all(&[again]), Err(back));
}

#[test]
fn without_an_expectation_chunks_are_taken_as_they_come() {
    let mut assembly = Assembly::new(1_000);
    assert_eq!(assembly.add(&Log::at(50).chunk(10)), Ok(Added::Taken));
    assert_eq!(assembly.add(&Log::at(10).chunk(10)), Ok(Added::Taken));
    let meta = assembly.metadata().unwrap();
    assert_eq!(
        (meta.first_offset, meta.next_offset),
        (Offset(50), Offset(20))
    );
}

#[test]
fn a_chunk_that_ends_before_it_starts_is_refused() {
    let chunk = Chunk {
        next_position: 7,
        ..Log::at(0).chunk(10)
    };
    let mut assembly = Assembly::new(1_000);
    let error = AssemblyError::Backwards {
        chunk_id: Offset(0),
        start: 8,
        end: 7,
    };
    assert_eq!(assembly.add(&chunk), Err(error));
    assert_eq!(assembly.metadata(), None);
}

#[test]
fn a_fragment_is_cut_before_its_data_passes_the_positions_of_its_index() {
    const HALF: u64 = 1 << 31;
    let mut log = Log::at(0);
    let mut assembly = Assembly::expecting(u64::MAX, Offset(0));
    let first = log.chunk_of(1, HALF);
    let fits = log.chunk_of(1, HALF);
    let over = log.chunk_of(1, 1);
    assert_eq!(assembly.add_all(&[first, fits, over.clone()]), Ok(2));
    assert!(assembly.is_cut());
    assert_eq!(assembly.metadata().unwrap().size, 1 << 32);
    assert_eq!(assembly.add(&over), Ok(Added::Left));
}

#[test]
fn a_chunk_that_would_pass_the_positions_is_left_and_cuts() {
    let mut log = Log::at(0);
    let mut assembly = Assembly::expecting(u64::MAX, Offset(0));
    assert_eq!(assembly.add(&log.chunk_of(1, 100)), Ok(Added::Taken));
    let large = log.chunk_of(1, 1 << 32);
    assert_eq!(assembly.add(&large), Ok(Added::Left));
    assert!(assembly.is_cut());
    assert_eq!(assembly.metadata().unwrap().next_offset, Offset(10));
    let mut next = Assembly::expecting(u64::MAX, Offset(10));
    assert_eq!(
        next.add(&large),
        Ok(Added::Taken),
        "alone it starts at position 0"
    );
}

#[test]
fn a_first_chunk_has_position_zero_whatever_its_length() {
    let mut assembly = Assembly::new(u64::MAX);
    let huge = Log::at(0).chunk_of(1, (1 << 32) + 1);
    assert_eq!(assembly.add(&huge), Ok(Added::Taken));
    assert_eq!(assembly.metadata().unwrap().size, (1 << 32) + 1);
}

#[test]
fn chunks_of_two_segments_are_two_spans_even_where_positions_touch() {
    let mut log = Log::at(0);
    let mut assembly = Assembly::new(1_000);
    assert_eq!(assembly.add(&log.chunk(52)), Ok(Added::Taken));
    log.segment = 7;
    assert_eq!(assembly.add(&log.chunk(52)), Ok(Added::Taken));
    let spans = assembly.metadata().unwrap().spans;
    assert_eq!(spans, [span(0, 8, 108), span(7, 108, 208)]);
}

#[test]
fn a_fragment_is_cut_at_its_largest_number_of_chunks() {
    let mut log = Log::at(0);
    let chunks: Vec<_> = (0..=MAX_CHUNKS).map(|_| log.chunk(1)).collect();
    let mut assembly = Assembly::expecting(u64::MAX, Offset(0));
    assert_eq!(assembly.add_all(&chunks), Ok(262_144));
    assert!(assembly.is_cut());
    assert_eq!(assembly.index_records().len(), 262_144 * 20);
}

#[test]
fn the_index_follows_the_chunks() {
    let mut log = Log::at(0);
    let mut assembly = Assembly::expecting(1_000, Offset(0));
    for size in [52, 152] {
        assert_eq!(assembly.add(&log.chunk(size)), Ok(Added::Taken));
    }
    log.roll();
    assert_eq!(assembly.add(&log.chunk(10)), Ok(Added::Taken));
    let index = decode_index(&assembly.index_records()).unwrap();
    let rows: Vec<_> = index
        .iter()
        .map(|row| (row.chunk_id.0, row.timestamp.0, row.position))
        .collect();
    assert_eq!(rows, [(0, 0, 0), (10, 100, 100), (20, 200, 300)]);
}

#[test]
fn an_older_state_goes_its_own_way() {
    let mut log = Log::at(0);
    let mut one = Assembly::expecting(1_000, Offset(0));
    assert_eq!(one.add(&log.chunk(10)), Ok(Added::Taken));
    let mut other = one.clone();
    assert_eq!(one.add(&log.chunk(10)), Ok(Added::Taken));
    assert_eq!(
        other.add(&Chunk {
            timestamp: TimestampMs(7),
            ..Log::at(10).chunk(20)
        }),
        Ok(Added::Taken)
    );
    assert_eq!(one.metadata().unwrap().last_timestamp, TimestampMs(100));
    assert_eq!(other.metadata().unwrap().last_timestamp, TimestampMs(7));
    assert_eq!(one.index_records()[..20], other.index_records()[..20]);
    assert_ne!(one.index_records(), other.index_records());
}

#[test]
fn a_fragment_is_what_the_manifest_needs_of_it() {
    let mut assembly = Assembly::new(1_000);
    assert_eq!(assembly.add(&Log::at(30).chunk(52)), Ok(Added::Taken));
    assert_eq!(
        assembly.metadata().unwrap().fragment(),
        Fragment {
            first_offset: Offset(30),
            next_offset: Offset(40),
            first_timestamp: TimestampMs(300),
            last_timestamp: TimestampMs(300),
            size: 100,
        }
    );
}
