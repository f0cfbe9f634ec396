//! Deterministic simulation of the upload path: the production core, with the shell's way of driving it, in a world that follows from
//! one seed.
//!
//! ```text
//! world/     what happens, in order; elections, crashes, outages, the end
//! reader/    the shell of a replica reader, one to one with the Erlang one
//! tasks/     its blocking work: resolution, persist, groups, retention
//! governor   admission and the transfers of a node, for all of its streams
//! pins       segments that are held open until they are uploaded
//! reaper     deletes what nothing refers to         gc        the garbage collection
//! replica    manifests of other nodes               cluster   the log: three members
//! bucket     the object store, with its faults      metadata  the compare-and-set, with its faults
//! oracle     what is true, and whether what was done fits
//! env        what all of them share                 coverage  what has to happen in a million worlds
//! history/   the history uploader, a small world of its own
//! twin       guards that can be taken out           run       seeds, shrinking, replay
//! ```
//!
//! What a world is, what is checked, and what is left out: `docs/simulation.md`.

mod bucket;
mod cluster;
mod coverage;
mod env;
mod gc;
mod governor;
mod history;
mod metadata;
mod oracle;
mod pins;
mod plan;
mod reader;
mod reaper;
mod replica;
mod rng;
mod run;
mod tasks;
mod twin;
mod world;

pub use coverage::{Coverage, REQUIRED, bound};
pub use history::{
    HISTORY_REQUIRED, HistoryFinding, HistoryOutcome, HistoryReport, HistoryTwin,
    run as run_history, search as search_history,
};
pub use plan::Limits;
pub use run::{Finding, Report, search, shrink};
pub use twin::Twin;
pub use world::{Outcome, run};
