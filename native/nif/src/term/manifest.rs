//! Manifests, edits, entries, object references, and what searches and retention answer.

use std::sync::Arc;

use rustler::types::tuple;
use rustler::{Atom, Binary, Encoder, Env, NewBinary, NifResult, ResourceArc, Term};
use stream_s3_core::error::FormatError;
use stream_s3_core::key::{self, StreamId};
use stream_s3_core::manifest::{
    ENTRY_SIZE, Edit, Entries, Entry, EntryKind, FragmentRef, GroupRef, Header, Lookup, Manifest,
    ObjectRef, Retention, RetentionLimits, SearchError, decode_entries, encode_root_of, new_total,
    splice_range,
};
use stream_s3_core::units::{Offset, Revision, TimestampMs};

use super::{
    atoms, epoch, is, list, misuse, need, offset, offset_or_undefined, or_undefined, record,
    revision, timestamp, tuple_of, uid, unsigned, unsigned32,
};
use crate::handle::ContHandle;

/// A `#manifest{}` with its entries still as bytes.
pub(crate) struct ManifestBytes<'a> {
    pub(crate) first_offset: Offset,
    pub(crate) first_timestamp: TimestampMs,
    pub(crate) first_last_timestamp: TimestampMs,
    pub(crate) next_offset: Offset,
    pub(crate) total_size: u128,
    pub(crate) revision: Revision,
    pub(crate) entries: Binary<'a>,
}

/// A `#manifest{}` whose entries are not looked at: constant time.
pub(crate) fn manifest_bytes(term: Term<'_>) -> NifResult<ManifestBytes<'_>> {
    let fields = record(term, atoms::manifest(), 7, "manifest")?;
    Ok(ManifestBytes {
        first_offset: offset(fields[0], "#manifest.first_offset")?,
        first_timestamp: timestamp(fields[1], "#manifest.first_timestamp")?,
        first_last_timestamp: timestamp(fields[2], "#manifest.first_last_timestamp")?,
        next_offset: offset(fields[3], "#manifest.next_offset")?,
        total_size: need(fields[4], "#manifest.total_size", "a non-negative integer")?,
        revision: revision(fields[5], "#manifest.revision")?,
        entries: need(fields[6], "#manifest.entries", "a binary")?,
    })
}

/// A `#manifest{}`, in time linear in its entries. `Err` inside has the text of what is wrong with the entries' bytes.
pub(crate) fn manifest(term: Term) -> NifResult<Result<Manifest, FormatError>> {
    let parts = manifest_bytes(term)?;
    Ok(decode_entries(&parts.entries).map(|entries| Manifest {
        first_offset: parts.first_offset,
        first_timestamp: parts.first_timestamp,
        first_last_timestamp: parts.first_last_timestamp,
        next_offset: parts.next_offset,
        total_size: parts.total_size,
        revision: parts.revision,
        entries,
    }))
}

/// The same, where malformed entries are misuse.
pub(crate) fn whole_manifest(term: Term) -> NifResult<Manifest> {
    manifest(term)?.map_err(|error| misuse(format!("#manifest.entries: {error}")))
}

/// The stored form of a `#manifest{}`: entries are checked for length and kinds, and copied.
pub(crate) fn root(term: Term) -> NifResult<Vec<u8>> {
    let parts = manifest_bytes(term)?;
    let header = Header {
        first_offset: parts.first_offset,
        next_offset: parts.next_offset,
        first_timestamp: parts.first_timestamp,
        first_last_timestamp: parts.first_last_timestamp,
        total_size: parts.total_size,
    };
    encode_root_of(&header, &parts.entries).map_err(|error| match error.what {
        "entries" => misuse(format!("#manifest.entries: {error}")),
        _ => misuse(error.to_string()),
    })
}

/// An edit that changes nothing of a manifest.
pub(crate) fn new_edit<'a>(env: Env<'a>, manifest: Term<'a>) -> NifResult<Term<'a>> {
    let parts = manifest_bytes(manifest)?;
    let edit = Edit {
        first_offset: parts.first_offset,
        first_timestamp: parts.first_timestamp,
        first_last_timestamp: parts.first_last_timestamp,
        next_offset: None,
        size: 0,
        entries: Arc::from([]),
        pos: 0,
        len: 0,
    };
    Ok(edit_term(env, &edit))
}

/// Entries in a binary; misuse where they are none.
pub(crate) fn entries(term: Term, what: &str) -> NifResult<Entries> {
    let bytes: Binary = need(term, what, "a binary")?;
    decode_entries(&bytes).map_err(|error| misuse(format!("{what}: {error}")))
}

/// The same as a vector.
pub(crate) fn entries_list(term: Term, what: &str) -> NifResult<Vec<Entry>> {
    entries(term, what).map(|entries| entries.into_iter().collect())
}

/// Entries as a binary.
pub(crate) fn entries_term<'a, 'e>(
    env: Env<'a>,
    entries: impl ExactSizeIterator<Item = &'e Entry>,
) -> Term<'a> {
    let mut out = NewBinary::new(env, entries.len() * ENTRY_SIZE);
    let (rows, _) = out.as_mut_slice().as_chunks_mut::<ENTRY_SIZE>();
    let mut rows = rows.iter_mut();
    // Not the other way round: the entries know how to pass over their blocks.
    entries.for_each(|entry| {
        if let Some(row) = rows.next() {
            *row = entry.encode();
        }
    });
    out.into()
}

