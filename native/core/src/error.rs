//! What can go wrong, as data: bytes that do not decode, and transfers that failed.

use crate::units::Offset;

/// Bytes that are not what they claim to be. Nothing is wrong with this program: the object or file is damaged, or of
/// another version.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}, byte {at}: {problem}")]
pub struct FormatError {
    /// The thing that was being decoded, such as `root`.
    pub what: &'static str,
    /// Where in the input the trouble starts, in bytes from its beginning.
    pub at: u64,
    /// What is wrong there.
    pub problem: FormatProblem,
}

/// What is wrong at one place of an input.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FormatProblem {
    /// The input ends too early, or goes on after its end.
    #[error("expected {expected} bytes, got {got}")]
    Length {
        /// How long the whole input has to be, or has to be at least.
        expected: u64,
        /// How long it is.
        got: u64,
    },
    /// The input's first bytes name another format.
    #[error("wrong magic {0:02x?}")]
    Magic([u8; 4]),
    /// A version that this program does not know.
    #[error("unknown version {0}")]
    Version(u32),
    /// An enumerated field holds a value that means nothing.
    #[error("{field} has unknown value {value}")]
    UnknownValue {
        /// Name of the field.
        field: &'static str,
        /// What it holds.
        value: u64,
    },
    /// A field that has to be zero is not.
    #[error("{0} is not zero")]
    NotZero(&'static str),
    /// Offsets that have to ascend do not.
    #[error("offset {next} after {previous} does not ascend")]
    NotAscending {
        /// The smaller or equal one that came first.
        previous: u64,
        /// The one that should have been greater.
        next: u64,
    },
    /// Two fields that repeat each other, or bound each other, disagree.
    #[error("{0}")]
    Inconsistent(&'static str),
    /// A value that its field cannot hold.
    #[error("{field} is too large: {value}")]
    TooLarge {
        /// Name of the field.
        field: &'static str,
        /// What it should have held.
        value: u128,
    },
    /// The checksum differs from the bytes'.
    #[error("checksum is {computed:08x}, should be {stored:08x}")]
    Checksum {
        /// As the input says.
        stored: u32,
        /// As the input is.
        computed: u32,
    },
    /// Text that holds characters or a length that are not allowed there.
    #[error("invalid {0}")]
    InvalidText(&'static str),
}

impl FormatError {
    /// `problem` at byte `at` of a `what`.
    #[must_use]
    pub fn new(what: &'static str, at: u64, problem: FormatProblem) -> Self {
        Self { what, at, problem }
    }
}

/// How long to wait before the next attempt, in kind. See [`crate::decisions::retry::retry_delay`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorClass {
    /// The same request may succeed at once.
    Transient,
    /// The store asked for less: the same request may succeed later. Handled as [`Transient`](Self::Transient) everywhere but
    /// in the length of the delay.
    Throttled,
    /// The same request will fail until something is changed; still never given up.
    Permanent,
}

/// Why an attempt to transfer a fragment, or to store a group, failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TransferError {
    /// The store answered with this HTTP status.
    #[error("the store answered with HTTP status {0}")]
    Http(u16),
    /// No answer in time; 400 `RequestTimeout` is this too.
    #[error("no answer in time")]
    Timeout,
    /// No connection, or it broke.
    #[error("no connection to the store, or it broke")]
    Connection,
    /// The store asked to slow down.
    #[error("the store asked to slow down")]
    Throttled,
    /// The bytes that arrived are not the bytes that were written.
    #[error("the checksum of the stored bytes differs from that of the written ones")]
    ChecksumMismatch,
    /// A chunk's data part no longer fits the checksum in its header.
    #[error("chunk {0} is corrupt")]
    CorruptChunk(Offset),
    /// A segment file could not be opened.
    #[error("{file} cannot be opened: {posix}")]
    OpenFailed {
        /// Its path.
        file: String,
        /// The POSIX name of the error, such as `enoent`.
        posix: String,
    },
    /// A bug: the attempt panicked.
    #[error("panic: {0}")]
    Panic(String),
    /// Somebody no longer wanted it.
    #[error("cancelled")]
    Cancelled,
    /// This machine's clock and the store's are too far apart.
    #[error("this machine's clock and the store's are too far apart")]
    ClockSkew,
    /// The credentials have expired.
    #[error("the credentials have expired")]
    ExpiredToken,
    /// A concurrent conditional write won (409).
    #[error("a concurrent conditional write won")]
    WriteConflict,
    /// Anything that has no name here.
    #[error("unclassified failure")]
    Other,
}

impl TransferError {
    /// Sorts the error by what to do next. Constant time.
    #[must_use]
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Throttled | Self::Http(429) => ErrorClass::Throttled,
            Self::Http(408 | 500..=599)
            | Self::Timeout
            | Self::Connection
            | Self::ClockSkew
            | Self::ExpiredToken
            | Self::WriteConflict => ErrorClass::Transient,
            Self::Http(_)
            | Self::ChecksumMismatch
            | Self::CorruptChunk(_)
            | Self::OpenFailed { .. }
            | Self::Panic(_)
            | Self::Cancelled
            | Self::Other => ErrorClass::Permanent,
        }
    }

    /// Whether the same request may succeed without anybody changing anything.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self.class() {
            ErrorClass::Transient | ErrorClass::Throttled => true,
            ErrorClass::Permanent => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transient_errors_are_those_that_pass_by_themselves() {
        for status in [408, 429, 500, 502, 503, 504, 599] {
            assert!(TransferError::Http(status).is_transient(), "{status}");
        }
        for status in [301, 400, 403, 404, 409, 412, 416, 600] {
            assert!(!TransferError::Http(status).is_transient(), "{status}");
        }
        assert!(TransferError::Timeout.is_transient());
        assert!(TransferError::Connection.is_transient());
        assert!(TransferError::Throttled.is_transient());
        assert!(TransferError::ClockSkew.is_transient());
        assert!(TransferError::ExpiredToken.is_transient());
        assert!(TransferError::WriteConflict.is_transient());
        assert!(!TransferError::ChecksumMismatch.is_transient());
        assert!(!TransferError::CorruptChunk(Offset(3)).is_transient());
        assert!(!TransferError::Panic("x".into()).is_transient());
        assert!(!TransferError::Cancelled.is_transient());
        assert!(!TransferError::Other.is_transient());
    }

    #[test]
    fn throttling_is_told_apart_from_other_transient_errors() {
        assert_eq!(TransferError::Throttled.class(), ErrorClass::Throttled);
        assert_eq!(TransferError::Http(429).class(), ErrorClass::Throttled);
        assert_eq!(TransferError::Http(503).class(), ErrorClass::Transient);
    }

    #[test]
    fn a_format_error_says_what_and_where() {
        let error = FormatError::new("root", 4, FormatProblem::Version(7));
        assert_eq!(error.to_string(), "root, byte 4: unknown version 7");
    }
}
