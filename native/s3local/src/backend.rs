//! The S3 operations the project uses, on plain files: `DIR/bucket/key`.
//!
//! No second file lies beside an object: its entity tag comes from the file itself. So content types and user metadata are not kept, and
//! multipart uploads and versions do not exist.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use bytes::Bytes;
use futures::StreamExt;
use s3s::checksum::ChecksumHasher;
use s3s::crypto::{Checksum as _, Md5};
use s3s::dto::*;
use s3s::{S3, S3Error, S3ErrorCode, S3Request, S3Response, S3Result, TrailingHeaders, s3_error};
use stream_s3_store::Precondition;
use stream_s3_store::tree::{self, Tree, TreeError, Upload};

use crate::fault::{Action, Faults, Operation};
use crate::listing::{Spelling, decode_token, list, shown, size};

/// Bytes that are gathered before they go to a blocking thread.
const WRITE_SIZE: usize = 1024 * 1024;
/// Most rows of a page, most keys of a batch.
const PAGE_SIZE: i32 = 1000;

pub(crate) struct Backend {
    dir: PathBuf,
    trees: Mutex<HashMap<String, Arc<Tree>>>,
    faults: Arc<Faults>,
}

impl Backend {
    pub(crate) fn new(dir: PathBuf, faults: Arc<Faults>) -> Self {
        Self {
            dir,
            trees: Mutex::new(HashMap::new()),
            faults,
        }
    }

    fn tree(&self, bucket: &str) -> S3Result<Arc<Tree>> {
        let root = self.dir.join(bucket);
        if !root.is_dir() {
            return Err(s3_error!(
                NoSuchBucket,
                "The specified bucket does not exist"
            ));
        }
        let mut trees = self.trees.lock().unwrap_or_else(PoisonError::into_inner);
        let tree = trees.entry(bucket.to_owned()).or_insert_with(|| {
            // Not durable: what this server holds need not outlive the machine.
            Arc::new(Tree::new(root, self.dir.join(crate::SCRATCH), false))
        });
        Ok(Arc::clone(tree))
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> tree::Result<T> + Send + 'static,
) -> S3Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done.map_err(refused),
        Err(stopped) => Err(S3Error::internal_error(stopped)),
    }
}

fn refused(error: TreeError) -> S3Error {
    match &error {
        TreeError::Key(..) => s3_error!(InvalidArgument, "{}", error),
        TreeError::NotFound => s3_error!(NoSuchKey, "The specified key does not exist."),
        TreeError::Precondition => {
            s3_error!(
                PreconditionFailed,
                "At least one of the pre-conditions you specified did not hold"
            )
        }
        TreeError::Io { .. } => {
            S3Error::with_message(S3ErrorCode::InternalError, error.to_string())
        }
    }
}

fn precondition(input: &PutObjectInput) -> S3Result<Precondition> {
    match (&input.if_none_match, &input.if_match) {
        (None, None) => Ok(Precondition::None),
        (Some(ETagCondition::Any), None) => Ok(Precondition::Absent),
        (None, Some(ETagCondition::ETag(etag))) => {
            Ok(Precondition::Matches(etag.value().to_owned()))
        }
        _ => Err(s3_error!(
            NotImplemented,
            "this combination of conditions is not implemented"
        )),
    }
}

/// The checksums that a request announces, computed while its bytes are written.
struct Digests {
    checksums: ChecksumHasher,
    md5: Option<Md5>,
}

