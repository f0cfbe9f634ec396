//! What can go wrong with a store, sorted by what the caller should do about it.

use std::fmt;

/// What a caller should do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// Try again: the same call may succeed.
    Transient,
    /// A precondition was not met: somebody else's object is there.
    Conflict,
    /// No such object or bucket.
    NotFound,
    /// The bytes are not what their checksum says.
    Corrupt,
    /// The store or runtime is being stopped.
    Closed,
    /// Refused for what it is (permission, malformed request, bad setting): an operator has to act.
    Invalid,
}

impl ErrorKind {
    /// The name used in terms and logs: lower case, underscores.
    pub fn name(self) -> &'static str {
        match self {
            Self::Transient => "transient",
            Self::Conflict => "conflict",
            Self::NotFound => "not_found",
            Self::Corrupt => "corrupt",
            Self::Closed => "closed",
            Self::Invalid => "invalid",
        }
    }
}

/// Which call failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// Opening the store from its settings.
    Open,
    /// Storing an object.
    Put,
    /// Reading an object.
    Get,
    /// Deleting objects.
    Delete,
    /// Listing keys.
    List,
    /// Probing the bucket.
    Probe,
}

impl Op {
    /// The name used in terms, metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Put => "put",
            Self::Get => "get",
            Self::Delete => "delete",
            Self::List => "list",
            Self::Probe => "probe",
        }
    }

    /// The IAM action a policy has to allow for this call.
    pub(crate) fn iam_action(self) -> &'static str {
        match self {
            Self::Put => "s3:PutObject",
            Self::Get => "s3:GetObject",
            Self::Delete => "s3:DeleteObject",
            Self::List | Self::Open | Self::Probe => "s3:ListBucket",
        }
    }
}

/// What happened, as precisely as the wire tells. The names are those of `Reason` in the term contract.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// The store answered with this HTTP status.
    Http(u16),
    /// No answer in time.
    Timeout,
    /// No connection, or it broke.
    Connection,
    /// The store asked to slow down.
    Throttled,
    /// The checksum did not fit: the store refused the bytes, or its echo differs.
    ChecksumMismatch,
    /// This machine's clock and the store's are too far apart.
    ClockSkew,
    /// The credentials have expired.
    ExpiredToken,
    /// A concurrent conditional write won (409).
    WriteConflict,
    /// The body that was being sent failed or was cut off; the source says why.
    Body,
    /// A local file operation failed (`fs` store), with the POSIX name of the error, such as `eacces`.
    File(String, String),
    /// A setting cannot be used; names the key.
    Setting(&'static str),
    /// The store is being stopped.
    Closed,
}

impl Failure {
    /// What a caller should do about it, where nothing more is known.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Http(404) => ErrorKind::NotFound,
            Self::Http(412) => ErrorKind::Conflict,
            Self::Http(408 | 429 | 500..=599) => ErrorKind::Transient,
            Self::Http(_) | Self::Body | Self::Setting(_) => ErrorKind::Invalid,
            Self::Timeout
            | Self::Connection
            | Self::Throttled
            | Self::ClockSkew
            | Self::ExpiredToken
            | Self::WriteConflict => ErrorKind::Transient,
            Self::ChecksumMismatch => ErrorKind::Corrupt,
            Self::File(_, posix) => file_kind(posix),
            Self::Closed => ErrorKind::Closed,
        }
    }
}

/// A full disk, a lost mount and a scarce descriptor pass; a permission does not.
fn file_kind(posix: &str) -> ErrorKind {
    match posix {
        "enoent" | "enotdir" => ErrorKind::NotFound,
        "enospc" | "edquot" | "eio" | "estale" | "eagain" | "eintr" | "emfile" | "enfile"
        | "enomem" | "ebusy" | "etimedout" | "enolck" => ErrorKind::Transient,
        _ => ErrorKind::Invalid,
    }
}

/// A failed call.
#[derive(Debug, thiserror::Error)]
pub struct StoreError {
    /// What to do.
    pub kind: ErrorKind,
    /// Which call.
    pub op: Op,
    /// What happened.
    pub failure: Failure,
    /// One sentence for a person: what, where (bucket, key, endpoint) and, where known, the store's own error code and message. No secrets.
    pub message: String,
    /// The cause below.
    #[source]
    pub source: Option<Box<dyn std::error::Error + Send + Sync + 'static>>,
}

impl StoreError {
    /// An error whose kind follows from the failure. `message` is one sentence for a person, without secrets.
    pub fn new(op: Op, failure: Failure, message: impl Into<String>) -> Self {
        Self {
            kind: failure.kind(),
            op,
            failure,
            message: message.into(),
            source: None,
        }
    }

