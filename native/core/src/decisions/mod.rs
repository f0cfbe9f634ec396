//! Small decisions, one a module: facts in, verdict out. Whoever acts on one calls it, so there is no second copy of any rule.

pub mod adoption;
pub mod commit;
pub mod deletions;
pub mod discard;
pub mod gc;
pub mod generation;
pub mod local_log;
pub mod local_retention;
pub mod pins;
pub mod replica;
pub mod resolution;
pub mod retry;
pub mod timeline;
