//! What must hold, as code: a function an invariant, under the numbers of ARCHITECTURE.md. Tests and the simulation call them after
//! every step; in production only [`crate::decisions::adoption`] does, which trusts nothing that it reads.
//!
//! Two have no function. 11 (garbage is deleted on proof only) is [`crate::decisions::gc::verdict`] itself, and 12 (nothing here blocks) is
//! a property of time, which this crate does not have.

use crate::decisions::commit::chunk_is_committed;
use crate::decisions::deletions::may_delete;
use crate::manifest::{EntryKind, Manifest, ObjectRef, apply_edit};
use crate::replica_reader::Machine;
use crate::units::{Epoch, Offset, Revision};

/// An invariant that does not hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("INV-{invariant}: {what}")]
pub struct Violation {
    /// Its number.
    pub invariant: u8,
    /// What was found.
    pub what: String,
}

/// What a check answers.
pub type Check = Result<(), Violation>;

fn require(holds: bool, invariant: u8, what: impl FnOnce() -> String) -> Check {
    if holds {
        Ok(())
    } else {
        Err(Violation {
            invariant,
            what: what(),
        })
    }
}

/// A fragment that a manifest lists, with its groups resolved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listed {
    /// Its first offset.
    pub first: Offset,
    /// The offset after its last record, as its own index says.
    pub next: Offset,
    /// Its bytes.
    pub size: u64,
}

/// INV-1, coverage: the live fragments of a manifest, oldest first, are disjoint, ordered, and cover exactly its range; its total size is
/// theirs (INV-9).
pub fn coverage(manifest: &Manifest, fragments: &[Listed]) -> Check {
    let mut at = manifest.first_offset;
    let mut total = 0u128;
    for fragment in fragments {
        require(
            fragment.first == at && fragment.next > fragment.first,
            1,
            || format!("expected a fragment at {at}, found {fragment:?}"),
        )?;
        at = fragment.next;
        total += u128::from(fragment.size);
    }
    require(at == manifest.next_offset, 1, || {
        format!(
            "fragments end at {at}, the manifest at {}",
            manifest.next_offset
        )
    })?;
    require(total == manifest.total_size, 9, || {
        format!(
            "fragments have {total} bytes, the manifest says {}",
            manifest.total_size
        )
    })
}

/// INV-1, as far as a root alone can tell: it is well-formed; one without entries has an empty range and no bytes; and the total size is
/// that of the fragments, or more where there are groups.
pub fn root_coverage(manifest: &Manifest) -> Check {
    manifest.check().map_err(|error| Violation {
        invariant: 1,
        what: error.to_string(),
    })?;
    let listed: u128 = manifest
        .entries
        .iter()
        .map(|entry| u128::from(entry.size))
        .sum();
    let groups = manifest
        .entries
        .iter()
        .any(|entry| entry.kind != EntryKind::Fragment);
    let fits = if groups {
        listed <= manifest.total_size
    } else {
        listed == manifest.total_size
    };
    require(fits, 9, || {
        format!(
            "entries have {listed} bytes, the manifest says {}",
            manifest.total_size
        )
    })?;
    require(
        !manifest.entries.is_empty() || manifest.first_offset == manifest.next_offset,
        1,
        || format!("no entries, but a range up to {}", manifest.next_offset),
    )
}

/// INV-2, durability: every object that the manifest lists directly is in the store.
pub fn durability(manifest: &Manifest, stored: impl Fn(&ObjectRef) -> bool) -> Check {
    let missing = manifest
        .entries
        .iter()
        .map(|entry| entry.object())
        .find(|object| !stored(object));
    require(missing.is_none(), 2, || {
        format!("listed, but not stored: {missing:?}")
    })
}

/// INV-3, committed only: a chunk that was drained is committed. `committed` as in [`chunk_is_committed`].
pub fn committed_only(chunk_id: Offset, committed: i64) -> Check {
    require(chunk_is_committed(chunk_id, committed), 3, || {
        format!("chunk {chunk_id} drained, committed is {committed}")
    })
}

