//! A local S3 server for demo and tests, with fault controls.
fn main() {}
