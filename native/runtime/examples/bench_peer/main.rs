//! What `make bench-upload` measures against, in processes of their own:
//!
//! `bench_peer sink CERTIFICATE KEY` serves plain HTTP and TLS, prints both ports, and ends with its standard input.
//! `bench_peer limit URL CA CONCURRENCY FILE...` puts each file once, by `pread` straight into hyper, with no checksum and no
//! signature, and prints what that took as a line of JSON: nothing that reads its files with system calls uploads them for less.

mod limit;
mod sink;

use std::error::Error;

type Outcome = Result<(), Box<dyn Error + Send + Sync>>;

fn main() -> Outcome {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    // As many threads as the library gives to requests.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    match words.as_slice() {
        ["sink", certificate, key] => runtime.block_on(sink::serve(certificate, key)),
        ["limit", url, ca, concurrency, files @ ..] => {
            let files = files.iter().map(|file| (*file).to_owned()).collect();
            runtime.block_on(limit::run(url, ca, concurrency.parse()?, files))
        }
        _ => {
            Err("usage: bench_peer sink CERTIFICATE KEY | limit URL CA CONCURRENCY FILE...".into())
        }
    }
}
