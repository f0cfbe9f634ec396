//! S3 and whatever speaks its protocol. The only file that names the SDK.
//!
//! One attempt a call, no time limits but the one for connecting, plain bodies with Content-Length and an unsigned payload, checksums as
//! headers. What the SDK does beyond that is switched off.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use aws_sdk_s3::config::interceptors::{
    AfterDeserializationInterceptorContextRef, BeforeTransmitInterceptorContextMut,
};
use aws_sdk_s3::config::{
    AppName, BehaviorVersion, ConfigBag, IdentityCache, Intercept, Region,
    RequestChecksumCalculation, ResponseChecksumValidation, RuntimeComponents,
    StalledStreamProtectionConfig,
};
use aws_sdk_s3::error::{BoxError, ProvideErrorMetadata, SdkError};
use aws_sdk_s3::primitives::{ByteStream as SdkStream, SdkBody};
use aws_sdk_s3::types::{
    Delete, EncodingType, ObjectIdentifier, ServerSideEncryption, StorageClass,
};
use aws_smithy_runtime_api::client::orchestrator::HttpResponse;
use aws_smithy_types::retry::RetryConfig;
use aws_smithy_types::timeout::TimeoutConfig;
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use http_body_util::BodyDataStream;
use md5::{Digest, Md5};

use crate::body::{Announced, SizedBody};
use crate::credentials::Renewed;
use crate::error::{Answer, ErrorKind, Failure, Op, StoreError};
use crate::meter::{self, Meter, Operation};
use crate::probe;
use crate::sdk_error;
pub use crate::settings::{Credentials, S3Settings};
use crate::spelling::{decode_key, encode_crc32, fits_xml, parse_content_range, quoted};
use crate::{
    Body, Capabilities, Listed, Object, ObjectStore, PAGE_SIZE, Page, Part, Precondition,
    PutOptions, Result, Stored,
};

/// Deletes that are under way at a time where the store knows no batches.
const SINGLE_DELETES: usize = 8;

/// An S3 bucket. Cheap to share behind an `Arc`; holds a pool of connections, which needs a tokio runtime when it is used.
#[derive(Debug)]
pub struct S3Store {
    client: aws_sdk_s3::Client,
    settings: S3Settings,
    renewed: Option<Arc<Renewed>>,
    /// The store said once that it knows no batch deletes.
    single_deletes: AtomicBool,
    probes: probe::Name,
    meter: Meter,
}

impl S3Store {
    /// A store for these settings. Reads `ca_file` and certificates, talks to nobody: what is wrong with the bucket or the credentials comes
    /// out in [`ObjectStore::probe`]. [`Failure::Setting`] names the key that cannot be used.
    pub fn open(settings: S3Settings) -> Result<Self> {
        settings.check()?;
        let region = settings.region_or_default();
        let timeouts = TimeoutConfig::builder()
            .disable_operation_timeout()
            .disable_operation_attempt_timeout();
        let mut config = aws_sdk_s3::Config::builder()
            .behavior_version(BehaviorVersion::v2026_01_12())
            .region(Region::new(region.clone()))
            .force_path_style(settings.path_style_or_default())
            .http_client(settings.store_client()?)
            .retry_config(RetryConfig::disabled())
            .timeout_config(timeouts.disable_read_timeout().build())
            .stalled_stream_protection(StalledStreamProtectionConfig::disabled())
            .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
            .response_checksum_validation(ResponseChecksumValidation::WhenRequired)
            .identity_cache(IdentityCache::no_cache())
            .disable_s3_express_session_auth(true)
            .interceptor(Wire);
        if let Ok(name) = AppName::new("rabbitmq_stream_s3") {
            config = config.app_name(name);
        }
        config.set_endpoint_url(settings.endpoint.clone());
        let mut renewed = None;
        config = match &settings.credentials {
            Credentials::Chain => {
                let provider = Arc::new(Renewed::new(settings.credentials_client()?, region));
                renewed = Some(Arc::clone(&provider));
                config.credentials_provider(aws_sdk_s3::config::SharedCredentialsProvider::from(
                    provider as Arc<dyn aws_sdk_s3::config::ProvideCredentials>,
                ))
            }
            Credentials::Static {
                access_key_id,
                secret_key,
                session_token,
            } => config.credentials_provider(aws_sdk_s3::config::Credentials::new(
                access_key_id,
                secret_key,
                session_token.clone(),
                None,
                "settings",
            )),
        };
        let client = aws_sdk_s3::Client::from_conf(config.build());
        Ok(Self {
            client,
            settings,
            renewed,
            single_deletes: AtomicBool::new(false),
            probes: probe::Name::new(),
            meter: Meter::default(),
        })
    }

