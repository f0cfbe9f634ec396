//! What the search for a root to adopt takes and answers.

use rustler::types::tuple;
use rustler::{Encoder, Env, NifResult, Term};
use stream_s3_core::decisions::adoption::{Choice, Object, Rejected, Step};
use stream_s3_core::key::{self, Prefix};
use stream_s3_core::units::{Epoch, Uid};

use super::{epoch, list, map_of, misuse, need, optional, uid, unsigned};

mod atoms {
    rustler::atoms! {
        read, take, refuse, root, key, range, bytes, fragments, groups, why, passed_over,
    }
}

/// `[{Key, Size, ModifiedMs | undefined}]`, as a listing has it. Keys of another shape are left out.
pub(crate) fn listed_objects(prefix: &Prefix, objects: Term) -> NifResult<Vec<Object>> {
    let mut all = Vec::new();
    for object in list(objects, "objects")? {
        let [key, size, modified] = tuple::get_tuple(object)
            .ok()
            .and_then(|elements| <[Term; 3]>::try_from(elements).ok())
            .ok_or_else(|| {
                misuse(format!(
                    "objects: expected {{Key, Size, ModifiedMs}}, got {object:?}"
                ))
            })?;
        let text: &str = need(key, "key", "a binary")?;
        if let Some(key) = key::parse(prefix, text) {
            all.push(Object {
                key,
                size: unsigned(size, "size")?,
                modified_ms: optional(modified, |term| {
                    need(term, "modified", "an integer or undefined")
                })?,
            });
        }
    }
    Ok(all)
}

/// `{Epoch, Uid}` or `undefined`.
pub(crate) fn named_root(term: Term) -> NifResult<Option<(Epoch, Uid)>> {
    optional(term, |term| {
        match tuple::get_tuple(term).unwrap_or_default().as_slice() {
            [of, id] => Ok((epoch(*of, "root.epoch")?, uid(*id, "root.uid")?)),
            _ => Err(misuse(format!(
                "root: expected {{Epoch, Uid}} or undefined, got {term:?}"
            ))),
        }
    })
}

/// `{read, Key}`, `{take, #{root, range, bytes, fragments, groups, why, passed_over}}` or `{refuse, [{{Uid, Epoch}, Text}]}`.
pub(crate) fn step<'a>(env: Env<'a>, prefix: &Prefix, step: &Step) -> NifResult<Term<'a>> {
    Ok(match step {
        Step::Read(key) => (atoms::read(), key.to_key(prefix)).encode(env),
        Step::Take(choice) => (atoms::take(), taken(env, choice)?).encode(env),
        Step::Refuse(rejected) => (atoms::refuse(), rejects(rejected)).encode(env),
    })
}

fn taken<'a>(env: Env<'a>, choice: &Choice) -> NifResult<Term<'a>> {
    let manifest = &choice.manifest;
    map_of(
        env,
        &[
            (atoms::root(), (choice.uid.0, choice.epoch.0).encode(env)),
            (
                atoms::range(),
                (manifest.first_offset.0, manifest.next_offset.0).encode(env),
            ),
            (atoms::bytes(), manifest.total_size.encode(env)),
            (atoms::fragments(), choice.fragments.encode(env)),
            (atoms::groups(), choice.groups.encode(env)),
            (atoms::why(), choice.why.encode(env)),
            (
                atoms::passed_over(),
                rejects(&choice.passed_over).encode(env),
            ),
        ],
    )
}

fn rejects(rejected: &[Rejected]) -> Vec<((u32, u64), String)> {
    rejected
        .iter()
        .map(|one| ((one.uid.0, one.epoch.0), one.defect.to_string()))
        .collect()
}