/// A manifest as its record.
pub(crate) fn manifest_term<'a>(env: Env<'a>, manifest: &Manifest) -> Term<'a> {
    tuple_of(
        env,
        &[
            atoms::manifest().encode(env),
            manifest.first_offset.0.encode(env),
            manifest.first_timestamp.0.encode(env),
            manifest.first_last_timestamp.0.encode(env),
            manifest.next_offset.0.encode(env),
            manifest.total_size.encode(env),
            manifest.revision.0.encode(env),
            entries_term(env, manifest.entries.iter()),
        ],
    )
}

/// An `#edit{}`.
pub(crate) fn edit(term: Term) -> NifResult<Edit> {
    let fields = record(term, atoms::edit(), 8, "edit")?;
    Ok(Edit {
        first_offset: offset(fields[0], "#edit.first_offset")?,
        first_timestamp: timestamp(fields[1], "#edit.first_timestamp")?,
        first_last_timestamp: timestamp(fields[2], "#edit.first_last_timestamp")?,
        next_offset: offset_or_undefined(fields[3], "#edit.next_offset")?,
        size: need(fields[4], "#edit.size", "an integer")?,
        entries: entries(fields[5], "#edit.entries")?.into_iter().collect(),
        pos: unsigned(fields[6], "#edit.pos")?,
        len: unsigned(fields[7], "#edit.len")?,
    })
}

/// An edit as its record.
pub(crate) fn edit_term<'a>(env: Env<'a>, edit: &Edit) -> Term<'a> {
    tuple_of(
        env,
        &[
            atoms::edit().encode(env),
            edit.first_offset.0.encode(env),
            edit.first_timestamp.0.encode(env),
            edit.first_last_timestamp.0.encode(env),
            or_undefined(env, edit.next_offset.map(|offset| offset.0)),
            edit.size.encode(env),
            entries_term(env, edit.entries.iter()),
            edit.pos.encode(env),
            edit.len.encode(env),
        ],
    )
}

