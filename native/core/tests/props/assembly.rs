//! Assembly against a partition of the chunks made by hand.

use proptest::prelude::*;
use stream_s3_core::fragment::{Added, Assembly, Chunk, FragmentMeta, IndexRecord, Span};
use stream_s3_core::units::{Offset, TimestampMs};

use crate::config;

/// A gapless log of chunks in segments.
fn log() -> impl Strategy<Value = Vec<Chunk>> {
    let row = (
        1u32..5,
        0u32..200,
        0u64..30,
        prop::bool::weighted(0.1),
        any::<i32>(),
    );
    (0u64..100, prop::collection::vec(row, 0..80)).prop_map(|(start, rows)| {
        let (mut at, mut segment, mut position) = (start, start, 8);
        let mut chunks = Vec::new();
        for (num_records, data_size, overhead, roll, timestamp) in rows {
            if roll {
                (segment, position) = (at, 8);
            }
            let next_position = position + 48 + u64::from(data_size) + overhead;
            chunks.push(Chunk {
                chunk_id: Offset(at),
                timestamp: TimestampMs(i64::from(timestamp)),
                num_records,
                data_size,
                position,
                next_position,
                segment_offset: Offset(segment),
                crc: 0,
            });
            position = next_position;
            at += u64::from(num_records);
        }
        chunks
    })
}

fn expected(chunks: &[Chunk]) -> Option<(FragmentMeta, Vec<u8>)> {
    let (first, last) = (chunks.first()?, chunks.last()?);
    let mut spans: Vec<Span> = Vec::new();
    let mut index = Vec::new();
    let mut size = 0;
    for chunk in chunks {
        let position = u32::try_from(size).unwrap();
        let record = IndexRecord {
            chunk_id: chunk.chunk_id,
            timestamp: chunk.timestamp,
            position,
        };
        index.extend(record.encode());
        size += chunk.next_position - chunk.position;
        match spans.last_mut() {
            Some(span) if span.segment_offset == chunk.segment_offset => {
                span.end = chunk.next_position
            }
            _ => spans.push(Span {
                segment_offset: chunk.segment_offset,
                start: chunk.position,
                end: chunk.next_position,
            }),
        }
    }
    let meta = FragmentMeta {
        first_offset: first.chunk_id,
        first_timestamp: first.timestamp,
        last_timestamp: last.timestamp,
        next_offset: Offset(last.chunk_id.0 + u64::from(last.num_records)),
        size,
        num_chunks: u32::try_from(chunks.len()).unwrap(),
        spans,
    };
    Some((meta, index))
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn a_log_is_cut_into_fragments_that_reach_their_target(chunks in log(), target in 0u64..1_000, batch in 1usize..9) {
        let mut rest = &chunks[..];
        while let Some(first) = rest.first() {
            let mut assembly = Assembly::expecting(target, first.chunk_id);
            let mut taken = 0;
            while !assembly.is_cut() && taken < rest.len() {
                let upto = (taken + batch).min(rest.len());
                taken += assembly.add_all(&rest[taken..upto]).unwrap();
            }
            let (meta, index) = expected(&rest[..taken]).unwrap();
            prop_assert_eq!(assembly.metadata(), Some(meta));
            prop_assert_eq!(assembly.index_records(), index);
            let data = |chunks: &[Chunk]| chunks.iter().map(|chunk| u64::from(chunk.data_size)).sum::<u64>();
            prop_assert_eq!(assembly.is_cut(), data(&rest[..taken]) >= target);
            prop_assert!(taken == 1 || data(&rest[..taken - 1]) < target, "no later than needed");
            rest = &rest[taken..];
        }
    }

    #[test]
    fn batches_do_what_single_chunks_do(chunks in log(), target in 0u64..1_000) {
        let mut single = Assembly::new(target);
        let mut taken = 0;
        for chunk in &chunks {
            if single.add(chunk) == Ok(Added::Taken) {
                taken += 1;
            }
        }
        let mut batch = Assembly::new(target);
        prop_assert_eq!(batch.add_all(&chunks), Ok(taken));
        prop_assert_eq!(batch.info().num_chunks, single.info().num_chunks);
        prop_assert_eq!(batch.metadata(), single.metadata());
        prop_assert_eq!(batch.index_records(), single.index_records());
    }
}
