//! See `check::index`.

#![no_main]

use stream_s3_core_fuzz::{check, seeds};

libfuzzer_sys::fuzz_target!(init: seeds::write("index"), |input: &[u8]| check::index(input));
