//! Which root a stream's pointer is rebuilt from when the metadata store has lost it.
//!
//! The bucket does not know which root was current, so the newest one is taken whose every group can be read and whose every
//! fragment is there: a root is stored only after what it lists, so each of them is a tier that was true once. What is newer and
//! damaged is passed over, and said. [`Search`] asks for one object after the other; whoever drives it has listed the stream first.

#[cfg(test)]
mod tests;

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::FormatError;
use crate::fragment::{INDEX_RECORD_SIZE, OBJECT_HEADER};
use crate::invariants::{Listed, Violation, coverage};
use crate::key::{ParsedKey, StreamId};
use crate::manifest::{self, Entry, EntryKind, Manifest};
use crate::units::{Epoch, Offset, Uid};

/// What makes one root newer than another: the epoch of its writer, whether it can be decoded, how far it reaches, how far
/// retention has come, and when it was stored (milliseconds since the Unix epoch, where the store says). Greater is newer.
#[must_use]
pub fn compare_age(left: &Aged<'_>, right: &Aged<'_>) -> Ordering {
    age(left).cmp(&age(right))
}

/// What of a root tells its age.
#[derive(Debug, Clone, Copy)]
pub struct Aged<'a> {
    /// Part of its key.
    pub epoch: Epoch,
    /// Part of its key.
    pub uid: Uid,
    /// `None` where it cannot be decoded.
    pub manifest: Option<&'a Manifest>,
    /// Milliseconds since the Unix epoch.
    pub modified_ms: Option<i64>,
}

fn age(root: &Aged<'_>) -> (Epoch, bool, Offset, Offset, Option<i64>, Uid) {
    let (next, first) = root.manifest.map_or((Offset(0), Offset(0)), |manifest| {
        (manifest.next_offset, manifest.first_offset)
    });
    (
        root.epoch,
        root.manifest.is_some(),
        next,
        first,
        root.modified_ms,
        root.uid,
    )
}

/// An object below the stream's prefix, as listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    /// What its key names.
    pub key: ParsedKey,
    /// Bytes.
    pub size: u64,
    /// When it was stored, milliseconds since the Unix epoch, where the store says.
    pub modified_ms: Option<i64>,
}

/// Why a root is passed over.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Defect {
    /// It was listed, and was gone when it was to be read.
    #[error("it is gone")]
    Gone,
    /// It cannot be decoded.
    #[error("it cannot be read: {0}")]
    Damaged(#[from] FormatError),
    /// A group below it is not there.
    #[error("its group at offset {0} is not there")]
    GroupMissing(Offset),
    /// A group below it cannot be decoded.
    #[error("its group at offset {0} cannot be read: {1}")]
    GroupDamaged(Offset, FormatError),
    /// A group below it is of another level than its entry says, or lists what it must not.
    #[error("its group at offset {0} is not of the kind that it should be")]
    GroupKind(Offset),
    /// A fragment is not there.
    #[error("its fragment at offset {0} is not there")]
    FragmentMissing(Offset),
    /// A fragment's object cannot have the bytes that its entry says and an index.
    #[error(
        "the object of its fragment at offset {first} has {found} bytes, which do not fit {data} bytes of data and an index"
    )]
    FragmentLength {
        /// Where the fragment begins.
        first: Offset,
        /// Bytes of the object.
        found: u64,
        /// Bytes that the entry says.
        data: u64,
    },
    /// What it lists does not make up what it says of itself.
    #[error("it contradicts what it lists: {0}")]
    Contradiction(#[from] Violation),
}

/// A root that was passed over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejected {
    /// Of the writer that stored it.
    pub epoch: Epoch,
    /// Of the attempt that stored it.
    pub uid: Uid,
    /// Why.
    pub defect: Defect,
}

/// The root to be taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// Of the writer that stored it.
    pub epoch: Epoch,
    /// Of the attempt that stored it.
    pub uid: Uid,
    /// What it holds.
    pub manifest: Manifest,
    /// Fragments that it lists, also by groups.
    pub fragments: u64,
    /// Groups that were read.
    pub groups: u64,
    /// Why this one: a sentence.
    pub why: String,
    /// Newer ones that cannot be taken, newest first.
    pub passed_over: Vec<Rejected>,
}

/// What the search wants, or what it came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Read this object, and tell by [`Search::found`].
    Read(ParsedKey),
    /// Take this root.
    Take(Box<Choice>),
    /// There is none that could be taken; these were looked at, newest first.
    Refuse(Vec<Rejected>),
}