    /// The same error with another kind, where the caller knows more than the failure tells.
    #[must_use]
    pub fn with_kind(mut self, kind: ErrorKind) -> Self {
        self.kind = kind;
        self
    }

    /// The same error with a cause below it.
    #[must_use]
    pub fn with_source(
        mut self,
        source: impl Into<Box<dyn std::error::Error + Send + Sync + 'static>>,
    ) -> Self {
        self.source = Some(source.into());
        self
    }

    /// The same error without its cause, for another key of the same call.
    pub(crate) fn copy(&self) -> Self {
        Self {
            kind: self.kind,
            op: self.op,
            failure: self.failure.clone(),
            message: self.message.clone(),
            source: None,
        }
    }

    /// The same error, reported as a failure of another call: a probe consists of other calls.
    #[must_use]
    pub(crate) fn during(mut self, op: Op) -> Self {
        self.op = op;
        self
    }

    /// The IAM action on the encryption key that this refusal may be about.
    pub(crate) fn missing_kms_action(&self) -> Option<&'static str> {
        if self.failure != Failure::Http(403) || !self.message.contains(self.op.iam_action()) {
            return None;
        }
        match self.op {
            Op::Put => Some("kms:GenerateDataKey"),
            Op::Get => Some("kms:Decrypt"),
            Op::Open | Op::Delete | Op::List | Op::Probe => None,
        }
    }

    /// A setting that cannot be used. `key` is its name in the configuration.
    pub fn setting(key: &'static str, message: impl fmt::Display) -> Self {
        Self::new(Op::Open, Failure::Setting(key), format!("{key}: {message}"))
    }

    /// A failed operation on a local file.
    pub fn file(op: Op, path: &std::path::Path, doing: &str, error: std::io::Error) -> Self {
        let posix = posix_name(&error);
        let message = format!("cannot {doing} {}: {posix} ({error})", path.display());
        Self::new(
            op,
            Failure::File(path.display().to_string(), posix.to_owned()),
            message,
        )
        .with_source(error)
    }

    /// An error answer of an S3 server.
    pub(crate) fn answer(op: Op, place: &str, answer: &Answer) -> Self {
        let failure = answer.failure();
        let mut message = format!("{} {place} was answered with {}", op.name(), answer.status);
        if let Some(code) = &answer.code {
            message.push_str(&format!(" {}", printable(code)));
        }
        if let Some(text) = &answer.message {
            message.push_str(&format!(": {}", printable(text)));
        }
        if let Some(hint) = answer.hint(op) {
            message.push_str(&format!(" ({hint})"));
        }
        Self::new(op, failure, message).with_kind(answer.kind())
    }
}

/// An error answer of an S3 server, stripped of everything that belongs to a client library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    /// HTTP status; 200 where the error came in the body of a success.
    pub(crate) status: u16,
    /// The code of the error document, such as `SlowDown`.
    pub(crate) code: Option<String>,
    /// Its message.
    pub(crate) message: Option<String>,
    /// Where the bucket is, if the store says so.
    pub(crate) region: Option<String>,
    /// The store's own clock, if it says so.
    pub(crate) time: Option<String>,
}

impl Answer {
    /// Reads an `<Error>` document. `None` where the body is something else.
    pub(crate) fn parse(status: u16, body: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(body).ok()?.trim_start();
        let text = match text.strip_prefix("<?") {
            Some(declaration) => declaration.split_once("?>")?.1.trim_start(),
            None => text,
        };
        // The root, not a row of something else: the answer to a batch delete has elements of the same name.
        if !text.starts_with("<Error>") && !text.starts_with("<Error ") {
            return None;
        }
        Some(Self {
            status,
            code: element(text, "Code"),
            message: element(text, "Message"),
            region: element(text, "Region"),
            time: element(text, "ServerTime"),
        })
    }

