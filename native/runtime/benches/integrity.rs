//! What it costs to know an object's CRC before its first byte, and to check bytes on their way:
//! `cargo bench -p stream_s3_runtime --bench integrity`. Milliseconds of one core a GiB, files in the page cache; the
//! median of several rounds in which the ways take turns.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use stream_s3_core::chunk::{ChunkHeader, ChunkType, SEGMENT_HEADER};
use stream_s3_core::units::{Epoch, Offset, TimestampMs};
use stream_s3_runtime::integrity::{Check, Plan, Planner};

const FILE: u64 = 256 << 20;
const ROUNDS: usize = 9;
const BUFFER: usize = 256 << 10;

struct Segment {
    file: File,
    end: u64,
    chunks: u64,
}

/// A segment of chunks whose data lengths lie around `data`, so that no length comes twice in a row.
fn segment(data: u64) -> Segment {
    let mut file = tempfile::tempfile().expect("a file");
    file.write_all(&SEGMENT_HEADER).expect("written");
    let (mut end, mut chunks) = (SEGMENT_HEADER.len() as u64, 0);
    while end < FILE {
        let len = (data - data / 8 + (chunks * 37) % (data / 4)) as usize;
        let bytes: Vec<u8> = (0..len as u64)
            .map(|n| (n * 31 + chunks * 7) as u8)
            .collect();
        let header = ChunkHeader {
            kind: ChunkType::User,
            num_entries: 1,
            num_records: 1,
            timestamp: TimestampMs(1),
            epoch: Epoch(1),
            chunk_id: Offset(chunks),
            crc: crc32fast::hash(&bytes),
            data_size: len as u32,
            trailer_size: 0,
            filter_size: 16,
            reserved: [0; 3],
        };
        file.write_all(&header.encode()).expect("written");
        file.write_all(&[0xf1; 16]).expect("written");
        file.write_all(&bytes).expect("written");
        end += header.len_in_segment();
        chunks += 1;
    }
    Segment { file, end, chunks }
}

/// Headers, filters and trailers read, the CRCs of the data combined.
fn combine(segment: &Segment, room: &mut [u8]) -> Plan {
    let mut planner = Planner::new(Offset(0), Offset(segment.chunks));
    let mut at = SEGMENT_HEADER.len() as u64;
    while at < segment.end {
        at = planner
            .walk(&segment.file, at, segment.end, room)
            .expect("sound");
    }
    planner.finish().expect("whole")
}

/// Every byte, a buffer at a time.
fn each_piece(segment: &Segment, room: &mut [u8], mut see: impl FnMut(&[u8])) {
    let mut at = SEGMENT_HEADER.len() as u64;
    while at < segment.end {
        let len = (room.len() as u64).min(segment.end - at) as usize;
        segment
            .file
            .read_exact_at(&mut room[..len], at)
            .expect("read");
        see(&room[..len]);
        at += len as u64;
    }
}

/// What a pass over all bytes takes at least: one CRC over everything, and one for each chunk to compare with.
fn two_crcs(bytes: &[u8], chunk: usize, object: &mut crc32fast::Hasher) {
    for data in bytes.chunks(chunk) {
        object.update(data);
        std::hint::black_box(crc32fast::hash(data));
    }
}

/// What this thread has used of a core so far: other work on the machine counts less than in the time of day.
fn cpu_ms() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux");
    let spent: f64 = stat
        .split(' ')
        .next()
        .and_then(|nanoseconds| nanoseconds.parse().ok())
        .expect("nanoseconds");
    spent / 1e6
}

fn main() {
    // `cargo test --benches` passes other arguments, and wants no measurement.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    println!("milliseconds a GiB                 chunks of   512 B     4 KiB    32 KiB     1 MiB");
    let mut rows: Vec<(&str, Vec<f64>)> = vec![
        ("plan: around the data, combined", Vec::new()),
        ("plan: all bytes read, two CRCs", Vec::new()),
        ("send: bytes read", Vec::new()),
        ("send: bytes read and checked", Vec::new()),
    ];
    // Aligned as the buffers of uploads are; see there.
    let mut room = vec![0; BUFFER + 4096];
    let start = room.as_ptr().align_offset(4096);
    let room = &mut room[start..start + BUFFER];
    for data in [512, 4 << 10, 32 << 10, 1 << 20] {
        let segment = segment(data);
        let plan = Arc::new(combine(&segment, room));
        let mut samples = vec![Vec::new(); rows.len()];
        for _ in 0..ROUNDS {
            let mut timed = |way: usize, run: &mut dyn FnMut()| {
                let start = cpu_ms();
                run();
                let gib = segment.end as f64 / (1_u64 << 30) as f64;
                samples[way].push((cpu_ms() - start) / gib);
            };
            timed(0, &mut || drop(combine(&segment, room)));
            timed(1, &mut || {
                let mut object = crc32fast::Hasher::new();
                each_piece(&segment, room, |bytes| {
                    two_crcs(bytes, data as usize, &mut object);
                });
                std::hint::black_box(object.finalize());
            });
            timed(2, &mut || {
                each_piece(&segment, room, |bytes| {
                    std::hint::black_box(bytes);
                });
            });
            timed(3, &mut || {
                let mut check = Check::new(Arc::clone(&plan));
                each_piece(&segment, room, |bytes| {
                    check.feed(bytes).expect("sound");
                });
            });
        }
        for (row, samples) in rows.iter_mut().zip(&mut samples) {
            samples.sort_by(f64::total_cmp);
            row.1.push(samples[samples.len() / 2]);
        }
    }
    for (name, costs) in rows {
        let costs: String = costs.iter().map(|cost| format!("{cost:10.1}")).collect();
        println!("{name:<42}{costs}");
    }
}
