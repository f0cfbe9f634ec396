//! Carries out what the core has decided: uploads of fragments, paced by a governor, and single requests to a store.
//!
//! Everything runs on threads of the library. Callers hand work over and are answered through a [`Mailbox`] or a
//! future; no call waits for the store. This crate knows nothing of the BEAM.

pub mod buffers;
mod checksums;
pub mod crc;
mod executor;
pub mod governor;
mod history;
pub mod integrity;
pub mod metrics;
mod panics;
pub mod pins;
mod running;
mod segment;
mod store;
mod sync;
mod transfer;

pub use executor::{Executor, StartError};
pub use governor::{Event, Governor, Limits, Mailbox, Work};
pub use history::{HistoryObject, HistoryPut, Payload};
pub use metrics::Snapshot;
pub use panics::caught_async;
pub use pins::Pins;
pub use running::Running;
pub use segment::posix_name;
pub use store::{Read, Settings, Store};
pub use transfer::{Fragment, reason};