impl Digests {
    fn new(input: &PutObjectInput, trailer: Option<&str>) -> Self {
        let announced = |name: &str, header: bool| {
            let by_algorithm = input
                .checksum_algorithm
                .as_ref()
                .is_some_and(|a| a.as_str().eq_ignore_ascii_case(name));
            let by_trailer = trailer.is_some_and(|trailer| {
                trailer
                    .trim()
                    .eq_ignore_ascii_case(&format!("x-amz-checksum-{}", name.to_ascii_lowercase()))
            });
            header || by_algorithm || by_trailer
        };
        let checksums = ChecksumHasher {
            crc32: announced("CRC32", input.checksum_crc32.is_some()).then(Default::default),
            crc32c: announced("CRC32C", input.checksum_crc32c.is_some()).then(Default::default),
            sha1: announced("SHA1", input.checksum_sha1.is_some()).then(Default::default),
            sha256: announced("SHA256", input.checksum_sha256.is_some()).then(Default::default),
            crc64nvme: announced("CRC64NVME", input.checksum_crc64nvme.is_some())
                .then(Default::default),
        };
        Self {
            checksums,
            md5: input.content_md5.as_ref().map(|_| Md5::new()),
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        self.checksums.update(bytes);
        if let Some(md5) = &mut self.md5 {
            md5.update(bytes);
        }
    }

    /// What the bytes have, where it is what was announced.
    fn verify(
        self,
        input: &PutObjectInput,
        trailers: Option<TrailingHeaders>,
    ) -> S3Result<Checksum> {
        if let Some(md5) = self.md5
            && Some(STANDARD.encode(md5.finalize())) != input.content_md5
        {
            return Err(s3_error!(
                BadDigest,
                "The Content-MD5 you specified did not match what we received."
            ));
        }
        let actual = self.checksums.finalize();
        let trailers = trailers.and_then(|trailers| trailers.take());
        let rows = [
            ("crc32", &input.checksum_crc32, &actual.checksum_crc32),
            ("crc32c", &input.checksum_crc32c, &actual.checksum_crc32c),
            ("sha1", &input.checksum_sha1, &actual.checksum_sha1),
            ("sha256", &input.checksum_sha256, &actual.checksum_sha256),
            (
                "crc64nvme",
                &input.checksum_crc64nvme,
                &actual.checksum_crc64nvme,
            ),
        ];
        for (name, header, actual) in rows {
            let trailer = trailers
                .as_ref()
                .and_then(|trailers| trailers.get(format!("x-amz-checksum-{name}")));
            let expected = match trailer {
                Some(value) => Some(value.to_str().map_err(|_| s3_error!(InvalidArgument))?),
                None => header.as_deref(),
            };
            if let Some(expected) = expected
                && Some(expected) != actual.as_deref()
            {
                return Err(s3_error!(
                    BadDigest,
                    "The {} you specified did not match the calculated checksum.",
                    name
                ));
            }
        }
        Ok(actual)
    }
}

/// Writes a body in bounded pieces.
async fn write(
    tree: &Arc<Tree>,
    body: StreamingBlob,
    digests: Digests,
) -> S3Result<(Upload, Digests)> {
    let begun = Arc::clone(tree);
    let mut state = (blocking(move || begun.begin()).await?, digests);
    let mut body = body;
    let mut gathered: Vec<Bytes> = Vec::new();
    let mut waiting = 0;
    loop {
        let next = body.next().await;
        let end = next.is_none();
        if let Some(bytes) = next {
            let bytes =
                bytes.map_err(|error| S3Error::with_source(S3ErrorCode::IncompleteBody, error))?;
            waiting += bytes.len();
            gathered.push(bytes);
        }
        if waiting >= WRITE_SIZE || (end && waiting > 0) {
            let pieces = std::mem::take(&mut gathered);
            waiting = 0;
            let (mut upload, mut digests) = state;
            state = blocking(move || {
                for piece in &pieces {
                    digests.update(piece);
                    upload.write(piece)?;
                }
                Ok((upload, digests))
            })
            .await?;
        }
        if end {
            return Ok(state);
        }
    }
}

#[async_trait::async_trait]
impl S3 for Backend {
    async fn create_bucket(
        &self,
        req: S3Request<CreateBucketInput>,
    ) -> S3Result<S3Response<CreateBucketOutput>> {
        match std::fs::create_dir(self.dir.join(&req.input.bucket)) {
            Ok(()) => Ok(S3Response::new(CreateBucketOutput::default())),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                Err(s3_error!(BucketAlreadyOwnedByYou))
            }
            Err(error) => Err(S3Error::internal_error(error)),
        }
    }

    async fn head_bucket(
        &self,
        req: S3Request<HeadBucketInput>,
    ) -> S3Result<S3Response<HeadBucketOutput>> {
        self.tree(&req.input.bucket)?;
        Ok(S3Response::new(HeadBucketOutput::default()))
    }

    async fn list_buckets(
        &self,
        _: S3Request<ListBucketsInput>,
    ) -> S3Result<S3Response<ListBucketsOutput>> {
        let mut names = Vec::new();
        for row in std::fs::read_dir(&self.dir).map_err(S3Error::internal_error)? {
            let row = row.map_err(S3Error::internal_error)?;
            let name = row.file_name().into_string();
            names.extend(
                name.ok()
                    .filter(|name| !name.starts_with('.') && row.path().is_dir()),
            );
        }
        names.sort_unstable();
        let bucket = |name| Bucket {
            name: Some(name),
            ..Bucket::default()
        };
        let buckets = Some(names.into_iter().map(bucket).collect());
        Ok(S3Response::new(ListBucketsOutput {
            buckets,
            ..ListBucketsOutput::default()
        }))
    }

