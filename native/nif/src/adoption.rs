//! NIFs of the search for the root that a lost pointer is rebuilt from. They pass over whole listings and roots, so they run on dirty
//! schedulers.

use rustler::{Binary, Env, NifResult, ResourceArc, Term};
use stream_s3_core::decisions::adoption::Search;

use crate::handle::SearchHandle;
use crate::term;

type SearchRef = ResourceArc<SearchHandle>;

/// Begins with all objects of a stream. Linear.
#[rustler::nif(schedule = "DirtyCpu")]
fn adoption_begin(prefix: Term, stream: Term, objects: Term, named: Term) -> NifResult<SearchRef> {
    let prefix = term::prefix(prefix)?;
    let objects = term::listed_objects(&prefix, objects)?;
    let search = Search::new(term::stream_id(stream)?, objects, term::named_root(named)?);
    Ok(ResourceArc::new(SearchHandle { search, prefix }))
}

/// What to read, what to take, or why nothing. Linear in the entries of the root that is taken.
#[rustler::nif(schedule = "DirtyCpu")]
fn adoption_next<'a>(env: Env<'a>, search: SearchRef) -> NifResult<Term<'a>> {
    term::step(env, &search.prefix, &search.search.next())
}

/// What was read: the bytes of the object, or `not_found`. Linear in its entries.
#[rustler::nif(schedule = "DirtyCpu")]
fn adoption_found(found: Term, search: SearchRef) -> NifResult<SearchRef> {
    let mut next = search.search.clone();
    if found.is_atom() {
        next.found(None);
    } else {
        let bytes: Binary = found
            .decode()
            .map_err(|_| term::misuse("found: expected a binary or not_found"))?;
        next.found(Some(bytes.as_slice()));
    }
    Ok(ResourceArc::new(SearchHandle {
        search: next,
        prefix: search.prefix.clone(),
    }))
}
