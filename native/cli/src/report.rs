//! What the commands print. The shapes of the JSON documents are those of the structs here; a field is only ever added.

use std::fmt::Write;

use serde::Serialize;
use stream_s3_core::key::StreamId;
use stream_s3_core::manifest::Manifest;
use stream_s3_core::units::TimestampMs;

use crate::check::kind_name;
use crate::finding::Finding;
use crate::inspect::Inspected;
use crate::restore::Restored;
use crate::tree::{Content, Node, Root};
use crate::verify::Verified;

/// `streams --json`.
#[derive(Serialize)]
struct StreamsDoc<'a> {
    streams: Vec<&'a str>,
}

/// `restore --json`.
#[derive(Serialize)]
struct RestoredDoc<'a> {
    into: &'a str,
    /// Records confirmed now.
    published: u64,
    /// Publishing id behind which it began: all up to it had been published before.
    behind: u64,
}

/// A root object.
#[derive(Serialize)]
struct RootDoc<'a> {
    key: &'a str,
    epoch: u64,
    /// Eight hex digits.
    uid: String,
    /// Milliseconds since the Unix epoch; null where the store does not say.
    modified_ms: Option<i64>,
    /// Whether the report starts from it.
    chosen: bool,
    /// Why it cannot be decoded; the fields below are null then.
    error: Option<String>,
    first_offset: Option<u64>,
    next_offset: Option<u64>,
    first_timestamp: Option<i64>,
    first_last_timestamp: Option<i64>,
    total_size: Option<u128>,
    /// Number of entries in the root itself.
    entries: Option<usize>,
}

/// `inspect --json`.
#[derive(Serialize)]
struct InspectDoc<'a> {
    stream: &'a str,
    /// Newest first.
    roots: Vec<RootDoc<'a>>,
    /// Surviving fragments in the tree.
    fragments: u64,
    /// Groups in the tree.
    groups: u64,
    tree: Vec<NodeDoc<'a>>,
}

/// An entry of the tree.
#[derive(Serialize)]
struct NodeDoc<'a> {
    /// `fragment`, `group`, `kilo-group` or `mega-group`.
    kind: &'static str,
    first_offset: u64,
    /// Exclusive; taken from the entry that follows.
    next_offset: u64,
    first_timestamp: i64,
    last_timestamp: i64,
    /// Data bytes of a fragment; 0 for groups.
    size: u64,
    uid: String,
    key: &'a str,
    /// `named` (not looked at), `read`, `consumed` (below the root's first offset), `missing`, `unreadable`.
    state: &'static str,
    /// Why it is `unreadable`.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// Number of chunks, with `--fragments`.
    #[serde(skip_serializing_if = "Option::is_none")]
    chunks: Option<u64>,
    /// Entries of a group.
    #[serde(skip_serializing_if = "Option::is_none")]
    entries: Option<Vec<NodeDoc<'a>>>,
}

/// `verify --json`.
#[derive(Serialize)]
struct VerifyDoc<'a> {
    stream: &'a str,
    ok: bool,
    /// Newest first; the one verified is `chosen`.
    roots: Vec<RootDoc<'a>>,
    fragments: u64,
    chunks: u64,
    records: u64,
    /// Data bytes of the fragments walked.
    bytes: u64,
    findings: &'a [Finding],
    /// Findings left out because their object has too many.
    suppressed: u64,
    orphans: OrphansDoc,
    notes: &'a [String],
}

/// Objects that the root does not name.
#[derive(Serialize)]
struct OrphansDoc {
    objects: u64,
    bytes: u64,
    fragments: u64,
    groups: u64,
    roots: u64,
    unknown: u64,
}

/// The ids of streams, one a line.
pub(crate) fn streams(ids: &[StreamId], json: bool) -> String {
    let ids: Vec<&str> = ids.iter().map(StreamId::as_str).collect();
    if json {
        return document(&StreamsDoc { streams: ids });
    }
    ids.iter().fold(String::new(), |text, id| text + id + "\n")
}

