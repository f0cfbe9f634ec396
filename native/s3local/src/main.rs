//! `s3local`: an S3 server for one machine.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use stream_s3_s3local::{Options, S3Local, Tls};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

/// An S3 server for one machine, for demo and tests. Objects are plain files: DIR/bucket/key.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Where buckets and objects lie; made where it is missing.
    #[arg(long)]
    dir: PathBuf,
    /// Port to listen on; 0 takes a free one.
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// Address to listen on.
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    address: IpAddr,
    /// Bucket to make where it is missing; may be given more than once.
    #[arg(long)]
    bucket: Vec<String>,
    /// The one access key.
    #[arg(long, env = "S3LOCAL_ACCESS_KEY", default_value = "s3local")]
    access_key: String,
    /// Its secret.
    #[arg(
        long,
        env = "S3LOCAL_SECRET_KEY",
        default_value = "s3local-secret",
        hide_env_values = true
    )]
    secret_key: String,
    /// PEM file with a certificate: speak TLS.
    #[arg(long, requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// PEM file with the certificate's private key.
    #[arg(long, requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// File to write the endpoint to when the server is ready.
    #[arg(long)]
    ready_file: Option<PathBuf>,
    /// End when standard input ends, so that the server goes when the program that started it goes.
    #[arg(long)]
    exit_on_stdin_eof: bool,
    /// Seed of the chance in faults with a probability.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn,s3s=off"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
    match run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("s3local: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Arguments) -> Result<(), Box<dyn std::error::Error>> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let done = runtime.block_on(serve(arguments));
    // Uploads that were cut off may still be writing; nobody needs them.
    runtime.shutdown_background();
    done
}

async fn serve(arguments: Arguments) -> Result<(), Box<dyn std::error::Error>> {
    // Before anybody is told that the server is there.
    let mut terminated = signal(SignalKind::terminate())?;
    let mut interrupted = signal(SignalKind::interrupt())?;
    let tls = arguments
        .tls_cert
        .zip(arguments.tls_key)
        .map(|(certificate, key)| Tls { certificate, key });
    let server = S3Local::start(Options {
        dir: arguments.dir,
        address: SocketAddr::new(arguments.address, arguments.port),
        buckets: arguments.bucket,
        access_key: arguments.access_key,
        secret_key: arguments.secret_key,
        tls,
        seed: arguments.seed,
    })
    .await?;
    if let Some(file) = &arguments.ready_file {
        write_ready_file(file, server.endpoint())?;
    }
    let mut stdout = std::io::stdout();
    writeln!(stdout, "s3local: listening on {}", server.endpoint())?;
    stdout.flush()?;
    let (eof, at_eof) = oneshot::channel();
    // Held for as long as nobody watches the standard input: a dropped sender would look like its end.
    let _unwatched = if arguments.exit_on_stdin_eof {
        std::thread::spawn(move || {
            wait_for_eof();
            eof.send(())
        });
        None
    } else {
        Some(eof)
    };
    tokio::select! {
        _ = terminated.recv() => {}
        _ = interrupted.recv() => {}
        _ = at_eof => {}
    }
    server.stop().await;
    Ok(())
}

fn wait_for_eof() {
    let mut buffer = [0; 1024];
    let mut stdin = std::io::stdin().lock();
    loop {
        match stdin.read(&mut buffer) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// Whole or not at all: whoever waits for the file reads it as soon as it is there.
fn write_ready_file(file: &Path, endpoint: &str) -> std::io::Result<()> {
    let unfinished = file.with_extension("part");
    std::fs::write(&unfinished, format!("{endpoint}\n"))?;
    std::fs::rename(&unfinished, file)
}
