//! Segments kept open, so that a file that retention unlinks stays readable until all of it is uploaded.
//!
//! A node has one registry. A reader enters the log directory of its stream; from then on a thread of this module hears of each
//! file that appears or disappears there, opens new segments, and measures the deleted ones. So segments are pinned
//! whether or not anybody drains at that moment. Transfers and the reading of headers take the descriptor from here, and what
//! they hold stays readable even if the registry lets go of it.
//!
//! What is to be pinned and what is to be let go is decided by [`stream_s3_core::decisions::pins`].

mod files;
mod headers;
mod registry;
mod watch;

pub use headers::{Headers, Place};
pub use registry::{PINS_A_STREAM, Pins, PinsInfo};
