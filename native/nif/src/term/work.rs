//! Settings, answers of a store, and what the governor takes and tells.

use std::path::PathBuf;

use bytes::Bytes;
use rustler::types::map::MapIterator;
use rustler::{Atom, Encoder, Env, LocalPid, NifResult, ResourceArc, Term};
use stream_s3_core::admission::Rate;
use stream_s3_core::key::Prefix;
use stream_s3_core::manifest::{Entry, Manifest};
use stream_s3_core::units::Uid;
use stream_s3_runtime::{Fragment, HistoryObject, HistoryPut, Limits, Read, Settings, Snapshot};
use stream_s3_store::s3::{Credentials, S3Settings};
use stream_s3_store::{
    Capabilities, Failure, Listed, Page, Part, Precondition, PutOptions, StoreError, Stored,
};

use super::failure::Failed;
use super::manifest::{entries_term, manifest_term};
use super::{
    atoms, binary, field, fragment_meta, is, map_of, misuse, need, optional, or_undefined,
    stream_id, tuple_of, unsigned,
};
use crate::handle::StoreHandle;

/// A setting that cannot be used: its key, and why. Never holds a value, which may be a secret.
pub(crate) type Refused<'a> = (Term<'a>, String);

/// The settings of a store, as the configuration has them.
#[derive(Default)]
struct Given<'a> {
    kind: Option<Atom>,
    fs_dir: Option<String>,
    prefix: Option<String>,
    path_style: Option<bool>,
    access_key_id: Option<String>,
    secret_key: Option<String>,
    session_token: Option<String>,
    s3: S3Settings,
    unknown: Option<Term<'a>>,
}

/// Reads a configuration map: where the store is, and the prefix of its keys.
pub(crate) fn settings<'a>(
    env: Env<'a>,
    config: Term<'a>,
) -> NifResult<Result<(Settings, Prefix), Refused<'a>>> {
    let pairs = MapIterator::new(config).ok_or_else(|| misuse("store settings: expected a map"))?;
    let mut given = Given::default();
    for (key, value) in pairs {
        if !is(value, atoms::undefined())
            && let Err(why) = given.set(key, value)
        {
            return Ok(Err((key, why.to_owned())));
        }
    }
    Ok(match given.unknown {
        Some(key) => Err((key, "no setting of a store has this name".to_owned())),
        None => given.finish().map_err(|(key, why)| (key.encode(env), why)),
    })
}

impl<'a> Given<'a> {
    fn set(&mut self, key: Term<'a>, value: Term<'a>) -> Result<(), &'static str> {
        let key_is = |atom| is(key, atom);
        if key_is(atoms::store()) {
            self.kind = Some(value.decode().map_err(|_| "expected s3 or fs")?);
        } else if key_is(atoms::path_style()) {
            self.path_style = Some(value.decode().map_err(|_| "expected true or false")?);
        } else if let Some(place) = self.text_of(key) {
            *place = Some(text(value).ok_or("expected text: a binary or a string")?);
        } else if key_is(atoms::bucket()) {
            self.s3.bucket = text(value).ok_or("expected text: a binary or a string")?;
        } else if key_is(atoms::ca_file()) {
            self.s3.ca_file = Some(
                text(value)
                    .ok_or("expected text: a binary or a string")?
                    .into(),
            );
        } else {
            self.unknown = Some(key);
        }
        Ok(())
    }

    fn text_of(&mut self, key: Term<'a>) -> Option<&mut Option<String>> {
        let places = [
            (atoms::fs_dir(), &mut self.fs_dir),
            (atoms::prefix(), &mut self.prefix),
            (atoms::access_key_id(), &mut self.access_key_id),
            (atoms::secret_key(), &mut self.secret_key),
            (atoms::session_token(), &mut self.session_token),
            (atoms::region(), &mut self.s3.region),
            (atoms::endpoint(), &mut self.s3.endpoint),
            (atoms::proxy(), &mut self.s3.proxy),
            (atoms::kms_key_id(), &mut self.s3.kms_key_id),
            (atoms::storage_class(), &mut self.s3.storage_class),
            (
                atoms::expected_bucket_owner(),
                &mut self.s3.expected_bucket_owner,
            ),
        ];
        places
            .into_iter()
            .find(|(atom, _)| is(key, *atom))
            .map(|(_, place)| place)
    }

    fn finish(self) -> Result<(Settings, Prefix), (Atom, String)> {
        let prefix = match self.prefix {
            Some(text) => {
                Prefix::parse(&text).map_err(|error| (atoms::prefix(), error.to_string()))?
            }
            None => Prefix::default(),
        };
        let settings = match self.kind {
            Some(kind) if kind == atoms::fs() => {
                let dir = self.fs_dir.ok_or_else(|| {
                    (
                        atoms::fs_dir(),
                        "a store of kind fs needs a directory".to_owned(),
                    )
                })?;
                Settings::Fs(PathBuf::from(dir))
            }
            Some(kind) if kind == atoms::s3() => {
                let mut s3 = self.s3;
                s3.path_style = self.path_style;
                s3.credentials = match (self.access_key_id, self.secret_key) {
                    (Some(access_key_id), Some(secret_key)) => Credentials::Static {
                        access_key_id,
                        secret_key,
                        session_token: self.session_token,
                    },
                    (None, None) => Credentials::Chain,
                    (Some(_), None) => {
                        return Err((
                            atoms::secret_key(),
                            "must be set where access_key_id is".to_owned(),
                        ));
                    }
                    (None, Some(_)) => {
                        return Err((
                            atoms::access_key_id(),
                            "must be set where secret_key is".to_owned(),
                        ));
                    }
                };
                Settings::S3(Box::new(s3))
            }
            Some(_) | None => return Err((atoms::store(), "expected s3 or fs".to_owned())),
        };
        Ok((settings, prefix))
    }
}

