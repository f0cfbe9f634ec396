//! Credentials that are looked for when they are first needed, kept while they are good, and looked for anew when the store says that
//! they have expired.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use aws_config::default_provider::credentials::DefaultCredentialsChain;
use aws_config::provider_config::ProviderConfig;
use aws_credential_types::Credentials;
use aws_credential_types::provider::{self, ProvideCredentials, future};
use aws_smithy_runtime_api::client::http::SharedHttpClient;
use tokio::sync::Mutex;

/// Temporary credentials are renewed so long before they expire.
const RENEW_BEFORE: Duration = Duration::from_secs(300);

/// The default chain behind a cache of our own: the client's cache cannot be told that what it holds has expired.
pub(crate) struct Renewed {
    http: SharedHttpClient,
    region: String,
    expired: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    chain: Option<DefaultCredentialsChain>,
    cached: Option<Credentials>,
}

impl std::fmt::Debug for Renewed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Renewed")
    }
}

impl Renewed {
    pub(crate) fn new(http: SharedHttpClient, region: String) -> Self {
        Self {
            http,
            region,
            expired: AtomicBool::new(false),
            state: Mutex::new(State::default()),
        }
    }

    /// The next request looks for credentials anew, files and roles included.
    pub(crate) fn forget(&self) {
        self.expired.store(true, Ordering::Release);
    }

    async fn provide(&self) -> provider::Result {
        // Held while they are being looked for: everybody else would ask the same.
        let mut state = self.state.lock().await;
        if self.expired.swap(false, Ordering::AcqRel) {
            *state = State::default();
        }
        let now = SystemTime::now();
        let expiry = state.cached.as_ref().map(Credentials::expiry);
        let good = |left: Duration| match expiry {
            None => false,
            Some(None) => true,
            Some(Some(at)) => at > now + left,
        };
        if good(RENEW_BEFORE)
            && let Some(cached) = &state.cached
        {
            return Ok(cached.clone());
        }
        if state.chain.is_none() {
            let config = ProviderConfig::without_region()
                .with_http_client(self.http.clone())
                .with_region(Some(aws_config::Region::new(self.region.clone())));
            let chain = DefaultCredentialsChain::builder()
                .region(aws_config::Region::new(self.region.clone()))
                .configure(config)
                .build()
                .await;
            state.chain = Some(chain);
        }
        let Some(chain) = &state.chain else {
            return Err(provider::error::CredentialsError::not_loaded_no_source());
        };
        match chain.provide_credentials().await {
            Ok(found) => {
                state.cached = Some(found.clone());
                Ok(found)
            }
            // Not renewed yet, but still good for a while.
            Err(error) if good(Duration::ZERO) => match &state.cached {
                Some(cached) => {
                    tracing::warn!(error = %crate::error::chain_text(&error), "cannot renew the store's credentials");
                    Ok(cached.clone())
                }
                None => Err(error),
            },
            Err(error) => Err(error),
        }
    }
}

impl ProvideCredentials for Renewed {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        future::ProvideCredentials::new(self.provide())
    }
}
