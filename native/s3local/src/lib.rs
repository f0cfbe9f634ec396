//! An S3 server for one machine: for the demo and for tests, with controls that make things go wrong.
//!
//! It checks signatures, verifies checksums before an object appears, honours `If-None-Match: *` and `If-Match`, lists in byte order and
//! streams bodies of any size. Objects are plain files, `DIR/bucket/key`. What it leaves out: multipart uploads, versions,
//! metadata, permissions, and durability beyond that of the operating system's cache.

mod admin;
mod backend;
pub mod counters;
pub mod fault;
mod listing;
mod socket;
mod wire;

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use s3s::auth::{S3Auth, SecretKey};
use s3s::service::S3ServiceBuilder;
use s3s::{S3Result, s3_error};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio_rustls::TlsAcceptor;

use crate::backend::Backend;
pub use crate::counters::{Counters, Counts};
pub use crate::fault::{Action, Fault, Faults, Operation};
use crate::socket::{Ending, Socket};
use crate::wire::Shared;

/// Folder below `dir` for unfinished uploads. No bucket can have this name.
const SCRATCH: &str = ".s3local";

/// Certificate and key of a server that speaks TLS.
#[derive(Debug, Clone)]
pub struct Tls {
    /// PEM file with the certificate, and those that lead to its authority.
    pub certificate: PathBuf,
    /// PEM file with the private key.
    pub key: PathBuf,
}

/// How a server is started.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where buckets and objects lie. Made where it is missing.
    pub dir: PathBuf,
    /// Where to listen; port 0 takes a free one.
    pub address: SocketAddr,
    /// Buckets to make where they are missing.
    pub buckets: Vec<String>,
    /// The one access key.
    pub access_key: String,
    /// Its secret.
    pub secret_key: String,
    /// TLS instead of plain HTTP.
    pub tls: Option<Tls>,
    /// Seed of the chance in faults with a probability.
    pub seed: u64,
}

impl Options {
    /// A server on a free port of the loopback, with one bucket, and `s3local` and `s3local-secret` as keys.
    pub fn new(dir: impl Into<PathBuf>, bucket: impl Into<String>) -> Self {
        Self {
            dir: dir.into(),
            address: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            buckets: vec![bucket.into()],
            access_key: "s3local".to_owned(),
            secret_key: "s3local-secret".to_owned(),
            tls: None,
            seed: 0,
        }
    }
}

/// Why a server does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A folder cannot be made or used.
    #[error("cannot use the folder {}: {error}", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What the operating system said.
        #[source]
        error: io::Error,
    },
    /// Not a name for a bucket.
    #[error("{0:?} is not a bucket's name: 3 to 63 lower-case letters, digits, dots and hyphens")]
    Bucket(String),
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {error}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the operating system said.
        #[source]
        error: io::Error,
    },
    /// The certificate or its key cannot be used.
    #[error("cannot use {}: {why}", path.display())]
    Tls {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
}

/// A running server. Dropped, it ends as after [`S3Local::stop`].
pub struct S3Local {
    address: SocketAddr,
    endpoint: String,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
}