#[derive(Debug, Clone)]
struct Root {
    epoch: Epoch,
    uid: Uid,
    modified_ms: Option<i64>,
    manifest: Option<Result<Manifest, Defect>>,
}

/// The walk below one root.
#[derive(Debug, Clone, Default)]
struct Walk {
    /// Entries to be looked at with the offset at which each ends, the oldest last.
    pending: Vec<(Entry, Offset)>,
    fragments: Vec<Listed>,
    groups: u64,
}

/// A search. A value; a clone costs the entries that are still to be looked at.
#[derive(Debug, Clone)]
pub struct Search {
    stream: StreamId,
    named: bool,
    /// Bytes of each fragment's object.
    sizes: Arc<BTreeMap<(Offset, Uid), u64>>,
    /// As listed until all are read, then newest first.
    roots: Vec<Root>,
    walk: Option<Walk>,
    passed_over: Vec<Rejected>,
}

impl Search {
    /// Begins with all objects of a stream, in any order. With `named` only that root is considered. Linear.
    #[must_use]
    pub fn new(
        stream: StreamId,
        objects: impl IntoIterator<Item = Object>,
        named: Option<(Epoch, Uid)>,
    ) -> Self {
        let mut sizes = BTreeMap::new();
        let mut roots = Vec::new();
        for object in objects {
            match object.key {
                ParsedKey::Fragment {
                    first_offset, uid, ..
                } => {
                    sizes.insert((first_offset, uid), object.size);
                }
                ParsedKey::Root { epoch, uid, .. }
                    if named.is_none_or(|name| name == (epoch, uid)) =>
                {
                    roots.push(Root {
                        epoch,
                        uid,
                        modified_ms: object.modified_ms,
                        manifest: None,
                    });
                }
                ParsedKey::Root { .. } | ParsedKey::Group { .. } | ParsedKey::History { .. } => {}
            }
        }
        Self {
            stream,
            named: named.is_some(),
            sizes: Arc::new(sizes),
            roots,
            walk: None,
            passed_over: Vec::new(),
        }
    }

    /// What to do next. Linear in the entries of the root at hand when it comes to an end, constant otherwise.
    #[must_use]
    pub fn next(&self) -> Step {
        if let Some(root) = self.roots.iter().find(|root| root.manifest.is_none()) {
            return Step::Read(ParsedKey::Root {
                stream: self.stream.clone(),
                epoch: root.epoch,
                uid: root.uid,
            });
        }
        match (&self.walk, self.roots.first()) {
            (Some(walk), Some(root)) => match walk.pending.last() {
                Some((entry, _)) => Step::Read(ParsedKey::Group {
                    stream: self.stream.clone(),
                    kind: entry.kind,
                    first_offset: entry.first_offset,
                    uid: entry.uid,
                }),
                None => self.taken(root, walk),
            },
            _ => Step::Refuse(self.passed_over.clone()),
        }
    }

    /// What was found where [`Self::next`] wanted to read: the object's bytes, `None` where there is no such object. Ignored when
    /// nothing was wanted. Linear in the object's entries.
    pub fn found(&mut self, bytes: Option<&[u8]>) {
        if let Some(root) = self.roots.iter_mut().find(|root| root.manifest.is_none()) {
            root.manifest = Some(match bytes {
                None => Err(Defect::Gone),
                Some(bytes) => manifest::decode_root(bytes).map_err(Defect::from),
            });
            if self.roots.iter().all(|root| root.manifest.is_some()) {
                self.roots
                    .sort_by(|left, right| compare_age(&right.aged(), &left.aged()));
                self.begin();
            }
            return;
        }
        let Some(mut walk) = self.walk.take() else {
            return;
        };
        let result = walk.group(bytes).and_then(|()| self.descend(&mut walk));
        self.walked(result, walk);
    }

    /// Walks the newest root that is left, up to the first group, or passes it over.
    fn begin(&mut self) {
        let Some(root) = self.roots.first() else {
            return;
        };
        let mut walk = Walk::default();
        let result = match &root.manifest {
            Some(Ok(manifest)) => {
                walk.add(
                    manifest.entries.iter().copied().collect(),
                    manifest.next_offset,
                );
                self.descend(&mut walk)
            }
            Some(Err(defect)) => Err(defect.clone()),
            None => return,
        };
        self.walked(result, walk);
    }

