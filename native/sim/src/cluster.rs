//! The log of one stream: three members of an osiris cluster.
//!
//! What is kept of osiris: a writer writes ahead of what a majority has; the commit offset follows the majority and starts at -1 with
//! every writer; an election takes the member with the highest epoch and offset among a reachable majority, and the others truncate
//! what differs; a cut-off writer does not notice and keeps its commit offset; retention deletes whole segments of one member, never the one that is
//! written to; an open file can be read after it was deleted; a reader at the end of a deleted run continues with the oldest
//! segment; nothing is flushed on a schedule, so a machine that loses its power loses what it had not written back.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use stream_s3_core::chunk::{ChunkHeader, ChunkType, SEGMENT_HEADER};
use stream_s3_core::fragment::Chunk;
use stream_s3_core::units::{Epoch, Offset, TimestampMs};

use crate::rng::Rng;

/// Members of the cluster; one machine each.
pub(crate) const MEMBERS: usize = 3;

/// What tells a chunk from all others: its id, the epoch of its writer, its checksum.
pub(crate) type Identity = (u64, u64, u32);

/// A chunk, which never changes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct StoredChunk {
    pub(crate) id: u64,
    pub(crate) records: u32,
    pub(crate) epoch: u64,
    pub(crate) crc: u32,
    pub(crate) timestamp: i64,
    pub(crate) data_size: u32,
    /// Header, filter, data and trailer.
    pub(crate) bytes: Vec<u8>,
}

impl StoredChunk {
    pub(crate) fn next(&self) -> u64 {
        self.id + u64::from(self.records)
    }

    /// See there.
    pub(crate) fn identity(&self) -> Identity {
        (self.id, self.epoch, self.crc)
    }
}

/// A segment file.
#[derive(Debug, Default)]
pub(crate) struct Segment {
    pub(crate) first: u64,
    pub(crate) chunks: Vec<(Rc<StoredChunk>, u64)>,
    pub(crate) size: u64,
}

pub(crate) type SegmentFile = Rc<RefCell<Segment>>;

impl Segment {
    fn new(first: u64) -> Self {
        Self {
            first,
            chunks: Vec::new(),
            size: SEGMENT_HEADER.len() as u64,
        }
    }

    fn push(&mut self, chunk: Rc<StoredChunk>) {
        let position = self.size;
        self.size += chunk.bytes.len() as u64;
        self.chunks.push((chunk, position));
    }

    fn truncate(&mut self, keep: usize) {
        self.chunks.truncate(keep);
        self.size = self
            .chunks
            .last()
            .map_or(SEGMENT_HEADER.len() as u64, |(chunk, position)| {
                position + chunk.bytes.len() as u64
            });
    }

    /// The bytes `[start, end)`, where the file has them.
    pub(crate) fn read(&self, start: u64, end: u64) -> Option<Vec<u8>> {
        if end > self.size {
            return None;
        }
        let mut out = Vec::with_capacity((end - start) as usize);
        for (chunk, position) in &self.chunks {
            let from = start.max(*position);
            let to = end.min(position + chunk.bytes.len() as u64);
            if from < to {
                out.extend_from_slice(
                    &chunk.bytes[(from - position) as usize..(to - position) as usize],
                );
            }
        }
        Some(out)
    }

    /// The chunk that starts at `id`, as the drain sees it.
    pub(crate) fn chunk_at(&self, id: u64) -> Option<Chunk> {
        let index = self
            .chunks
            .binary_search_by_key(&id, |(chunk, _)| chunk.id)
            .ok()?;
        let (chunk, position) = &self.chunks[index];
        Some(Chunk {
            chunk_id: Offset(chunk.id),
            timestamp: TimestampMs(chunk.timestamp),
            num_records: chunk.records,
            data_size: chunk.data_size,
            position: *position,
            next_position: position + chunk.bytes.len() as u64,
            segment_offset: Offset(self.first),
            crc: chunk.crc,
        })
    }
}

/// A writer process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Writer {
    pub(crate) id: u64,
    pub(crate) epoch: u64,
    /// Id of the last committed chunk as far as it knows.
    pub(crate) committed: i64,
    /// Until then its log looks empty.
    pub(crate) recovering_until: u64,
}

/// A member, its machine, and its log.
#[derive(Debug, Default)]
pub(crate) struct Member {
    pub(crate) up: bool,
    /// Whether the other members, but not the stores, are out of its reach.
    pub(crate) cut_off: bool,
    /// Follows the current writer.
    pub(crate) joined: bool,
    pub(crate) segments: Vec<SegmentFile>,
    /// Everything below is on the disk for good.
    pub(crate) durable: u64,
    pub(crate) writer: Option<Writer>,
}

/// What a member's log covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) first: Option<u64>,
    pub(crate) next: u64,
}

