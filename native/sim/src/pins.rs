//! Segments that a node keeps open, as the registry of `native/runtime` does: what is pinned and what is let go is the core's decision.
//! Of one stream; a budget is that of a stream here.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::rc::Rc;

use stream_s3_core::decisions::pins::{
    Joining, is_superfluous, joining, pins_to_release, segments_to_pin,
};
use stream_s3_core::decisions::timeline::{ChunkIdentity, LocalChunk};
use stream_s3_core::units::{Epoch, Offset};

use crate::cluster::{Member, SegmentFile, Writer};
use crate::env::Env;
use crate::twin::Twin;

/// Pins of a stream at most.
const MOST: usize = 512;

/// What a node has open of a stream's log.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    /// Whose log it is.
    writer: Option<u64>,
    /// Where that log began when it was entered.
    entered: u64,
    persisted: Offset,
    files: BTreeMap<Offset, SegmentFile>,
}

/// Enters the log of a writer: what was open of another one is let go.
pub(crate) fn enter(env: &mut Env, node: usize, writer: Writer) {
    let entered = first(&env.cluster.members[node]);
    let pins = &mut env.nodes[node].table.pins;
    if pins.writer != Some(writer.id) {
        *pins = Pins {
            writer: Some(writer.id),
            entered,
            ..Pins::default()
        };
    }
    look(env, node);
}

/// Everything below is persisted, or not wanted.
pub(crate) fn persisted(env: &mut Env, node: usize, writer: Writer, next: Offset) {
    let pins = &mut env.nodes[node].table.pins;
    if pins.writer == Some(writer.id) {
        pins.persisted = next;
        look(env, node);
    }
}

/// Opens what is new, and lets go of what has to go.
pub(crate) fn look(env: &mut Env, node: usize) {
    let member = &env.cluster.members[node];
    let pins = &mut env.nodes[node].table.pins;
    if pins.writer.is_none() || member.writer.map(|writer| writer.id) != pins.writer {
        return;
    }
    let firsts: Vec<Offset> = member
        .segments
        .iter()
        .map(|segment| Offset(segment.borrow().first))
        .collect();
    let limit = if env.plan.pin_budget == 0 { 0 } else { MOST };
    // The twin opens a segment when its first chunk is drained, which may be too late.
    if env.twin != Some(Twin::PinBeforeUnlink) {
        for index in segments_to_pin(&firsts, pins.persisted, limit) {
            let file = Rc::clone(&member.segments[index]);
            pins.files.entry(firsts[index]).or_insert(file);
        }
    }
    let starts: BTreeSet<Offset> = pins
        .files
        .keys()
        .copied()
        .chain(firsts.iter().copied())
        .collect();
    let next_start = |at: Offset| {
        starts
            .range((Bound::Excluded(at), Bound::Unbounded))
            .next()
            .copied()
    };
    let persisted = pins.persisted;
    pins.files
        .retain(|at, _| !is_superfluous(next_start(*at), persisted));
    let deleted: Vec<(Offset, u64)> = pins
        .files
        .iter()
        .filter(|(at, file)| match firsts.binary_search(at) {
            Ok(index) => !Rc::ptr_eq(file, &member.segments[index]),
            Err(_) => true,
        })
        .map(|(at, file)| (*at, file.borrow().size))
        .collect();
    let sizes: Vec<u64> = deleted.iter().map(|(_, size)| *size).collect();
    for (at, _) in &deleted[..pins_to_release(&sizes, env.plan.pin_budget)] {
        pins.files.remove(at);
        env.coverage.hit("pin released");
    }
}

/// The drain reads a segment: what the twin pins.
pub(crate) fn drained(env: &mut Env, node: usize, file: &SegmentFile) {
    if env.is(Twin::PinBeforeUnlink) && env.plan.pin_budget > 0 {
        let at = Offset(file.borrow().first);
        let pins = &mut env.nodes[node].table.pins;
        pins.files.entry(at).or_insert_with(|| Rc::clone(file));
    }
}

/// The open segment that begins at an offset.
pub(crate) fn file(env: &Env, node: usize, at: u64) -> Option<&SegmentFile> {
    env.nodes[node].table.pins.files.get(&Offset(at))
}

/// The open segment that has a chunk.
pub(crate) fn holding(env: &Env, node: usize, chunk: u64) -> Option<&SegmentFile> {
    let files = &env.nodes[node].table.pins.files;
    let (_, file) = files.range(..=Offset(chunk)).next_back()?;
    file.borrow().chunk_at(chunk).map(|_| file)
}

/// What the open segments have where a chunk should be.
pub(crate) fn identity(env: &Env, node: usize, at: Offset) -> LocalChunk {
    let files = &env.nodes[node].table.pins.files;
    let Some((_, file)) = files.range(..=at).next_back() else {
        return LocalChunk::Trimmed;
    };
    let file = file.borrow();
    let after = file.chunks.partition_point(|(chunk, _)| chunk.id <= at.0);
    match after.checked_sub(1).map(|index| &file.chunks[index].0) {
        Some(chunk) if chunk.id == at.0 => LocalChunk::Found(ChunkIdentity {
            chunk_id: at,
            epoch: Epoch(chunk.epoch),
            crc: chunk.crc,
        }),
        Some(chunk) if chunk.next() > at.0 => LocalChunk::InsideAnother,
        Some(_) | None => LocalChunk::Trimmed,
    }
}

/// From where on the open segments reach up to the log without a gap.
pub(crate) fn prolonging(env: &Env, node: usize, log_first: Option<u64>) -> Option<Offset> {
    let files = env.nodes[node].table.pins.files.iter();
    let ends: Vec<(Offset, Option<Offset>)> = files
        .map(|(at, file)| {
            let file = file.borrow();
            let end = file.chunks.last().map_or(at.0, |(chunk, _)| chunk.next());
            (*at, Some(Offset(end)))
        })
        .collect();
    match joining(&ends, Offset(log_first?)) {
        Joining::From(first) => first,
        Joining::DependsOn(_) => None,
    }
}

/// Whether the budget is larger than any log, and the log of this writer reached back to an offset when it was entered: then nothing
/// from there on may be lost.
pub(crate) fn must_hold(env: &Env, node: usize, writer: Writer, next: u64) -> bool {
    let pins = &env.nodes[node].table.pins;
    env.plan.pin_budget == u64::MAX && pins.writer == Some(writer.id) && pins.entered <= next
}

fn first(member: &Member) -> u64 {
    let range = member.range();
    range.first.unwrap_or(range.next)
}
