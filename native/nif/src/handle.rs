//! What Erlang holds references to, and Erlang terms that Rust holds on to.

use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use rustler::env::SavedTerm;
use rustler::{Encoder, Env, LocalPid, Monitor, OwnedEnv, Resource, ResourceArc, Term};
use stream_s3_core::decisions::adoption::Search;
use stream_s3_core::fragment::Assembly;
use stream_s3_core::key::Prefix;
use stream_s3_core::manifest::{LookupContinuation, RetentionContinuation};
use stream_s3_core::replica_reader::Machine;
use stream_s3_runtime::{Governor, Store};

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
