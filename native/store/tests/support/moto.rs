//! An S3 server that was written by others, in Python. One serves all tests of a program; each gets a bucket of its own.

use std::any::Any;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};

use stream_s3_store::{ObjectStore, S3Settings, S3Store};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// The server, which ends when the other end of its standard input does: with this program, whatever becomes of it.
struct Moto {
    address: String,
    _child: Child,
}

/// An empty bucket. `None` where there is no Python that could run moto; the reason is printed. A build machine has to have one.
pub(crate) async fn bucket() -> Option<(Arc<dyn ObjectStore>, Box<dyn Any + Send>)> {
    static MOTO: LazyLock<Result<Moto, String>> = LazyLock::new(start);
    static BUCKETS: AtomicU32 = AtomicU32::new(0);
    let moto = match &*MOTO {
        Ok(moto) => moto,
        Err(why) if std::env::var("CI").is_ok_and(|ci| ci == "true") => panic!("{why}"),
        Err(why) => {
            println!("skipped: {why}");
            return None;
        }
    };
    let bucket = format!("bucket-{}", BUCKETS.fetch_add(1, Ordering::Relaxed));
    create(&moto.address, &bucket).await;
    let settings = S3Settings {
        bucket,
        ..super::settings(&format!("http://{}", moto.address))
    };
    Some((
        Arc::new(S3Store::open(settings).expect("a store")),
        Box::new(()),
    ))
}

fn start() -> Result<Moto, String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../test/store/moto_server.py");
    let mut child = Command::new("python3")
        .arg(script)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("python3 does not start: {error}"))?;
    let mut line = String::new();
    let mut output = BufReader::new(child.stdout.take().expect("piped"));
    output.read_line(&mut line).expect("text");
    match line.trim().strip_prefix("moto: listening on http://") {
        Some(address) => {
            // Whatever it says later is nobody's business, but must not fill the pipe.
            let mut errors = child.stderr.take().expect("piped");
            std::thread::spawn(move || std::io::copy(&mut errors, &mut std::io::sink()));
            Ok(Moto {
                address: address.to_owned(),
                _child: child,
            })
        }
        None => {
            let mut why = String::new();
            let mut errors = child.stderr.take().expect("piped");
            errors.read_to_string(&mut why).expect("text");
            let _status = child.wait().expect("it ended");
            Err(why.trim().to_owned())
        }
    }
}

/// Buckets are made by whoever owns them, so the store has no call for it.
async fn create(address: &str, bucket: &str) {
    let mut stream = TcpStream::connect(address).await.expect("moto listens");
    let request = format!(
        "PUT /{bucket} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("answered");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}