    async fn put_object(
        &self,
        req: S3Request<PutObjectInput>,
    ) -> S3Result<S3Response<PutObjectOutput>> {
        let trailer = req
            .headers
            .get("x-amz-trailer")
            .and_then(|value| value.to_str().ok())
            .map(str::to_owned);
        let mut input = req.input;
        let tree = self.tree(&input.bucket)?;
        tree.path(&input.key).map_err(refused)?;
        let mut precondition = precondition(&input)?;
        if precondition != Precondition::None
            && self
                .faults
                .take(Operation::Condition, &input.key)
                .then
                .is_some()
        {
            precondition = Precondition::None;
        }
        // The early answer that saves sending the body. What counts is the check when it is put in place.
        if precondition == Precondition::Absent && tree.open(&input.key).is_ok() {
            return Err(refused(TreeError::Precondition));
        }
        let Some(body) = input.body.take() else {
            return Err(s3_error!(IncompleteBody));
        };
        let digests = Digests::new(&input, trailer.as_deref());
        let (upload, digests) = write(&tree, body, digests).await?;
        // Only now, and before the object appears.
        let checksum = digests.verify(&input, req.trailing_headers)?;
        let key = input.key;
        let entry = blocking(move || tree.commit(upload, &key, &precondition)).await?;
        Ok(S3Response::new(PutObjectOutput {
            e_tag: Some(ETag::Strong(entry.etag)),
            checksum_crc32: checksum.checksum_crc32,
            checksum_crc32c: checksum.checksum_crc32c,
            checksum_sha1: checksum.checksum_sha1,
            checksum_sha256: checksum.checksum_sha256,
            checksum_crc64nvme: checksum.checksum_crc64nvme,
            ..PutObjectOutput::default()
        }))
    }

    async fn get_object(
        &self,
        req: S3Request<GetObjectInput>,
    ) -> S3Result<S3Response<GetObjectOutput>> {
        let GetObjectInput {
            bucket, key, range, ..
        } = req.input;
        let tree = self.tree(&bucket)?;
        let (file, entry) = blocking(move || tree.open(&key)).await?;
        let part = match &range {
            None => 0..entry.size,
            Some(range) => range.check(entry.size)?,
        };
        if range.is_some() && part.is_empty() {
            return Err(s3_error!(
                InvalidRange,
                "The requested range is not satisfiable"
            ));
        }
        let content_range =
            range.map(|_| format!("bytes {}-{}/{}", part.start, part.end - 1, entry.size));
        let body = tree::read_stream(file, part.start, part.end);
        Ok(S3Response::new(GetObjectOutput {
            content_length: Some(
                i64::try_from(part.end - part.start).map_err(S3Error::internal_error)?,
            ),
            content_range,
            accept_ranges: Some("bytes".to_owned()),
            last_modified: Some(tree::time_of(entry.modified_ms).into()),
            e_tag: Some(ETag::Strong(entry.etag)),
            body: Some(StreamingBlob::wrap(body)),
            ..GetObjectOutput::default()
        }))
    }

    async fn head_object(
        &self,
        req: S3Request<HeadObjectInput>,
    ) -> S3Result<S3Response<HeadObjectOutput>> {
        let HeadObjectInput { bucket, key, .. } = req.input;
        let tree = self.tree(&bucket)?;
        let (_, entry) = blocking(move || tree.open(&key)).await?;
        Ok(S3Response::new(HeadObjectOutput {
            content_length: Some(size(&entry)?),
            accept_ranges: Some("bytes".to_owned()),
            last_modified: Some(tree::time_of(entry.modified_ms).into()),
            e_tag: Some(ETag::Strong(entry.etag)),
            ..HeadObjectOutput::default()
        }))
    }

    async fn delete_object(
        &self,
        req: S3Request<DeleteObjectInput>,
    ) -> S3Result<S3Response<DeleteObjectOutput>> {
        let DeleteObjectInput { bucket, key, .. } = req.input;
        let tree = self.tree(&bucket)?;
        blocking(move || tree.delete(&key)).await?;
        Ok(S3Response::new(DeleteObjectOutput::default()))
    }

