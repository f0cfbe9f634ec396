//! What the registry of pinned segments takes and answers.

use std::io;

use rustler::{Encoder, Env, NifResult, Term};
use stream_s3_core::decisions::timeline::LocalChunk;
use stream_s3_core::units::Offset;
use stream_s3_runtime::pins::{Headers, PinsInfo, Place};

use super::{atoms, chunk_term, map_of, need, offset, or_undefined, unsigned};

/// The value in `{pins_result, Ref, Value}`.
pub(crate) enum Answer {
    Done,
    Joining(Option<Offset>),
    Headers(Headers),
    Identity(LocalChunk),
    Failed(String),
}

impl Answer {
    pub(crate) fn of<T>(result: io::Result<T>, answer: impl FnOnce(T) -> Self) -> Self {
        match result {
            Ok(value) => answer(value),
            Err(error) => Self::Failed(error.to_string()),
        }
    }
}

impl Encoder for Answer {
    fn encode<'a>(&self, env: Env<'a>) -> Term<'a> {
        match self {
            Self::Done => atoms::ok().encode(env),
            Self::Joining(first) => {
                let first = or_undefined(env, first.map(|offset| offset.0));
                (atoms::ok(), first).encode(env)
            }
            Self::Identity(LocalChunk::InsideAnother) => {
                (atoms::ok(), atoms::inside_another()).encode(env)
            }
            Self::Identity(LocalChunk::Trimmed) => (atoms::ok(), atoms::trimmed()).encode(env),
            Self::Identity(LocalChunk::Found(chunk)) => {
                let pairs = [
                    (atoms::chunk_id(), chunk.chunk_id.0.encode(env)),
                    (atoms::epoch(), chunk.epoch.0.encode(env)),
                    (atoms::crc(), chunk.crc.encode(env)),
                ];
                // No key comes twice, the only thing that could fail.
                let found = map_of(env, &pairs).unwrap_or_else(|_| atoms::trimmed().encode(env));
                (atoms::ok(), found).encode(env)
            }
            Self::Headers(Headers::NotPinned) => atoms::not_pinned().encode(env),
            Self::Headers(Headers::Chunks { chunks, next }) => {
                // No key of these maps comes twice, the only thing that could fail.
                let chunks: Vec<_> = chunks
                    .iter()
                    .filter_map(|chunk| chunk_term(env, chunk).ok())
                    .collect();
                (atoms::ok(), chunks, place_term(env, *next)).encode(env)
            }
            Self::Failed(text) => (atoms::error(), text.as_str()).encode(env),
        }
    }
}

/// An offset, or `{Segment, Position, Offset}` as an answer had it.
pub(crate) fn place(term: Term) -> NifResult<Place> {
    if term.is_tuple() {
        let (segment, position, next): (Term, Term, Term) =
            need(term, "place", "an offset or {Segment, Position, Offset}")?;
        return Ok(Place::Position {
            segment: offset(segment, "place: segment")?,
            position: unsigned(position, "place: position")?,
            offset: offset(next, "place: offset")?,
        });
    }
    offset(term, "place").map(Place::Offset)
}

fn place_term(env: Env, place: Place) -> Term {
    match place {
        Place::Offset(offset) => offset.0.encode(env),
        Place::Position {
            segment,
            position,
            offset,
        } => (segment.0, position, offset.0).encode(env),
    }
}

/// The registry's numbers.
pub(crate) fn pins_info<'a>(env: Env<'a>, info: &PinsInfo) -> NifResult<Term<'a>> {
    let streams: Vec<_> = info
        .streams
        .iter()
        .map(|(stream, bytes)| (stream.as_str(), bytes))
        .collect();
    let problem = match &info.problem {
        Some(text) => text.encode(env),
        None => atoms::none().encode(env),
    };
    map_of(
        env,
        &[
            (atoms::segments(), info.segments.encode(env)),
            (atoms::unlinked_bytes(), info.unlinked_bytes.encode(env)),
            (atoms::streams(), Term::map_from_pairs(env, &streams)?),
            (atoms::unwatched(), info.unwatched.encode(env)),
            (atoms::problem(), problem),
        ],
    )
}