/// A binary, or a list of characters.
fn text(term: Term) -> Option<String> {
    if term.is_binary() {
        return term.decode().ok();
    }
    // Decoding an improper list panics.
    term.list_length().ok()?;
    let characters: Vec<u32> = term.decode().ok()?;
    characters.into_iter().map(char::from_u32).collect()
}

/// A directory: a binary in any encoding, or a string.
pub(crate) fn path(term: Term) -> NifResult<PathBuf> {
    use std::os::unix::ffi::OsStrExt as _;
    if let Ok(bytes) = term.decode::<rustler::Binary>() {
        return Ok(PathBuf::from(std::ffi::OsStr::from_bytes(&bytes)));
    }
    text(term)
        .map(PathBuf::from)
        .ok_or_else(|| misuse(format!("dir: expected a binary or a string, got {term:?}")))
}

/// When a PUT may take effect.
pub(crate) fn put_options(term: Term, body: &[u8]) -> NifResult<PutOptions> {
    let absent = term.map_get(atoms::if_none_match()).ok();
    let matches = term.map_get(atoms::if_match()).ok();
    let precondition = match (absent, matches) {
        (None, None) if term.is_map() => Precondition::None,
        (Some(flag), None) if is(flag, rustler::types::atom::true_()) => Precondition::Absent,
        (None, Some(etag)) => Precondition::Matches(need(etag, "if_match", "a binary")?),
        (Some(_), Some(_)) | (Some(_), None) | (None, None) => {
            return Err(misuse(format!(
                "options: expected #{{}}, #{{if_none_match => true}} or #{{if_match => Etag}}, got {term:?}"
            )));
        }
    };
    Ok(PutOptions {
        crc32: Some(crc32fast::hash(body)),
        precondition,
    })
}

/// Which part of an object to read.
pub(crate) fn part(term: Term) -> NifResult<Part> {
    if is(term, atoms::whole()) {
        return Ok(Part::Whole);
    }
    let (first, second): (Term, Term) = need(term, "part", "whole, {Start, End} or {last, Count}")?;
    if is(first, atoms::last()) {
        return unsigned(second, "part").map(Part::Last);
    }
    let (start, end) = (unsigned(first, "part")?, unsigned(second, "part")?);
    if start >= end {
        return Err(misuse(format!("part: starts at {start}, ends at {end}")));
    }
    Ok(Part::Range(start..end))
}

/// Text, or `undefined`.
pub(crate) fn text_or_undefined(term: Term, what: &str) -> NifResult<Option<String>> {
    optional(term, |term| need(term, what, "a binary or undefined"))
}

/// How many rows of a listing a caller wants, 1 to 1000.
pub(crate) fn page_size(term: Term) -> NifResult<usize> {
    match term.decode() {
        Ok(max @ 1..=1000) => Ok(max),
        Ok(_) | Err(_) => Err(misuse(format!("max: expected 1 to 1000, got {term:?}"))),
    }
}

