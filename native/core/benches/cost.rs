//! What calls cost: `cargo bench -p stream_s3_core`. Each line is the mean of many calls; the machine is cloned in front of each one, as the
//! NIF does. Costs that must not grow with the number of entries are shown for several.

#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

use std::hint::black_box;
use std::time::Instant;

use stream_s3_core::fragment::{Assembly, Chunk, Fragment};
use stream_s3_core::manifest::{
    Edit, Entry, EntryKind, Manifest, apply_edit, decode_root, encode_root, lookup_offset, new_edit,
};
use stream_s3_core::replica_reader::{Machine, Options};
use stream_s3_core::units::{Epoch, Offset, Revision, TimestampMs, TransferId, Uid};

fn report(what: &str, entries: usize, calls: u32, mut call: impl FnMut()) {
    for _ in 0..calls / 10 + 1 {
        call();
    }
    let start = Instant::now();
    for _ in 0..calls {
        call();
    }
    let nanos = start.elapsed().as_nanos() / u128::from(calls);
    println!("{what:<44} {entries:>6} {nanos:>9} ns");
}

fn manifest(entries: usize) -> Manifest {
    let mut manifest = Manifest {
        revision: Revision(1),
        ..Manifest::default()
    };
    for number in 0..entries as u64 {
        let entry = Entry {
            first_offset: Offset(number * 10),
            first_timestamp: TimestampMs(0),
            last_timestamp: TimestampMs(9),
            kind: EntryKind::Fragment,
            size: 1_000,
            uid: Uid(1),
        };
        let edit = Edit::append(&manifest, entry, Offset(number * 10 + 10));
        if let Ok(after) = apply_edit(&edit, &manifest) {
            manifest = after;
        }
    }
    manifest
}

fn chunks(count: u64) -> Vec<Chunk> {
    (0..count)
        .map(|number| Chunk {
            chunk_id: Offset(number),
            timestamp: TimestampMs(0),
            num_records: 1,
            data_size: 100,
            position: 8 + number * 148,
            next_position: 8 + (number + 1) * 148,
            segment_offset: Offset(0),
            crc: 0,
        })
        .collect()
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

fn machine(entries: usize, persist_threshold: u64) -> Machine<u64> {
    let options = Options {
        epoch: Epoch(1),
        persist_threshold,
        persist_interval_ms: 2_000,
        rebalance_threshold: 100_000,
    };
    match Machine::init(manifest(entries), options, TimestampMs(0)) {
        Ok((machine, _)) => machine,
        Err(error) => panic!("{error}"),
    }
}

fn assembly() {
    for batch in [1, 64, 1_024] {
        let chunks = chunks(batch);
        let before = Assembly::expecting(u64::MAX, Offset(0));
        let what = format!("add_all, a chunk, batches of {batch}");
        let rounds = 2_000_000 / u32::try_from(batch).unwrap_or(1);
        let start = Instant::now();
        for _ in 0..rounds {
            let mut assembly = before.clone();
            let _ = black_box(assembly.add_all(&chunks));
        }
        let nanos = start.elapsed().as_nanos() / u128::from(rounds) / u128::from(batch);
        println!("{what:<44} {:>6} {nanos:>9} ns", "");
    }
    let mut full = Assembly::expecting(u64::MAX, Offset(0));
    let _ = full.add_all(&chunks(200_000));
    report("index_records of 200,000 chunks", 0, 50, || {
        drop(black_box(full.index_records()))
    });
}

fn machines() {
    for entries in [0, 100, 1_000, 4_000] {
        let next = entries as u64;
        let idle = machine(entries, u64::MAX);
        report("clone", entries, 100_000, || drop(black_box(idle.clone())));
        report("fragment_cut", entries, 50_000, || {
            drop(black_box(idle.clone().fragment_cut(
                TransferId(1),
                fragment(next),
                1,
            )));
        });
        let mut cut = idle.clone();
        let _ = cut.fragment_cut(TransferId(1), fragment(next), 1);
        report("transfer_complete", entries, 50_000, || {
            drop(black_box(
                cut.clone().transfer_complete(TransferId(1), Uid(1)),
            ));
        });
        let mut due = machine(entries, 1);
        let _ = due.fragment_cut(TransferId(1), fragment(next), 1);
        report(
            "transfer_complete that starts a persist",
            entries,
            50_000,
            || {
                drop(black_box(
                    due.clone().transfer_complete(TransferId(1), Uid(1)),
                ));
            },
        );
        let _ = due.transfer_complete(TransferId(1), Uid(1));
        report("persist_complete", entries, 50_000, || {
            drop(black_box(
                due.clone().persist_complete(Revision(2), TimestampMs(0)),
            ));
        });
    }
    let mut busy = machine(10, u64::MAX);
    for number in 0..2_000 {
        let _ = busy.fragment_cut(TransferId(number), fragment(10 + number), 1);
    }
    report(
        "transfer_complete, 2,000 transfers in flight",
        10,
        50_000,
        || {
            drop(black_box(
                busy.clone().transfer_complete(TransferId(1_000), Uid(1)),
            ));
        },
    );
}

fn manifests() {
    for entries in [100, 1_000, 4_000] {
        let manifest = manifest(entries);
        report("encode_root", entries, 2_000, || {
            drop(black_box(encode_root(&manifest)))
        });
        let bytes = encode_root(&manifest).unwrap_or_default();
        report("decode_root", entries, 2_000, || {
            drop(black_box(decode_root(&bytes)))
        });
        let splice = Edit {
            pos: 34,
            len: 34 * 10,
            ..new_edit(&manifest)
        };
        report("apply_edit in the middle", entries, 2_000, || {
            drop(black_box(apply_edit(&splice, &manifest)));
        });
        let offset = Offset(entries as u64 * 7);
        report("lookup_offset", entries, 100_000, || {
            let _ = black_box(lookup_offset(&manifest, offset));
        });
    }
}

fn main() {
    println!("{:<44} {:>6} {:>12}", "call", "entries", "mean");
    assembly();
    machines();
    manifests();
}
