//! An S3 server that throws large bodies away, and knows just enough of small ones to pass a probe.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io::Read as _;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use rustls::ServerConfig;
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::Outcome;

/// Bodies up to this length are kept and compared with their checksum.
const SMALL: u64 = 4096;
const CHECKSUM: &str = "x-amz-checksum-crc32";

type Objects = Arc<Mutex<HashMap<String, Bytes>>>;
type Answer = Response<Full<Bytes>>;

pub(crate) async fn serve(certificate: &str, key: &str) -> Outcome {
    let certificates = CertificateDer::pem_file_iter(certificate)?.collect::<Result<_, _>>()?;
    let config = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(certificates, PrivateKeyDer::from_pem_file(key)?)?;
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let (plain, secure) = (
        TcpListener::bind("127.0.0.1:0").await?,
        TcpListener::bind("127.0.0.1:0").await?,
    );
    println!(
        "{} {}",
        plain.local_addr()?.port(),
        secure.local_addr()?.port()
    );
    let objects = Objects::default();
    let over_tls = Arc::clone(&objects);
    tokio::spawn(async move {
        while let Ok((stream, _)) = plain.accept().await {
            drop(stream.set_nodelay(true));
            tokio::spawn(connection(stream, Arc::clone(&objects)));
        }
    });
    tokio::spawn(async move {
        while let Ok((stream, _)) = secure.accept().await {
            let (acceptor, objects) = (acceptor.clone(), Arc::clone(&over_tls));
            tokio::spawn(async move {
                drop(stream.set_nodelay(true));
                if let Ok(stream) = acceptor.accept(stream).await {
                    connection(stream, objects).await;
                }
            });
        }
    });
    // Nothing is written there: its end is the end of whoever started this.
    tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new())).await??;
    Ok(())
}

async fn connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    objects: Objects,
) {
    let service = service_fn(move |request| {
        let objects = Arc::clone(&objects);
        async move { Ok::<_, Infallible>(answer(request, &objects).await) }
    });
    // A client that goes away is none of the sink's business.
    drop(
        http1::Builder::new()
            .serve_connection(TokioIo::new(stream), service)
            .await,
    );
}

async fn answer(request: Request<Incoming>, objects: &Objects) -> Answer {
    let key = request.uri().path().to_owned();
    let header = |name: &str| {
        request
            .headers()
            .get(name)
            .and_then(|value| value.to_str().ok())
            .map(str::to_owned)
    };
    if request.method() == Method::PUT {
        let there = objects.lock().is_ok_and(|known| known.contains_key(&key));
        if (header("if-none-match").is_some() && there) || header("if-match").is_some() {
            return error(StatusCode::PRECONDITION_FAILED, "PreconditionFailed");
        }
        let (checksum, length) = (header(CHECKSUM), header("content-length"));
        return put(key, checksum, length, request.into_body(), objects).await;
    }
    if request.method() == Method::POST {
        return xml("<DeleteResult></DeleteResult>");
    }
    if request.method() == Method::DELETE {
        return status(StatusCode::NO_CONTENT, Bytes::new());
    }
    if request
        .uri()
        .query()
        .is_some_and(|query| query.contains("list-type"))
    {
        return xml("<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>");
    }
    match objects
        .lock()
        .ok()
        .and_then(|known| known.get(&key).cloned())
    {
        Some(bytes) => status(StatusCode::OK, bytes),
        None => error(StatusCode::NOT_FOUND, "NoSuchKey"),
    }
}

async fn put(
    key: String,
    checksum: Option<String>,
    length: Option<String>,
    mut body: Incoming,
    objects: &Objects,
) -> Answer {
    let length = length.and_then(|length| length.parse::<u64>().ok());
    if length.is_some_and(|length| length <= SMALL) {
        let Ok(bytes) = body.collect().await else {
            return error(StatusCode::BAD_REQUEST, "IncompleteBody");
        };
        let bytes = bytes.to_bytes();
        if checksum
            .as_ref()
            .is_some_and(|sent| *sent != crc_of(&bytes))
        {
            return error(StatusCode::BAD_REQUEST, "BadDigest");
        }
        if let Ok(mut known) = objects.lock() {
            known.insert(key, bytes);
        }
    } else {
        while let Some(frame) = body.frame().await {
            if frame.is_err() {
                return error(StatusCode::BAD_REQUEST, "IncompleteBody");
            }
        }
    }
    let mut answer = status(StatusCode::OK, Bytes::new());
    if let Some(value) = checksum.and_then(|sent| sent.parse().ok()) {
        answer.headers_mut().insert(CHECKSUM, value);
    }
    answer
}

fn crc_of(bytes: &[u8]) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(crc32fast::hash(bytes).to_be_bytes())
}

fn xml(text: &'static str) -> Answer {
    status(StatusCode::OK, Bytes::from_static(text.as_bytes()))
}

fn error(code: StatusCode, name: &str) -> Answer {
    let text = format!("<Error><Code>{name}</Code></Error>");
    status(code, Bytes::from(text))
}

fn status(code: StatusCode, body: Bytes) -> Answer {
    let mut answer = Response::new(Full::new(body));
    *answer.status_mut() = code;
    let etag = hyper::header::HeaderValue::from_static("\"00000000000000000000000000000001\"");
    answer.headers_mut().insert(hyper::header::ETAG, etag);
    answer
}
