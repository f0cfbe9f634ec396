//! What the tests of the stores share.

#![allow(dead_code, reason = "each test binary uses its part")]

pub(crate) mod moto;
pub(crate) mod raw;

use std::path::PathBuf;

use bytes::Bytes;
use futures::StreamExt;
use stream_s3_s3local::{Options, S3Local, Tls};
use stream_s3_store::{
    Body, ByteStream, Credentials, ObjectStore, Part, Precondition, PutOptions, S3Settings,
    S3Store, StoreError,
};
use tempfile::TempDir;

pub(crate) const BUCKET: &str = "bucket";

/// A server with a folder of its own.
pub(crate) struct Server {
    pub(crate) local: S3Local,
    pub(crate) dir: TempDir,
}

impl Server {
    pub(crate) async fn start() -> Self {
        let dir = TempDir::new().expect("a folder");
        let local = S3Local::start(Options::new(dir.path(), BUCKET))
            .await
            .expect("a server");
        Self { local, dir }
    }

    /// One that speaks TLS with a certificate of an authority of our own, and settings that trust it.
    pub(crate) async fn with_tls() -> (Self, S3Settings) {
        let dir = TempDir::new().expect("a folder");
        let (tls, ca_file) = certificate(&dir, "127.0.0.1");
        let options = Options {
            tls: Some(tls),
            ..Options::new(dir.path().join("data"), BUCKET)
        };
        let local = S3Local::start(options).await.expect("a server");
        let trusting = S3Settings {
            ca_file: Some(ca_file),
            ..settings(local.endpoint())
        };
        (Self { local, dir }, trusting)
    }

    pub(crate) fn settings(&self) -> S3Settings {
        settings(self.local.endpoint())
    }

    pub(crate) fn store(&self) -> S3Store {
        S3Store::open(self.settings()).expect("a store")
    }
}

pub(crate) fn settings(endpoint: &str) -> S3Settings {
    S3Settings {
        bucket: BUCKET.to_owned(),
        endpoint: Some(endpoint.to_owned()),
        credentials: Credentials::Static {
            access_key_id: "s3local".to_owned(),
            secret_key: "s3local-secret".to_owned(),
            session_token: None,
        },
        ..S3Settings::default()
    }
}

/// Bytes that repeat nowhere near.
pub(crate) fn bytes(len: usize) -> Bytes {
    let mut state: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        bytes.extend_from_slice(&state.to_be_bytes());
    }
    bytes.truncate(len);
    bytes.into()
}

pub(crate) fn with_crc(bytes: &[u8]) -> PutOptions {
    PutOptions {
        crc32: Some(crc32fast::hash(bytes)),
        precondition: Precondition::None,
    }
}

pub(crate) fn on(precondition: Precondition) -> PutOptions {
    PutOptions {
        crc32: None,
        precondition,
    }
}

/// A body in pieces.
pub(crate) fn stream(bytes: &Bytes, piece: usize) -> Body {
    let pieces: Vec<_> = (0..bytes.len())
        .step_by(piece)
        .map(|at| Ok(bytes.slice(at..bytes.len().min(at + piece))))
        .collect();
    Body::Stream {
        len: bytes.len() as u64,
        stream: Box::pin(futures::stream::iter(pieces)),
    }
}

pub(crate) async fn put(store: &dyn ObjectStore, key: &str, content: &str) {
    let content = Bytes::from(content.to_owned());
    store
        .put(key, Body::Bytes(content), PutOptions::default())
        .await
        .expect(key);
}

pub(crate) async fn collect(mut body: ByteStream) -> std::io::Result<Bytes> {
    let mut all = Vec::new();
    while let Some(bytes) = body.next().await {
        all.extend_from_slice(&bytes?);
    }
    Ok(all.into())
}

pub(crate) async fn read(
    store: &dyn ObjectStore,
    key: &str,
    part: Part,
) -> Result<Bytes, StoreError> {
    Ok(collect(store.get(key, part).await?.body)
        .await
        .expect("a whole body"))
}

pub(crate) async fn keys(store: &dyn ObjectStore, prefix: &str, page: usize) -> Vec<String> {
    let mut keys = Vec::new();
    let mut from = None;
    loop {
        let page_of = store
            .list(prefix, from.as_deref(), page)
            .await
            .expect("a page");
        assert!(page_of.objects.len() <= page);
        keys.extend(page_of.objects.into_iter().map(|row| row.key));
        match page_of.next {
            Some(next) => from = Some(next),
            None => return keys,
        }
    }
}

/// An authority of our own, and a certificate of it for `host`.
pub(crate) fn certificate(dir: &TempDir, host: &str) -> (Tls, PathBuf) {
    let authority_key = rcgen::KeyPair::generate().expect("a key");
    let mut authority = rcgen::CertificateParams::new(Vec::new()).expect("parameters");
    authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let authority_pem = authority
        .self_signed(&authority_key)
        .expect("a certificate")
        .pem();
    let issuer = rcgen::Issuer::new(authority, authority_key);
    let key = rcgen::KeyPair::generate().expect("a key");
    let params = rcgen::CertificateParams::new(vec![host.to_owned()]).expect("parameters");
    let certificate = params.signed_by(&key, &issuer).expect("a certificate");
    let write = |name: &str, text: String| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).expect("written");
        path
    };
    let tls = Tls {
        certificate: write("cert.pem", certificate.pem()),
        key: write("key.pem", key.serialize_pem()),
    };
    (tls, write("ca.pem", authority_pem))
}

/// An address on which nobody listens.
pub(crate) fn nobody() -> std::net::SocketAddr {
    std::net::TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .expect("a port")
}

/// Where connections are neither accepted nor refused.
pub(crate) struct BlackHole {
    pub(crate) address: std::net::SocketAddr,
    _listener: std::net::TcpListener,
    _queue: Vec<std::net::TcpStream>,
}

/// A listener whose queue is full: the system drops whatever else comes, as a firewall would.
pub(crate) fn black_hole() -> BlackHole {
    let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
    let any = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    socket.bind(any).expect("a port");
    let listener = socket.listen(1).and_then(tokio::net::TcpListener::into_std);
    let listener = listener.expect("a listener");
    let address = listener.local_addr().expect("an address");
    let mut queue = Vec::new();
    let patience = std::time::Duration::from_millis(200);
    while let Ok(stream) = std::net::TcpStream::connect_timeout(&address, patience) {
        queue.push(stream);
    }
    BlackHole {
        address,
        _listener: listener,
        _queue: queue,
    }
}
