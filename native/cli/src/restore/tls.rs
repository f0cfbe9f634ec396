//! TLS towards a broker: whose certificates are trusted, and the handshake.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore, crypto};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::reader::Failed;

/// Whom to trust when a broker shows its certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Trust {
    /// The authorities that this machine trusts.
    System,
    /// The authorities of a PEM file, and no others.
    File(PathBuf),
}

/// Shakes hands on a connection to `broker`, `HOST:PORT`. The certificate has to be for that host.
pub(crate) async fn handshake(
    trust: &Trust,
    broker: &str,
    stream: TcpStream,
) -> Result<TlsStream<TcpStream>, Failed> {
    let config = config(roots(trust)?)?;
    let host = broker.rsplit_once(':').map_or(broker, |(host, _port)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let name = ServerName::try_from(host.to_owned()).map_err(|_| {
        Failed::Usage(format!(
            "--broker {broker}: with TLS the host must be a name or an address, which its certificate has"
        ))
    })?;
    TlsConnector::from(Arc::new(config))
        .connect(name, stream)
        .await
        .map_err(|error| {
            Failed::Broker(format!(
                "no TLS connection to {broker}: {error}; check that this is its port for TLS (5551 by default), and --broker-ca-file"
            ))
        })
}

fn config(roots: RootCertStore) -> Result<ClientConfig, Failed> {
    let config = ClientConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| Failed::Broker(format!("TLS cannot be used here: {error}")))?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}

fn roots(trust: &Trust) -> Result<RootCertStore, Failed> {
    match trust {
        Trust::System => Ok(system_roots()),
        Trust::File(path) => roots_of_file(path),
    }
}

/// Some certificates of a machine may be too odd to be used; that a broker's own is not among the rest is found in the handshake.
fn system_roots() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    roots
}

fn roots_of_file(path: &Path) -> Result<RootCertStore, Failed> {
    let refuse = |why: String| Failed::Usage(format!("--broker-ca-file {}: {why}", path.display()));
    let pem = std::fs::read(path).map_err(|error| refuse(error.to_string()))?;
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        let certificate = certificate.map_err(|error| refuse(error.to_string()))?;
        roots
            .add(certificate)
            .map_err(|error| refuse(error.to_string()))?;
    }
    if roots.is_empty() {
        return Err(refuse("holds no PEM certificate".to_owned()));
    }
    Ok(roots)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_certificates_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let empty = dir.path().join("empty.pem");
        std::fs::write(&empty, "nothing").unwrap();
        for path in [empty, dir.path().join("missing.pem")] {
            let refused = roots(&Trust::File(path.clone())).unwrap_err().to_string();
            assert!(refused.contains("--broker-ca-file"), "{refused}");
            assert!(refused.contains(&path.display().to_string()), "{refused}");
        }
    }
}
