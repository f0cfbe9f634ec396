//! See `check::history`.

#![no_main]

use stream_s3_core_fuzz::{check, seeds};

libfuzzer_sys::fuzz_target!(init: seeds::write("history"), |input: &[u8]| check::history(input));