impl Member {
    pub(crate) fn chunks(&self) -> Vec<Rc<StoredChunk>> {
        let mut all = Vec::new();
        for segment in &self.segments {
            all.extend(
                segment
                    .borrow()
                    .chunks
                    .iter()
                    .map(|(chunk, _)| chunk.clone()),
            );
        }
        all
    }

    pub(crate) fn last(&self) -> Option<Rc<StoredChunk>> {
        self.segments.iter().rev().find_map(|segment| {
            segment
                .borrow()
                .chunks
                .last()
                .map(|(chunk, _)| chunk.clone())
        })
    }

    pub(crate) fn range(&self) -> Range {
        let next = self.last().map(|chunk| chunk.next());
        let first = self
            .segments
            .iter()
            .find_map(|segment| segment.borrow().chunks.first().map(|(chunk, _)| chunk.id));
        Range {
            first,
            next: next.unwrap_or_else(|| self.segments.last().map_or(0, |s| s.borrow().first)),
        }
    }

    pub(crate) fn chunk_at(&self, id: u64) -> Option<Rc<StoredChunk>> {
        let segment = self.segment_of(id)?;
        let segment = segment.borrow();
        let index = segment
            .chunks
            .binary_search_by_key(&id, |(chunk, _)| chunk.id)
            .ok()?;
        Some(segment.chunks[index].0.clone())
    }

    /// The segment that has or would have the chunk.
    pub(crate) fn segment_of(&self, id: u64) -> Option<&SegmentFile> {
        let after = self
            .segments
            .partition_point(|segment| segment.borrow().first <= id);
        self.segments.get(after.checked_sub(1)?)
    }

    fn push(&mut self, chunk: Rc<StoredChunk>, segment_bytes: u64) {
        let full = self
            .segments
            .last()
            .is_none_or(|segment| segment.borrow().size >= segment_bytes);
        if full {
            self.segments
                .push(Rc::new(RefCell::new(Segment::new(chunk.id))));
        }
        if let Some(segment) = self.segments.last() {
            segment.borrow_mut().push(chunk);
        }
    }

    /// Drops everything from offset `next` on.
    fn truncate(&mut self, next: u64) {
        while let Some(segment) = self.segments.last() {
            let keep = segment
                .borrow()
                .chunks
                .partition_point(|(chunk, _)| chunk.id < next);
            segment.borrow_mut().truncate(keep);
            if keep > 0 || self.segments.len() == 1 {
                break;
            }
            self.segments.pop();
        }
        if self.range().first.is_none() {
            self.segments.clear();
        }
        self.durable = self.durable.min(next);
    }

    /// How many of the oldest segments hold nothing but committed chunks.
    pub(crate) fn committed_segments(&self, writer: Writer) -> usize {
        self.segments.partition_point(|segment| {
            let segment = segment.borrow();
            let last = segment.chunks.last();
            last.is_none_or(|(chunk, _)| chunk.id as i64 <= writer.committed)
        })
    }

    /// Deletes up to `count` of the oldest segments; how many.
    pub(crate) fn trim(&mut self, count: usize) -> usize {
        let count = count.min(self.segments.len().saturating_sub(1));
        self.segments.drain(..count);
        count
    }
}

/// All members.
#[derive(Debug)]
pub(crate) struct Cluster {
    pub(crate) members: Vec<Member>,
    pub(crate) epoch: u64,
    /// Where the current writer is, as the cluster sees it.
    pub(crate) leader: Option<usize>,
    pub(crate) segment_bytes: u64,
    next_writer: u64,
    /// Every chunk that was ever written, and the one that its writer had in front of it.
    written: BTreeMap<Identity, (Rc<StoredChunk>, Option<Identity>)>,
}

impl Cluster {
    pub(crate) fn new(segment_bytes: u64) -> Self {
        let member = || Member {
            up: true,
            ..Member::default()
        };
        Self {
            members: (0..MEMBERS).map(|_| member()).collect(),
            epoch: 0,
            leader: None,
            segment_bytes,
            next_writer: 1,
            written: BTreeMap::new(),
        }
    }

    /// A chunk that was written once, and the one in front of it; where its log was empty, there is none.
    pub(crate) fn written(&self, chunk: Identity) -> Option<&(Rc<StoredChunk>, Option<Identity>)> {
        self.written.get(&chunk)
    }

    fn in_touch(&self, index: usize) -> bool {
        let member = &self.members[index];
        member.up && !member.cut_off
    }

    /// Whether a member's machine is down.
    pub(crate) fn is_down(&self, index: usize) -> bool {
        !self.members[index].up
    }

    /// The writer that the cluster follows, if it runs.
    pub(crate) fn current(&self) -> Option<(usize, Writer)> {
        let leader = self.leader?;
        let writer = self.members[leader].writer?;
        (writer.epoch == self.epoch).then_some((leader, writer))
    }

