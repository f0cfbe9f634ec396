//! What Erlang holds references to, and Erlang terms that Rust holds on to.

use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use parking_lot::Mutex;
use rustler::env::SavedTerm;
use rustler::{
    Binary, Encoder, Env, LocalPid, Monitor, NifResult, OwnedEnv, Resource, ResourceArc, Term,
};
use stream_s3_core::decisions::adoption::Search;
use stream_s3_core::fragment::Assembly;
use stream_s3_core::history;
use stream_s3_core::key::Prefix;
use stream_s3_core::manifest::{LookupContinuation, RetentionContinuation};
use stream_s3_core::replica_reader::Machine;
use stream_s3_runtime::{Governor, Store};

use crate::term;

/// Any Erlang term, kept outside of a process and handed back as it was: references of resources, funs and pids too.
///
/// Cloning shares the term. Equality is that of `=:=`. Saving and loading cost a copy of the term each.
#[derive(Clone)]
pub(crate) struct Opaque(Arc<Saved>);

struct Saved {
    /// Computed when it is first asked for: few terms serve as keys, and hashing passes over all of a term.
    hash: OnceLock<u64>,
    // An environment is not to be used by two threads at once.
    term: Mutex<(OwnedEnv, SavedTerm)>,
}

impl Opaque {
    pub(crate) fn save(term: Term) -> Self {
        let env = OwnedEnv::new();
        let saved = env.save(term);
        Self(Arc::new(Saved {
            hash: OnceLock::new(),
            term: Mutex::new((env, saved)),
        }))
    }

    fn hash_value(&self) -> u64 {
        *self.0.hash.get_or_init(|| {
            let term = self.0.term.lock();
            let (own, saved) = &*term;
            own.run(|own| saved.load(own).hash_internal(0))
        })
    }

    pub(crate) fn load<'a>(&self, env: Env<'a>) -> Term<'a> {
        let term = self.0.term.lock();
        let (own, saved) = &*term;
        own.run(|own| saved.load(own).in_env(env))
    }
}

impl Encoder for Opaque {
    fn encode<'a>(&self, env: Env<'a>) -> Term<'a> {
        self.load(env)
    }
}

impl PartialEq for Opaque {
    fn eq(&self, other: &Self) -> bool {
        if Arc::ptr_eq(&self.0, &other.0) {
            return true;
        }
        if self.hash_value() != other.hash_value() {
            return false;
        }
        // Always locked in the same order, so that two comparisons cannot wait for each other.
        let (first, second) = if Arc::as_ptr(&self.0) < Arc::as_ptr(&other.0) {
            (self, other)
        } else {
            (other, self)
        };
        let (first, second) = (first.0.term.lock(), second.0.term.lock());
        first.0.run(|env| {
            let left = first.1.load(env);
            second.0.run(|env| left == second.1.load(env))
        })
    }
}

impl Eq for Opaque {}

impl Hash for Opaque {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash_value());
    }
}

/// A fragment assembly: a value, shared by nobody who changes it.
pub(crate) struct AssemblyHandle(pub(crate) Assembly);

/// A state of a replica-reader machine: a value as well.
pub(crate) struct CoreHandle {
    pub(crate) machine: Machine<Opaque>,
    pub(crate) context: Arc<Context>,
}

/// The options that the machine does not look at, but effects repeat.
pub(crate) struct Context {
    pub(crate) stream: Opaque,
    pub(crate) dir: Opaque,
    pub(crate) reference: Opaque,
}

/// A search or an evaluation that waits for a group. A value: it may be resumed more than once.
pub(crate) enum ContHandle {
    Lookup(LookupContinuation),
    Retention(RetentionContinuation),
}

/// A search for the root to adopt: a value, too.
pub(crate) struct SearchHandle {
    pub(crate) search: Search,
    pub(crate) prefix: Prefix,
}

/// A state of a history machine: a value, too.
pub(crate) struct HistoryHandle(pub(crate) history::Machine);

/// An open store.
pub(crate) struct StoreHandle(pub(crate) Store);

/// A running governor.
pub(crate) struct GovernorHandle {
    pub(crate) governor: Governor<Opaque>,
    /// Runs external work.
    pub(crate) owner: LocalPid,
}

/// Watches over one process. The flag is all that the VM's callback touches: that runs on a scheduler, at any time.
#[derive(Default)]
pub(crate) struct Watch {
    dead: AtomicBool,
}

#[rustler::resource_impl]
impl Resource for AssemblyHandle {}

#[rustler::resource_impl]
impl Resource for CoreHandle {}

#[rustler::resource_impl]
impl Resource for ContHandle {}

#[rustler::resource_impl]
impl Resource for SearchHandle {}

#[rustler::resource_impl]
impl Resource for HistoryHandle {}

#[rustler::resource_impl]
impl Resource for StoreHandle {}

#[rustler::resource_impl]
impl Resource for GovernorHandle {}

#[rustler::resource_impl]
impl Resource for Watch {
    fn down<'a>(&'a self, _env: Env<'a>, _pid: LocalPid, _monitor: Monitor) {
        self.dead.store(true, Ordering::Relaxed);
    }
}

impl Watch {
    /// Watches `pid` for as long as the handle is held.
    pub(crate) fn over(env: Env, pid: &LocalPid) -> ResourceArc<Self> {
        let watch = ResourceArc::new(Self::default());
        // There is no monitor when the process is dead already.
        if env.monitor(&watch, pid).is_none() {
            watch.dead.store(true, Ordering::Relaxed);
        }
        watch
    }

    pub(crate) fn is_alive(&self) -> bool {
        !self.dead.load(Ordering::Relaxed)
    }
}

/// A binary of the VM that the VM has lent: the reference that this holds keeps it where it is, and nothing is copied. (Binaries of up to 64 bytes
/// live in the heap of their process, and are copied.)
pub(crate) struct Lent {
    /// Keeps the bytes.
    _env: OwnedEnv,
    start: *const u8,
    len: usize,
}

/// Bytes of all of them.
static LENT: AtomicU64 = AtomicU64::new(0);

// SAFETY: the bytes are never written while somebody refers to them, and the environment is only dropped, by one thread.
unsafe impl Send for Lent {}
// SAFETY: sharing gives access to the bytes alone.
unsafe impl Sync for Lent {}

impl Lent {
    /// Borrows a binary.
    pub(crate) fn bytes(binary: Term) -> NifResult<Bytes> {
        if !binary.is_binary() {
            return Err(term::misuse("payload: expected a binary"));
        }
        let env = OwnedEnv::new();
        let saved = env.save(binary);
        let (start, len) = env.run(|own| {
            let bytes: Binary = saved.load(own).decode()?;
            let slice = bytes.as_slice();
            Ok::<_, rustler::Error>((slice.as_ptr(), slice.len()))
        })?;
        LENT.fetch_add(len as u64, Ordering::Relaxed);
        Ok(Bytes::from_owner(Self {
            _env: env,
            start,
            len,
        }))
    }

    /// Bytes that are lent now.
    pub(crate) fn held() -> u64 {
        LENT.load(Ordering::Relaxed)
    }
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the environment refers to the binary, and lives as long as this does; it is neither cleared nor used otherwise. The VM neither
        // moves nor changes a binary that two environments refer to.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        LENT.fetch_sub(self.len as u64, Ordering::Relaxed);
    }
}
