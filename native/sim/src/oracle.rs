//! What is true: the committed log, and what the stores hold. Nothing here is told by the code under test; whoever runs it asks whether what it did
//! fits.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use stream_s3_core::chunk::ChunkHeader;
use stream_s3_core::fragment::{
    FragmentMeta, INDEX_RECORD_SIZE, OBJECT_HEADER, check_object_header, decode_index,
};
use stream_s3_core::invariants::{self, Check, Listed, Violation};
use stream_s3_core::key;
use stream_s3_core::manifest::{Entry, Manifest, ObjectRef, decode_group, decode_root};
use stream_s3_core::units::{Epoch, Offset, Revision, Uid};

use crate::bucket::Body;
use crate::cluster::{Member, StoredChunk, Writer};
use crate::env::{CLOCK_ERROR, Cached, Env};
use crate::gc;
use crate::metadata::RootEntry;

type Identity = (u64, u64, u32);

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
    /// What was lost of it.
    lost: BTreeMap<u64, Rc<StoredChunk>>,
    /// How often committed chunks were lost.
    pub(crate) losses: u64,
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
    /// The end of the committed log.
    pub(crate) fn end(&self) -> u64 {
        self.truth.last_key_value().map_or(0, |(_, c)| c.next())
    }

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

    /// A chunk of the tier that the committed log does not have. In front of the log's beginning, as far as it is known after
    /// a loss, nothing can be said.
    fn is_phantom(&self, tier: &Tier) -> Option<Identity> {
        let begin = self.truth.first_key_value().map_or(0, |(id, _)| *id);
        let mut all = tier.fragments.iter().flat_map(|live| &live.parsed.chunks);
        all.find(|identity| match self.truth.get(&identity.0) {
            Some(chunk) => chunk.identity() != **identity,
            None => self
                .chunks
                .get(identity)
                .is_none_or(|chunk| chunk.next() > begin),
        })
        .copied()
    }

    /// Whether no chunk of the committed log ends where the manifest does.
    fn ends_nowhere(&self, manifest: &Manifest) -> bool {
        let next = manifest.next_offset.0;
        let begin = self.truth.first_key_value().map_or(0, |(id, _)| *id);
        next > begin && next != self.end() && !self.truth.contains_key(&next)
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
    // --- the log -----------------------------------------------------------------------------------------------------

    /// The commit offset has moved.
    pub(crate) fn committed(&mut self) {
        let Some((leader, writer)) = self.cluster.current() else {
            return;
        };
        let member = &self.cluster.members[leader];
        let committed = u64::try_from(writer.committed).unwrap_or(0);
        'segments: for segment in member.segments.iter().rev() {
            for (chunk, _) in segment.borrow().chunks.iter().rev() {
                if chunk.id > committed {
                    continue;
                }
                let known = self.oracle.truth.insert(chunk.id, chunk.clone());
                if known.is_some_and(|known| known.identity() == chunk.identity()) {
                    break 'segments;
                }
                self.oracle.chunks.insert(chunk.identity(), chunk.clone());
            }
        }
    }

    /// A writer was elected. What it lacks of the committed log is lost.
    pub(crate) fn elected(&mut self) {
        let Some((leader, writer)) = self.cluster.current() else {
            return;
        };
        self.oracle.nodes.insert(writer.epoch, leader);
        let member = &self.cluster.members[leader];
        let first = member.range().first.unwrap_or(0);
        let lost = self
            .oracle
            .truth
            .range(first..)
            .find(|(id, chunk)| {
                member.chunk_at(**id).map(|found| found.identity()) != Some(chunk.identity())
            })
            .map(|(id, _)| *id);
        if let Some(lost) = lost {
            let mut gone = self.oracle.truth.split_off(&lost);
            self.oracle.lost.append(&mut gone);
            self.oracle.losses += 1;
            self.coverage.hit("committed chunks lost");
            self.note(|| format!("all committed chunks from {lost} on are lost"));
        }
        // A member that was away may bring back what had been lost, also what it has trimmed: one chunk vouches for all in front of it.
        let back: Vec<Rc<StoredChunk>> = self.cluster.members[leader]
            .chunks()
            .into_iter()
            .filter(|chunk| self.oracle.chunks.contains_key(&chunk.identity()))
            .collect();
        let oracle = &mut self.oracle;
        if let Some(oldest) = back.first()
            && oracle.lost.get(&oldest.id) == Some(oldest)
            && oracle.end() < oldest.id
        {
            let between: Vec<_> = oracle.lost.range(oracle.end()..oldest.id).collect();
            let between: Vec<_> = between.into_iter().map(|(_, c)| c.clone()).collect();
            oracle.truth.extend(between.into_iter().map(|c| (c.id, c)));
        }
        oracle
            .truth
            .extend(back.into_iter().map(|chunk| (chunk.id, chunk)));
    }

    /// A reader goes on with a tier whose newest chunk its log has trimmed. If the log was lost and grew to fit, nobody can tell: what is
    /// tiered counts as the truth from now on.
    pub(crate) fn resumed_blindly(&mut self, node: usize) {
        let Some(tier) = &self.oracle.tier else {
            return;
        };
        let local = self.cluster.members[node].range().first.unwrap_or(0);
        let (first, next) = (tier.manifest.first_offset.0, tier.manifest.next_offset.0);
        if next > local || self.oracle.is_phantom(tier).is_none() {
            return;
        }
        let tiered: Vec<Identity> = tier
            .fragments
            .iter()
            .flat_map(|live| live.parsed.chunks.iter().copied())
            .collect();
        self.coverage.hit("another timeline that nobody can tell");
        let oracle = &mut self.oracle;
        oracle.truth.retain(|id, _| *id < first || *id >= next);
        for identity in tiered {
            if let Some(chunk) = oracle.chunks.get(&identity) {
                oracle.truth.insert(identity.0, chunk.clone());
            }
        }
    }

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
            self.oracle.tier.as_ref().is_some_and(|tier| {
                tier.manifest.next_offset.0 >= offset && self.oracle.is_phantom(tier).is_none()
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

    // --- the stores --------------------------------------------------------------------------------------------------

    /// An object is about to be stored.
    pub(crate) fn stored(&mut self, key: &str, body: &Body) {
        let check = invariants::anchor_first(self.oracle.anchored, 1);
        self.check(check);
        if let Some((there, _)) = self.bucket.objects.get(key)
            && there != body
        {
            self.violate(7, format!("{key} is stored again with other bytes"));
        }
    }

    /// Objects are about to be deleted.
    pub(crate) fn deleted(&mut self, keys: &[String]) {
        let tiers = self.oracles().filter_map(|oracle| oracle.tier.as_ref());
        let needed = tiers
            .flat_map(|tier| keys.iter().filter(|key| tier.keys.contains(*key)))
            .next()
            .cloned();
        if let Some(key) = needed {
            let what = format!("{key} is deleted while the persisted manifest needs it");
            self.violate(2, what);
        }
    }

    /// INV-11: what the garbage collection takes is dead by what the metadata store says now, and no discarded tier goes before its time.
    pub(crate) fn collected(&mut self, collected: &Collected<'_>) {
        if !collected.proof {
            self.violate(11, "garbage is deleted on an old proof".into());
        }
        if self.oracle.deleted {
            // With its stream all of it may go.
            return;
        }
        let grace = self.plan.discarded_grace as i64 - 2 * CLOCK_ERROR;
        let now = self.now as i64;
        let early = self
            .oracle
            .discarded
            .iter()
            .filter(|(at, _)| now < at + grace)
            .find_map(|(_, tier)| collected.keys.iter().find(|key| tier.contains(*key)));
        if let Some(key) = early.cloned() {
            self.violate(
                11,
                format!("{key} is of a discarded tier, and deleted too early"),
            );
        }
    }

    pub(crate) fn anchored(&mut self) {
        self.oracle.anchored = true;
    }

    /// The metadata store has another root.
    pub(crate) fn swapped(&mut self, before: Option<(RootEntry, u64)>, entry: RootEntry, at: u64) {
        let revision = Revision(at);
        let after = (Epoch(entry.1), revision);
        let before = before.map(|(entry, revision)| (Epoch(entry.1), Revision(revision)));
        let check = invariants::fencing(before, after);
        self.check(check);
        match self.tier_of(entry, revision) {
            Ok(tier) => {
                match self.follows(self.oracle.tier.as_ref(), &tier) {
                    Ok(true) => {}
                    Ok(false) => self.discard_tier(),
                    Err(violation) => self.check(Err(violation)),
                }
                self.oracle.history.push(tier.manifest.clone());
                self.oracle.tier = Some(tier);
            }
            Err(violation) => self.check(Err(violation)),
        }
    }

    /// The tier so far has been replaced: who did has to have noted that before.
    fn discard_tier(&mut self) {
        let Some(tier) = &self.oracle.tier else {
            return;
        };
        match self.metadata.discarded {
            Some(at) => {
                self.coverage.hit("tier discarded");
                self.oracle.discarded.push((at, tier.keys.clone()));
            }
            None => self.violate(5, "a tier is discarded, and nobody has noted when".into()),
        }
    }

    /// What a root leads to, all of it checked.
    fn tier_of(&mut self, entry: RootEntry, revision: Revision) -> Result<Tier, Violation> {
        let root = key::root(&self.prefix, &self.stream, Epoch(entry.1), Uid(entry.0));
        let Some((bytes, _)) = self.bucket.objects.get(&root) else {
            return Err(Violation {
                invariant: 2,
                what: format!("{root} became current and is not there"),
            });
        };
        let mut manifest = decode_root(bytes).map_err(|error| Violation {
            invariant: 1,
            what: format!("{root}: {error}"),
        })?;
        manifest.revision = revision;
        let mut tier = Tier {
            fragments: Vec::new(),
            keys: BTreeSet::from([root]),
            entry,
            manifest,
        };
        let entries = tier.manifest.entries.to_vec();
        self.resolve_entries(&entries, tier.manifest.next_offset, &mut tier)?;
        let listed: Vec<Listed> = tier
            .fragments
            .iter()
            .map(|live| Listed {
                first: Offset(live.parsed.first),
                next: Offset(live.parsed.next),
                size: live.parsed.size,
            })
            .collect();
        invariants::coverage(&tier.manifest, &listed)?;
        Ok(tier)
    }

    fn resolve_entries(
        &mut self,
        entries: &[Entry],
        end: Offset,
        tier: &mut Tier,
    ) -> Result<(), Violation> {
        for (index, entry) in entries.iter().enumerate() {
            let next = entries.get(index + 1).map_or(end, |next| next.first_offset);
            // Consumed by retention, which leaves the group that lists it.
            if next <= tier.manifest.first_offset {
                continue;
            }
            let (kind, first) = (entry.kind, entry.first_offset);
            let key = key::entry(&self.prefix, &self.stream, kind, first, entry.uid);
            let Some((body, _)) = self.bucket.objects.get(&key).cloned() else {
                return Err(Violation {
                    invariant: 2,
                    what: format!("{key} is listed and not there"),
                });
            };
            tier.keys.insert(key.clone());
            match entry.object() {
                ObjectRef::Group(_) => {
                    let group = decode_group(&body).map_err(|error| Violation {
                        invariant: 1,
                        what: format!("{key}: {error}"),
                    })?;
                    self.resolve_entries(&group.entries, next, tier)?;
                }
                ObjectRef::Fragment(_) => {
                    let parsed = self.oracle.parse(&key, &body)?;
                    if (parsed.first, parsed.next, parsed.size) != (first.0, next.0, entry.size) {
                        return Err(Violation {
                            invariant: 1,
                            what: format!("{key} holds [{}, {})", parsed.first, parsed.next),
                        });
                    }
                    tier.fragments.push(Live { key, parsed });
                }
            }
        }
        Ok(())
    }

    /// INV-4 and INV-9: the new tier continues the old one, or there was a reason to begin anew. Whether it continues.
    fn follows(&self, before: Option<&Tier>, after: &Tier) -> Result<bool, Violation> {
        let node = self.oracle.nodes.get(&after.entry.1).copied().unwrap_or(0);
        let member = &self.cluster.members[node];
        let alive = member.writer.is_some_and(|w| w.epoch == after.entry.1);
        let local_first = member.range().first.map_or(u64::MAX, |first| first);
        let (first, next) = (after.manifest.first_offset.0, after.manifest.next_offset.0);
        let starts = |what: &str| {
            if alive && first > local_first {
                let what = format!("{what} begins at {first}, the log at {local_first}");
                return Err(Violation { invariant: 4, what });
            }
            Ok(())
        };
        let Some(before) = before else {
            return starts("the first tier").map(|()| true);
        };
        let old = &before.manifest;
        let kept: Vec<&Live> = before
            .fragments
            .iter()
            .filter(|live| live.parsed.next > first)
            .collect();
        let same = kept.len() <= after.fragments.len()
            && kept
                .iter()
                .zip(&after.fragments)
                .all(|(old, new)| old.key == new.key);
        let continues =
            same && next >= old.next_offset.0 && (!kept.is_empty() || first == old.next_offset.0);
        if continues {
            return self.dropped_rightly(before, &kept, first).map(|()| true);
        }
        let gap = first > old.next_offset.0 && (!alive || local_first > old.next_offset.0);
        // A writer whose own log lost records, while another has them still: it cannot know.
        let lossy = self.oracle.losses > 0 && contradicts(member, before);
        let wrong = self.oracle.is_phantom(before).is_some() || self.oracle.ends_nowhere(old);
        if gap || wrong || lossy {
            return starts("a new tier").map(|()| false);
        }
        Err(Violation {
            invariant: 4,
            what: format!(
                "[{}, {}) was replaced by [{first}, {next}) without a reason",
                old.first_offset, old.next_offset
            ),
        })
    }

    /// INV-9: what is gone was over the limit.
    fn dropped_rightly(&self, before: &Tier, kept: &[&Live], first: u64) -> Check {
        let dropped = before.fragments.len() - kept.len();
        let Some(last) = dropped.checked_sub(1) else {
            if first == before.manifest.first_offset.0 || before.fragments.is_empty() {
                return Ok(());
            }
            return fail(9, "the first offset moved inside a fragment");
        };
        let size: u64 = kept.iter().map(|live| live.parsed.size).sum();
        let size = u128::from(size + before.fragments[last].parsed.size);
        let too_large = self.plan.remote_max_bytes.is_some_and(|limit| size > limit);
        // By the clock at its furthest: it may have been set back since.
        let too_old = self.plan.remote_max_age.is_some_and(|age| {
            let newest = before.fragments[last].parsed.chunks.last();
            let written = newest.and_then(|identity| self.oracle.chunks.get(identity));
            written.is_some_and(|chunk| chunk.timestamp < self.latest_clock - age as i64)
        });
        if too_large || too_old {
            return Ok(());
        }
        fail(9, format!("fragments below {first} dropped for no reason"))
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