/// What a restoration came to.
pub(crate) fn restored(into: &str, restored: &Restored, json: bool) -> String {
    let Restored { published, behind } = *restored;
    if json {
        return document(&RestoredDoc {
            into,
            published,
            behind,
        });
    }
    let before = if behind == 0 {
        String::new()
    } else {
        format!("; what has publishing ids up to {behind} had been published before")
    };
    format!("restore: {published} records published to {into} and confirmed{before}\n")
}

/// `inspect` as JSON.
pub(crate) fn inspect_json(stream: &StreamId, inspected: &Inspected) -> String {
    let (fragments, groups) = count(&inspected.nodes);
    document(&InspectDoc {
        stream: stream.as_str(),
        roots: root_docs(&inspected.roots, inspected.chosen),
        fragments,
        groups,
        tree: inspected
            .nodes
            .iter()
            .map(|node| node_doc(node, inspected))
            .collect(),
    })
}

/// `verify` as JSON.
pub(crate) fn verify_json(stream: &StreamId, verified: &Verified) -> String {
    let orphans = &verified.orphans;
    document(&VerifyDoc {
        stream: stream.as_str(),
        ok: verified.findings.is_empty(),
        roots: root_docs(&verified.roots, verified.chosen),
        fragments: verified.fragments,
        chunks: verified.chunks,
        records: verified.records,
        bytes: verified.bytes,
        findings: &verified.findings,
        suppressed: verified.suppressed,
        orphans: OrphansDoc {
            objects: orphans.objects(),
            bytes: orphans.bytes,
            fragments: orphans.fragments,
            groups: orphans.groups,
            roots: orphans.roots,
            unknown: orphans.unknown,
        },
        notes: &verified.notes,
    })
}

pub(crate) fn document(document: &impl Serialize) -> String {
    match serde_json::to_string(document) {
        Ok(text) => text + "\n",
        // Only maps with keys that are no strings, and failing writers, can fail; there are none here.
        Err(error) => unreachable!("a report is always JSON: {error}"),
    }
}

fn root_docs(roots: &[Root], chosen: Option<usize>) -> Vec<RootDoc<'_>> {
    let rows = roots.iter().enumerate().map(|(index, root)| {
        let manifest = root.manifest.as_ref().ok();
        RootDoc {
            key: &root.key,
            epoch: root.epoch.0,
            uid: format!("{:08x}", root.uid.0),
            modified_ms: root.modified_ms,
            chosen: chosen == Some(index),
            error: root.manifest.as_ref().err().map(ToString::to_string),
            first_offset: manifest.map(|manifest| manifest.first_offset.0),
            next_offset: manifest.map(|manifest| manifest.next_offset.0),
            first_timestamp: manifest.map(|manifest| manifest.first_timestamp.0),
            first_last_timestamp: manifest.map(|manifest| manifest.first_last_timestamp.0),
            total_size: manifest.map(|manifest| manifest.total_size),
            entries: manifest.map(|manifest| manifest.entries.len()),
        }
    });
    rows.collect()
}

fn node_doc<'a>(node: &'a Node, inspected: &'a Inspected) -> NodeDoc<'a> {
    let index = inspected
        .indexes
        .as_ref()
        .and_then(|indexes| indexes.get(&node.key));
    let (state, error) = match (&node.content, index) {
        (Content::Fragment, None) => ("named", None),
        (Content::Fragment, Some(Ok(_))) | (Content::Group(_), _) => ("read", None),
        (Content::Fragment, Some(Err(why))) => ("unreadable", Some(why.clone())),
        (Content::Consumed, _) => ("consumed", None),
        (Content::Missing, _) => ("missing", None),
        (Content::Unreadable(why), _) => ("unreadable", Some(why.to_string())),
    };
    let entries = match &node.content {
        Content::Group(group) => Some(
            group
                .children
                .iter()
                .map(|child| node_doc(child, inspected))
                .collect(),
        ),
        Content::Fragment | Content::Consumed | Content::Missing | Content::Unreadable(_) => None,
    };
    NodeDoc {
        kind: kind_name(node.entry.kind),
        first_offset: node.entry.first_offset.0,
        next_offset: node.next_offset.0,
        first_timestamp: node.entry.first_timestamp.0,
        last_timestamp: node.entry.last_timestamp.0,
        size: node.entry.size,
        uid: format!("{:08x}", node.entry.uid.0),
        key: &node.key,
        state,
        error,
        chunks: index.and_then(|index| index.as_ref().ok().copied()),
        entries,
    }
}

