//! Reads what a stream has in the bucket from the top: its roots, then the groups below one of them, down to the entries
//! of its fragments. Judges nothing; `check` does.
//!
//! The tree is held in memory, about 100 bytes a fragment.

use std::fmt;

use futures::future::BoxFuture;
use futures::stream::{self, StreamExt, TryStreamExt};
use stream_s3_core::decisions::adoption::{Aged, compare_age};
use stream_s3_core::error::FormatError;
use stream_s3_core::key::{self, ParsedKey, Prefix, StreamId};
use stream_s3_core::manifest::{self, Entry, EntryKind, Manifest};
use stream_s3_core::units::{Epoch, Offset, Uid};
use stream_s3_store::Part;

use crate::reader::{Failed, PAGE, Read, Reader};

/// Largest root or group that is read into memory: two million entries.
pub(crate) const MAX_OBJECT: u64 = 64 * 1024 * 1024;
/// Requests in flight while roots and groups are read.
const CONCURRENCY: usize = 8;
/// How often the roots are listed anew because one of them was replaced meanwhile.
const LOOKS: u32 = 10;

/// A root object of a stream.
#[derive(Debug, Clone)]
pub(crate) struct Root {
    /// Its key.
    pub(crate) key: String,
    /// Epoch of the writer that stored it.
    pub(crate) epoch: Epoch,
    /// What keeps its key apart from others of the same epoch.
    pub(crate) uid: Uid,
    /// When it was stored, milliseconds since the Unix epoch, where the store says.
    pub(crate) modified_ms: Option<i64>,
    /// What it holds, or why it cannot be decoded.
    pub(crate) manifest: Result<Manifest, Unreadable>,
}

/// Why an object cannot be decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unreadable {
    /// Where the trouble starts, in bytes from the object's start.
    pub(crate) byte: Option<u64>,
    /// What it is.
    pub(crate) why: String,
}

impl From<FormatError> for Unreadable {
    fn from(error: FormatError) -> Self {
        Self {
            byte: Some(error.at),
            why: error.problem.to_string(),
        }
    }
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)?;
        match self.byte {
            Some(byte) => write!(f, " at byte {byte}"),
            None => Ok(()),
        }
    }
}

/// One entry of the tree.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    /// The entry as its parent holds it.
    pub(crate) entry: Entry,
    /// Where the next entry of the tree starts: what the entry must reach up to, exclusive.
    pub(crate) next_offset: Offset,
    /// Key of the object that the entry names.
    pub(crate) key: String,
    /// What was found there.
    pub(crate) content: Content,
}

/// What an entry turned out to be.
#[derive(Debug, Clone)]
pub(crate) enum Content {
    /// A fragment; its object has not been looked at.
    Fragment,
    /// Wholly below the root's first offset: retention has taken it, and its object may be gone.
    Consumed,
    /// A group and what is below it.
    Group(Group),
    /// A group whose object is not there.
    Missing,
    /// A group whose object cannot be decoded, and why.
    Unreadable(Unreadable),
}

/// A decoded group object.
#[derive(Debug, Clone)]
pub(crate) struct Group {
    /// The kind its magic says.
    pub(crate) kind: EntryKind,
    /// Its entries.
    pub(crate) children: Vec<Node>,
}

/// The roots of a stream, newest first, decoded where they can be. Empty where the stream has objects and no root; fails
/// where it has no objects at all.
///
/// The bucket does not know which root the metadata store points at. Newest is the one of the highest epoch, then the one
/// that reaches furthest, then the one that starts latest (retention moves the start), then the one stored last.
///
/// Costs one listing of the stream's metadata keys and a request for each root; more while an uploader replaces roots.
pub(crate) async fn find_roots(
    reader: &Reader,
    prefix: &Prefix,
    stream: &StreamId,
) -> Result<Vec<Root>, Failed> {
    let mut looks = LOOKS;
    let mut roots = loop {
        let (roots, vanished) = look_for_roots(reader, prefix, stream).await?;
        looks -= 1;
        // What vanished after it was listed has been replaced by a newer root, which was not listed yet.
        if !vanished || looks == 0 {
            break roots;
        }
    };
    if roots.is_empty() {
        let place = key::stream_prefix(prefix, stream);
        if reader.list(&place, None, 1).await?.objects.is_empty() {
            return Err(Failed::Usage(format!(
                "there is no stream {stream} here: nothing lies under {place}; `stream-s3 streams` lists the streams, and --prefix may need a look"
            )));
        }
    }
    roots.sort_by(|left, right| compare_age(&aged(right), &aged(left)));
    Ok(roots)
}

/// Which root to start from: the one named, else the newest that can be decoded. `None` where there is none.
pub(crate) fn choose(
    roots: &[Root],
    named: Option<(Epoch, Uid)>,
    stream: &StreamId,
) -> Result<Option<usize>, Failed> {
    let Some((epoch, uid)) = named else {
        return Ok(roots.iter().position(|root| root.manifest.is_ok()));
    };
    match roots
        .iter()
        .position(|root| root.epoch == epoch && root.uid == uid)
    {
        Some(index) => Ok(Some(index)),
        None => Err(Failed::Usage(format!(
            "stream {stream} has no root {epoch}.{:08x}; `stream-s3 inspect {stream}` lists the roots that are there",
            uid.0
        ))),
    }
}