/// The manifest after an edit, spliced as bytes: what the entries mean is not looked at, so nothing but bounds, grid and total can be wrong.
pub(crate) fn apply_edit_bytes<'a>(
    env: Env<'a>,
    edit: Term<'a>,
    manifest: Term<'a>,
) -> NifResult<Term<'a>> {
    let parts = manifest_bytes(manifest)?;
    let fields = record(edit, atoms::edit(), 8, "edit")?;
    let insert: Binary = need(fields[5], "#edit.entries", "a binary")?;
    let (pos, len) = (
        unsigned(fields[6], "#edit.pos")?,
        unsigned(fields[7], "#edit.len")?,
    );
    for (bytes, what) in [
        (&parts.entries, "#manifest.entries"),
        (&insert, "#edit.entries"),
    ] {
        if bytes.len() % ENTRY_SIZE != 0 {
            return Err(misuse(format!(
                "{what}: {} bytes are not a multiple of {ENTRY_SIZE}",
                bytes.len()
            )));
        }
    }
    let (start, end) = splice_range(parts.entries.len() / ENTRY_SIZE, pos, len)
        .map_err(|error| misuse(error.to_string()))?;
    let change: i128 = need(fields[4], "#edit.size", "an integer")?;
    let total = new_total(parts.total_size, change).map_err(|error| misuse(error.to_string()))?;
    let (head, tail) = (
        &parts.entries[..start * ENTRY_SIZE],
        &parts.entries[end * ENTRY_SIZE..],
    );
    let mut entries = NewBinary::new(env, head.len() + insert.len() + tail.len());
    let (before, rest) = entries.as_mut_slice().split_at_mut(head.len());
    let (middle, after) = rest.split_at_mut(insert.len());
    before.copy_from_slice(head);
    middle.copy_from_slice(&insert);
    after.copy_from_slice(tail);
    let next_offset = if is(fields[3], atoms::undefined()) {
        parts.next_offset.0.encode(env)
    } else {
        fields[3]
    };
    Ok(tuple_of(
        env,
        &[
            atoms::manifest().encode(env),
            fields[0],
            fields[1],
            fields[2],
            next_offset,
            total.encode(env),
            parts.revision.0.encode(env),
            entries.into(),
        ],
    ))
}

/// A kind of entry, 0 to 3.
pub(crate) fn kind(term: Term, what: &str) -> NifResult<EntryKind> {
    let code: Option<EntryKind> = unsigned32(term, what)
        .ok()
        // Decoded as a u8, 257 would be 1.
        .and_then(|code| u8::try_from(code).ok())
        .and_then(EntryKind::from_code);
    code.ok_or_else(|| misuse(format!("{what}: expected 0, 1, 2 or 3, got {term:?}")))
}

/// A kind of group, 1 to 3.
pub(crate) fn group_kind(term: Term) -> NifResult<EntryKind> {
    match kind(term, "kind")? {
        EntryKind::Fragment => Err(misuse("kind: a fragment is not a group")),
        group @ (EntryKind::Group | EntryKind::KiloGroup | EntryKind::MegaGroup) => Ok(group),
    }
}

/// `{error, {corrupt, Text}}`, for bytes that do not decode.
pub(crate) fn format_error<'a>(env: Env<'a>, error: &FormatError) -> Term<'a> {
    (atoms::error(), (atoms::corrupt(), error.to_string())).encode(env)
}

fn fragment_ref<'a>(env: Env<'a>, fragment: &FragmentRef) -> Term<'a> {
    (
        atoms::fragment_ref(),
        fragment.offset.0,
        fragment.uid.0,
        fragment.size,
    )
        .encode(env)
}

fn group_ref<'a>(env: Env<'a>, group: &GroupRef) -> Term<'a> {
    (
        atoms::group_ref(),
        group.offset.0,
        group.kind.code(),
        group.uid.0,
    )
        .encode(env)
}

/// What a lookup answers.
pub(crate) fn lookup<'a>(env: Env<'a>, found: Result<Lookup, SearchError>) -> Term<'a> {
    match found {
        Ok(Lookup::Found(fragment)) => (atoms::ok(), fragment_ref(env, &fragment)).encode(env),
        Ok(Lookup::Fetch(group, cont)) => fetch(env, &group, ContHandle::Lookup(cont)),
        Ok(Lookup::NotFound) => atoms::not_found().encode(env),
        Err(SearchError(group)) => (
            atoms::error(),
            (atoms::corrupt_group(), group_ref(env, &group)),
        )
            .encode(env),
    }
}