    /// The same, with its requests counted.
    #[must_use]
    pub fn metered(self, meter: Meter) -> Self {
        Self { meter, ..self }
    }

    /// Bucket, key and endpoint as they appear in messages.
    fn place(&self, key: &str) -> String {
        let endpoint = self.settings.endpoint.as_deref().unwrap_or("AWS");
        format!("s3://{}/{key} at {endpoint}", self.settings.bucket)
    }

    fn owner(&self) -> Option<String> {
        self.settings.expected_bucket_owner.clone()
    }

    async fn put_object(
        &self,
        key: &str,
        body: Body,
        options: &PutOptions,
    ) -> Result<(Stored, Option<String>)> {
        let (body, failed) = SizedBody::new(body, self.meter.clone());
        let len = i64::try_from(body.len()).map_err(|_| {
            StoreError::new(
                Op::Put,
                Failure::Http(413),
                format!("put {}: the body is too long", self.place(key)),
            )
        })?;
        let mut request = self
            .client
            .put_object()
            .bucket(&self.settings.bucket)
            .key(key)
            .content_length(len)
            .set_expected_bucket_owner(self.owner())
            .set_storage_class(
                self.settings
                    .storage_class
                    .as_deref()
                    .map(StorageClass::from),
            )
            .set_checksum_crc32(options.crc32.map(encode_crc32))
            .body(SdkStream::new(SdkBody::from_body_1_x(body)));
        if let Some(kms_key_id) = &self.settings.kms_key_id {
            request = request
                .server_side_encryption(ServerSideEncryption::AwsKms)
                .ssekms_key_id(kms_key_id);
        }
        request = match &options.precondition {
            Precondition::None => request,
            Precondition::Absent => request.if_none_match("*"),
            Precondition::Matches(etag) => request.if_match(quoted(etag)),
        };
        match request.send().await {
            // A portal or a proxy that answers everything with 200 is no store.
            Ok(output) if output.e_tag().is_none() => {
                let message = format!(
                    "put {}: an answer without an entity tag does not come from a store",
                    self.place(key)
                );
                Err(StoreError::new(Op::Put, Failure::Http(502), message))
            }
            Ok(output) => {
                let stored = Stored {
                    etag: output.e_tag().map(str::to_owned),
                };
                Ok((stored, output.checksum_crc32().map(str::to_owned)))
            }
            Err(error) => {
                // What the body said is the cause, whatever the client made of it.
                if let Some(cause) = failed.take() {
                    let message = format!("put {}: the body failed: {cause}", self.place(key));
                    return Err(StoreError::new(Op::Put, Failure::Body, message).with_source(cause));
                }
                Err(precondition_failed(
                    self.failed(Op::Put, key, error),
                    &options.precondition,
                ))
            }
        }
    }

    /// Compares the checksum that the store acknowledges with the one that was sent.
    async fn put_checked(&self, key: &str, body: Body, options: PutOptions) -> Result<Stored> {
        let (stored, echo) = self.put_object(key, body, &options).await?;
        if let (Some(sent), Some(echo)) = (options.crc32.map(encode_crc32), echo)
            && sent != echo
        {
            let message = format!(
                "put {}: the store acknowledged the checksum {echo} instead of {sent}; what it holds is not what was sent",
                self.place(key)
            );
            return Err(StoreError::new(Op::Put, Failure::ChecksumMismatch, message));
        }
        Ok(stored)
    }

    fn no_byte(&self, key: &str, part: &Part) -> StoreError {
        let message = format!("get {}: {part:?} holds no byte", self.place(key));
        StoreError::new(Op::Get, Failure::Http(416), message)
    }