/// The setting that an error of opening a store is about.
pub(crate) fn setting_of<'a>(env: Env<'a>, error: &StoreError) -> Term<'a> {
    let name = setting_name(&error.failure);
    let known = [
        ("store", atoms::store()),
        ("fs_dir", atoms::fs_dir()),
        ("bucket", atoms::bucket()),
        ("region", atoms::region()),
        ("endpoint", atoms::endpoint()),
        ("path_style", atoms::path_style()),
        ("access_key_id", atoms::access_key_id()),
        ("secret_key", atoms::secret_key()),
        ("session_token", atoms::session_token()),
        ("ca_file", atoms::ca_file()),
        ("proxy", atoms::proxy()),
        ("kms_key_id", atoms::kms_key_id()),
        ("storage_class", atoms::storage_class()),
        ("expected_bucket_owner", atoms::expected_bucket_owner()),
    ];
    known
        .into_iter()
        .find(|(known, _)| *known == name)
        .map_or_else(atoms::store, |(_, atom)| atom)
        .encode(env)
}

fn setting_name(failure: &Failure) -> &'static str {
    match failure {
        Failure::Setting(key) => key,
        Failure::Http(_)
        | Failure::Timeout
        | Failure::Connection
        | Failure::Throttled
        | Failure::ChecksumMismatch
        | Failure::ClockSkew
        | Failure::ExpiredToken
        | Failure::WriteConflict
        | Failure::Body
        | Failure::File(..)
        | Failure::Closed => "store",
    }
}

/// What a submission asks for: a fragment of a store, or `None` for external work.
pub(crate) fn work(term: Term) -> NifResult<Option<(ResourceArc<StoreHandle>, Fragment)>> {
    if is(term, atoms::external()) {
        return Ok(None);
    }
    let (tag, store, stream, dir, meta): (Atom, Term, Term, Term, Term) = need(
        term,
        "work",
        "external or {fragment, Store, StreamId, Dir, Meta}",
    )?;
    if tag != atoms::fragment() {
        return Err(misuse(format!(
            "work: expected external or {{fragment, Store, StreamId, Dir, Meta}}, got {term:?}"
        )));
    }
    let store = need(store, "store", "a store")?;
    Ok(Some((
        store,
        Fragment {
            stream: stream_id(stream)?,
            dir: path(dir)?,
            meta: fragment_meta(meta)?,
        },
    )))
}

/// The value in `{ok, Value}` of a store request.
pub(crate) enum StoreAnswer {
    Capabilities(Capabilities),
    Stored(Stored),
    Read(Read),
    Undeleted(Vec<(String, StoreError)>),
    Page(Page),
    Uid(Uid),
    HistoryPut(HistoryPut),
    HistoryObject(HistoryObject),
    HistoryPayload(Bytes),
    Manifest(Box<Manifest>),
    Entries(Vec<Entry>),
}

impl Encoder for StoreAnswer {
    fn encode<'a>(&self, env: Env<'a>) -> Term<'a> {
        match self {
            Self::Capabilities(found) => map(
                env,
                &[
                    (
                        atoms::conditional_writes(),
                        found.conditional_writes.encode(env),
                    ),
                    (
                        atoms::verifies_checksums(),
                        found.verifies_checksums.encode(env),
                    ),
                ],
            ),
            Self::Stored(stored) => map(
                env,
                &[(atoms::etag(), or_undefined(env, stored.etag.as_deref()))],
            ),
            Self::Read(read) => map(
                env,
                &[
                    (atoms::size(), read.size.encode(env)),
                    (atoms::etag(), or_undefined(env, read.etag.as_deref())),
                    (atoms::body(), binary(env, &read.bytes)),
                ],
            ),
            Self::Undeleted(keys) => keys
                .iter()
                .map(|(key, error)| (key, Failed(error)).encode(env))
                .collect::<Vec<_>>()
                .encode(env),
            Self::Page(page) => {
                let rows: Vec<_> = page.objects.iter().map(|row| listed(env, row)).collect();
                map(
                    env,
                    &[
                        (atoms::objects(), rows.encode(env)),
                        (atoms::next(), or_undefined(env, page.next.as_deref())),
                    ],
                )
            }
            Self::HistoryPut(put) => super::history::history_put(env, *put),
            Self::HistoryObject(object) => super::history::history_object(env, object),
            Self::HistoryPayload(bytes) => binary(env, bytes),
            Self::Uid(uid) => uid.0.encode(env),
            Self::Manifest(manifest) => manifest_term(env, manifest),
            Self::Entries(entries) => entries_term(env, entries.iter()),
        }
    }
}