/// Surviving fragments, and groups, of a tree.
fn count(nodes: &[Node]) -> (u64, u64) {
    nodes
        .iter()
        .fold((0, 0), |(fragments, groups), node| match &node.content {
            Content::Fragment => (fragments + 1, groups),
            Content::Consumed => (fragments, groups),
            Content::Missing | Content::Unreadable(_) => (fragments, groups + 1),
            Content::Group(group) => {
                let below = count(&group.children);
                (fragments + below.0, groups + 1 + below.1)
            }
        })
}

/// `inspect` for people.
pub(crate) fn inspect_text(stream: &StreamId, inspected: &Inspected) -> String {
    let docs = root_docs(&inspected.roots, inspected.chosen);
    let mut text = format!("stream  {}\n{}", stream.as_str(), chosen_text(&docs));
    if let Some((root, Ok(manifest))) = inspected
        .chosen
        .map(|index| &inspected.roots[index])
        .map(|root| (root, &root.manifest))
    {
        let (fragments, groups) = count(&inspected.nodes);
        let Manifest {
            first_offset,
            next_offset,
            first_timestamp,
            first_last_timestamp,
            total_size,
            ..
        } = manifest;
        let _ = writeln!(text, "epoch   {}", root.epoch);
        let _ = writeln!(text, "range   offsets [{first_offset}, {next_offset})");
        let _ = writeln!(
            text,
            "oldest  fragment from {} to {}",
            time(first_timestamp.0),
            time(first_last_timestamp.0)
        );
        let _ = writeln!(
            text,
            "total   {total_size} bytes in {fragments} fragments, {groups} groups"
        );
    }
    text += &roots_text(&docs);
    if !inspected.nodes.is_empty() {
        let mut table = Table::new(&[
            "tree",
            "first offset",
            "next offset",
            "bytes",
            "chunks",
            "first timestamp",
            "last timestamp",
            "uid",
            "",
        ]);
        for node in &inspected.nodes {
            node_row(&node_doc(node, inspected), 0, &mut table);
        }
        text.push('\n');
        text += &table.render();
    }
    text
}

