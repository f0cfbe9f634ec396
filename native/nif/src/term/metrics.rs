//! The counts of store requests as a term.

use rustler::{Atom, Encoder, Env, NifResult, Term};
use stream_s3_store::meter::{
    DURATION_BOUNDS, DurationSnapshot, ObjectKind, Operation, Outcome, RequestSnapshot,
};

use super::{atoms, map_of};

/// `#{requests, durations, bytes_sent, bytes_received}`, as `rabbitmq_stream_s3_nif` documents it.
pub(crate) fn store_metrics<'a>(env: Env<'a>, snapshot: &RequestSnapshot) -> NifResult<Term<'a>> {
    let requests: Vec<_> = snapshot
        .requests
        .iter()
        .map(|(op, ended, kind, count)| (operation(*op), outcome(*ended), object(*kind), *count))
        .collect();
    let durations: Vec<_> = snapshot
        .durations
        .iter()
        .map(|duration| histogram(env, duration))
        .collect();
    map_of(
        env,
        &[
            (atoms::requests(), requests.encode(env)),
            (atoms::durations(), durations.encode(env)),
            (atoms::bytes_sent(), snapshot.bytes_sent.encode(env)),
            (atoms::bytes_received(), snapshot.bytes_received.encode(env)),
        ],
    )
}

fn histogram<'a>(env: Env<'a>, duration: &DurationSnapshot) -> Term<'a> {
    let bounds = DURATION_BOUNDS
        .iter()
        .map(|bound| bound.encode(env))
        .chain([atoms::infinity().encode(env)]);
    let buckets: Vec<_> = bounds.zip(duration.cumulative).collect();
    let all = duration.cumulative[DURATION_BOUNDS.len()];
    (operation(duration.operation), buckets, duration.sum, all).encode(env)
}

fn operation(operation: Operation) -> Atom {
    match operation {
        Operation::Put => atoms::put(),
        Operation::Get => atoms::get(),
        Operation::List => atoms::list(),
        Operation::Delete => atoms::delete(),
        Operation::MultiDelete => atoms::multi_delete(),
        Operation::Probe => atoms::probe(),
    }
}

fn outcome(outcome: Outcome) -> Atom {
    match outcome {
        Outcome::Ok => atoms::ok(),
        Outcome::Transient => atoms::transient(),
        Outcome::Throttled => atoms::throttled(),
        Outcome::Conflict => atoms::conflict(),
        Outcome::NotFound => atoms::not_found(),
        Outcome::Corrupt => atoms::corrupt(),
        Outcome::Invalid => atoms::invalid(),
        Outcome::Closed => atoms::closed(),
        Outcome::Cancelled => atoms::cancelled(),
    }
}

fn object(kind: ObjectKind) -> Atom {
    match kind {
        ObjectKind::Fragment => atoms::fragment(),
        ObjectKind::Root => atoms::root(),
        ObjectKind::Group => atoms::group(),
        ObjectKind::KiloGroup => atoms::kilo_group(),
        ObjectKind::MegaGroup => atoms::mega_group(),
        ObjectKind::History => atoms::history(),
        ObjectKind::Unknown => atoms::unknown(),
    }
}
