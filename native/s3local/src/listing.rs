//! Pages of a listing.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use s3s::dto::*;
use s3s::{S3Error, S3Result, s3_error};
use stream_s3_store::tree::{self, Entry, Tree};

/// What S3 encodes in the keys of a listing.
const ENCODED: AsciiSet = NON_ALPHANUMERIC
    .remove(b'/')
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'*');

/// An object's size as the protocol has it.
pub(crate) fn size(entry: &Entry) -> S3Result<i64> {
    i64::try_from(entry.size).map_err(S3Error::internal_error)
}

/// How a listing writes keys, and parts of keys: XML cannot hold each character that a key can.
#[derive(Clone, Copy)]
pub(crate) struct Spelling {
    encoded: bool,
}

impl Spelling {
    /// As the client wants it.
    pub(crate) fn new(asked: Option<&EncodingType>) -> Self {
        Self {
            encoded: asked.is_some_and(|asked| asked.as_str() == EncodingType::URL),
        }
    }

    /// The text as it is written.
    pub(crate) fn of(self, text: &str) -> String {
        if self.encoded {
            utf8_percent_encode(text, &ENCODED).to_string()
        } else {
            text.to_owned()
        }
    }

    /// What the answer says about it.
    pub(crate) fn told(self) -> Option<EncodingType> {
        self.encoded
            .then(|| EncodingType::from_static(EncodingType::URL))
    }
}

fn object(entry: &Entry, spelling: Spelling) -> S3Result<Object> {
    Ok(Object {
        key: Some(spelling.of(&entry.key)),
        size: Some(size(entry)?),
        last_modified: Some(tree::time_of(entry.modified_ms).into()),
        e_tag: Some(ETag::Strong(entry.etag.clone())),
        ..Object::default()
    })
}

/// A page: rows, folders where a delimiter is given, and where the next page starts.
#[derive(Default)]
pub(crate) struct Listing {
    pub(crate) objects: Vec<Entry>,
    pub(crate) folders: Vec<String>,
    pub(crate) next: Option<String>,
}

/// The page of at most `max` rows that follows the key `after`.
pub(crate) fn list(
    tree: &Tree,
    prefix: &str,
    delimiter: Option<&str>,
    after: Option<String>,
    max: usize,
) -> tree::Result<Listing> {
    let mut page = Listing::default();
    let mut after = after;
    while page.objects.len() + page.folders.len() < max {
        let left = max - page.objects.len() - page.folders.len();
        let (entries, mut more) = tree.list(prefix, after.as_deref(), left)?;
        let last = entries.last().map(|entry| entry.key.clone());
        let mut skipped = None;
        for entry in entries {
            let rest = &entry.key[prefix.len()..];
            let folder =
                delimiter.and_then(|delimiter| rest.find(delimiter).map(|at| at + delimiter.len()));
            match folder {
                None => page.objects.push(entry),
                Some(len) => {
                    let folder = entry.key[..prefix.len() + len].to_owned();
                    // Greater than every key in it.
                    skipped = Some(format!("{folder}{}", char::MAX));
                    page.folders.push(folder);
                    more = true;
                    break;
                }
            }
        }
        after = skipped.or(last).or(after);
        if !more {
            return Ok(page);
        }
    }
    // Is there anything behind the last row?
    let (rest, _) = tree.list(prefix, after.as_deref(), 1)?;
    page.next = if rest.is_empty() { None } else { after };
    Ok(page)
}

/// Objects and folders of a page as the answer has them.
pub(crate) fn shown(
    page: &Listing,
    spelling: Spelling,
) -> S3Result<(Vec<Object>, Vec<CommonPrefix>)> {
    let objects = page.objects.iter().map(|entry| object(entry, spelling));
    let folders = page.folders.iter().map(|folder| CommonPrefix {
        prefix: Some(spelling.of(folder)),
    });
    Ok((objects.collect::<S3Result<_>>()?, folders.collect()))
}

/// The key that a continuation token stands for.
pub(crate) fn decode_token(token: &str) -> S3Result<String> {
    let bytes = URL_SAFE_NO_PAD.decode(token).ok();
    let text = bytes.and_then(|bytes| String::from_utf8(bytes).ok());
    text.ok_or_else(|| {
        s3_error!(
            InvalidArgument,
            "The continuation token provided is incorrect"
        )
    })
}
