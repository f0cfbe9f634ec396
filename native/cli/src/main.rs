//! `stream-s3`: looks into a bucket, verifies what is there, and brings its records back. Never writes or deletes an object.
//!
//! Exit status: 0 when all is well, 1 when something in the bucket is wrong, 2 when the command could not do its work
//! (unknown stream, unusable option, store that does not answer).

mod adopt;
mod check;
mod export;
mod finding;
mod inspect;
mod progress;
mod reader;
mod report;
mod restore;
mod store_args;
mod tree;
mod verify;
mod walk;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

use clap::{Args, Parser, Subcommand};
use stream_s3_core::key::{self, Prefix, StreamId};
use stream_s3_core::units::{Epoch, Uid};

use crate::export::range::RangeArgs;
use crate::export::source::Source;
use crate::export::{Exported, Format, Target};
use crate::progress::Progress;
use crate::reader::{Failed, Reader};
use crate::store_args::StoreArgs;

/// Look into a bucket of tiered streams, verify what is there, and bring records back. Never changes an object.
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
    /// Report as JSON on stdout instead of text, one document a line; of export, the records
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
    /// Write the records of a stream to a file or to stdout
    ///
    /// For each record its length (u32, big-endian) and its bytes, or with --json a document a line: offset, timestamp, and the
    /// message decoded from AMQP 1.0, with what AMQP 0.9.1 calls its properties where it came through an exchange. Every chunk is
    /// checked against its CRC before a record of it is written; damage ends the command with status 1 and says where to go on.
    Export {
        /// Stream id
        stream: String,
        #[command(flatten)]
        range: RangeArgs,
        /// File to write to, which must not be there; stdout where not given
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
        /// Write behind what the file holds
        #[arg(long, requires = "output")]
        append: bool,
        #[command(flatten)]
        root: RootArg,
    },
    /// Publish the records of a stream to another stream of a broker, which must be there
    ///
    /// Uses the stream protocol, with confirms; what is stored there is byte for byte what was stored here. Publishing ids follow from
    /// offsets (from a file: from the places in it), so that repeating the command with the same publisher goes on where it ended and
    /// publishes nothing twice.
    Restore(Box<RestoreArgs>),
}

#[derive(Args)]
struct RestoreArgs {
    /// Stream id in the bucket
    #[arg(required_unless_present = "input")]
    stream: Option<String>,
    /// File that export has written without --json, instead of a bucket
    #[arg(long, value_name = "FILE", conflicts_with_all = ["stream", "from", "to", "since", "until", "root"])]
    input: Option<PathBuf>,
    #[command(flatten)]
    range: RangeArgs,
    #[command(flatten)]
    root: RootArg,
    /// Name of the stream to publish to
    #[arg(long, value_name = "NAME")]
    into: String,
    /// Node of the cluster, with its port for the stream protocol
    #[arg(long, value_name = "HOST:PORT", default_value = "localhost:5552")]
    broker: String,
    /// Connect by TLS; the port is another one then, 5551 by default
    #[arg(long)]
    broker_tls: bool,
    /// The authorities to trust for the broker's certificate, as PEM, instead of the system's; implies --broker-tls
    #[arg(long, value_name = "FILE")]
    broker_ca_file: Option<PathBuf>,
    /// Virtual host of that stream
    #[arg(long, default_value = "/")]
    vhost: String,
    /// User to publish as
    #[arg(long, default_value = "guest")]
    user: String,
    /// Its password; better set in the environment, where other users do not see it
    #[arg(
        long,
        env = "RABBITMQ_PASSWORD",
        default_value = "guest",
        hide_env_values = true
    )]
    password: String,
    /// What the broker remembers by what has been published already; where not given, the stream id or the file's name
    #[arg(long, value_name = "NAME")]
    publisher: Option<String>,
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
        Err(failed @ Failed::Damaged { .. }) => {
            complain(&failed.to_string());
            ExitCode::from(1)
        }
        Err(failed) => fail(&failed.to_string()),
    }
}

fn fail(message: &str) -> ExitCode {
    complain(message);
    ExitCode::from(2)
}

fn complain(message: &str) {
    eprintln!("stream-s3: {message}");
}

