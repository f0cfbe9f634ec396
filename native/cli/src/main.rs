//! stream-s3: look into a bucket and verify what is there.
fn main() {}
