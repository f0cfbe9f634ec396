//! Settings of an S3 store, and the HTTP client they make.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use aws_smithy_http_client::Connector;
use aws_smithy_http_client::proxy::ProxyConfig;
use aws_smithy_http_client::tls::rustls_provider::CryptoMode;
use aws_smithy_http_client::tls::{Provider, TlsContext, TrustStore};
use aws_smithy_runtime_api::client::http::{
    HttpConnectorSettings, SharedHttpClient, SharedHttpConnector, http_client_fn,
};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;

use crate::Result;
use crate::error::StoreError;

/// Longest wait for a connection, TLS included. Nothing else has a limit here: see [`crate::ObjectStore`].
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Idle connections are closed before servers close them (20 s is the shortest that is common), so that no request goes into a
/// connection that is being closed.
const IDLE_TIMEOUT: Duration = Duration::from_secs(15);
/// Where clouds keep credentials. A proxy cannot reach them.
const NEVER_PROXIED: &str =
    "localhost,127.0.0.1,169.254.169.254,169.254.170.2,169.254.170.23,fd00:ec2::254";
/// What stores without regions expect in a signature.
const DEFAULT_REGION: &str = "us-east-1";

/// Whose permissions a store uses.
#[derive(Clone, Default)]
pub enum Credentials {
    /// What the environment offers, looked for with the first request: environment variables, shared config files, web identity,
    /// container and instance roles. `credential_process` and single sign-on are left out: they start programs.
    #[default]
    Chain,
    /// Fixed ones.
    Static {
        /// The public half.
        access_key_id: String,
        /// The secret half.
        secret_key: String,
        /// Only for temporary credentials.
        session_token: Option<String>,
    },
}

/// Without the secrets.
impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Chain => f.write_str("Chain"),
            Self::Static {
                access_key_id,
                secret_key: _,
                session_token,
            } => f
                .debug_struct("Static")
                .field("access_key_id", access_key_id)
                .field("session_token", &session_token.as_ref().map(|_| "..."))
                .finish_non_exhaustive(),
        }
    }
}

/// Where the bucket is and how to talk to it. Names and meanings are those of the configuration.
#[derive(Clone, Default)]
pub struct S3Settings {
    /// Name of the bucket. Must exist.
    pub bucket: String,
    /// Its region. May be left out where `endpoint` is given.
    pub region: Option<String>,
    /// URL of the store, `http://` or `https://`, with port where it is not the usual one; AWS where it is left out.
    pub endpoint: Option<String>,
    /// Bucket in the path instead of the host name. Where left out: yes with an `endpoint`, no without.
    pub path_style: Option<bool>,
    /// Whose permissions to use.
    pub credentials: Credentials,
    /// PEM file with the certificate authorities to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// URL of an HTTP proxy, may hold user and password. The environment's proxy variables are not looked at.
    pub proxy: Option<String>,
    /// KMS key that new objects are encrypted with.
    pub kms_key_id: Option<String>,
    /// Storage class of new objects.
    pub storage_class: Option<String>,
    /// Account that must own the bucket.
    pub expected_bucket_owner: Option<String>,
}

/// Without the proxy, whose URL may hold a password.
impl fmt::Debug for S3Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("S3Settings")
            .field("bucket", &self.bucket)
            .field("region", &self.region)
            .field("endpoint", &self.endpoint)
            .field("path_style", &self.path_style)
            .field("credentials", &self.credentials)
            .field("ca_file", &self.ca_file)
            .field("proxy", &self.proxy.as_ref().map(|_| "..."))
            .field("kms_key_id", &self.kms_key_id)
            .field("storage_class", &self.storage_class)
            .field("expected_bucket_owner", &self.expected_bucket_owner)
            .finish()
    }
}

impl S3Settings {
    /// Checks everything that can be checked without the store. Errors name the key.
    pub(crate) fn check(&self) -> Result<()> {
        let refuse = |key, why: String| Err(StoreError::setting(key, why));
        if self.bucket.is_empty() {
            return refuse(
                "bucket",
                "a store of kind s3 needs the name of a bucket".to_owned(),
            );
        }
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        if self.bucket.len() > 63 || !self.bucket.chars().all(allowed) {
            return refuse(
                "bucket",
                format!("{:?} is not a bucket's name", self.bucket),
            );
        }
        if self.region.is_none() && self.endpoint.is_none() {
            return refuse("region", "is needed where no endpoint is set".to_owned());
        }
        if self
            .region
            .as_deref()
            .is_some_and(|region| region.is_empty() || region.contains(char::is_whitespace))
        {
            return refuse(
                "region",
                format!("{:?} is not a region's name", self.region),
            );
        }
        if let Some(endpoint) = &self.endpoint {
            check_endpoint(endpoint)?;
        }
        if let Credentials::Static {
            access_key_id,
            secret_key,
            ..
        } = &self.credentials
        {
            if access_key_id.trim().is_empty() {
                return refuse("access_key_id", "is empty".to_owned());
            }
            if secret_key.trim().is_empty() {
                return refuse(
                    "secret_key",
                    "is empty although access_key_id is set".to_owned(),
                );
            }
        }
        Ok(())
    }

    pub(crate) fn region_or_default(&self) -> String {
        self.region
            .clone()
            .unwrap_or_else(|| DEFAULT_REGION.to_owned())
    }

    pub(crate) fn path_style_or_default(&self) -> bool {
        self.path_style.unwrap_or(self.endpoint.is_some())
    }

