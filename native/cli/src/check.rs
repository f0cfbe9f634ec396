//! What must hold between a root, its groups and its entries, as functions over decoded data.

use stream_s3_core::manifest::{Entry, EntryKind, Manifest};
use stream_s3_core::units::{Epoch, Offset};

use crate::finding::{Finding, FindingKind};
use crate::tree::{Content, Group, Node, Unreadable};

/// What a tree comes to.
#[derive(Debug, Default)]
pub(crate) struct Checked<'a> {
    /// What is wrong in it.
    pub(crate) findings: Vec<Finding>,
    /// Its surviving fragments, oldest first.
    pub(crate) fragments: Vec<&'a Node>,
    /// The group objects that it names and that are there.
    pub(crate) groups: Vec<&'a Node>,
    /// Whether some fragments are not known, because a group could not be read.
    pub(crate) incomplete: bool,
}

/// Checks a root against everything below it, down to the entries of its fragments.
pub(crate) fn check_tree<'a>(
    root_key: &str,
    manifest: &Manifest,
    nodes: &'a [Node],
) -> Checked<'a> {
    let mut checked = Checked::default();
    descend(root_key, nodes, &mut checked);
    check_start(root_key, manifest, nodes, &mut checked);
    if !checked.incomplete {
        let sum: u128 = checked
            .fragments
            .iter()
            .map(|node| u128::from(node.entry.size))
            .sum();
        if sum != manifest.total_size {
            let expected = format!("{sum} bytes, the sum of its fragments");
            checked.findings.push(Finding::new(
                FindingKind::TotalSize,
                root_key,
                expected,
                format!("{} bytes", manifest.total_size),
            ));
        }
    }
    checked
}

/// Walks the nodes of the object `parent` in order.
fn descend<'a>(parent: &str, nodes: &'a [Node], checked: &mut Checked<'a>) {
    for node in nodes {
        let offset = node.entry.first_offset;
        match &node.content {
            Content::Consumed => {}
            Content::Fragment => checked.fragments.push(node),
            Content::Missing => {
                checked.incomplete = true;
                let expected = format!("a group, as {parent} says");
                checked.findings.push(
                    Finding::new(FindingKind::GroupMissing, &node.key, expected, "no object")
                        .at_offset(offset),
                );
            }
            Content::Unreadable(why) => {
                checked.incomplete = true;
                checked.findings.push(
                    unreadable(FindingKind::GroupUnreadable, &node.key, "a group", why)
                        .at_offset(offset),
                );
            }
            Content::Group(group) => {
                checked.groups.push(node);
                checked.findings.extend(check_group(node, group));
                descend(&node.key, &group.children, checked);
            }
        }
    }
}

/// A finding about an object that cannot be decoded.
pub(crate) fn unreadable(
    kind: FindingKind,
    key: &str,
    expected: &str,
    unreadable: &Unreadable,
) -> Finding {
    let finding = Finding::new(
        kind,
        key,
        expected,
        format!("a damaged one: {}", unreadable.why),
    );
    match unreadable.byte {
        Some(byte) => finding.at_byte(byte),
        None => finding,
    }
}

/// Kind and parent entry of one group against its entries. The decoder has compared its header with them.
fn check_group(node: &Node, group: &Group) -> Vec<Finding> {
    let entry = &node.entry;
    let wrong = |kind, expected: String, found: String| {
        Finding::new(kind, &node.key, expected, found).at_offset(entry.first_offset)
    };
    let mut findings = Vec::new();
    if group.kind != entry.kind {
        let expected = format!("a {} as its entry says", kind_name(entry.kind));
        findings.push(wrong(
            FindingKind::GroupKind,
            expected,
            format!("a {}", kind_name(group.kind)),
        ));
    }
    let alien = group
        .children
        .iter()
        .find(|child| child.entry.kind.parent() != Some(group.kind));
    if let Some(child) = alien {
        let expected = format!("entries of one kind, one below a {}", kind_name(group.kind));
        let found = format!(
            "a {} at offset {}",
            kind_name(child.entry.kind),
            child.entry.first_offset
        );
        findings.push(wrong(FindingKind::GroupKind, expected, found));
    }
    let (Some(first), Some(last)) = (group.children.first(), group.children.last()) else {
        return findings;
    };
    let facts = [
        (
            "first offset",
            first.entry.first_offset.to_string(),
            entry.first_offset.to_string(),
        ),
        (
            "first timestamp",
            first.entry.first_timestamp.to_string(),
            entry.first_timestamp.to_string(),
        ),
        (
            "last timestamp",
            last.entry.last_timestamp.to_string(),
            entry.last_timestamp.to_string(),
        ),
        ("size", "0".to_owned(), entry.size.to_string()),
    ];
    for (fact, held, said) in facts {
        if held != said {
            findings.push(wrong(
                FindingKind::GroupEntry,
                format!("{fact} {held}"),
                format!("{said} in the entry that names it"),
            ));
        }
    }
    if last.entry.first_offset >= node.next_offset {
        let expected = format!("a last entry that starts below {}", node.next_offset);
        findings.push(wrong(
            FindingKind::EntryOrder,
            expected,
            format!("one that starts at {}", last.entry.first_offset),
        ));
    }
    findings
}

