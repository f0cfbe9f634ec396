//! Object keys: building them, and telling what a listed key is.
//!
//! Everything that can become part of a key is checked once, when a [`StreamId`], [`RunId`] or [`Prefix`] is made of it; from then
//! on no key can name an object outside its stream.

use std::fmt::{self, Write as _};

use crate::error::{FormatError, FormatProblem};
use crate::manifest::EntryKind;
use crate::units::{Epoch, Offset, Uid};

const MAX_ID: usize = 255;
const MAX_PREFIX: usize = 512;

macro_rules! checked_text {
    ($(#[$doc:meta])* $name:ident, $what:literal, $check:path) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Box<str>);

        impl $name {
            /// Takes `text` if it can be one; the error names the first byte that cannot.
            pub fn parse(text: &str) -> Result<Self, FormatError> {
                match $check(text) {
                    None => Ok(Self(text.into())),
                    Some(at) => {
                        Err(FormatError::new($what, at as u64, FormatProblem::InvalidText($what)))
                    }
                }
            }

            /// The text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

checked_text! {
    /// Name of a stream, unique to one incarnation of it: 1 to 255 of `A-Za-z0-9_=-`.
    StreamId, "stream id", bad_stream_id
}
checked_text! {
    /// Name of a history run: 1 to 255 of `A-Za-z0-9_=-.`, but neither `.` nor `..`.
    RunId, "run id", bad_run_id
}
checked_text! {
    /// What all keys of a deployment start with: 1 to 512 bytes of `A-Za-z0-9_=-.` and `/`, where no part between slashes is
    /// empty, `.` or `..`.
    Prefix, "prefix", bad_prefix
}

impl Default for Prefix {
    fn default() -> Self {
        Self("rabbitmq".into())
    }
}

fn is_id_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'=' | b'-')
}

/// Position of the first byte that `allowed` refuses, or of the length's violation.
fn bad_byte(text: &str, max: usize, allowed: impl Fn(u8) -> bool) -> Option<usize> {
    if text.is_empty() {
        return Some(0);
    }
    text.bytes()
        .position(|byte| !allowed(byte))
        .or((text.len() > max).then_some(max))
}

fn bad_stream_id(text: &str) -> Option<usize> {
    bad_byte(text, MAX_ID, is_id_byte)
}

fn bad_run_id(text: &str) -> Option<usize> {
    bad_byte(text, MAX_ID, |byte| is_id_byte(byte) || byte == b'.')
        .or((text == "." || text == "..").then_some(0))
}

fn bad_prefix(text: &str) -> Option<usize> {
    let bad = bad_byte(text, MAX_PREFIX, |byte| {
        is_id_byte(byte) || matches!(byte, b'.' | b'/')
    });
    let mut at = 0;
    bad.or_else(|| {
        text.split('/').find_map(|part| {
            let start = at;
            at += part.len() + 1;
            matches!(part, "" | "." | "..").then_some(start)
        })
    })
}

/// Ending of the key of a group of this kind; `None` for a fragment, which is not a group.
#[must_use]
pub fn group_suffix(kind: EntryKind) -> Option<&'static str> {
    match kind {
        EntryKind::Fragment => None,
        EntryKind::Group => Some("group"),
        EntryKind::KiloGroup => Some("kgroup"),
        EntryKind::MegaGroup => Some("mgroup"),
    }
}

/// What a key names.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ParsedKey {
    /// A fragment of a stream.
    Fragment {
        /// Whose.
        stream: StreamId,
        /// First offset.
        first_offset: Offset,
        /// Of the attempt that stored it.
        uid: Uid,
    },
    /// A manifest root of a stream.
    Root {
        /// Whose.
        stream: StreamId,
        /// Of the writer that stored it.
        epoch: Epoch,
        /// Of the attempt that stored it.
        uid: Uid,
    },
    /// A group of a stream; `kind` is never `Fragment`.
    Group {
        /// Whose.
        stream: StreamId,
        /// Its level.
        kind: EntryKind,
        /// First offset.
        first_offset: Offset,
        /// Of the attempt that stored it.
        uid: Uid,
    },
    /// A segment of a history run.
    History {
        /// Whose.
        run: RunId,
        /// Its number in the run.
        seq: u64,
    },
}

/// Key of a fragment.
#[must_use]
pub fn fragment(prefix: &Prefix, stream: &StreamId, first_offset: Offset, uid: Uid) -> String {
    format!(
        "{prefix}/stream/{stream}/data/{:020}.{:08x}.fragment",
        first_offset.0, uid.0
    )
}

/// Key of a manifest root.
#[must_use]
pub fn root(prefix: &Prefix, stream: &StreamId, epoch: Epoch, uid: Uid) -> String {
    format!(
        "{prefix}/stream/{stream}/metadata/root.{epoch}.{:08x}.manifest",
        uid.0
    )
}

/// Key of an entry of `kind`: of a group, or of a fragment.
#[must_use]
pub fn entry(
    prefix: &Prefix,
    stream: &StreamId,
    kind: EntryKind,
    first_offset: Offset,
    uid: Uid,
) -> String {
    match group_suffix(kind) {
        None => fragment(prefix, stream, first_offset, uid),
        Some(suffix) => format!(
            "{prefix}/stream/{stream}/metadata/{:020}.{:08x}.{suffix}",
            first_offset.0, uid.0
        ),
    }
}

