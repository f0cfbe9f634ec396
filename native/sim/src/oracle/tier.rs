//! What the stores are told to hold: objects, roots that become current, deletions.

use std::collections::BTreeSet;

use stream_s3_core::invariants::{self, Check, Listed, Violation};
use stream_s3_core::key;
use stream_s3_core::manifest::{Entry, ObjectRef, decode_group, decode_root};
use stream_s3_core::units::{Epoch, Offset, Revision, Uid};

use super::{Collected, Live, Tier, contradicts, fail};
use crate::bucket::Body;
use crate::env::{CLOCK_ERROR, Env};
use crate::metadata::RootEntry;

impl Env {
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
        // Of who noted it, of who took the note over and of who collects.
        let grace = self.plan.discarded_grace as i64 - 3 * CLOCK_ERROR;
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
        match self.metadata.discarded.and_then(|note| note.at) {
            Some(at) => {
                self.coverage.hit("tier discarded");
                self.oracle.discarded.push((at.0, tier.keys.clone()));
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
        let wrong = self.oracle.is_phantom(before).is_some() || self.oracle.ends_nowhere(old);
        if continues {
            let dropped = self.dropped_rightly(before, &kept, first);
            // Unless it begins anew just where one of another timeline ended.
            if dropped.is_ok() || !kept.is_empty() || !wrong {
                return dropped.map(|()| true);
            }
        }
        let gap = first > old.next_offset.0 && (!alive || local_first > old.next_offset.0);
        // A writer whose own log lost records, while another has them still: it cannot know.
        // What it decided may land when it is deposed, and the log that it lacked is back.
        let late = !alive && self.oracle.lacking.contains(&after.entry.1);
        let lossy = self.oracle.losses > 0 && (contradicts(member, before) || late);
        // Without a fragment nothing tells whose end it is, once a log was lost: that of the log that is gone, even if the one
        // that grew in its place has reached it by now.
        let blank = self.oracle.losses > 0 && before.fragments.is_empty();
        if gap || wrong || lossy || blank {
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
}