    async fn get_object(&self, key: &str, part: &Part, range: Option<String>) -> Result<Object> {
        let request = self
            .client
            .get_object()
            .bucket(&self.settings.bucket)
            .key(key)
            .set_range(range)
            .set_expected_bucket_owner(self.owner());
        let output = request
            .send()
            .await
            .map_err(|error| self.failed(Op::Get, key, error))?;
        let wrong = |what: &str| {
            let message = format!("get {}: {what}", self.place(key));
            Err(StoreError::new(Op::Get, Failure::Http(502), message))
        };
        // Nothing marks an error document that comes with a success but that an object has a tag.
        if output.e_tag().is_none() {
            return wrong("an answer without an entity tag is not an object");
        }
        let Some(len) = output
            .content_length()
            .and_then(|len| u64::try_from(len).ok())
        else {
            return wrong("an answer without a length cannot be checked for completeness");
        };
        let size = match part {
            Part::Whole => len,
            // Of an empty object some stores send nothing, instead of refusing.
            Part::Range(_) | Part::Last(_) if len == 0 => return Err(self.no_byte(key, part)),
            Part::Range(_) | Part::Last(_) => {
                let asked = output.content_range().and_then(parse_content_range);
                let Some((start, end, size)) = asked else {
                    return wrong("the store answered a request for a part with something else");
                };
                if part.resolve(size) != Some(start..end) || end - start != len {
                    return wrong("the store answered with another part than asked for");
                }
                size
            }
        };
        let etag = output.e_tag().map(str::to_owned);
        let body = BodyDataStream::new(output.body.into_inner()).map_err(std::io::Error::other);
        Ok(Object {
            size,
            etag,
            body: Box::pin(Announced::new(body, len)),
        })
    }

    async fn list_page(&self, prefix: &str, from: Option<&str>, max: usize) -> Result<Page> {
        let max = i32::try_from(max.clamp(1, PAGE_SIZE)).unwrap_or(1);
        let request = self
            .client
            .list_objects_v2()
            .bucket(&self.settings.bucket)
            .prefix(prefix)
            .max_keys(max)
            .set_continuation_token(from.map(str::to_owned))
            // Keys may hold characters that XML cannot: one such object, whoever put it there, would make the page unreadable.
            .encoding_type(EncodingType::Url)
            .set_expected_bucket_owner(self.owner());
        let output = request
            .send()
            .await
            .map_err(|error| self.failed(Op::List, prefix, error))?;
        let next = output.next_continuation_token().map(str::to_owned);
        if output.is_truncated() == Some(true) && next.is_none() {
            let message = format!(
                "list {}: the store cut the list off without saying where it goes on",
                self.place(prefix)
            );
            return Err(StoreError::new(Op::List, Failure::Http(502), message));
        }
        let mut objects = Vec::with_capacity(output.contents().len());
        for object in output.contents() {
            let size = object.size().and_then(|size| u64::try_from(size).ok());
            let key = object.key().and_then(|key| match output.encoding_type() {
                Some(EncodingType::Url) => decode_key(key),
                Some(_) | None => Some(key.to_owned()),
            });
            let (Some(key), Some(size)) = (key, size) else {
                let message = format!(
                    "list {}: the store sent a row without a key or a size that can be read",
                    self.place(prefix)
                );
                return Err(StoreError::new(Op::List, Failure::Http(502), message));
            };
            let modified_ms = object
                .last_modified()
                .and_then(|time| time.to_millis().ok());
            objects.push(Listed {
                key,
                size,
                modified_ms,
            });
        }
        Ok(Page {
            objects,
            next: if output.is_truncated() == Some(true) {
                next
            } else {
                None
            },
        })
    }

