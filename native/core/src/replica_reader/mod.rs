//! The replica-reader machine: it turns cut fragments into a persisted manifest.
//!
//! Events go in, effects come out, in the order in which they are to be performed. The machine keeps two manifests: the *persisted* one,
//! which everybody else may see, and the *speculative* one, which is ahead of it by the edits that wait for a persist.
//!
//! ```text
//! fragment_cut -> SubmitTransfer -> transfer_complete -> (in cut order) edit -> StartPersist -> persist_complete -> UpdateRange, ...
//!                                                          \-> UploadGroup -> group_upload_complete -> edit
//! ```

mod effect;
mod event;
mod machine;
mod persist;
mod rebalance;
mod reset;
mod retention;
mod status;
mod transfers;

pub use effect::Effect;
pub use event::{Event, FragmentError, Options, OptionsError, PersistError, Refused};
pub use machine::Machine;
pub use reset::ResetPersist;
pub use retention::RetentionError;
pub use status::Status;