/// INV-4, contiguous advance: within a timeline the next offset of successive manifests never decreases.
pub fn contiguous_advance(before: &Manifest, after: &Manifest) -> Check {
    require(after.next_offset >= before.next_offset, 4, || {
        format!(
            "next offset went back from {} to {}",
            before.next_offset, after.next_offset
        )
    })
}

/// INV-5, gate: what is published is what is persisted.
pub fn gate(published: &Manifest, persisted: &Manifest) -> Check {
    require(published == persisted, 5, || {
        let (shown, there) = (published.revision, persisted.revision);
        format!("published revision {shown} is not the persisted one, {there}")
    })
}

/// INV-6, anchor first: no object of a stream is stored before its anchor.
pub fn anchor_first(anchored: bool, objects: usize) -> Check {
    require(anchored || objects == 0, 6, || {
        format!("{objects} objects without an anchor")
    })
}

/// INV-7, fencing: metadata that was written replaces an older revision, and not a later epoch.
pub fn fencing(before: Option<(Epoch, Revision)>, after: (Epoch, Revision)) -> Check {
    let holds = before.is_none_or(|(epoch, revision)| after.0 >= epoch && after.1 > revision);
    require(holds, 7, || format!("{before:?} was replaced by {after:?}"))
}

/// INV-8, single mutator: entries do not move into a group while retention drops some.
pub fn single_mutator<T: Clone>(machine: &Machine<T>) -> Check {
    let status = machine.status();
    require(
        !(status.rebalance_in_flight && status.retention_in_flight),
        8,
        || "a group and a retention are both in flight".to_string(),
    )
}

/// INV-9, retention: an edit dropped a prefix and nothing else, and the objects it names lie wholly below what is left.
pub fn retention(before: &Manifest, after: &Manifest, dropped: &[ObjectRef]) -> Check {
    let kept = after.entries.len();
    let same_tail = before.entries.len() >= kept
        && before
            .entries
            .iter()
            .skip(before.entries.len() - kept)
            .eq(after.entries.iter());
    require(
        same_tail && after.next_offset == before.next_offset,
        9,
        || "retention changed more than a prefix".to_string(),
    )?;
    require(after.first_offset >= before.first_offset, 9, || {
        format!(
            "first offset went back from {} to {}",
            before.first_offset, after.first_offset
        )
    })?;
    let still_used = dropped
        .iter()
        .find(|object| object.offset() >= after.first_offset);
    require(still_used.is_none(), 9, || {
        format!("dropped, but in use: {still_used:?}")
    })
}

/// INV-9, order: objects below `dropped_below` are deleted only once that is persisted.
pub fn deletion_after_persist(dropped_below: Offset, persisted: &Manifest) -> Check {
    require(may_delete(dropped_below, persisted.first_offset), 9, || {
        format!(
            "deleted up to {dropped_below}, persisted from {}",
            persisted.first_offset
        )
    })
}

/// INV-10, replica prefix: a replica's manifest is one that the writer persisted, under the same revision. `history` is ascending.
pub fn replica_prefix(replica: &Manifest, history: &[Manifest]) -> Check {
    let found = history.binary_search_by_key(&replica.revision, |manifest| manifest.revision);
    let same = found.is_ok_and(|index| history.get(index) == Some(replica));
    require(same || replica.revision == Revision(0), 10, || {
        format!(
            "no manifest like that was persisted as revision {}",
            replica.revision
        )
    })
}

/// The machine agrees with itself: the persisted manifest and the edits that wait make the speculative one, both are whole (INV-1), and
/// INV-8 holds.
pub fn machine<T: Clone>(machine: &Machine<T>) -> Check {
    root_coverage(machine.persisted_manifest())?;
    root_coverage(machine.manifest())?;
    single_mutator(machine)?;
    let mut manifest = machine.persisted_manifest().clone();
    for edit in machine.unpersisted_edits() {
        manifest = apply_edit(edit, &manifest).map_err(|error| Violation {
            invariant: 10,
            what: error.to_string(),
        })?;
    }
    require(&manifest == machine.manifest(), 10, || {
        "the edits that wait do not lead from the persisted manifest to the speculative one"
            .to_string()
    })
}