    /// The one classifier: the error code tells more than the status, where there is one.
    pub(crate) fn failure(&self) -> Failure {
        match self.code.as_deref() {
            Some("RequestTimeout") => Failure::Timeout,
            Some(
                "SlowDown"
                | "SlowDownRead"
                | "SlowDownWrite"
                | "Throttling"
                | "ThrottlingException"
                | "ThrottledException"
                | "RequestThrottled"
                | "RequestThrottledException"
                | "RequestLimitExceeded"
                | "BandwidthLimitExceeded"
                | "TooManyRequests"
                | "TooManyRequestsException",
            ) => Failure::Throttled,
            Some("RequestTimeTooSkewed" | "RequestInTheFuture") => Failure::ClockSkew,
            Some("ExpiredToken" | "ExpiredTokenException" | "TokenRefreshRequired") => {
                Failure::ExpiredToken
            }
            Some("BadDigest" | "XAmzContentChecksumMismatch" | "XAmzContentSHA256Mismatch") => {
                Failure::ChecksumMismatch
            }
            Some("ConditionalRequestConflict" | "OperationAborted") => Failure::WriteConflict,
            Some("InternalError") => Failure::Http(500),
            Some("ServiceUnavailable" | "ServerBusy") => Failure::Http(503),
            Some("AccessDenied" | "SignatureDoesNotMatch" | "InvalidAccessKeyId")
                if self.status < 300 =>
            {
                Failure::Http(403)
            }
            Some("NoSuchBucket" | "NoSuchKey") if self.status < 300 => Failure::Http(404),
            Some("PreconditionFailed") if self.status < 300 => Failure::Http(412),
            Some(_) | None => match self.status {
                429 => Failure::Throttled,
                // A success that carries an error nobody knows: the server failed in the middle.
                200..=299 => Failure::Http(500),
                status => Failure::Http(status),
            },
        }
    }

    fn kind(&self) -> ErrorKind {
        self.failure().kind()
    }

    fn hint(&self, op: Op) -> Option<String> {
        let hint = match self.code.as_deref() {
            Some("SignatureDoesNotMatch") => {
                "secret_key does not belong to access_key_id".to_owned()
            }
            Some("InvalidAccessKeyId" | "NotSignedUp") => {
                "the store does not know this access_key_id".to_owned()
            }
            Some("InvalidToken") => "session_token does not belong to access_key_id".to_owned(),
            Some("NoSuchBucket") => "create the bucket, or correct the setting bucket".to_owned(),
            Some(
                "PermanentRedirect"
                | "AuthorizationHeaderMalformed"
                | "IllegalLocationConstraintException",
            ) => match &self.region {
                Some(region) => format!("set region to {}", printable(region)),
                None => "the setting region is not the bucket's region".to_owned(),
            },
            Some("RequestTimeTooSkewed" | "RequestInTheFuture") => match &self.time {
                Some(time) => format!(
                    "set this machine's clock: at the store it was {}",
                    printable(time)
                ),
                None => "this machine's clock and the store's differ too much".to_owned(),
            },
            Some("ExpiredToken" | "ExpiredTokenException") => {
                "the credentials have expired".to_owned()
            }
            Some("AccessDenied" | "Forbidden" | "AllAccessDisabled") => {
                format!("the credentials need the IAM action {}", op.iam_action())
            }
            Some(_) => return None,
            None if self.status == 403 => {
                format!("the credentials need the IAM action {}", op.iam_action())
            }
            None if self.status == 407 => {
                "put the user and password that the proxy wants into proxy".to_owned()
            }
            None => return None,
        };
        Some(hint)
    }
}

/// The text of the first element `name`, with the five XML entities resolved.
fn element(xml: &str, name: &str) -> Option<String> {
    let start = xml.find(&format!("<{name}>"))? + name.len() + 2;
    let len = xml[start..].find(&format!("</{name}>"))?;
    let text = &xml[start..start + len];
    Some(
        text.replace("&lt;", "<")
            .replace("&gt;", ">")
            .replace("&quot;", "\"")
            .replace("&apos;", "'")
            .replace("&amp;", "&"),
    )
}

/// What a store says, made fit for one line of a log.
fn printable(text: &str) -> String {
    const LONGEST: usize = 300;
    let mut line: String = text
        .chars()
        .take(LONGEST)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    if text.chars().nth(LONGEST).is_some() {
        line.push_str("...");
    }
    line
}

