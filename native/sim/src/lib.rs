//! Deterministic simulation of the upload path: the production core, with the shell's way of driving it, in a world that follows from
//! one seed.
//!
//! ```text
//! world      what happens, in order; elections, crashes, outages, the end
//! reader/    the shell of a replica reader, one to one with the Erlang one (drain, transfers, effects)
//! tasks      its blocking work: resolution, persist, groups, retention
//! governor   admission and the transfers of a node
//! cluster    the log: three members, commit offset, elections, retention, lost page caches
//! bucket     the object store, with its faults        metadata  the compare-and-set, with its faults
//! replica    manifests of other nodes                 gc        the garbage collection
//! oracle     what is true, and whether what was done fits
//! twin       guards that can be taken out             run       seeds, shrinking, replay
//! ```
//!
//! Of the core everything runs that production runs: formats, assembly, the machine, admission, and the decisions on commits, resolution, timelines, the
//! start, retries, deletions, local retention, replicas and garbage. The oracle knows the committed log and the bucket, and nothing of
//! what the guards think.
//!
//! # Simulated
//!
//! Writes ahead of the commit offset, elections that truncate them, cut-off writers that go on, user retention that deletes segments before
//! they are uploaded, machines that forget what was not on their disks (and so logs that lose committed records and grow anew). Requests that
//! fail, hang, succeed unheard, or arrive after everybody gave up. Commands to the metadata store that take effect without an answer, or
//! much later; minorities; deletion of the stream. Readers and tasks that are killed between any two steps, clocks that jump, rates that change.
//!
//! # Not simulated
//!
//! Bytes that rot on a disk (the runtime's checksums), several streams on one node apart from the governor's queue, pinned segments (a
//! transfer opens its files when it is admitted), the history uploader, and a garbage collection that knows of discarded tiers.
//!
//! # A world's life
//!
//! Up to its horizon everything may go wrong; then it is calm, some last chunks are written, and the world has to come to rest with everything
//! committed tiered, byte for byte, unless retention dropped it, and with every caller answered.

mod bucket;
mod cluster;
mod coverage;
mod env;
mod gc;
mod governor;
mod metadata;
mod oracle;
mod plan;
mod reader;
mod replica;
mod rng;
mod run;
mod tasks;
mod twin;
mod world;

pub use coverage::Coverage;
pub use plan::Limits;
pub use run::{Finding, Report, search, shrink};
pub use twin::Twin;
pub use world::{Outcome, run};
