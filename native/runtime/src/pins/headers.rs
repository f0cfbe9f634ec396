//! Chunk headers of segments: what osiris would read, had it batches, and if the file has no name any more.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use stream_s3_core::chunk::{CHUNK_HEADER_SIZE, ChunkHeader, SEGMENT_HEADER};
use stream_s3_core::decisions::timeline::{ChunkIdentity, LocalChunk};
use stream_s3_core::fragment::Chunk;
use stream_s3_core::units::{Epoch, Offset};

use crate::executor::Executor;
use crate::segment::read_at;

/// Headers that one job of a reader thread reads: about a millisecond from the page cache.
const HEADERS_A_STEP: usize = 1024;

/// Where to go on reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// At the chunk with this id, in whatever segment it is.
    Offset(Offset),
    /// Where the last read ended.
    Position {
        /// First offset of the segment.
        segment: Offset,
        /// Of the next chunk, in bytes from the beginning of the file.
        position: u64,
        /// Its id.
        offset: Offset,
    },
}

/// What reading headers came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Headers {
    /// Some chunks, in order, committed or not, and where to go on; none only where the segment ends, for now or because what follows is in
    /// another one.
    Chunks {
        /// As the fragment assembly takes them.
        chunks: Vec<Chunk>,
        /// Behind them.
        next: Place,
    },
    /// No pinned segment has a chunk with this id, or the segment that the place names is neither pinned nor there.
    NotPinned,
}

#[derive(Debug, Clone, Copy)]
struct Walk {
    segment: Offset,
    position: u64,
    /// Id of the chunk at `position`.
    next: Offset,
}

impl Walk {
    fn from_start(segment: Offset) -> Self {
        Self {
            segment,
            position: SEGMENT_HEADER.len() as u64,
            next: segment,
        }
    }

    /// The chunk here, stepping over it; `None` where the file ends, perhaps inside a chunk that is being written.
    fn step(&mut self, file: &File, len: u64) -> io::Result<Option<Chunk>> {
        let found = self.header(file, len)?;
        Ok(found.map(|(chunk, _)| chunk))
    }

    /// The same with the epoch of its writer.
    fn header(&mut self, file: &File, len: u64) -> io::Result<Option<(Chunk, Epoch)>> {
        let mut bytes = [0; CHUNK_HEADER_SIZE];
        if read_at(file, &mut bytes, self.position)? < CHUNK_HEADER_SIZE {
            return Ok(None);
        }
        let header = ChunkHeader::decode(&bytes)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        let end = self.position + header.len_in_segment();
        if header.chunk_id != self.next || header.next_chunk_id() <= self.next {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("a chunk {} where {} should be", header.chunk_id, self.next),
            ));
        }
        if end > len {
            return Ok(None);
        }
        let chunk = Chunk {
            chunk_id: header.chunk_id,
            timestamp: header.timestamp,
            num_records: header.num_records,
            data_size: header.data_size,
            position: self.position,
            next_position: end,
            segment_offset: self.segment,
            crc: header.crc,
        };
        self.position = end;
        self.next = header.next_chunk_id();
        Ok(Some((chunk, header.epoch)))
    }

    /// Steps over chunks up to the one with the id `target`; false where more steps are to be taken.
    fn seek(&mut self, file: &File, target: Offset) -> io::Result<bool> {
        let len = file.metadata()?.len();
        for _ in 0..HEADERS_A_STEP {
            if self.next >= target || self.step(file, len)?.is_none() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// A segment that is not pinned; `None`: it is deleted.
pub(super) async fn open(executor: &Executor, path: PathBuf) -> io::Result<Option<Arc<File>>> {
    let job = move || match File::open(path) {
        Ok(file) => Ok(Some(Arc::new(file))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    };
    run(executor, job).await
}

/// Offset behind the last record of a segment.
pub(super) async fn end(
    executor: &Executor,
    file: Arc<File>,
    segment: Offset,
) -> io::Result<Offset> {
    let walk = seek(executor, file, Walk::from_start(segment), Offset(u64::MAX)).await?;
    Ok(walk.next)
}

/// What the segment has where a chunk should be.
pub(super) async fn identity(
    executor: &Executor,
    file: Arc<File>,
    segment: Offset,
    chunk_id: Offset,
) -> io::Result<LocalChunk> {
    let start = Walk::from_start(segment);
    let mut walk = seek(executor, Arc::clone(&file), start, chunk_id).await?;
    if walk.next > chunk_id {
        return Ok(LocalChunk::InsideAnother);
    }
    if walk.next < chunk_id {
        return Ok(LocalChunk::Trimmed);
    }
    let look = move || walk.header(&file, file.metadata()?.len());
    let found = run(executor, look).await?;
    Ok(found.map_or(LocalChunk::Trimmed, |(chunk, epoch)| {
        LocalChunk::Found(ChunkIdentity {
            chunk_id,
            epoch,
            crc: chunk.crc,
        })
    }))
}

/// The next chunks of a segment, at most `max`.
pub(super) async fn read(
    executor: &Executor,
    file: Arc<File>,
    segment: Offset,
    place: Place,
    max: usize,
) -> io::Result<Headers> {
    let walk = match place {
        Place::Offset(offset) => {
            let start = Walk::from_start(segment);
            let walk = seek(executor, Arc::clone(&file), start, offset).await?;
            if walk.next != offset {
                return Ok(Headers::NotPinned);
            }
            walk
        }
        Place::Position {
            segment,
            position,
            offset,
        } => Walk {
            segment,
            position,
            next: offset,
        },
    };
    let found_by_offset = matches!(place, Place::Offset(_));
    let (chunks, walk) = run(executor, move || some(&file, walk, max)).await?;
    // It may be in the next segment, but that is not pinned.
    if chunks.is_empty() && found_by_offset {
        return Ok(Headers::NotPinned);
    }
    Ok(Headers::Chunks {
        chunks,
        next: Place::Position {
            segment: walk.segment,
            position: walk.position,
            offset: walk.next,
        },
    })
}

fn some(file: &File, mut walk: Walk, max: usize) -> io::Result<(Vec<Chunk>, Walk)> {
    let len = file.metadata()?.len();
    let mut chunks = Vec::new();
    while chunks.len() < max.min(HEADERS_A_STEP) {
        match walk.step(file, len)? {
            Some(chunk) => chunks.push(chunk),
            None => break,
        }
    }
    Ok((chunks, walk))
}

async fn seek(
    executor: &Executor,
    file: Arc<File>,
    mut walk: Walk,
    target: Offset,
) -> io::Result<Walk> {
    loop {
        let file = Arc::clone(&file);
        let step = move || walk.seek(&file, target).map(|arrived| (arrived, walk));
        let arrived;
        (arrived, walk) = run(executor, step).await?;
        if arrived {
            return Ok(walk);
        }
    }
}

async fn run<T: Send + 'static>(
    executor: &Executor,
    job: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    executor.read(job).await.map_err(io::Error::other)?
}