/// What an evaluation of retention answers.
pub(crate) fn retention<'a>(env: Env<'a>, decided: Retention) -> Term<'a> {
    match decided {
        Retention::Unchanged => atoms::unchanged().encode(env),
        Retention::Drop { edit, objects } => {
            let objects: Vec<Term> = objects
                .iter()
                .map(|object| match object {
                    ObjectRef::Fragment(fragment) => fragment_ref(env, fragment),
                    ObjectRef::Group(group) => group_ref(env, group),
                })
                .collect();
            (edit_term(env, &edit), objects).encode(env)
        }
        Retention::Fetch(group, cont) => fetch(env, &group, ContHandle::Retention(cont)),
    }
}

fn fetch<'a>(env: Env<'a>, group: &GroupRef, cont: ContHandle) -> Term<'a> {
    (
        atoms::fetch(),
        group_ref(env, group),
        ResourceArc::new(cont),
    )
        .encode(env)
}

/// A list of `{max_bytes, B}` and `{max_age, Ms}`. Of two of a kind the stricter one counts.
pub(crate) fn limits(term: Term) -> NifResult<RetentionLimits> {
    let mut limits = RetentionLimits::default();
    for spec in list(term, "retention")? {
        let (name, value): (Atom, Term) =
            need(spec, "retention", "{max_bytes, Bytes} or {max_age, Ms}")?;
        if name == atoms::max_bytes() {
            let bytes = need(value, "max_bytes", "a non-negative integer")?;
            limits.max_bytes = Some(
                limits
                    .max_bytes
                    .map_or(bytes, |other: u128| other.min(bytes)),
            );
        } else if name == atoms::max_age() {
            let age = unsigned(value, "max_age")?;
            limits.max_age_ms = Some(limits.max_age_ms.map_or(age, |other| other.min(age)));
        } else {
            return Err(misuse(format!(
                "retention: expected {{max_bytes, Bytes}} or {{max_age, Ms}}, got {spec:?}"
            )));
        }
    }
    Ok(limits)
}

/// `{ok, Entries}` or `{error, Reason}`: what became of a fetch. The reason comes back as it is.
pub(crate) fn fetched(term: Term<'_>) -> NifResult<Result<Vec<Entry>, Term<'_>>> {
    let (tag, value): (Atom, Term) = need(term, "group", "{ok, Entries} or {error, Reason}")?;
    if tag == atoms::ok() {
        entries_list(value, "group entries").map(Ok)
    } else if tag == atoms::error() {
        Ok(Err(value))
    } else {
        Err(misuse(format!(
            "group: expected {{ok, Entries}} or {{error, Reason}}, got {term:?}"
        )))
    }
}

/// The key of what `{fragment, Offset, Uid}`, `{root, Epoch, Uid}` or `{group, Kind, Offset, Uid}` names.
pub(crate) fn object_key(prefix: Term, stream: &StreamId, object: Term) -> NifResult<String> {
    let prefix = super::prefix(prefix)?;
    let parts = tuple::get_tuple(object).unwrap_or_default();
    match parts.as_slice() {
        [tag, at, id] if is(*tag, atoms::fragment()) => Ok(key::fragment(
            &prefix,
            stream,
            offset(*at, "offset")?,
            uid(*id, "uid")?,
        )),
        [tag, of, id] if is(*tag, atoms::root()) => Ok(key::root(
            &prefix,
            stream,
            epoch(*of, "epoch")?,
            uid(*id, "uid")?,
        )),
        [tag, level, at, id] if is(*tag, atoms::group()) => Ok(key::group(
            &prefix,
            stream,
            group_kind(*level)?,
            offset(*at, "offset")?,
            uid(*id, "uid")?,
        )),
        _ => Err(misuse(format!(
            "object: expected {{fragment | root | group, ...}}, got {object:?}"
        ))),
    }
}