/// Key of a group; `kind` says which. The same as [`entry`], under the name that reads better for groups.
#[must_use]
pub fn group(
    prefix: &Prefix,
    stream: &StreamId,
    kind: EntryKind,
    first_offset: Offset,
    uid: Uid,
) -> String {
    entry(prefix, stream, kind, first_offset, uid)
}

/// Key of a history segment.
#[must_use]
pub fn history_segment(prefix: &Prefix, run: &RunId, seq: u64) -> String {
    format!("{}{seq:020}.segment", history_prefix(prefix, run))
}

/// What all keys of a stream start with. Ends in `/`: one id can be the beginning of another.
#[must_use]
pub fn stream_prefix(prefix: &Prefix, stream: &StreamId) -> String {
    format!("{prefix}/stream/{stream}/")
}

/// What the keys of all streams start with. Ends in `/`.
#[must_use]
pub fn streams_prefix(prefix: &Prefix) -> String {
    format!("{prefix}/stream/")
}

/// What the keys of all history runs start with. Ends in `/`.
#[must_use]
pub fn histories_prefix(prefix: &Prefix) -> String {
    format!("{prefix}/history/")
}

/// What all keys of a history run start with. Ends in `/`.
#[must_use]
pub fn history_prefix(prefix: &Prefix, run: &RunId) -> String {
    format!("{prefix}/history/{run}/")
}

impl ParsedKey {
    /// The key that [`parse`] reads as this.
    #[must_use]
    pub fn to_key(&self, prefix: &Prefix) -> String {
        match self {
            Self::Fragment {
                stream,
                first_offset,
                uid,
            } => fragment(prefix, stream, *first_offset, *uid),
            Self::Root { stream, epoch, uid } => root(prefix, stream, *epoch, *uid),
            Self::Group {
                stream,
                kind,
                first_offset,
                uid,
            } => entry(prefix, stream, *kind, *first_offset, *uid),
            Self::History { run, seq } => history_segment(prefix, run, *seq),
        }
    }
}

/// Tells what `key` names. `None` for every key that no function of this module could have built under `prefix`: such an object is
/// somebody else's and is left alone.
#[must_use]
pub fn parse(prefix: &Prefix, key: &str) -> Option<ParsedKey> {
    let rest = key.strip_prefix(prefix.as_str())?.strip_prefix('/')?;
    let mut parts = rest.split('/');
    let parsed = match (parts.next()?, parts.next()?, parts.next()?, parts.next()) {
        ("stream", id, "data", Some(name)) => parse_data(StreamId::parse(id).ok()?, name)?,
        ("stream", id, "metadata", Some(name)) => parse_metadata(StreamId::parse(id).ok()?, name)?,
        ("history", id, name, None) => {
            let seq = decimal_20(name.strip_suffix(".segment")?)?;
            ParsedKey::History {
                run: RunId::parse(id).ok()?,
                seq,
            }
        }
        _ => return None,
    };
    parts.next().is_none().then_some(parsed)
}

fn parse_data(stream: StreamId, name: &str) -> Option<ParsedKey> {
    let (first_offset, uid) = offset_and_uid(name.strip_suffix(".fragment")?)?;
    Some(ParsedKey::Fragment {
        stream,
        first_offset,
        uid,
    })
}

fn parse_metadata(stream: StreamId, name: &str) -> Option<ParsedKey> {
    if let Some(middle) = name.strip_prefix("root.") {
        let (epoch, id) = middle.strip_suffix(".manifest")?.split_once('.')?;
        return Some(ParsedKey::Root {
            stream,
            epoch: Epoch(plain_decimal(epoch)?),
            uid: uid(id)?,
        });
    }
    let (name, suffix) = name.rsplit_once('.')?;
    let kind = [EntryKind::Group, EntryKind::KiloGroup, EntryKind::MegaGroup]
        .into_iter()
        .find(|kind| group_suffix(*kind) == Some(suffix))?;
    let (first_offset, uid) = offset_and_uid(name)?;
    Some(ParsedKey::Group {
        stream,
        kind,
        first_offset,
        uid,
    })
}

fn offset_and_uid(text: &str) -> Option<(Offset, Uid)> {
    let (offset, id) = text.split_once('.')?;
    Some((Offset(decimal_20(offset)?), uid(id)?))
}

fn decimal_20(text: &str) -> Option<u64> {
    (text.len() == 20 && text.bytes().all(|byte| byte.is_ascii_digit()))
        .then(|| text.parse().ok())
        .flatten()
}

/// A number as it is printed: no sign, no leading zero.
fn plain_decimal(text: &str) -> Option<u64> {
    let number: u64 = text.parse().ok()?;
    let mut printed = String::new();
    write!(printed, "{number}").ok()?;
    (printed == text).then_some(number)
}

fn uid(text: &str) -> Option<Uid> {
    let lower_hex = |byte: u8| byte.is_ascii_digit() || matches!(byte, b'a'..=b'f');
    (text.len() == 8 && text.bytes().all(lower_hex))
        .then(|| u32::from_str_radix(text, 16).ok().map(Uid))
        .flatten()
}
