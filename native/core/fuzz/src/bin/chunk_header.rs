//! See `check::chunk_header`.

#![no_main]

use stream_s3_core_fuzz::{check, seeds};

libfuzzer_sys::fuzz_target!(init: seeds::write("chunk_header"), |input: &[u8]| check::chunk_header(input));