fn listed<'a>(env: Env<'a>, row: &Listed) -> Term<'a> {
    tuple_of(
        env,
        &[
            row.key.encode(env),
            row.size.encode(env),
            or_undefined(env, row.modified_ms),
        ],
    )
}

fn map<'a>(env: Env<'a>, pairs: &[(Atom, Term<'a>)]) -> Term<'a> {
    // Fails on a key that comes twice, and none of the lists above has one.
    map_of(env, pairs).unwrap_or_else(|_| atoms::undefined().encode(env))
}

/// The body of a PUT, copied out of the VM's memory.
pub(crate) fn iodata(term: Term) -> NifResult<Bytes> {
    rustler::Binary::from_iolist(term)
        .map(|bytes| Bytes::copy_from_slice(&bytes))
        .map_err(|_| misuse("body: expected iodata"))
}

/// A rate: `unlimited`, or bytes a second, at least 1.
pub(crate) fn rate(term: Term) -> Result<Rate, String> {
    if is(term, atoms::unlimited()) {
        return Ok(Rate::Unlimited);
    }
    positive(term)
        .map(Rate::BytesPerSec)
        .map_err(|text| format!("{text}, or unlimited"))
}

fn positive(term: Term) -> Result<u64, String> {
    match term.decode() {
        Ok(0) | Err(_) => Err(format!("expected a positive integer, got {term:?}")),
        Ok(number) => Ok(number),
    }
}

/// What a governor is started with: its limits, and the process that owns it.
pub(crate) fn governor_options<'a>(
    env: Env<'a>,
    term: Term<'a>,
) -> NifResult<Result<(Limits, LocalPid), Refused<'a>>> {
    let owner = need(
        field(term, atoms::owner(), "owner")?,
        "owner",
        "a pid of this node",
    )?;
    let get = |key: Atom, what| field(term, key, what);
    let (rate_term, burst, permits) = (
        get(atoms::rate(), "rate")?,
        get(atoms::burst(), "burst")?,
        get(atoms::concurrency(), "concurrency")?,
    );
    let read = || {
        let rate = rate(rate_term).map_err(|text| (atoms::rate(), text))?;
        let burst = positive(burst).map_err(|text| (atoms::burst(), text))?;
        let permits = concurrency(permits).map_err(|text| (atoms::concurrency(), text))?;
        Ok(Limits {
            rate,
            burst,
            permits,
        })
    };
    Ok(read()
        .map(|limits| (limits, owner))
        .map_err(|(key, text): (Atom, String)| (key.encode(env), text)))
}

/// How much may run at once, at least 1.
pub(crate) fn concurrency(term: Term) -> Result<usize, String> {
    positive(term).and_then(|number| usize::try_from(number).map_err(|error| error.to_string()))
}

/// Bytes that may be admitted at once, at least 1.
pub(crate) fn burst(term: Term) -> Result<u64, String> {
    positive(term)
}

/// The governor's numbers.
pub(crate) fn governor_info<'a>(env: Env<'a>, snapshot: &Snapshot) -> NifResult<Term<'a>> {
    map_of(
        env,
        &[
            (
                atoms::governor_submissions_received(),
                snapshot.governor_submissions_received.encode(env),
            ),
            (
                atoms::governor_tasks_in_flight(),
                snapshot.governor_tasks_in_flight.encode(env),
            ),
            (
                atoms::governor_pending_submissions(),
                snapshot.governor_pending_submissions.encode(env),
            ),
            (
                atoms::governor_oversized_admissions(),
                snapshot.governor_oversized_admissions.encode(env),
            ),
            (
                atoms::governor_dropped_dead_replyto(),
                snapshot.governor_dropped_dead_replyto.encode(env),
            ),
            (
                atoms::upload_permits_in_use(),
                snapshot.upload_permits_in_use.encode(env),
            ),
            (
                atoms::upload_permits_effective(),
                snapshot.upload_permits_effective.encode(env),
            ),
            (
                atoms::upload_buffer_bytes(),
                snapshot.upload_buffer_bytes.encode(env),
            ),
            (atoms::bytes_sent(), snapshot.bytes_sent.encode(env)),
        ],
    )
}