    /// Whether the leader can reach a majority.
    pub(crate) fn healthy(&self) -> bool {
        self.current()
            .is_some_and(|(leader, _)| self.in_touch(leader))
    }

    /// Every writer writes, the cut-off ones too.
    pub(crate) fn write(&mut self, rng: &mut Rng, now: u64, clock: i64) -> u64 {
        let mut written = 0;
        for index in 0..MEMBERS {
            let member = &self.members[index];
            let Some(writer) = member.writer else {
                continue;
            };
            if writer.recovering_until > now || rng.chance(200) {
                continue;
            }
            let id = member.range().next;
            let before = member.last().map(|chunk| chunk.identity());
            let chunk = Rc::new(new_chunk(rng, id, writer.epoch, clock));
            self.written
                .insert(chunk.identity(), (chunk.clone(), before));
            let bytes = self.segment_bytes;
            self.members[index].push(chunk, bytes);
            written += 1;
        }
        written
    }

    /// A follower takes what it misses, and the leader learns of it. True where the commit offset moved.
    pub(crate) fn replicate(&mut self, index: usize, most: u64) -> bool {
        let Some((leader, _)) = self.current() else {
            return false;
        };
        if index == leader
            || !self.in_touch(leader)
            || !self.in_touch(index)
            || !self.members[index].joined
        {
            return false;
        }
        for _ in 0..most {
            let next = self.members[index].range().next;
            let Some(chunk) = self.members[leader].chunk_at(next) else {
                self.rejoin_behind_trim(leader, index, next);
                break;
            };
            let bytes = self.segment_bytes;
            self.members[index].push(chunk, bytes);
        }
        self.commit()
    }

    /// The chunk that a member has acknowledged to the current writer; 0 if none yet.
    pub(crate) fn acknowledged(&self, index: usize) -> u64 {
        let member = &self.members[index];
        match member.last() {
            Some(chunk) if member.joined => chunk.id,
            Some(_) | None => 0,
        }
    }

    /// Id of the last chunk that a follower knows to be committed, if it has one.
    pub(crate) fn known_committed(&self, index: usize) -> Option<u64> {
        let (_, writer) = self.current()?;
        let member = &self.members[index];
        let last = member.last().filter(|_| member.up && member.joined)?;
        Some(last.id.min(u64::try_from(writer.committed).unwrap_or(0)))
    }

    /// A follower that is behind the leader's retention begins anew.
    fn rejoin_behind_trim(&mut self, leader: usize, index: usize, next: u64) {
        if let Some(first) = self.members[leader].range().first
            && next < first
        {
            let follower = &mut self.members[index];
            follower.segments = vec![Rc::new(RefCell::new(Segment::new(first)))];
            follower.durable = 0;
        }
    }

    fn commit(&mut self) -> bool {
        let Some((leader, writer)) = self.current() else {
            return false;
        };
        let mut ends: Vec<u64> = (0..MEMBERS)
            .filter(|index| *index == leader || self.members[*index].joined)
            .map(|index| self.members[index].range().next)
            .collect();
        ends.sort_unstable();
        ends.reverse();
        let Some(majority) = ends.get(MEMBERS / 2).copied() else {
            return false;
        };
        // The last chunk that ends at or below what a majority has.
        let committed = self.members[leader]
            .segments
            .iter()
            .rev()
            .find_map(|segment| {
                let segment = segment.borrow();
                let count = segment
                    .chunks
                    .partition_point(|(chunk, _)| chunk.next() <= majority);
                count
                    .checked_sub(1)
                    .map(|index| segment.chunks[index].0.id as i64)
            });
        let Some(committed) = committed.filter(|committed| *committed > writer.committed) else {
            return false;
        };
        if let Some(writer) = &mut self.members[leader].writer {
            writer.committed = committed;
        }
        true
    }

    /// A new writer, if a majority is in touch: where it runs, and the members whose writer or follower stops for it.
    pub(crate) fn elect(&mut self, now: u64, recovering: u64) -> Option<(usize, Vec<usize>)> {
        let voters: Vec<usize> = (0..MEMBERS).filter(|index| self.in_touch(*index)).collect();
        if voters.len() <= MEMBERS / 2 {
            return None;
        }
        let place = |index: &usize| {
            let last = self.members[*index].last();
            last.map_or((0, 0), |chunk| (chunk.epoch, chunk.next()))
        };
        let winner = *voters.iter().max_by_key(|index| (place(index), **index))?;
        self.epoch += 1;
        for index in &voters {
            self.members[*index].writer = None;
        }
        // Those that are out of touch, too: what they have says nothing to a writer that they do not know.
        for member in &mut self.members {
            member.joined = false;
        }
        self.leader = Some(winner);
        let id = self.next_writer;
        self.next_writer += 1;
        self.members[winner].writer = Some(Writer {
            id,
            epoch: self.epoch,
            committed: -1,
            recovering_until: now + recovering,
        });
        Some((winner, voters))
    }

