//! `verify`: reads everything a stream's root names, and says what is wrong with it.

use std::collections::HashSet;

use futures::stream::{self, StreamExt};
use stream_s3_core::key::{self, ParsedKey, Prefix, StreamId};
use stream_s3_core::manifest::{Entry, EntryKind};
use stream_s3_core::units::{Epoch, Offset, Uid};
use stream_s3_store::Part;

use crate::check::{self, Checked};
use crate::finding::{Finding, FindingKind};
use crate::progress::Progress;
use crate::reader::{Failed, PAGE, Patience, Reader, next_piece};
use crate::tree::{self, Node, Root};
use crate::walk::{Flow, Outcome, Walk};

/// What a verification came to.
#[derive(Debug, Default)]
pub(crate) struct Verified {
    /// The root it started from, as an index into `roots`; `None` where no root could be read.
    pub(crate) chosen: Option<usize>,
    /// All roots of the stream, newest first.
    pub(crate) roots: Vec<Root>,
    /// What is wrong, in tree order.
    pub(crate) findings: Vec<Finding>,
    /// Findings left out because their object has more than enough already.
    pub(crate) suppressed: u64,
    /// Fragments walked.
    pub(crate) fragments: u64,
    /// Chunks walked.
    pub(crate) chunks: u64,
    /// Records in them, all chunk types.
    pub(crate) records: u64,
    /// Data bytes of the fragments walked, as their entries say.
    pub(crate) bytes: u64,
    /// What lies under the stream's prefix and is not part of the tree.
    pub(crate) orphans: Orphans,
    /// What the reader of the report should know besides.
    pub(crate) notes: Vec<String>,
}

/// Objects that the tree does not name: uploads under way, attempts that failed, remains of older roots.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Orphans {
    /// Fragment objects.
    pub(crate) fragments: u64,
    /// Group objects of any kind.
    pub(crate) groups: u64,
    /// Root objects other than the one verified.
    pub(crate) roots: u64,
    /// Objects whose key has no shape that is known.
    pub(crate) unknown: u64,
    /// Bytes of all of them.
    pub(crate) bytes: u64,
}

impl Orphans {
    /// How many there are.
    pub(crate) fn objects(&self) -> u64 {
        self.fragments + self.groups + self.roots + self.unknown
    }
}

/// How to verify.
#[derive(Clone)]
pub(crate) struct Options {
    /// Fragments read at the same time.
    pub(crate) concurrency: usize,
    /// The root to start from; the newest one where not given.
    pub(crate) root: Option<(Epoch, Uid)>,
    /// Where to show how far it is.
    pub(crate) progress: Progress,
}

/// Verifies one stream. Reads every byte that its root names, and lists its prefix once; memory is the tree, and about 5 MiB
/// for each fragment that is read at the same time.
pub(crate) async fn verify(
    reader: &Reader,
    prefix: &Prefix,
    stream: &StreamId,
    options: &Options,
) -> Result<Verified, Failed> {
    let roots = tree::find_roots(reader, prefix, stream).await?;
    let mut verified = Verified {
        chosen: tree::choose(&roots, options.root, stream)?,
        ..Verified::default()
    };
    for (index, root) in roots.iter().enumerate() {
        // Any root may be the one that the metadata store points at, unless the user named another.
        if let (Err(why), true) = (
            &root.manifest,
            options.root.is_none() || verified.chosen == Some(index),
        ) {
            verified.findings.push(check::unreadable(
                FindingKind::RootUnreadable,
                &root.key,
                "a root",
                why,
            ));
        }
    }
    let mut named = Named::default();
    match verified.chosen.map(|index| &roots[index]) {
        Some(root) => {
            named.root = Some((root.epoch, root.uid));
            if let Ok(manifest) = &root.manifest {
                let nodes = tree::read_tree(reader, prefix, stream, manifest).await?;
                let checked = check::check_tree(&root.key, manifest, &nodes);
                named.below = below(&checked);
                verify_tree(reader, stream, checked, options, &mut verified).await?;
            }
            note_replaced(reader, root, &mut verified).await?;
        }
        None if roots.is_empty() => {
            let place = key::stream_prefix(prefix, stream);
            verified.findings.push(Finding::new(
                FindingKind::RootMissing,
                &place,
                "a root object",
                "none",
            ));
        }
        None => {}
    }
    verified.orphans = find_orphans(reader, prefix, stream, &named).await?;
    verified.roots = roots;
    Ok(verified)
}