/// Runs a command; whether all is well.
async fn run(cli: Cli) -> Result<bool, Failed> {
    let Cli {
        store,
        output,
        command,
    } = cli;
    match command {
        Command::Streams => {
            let (reader, prefix) = open(store)?;
            let streams = tree::find_streams(&reader, &prefix).await?;
            print(&report::streams(&streams, output.json))?;
            Ok(true)
        }
        Command::Inspect {
            stream,
            root,
            fragments,
        } => {
            let (reader, prefix) = open(store)?;
            let stream = stream_id(&stream)?;
            let inspected =
                inspect::inspect(&reader, &prefix, &stream, root.pair(), fragments).await?;
            print(&if output.json {
                report::inspect_json(&stream, &inspected)
            } else {
                report::inspect_text(&stream, &inspected)
            })?;
            Ok(inspected.is_whole())
        }
        Command::Adopt { stream, root } => {
            let (reader, prefix) = open(store)?;
            let stream = stream_id(&stream)?;
            let found = adopt::search(&reader, &prefix, &stream, root.pair()).await?;
            print(&if output.json {
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
                progress: Progress::new(output.quiet),
            };
            verify(store, stream, all, &options, output.json).await
        }
        Command::Export {
            stream,
            range,
            output: file,
            append,
            root,
        } => {
            let source = source(store, &stream, &root, &range).await?;
            let target = match file {
                None => Target::Stdout,
                Some(path) => Target::File { path, append },
            };
            export(source, &target, &output).await
        }
        Command::Restore(args) => restore(store, *args, &output).await,
    }
}

async fn verify(
    store: StoreArgs,
    stream: Option<String>,
    all: bool,
    options: &verify::Options,
    json: bool,
) -> Result<bool, Failed> {
    let (reader, prefix) = open(store)?;
    let streams = match stream {
        Some(stream) => vec![stream_id(&stream)?],
        None if all => all_streams(&reader, &prefix).await?,
        None => {
            return Err(Failed::Usage(
                "name the stream to verify, or verify them all with --all".to_owned(),
            ));
        }
    };
    verify_each(&reader, &prefix, &streams, options, json).await
}

fn open(store: StoreArgs) -> Result<(Reader, Prefix), Failed> {
    let (store, prefix) = store.open()?;
    Ok((Reader::new(store), prefix))
}

async fn source(
    store: StoreArgs,
    stream: &str,
    root: &RootArg,
    range: &RangeArgs,
) -> Result<Source, Failed> {
    let (reader, prefix) = open(store)?;
    let stream = stream_id(stream)?;
    Source::open(&reader, &prefix, &stream, root.pair(), range.wanted()).await
}

async fn export(source: Source, target: &Target, output: &OutputArgs) -> Result<bool, Failed> {
    let format = if output.json {
        Format::JsonLines
    } else {
        Format::LengthPrefixed
    };
    let (first, next) = source.tier();
    let progress = Progress::new(output.quiet);
    let exported = export::export(source, format, target, &progress).await?;
    let Exported {
        records,
        bytes,
        next: reached,
        cut_short,
    } = exported;
    if !output.quiet && !cut_short {
        // Stdout may be the records'.
        eprintln!(
            "export: {records} records, {bytes} bytes; the tier has offsets {first} to before {next}, go on with --from {reached}"
        );
    }
    Ok(true)
}

async fn restore(store: StoreArgs, args: RestoreArgs, output: &OutputArgs) -> Result<bool, Failed> {
    let name = match (&args.stream, &args.input) {
        (Some(stream), _) => stream.clone(),
        (None, Some(path)) => path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned(),
        (None, None) => String::new(),
    };
    let address = restore::Address {
        publisher: args
            .publisher
            .unwrap_or_else(|| format!("stream-s3 {name}")),
        broker: args.broker,
        tls: match (args.broker_ca_file, args.broker_tls) {
            (Some(file), _) => Some(restore::Trust::File(file)),
            (None, true) => Some(restore::Trust::System),
            (None, false) => None,
        },
        vhost: args.vhost,
        user: args.user,
        password: args.password,
        stream: args.into,
    };
    let progress = Progress::new(output.quiet);
    let restored = match args.input {
        Some(path) => restore::from_file(&path, &address, &progress).await?,
        None => {
            let source = source(store, &name, &args.root, &args.range).await?;
            restore::from_bucket(source, &address, &progress).await?
        }
    };
    print(&report::restored(&address.stream, &restored, output.json))?;
    Ok(true)
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
