//! Fuzzers of the decoders in `stream_s3_core`. Whatever the bytes, a decoder answers: it neither panics nor takes more memory than a few
//! times its input. What it accepts it writes again byte for byte.

pub mod check;
mod memory;
pub mod seeds;
