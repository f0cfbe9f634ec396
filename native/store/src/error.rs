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

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}
