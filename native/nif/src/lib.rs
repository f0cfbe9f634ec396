//! The library that the BEAM loads. Terms come in, terms go out; nothing is decided here.
//!
//! Functions of the pure part run on normal schedulers and answer at once. Their states are values: a call clones the
//! one it is given, which costs a few reference counts, and changes the clone. Functions of the runtime part copy their
//! arguments, hand them to threads of the library, and return; answers are messages. Misuse raises `{badarg, Text}`, a
//! panic raises `nif_panicked`.
//!
//! Loading starts no thread: the first `store_open` or `governor_start` does, on a dirty scheduler.

mod adoption;
mod decisions;
mod handle;
mod history;
mod mailbox;
#[cfg(feature = "panics")]
mod panics;
mod pins;
mod pure;
mod requests;
mod term;
mod upkeep;

/// Version of the interface that `rabbitmq_stream_s3_nif.erl` was written for; both change together.
const ABI_VERSION: u32 = 1;

rustler::init!("rabbitmq_stream_s3_nif", load = load);

fn load(_env: rustler::Env, info: rustler::Term) -> bool {
    info.decode::<u32>()
        .is_ok_and(|version| version == ABI_VERSION)
}