    /// A member that is in touch follows the current writer: what its log has more, or otherwise, is truncated.
    pub(crate) fn join(&mut self, index: usize) {
        let Some((leader, _)) = self.current() else {
            return;
        };
        if leader == index || !self.in_touch(index) || !self.in_touch(leader) {
            return;
        }
        self.members[index].writer = None;
        if self.members[index].joined {
            return;
        }
        let theirs = self.members[leader].range();
        // What the leader has trimmed cannot be compared; it is good where something behind it is.
        let mut keep = 0;
        for chunk in self.members[index].chunks() {
            if theirs.first.is_some_and(|first| chunk.id < first) {
                continue;
            }
            let theirs = self.members[leader].chunk_at(chunk.id);
            if theirs.map(|other| other.identity()) != Some(chunk.identity()) {
                break;
            }
            keep = chunk.next();
        }
        self.members[index].truncate(keep);
        if self.members[index].range().first.is_none() {
            let first = theirs.first.unwrap_or(theirs.next);
            self.members[index].segments = vec![Rc::new(RefCell::new(Segment::new(first)))];
        }
        self.members[index].joined = true;
    }

    /// A machine goes down, with or without what it had not written back.
    pub(crate) fn crash(&mut self, index: usize, lose_cache: bool) {
        let member = &mut self.members[index];
        member.up = false;
        member.joined = false;
        member.writer = None;
        if lose_cache {
            let durable = member.durable;
            member.truncate(durable);
        }
    }
}

fn new_chunk(rng: &mut Rng, id: u64, epoch: u64, clock: i64) -> StoredChunk {
    let data: Vec<u8> = (0..rng.between(8, 60)).map(|_| rng.bits() as u8).collect();
    let (filter_size, trailer_size) = if rng.chance(200) { (16, 5) } else { (0, 0) };
    let header = ChunkHeader {
        kind: rng.pick(&[
            ChunkType::User,
            ChunkType::User,
            ChunkType::TrackingDelta,
            ChunkType::TrackingSnapshot,
        ]),
        num_entries: 1,
        num_records: rng.between(1, 6) as u32,
        timestamp: TimestampMs(clock),
        epoch: Epoch(epoch),
        chunk_id: Offset(id),
        crc: crc32fast::hash(&data),
        data_size: data.len() as u32,
        trailer_size,
        filter_size,
        reserved: [0; 3],
    };
    let mut bytes = header.encode().to_vec();
    bytes.extend(std::iter::repeat_n(0xf1, usize::from(filter_size)));
    bytes.extend_from_slice(&data);
    bytes.extend(std::iter::repeat_n(0x7a, trailer_size as usize));
    StoredChunk {
        id,
        records: header.num_records,
        epoch,
        crc: header.crc,
        timestamp: clock,
        data_size: header.data_size,
        bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Found at seed 123792: two logs became one where a chunk of the new writer happened to begin at the end of the old log.
    #[test]
    fn a_member_that_was_out_of_touch_in_an_election_follows_the_new_writer_only_once_it_has_joined()
     {
        let mut rng = Rng::new(1);
        let mut cluster = Cluster::new(1_000);
        assert!(cluster.elect(0, 0).is_some_and(|(leader, _)| leader == 2));
        cluster.join(0);
        cluster.join(1);
        for _ in 0..30 {
            cluster.write(&mut rng, 0, 0);
        }
        cluster.replicate(0, 30);
        let known = cluster.members[0].range().next;
        assert!(known > 0 && cluster.acknowledged(0) > 0);
        cluster.members[0].cut_off = true;
        cluster.crash(2, false);
        cluster.members[2].up = true;
        cluster.members[2].truncate(0);
        assert!(cluster.elect(0, 0).is_some_and(|(leader, _)| leader == 2));
        cluster.join(1);
        for _ in 0..60 {
            cluster.write(&mut rng, 0, 0);
        }
        cluster.members[0].cut_off = false;
        assert_eq!(cluster.acknowledged(0), 0);
        assert!(
            !cluster.replicate(0, 60),
            "nothing is committed by what it has"
        );
        assert_eq!(cluster.members[0].range().next, known);
        cluster.join(0);
        assert!(cluster.replicate(0, 60));
        let epochs: Vec<u64> = cluster.members[0]
            .chunks()
            .iter()
            .map(|c| c.epoch)
            .collect();
        assert!(
            !epochs.is_empty() && epochs.iter().all(|epoch| *epoch == 2),
            "{epochs:?}"
        );
    }
}
