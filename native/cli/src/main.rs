//! `stream-s3`: looks into a bucket and verifies what is there. Reads only; never writes or deletes.
//!
//! Exit status: 0 when all is well, 1 when something in the bucket is wrong, 2 when the command could not do its work
//! (unknown stream, unusable option, store that does not answer).

mod adopt;
mod check;
mod finding;
mod inspect;
mod progress;
mod reader;
mod report;
mod store_args;
mod tree;
mod verify;
mod walk;

use std::io::Write;
use std::process::ExitCode;
use std::str::FromStr;

use clap::{Args, Parser, Subcommand};
use stream_s3_core::key::{self, Prefix, StreamId};
use stream_s3_core::units::{Epoch, Uid};

use crate::progress::Progress;
use crate::reader::{Failed, Reader};
use crate::store_args::StoreArgs;

/// Look into a bucket of tiered streams, and verify what is there. Reads only.
#[derive(Parser)]
#[command(name = "stream-s3", version, after_help = EXIT_STATUS)]
struct Cli {
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    output: OutputArgs,
    #[command(subcommand)]
    command: Command,
}

const EXIT_STATUS: &str = "Exit status: 0 all is well, 1 something in the bucket is wrong, 2 the command could not do its work.";

#[derive(Args)]
struct OutputArgs {
    /// Report as JSON on stdout instead of text, one document a line
    #[arg(long, global = true)]
    json: bool,
    /// No progress bar (there is none anyway when stderr is no terminal)
    #[arg(long, short, global = true)]
    quiet: bool,
}

#[derive(Subcommand)]
enum Command {
    /// List the streams under the prefix
    ///
    /// Lists every key under the prefix: one request for each 1000 objects.
    Streams,
    /// Print the manifest tree of a stream: root, groups, fragments
    ///
    /// The bucket does not know which root the metadata store points at. The newest root that can be decoded is taken: highest
    /// epoch, then furthest next offset, then latest first offset, then stored last; the report lists all roots found. After a
    /// reset (a tier that was discarded) an older root may reach further than the one in use: name the right one by --root then.
    Inspect {
        /// Stream id
        stream: String,
        #[command(flatten)]
        root: RootArg,
        /// Read the index of each fragment, and show its chunks: one more request for each fragment
        #[arg(long)]
        fragments: bool,
    },
    /// Find the root that a stream's lost entry in the metadata store can be rebuilt from
    ///
    /// Takes the newest root whose groups can be read and whose fragments are all there, and prints the Erlang call that adopts it.
    /// Changes nothing. Fragments are not read: `verify` does that.
    Adopt {
        /// Stream id
        stream: String,
        #[command(flatten)]
        root: RootArg,
    },
    /// Read all that a stream's root names, and check it byte by byte
    ///
    /// Checks that the fragments cover the root's range without gap or overlap, that each object is as long as its entry and its
    /// chunks say, each chunk's place, id, epoch and CRC, each index record, and what roots and groups say of all these. The root is
    /// found as by `inspect`. Objects that the root does not name are counted as orphans, which is no fault.
    Verify {
        /// Stream id
        stream: Option<String>,
        /// Verify every stream under the prefix
        #[arg(long, conflicts_with_all = ["stream", "root"])]
        all: bool,
        #[command(flatten)]
        root: RootArg,
        /// Fragments to read at the same time; each takes up to 5 MiB of memory
        #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=64))]
        concurrency: u8,
    },
}

#[derive(Args)]
struct RootArg {
    /// Start from this root instead of the newest one, as in its key: epoch, dot, eight hex digits
    #[arg(long, value_name = "EPOCH.UID")]
    root: Option<RootName>,
}

/// Epoch and uid of a root, as they stand in its key.
#[derive(Clone, Copy)]
struct RootName(Epoch, Uid);