/// First offset and timestamps of the root against its oldest surviving fragment.
fn check_start(root_key: &str, manifest: &Manifest, nodes: &[Node], checked: &mut Checked<'_>) {
    let Some(oldest) = oldest(nodes) else {
        if checked.fragments.is_empty()
            && !checked.incomplete
            && manifest.first_offset != manifest.next_offset
        {
            let expected = format!(
                "first offset {} of a root without fragments",
                manifest.next_offset
            );
            checked.findings.push(Finding::new(
                FindingKind::RootFirstOffset,
                root_key,
                expected,
                manifest.first_offset,
            ));
        }
        return;
    };
    let facts = [
        (
            FindingKind::RootFirstOffset,
            oldest.first_offset.to_string(),
            manifest.first_offset.to_string(),
        ),
        (
            FindingKind::RootFirstTimestamp,
            oldest.first_timestamp.to_string(),
            manifest.first_timestamp.to_string(),
        ),
        (
            FindingKind::RootFirstLastTimestamp,
            oldest.last_timestamp.to_string(),
            manifest.first_last_timestamp.to_string(),
        ),
    ];
    for (kind, held, said) in facts {
        if held != said {
            let expected = format!("{held} as in the oldest surviving fragment");
            checked
                .findings
                .push(Finding::new(kind, root_key, expected, said).at_offset(oldest.first_offset));
        }
    }
}

/// The oldest surviving fragment, unless it lies in a group that could not be read.
fn oldest(nodes: &[Node]) -> Option<&Entry> {
    let node = nodes
        .iter()
        .find(|node| !matches!(node.content, Content::Consumed))?;
    match &node.content {
        Content::Fragment => Some(&node.entry),
        Content::Group(group) => oldest(&group.children),
        Content::Consumed | Content::Missing | Content::Unreadable(_) => None,
    }
}

/// Whether a fragment, whose chunks end at `end`, reaches exactly up to what comes next in the tree.
pub(crate) fn check_seam(node: &Node, end: Offset) -> Option<Finding> {
    let kind = match end.cmp(&node.next_offset) {
        std::cmp::Ordering::Less => FindingKind::Gap,
        std::cmp::Ordering::Equal => return None,
        std::cmp::Ordering::Greater => FindingKind::Overlap,
    };
    let expected = format!(
        "chunks up to {}, where the tree goes on or ends",
        node.next_offset
    );
    Some(
        Finding::new(kind, &node.key, expected, format!("chunks up to {end}"))
            .at_offset(end.min(node.next_offset)),
    )
}

/// Whether the first epoch of a fragment is not below the last epoch of the fragment before.
pub(crate) fn check_epochs(node: &Node, before: Epoch, first: Epoch) -> Option<Finding> {
    (first < before).then(|| {
        let expected = format!("epoch {before} or above, as in the fragment before");
        Finding::new(
            FindingKind::ChunkEpoch,
            &node.key,
            expected,
            format!("epoch {first}"),
        )
        .at_offset(node.entry.first_offset)
    })
}

/// What a kind of entry is called in reports.
pub(crate) fn kind_name(kind: EntryKind) -> &'static str {
    match kind {
        EntryKind::Fragment => "fragment",
        EntryKind::Group => "group",
        EntryKind::KiloGroup => "kilo-group",
        EntryKind::MegaGroup => "mega-group",
    }
}