    fn walked(&mut self, result: Result<(), Defect>, walk: Walk) {
        match result {
            Ok(()) => self.walk = Some(walk),
            Err(defect) => {
                let root = self.roots.remove(0);
                self.passed_over.push(Rejected {
                    epoch: root.epoch,
                    uid: root.uid,
                    defect,
                });
                self.begin();
            }
        }
    }

    /// Looks at entries until one is a group, which must be read first, or none is left.
    fn descend(&self, walk: &mut Walk) -> Result<(), Defect> {
        let Some(Some(Ok(manifest))) = self.roots.first().map(|root| &root.manifest) else {
            return Ok(());
        };
        while let Some((entry, end)) = walk.pending.last().copied() {
            // Retention has taken it, and its object may be gone.
            if end > manifest.first_offset {
                if entry.kind != EntryKind::Fragment {
                    return Ok(());
                }
                walk.fragments.push(self.fragment(&entry, end)?);
            }
            walk.pending.pop();
        }
        Ok(coverage(manifest, &walk.fragments)?)
    }

    fn fragment(&self, entry: &Entry, next: Offset) -> Result<Listed, Defect> {
        let first = entry.first_offset;
        let Some(found) = self.sizes.get(&(first, entry.uid)).copied() else {
            return Err(Defect::FragmentMissing(first));
        };
        let index = found
            .checked_sub(OBJECT_HEADER.len() as u64)
            .and_then(|rest| rest.checked_sub(entry.size));
        match index {
            Some(index) if index > 0 && index % INDEX_RECORD_SIZE as u64 == 0 => Ok(Listed {
                first,
                next,
                size: entry.size,
            }),
            Some(_) | None => Err(Defect::FragmentLength {
                first,
                found,
                data: entry.size,
            }),
        }
    }

    fn taken(&self, root: &Root, walk: &Walk) -> Step {
        let Some(Ok(manifest)) = &root.manifest else {
            return Step::Refuse(self.passed_over.clone());
        };
        Step::Take(Box::new(Choice {
            epoch: root.epoch,
            uid: root.uid,
            manifest: manifest.clone(),
            fragments: walk.fragments.len() as u64,
            groups: walk.groups,
            why: self.why(root, manifest),
            passed_over: self.passed_over.clone(),
        }))
    }

    fn why(&self, root: &Root, manifest: &Manifest) -> String {
        let all_there = "all that it lists is there";
        if self.named {
            return format!("it was asked for, and {all_there}");
        }
        let rivals = self.roots.len() - 1;
        let same_epoch = self.roots[1..]
            .iter()
            .any(|other| other.epoch == root.epoch);
        let newest = if self.passed_over.is_empty() {
            "the newest"
        } else {
            "the newest that is sound"
        };
        let because = match (rivals, same_epoch) {
            (0, _) => "no other is left to choose from".to_owned(),
            (_, true) => format!(
                "of its epoch {} it reaches furthest, to offset {}",
                root.epoch, manifest.next_offset
            ),
            (_, false) => format!("its epoch {} is the highest", root.epoch),
        };
        format!("it is {newest}: {because}, and {all_there}")
    }
}

impl Root {
    fn aged(&self) -> Aged<'_> {
        Aged {
            epoch: self.epoch,
            uid: self.uid,
            manifest: match &self.manifest {
                Some(Ok(manifest)) => Some(manifest),
                Some(Err(_)) | None => None,
            },
            modified_ms: self.modified_ms,
        }
    }
}

impl Walk {
    /// Puts entries in front of what is pending; the last of them ends at `end`.
    fn add(&mut self, entries: Vec<Entry>, end: Offset) {
        let mut end = end;
        for entry in entries.into_iter().rev() {
            self.pending.push((entry, end));
            end = entry.first_offset;
        }
    }

    /// Replaces the group that is looked at by its entries.
    fn group(&mut self, bytes: Option<&[u8]>) -> Result<(), Defect> {
        let Some((entry, end)) = self.pending.pop() else {
            return Ok(());
        };
        let at = entry.first_offset;
        let bytes = bytes.ok_or(Defect::GroupMissing(at))?;
        let group =
            manifest::decode_group(bytes).map_err(|error| Defect::GroupDamaged(at, error))?;
        let is_below = |child: &Entry| child.kind.parent() == Some(group.kind);
        if group.kind != entry.kind || !group.entries.iter().all(is_below) {
            return Err(Defect::GroupKind(at));
        }
        self.groups += 1;
        self.add(group.entries, end);
        Ok(())
    }
}
