//! `inspect`: what a stream has in the bucket, without judging the bytes of its fragments.

use std::collections::HashMap;

use futures::stream::{self, StreamExt, TryStreamExt};
use stream_s3_core::fragment::{self, MAX_CHUNKS, OBJECT_HEADER};
use stream_s3_core::key::{Prefix, StreamId};
use stream_s3_core::manifest::Entry;
use stream_s3_core::units::{Epoch, Uid};
use stream_s3_store::{Failure, Part};

use crate::reader::{Failed, Read, Reader};
use crate::tree::{self, Content, Node, Root};

/// Indexes read at the same time.
const CONCURRENCY: usize = 8;
/// Longest index of a fragment in bytes.
const MAX_INDEX: u64 = fragment::index_len(MAX_CHUNKS);

/// What a stream has in the bucket.
#[derive(Debug)]
pub(crate) struct Inspected {
    /// All roots, newest first.
    pub(crate) roots: Vec<Root>,
    /// The one whose tree follows, as an index into `roots`.
    pub(crate) chosen: Option<usize>,
    /// The tree below it.
    pub(crate) nodes: Vec<Node>,
    /// What the index of each fragment says, by key; `None` where indexes were not asked for.
    pub(crate) indexes: Option<HashMap<String, Index>>,
}

/// The index of a fragment: its number of chunks, or what is wrong with it.
pub(crate) type Index = Result<u64, String>;

impl Inspected {
    /// Whether everything that was asked for could be shown.
    pub(crate) fn is_whole(&self) -> bool {
        let decoded = self
            .chosen
            .is_some_and(|index| self.roots[index].manifest.is_ok());
        let indexed = self
            .indexes
            .iter()
            .flatten()
            .all(|(_, index)| index.is_ok());
        decoded && indexed && self.nodes.iter().all(Node::is_whole)
    }
}

/// Reads the roots of a stream and the tree below one of them: one request a root and group; with `indexes` one a fragment besides.
pub(crate) async fn inspect(
    reader: &Reader,
    prefix: &Prefix,
    stream: &StreamId,
    root: Option<(Epoch, Uid)>,
    indexes: bool,
) -> Result<Inspected, Failed> {
    let roots = tree::find_roots(reader, prefix, stream).await?;
    let chosen = tree::choose(&roots, root, stream)?;
    let nodes = match chosen.map(|index| &roots[index].manifest) {
        Some(Ok(manifest)) => tree::read_tree(reader, prefix, stream, manifest).await?,
        Some(Err(_)) | None => Vec::new(),
    };
    let indexes = if indexes {
        Some(read_indexes(reader, &nodes).await?)
    } else {
        None
    };
    Ok(Inspected {
        roots,
        chosen,
        nodes,
        indexes,
    })
}

async fn read_indexes(reader: &Reader, nodes: &[Node]) -> Result<HashMap<String, Index>, Failed> {
    let mut fragments = Vec::new();
    gather(nodes, &mut fragments);
    stream::iter(fragments)
        .map(|(key, entry)| async move {
            let index = read_index(reader, &key, &entry).await?;
            Ok::<_, Failed>((key, index))
        })
        .buffer_unordered(CONCURRENCY)
        .try_collect()
        .await
}

fn gather(nodes: &[Node], fragments: &mut Vec<(String, Entry)>) {
    for node in nodes {
        match &node.content {
            Content::Fragment => fragments.push((node.key.clone(), node.entry)),
            Content::Group(group) => gather(&group.children, fragments),
            Content::Consumed | Content::Missing | Content::Unreadable(_) => {}
        }
    }
}

async fn read_index(reader: &Reader, key: &str, entry: &Entry) -> Result<Index, Failed> {
    let start = OBJECT_HEADER.len() as u64 + entry.size;
    // One byte more than allowed tells an index that is too long.
    let read = reader
        .read(key, Part::Range(start..start + MAX_INDEX + 1), MAX_INDEX)
        .await;
    Ok(match read {
        Ok(Read::Bytes(bytes)) => count_chunks(&bytes, entry),
        Ok(Read::Absent) => Err("no object".to_owned()),
        Ok(Read::TooLarge(size)) => Err(format!(
            "an object of {size} bytes, more than {MAX_CHUNKS} chunks"
        )),
        Err(Failed::Store(error)) if error.failure == Failure::Http(416) => {
            Err(format!("no index: the object ends before byte {start}"))
        }
        Err(failed) => return Err(failed),
    })
}

/// Counts the records of an index, which must start with the fragment's first chunk.
fn count_chunks(bytes: &[u8], entry: &Entry) -> Index {
    let records = fragment::decode_index(bytes).map_err(|error| error.to_string())?;
    match records.first() {
        Some(first) if first.chunk_id != entry.first_offset => {
            Err(format!("the index starts with chunk {}", first.chunk_id))
        }
        Some(_) | None => Ok(records.len() as u64),
    }
}