impl S3Local {
    /// Starts a server on the current tokio runtime. It accepts connections when this returns.
    pub async fn start(options: Options) -> Result<Self, StartError> {
        make_folder(&options.dir)?;
        make_folder(&options.dir.join(SCRATCH))?;
        for bucket in &options.buckets {
            if !s3s::path::check_bucket_name(bucket) {
                return Err(StartError::Bucket(bucket.clone()));
            }
            make_folder(&options.dir.join(bucket))?;
        }
        let tls = options.tls.as_ref().map(acceptor).transpose()?;
        let failed = |error| StartError::Listen {
            address: options.address,
            error,
        };
        let listener = TcpListener::bind(options.address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let faults = Arc::new(Faults::new(options.seed));
        let mut builder = S3ServiceBuilder::new(Backend::new(options.dir, Arc::clone(&faults)));
        builder.set_auth(OneKey {
            access_key: options.access_key,
            secret_key: options.secret_key.into(),
        });
        let shared = Arc::new(Shared {
            service: builder.build(),
            faults,
            counters: Arc::new(Counters::default()),
            paused: watch::Sender::new(false),
        });
        let endpoint = format!(
            "{}://{address}",
            if tls.is_some() { "https" } else { "http" }
        );
        let accepting = tokio::spawn(accept(listener, tls, Arc::clone(&shared)));
        Ok(Self {
            address,
            endpoint,
            shared,
            accepting,
        })
    }

    /// URL of the server, without a slash at its end.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What shall go wrong.
    pub fn faults(&self) -> &Faults {
        &self.shared.faults
    }

    /// How often what was asked for.
    pub fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    /// From now on requests wait, before they are looked at.
    pub fn pause(&self) {
        self.shared.paused.send_replace(true);
    }

    /// Requests wait no longer.
    pub fn resume(&self) {
        self.shared.paused.send_replace(false);
    }

    /// Stops listening and ends all connections at once, as a crash would.
    pub async fn stop(mut self) {
        self.accepting.abort();
        // What it ends with is that it was cancelled.
        let _ended = (&mut self.accepting).await;
    }
}

impl Drop for S3Local {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

fn make_folder(path: &Path) -> Result<(), StartError> {
    std::fs::create_dir_all(path).map_err(|error| StartError::Folder {
        path: path.to_owned(),
        error,
    })
}

/// Accepts until it is dropped, and its connections with it.
async fn accept(listener: TcpListener, tls: Option<TlsAcceptor>, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(connection(stream, tls.clone(), Arc::clone(&shared)));
                }
                Err(error) => {
                    // Out of descriptors, most likely; they come back when connections end.
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                }
            },
            Some(ended) = connections.join_next() => {
                if let Err(error) = ended {
                    tracing::error!(%error, "a connection's task failed");
                }
            }
        }
    }
}

async fn connection(stream: TcpStream, tls: Option<TlsAcceptor>, shared: Arc<Shared>) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "cannot set TCP_NODELAY");
    }
    let ending = Ending::default();
    let socket = Socket::new(stream, ending.clone());
    match tls {
        None => serve(socket, ending, shared).await,
        Some(acceptor) => match acceptor.accept(socket).await {
            Ok(socket) => serve(socket, ending, shared).await,
            Err(error) => tracing::debug!(%error, "no TLS with a client"),
        },
    }
}

async fn serve(
    socket: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    ending: Ending,
    shared: Arc<Shared>,
) {
    let service =
        service_fn(move |request| wire::answer(Arc::clone(&shared), ending.clone(), request));
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new());
    if let Err(error) = http.serve_connection(TokioIo::new(socket), service).await {
        tracing::debug!(%error, "a connection ended");
    }
}

fn acceptor(tls: &Tls) -> Result<TlsAcceptor, StartError> {
    use rustls_pki_types::pem::PemObject;
    use rustls_pki_types::{CertificateDer, PrivateKeyDer};
    let refuse = |path: &Path, why: String| StartError::Tls {
        path: path.to_owned(),
        why,
    };
    let read = |path: &Path| std::fs::read(path).map_err(|error| refuse(path, error.to_string()));
    let certificates = CertificateDer::pem_slice_iter(&read(&tls.certificate)?)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| refuse(&tls.certificate, error.to_string()))?;
    let key = PrivateKeyDer::from_pem_slice(&read(&tls.key)?)
        .map_err(|error| refuse(&tls.key, error.to_string()))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| refuse(&tls.key, error.to_string()))?
        .with_no_client_auth()
        .with_single_cert(certificates, key)
        .map_err(|error| refuse(&tls.certificate, error.to_string()))?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// The one key there is.
struct OneKey {
    access_key: String,
    secret_key: SecretKey,
}

#[async_trait::async_trait]
impl S3Auth for OneKey {
    async fn get_secret_key(&self, access_key: &str) -> S3Result<SecretKey> {
        if access_key == self.access_key {
            return Ok(self.secret_key.clone());
        }
        Err(s3_error!(
            InvalidAccessKeyId,
            "The AWS Access Key Id you provided does not exist in our records."
        ))
    }
}