    /// The client for the store. Reads `ca_file`, and the system's certificates where they are needed.
    pub(crate) fn store_client(&self) -> Result<SharedHttpClient> {
        let plain = self
            .endpoint
            .as_deref()
            .is_some_and(|endpoint| endpoint.starts_with("http://"));
        let trust = match self.authorities()? {
            Some(pem) => TrustStore::empty().with_pem_certificate(pem),
            None => TrustStore::empty().with_native_roots(!plain),
        };
        self.client(trust, None)
    }

    /// The client for the places that credentials come from.
    pub(crate) fn credentials_client(&self) -> Result<SharedHttpClient> {
        let mut trust = TrustStore::default();
        if let Some(pem) = self.authorities()? {
            trust.add_pem_certificate(pem);
        }
        self.client(trust, Some(NEVER_PROXIED))
    }

    fn client(&self, trust: TrustStore, never_proxied: Option<&str>) -> Result<SharedHttpClient> {
        let context = TlsContext::builder().with_trust_store(trust).build();
        let context = context.map_err(|error| StoreError::setting("ca_file", error))?;
        let mut connector = Connector::builder()
            .connector_settings(
                HttpConnectorSettings::builder()
                    .connect_timeout(CONNECT_TIMEOUT)
                    .build(),
            )
            .pool_idle_timeout(IDLE_TIMEOUT)
            .tls_provider(Provider::Rustls(CryptoMode::Ring))
            .tls_context(context);
        if let Some(proxy) = &self.proxy {
            // The error would quote the URL, password included.
            let mut config = ProxyConfig::all(proxy.as_str())
                .map_err(|_| StoreError::setting("proxy", "is not a URL like http://host:port"))?;
            if let Some(hosts) = never_proxied {
                config = config.no_proxy(hosts);
            }
            connector = connector.proxy_config(config);
        }
        // One connector and so one pool, whatever settings a request has.
        let connector = SharedHttpConnector::new(connector.build());
        Ok(http_client_fn(move |_, _| connector.clone()))
    }

    /// The HTTP client panics over a file it cannot use, so it is read here first.
    fn authorities(&self) -> Result<Option<Vec<u8>>> {
        let Some(path) = &self.ca_file else {
            return Ok(None);
        };
        let refuse = |why: &dyn fmt::Display| {
            StoreError::setting("ca_file", format!("{}: {why}", path.display()))
        };
        let pem = std::fs::read(path).map_err(|error| refuse(&error))?;
        let mut roots = rustls::RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(&pem) {
            let certificate = certificate.map_err(|error| refuse(&error))?;
            roots.add(certificate).map_err(|error| refuse(&error))?;
        }
        if roots.is_empty() {
            return Err(refuse(&"holds no PEM certificate"));
        }
        Ok(Some(pem))
    }
}

fn check_endpoint(endpoint: &str) -> Result<()> {
    let refuse = |why: &str| Err(StoreError::setting("endpoint", why));
    let Some((scheme, rest)) = endpoint.split_once("://") else {
        return refuse("must be a URL that begins with http:// or https://");
    };
    if !matches!(scheme, "http" | "https") {
        return refuse("must begin with http:// or https://");
    }
    if rest.contains('@') {
        return refuse("must not hold credentials; set access_key_id and secret_key");
    }
    let authority = rest.trim_end_matches('/');
    if authority.is_empty() || authority.contains(['?', '#', ' ']) {
        return refuse("is not a URL like https://host:port");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::S3Store;
    use crate::error::Failure;

    #[test]
    fn settings_that_cannot_work_are_refused_by_the_name_of_their_key() {
        let refused = |settings| match S3Store::open(settings) {
            Err(StoreError {
                failure: Failure::Setting(key),
                message,
                ..
            }) => {
                assert!(message.starts_with(key), "{message}");
                key
            }
            other => panic!("{other:?}"),
        };
        let base = || S3Settings {
            bucket: "b".to_owned(),
            region: Some("r".to_owned()),
            ..S3Settings::default()
        };
        assert_eq!(
            refused(S3Settings {
                bucket: String::new(),
                ..base()
            }),
            "bucket"
        );
        assert_eq!(
            refused(S3Settings {
                region: None,
                ..base()
            }),
            "region"
        );
        assert_eq!(
            refused(S3Settings {
                endpoint: Some("localhost:9000".to_owned()),
                ..base()
            }),
            "endpoint"
        );
        assert_eq!(
            refused(S3Settings {
                endpoint: Some("http://u:p@h".to_owned()),
                ..base()
            }),
            "endpoint"
        );
        assert_eq!(
            refused(S3Settings {
                ca_file: Some("/nowhere.pem".into()),
                ..base()
            }),
            "ca_file"
        );
        assert_eq!(
            refused(S3Settings {
                proxy: Some("ftp://p".to_owned()),
                ..base()
            }),
            "proxy"
        );
        let halves = Credentials::Static {
            access_key_id: "a".to_owned(),
            secret_key: String::new(),
            session_token: None,
        };
        assert_eq!(
            refused(S3Settings {
                credentials: halves,
                ..base()
            }),
            "secret_key"
        );
    }

    #[test]
    fn secrets_are_not_shown() {
        let credentials = Credentials::Static {
            access_key_id: "id".to_owned(),
            secret_key: "hidden".to_owned(),
            session_token: Some("hidden".to_owned()),
        };
        let settings = S3Settings {
            credentials,
            proxy: Some("http://u:hidden@p:1".to_owned()),
            ..S3Settings::default()
        };
        assert!(!format!("{settings:?}").contains("hidden"));
    }
}
