//! What is true: the committed log, and what the stores hold. Nothing here is told by the code under test; whoever runs it asks whether what it did
//! fits.

mod log;
mod tier;

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use stream_s3_core::chunk::ChunkHeader;
use stream_s3_core::fragment::{
    FragmentMeta, INDEX_RECORD_SIZE, OBJECT_HEADER, check_object_header, decode_index,
};
use stream_s3_core::invariants::{self, Check, Violation};
use stream_s3_core::manifest::Manifest;
use stream_s3_core::units::{Offset, Revision};

use crate::bucket::Body;
use crate::cluster::{Identity, Member, StoredChunk, Writer};
use crate::env::{Cached, Env};
use crate::gc;
use crate::metadata::RootEntry;

/// A fragment object, taken apart.
#[derive(Debug)]
pub(crate) struct Parsed {
    first: u64,
    next: u64,
    size: u64,
    chunks: Vec<Identity>,
}

/// A fragment that the current manifest lists.
#[derive(Debug, Clone)]
struct Live {
    key: String,
    parsed: Rc<Parsed>,
}

/// What metadata and bucket say that the tier is.
#[derive(Debug, Clone)]
pub(crate) struct Tier {
    pub(crate) manifest: Manifest,
    entry: RootEntry,
    fragments: Vec<Live>,
    /// Keys that must stay.
    keys: BTreeSet<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    Waits,
    Answered,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Oracle {
    /// Every chunk that was ever committed.
    chunks: BTreeMap<Identity, Rc<StoredChunk>>,
    /// The committed log, retention left aside.
    truth: BTreeMap<u64, Rc<StoredChunk>>,
    /// Chunks that count as written behind another one than they were.
    grafts: BTreeMap<Identity, Identity>,
    /// How often committed chunks were lost.
    pub(crate) losses: u64,
    /// Epochs whose writer lacked what had been committed before.
    lacking: BTreeSet<u64>,
    pub(crate) tier: Option<Tier>,
    /// Every persisted manifest.
    pub(crate) history: Vec<Manifest>,
    parsed: BTreeMap<String, Rc<Parsed>>,
    anchored: bool,
    waiters: BTreeMap<u64, (u64, Call)>,
    /// Where the writer of an epoch runs.
    nodes: BTreeMap<u64, usize>,
    /// Keys of tiers that were discarded, each with the moment that was noted for it.
    discarded: Vec<(i64, BTreeSet<String>)>,
    /// Whether the stream is deleted.
    pub(crate) deleted: bool,
}

/// What the garbage collection is about to delete.
pub(crate) struct Collected<'a> {
    /// Whether the metadata store has just said again what the verdicts rest on.
    pub(crate) proof: bool,
    pub(crate) keys: &'a [String],
}

/// Whether a member's log is not the one that a tier was made from.
fn contradicts(member: &Member, tier: &Tier) -> bool {
    let range = member.range();
    let first = range.first.unwrap_or(range.next);
    let mut chunks = tier.fragments.iter().flat_map(|live| &live.parsed.chunks);
    tier.manifest.next_offset.0 > range.next
        || chunks.any(|identity| {
            let found = member.chunk_at(identity.0).map(|chunk| chunk.identity());
            identity.0 >= first && found != Some(*identity)
        })
}

fn fail(invariant: u8, what: impl Into<String>) -> Check {
    Err(Violation {
        invariant,
        what: what.into(),
    })
}

impl Oracle {
    /// INV-5: what is published was persisted, under its revision.
    pub(crate) fn published(&self, manifest: &Manifest) -> Check {
        if manifest.revision == Revision(0) {
            return invariants::gate(manifest, &Manifest::default());
        }
        match self
            .history
            .iter()
            .find(|persisted| persisted.revision == manifest.revision)
        {
            Some(persisted) => invariants::gate(manifest, persisted),
            None => fail(
                5,
                format!("published revision {} is not there", manifest.revision),
            ),
        }
    }

    pub(crate) fn asked(&mut self, waiter: u64, offset: u64) {
        self.waiters.insert(waiter, (offset, Call::Waits));
    }

    pub(crate) fn reader_down(&mut self, waiter: u64) {
        self.waiters.remove(&waiter);
    }

    /// Callers that should have been answered.
    pub(crate) fn forgotten(&self) -> Option<u64> {
        let next = self.tier.as_ref().map(|tier| tier.manifest.next_offset.0)?;
        self.waiters
            .values()
            .find(|(offset, call)| *call == Call::Waits && *offset <= next)
            .map(|(offset, _)| *offset)
    }

    fn parse(&mut self, key: &str, body: &Body) -> Result<Rc<Parsed>, Violation> {
        if let Some(parsed) = self.parsed.get(key) {
            return Ok(parsed.clone());
        }
        let parsed = Rc::new(self.take_apart(key, body)?);
        self.parsed.insert(key.to_string(), parsed.clone());
        Ok(parsed)
    }

