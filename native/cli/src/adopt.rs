//! `adopt`: which root a stream's lost pointer is rebuilt from, and the call that does it. The decision is the core's, the same that
//! the call takes.

use serde::Serialize;
use stream_s3_core::decisions::adoption::{Choice, Object, Rejected, Search, Step};
use stream_s3_core::key::{self, ParsedKey, Prefix, StreamId};
use stream_s3_core::units::{Epoch, Uid};
use stream_s3_store::Part;

use crate::reader::{Failed, PAGE, Read, Reader};
use crate::tree::MAX_OBJECT;

/// What the search came to.
pub(crate) type Found = Result<Box<Choice>, Vec<Rejected>>;

/// Searches. Lists the stream's objects, and reads its roots and the groups below the one that is taken.
pub(crate) async fn search(
    reader: &Reader,
    prefix: &Prefix,
    stream: &StreamId,
    named: Option<(Epoch, Uid)>,
) -> Result<Found, Failed> {
    let objects = list(reader, prefix, stream).await?;
    let mut search = Search::new(stream.clone(), objects, named);
    loop {
        let key = match search.next() {
            Step::Read(key) => key.to_key(prefix),
            Step::Take(choice) => return Ok(Ok(choice)),
            Step::Refuse(rejected) => return Ok(Err(rejected)),
        };
        match reader.read(&key, Part::Whole, MAX_OBJECT).await? {
            Read::Bytes(bytes) => search.found(Some(&bytes)),
            Read::Absent => search.found(None),
            // No root and no group is that large: it fails to decode.
            Read::TooLarge(_) => search.found(Some(&[])),
        }
    }
}

async fn list(reader: &Reader, prefix: &Prefix, stream: &StreamId) -> Result<Vec<Object>, Failed> {
    let place = key::stream_prefix(prefix, stream);
    let mut objects = Vec::new();
    let mut from = None;
    loop {
        let page = reader.list(&place, from.as_deref(), PAGE).await?;
        objects.extend(page.objects.into_iter().filter_map(|listed| {
            Some(Object {
                key: key::parse(prefix, &listed.key)?,
                size: listed.size,
                modified_ms: listed.modified_ms,
            })
        }));
        match page.next {
            Some(next) => from = Some(next),
            None => return Ok(objects),
        }
    }
}

/// `adopt --json`.
#[derive(Serialize)]
struct AdoptDoc<'a> {
    stream: &'a str,
    ok: bool,
    /// Null where none can be taken.
    root: Option<RootDoc<'a>>,
    /// Newer roots that cannot be taken, newest first.
    passed_over: Vec<RejectedDoc>,
}

#[derive(Serialize)]
struct RootDoc<'a> {
    key: String,
    epoch: u64,
    /// Eight hex digits.
    uid: String,
    first_offset: u64,
    next_offset: u64,
    total_size: u128,
    fragments: u64,
    groups: u64,
    /// Why this one.
    why: &'a str,
    /// The Erlang expression that adopts it.
    call: String,
}

#[derive(Serialize)]
struct RejectedDoc {
    key: String,
    why: String,
}

/// The report as JSON.
pub(crate) fn json(prefix: &Prefix, stream: &StreamId, found: &Found) -> String {
    let (root, rejected) = match found {
        Ok(choice) => (
            Some(root_doc(prefix, stream, choice)),
            choice.passed_over.as_slice(),
        ),
        Err(rejected) => (None, rejected.as_slice()),
    };
    crate::report::document(&AdoptDoc {
        stream: stream.as_str(),
        ok: root.is_some(),
        root,
        passed_over: rejected
            .iter()
            .map(|one| RejectedDoc {
                key: root_key(prefix, stream, one.epoch, one.uid),
                why: one.defect.to_string(),
            })
            .collect(),
    })
}

fn root_doc<'a>(prefix: &Prefix, stream: &StreamId, choice: &'a Choice) -> RootDoc<'a> {
    RootDoc {
        key: root_key(prefix, stream, choice.epoch, choice.uid),
        epoch: choice.epoch.0,
        uid: format!("{:08x}", choice.uid.0),
        first_offset: choice.manifest.first_offset.0,
        next_offset: choice.manifest.next_offset.0,
        total_size: choice.manifest.total_size,
        fragments: choice.fragments,
        groups: choice.groups,
        why: &choice.why,
        call: call(stream, choice),
    }
}

/// The report for people.
pub(crate) fn text(prefix: &Prefix, stream: &StreamId, found: &Found) -> String {
    let rejected = |all: &[Rejected]| {
        all.iter().fold(String::new(), |text, one| {
            let key = root_key(prefix, stream, one.epoch, one.uid);
            text + "wrong: " + &key + ": " + &one.defect.to_string() + "\n"
        })
    };
    match found {
        Ok(choice) => format!(
            "{}root    {}\nrange   offsets [{}, {})\ntotal   {} bytes in {} fragments, {} groups\nwhy     {}\n\n\
             Nothing has been changed. On a node with a member of the stream:\n\n  rabbitmqctl eval '{}.'\n",
            rejected(&choice.passed_over),
            root_key(prefix, stream, choice.epoch, choice.uid),
            choice.manifest.first_offset,
            choice.manifest.next_offset,
            choice.manifest.total_size,
            choice.fragments,
            choice.groups,
            choice.why,
            call(stream, choice),
        ),
        Err(all) => format!(
            "{}adopt: stream {stream} has no root that could be adopted\n",
            rejected(all)
        ),
    }
}

fn call(stream: &StreamId, choice: &Choice) -> String {
    format!(
        "rabbitmq_stream_s3:adopt(<<\"{stream}\">>, #{{root => {{{}, 16#{:08x}}}}})",
        choice.epoch, choice.uid.0
    )
}

fn root_key(prefix: &Prefix, stream: &StreamId, epoch: Epoch, uid: Uid) -> String {
    let stream = stream.clone();
    ParsedKey::Root { stream, epoch, uid }.to_key(prefix)
}
