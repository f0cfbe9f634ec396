//! The hot paths by the clock, with criterion's statistics: `cargo bench -p stream_s3_core --bench core`. Names are those of
//! `docs/benchmarks.md`; `make bench-core` runs them together with the same through the library. `cost.rs` beside this has every call, once.

// `criterion_group!` makes a function without documentation.
#![allow(missing_docs, clippy::disallowed_methods, clippy::disallowed_types)]

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use stream_s3_core::fragment::{Assembly, Chunk, Fragment};
use stream_s3_core::manifest::{
    Entry, EntryKind, Manifest, decode_root, encode_root, lookup_offset, lookup_timestamp,
};
use stream_s3_core::replica_reader::{Machine, Options};
use stream_s3_core::units::{Epoch, Offset, Revision, TimestampMs, TransferId, Uid};

/// A root of a stream with the default threshold of 1,024 never has more entries.
const LARGEST_ROOT: u64 = 4_092;

fn chunks(count: u64) -> Vec<Chunk> {
    (0..count)
        .map(|number| Chunk {
            chunk_id: Offset(number),
            timestamp: TimestampMs(1_700_000_000_000),
            num_records: 1,
            data_size: 100,
            position: 8 + number * 148,
            next_position: 8 + (number + 1) * 148,
            segment_offset: Offset(0),
            crc: 0,
        })
        .collect()
}

fn manifest(entries: u64) -> Manifest {
    let entry = |number| Entry {
        first_offset: Offset(number * 10),
        first_timestamp: TimestampMs(1_000 + 10 * number as i64),
        last_timestamp: TimestampMs(1_009 + 10 * number as i64),
        kind: EntryKind::Fragment,
        size: 1_000,
        uid: Uid(1),
    };
    Manifest {
        first_timestamp: TimestampMs(1_000),
        first_last_timestamp: TimestampMs(1_009),
        next_offset: Offset(entries * 10),
        total_size: u128::from(entries) * 1_000,
        revision: Revision(1),
        entries: (0..entries).map(entry).collect(),
        ..Manifest::default()
    }
}

fn machine(entries: u64, persist_threshold: u64) -> Machine<u64> {
    let options = Options {
        epoch: Epoch(1),
        persist_threshold,
        persist_interval_ms: 2_000,
        rebalance_threshold: 1 << 30,
    };
    Machine::init(manifest(entries), options, TimestampMs(0))
        .expect("valid options")
        .0
}

fn fragment(number: u64) -> Fragment {
    Fragment {
        first_offset: Offset(number * 10),
        next_offset: Offset(number * 10 + 10),
        first_timestamp: TimestampMs(0),
        last_timestamp: TimestampMs(9),
        size: 1_000,
    }
}

fn assembly(c: &mut Criterion) {
    let mut group = c.benchmark_group("assembly, a chunk");
    for batch in [1, 64, 128, 256] {
        let chunks = chunks(batch);
        group.throughput(Throughput::Elements(batch));
        group.bench_with_input(BenchmarkId::from_parameter(batch), &chunks, |b, chunks| {
            let empty = Assembly::expecting(u64::MAX, Offset(0));
            b.iter(|| {
                let mut assembly = empty.clone();
                let _ = black_box(assembly.add_all(chunks));
                assembly
            });
        });
    }
    group.finish();
}

/// A fragment from its cut to its persist, each event on a clone, as the library does it.
fn cycle(c: &mut Criterion) {
    let mut group = c.benchmark_group("cut, complete and persist");
    for entries in [10, 1_000, 100_000] {
        let start = machine(entries, 1);
        group.bench_with_input(BenchmarkId::from_parameter(entries), &start, |b, start| {
            b.iter(|| {
                let mut cut = start.clone();
                let submit = cut
                    .fragment_cut(TransferId(1), fragment(entries), 7)
                    .expect("a good fragment");
                let mut complete = cut.clone();
                let persist = complete.transfer_complete(TransferId(1), Uid(1));
                let mut persisted = complete.clone();
                let publish = persisted.persist_complete(Revision(2), TimestampMs(0));
                (submit, persist, publish, persisted)
            });
        });
    }
    group.finish();
}

fn roots(c: &mut Criterion) {
    let mut group = c.benchmark_group("root");
    for entries in [10, 1_000, LARGEST_ROOT] {
        let root = manifest(entries);
        let bytes = encode_root(&root).expect("a total that fits");
        group.bench_function(BenchmarkId::new("encode", entries), |b| {
            b.iter(|| encode_root(black_box(&root)))
        });
        group.bench_function(BenchmarkId::new("decode", entries), |b| {
            b.iter(|| decode_root(black_box(&bytes)))
        });
        group.bench_function(BenchmarkId::new("lookup by offset", entries), |b| {
            b.iter(|| lookup_offset(black_box(&root), Offset(entries * 7)));
        });
        group.bench_function(BenchmarkId::new("lookup by timestamp", entries), |b| {
            b.iter(|| lookup_timestamp(black_box(&root), TimestampMs(1_000 + 7 * entries as i64)));
        });
    }
    group.finish();
}

fn short() -> Criterion {
    Criterion::default()
        .warm_up_time(std::time::Duration::from_millis(300))
        .measurement_time(std::time::Duration::from_secs(1))
}

criterion_group! {
    name = benches;
    config = short();
    targets = assembly, cycle, roots
}
criterion_main!(benches);
