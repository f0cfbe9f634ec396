//! See `check::fragment`.

#![no_main]

use stream_s3_core_fuzz::{check, seeds};

libfuzzer_sys::fuzz_target!(init: seeds::write("fragment"), |input: &[u8]| check::fragment(input));
