//! From the local log to fragments, as `rabbitmq_stream_s3_replica_reader_drain` and `rabbitmq_stream_s3_log` do it.

use stream_s3_core::decisions::commit::chunk_is_committed;
use stream_s3_core::fragment::{Assembly, AssemblyError, FragmentMeta};
use stream_s3_core::units::Offset;

use crate::cluster::SegmentFile;
use crate::env::Env;
use crate::pins;
use crate::twin::Twin;

/// Headers read in one turn.
const BATCH: usize = 16;

/// What a turn came to.
#[derive(Debug)]
pub(crate) enum Turn {
    Cut(FragmentMeta),
    More,
    EndOfLog,
    /// The log does not have the chunk that must come next.
    Gap,
}

/// An open log, and the fragment that is being assembled from it.
pub(crate) struct Drain {
    node: usize,
    /// The file that was read from last; it can be read to its end even where it was deleted.
    file: Option<SegmentFile>,
    /// Id of the next chunk that nobody was given.
    next: u64,
    start: u64,
    assembly: Assembly,
    since: Option<u64>,
}

fn assembly(env: &Env, at: u64) -> Assembly {
    if env.is(Twin::GapCheck) {
        Assembly::new(env.plan.fragment_target)
    } else {
        Assembly::expecting(env.plan.fragment_target, Offset(at))
    }
}

impl Drain {
    /// Opens the log at a chunk, or at its end.
    pub(crate) fn open(env: &Env, node: usize, at: u64) -> Option<Self> {
        let member = &env.cluster.members[node];
        let range = member.range();
        let file = if at == range.next || member.chunk_at(at).is_some() {
            member.segment_of(at).cloned()
        } else {
            Some(pins::holding(env, node, at)?.clone())
        };
        Some(Self {
            node,
            file,
            next: at,
            start: at,
            assembly: assembly(env, at),
            since: None,
        })
    }

    pub(crate) fn next_offset(&self) -> u64 {
        self.next
    }

    /// First offset of the assembly.
    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    /// One more than the last offset of the assembly.
    pub(crate) fn end(&self) -> u64 {
        let meta = self.assembly.metadata();
        meta.map_or(self.start, |meta| meta.next_offset.0)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.since.is_none()
    }

    pub(crate) fn since(&self) -> Option<u64> {
        self.since
    }

    /// The next chunk, whether it is committed or not. As osiris, this continues with the oldest segment where the next one is gone, unless that
    /// is pinned.
    fn peek(&mut self, env: &mut Env) -> Option<stream_s3_core::fragment::Chunk> {
        let member = &env.cluster.members[self.node];
        if let Some(file) = &self.file
            && let Some(chunk) = file.borrow().chunk_at(self.next)
        {
            return Some(chunk);
        }
        let range = member.range();
        if self.next >= range.next {
            return None;
        }
        let first = range.first.unwrap_or(self.next);
        let pinned = pins::holding(env, self.node, self.next).filter(|_| self.next < first);
        let (file, at) = match pinned {
            Some(file) => (file.clone(), self.next),
            None => {
                let at = self.next.max(first);
                (member.segment_of(at)?.clone(), at)
            }
        };
        if self.next < first && at == self.next {
            env.coverage.hit("pinned segment drained");
        }
        pins::drained(env, self.node, &file);
        let chunk = file.borrow().chunk_at(at);
        self.file = Some(file);
        chunk
    }

    /// One turn of bounded length.
    pub(crate) fn turn(&mut self, env: &mut Env) -> Turn {
        let writer = env.cluster.members[self.node].writer;
        let committed = writer.map_or(-1, |writer| writer.committed);
        for _ in 0..BATCH {
            let Some(chunk) = self.peek(env) else {
                return Turn::EndOfLog;
            };
            if !env.is(Twin::CommitCheck) && !chunk_is_committed(chunk.chunk_id, committed) {
                self.next = chunk.chunk_id.0;
                return Turn::EndOfLog;
            }
            match self.assembly.add(&chunk) {
                Ok(_) => {
                    self.next = chunk.chunk_id.0 + u64::from(chunk.num_records);
                    self.since.get_or_insert(env.now);
                }
                Err(AssemblyError::Gap { .. } | AssemblyError::Backwards { .. }) => {
                    env.coverage.hit("gap in the log");
                    return Turn::Gap;
                }
            }
            if self.assembly.is_cut() {
                return self.cut(env).map_or(Turn::More, Turn::Cut);
            }
        }
        Turn::More
    }

    /// Ends the fragment here, if it has a chunk.
    pub(crate) fn cut(&mut self, env: &Env) -> Option<FragmentMeta> {
        let meta = self.assembly.metadata()?;
        self.assembly = assembly(env, meta.next_offset.0);
        self.start = meta.next_offset.0;
        self.since = None;
        Some(meta)
    }
}
