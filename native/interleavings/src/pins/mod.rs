//! The registry of pinned segments, over real files. The kernel that tells of them is stood in for, and other threads may come at each request to
//! either.

mod files;
#[path = "../../../runtime/src/pins/headers.rs"]
mod headers;
#[path = "../../../runtime/src/pins/registry.rs"]
mod registry;
mod watch;

pub use headers::{Headers, Place};
pub use registry::{PINS_A_STREAM, Pins, PinsInfo};
pub use watch::{forget_watches, happened, is_watched, overflowed};
