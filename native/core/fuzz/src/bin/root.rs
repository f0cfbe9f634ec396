//! See `check::root`.

#![no_main]

use stream_s3_core_fuzz::{check, seeds};

libfuzzer_sys::fuzz_target!(init: seeds::write("root"), |input: &[u8]| check::root(input));