    async fn delete_batch(&self, keys: &[String]) -> Result<Vec<(String, StoreError)>> {
        let invalid = |error| {
            StoreError::new(
                Op::Delete,
                Failure::Http(400),
                format!("delete from {}: {error}", self.place("")),
            )
        };
        let mut objects = Vec::with_capacity(keys.len());
        for key in keys {
            objects.push(
                ObjectIdentifier::builder()
                    .key(key)
                    .build()
                    .map_err(invalid)?,
            );
        }
        let delete = Delete::builder()
            .set_objects(Some(objects))
            .quiet(true)
            .build()
            .map_err(invalid)?;
        let request = self
            .client
            .delete_objects()
            .bucket(&self.settings.bucket)
            .set_expected_bucket_owner(self.owner())
            .delete(delete);
        let keys = keys.iter().map(String::as_str);
        let ongoing = self.meter.begin(Operation::MultiDelete, keys);
        let sent = request.send().await;
        let output = ongoing.end(sent.map_err(|error| self.failed(Op::Delete, "", error)))?;
        let mut failures = Vec::new();
        for row in output.errors() {
            let key = row.key().unwrap_or_default().to_owned();
            let code = row.code().map(str::to_owned);
            if code.as_deref() == Some("NoSuchKey") {
                continue;
            }
            // A status of its own is not sent for a key; the code decides.
            let answer = Answer {
                status: 200,
                code,
                message: row.message().map(str::to_owned),
                region: None,
                time: None,
            };
            failures.push((key.clone(), self.answered(Op::Delete, &key, &answer)));
        }
        Ok(failures)
    }

    async fn delete_single(&self, key: &str) -> Option<(String, StoreError)> {
        let request = self
            .client
            .delete_object()
            .bucket(&self.settings.bucket)
            .key(key)
            .set_expected_bucket_owner(self.owner());
        let ongoing = self.meter.begin(Operation::Delete, [key]);
        let sent = request.send().await;
        let answer = ongoing.end(sent.map_err(|error| self.failed(Op::Delete, key, error)));
        let error = answer.err()?;
        let gone = error.kind == ErrorKind::NotFound && !error.message.contains("NoSuchBucket");
        (!gone).then(|| (key.to_owned(), error))
    }

    async fn delete_singly(&self, keys: &[String]) -> Vec<(String, StoreError)> {
        // Collected first: a closure over borrowed keys is not general enough for a boxed future.
        let deletes: Vec<_> = keys.iter().map(|key| self.delete_single(key)).collect();
        let answers = futures::stream::iter(deletes).buffer_unordered(SINGLE_DELETES);
        answers.filter_map(futures::future::ready).collect().await
    }

    /// A batch, and one by one what a batch cannot name: its document would be none that the store can read.
    async fn delete_some(&self, keys: &[String]) -> Result<Vec<(String, StoreError)>> {
        let (plain, odd): (Vec<String>, Vec<String>) =
            keys.iter().cloned().partition(|key| fits_xml(key));
        let mut failures = if plain.is_empty() {
            Vec::new()
        } else {
            self.delete_plain(&plain).await?
        };
        failures.extend(self.delete_singly(&odd).await);
        Ok(failures)
    }

    /// A batch, by the way the store knows.
    async fn delete_plain(&self, keys: &[String]) -> Result<Vec<(String, StoreError)>> {
        if self.single_deletes.load(Ordering::Relaxed) {
            return Ok(self.delete_singly(keys).await);
        }
        match self.delete_batch(keys).await {
            Err(error) if matches!(error.failure, Failure::Http(405 | 501)) => {
                tracing::info!(place = %self.place(""), "the store knows no batch deletes; deleting one by one");
                self.single_deletes.store(true, Ordering::Relaxed);
                Ok(self.delete_singly(keys).await)
            }
            // Perhaps only these keys: one of them may not be expressible in XML.
            Err(error) if error.message.contains("MalformedXML") => {
                Ok(self.delete_singly(keys).await)
            }
            answer => answer,
        }
    }

    fn answered(&self, op: Op, key: &str, answer: &Answer) -> StoreError {
        self.noted(StoreError::answer(op, &self.place(key), answer))
    }

    fn failed<E>(&self, op: Op, key: &str, error: SdkError<E, HttpResponse>) -> StoreError
    where
        E: ProvideErrorMetadata + std::error::Error + Send + Sync + 'static,
    {
        let proxied = self.settings.proxy.is_some();
        self.noted(sdk_error::read(op, &self.place(key), proxied, error))
    }

    /// Credentials that have expired are of no more use to the next request; and what needs a key besides the bucket is told.
    fn noted(&self, mut error: StoreError) -> StoreError {
        if self.settings.kms_key_id.is_some()
            && let Some(action) = error.missing_kms_action()
        {
            error
                .message
                .push_str(&format!(" (and, on the key kms_key_id, {action})"));
        }
        if let (Failure::ExpiredToken, Some(renewed)) = (&error.failure, &self.renewed) {
            renewed.forget();
        }
        error
    }
}