    /// INV-2 and INV-3: a fragment object is well-formed and holds committed chunks, byte for byte.
    fn take_apart(&self, key: &str, body: &Body) -> Result<Parsed, Violation> {
        let bad = |invariant, what: String| Violation {
            invariant,
            what: format!("{key}: {what}"),
        };
        check_object_header(body).map_err(|e| bad(2, e.to_string()))?;
        let (mut at, mut chunks, mut positions) = (OBJECT_HEADER.len(), Vec::new(), Vec::new());
        let mut next = None;
        while at + chunks.len() * INDEX_RECORD_SIZE < body.len() {
            let header = ChunkHeader::decode(&body[at..]).map_err(|e| bad(2, e.to_string()))?;
            let end = at + header.len_in_segment() as usize;
            let identity = (header.chunk_id.0, header.epoch.0, header.crc);
            let Some(chunk) = self.chunks.get(&identity) else {
                return Err(bad(
                    3,
                    format!("chunk {identity:?} was never committed: a phantom"),
                ));
            };
            if body.get(at..end) != Some(&chunk.bytes[..]) {
                return Err(bad(2, format!("chunk {identity:?} has other bytes")));
            }
            if next.is_some_and(|next| next != header.chunk_id.0) {
                return Err(bad(4, format!("a gap in front of chunk {identity:?}")));
            }
            next = Some(header.next_chunk_id().0);
            positions.push((header.chunk_id, (at - OBJECT_HEADER.len()) as u32));
            chunks.push(identity);
            at = end;
        }
        let index = decode_index(&body[at..]).map_err(|e| bad(2, e.to_string()))?;
        let said: Vec<_> = index.iter().map(|r| (r.chunk_id, r.position)).collect();
        if said != positions {
            return Err(bad(2, "the index does not fit the chunks".into()));
        }
        Ok(Parsed {
            first: chunks.first().map_or(0, |chunk| chunk.0),
            next: next.unwrap_or(0),
            size: (at - OBJECT_HEADER.len()) as u64,
            chunks,
        })
    }
}

impl Env {
    /// INV-3: what is about to be uploaded is committed.
    pub(crate) fn drained(&mut self, node: usize, meta: &FragmentMeta) {
        let mut found = Ok(());
        for segment in &self.cluster.members[node].segments {
            for (chunk, _) in &segment.borrow().chunks {
                let inside = (meta.first_offset.0..meta.next_offset.0).contains(&chunk.id);
                if inside && !self.oracle.chunks.contains_key(&chunk.identity()) {
                    let identity = chunk.identity();
                    found = fail(3, format!("chunk {identity:?} drained, but not committed"));
                }
            }
        }
        self.check(found);
    }

    /// INV-9 of the local log: the current writer's reader deletes only what is tiered.
    pub(crate) fn local_deleted(&mut self, writer: Writer, below: Offset) {
        let current = self.cluster.current().map(|(_, current)| current.id);
        let next = self
            .oracle
            .tier
            .as_ref()
            .map_or(Offset(0), |t| t.manifest.next_offset);
        if current == Some(writer.id) && !self.metadata.deleted && below > next {
            self.violate(
                9,
                format!("local segments up to {below} deleted, tiered up to {next}"),
            );
        }
    }

    /// INV-5 for those who wait: what they are told is so.
    pub(crate) fn answer_waiter(&mut self, node: usize, writer: Writer, waiter: u64) {
        let Some((offset, call)) = self.oracle.waiters.get_mut(&waiter) else {
            return;
        };
        let offset = *offset;
        *call = Call::Answered;
        let current = self.cluster.current();
        let is_current = current.map(|(_, current)| current.id) == Some(writer.id);
        let holds = if is_current && !self.metadata.deleted {
            // A deposed writer may have tiered more since, of a log that is lost: the next persist fails, and finds that out.
            self.oracle.tier.as_ref().is_some_and(|tier| {
                let phantom = self.oracle.is_phantom(tier);
                tier.manifest.next_offset.0 >= offset
                    && phantom.is_none_or(|first| first.0 >= offset)
            })
        } else {
            // One that was replaced without knowing, or whose stream was deleted, may be right about the past only.
            let mut history = self.oracle.history.iter();
            history.any(|manifest| manifest.next_offset.0 >= offset)
        };
        if !holds && offset > 0 {
            self.violate(
                5,
                format!("node {node} says that {offset} is persisted, which is not so"),
            );
        }
    }

    /// The same of a replica's log, whose manifest may be old, but is never ahead.
    pub(crate) fn replica_trimmed(&mut self, node: usize, below: Offset) {
        let tier = self.oracle.tier.as_ref();
        let next = tier.map_or(Offset(0), |tier| tier.manifest.next_offset);
        if !self.metadata.deleted && below > next {
            self.violate(
                9,
                format!("replica {node} deletes segments up to {below}, tiered up to {next}"),
            );
        }
    }

    // --- at rest -----------------------------------------------------------------------------------------------------

    /// Everything that must hold of a stream once nothing is under way any more.
    pub(crate) fn at_rest(&mut self) -> Check {
        let used = match &self.oracle.tier {
            Some(tier) => tier.keys.clone(),
            None => BTreeSet::new(),
        };
        let left = gc::leftovers(self, &used);
        if let Some(key) = left.first() {
            return fail(11, format!("{key} would stay for ever"));
        }
        if self.oracle.deleted {
            return Ok(());
        }
        self.tiered_at_rest(&used)
    }

    fn tiered_at_rest(&self, used: &BTreeSet<String>) -> Check {
        let Some((leader, _)) = self.cluster.current() else {
            return fail(0, "no writer at rest");
        };
        let Some(tier) = &self.oracle.tier else {
            return fail(4, "nothing was tiered");
        };
        let (next, end) = (tier.manifest.next_offset.0, self.oracle.end());
        if next != end {
            return fail(4, format!("tiered up to {next}, committed up to {end}"));
        }
        if let Some(identity) = self.oracle.is_phantom(tier) {
            return fail(
                3,
                format!("chunk {identity:?} is tiered and not in the log"),
            );
        }
        if let Some(offset) = self.oracle.forgotten() {
            return fail(5, format!("a caller still waits for {offset}"));
        }
        if let Some(key) = used
            .iter()
            .find(|key| !self.bucket.objects.contains_key(*key))
        {
            return fail(2, format!("{key} is gone"));
        }
        match &self.nodes[leader].table.cached {
            Cached::Known(manifest) => invariants::gate(manifest, &tier.manifest),
            Cached::Unknown | Cached::Pending => fail(5, "nothing is published"),
        }
    }
}
