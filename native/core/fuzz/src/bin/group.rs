//! See `check::group`.

#![no_main]

use stream_s3_core_fuzz::{check, seeds};

libfuzzer_sys::fuzz_target!(init: seeds::write("group"), |input: &[u8]| check::group(input));
