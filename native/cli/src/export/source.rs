//! The chunks of a stream that hold wanted records, in order, from whatever fragments hold them.

use std::collections::VecDeque;

use stream_s3_core::chunk::ChunkType;
use stream_s3_core::key::{Prefix, StreamId};
use stream_s3_core::units::{Epoch, Offset, TimestampMs, Uid};

use super::chunks::{Chunk, FragmentChunks};
use super::range::Wanted;
use crate::reader::{Failed, Reader};
use crate::tree::{self, Content, Node};

/// Walks over the wanted part of a stream. Reads ahead no further than the chunk at hand.
pub(crate) struct Source {
    reader: Reader,
    wanted: Wanted,
    rest: VecDeque<Piece>,
    fragment: Option<FragmentChunks>,
    /// Whether a chunk of the wanted time has been seen: from then on all are wanted, up to `until`.
    begun: bool,
    next: Offset,
    total: u64,
    /// Half-open range of offsets that the root covers.
    tier: (Offset, Offset),
}

/// A part of the tree.
enum Piece {
    Fragment(Box<Node>),
    /// A group that cannot be read.
    Hole {
        node: Box<Node>,
        why: String,
    },
}

impl Source {
    /// Reads the manifest below a root, the newest one unless it is named. No fragment is read yet.
    pub(crate) async fn open(
        reader: &Reader,
        prefix: &Prefix,
        stream: &StreamId,
        root: Option<(Epoch, Uid)>,
        wanted: Wanted,
    ) -> Result<Self, Failed> {
        let roots = tree::find_roots(reader, prefix, stream).await?;
        let chosen = tree::choose(&roots, root, stream)?.map(|index| &roots[index]);
        let Some(chosen) = chosen else {
            return Err(Failed::Usage(format!(
                "stream {stream} has no root that can be read, so nothing says which fragments are its records; `stream-s3 verify {stream}` tells more"
            )));
        };
        let manifest = chosen.manifest.as_ref().map_err(|why| {
            Failed::Usage(format!(
                "{} cannot be read: {why}; name another root with --root",
                chosen.key
            ))
        })?;
        let nodes = tree::read_tree(reader, prefix, stream, manifest).await?;
        let mut rest = VecDeque::new();
        gather(nodes, &wanted, &mut rest);
        let tier = (manifest.first_offset, manifest.next_offset);
        Ok(Self {
            reader: reader.clone(),
            total: rest.iter().map(Piece::size).sum(),
            rest,
            fragment: None,
            begun: false,
            next: wanted.from.max(tier.0),
            wanted,
            tier,
        })
    }

    /// Data bytes of the fragments that will be looked into.
    pub(crate) fn total_bytes(&self) -> u64 {
        self.total
    }

    /// First and next offset of the tier.
    pub(crate) fn tier(&self) -> (Offset, Offset) {
        self.tier
    }

    /// Leaves out what is below an offset.
    pub(crate) fn skip_to(&mut self, offset: Offset) {
        self.wanted.from = self.wanted.from.max(offset);
        self.next = self.next.max(offset);
        while self
            .rest
            .front()
            .is_some_and(|piece| piece.next_offset() <= offset)
        {
            self.rest.pop_front();
        }
        self.total = self.rest.iter().map(Piece::size).sum();
    }

    /// Everything wanted below this offset has been handed out and dealt with.
    pub(crate) fn next_offset(&self) -> Offset {
        self.next.min(self.wanted.to.max(self.tier.0))
    }

    /// The records up to here have been dealt with.
    pub(crate) fn done_with(&mut self, end: Offset) {
        self.next = self.next.max(end);
    }

    /// Whether the record at an offset is wanted, as far as offsets go.
    pub(crate) fn wants(&self, offset: Offset) -> bool {
        self.wanted.from <= offset && offset < self.wanted.to
    }

    /// The next chunk of users' records of which some are wanted. Chunks of tracking data are left out: they hold no records.
    pub(crate) async fn next_chunk(&mut self) -> Result<Option<Chunk>, Failed> {
        loop {
            let Some(fragment) = &mut self.fragment else {
                match self.rest.pop_front() {
                    None => return Ok(None),
                    Some(piece) => {
                        self.fragment = Some(self.enter(piece).await?);
                        continue;
                    }
                }
            };
            let Some(chunk) = fragment.next().await? else {
                self.fragment = None;
                continue;
            };
            let Wanted {
                from,
                to,
                since,
                until,
            } = self.wanted;
            self.begun |= chunk.header.timestamp >= since;
            if chunk.header.chunk_id >= to || (self.begun && chunk.header.timestamp >= until) {
                self.rest.clear();
                self.fragment = None;
                return Ok(None);
            }
            let end = chunk.header.next_chunk_id();
            if self.begun && end > from {
                match chunk.header.kind {
                    ChunkType::User => return Ok(Some(chunk)),
                    ChunkType::TrackingDelta | ChunkType::TrackingSnapshot => {}
                }
            }
            self.done_with(end);
        }
    }

    async fn enter(&self, piece: Piece) -> Result<FragmentChunks, Failed> {
        match piece {
            Piece::Fragment(node) => {
                let since = if self.begun {
                    TimestampMs(i64::MIN)
                } else {
                    self.wanted.since
                };
                FragmentChunks::open(&self.reader, *node, self.wanted.from, since).await
            }
            Piece::Hole { node, why } => Err(Failed::Damaged {
                offset: node.entry.first_offset.max(self.next),
                key: node.key,
                why,
                next: node.next_offset,
                written: 0,
            }),
        }
    }
}

impl Piece {
    fn next_offset(&self) -> Offset {
        match self {
            Self::Fragment(node) | Self::Hole { node, .. } => node.next_offset,
        }
    }

    fn size(&self) -> u64 {
        match self {
            Self::Fragment(node) => node.entry.size,
            Self::Hole { .. } => 0,
        }
    }
}

/// The pieces of interest below some nodes, in order.
fn gather(nodes: Vec<Node>, wanted: &Wanted, pieces: &mut VecDeque<Piece>) {
    for node in nodes {
        let entry = &node.entry;
        let outside = node.next_offset <= wanted.from
            || entry.first_offset >= wanted.to
            || (pieces.is_empty() && entry.last_timestamp < wanted.since);
        if outside {
            continue;
        }
        let hole = |node: Node, why: String| Piece::Hole {
            node: Box::new(node),
            why,
        };
        match node.content {
            Content::Consumed => {}
            Content::Fragment => pieces.push_back(Piece::Fragment(Box::new(node))),
            Content::Group(group) => gather(group.children, wanted, pieces),
            Content::Missing => {
                pieces.push_back(hole(node, "there is no such object".to_owned()));
            }
            Content::Unreadable(ref unreadable) => {
                let why = format!("it cannot be read: {unreadable}");
                pieces.push_back(hole(node, why));
            }
        }
    }
}