/// Lists and reads all roots once. The flag says whether one of them was gone before it could be read.
async fn look_for_roots(
    reader: &Reader,
    prefix: &Prefix,
    stream: &StreamId,
) -> Result<(Vec<Root>, bool), Failed> {
    let metadata = format!("{}metadata/", key::stream_prefix(prefix, stream));
    let mut found = Vec::new();
    let mut from = None;
    loop {
        let page = reader.list(&metadata, from.as_deref(), PAGE).await?;
        for listed in page.objects {
            if let Some(ParsedKey::Root { epoch, uid, .. }) = key::parse(prefix, &listed.key) {
                found.push((listed, epoch, uid));
            }
        }
        match page.next {
            Some(next) => from = Some(next),
            None => break,
        }
    }
    let listed = found.len();
    let roots: Vec<Root> = stream::iter(found)
        .map(|(listed, epoch, uid)| async move {
            let manifest = match reader.read(&listed.key, Part::Whole, MAX_OBJECT).await? {
                Read::Absent => return Ok(None),
                Read::TooLarge(size) => Err(too_large(size)),
                Read::Bytes(bytes) => manifest::decode_root(&bytes).map_err(Unreadable::from),
            };
            Ok(Some(Root {
                key: listed.key,
                epoch,
                uid,
                modified_ms: listed.modified_ms,
                manifest,
            }))
        })
        .buffered(CONCURRENCY)
        .try_filter_map(|root| async move { Ok::<_, Failed>(root) })
        .try_collect()
        .await?;
    let vanished = roots.len() < listed;
    Ok((roots, vanished))
}

fn too_large(size: u64) -> Unreadable {
    Unreadable {
        byte: None,
        why: format!("{size} bytes, more than any manifest object has"),
    }
}

fn aged(root: &Root) -> Aged<'_> {
    Aged {
        epoch: root.epoch,
        uid: root.uid,
        manifest: root.manifest.as_ref().ok(),
        modified_ms: root.modified_ms,
    }
}

/// Reads the tree below a root. One request for each group that is not wholly below the root's first offset.
pub(crate) async fn read_tree(
    reader: &Reader,
    prefix: &Prefix,
    stream: &StreamId,
    manifest: &Manifest,
) -> Result<Vec<Node>, Failed> {
    let place = Place {
        reader,
        prefix,
        stream,
        first_offset: manifest.first_offset,
    };
    place
        .nodes(
            manifest.entries.iter().cloned().collect(),
            manifest.next_offset,
        )
        .await
}

/// Where a tree is read from.
#[derive(Clone, Copy)]
struct Place<'a> {
    reader: &'a Reader,
    prefix: &'a Prefix,
    stream: &'a StreamId,
    first_offset: Offset,
}

impl<'a> Place<'a> {
    /// The nodes of the entries of one root or group, which end at `end`.
    fn nodes(self, entries: Vec<Entry>, end: Offset) -> BoxFuture<'a, Result<Vec<Node>, Failed>> {
        let ends: Vec<Offset> = entries
            .iter()
            .skip(1)
            .map(|entry| entry.first_offset)
            .chain([end])
            .collect();
        let reads = entries
            .into_iter()
            .zip(ends)
            .map(move |(entry, next_offset)| self.node(entry, next_offset));
        Box::pin(stream::iter(reads).buffered(CONCURRENCY).try_collect())
    }

    async fn node(self, entry: Entry, next_offset: Offset) -> Result<Node, Failed> {
        let key = key::entry(
            self.prefix,
            self.stream,
            entry.kind,
            entry.first_offset,
            entry.uid,
        );
        let content = if next_offset <= self.first_offset {
            Content::Consumed
        } else if entry.kind == EntryKind::Fragment {
            Content::Fragment
        } else {
            self.group(&key, next_offset).await?
        };
        Ok(Node {
            entry,
            next_offset,
            key,
            content,
        })
    }

    async fn group(self, key: &str, next_offset: Offset) -> Result<Content, Failed> {
        let bytes = match self.reader.read(key, Part::Whole, MAX_OBJECT).await? {
            Read::Absent => return Ok(Content::Missing),
            Read::TooLarge(size) => return Ok(Content::Unreadable(too_large(size))),
            Read::Bytes(bytes) => bytes,
        };
        Ok(match manifest::decode_group(&bytes) {
            Ok(group) => Content::Group(Group {
                kind: group.kind,
                children: self.nodes(group.entries, next_offset).await?,
            }),
            Err(error) => Content::Unreadable(error.into()),
        })
    }
}

impl Node {
    /// Whether every group at and below this node could be read.
    pub(crate) fn is_whole(&self) -> bool {
        match &self.content {
            Content::Fragment | Content::Consumed => true,
            Content::Group(group) => group.children.iter().all(Self::is_whole),
            Content::Missing | Content::Unreadable(_) => false,
        }
    }
}

/// The ids of all streams under the prefix, ascending. Lists every key: one request for each 1000 objects.
pub(crate) async fn find_streams(
    reader: &Reader,
    prefix: &Prefix,
) -> Result<Vec<StreamId>, Failed> {
    let mut streams: Vec<StreamId> = Vec::new();
    let mut from = None;
    loop {
        let page = reader
            .list(&key::streams_prefix(prefix), from.as_deref(), PAGE)
            .await?;
        for listed in page.objects {
            let id = match key::parse(prefix, &listed.key) {
                Some(
                    ParsedKey::Fragment { stream, .. }
                    | ParsedKey::Group { stream, .. }
                    | ParsedKey::Root { stream, .. },
                ) => stream,
                Some(ParsedKey::History { .. }) | None => continue,
            };
            // Keys ascend, so those of one stream are neighbours; a slash sorts behind a dash, so ids do not ascend with them.
            if streams.last() != Some(&id) {
                streams.push(id);
            }
        }
        match page.next {
            Some(next) => from = Some(next),
            None => break,
        }
    }
    streams.sort_unstable();
    Ok(streams)
}
