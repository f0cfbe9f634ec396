//! Chunks and the description of a fragment.

use rustler::{Encoder, Env, NifResult, Term};
use stream_s3_core::fragment::{Assembly, Chunk, Fragment, FragmentMeta, Span};

use super::{
    atoms, field, list, map_of, misuse, need, offset, or_undefined, timestamp, unsigned, unsigned32,
};

/// A chunk map, as it comes from the log. Other keys are ignored.
pub(crate) fn chunk(term: Term) -> NifResult<Chunk> {
    let get = |key, what| field(term, key, what);
    Ok(Chunk {
        chunk_id: offset(get(atoms::chunk_id(), "chunk.chunk_id")?, "chunk.chunk_id")?,
        timestamp: timestamp(
            get(atoms::timestamp(), "chunk.timestamp")?,
            "chunk.timestamp",
        )?,
        num_records: unsigned32(
            get(atoms::num_records(), "chunk.num_records")?,
            "chunk.num_records",
        )?,
        data_size: unsigned32(
            get(atoms::data_size(), "chunk.data_size")?,
            "chunk.data_size",
        )?,
        position: unsigned(get(atoms::position(), "chunk.position")?, "chunk.position")?,
        next_position: unsigned(
            get(atoms::next_position(), "chunk.next_position")?,
            "chunk.next_position",
        )?,
        segment_offset: offset(
            get(atoms::segment_offset(), "chunk.segment_offset")?,
            "chunk.segment_offset",
        )?,
        crc: unsigned32(get(atoms::crc(), "chunk.crc")?, "chunk.crc")?,
    })
}

/// The same map, made here: of a chunk that the library has read.
pub(crate) fn chunk_term<'a>(env: Env<'a>, chunk: &Chunk) -> NifResult<Term<'a>> {
    map_of(
        env,
        &[
            (atoms::chunk_id(), chunk.chunk_id.0.encode(env)),
            (atoms::timestamp(), chunk.timestamp.0.encode(env)),
            (atoms::num_records(), chunk.num_records.encode(env)),
            (atoms::data_size(), chunk.data_size.encode(env)),
            (atoms::position(), chunk.position.encode(env)),
            (atoms::next_position(), chunk.next_position.encode(env)),
            (atoms::segment_offset(), chunk.segment_offset.0.encode(env)),
            (atoms::crc(), chunk.crc.encode(env)),
        ],
    )
}

/// The map that describes a fragment.
pub(crate) fn meta<'a>(env: Env<'a>, meta: &FragmentMeta) -> NifResult<Term<'a>> {
    let spans: Vec<_> = meta
        .spans
        .iter()
        .map(|span| (span.segment_offset.0, span.start, span.end))
        .collect();
    map_of(
        env,
        &[
            (atoms::first_offset(), meta.first_offset.0.encode(env)),
            (atoms::first_timestamp(), meta.first_timestamp.0.encode(env)),
            (atoms::last_timestamp(), meta.last_timestamp.0.encode(env)),
            (atoms::next_offset(), meta.next_offset.0.encode(env)),
            (atoms::size(), meta.size.encode(env)),
            (atoms::num_chunks(), meta.num_chunks.encode(env)),
            (atoms::spans(), spans.encode(env)),
        ],
    )
}

/// What the machine needs of that map.
pub(crate) fn fragment(term: Term) -> NifResult<Fragment> {
    let get = |key, what| field(term, key, what);
    Ok(Fragment {
        first_offset: offset(
            get(atoms::first_offset(), "meta.first_offset")?,
            "meta.first_offset",
        )?,
        next_offset: offset(
            get(atoms::next_offset(), "meta.next_offset")?,
            "meta.next_offset",
        )?,
        first_timestamp: timestamp(
            get(atoms::first_timestamp(), "meta.first_timestamp")?,
            "meta.first_timestamp",
        )?,
        last_timestamp: timestamp(
            get(atoms::last_timestamp(), "meta.last_timestamp")?,
            "meta.last_timestamp",
        )?,
        size: unsigned(get(atoms::size(), "meta.size")?, "meta.size")?,
    })
}

/// What an upload needs of that map: all of it.
pub(crate) fn fragment_meta(term: Term) -> NifResult<FragmentMeta> {
    let fragment = fragment(term)?;
    let num_chunks = unsigned32(
        field(term, atoms::num_chunks(), "meta.num_chunks")?,
        "meta.num_chunks",
    )?;
    let list = list(field(term, atoms::spans(), "meta.spans")?, "meta.spans")?;
    let spans = list.map(span).collect::<NifResult<Vec<_>>>()?;
    if spans.iter().map(Span::size).try_fold(0, u64::checked_add) != Some(fragment.size) {
        return Err(misuse(format!(
            "meta.spans: do not add up to meta.size, {}",
            fragment.size
        )));
    }
    Ok(FragmentMeta {
        first_offset: fragment.first_offset,
        first_timestamp: fragment.first_timestamp,
        last_timestamp: fragment.last_timestamp,
        next_offset: fragment.next_offset,
        size: fragment.size,
        num_chunks,
        spans,
    })
}

fn span(term: Term) -> NifResult<Span> {
    let (segment, start, end): (Term, Term, Term) =
        need(term, "meta.spans", "{SegmentOffset, StartPos, EndPos}")?;
    let (segment_offset, start, end) = (
        offset(segment, "meta.spans: segment offset")?,
        unsigned(start, "meta.spans: start")?,
        unsigned(end, "meta.spans: end")?,
    );
    if start >= end {
        return Err(misuse(format!(
            "meta.spans: starts at {start}, ends at {end}"
        )));
    }
    Ok(Span {
        segment_offset,
        start,
        end,
    })
}

/// A view of an assembly for people.
pub(crate) fn info<'a>(env: Env<'a>, assembly: &Assembly) -> NifResult<Term<'a>> {
    let info = assembly.info();
    map_of(
        env,
        &[
            (atoms::target_size(), info.target.encode(env)),
            (
                atoms::expected_offset(),
                or_undefined(env, info.expected.map(|offset| offset.0)),
            ),
            (atoms::is_cut(), info.is_cut.encode(env)),
            (atoms::data_size(), info.data_size.encode(env)),
            (atoms::size(), info.size.encode(env)),
            (atoms::num_chunks(), info.num_chunks.encode(env)),
            (
                atoms::first_offset(),
                or_undefined(env, info.first_offset.map(|offset| offset.0)),
            ),
            (
                atoms::next_offset(),
                or_undefined(env, info.next_offset.map(|offset| offset.0)),
            ),
        ],
    )
}