/// Which root a report starts from, and what is to be known about that choice.
fn chosen_text(roots: &[RootDoc<'_>]) -> String {
    match roots.iter().find(|root| root.chosen) {
        Some(root) => format!(
            "root    {}\n        one of {} found; the newest unless --root was given, as the bucket does not tell which one is in use\n",
            root.key,
            roots.len()
        ),
        None if roots.is_empty() => {
            "root    none: nothing has been persisted yet, or it is lost\n".to_owned()
        }
        None => "root    none of those found can be decoded\n".to_owned(),
    }
}

fn roots_text(roots: &[RootDoc<'_>]) -> String {
    let mut table = Table::new(&[
        "roots",
        "epoch",
        "uid",
        "first offset",
        "next offset",
        "bytes",
        "entries",
        "stored",
        "",
    ]);
    for root in roots {
        table.row(vec![
            if root.chosen { "chosen" } else { "" }.to_owned(),
            root.epoch.to_string(),
            root.uid.clone(),
            shown(root.first_offset),
            shown(root.next_offset),
            shown(root.total_size),
            shown(root.entries),
            root.modified_ms.map_or_else(|| "-".to_owned(), time),
            root.error
                .as_ref()
                .map_or_else(String::new, |why| format!("cannot be decoded: {why}")),
        ]);
    }
    if roots.is_empty() {
        String::new()
    } else {
        format!("\n{}", table.render())
    }
}

fn shown(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

fn node_row(node: &NodeDoc<'_>, depth: usize, table: &mut Table) {
    let remark = match (node.state, &node.error) {
        ("named" | "read", _) => String::new(),
        (state, None) => state.to_owned(),
        (state, Some(why)) => format!("{state}: {why}"),
    };
    table.row(vec![
        format!("{}{}", "  ".repeat(depth), node.kind),
        node.first_offset.to_string(),
        node.next_offset.to_string(),
        node.size.to_string(),
        shown(node.chunks),
        time(node.first_timestamp),
        time(node.last_timestamp),
        node.uid.clone(),
        remark,
    ]);
    for child in node.entries.iter().flatten() {
        node_row(child, depth + 1, table);
    }
}

/// `verify` for people.
pub(crate) fn verify_text(stream: &StreamId, verified: &Verified) -> String {
    let docs = root_docs(&verified.roots, verified.chosen);
    let mut text = format!("stream  {}\n{}", stream.as_str(), chosen_text(&docs));
    if let Some((Some(first), Some(next))) = docs
        .iter()
        .find(|root| root.chosen)
        .map(|root| (root.first_offset, root.next_offset))
    {
        let _ = writeln!(text, "range   offsets [{first}, {next})");
    }
    let orphans = &verified.orphans;
    let _ = writeln!(
        text,
        "orphans: {} objects, {} bytes",
        orphans.objects(),
        orphans.bytes
    );
    for finding in &verified.findings {
        let _ = writeln!(text, "wrong: {finding}");
    }
    if verified.suppressed > 0 {
        let _ = writeln!(
            text,
            "wrong: {} more of the same in these objects",
            verified.suppressed
        );
    }
    for note in &verified.notes {
        let _ = writeln!(text, "note: {note}");
    }
    let wrong = verified.findings.len() as u64 + verified.suppressed;
    let verdict = if wrong == 0 {
        "ok".to_owned()
    } else {
        format!("{wrong} wrong")
    };
    let Verified {
        fragments,
        chunks,
        records,
        bytes,
        ..
    } = verified;
    let _ = writeln!(
        text,
        "verify: {verdict}, {fragments} fragments, {chunks} chunks, {records} records, {bytes} bytes"
    );
    text
}

/// A point in time as people read it, in UTC. -1 stands for none.
fn time(ms: i64) -> String {
    if ms == TimestampMs::NONE.0 {
        return "-".to_owned();
    }
    let (days, of_day) = (ms.div_euclid(86_400_000), ms.rem_euclid(86_400_000));
    // Years that start in March end in the leap day; eras of 400 years repeat.
    let shifted = days.saturating_add(719_468);
    let (era, of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 {
        march_month + 3
    } else {
        march_month - 9
    };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (hour, minute, second, milli) = (
        of_day / 3_600_000,
        of_day / 60_000 % 60,
        of_day / 1000 % 60,
        of_day % 1000,
    );
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{milli:03}Z")
}

/// Columns as wide as their widest cell. The first and the last are aligned left, the others right.
struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    fn new(head: &[&str]) -> Self {
        Self {
            rows: vec![head.iter().map(ToString::to_string).collect()],
        }
    }

    fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    fn render(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.rows
                .iter()
                .filter_map(|row| row.get(column))
                .map(String::len)
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
                let gap = if column == 0 { "" } else { "  " };
                let _ = if column == 0 || column + 1 == columns {
                    write!(line, "{gap}{cell:<width$}")
                } else {
                    write!(line, "{gap}{cell:>width$}")
                };
            }
            text += line.trim_end();
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_shown_in_utc() {
        assert_eq!(time(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(time(951_782_400_000), "2000-02-29T00:00:00.000Z");
        assert_eq!(time(1_735_689_599_999), "2024-12-31T23:59:59.999Z");
        assert_eq!(time(-2), "1969-12-31T23:59:59.998Z");
    }

    #[test]
    fn a_missing_timestamp_is_a_dash() {
        assert_eq!(time(-1), "-");
    }

    #[test]
    fn any_timestamp_can_be_shown() {
        assert!(time(i64::MAX).ends_with('Z'));
        assert!(time(i64::MIN).ends_with('Z'));
    }
}