/// Checks a tree and everything that it names, and adds what comes of it.
async fn verify_tree(
    reader: &Reader,
    stream: &StreamId,
    checked: Checked<'_>,
    options: &Options,
    verified: &mut Verified,
) -> Result<(), Failed> {
    verified.findings.extend(checked.findings);
    let total = checked.fragments.iter().map(|node| node.entry.size).sum();
    options.progress.start(stream.as_str(), total);
    let mut walks = stream::iter(&checked.fragments)
        .map(|node| walk_elsewhere(reader.clone(), (*node).clone(), options.progress.clone()))
        .buffered(options.concurrency);
    let mut epoch = None;
    let mut nodes = checked.fragments.iter();
    while let (Some(walked), Some(node)) = (walks.next().await, nodes.next()) {
        let Some(outcome) = walked? else {
            let expected = "a fragment, as its entry says";
            let finding = Finding::new(
                FindingKind::FragmentMissing,
                &node.key,
                expected,
                "no object",
            );
            verified
                .findings
                .push(finding.at_offset(node.entry.first_offset));
            continue;
        };
        verified.fragments += 1;
        verified.bytes += node.entry.size;
        verified.chunks += outcome.chunks;
        verified.records += outcome.records;
        verified.suppressed += outcome.suppressed;
        verified.findings.extend(outcome.findings);
        verified.findings.extend(
            outcome
                .next_offset
                .and_then(|end| check::check_seam(node, end)),
        );
        if let Some((first, last)) = outcome.epochs {
            verified
                .findings
                .extend(epoch.and_then(|before| check::check_epochs(node, before, first)));
            epoch = Some(last);
        }
    }
    options.progress.finish();
    Ok(())
}

/// Walks one fragment in a task of its own, so that several cores share the checksums. `None` where there is no object.
async fn walk_elsewhere(
    reader: Reader,
    node: Node,
    progress: Progress,
) -> Result<Option<Outcome>, Failed> {
    let task =
        tokio::spawn(
            async move { walk_fragment(&reader, &node.key, &node.entry, &progress).await },
        );
    match task.await {
        Ok(outcome) => outcome,
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}

async fn walk_fragment(
    reader: &Reader,
    key: &str,
    entry: &Entry,
    progress: &Progress,
) -> Result<Option<Outcome>, Failed> {
    let mut patience = Patience::new();
    loop {
        let mut read = 0;
        match walk_once(reader, key, entry, progress, &mut read).await {
            Ok(outcome) => return Ok(outcome),
            Err(failed) => {
                progress.take_back(read);
                patience.wait_or_give_up(failed).await?;
            }
        }
    }
}

async fn walk_once(
    reader: &Reader,
    key: &str,
    entry: &Entry,
    progress: &Progress,
    read: &mut u64,
) -> Result<Option<Outcome>, Failed> {
    let Some(mut object) = reader.open(key, Part::Whole).await? else {
        return Ok(None);
    };
    let mut walk = Walk::new(key, entry, object.size);
    while let Some(piece) = next_piece(key, &mut object).await? {
        let flow = walk.feed(&piece);
        // The bar counts data, of which there is `entry.size`; header and index come on top.
        let seen = (piece.len() as u64).min(entry.size - *read);
        *read += seen;
        progress.advance(seen);
        if flow == Flow::Enough {
            break;
        }
    }
    Ok(Some(walk.finish()))
}

/// An uploader at work replaces the root and retention deletes what it dropped: what is missing then is not lost.
async fn note_replaced(
    reader: &Reader,
    root: &Root,
    verified: &mut Verified,
) -> Result<(), Failed> {
    let missing = |finding: &Finding| {
        matches!(
            finding.kind,
            FindingKind::FragmentMissing | FindingKind::GroupMissing
        )
    };
    if verified.findings.iter().any(missing) && !reader.exists(&root.key).await? {
        verified.notes.push(
            "the root was replaced while it was verified, so retention may have deleted what is missing: verify again".to_owned(),
        );
    }
    Ok(())
}

/// The objects that a tree names, itself included.
#[derive(Default)]
struct Named {
    root: Option<(Epoch, Uid)>,
    below: HashSet<(EntryKind, Offset, Uid)>,
}

fn below(checked: &Checked<'_>) -> HashSet<(EntryKind, Offset, Uid)> {
    let nodes = checked.fragments.iter().chain(&checked.groups);
    nodes
        .map(|node| (node.entry.kind, node.entry.first_offset, node.entry.uid))
        .collect()
}

/// Lists the stream's prefix: one request for each 1000 objects.
async fn find_orphans(
    reader: &Reader,
    prefix: &Prefix,
    stream: &StreamId,
    named: &Named,
) -> Result<Orphans, Failed> {
    let place = key::stream_prefix(prefix, stream);
    let mut orphans = Orphans::default();
    let mut from = None;
    loop {
        let page = reader.list(&place, from.as_deref(), PAGE).await?;
        for listed in page.objects {
            let count = match key::parse(prefix, &listed.key) {
                Some(ParsedKey::Fragment {
                    first_offset, uid, ..
                }) => {
                    if named
                        .below
                        .contains(&(EntryKind::Fragment, first_offset, uid))
                    {
                        continue;
                    }
                    &mut orphans.fragments
                }
                Some(ParsedKey::Group {
                    kind,
                    first_offset,
                    uid,
                    ..
                }) => {
                    if named.below.contains(&(kind, first_offset, uid)) {
                        continue;
                    }
                    &mut orphans.groups
                }
                Some(ParsedKey::Root { epoch, uid, .. }) => {
                    if named.root == Some((epoch, uid)) {
                        continue;
                    }
                    &mut orphans.roots
                }
                Some(ParsedKey::History { .. }) | None => &mut orphans.unknown,
            };
            *count += 1;
            orphans.bytes += listed.size;
        }
        match page.next {
            Some(next) => from = Some(next),
            None => return Ok(orphans),
        }
    }
}

#[cfg(test)]
mod tests;