impl FromStr for RootName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = text.split_once('.').and_then(|(epoch, uid)| {
            let is_uid = uid.len() == 8 && uid.bytes().all(|byte| byte.is_ascii_hexdigit());
            let uid = is_uid
                .then(|| u32::from_str_radix(uid, 16).ok())
                .flatten()?;
            Some(Self(Epoch(epoch.parse().ok()?), Uid(uid)))
        });
        parsed.ok_or_else(|| {
            "write it as in the root's key, such as 3.0a1b2c3d for root.3.0a1b2c3d.manifest"
                .to_owned()
        })
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&format!("cannot start threads: {error}")),
    };
    match runtime.block_on(run(cli)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(failed) => fail(&failed.to_string()),
    }
}

fn fail(message: &str) -> ExitCode {
    eprintln!("stream-s3: {message}");
    ExitCode::from(2)
}

/// Runs a command; whether all is well.
async fn run(cli: Cli) -> Result<bool, Failed> {
    let (store, prefix) = cli.store.open()?;
    let reader = Reader::new(store);
    let json = cli.output.json;
    match cli.command {
        Command::Streams => {
            let streams = tree::find_streams(&reader, &prefix).await?;
            print(&report::streams(&streams, json))?;
            Ok(true)
        }
        Command::Inspect {
            stream,
            root,
            fragments,
        } => {
            let stream = stream_id(&stream)?;
            let inspected =
                inspect::inspect(&reader, &prefix, &stream, root.pair(), fragments).await?;
            print(&if json {
                report::inspect_json(&stream, &inspected)
            } else {
                report::inspect_text(&stream, &inspected)
            })?;
            Ok(inspected.is_whole())
        }
        Command::Adopt { stream, root } => {
            let stream = stream_id(&stream)?;
            let found = adopt::search(&reader, &prefix, &stream, root.pair()).await?;
            print(&if json {
                adopt::json(&prefix, &stream, &found)
            } else {
                adopt::text(&prefix, &stream, &found)
            })?;
            Ok(found.is_ok())
        }
        Command::Verify {
            stream,
            all,
            root,
            concurrency,
        } => {
            let options = verify::Options {
                concurrency: usize::from(concurrency),
                root: root.pair(),
                progress: Progress::new(cli.output.quiet),
            };
            let streams = match stream {
                Some(stream) => vec![stream_id(&stream)?],
                None if all => all_streams(&reader, &prefix).await?,
                None => {
                    return Err(Failed::Usage(
                        "name the stream to verify, or verify them all with --all".to_owned(),
                    ));
                }
            };
            verify_each(&reader, &prefix, &streams, &options, json).await
        }
    }
}

async fn all_streams(reader: &Reader, prefix: &Prefix) -> Result<Vec<StreamId>, Failed> {
    let streams = tree::find_streams(reader, prefix).await?;
    if streams.is_empty() {
        let place = key::streams_prefix(prefix);
        return Err(Failed::Usage(format!(
            "there is no stream under {place}; check --prefix, and that the store is the right one"
        )));
    }
    Ok(streams)
}

async fn verify_each(
    reader: &Reader,
    prefix: &Prefix,
    streams: &[StreamId],
    options: &verify::Options,
    json: bool,
) -> Result<bool, Failed> {
    let mut all_well = true;
    for stream in streams {
        let verified = verify::verify(reader, prefix, stream, options).await?;
        all_well &= verified.findings.is_empty();
        print(&if json {
            report::verify_json(stream, &verified)
        } else {
            report::verify_text(stream, &verified)
        })?;
    }
    Ok(all_well)
}

impl RootArg {
    fn pair(&self) -> Option<(Epoch, Uid)> {
        self.root.map(|RootName(epoch, uid)| (epoch, uid))
    }
}

fn stream_id(text: &str) -> Result<StreamId, Failed> {
    StreamId::parse(text)
        .map_err(|error| Failed::Usage(format!("{text:?} is no stream id: {error}")))
}

/// Writes to stdout. A reader that has gone away, such as `head`, is no failure.
fn print(text: &str) -> Result<(), Failed> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(Failed::Output(error)),
        Ok(()) | Err(_) => Ok(()),
    }
}