#[async_trait]
impl ObjectStore for S3Store {
    async fn put(&self, key: &str, body: Body, options: PutOptions) -> Result<Stored> {
        let ongoing = self.meter.begin(Operation::Put, [key]);
        ongoing.end(self.put_checked(key, body, options).await)
    }

    async fn get(&self, key: &str, part: Part) -> Result<Object> {
        let range = match &part {
            Part::Whole => None,
            Part::Range(range) if range.start < range.end => {
                Some(format!("bytes={}-{}", range.start, range.end - 1))
            }
            Part::Last(n) if *n > 0 => Some(format!("bytes=-{n}")),
            Part::Range(_) | Part::Last(_) => return Err(self.no_byte(key, &part)),
        };
        let ongoing = self.meter.begin(Operation::Get, [key]);
        ongoing.reading(self.get_object(key, &part, range).await, &part)
    }

    async fn delete(&self, keys: &[String]) -> Result<Vec<(String, StoreError)>> {
        let mut failures = Vec::new();
        let mut known = false;
        for batch in keys.chunks(PAGE_SIZE) {
            match self.delete_some(batch).await {
                Ok(rows) => {
                    known = true;
                    failures.extend(rows);
                }
                // Of the batches before this one something is known, so the error belongs to the keys.
                Err(error) if known => {
                    failures.extend(batch.iter().map(|key| (key.clone(), error.copy())))
                }
                Err(error) => return Err(error),
            }
        }
        Ok(failures)
    }

    async fn list(&self, prefix: &str, from: Option<&str>, max: usize) -> Result<Page> {
        let ongoing = self.meter.begin(Operation::List, []);
        ongoing.end(self.list_page(prefix, from, max).await)
    }

    async fn probe(&self, prefix: &str) -> Result<Capabilities> {
        let put = |key: String, body: Bytes, options: PutOptions| async move {
            let ongoing = self.meter.begin(Operation::Probe, []);
            let answer = self.put_object(&key, Body::Bytes(body), &options).await;
            ongoing.end(answer.map(|_| ()))
        };
        meter::probing(probe::run(self, prefix, &self.probes, put)).await
    }
}

/// What every request and answer goes through.
#[derive(Debug)]
struct Wire;

impl Intercept for Wire {
    fn name(&self) -> &'static str {
        "Wire"
    }

    /// Content-MD5 on batch deletes: stores from before the newer checksums insist on it, and nobody minds. They are the only requests
    /// with a body in memory.
    fn modify_before_signing(
        &self,
        context: &mut BeforeTransmitInterceptorContextMut<'_>,
        _components: &RuntimeComponents,
        _config: &mut ConfigBag,
    ) -> std::result::Result<(), BoxError> {
        let digest = match context.request().body().bytes() {
            Some(body) if !body.is_empty() => BASE64.encode(Md5::digest(body)),
            Some(_) | None => return Ok(()),
        };
        context
            .request_mut()
            .headers_mut()
            .insert("content-md5", digest);
        Ok(())
    }

    /// A status 200 is no success where the body is an error document: the store began to answer before it was done.
    fn read_after_deserialization(
        &self,
        context: &AfterDeserializationInterceptorContextRef<'_>,
        _components: &RuntimeComponents,
        _config: &mut ConfigBag,
    ) -> std::result::Result<(), BoxError> {
        let response = context.response();
        let status = response.status().as_u16();
        match response
            .body()
            .bytes()
            .and_then(|body| Answer::parse(status, body))
        {
            Some(_) if status < 300 => Err("a success with an error in its body".into()),
            Some(_) | None => Ok(()),
        }
    }
}

/// S3 answers a `If-Match` on a key that is not there with 404.
fn precondition_failed(error: StoreError, precondition: &Precondition) -> StoreError {
    match (precondition, &error.failure) {
        (Precondition::Matches(_), Failure::Http(404))
            if !error.message.contains("NoSuchBucket") =>
        {
            error.with_kind(ErrorKind::Conflict)
        }
        (Precondition::Matches(_) | Precondition::Absent, Failure::Http(409)) => StoreError {
            kind: ErrorKind::Transient,
            failure: Failure::WriteConflict,
            ..error
        },
        _ => error,
    }
}