/// The causes of an error in one line, each said once: libraries like to repeat the text of the error below.
pub(crate) fn chain_text(error: &(dyn std::error::Error + 'static)) -> String {
    let mut line = String::new();
    let mut next = Some(error);
    while let Some(error) = next {
        let text = printable(&error.to_string());
        if !text.is_empty() && !line.contains(&text) {
            if !line.is_empty() {
                line.push_str(": ");
            }
            line.push_str(&text);
        }
        next = error.source();
    }
    line
}

/// The POSIX name of an error of the operating system in lower case, as Erlang's `file` module has it: `eacces`. `eio` where the
/// error did not come from the operating system.
pub fn posix_name(error: &std::io::Error) -> &'static str {
    use std::io::ErrorKind as Io;
    let Some(code) = error.raw_os_error() else {
        let names = [
            (Io::NotFound, "enoent"),
            (Io::PermissionDenied, "eacces"),
            (Io::AlreadyExists, "eexist"),
            (Io::TimedOut, "etimedout"),
            (Io::Interrupted, "eintr"),
        ];
        let name = names.iter().find(|(kind, _)| *kind == error.kind());
        return name.map_or("eio", |(_, name)| name);
    };
    match code {
        libc::EPERM => "eperm",
        libc::ENOENT => "enoent",
        libc::EINTR => "eintr",
        libc::EIO => "eio",
        libc::ENXIO => "enxio",
        libc::EBADF => "ebadf",
        libc::EAGAIN => "eagain",
        libc::ENOMEM => "enomem",
        libc::EACCES => "eacces",
        libc::EBUSY => "ebusy",
        libc::EEXIST => "eexist",
        libc::EXDEV => "exdev",
        libc::ENODEV => "enodev",
        libc::ENOTDIR => "enotdir",
        libc::EISDIR => "eisdir",
        libc::EINVAL => "einval",
        libc::ENFILE => "enfile",
        libc::EMFILE => "emfile",
        libc::ETXTBSY => "etxtbsy",
        libc::EFBIG => "efbig",
        libc::ENOSPC => "enospc",
        libc::ESPIPE => "espipe",
        libc::EROFS => "erofs",
        libc::EMLINK => "emlink",
        libc::EPIPE => "epipe",
        libc::ENAMETOOLONG => "enametoolong",
        libc::ENOLCK => "enolck",
        libc::ENOSYS => "enosys",
        libc::ENOTEMPTY => "enotempty",
        libc::ELOOP => "eloop",
        libc::EOVERFLOW => "eoverflow",
        libc::EOPNOTSUPP => "eopnotsupp",
        libc::ETIMEDOUT => "etimedout",
        libc::ESTALE => "estale",
        libc::EDQUOT => "edquot",
        _ => "eio",
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: u16, code: &str) -> Failure {
        Answer {
            status,
            code: Some(code.to_owned()),
            message: None,
            region: None,
            time: None,
        }
        .failure()
    }

    #[test]
    fn error_codes_decide_before_the_status_does() {
        assert_eq!(answer(400, "RequestTimeout"), Failure::Timeout);
        assert_eq!(answer(503, "SlowDown"), Failure::Throttled);
        assert_eq!(answer(403, "RequestTimeTooSkewed"), Failure::ClockSkew);
        assert_eq!(answer(400, "ExpiredToken"), Failure::ExpiredToken);
        assert_eq!(answer(400, "BadDigest"), Failure::ChecksumMismatch);
        assert_eq!(
            answer(409, "ConditionalRequestConflict"),
            Failure::WriteConflict
        );
        assert_eq!(answer(403, "AccessDenied"), Failure::Http(403));
        assert_eq!(answer(400, "InvalidArgument"), Failure::Http(400));
        assert_eq!(answer(429, "Whatever"), Failure::Throttled);
    }

    #[test]
    fn an_error_inside_a_success_is_never_a_success() {
        assert_eq!(answer(200, "InternalError"), Failure::Http(500));
        assert_eq!(answer(200, "SlowDown"), Failure::Throttled);
        assert_eq!(answer(200, "AccessDenied"), Failure::Http(403));
        assert_eq!(answer(200, "SomethingNew"), Failure::Http(500));
    }

    #[test]
    fn plain_client_errors_are_not_transient() {
        for status in [400, 401, 403, 405, 409, 411, 413, 416] {
            assert_eq!(Failure::Http(status).kind(), ErrorKind::Invalid, "{status}");
        }
        for status in [408, 429, 500, 502, 503, 504, 599] {
            assert_eq!(
                Failure::Http(status).kind(),
                ErrorKind::Transient,
                "{status}"
            );
        }
    }

    #[test]
    fn an_error_document_is_read_with_its_entities() {
        let body = b"<?xml version=\"1.0\"?>\n<Error><Code>Odd</Code><Message>a &lt;b&gt; &amp;amp; c</Message></Error>";
        let answer = Answer::parse(200, body).expect("an error document");
        assert_eq!(answer.code.as_deref(), Some("Odd"));
        assert_eq!(answer.message.as_deref(), Some("a <b> &amp; c"));
        assert_eq!(Answer::parse(200, b"<ListBucketResult/>"), None);
        assert_eq!(
            Answer::parse(
                200,
                b"<DeleteResult><Error><Code>AccessDenied</Code></Error></DeleteResult>"
            ),
            None
        );
        assert_eq!(Answer::parse(200, b""), None);
    }

    #[test]
    fn what_a_store_says_stays_on_one_line_and_is_cut_off() {
        let said = Answer {
            status: 500,
            code: None,
            message: Some("a\nb".to_owned() + &"x".repeat(1000)),
            region: None,
            time: None,
        };
        let error = StoreError::answer(Op::Put, "s3://b/k", &said);
        assert!(error.message.contains("a b"));
        assert!(!error.message.contains('\n'));
        assert!(error.message.len() < 400);
    }
}
