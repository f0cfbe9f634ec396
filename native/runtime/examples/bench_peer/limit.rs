//! The least that an upload of files can cost: `pread`, hyper, a socket.

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{Request, Uri, header};
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, ServerName};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::Outcome;

/// Small enough to stay in a core's cache between the read and the send.
const BUFFER: usize = 256 << 10;

/// A file that is read when the connection takes more.
struct FileBody {
    file: File,
    at: u64,
    len: u64,
    spare: Arc<Mutex<Vec<Box<[u8]>>>>,
}

/// Goes back to its file's spare buffers.
struct Piece {
    data: Box<[u8]>,
    len: usize,
    spare: Arc<Mutex<Vec<Box<[u8]>>>>,
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.data[..self.len]
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        if let Ok(mut spare) = self.spare.lock() {
            spare.push(std::mem::take(&mut self.data));
        }
    }
}

impl Body for FileBody {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
    ) -> Poll<Option<std::io::Result<Frame<Bytes>>>> {
        let left = self.len - self.at;
        if left == 0 {
            return Poll::Ready(None);
        }
        let kept = self.spare.lock().ok().and_then(|mut spare| spare.pop());
        let mut data = kept.unwrap_or_else(|| vec![0; BUFFER].into_boxed_slice());
        let len = usize::try_from(left).map_or(BUFFER, |left| left.min(BUFFER));
        if let Err(error) = self.file.read_exact_at(&mut data[..len], self.at) {
            return Poll::Ready(Some(Err(error)));
        }
        self.at += len as u64;
        let spare = Arc::clone(&self.spare);
        let piece = Bytes::from_owner(Piece { data, len, spare });
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.at == self.len
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.len - self.at)
    }
}

pub(crate) async fn run(
    url: &str,
    ca: &str,
    concurrency: usize,
    files: VecDeque<String>,
) -> Outcome {
    let uri: Uri = url.parse()?;
    let authority = uri.authority().ok_or("the URL names no host")?.clone();
    let tls = match uri.scheme_str() {
        Some("https") => Some(connector(ca)?),
        _ => None,
    };
    let files = Arc::new(Mutex::new(files));
    let (cpu, start) = (cpu_seconds()?, Instant::now());
    let mut workers = tokio::task::JoinSet::new();
    for _ in 0..concurrency {
        let (files, authority, tls) = (Arc::clone(&files), authority.clone(), tls.clone());
        workers.spawn(async move {
            let mut sender = connect(authority.as_str(), tls.as_ref()).await?;
            let next = || files.lock().ok().and_then(|mut files| files.pop_front());
            let mut bytes = 0;
            while let Some(path) = next() {
                bytes += put(&mut sender, authority.as_str(), &path).await?;
            }
            Ok::<u64, Box<dyn std::error::Error + Send + Sync>>(bytes)
        });
    }
    let mut bytes = 0;
    while let Some(done) = workers.join_next().await {
        bytes += done??;
    }
    let (wall, cpu) = (start.elapsed().as_secs_f64(), cpu_seconds()? - cpu);
    println!(r#"{{"bytes": {bytes}, "wall": {wall:.4}, "cpu": {cpu:.4}}}"#);
    Ok(())
}

async fn put(
    sender: &mut SendRequest<FileBody>,
    host: &str,
    path: &str,
) -> Result<u64, Box<dyn std::error::Error + Send + Sync>> {
    let file = File::open(path)?;
    let len = file.metadata()?.len();
    let name = path.rsplit('/').next().unwrap_or(path);
    let body = FileBody {
        file,
        at: 0,
        len,
        spare: Arc::default(),
    };
    let request = Request::put(format!("/bucket/limit/{name}"))
        .header(header::HOST, host)
        .header(header::CONTENT_LENGTH, len)
        .body(body)?;
    sender.ready().await?;
    let response = sender.send_request(request).await?;
    if !response.status().is_success() {
        return Err(format!("the sink answered {}", response.status()).into());
    }
    response.into_body().collect().await?;
    Ok(len)
}

async fn connect(
    authority: &str,
    tls: Option<&TlsConnector>,
) -> Result<SendRequest<FileBody>, Box<dyn std::error::Error + Send + Sync>> {
    let stream = TcpStream::connect(authority).await?;
    stream.set_nodelay(true)?;
    let Some(tls) = tls else {
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        return Ok(sender);
    };
    let stream = tls
        .connect(ServerName::try_from("localhost")?, stream)
        .await?;
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    Ok(sender)
}

fn connector(ca: &str) -> Result<TlsConnector, Box<dyn std::error::Error + Send + Sync>> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(ca)? {
        roots.add(certificate?)?;
    }
    let config = ClientConfig::builder()
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

/// What this process has used of all cores, ended threads included.
fn cpu_seconds() -> Result<f64, Box<dyn std::error::Error + Send + Sync>> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let fields: Vec<&str> = stat
        .rsplit(')')
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .collect();
    // utime and stime, in hundredths of a second: the 14th and 15th field, the third being the first after the name.
    let ticks: f64 = fields[11].parse::<f64>()? + fields[12].parse::<f64>()?;
    Ok(ticks / 100.0)
}