    async fn delete_objects(
        &self,
        req: S3Request<DeleteObjectsInput>,
    ) -> S3Result<S3Response<DeleteObjectsOutput>> {
        let DeleteObjectsInput { bucket, delete, .. } = req.input;
        let tree = self.tree(&bucket)?;
        if delete.objects.len() > usize::try_from(PAGE_SIZE).unwrap_or_default() {
            return Err(s3_error!(
                MalformedXML,
                "more than 1000 keys in one request"
            ));
        }
        let faults = Arc::clone(&self.faults);
        let keys: Vec<String> = delete
            .objects
            .into_iter()
            .map(|object| object.key)
            .collect();
        let rows = blocking(move || {
            let one = |key: String| {
                let planned = match faults.take(Operation::DeleteKey, &key).then {
                    Some(Action::Status { code, .. }) => Some(code),
                    // The others make no sense for one key: see `Operation::DeleteKey`.
                    Some(_) | None => None,
                };
                let failed = match planned {
                    Some(code) => Some((code, "as ordered by a fault".to_owned())),
                    None => tree.delete(&key).err().map(|error| {
                        let error = refused(error);
                        (
                            error.code().as_str().to_owned(),
                            error.message().unwrap_or_default().to_owned(),
                        )
                    }),
                };
                (key, failed)
            };
            Ok(keys.into_iter().map(one).collect::<Vec<_>>())
        })
        .await?;
        let mut deleted = Vec::new();
        let mut errors = Vec::new();
        for (key, failed) in rows {
            match failed {
                None => deleted.push(DeletedObject {
                    key: Some(key),
                    ..DeletedObject::default()
                }),
                Some((code, message)) => errors.push(Error {
                    key: Some(key),
                    code: Some(code),
                    message: Some(message),
                    ..Error::default()
                }),
            }
        }
        let deleted = (!delete.quiet.unwrap_or(false)).then_some(deleted);
        Ok(S3Response::new(DeleteObjectsOutput {
            deleted,
            errors: Some(errors),
            ..DeleteObjectsOutput::default()
        }))
    }

    async fn list_objects(
        &self,
        req: S3Request<ListObjectsInput>,
    ) -> S3Result<S3Response<ListObjectsOutput>> {
        let input = req.input;
        let tree = self.tree(&input.bucket)?;
        let max = input.max_keys.unwrap_or(PAGE_SIZE).clamp(0, PAGE_SIZE);
        let (prefix, delimiter) = (
            input.prefix.clone().unwrap_or_default(),
            input.delimiter.clone(),
        );
        let (after, rows) = (
            input.marker.clone(),
            usize::try_from(max).unwrap_or_default(),
        );
        let page =
            blocking(move || list(&tree, &prefix, delimiter.as_deref(), after, rows)).await?;
        let spelling = Spelling::new(input.encoding_type.as_ref());
        let (contents, common_prefixes) = shown(&page, spelling)?;
        let spelled = |text: Option<String>| text.map(|text| spelling.of(&text));
        Ok(S3Response::new(ListObjectsOutput {
            name: Some(input.bucket),
            prefix: spelled(input.prefix),
            delimiter: spelled(input.delimiter),
            marker: spelled(input.marker),
            max_keys: Some(max),
            is_truncated: Some(page.next.is_some()),
            next_marker: spelled(page.next),
            contents: Some(contents),
            common_prefixes: Some(common_prefixes),
            encoding_type: spelling.told(),
            ..ListObjectsOutput::default()
        }))
    }

    async fn list_objects_v2(
        &self,
        req: S3Request<ListObjectsV2Input>,
    ) -> S3Result<S3Response<ListObjectsV2Output>> {
        let input = req.input;
        let tree = self.tree(&input.bucket)?;
        let max = input.max_keys.unwrap_or(PAGE_SIZE).clamp(0, PAGE_SIZE);
        let (prefix, delimiter) = (
            input.prefix.clone().unwrap_or_default(),
            input.delimiter.clone(),
        );
        let after = match &input.continuation_token {
            Some(token) => Some(decode_token(token)?),
            None => input.start_after.clone(),
        };
        let rows = usize::try_from(max).unwrap_or_default();
        let page =
            blocking(move || list(&tree, &prefix, delimiter.as_deref(), after, rows)).await?;
        let count = i32::try_from(page.objects.len() + page.folders.len())
            .map_err(S3Error::internal_error)?;
        let spelling = Spelling::new(input.encoding_type.as_ref());
        let (contents, common_prefixes) = shown(&page, spelling)?;
        let spelled = |text: Option<String>| text.map(|text| spelling.of(&text));
        Ok(S3Response::new(ListObjectsV2Output {
            name: Some(input.bucket),
            prefix: spelled(input.prefix),
            delimiter: spelled(input.delimiter),
            continuation_token: input.continuation_token,
            start_after: spelled(input.start_after),
            max_keys: Some(max),
            key_count: Some(count),
            is_truncated: Some(page.next.is_some()),
            // Not a key, so that nobody takes it for one.
            next_continuation_token: page.next.map(|next| URL_SAFE_NO_PAD.encode(next)),
            contents: Some(contents),
            common_prefixes: Some(common_prefixes),
            encoding_type: spelling.told(),
            ..ListObjectsV2Output::default()
        }))
    }
}
