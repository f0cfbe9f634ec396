//! Requests to the store, with the patience that a person at a terminal wants: what may pass is tried again a few times.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use stream_s3_core::units::Offset;
use stream_s3_store::{ErrorKind, Failure, Object, Page, Part, SharedStore, StoreError};

/// How often a request is made before the command gives up, and the pause after the first attempt, which doubles.
const ATTEMPTS: u32 = 4;
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// How long a store may be silent, before it answers and between two pieces of a body.
const SILENCE: Duration = Duration::from_secs(60);
/// Rows of one page of a listing, the most that a store gives.
pub(crate) const PAGE: usize = 1000;

/// Why a command cannot go on; the exit status is 2.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failed {
    /// A setting, a stream or a root that is not what the user thinks it is. A sentence that says what to do.
    #[error("{0}")]
    Usage(String),
    /// The store failed a request, after all attempts where another one made sense.
    #[error("{}", sentence(.0))]
    Store(#[from] StoreError),
    /// The store fell silent, or broke off in the middle of an object, on every attempt.
    #[error(
        "{doing} {key}: {reason}; try again, and look at the network and the store if it stays so"
    )]
    Broken {
        /// What was being done.
        doing: &'static str,
        /// The object, or the beginning of the keys listed.
        key: String,
        /// What happened.
        reason: String,
    },
    /// The report, or the records, could not be written.
    #[error("cannot write: {0}")]
    Output(std::io::Error),
    /// Records of the bucket cannot be read: what holds them is damaged or gone. The exit status is 1.
    #[error(
        "the records from offset {offset} on cannot be read from {key}: {why}; the {written} wanted ones before them are done, and those behind the damage begin at offset {next} (--from {next})"
    )]
    Damaged {
        /// First offset that cannot be read.
        offset: Offset,
        /// The object.
        key: String,
        /// What is wrong with it.
        why: String,
        /// Where the next records are that may be whole.
        next: Offset,
        /// Records that were dealt with before.
        written: u64,
    },
    /// The records cannot be published. A sentence that says what to do.
    #[error("{0}")]
    Broker(String),
}

impl Failed {
    /// Says how many records were dealt with before.
    pub(crate) fn behind(mut self, records: u64) -> Self {
        if let Self::Damaged { written, .. } = &mut self {
            *written = records;
        }
        self
    }
}

/// What failed, and what to do about it.
fn sentence(error: &StoreError) -> String {
    if let Failure::Setting(name) = error.failure {
        // The store speaks of settings; here they are options.
        let why = error.message.strip_prefix(name).unwrap_or(&error.message);
        return format!("--{}{why} (see --help)", name.replace('_', "-"));
    }
    let hint = match error.kind {
        ErrorKind::Transient => {
            "check that the endpoint is right and reachable from here, then try again"
        }
        ErrorKind::NotFound => "check --bucket, --endpoint and --prefix",
        ErrorKind::Invalid => {
            "check the credentials, what they may do, and the store options (see --help)"
        }
        ErrorKind::Corrupt => {
            "the bytes do not fit their checksum, so try again and distrust the object if it stays so"
        }
        ErrorKind::Conflict | ErrorKind::Closed => "try again",
    };
    format!("{}; {hint}", error.message)
}

/// A store to read from.
#[derive(Clone)]
pub(crate) struct Reader {
    store: SharedStore,
}

impl Reader {
    /// Reads from `store`.
    pub(crate) fn new(store: SharedStore) -> Self {
        Self { store }
    }

    /// One page of a listing.
    pub(crate) async fn list(
        &self,
        prefix: &str,
        from: Option<&str>,
        max: usize,
    ) -> Result<Page, Failed> {
        let mut patience = Patience::new();
        loop {
            match answered("list", prefix, self.store.list(prefix, from, max)).await {
                Ok(page) => return Ok(page),
                Err(failed) => patience.wait_or_give_up(failed).await?,
            }
        }
    }

    /// Whether there is an object of exactly this key. One listing.
    pub(crate) async fn exists(&self, key: &str) -> Result<bool, Failed> {
        let page = self.list(key, None, 1).await?;
        Ok(page.objects.first().is_some_and(|listed| listed.key == key))
    }

    /// Opens an object; its body may still break. `None` where there is none.
    pub(crate) async fn open(&self, key: &str, part: Part) -> Result<Option<Object>, Failed> {
        match answered("read", key, self.store.get(key, part)).await {
            Ok(object) => Ok(Some(object)),
            Err(Failed::Store(error)) if error.kind == ErrorKind::NotFound => Ok(None),
            Err(failed) => Err(failed),
        }
    }

    /// Reads an object, or a part of it, into memory, unless it is larger than `limit` bytes.
    pub(crate) async fn read(&self, key: &str, part: Part, limit: u64) -> Result<Read, Failed> {
        let mut patience = Patience::new();
        loop {
            match self.read_once(key, part.clone(), limit).await {
                Ok(found) => return Ok(found),
                Err(failed) => patience.wait_or_give_up(failed).await?,
            }
        }
    }

    async fn read_once(&self, key: &str, part: Part, limit: u64) -> Result<Read, Failed> {
        let Some(mut object) = self.open(key, part.clone()).await? else {
            return Ok(Read::Absent);
        };
        if part == Part::Whole && object.size > limit {
            return Ok(Read::TooLarge(object.size));
        }
        let mut bytes = BytesMut::new();
        while let Some(piece) = next_piece(key, &mut object).await? {
            bytes.extend_from_slice(&piece);
            if bytes.len() as u64 > limit {
                return Ok(Read::TooLarge(object.size));
            }
        }
        Ok(Read::Bytes(bytes.freeze()))
    }
}

/// What reading an object into memory came to.
pub(crate) enum Read {
    /// There is no such object.
    Absent,
    /// It has this many bytes, more than any object of its kind.
    TooLarge(u64),
    /// What was asked for.
    Bytes(Bytes),
}

/// The next piece of a body, `None` at its end.
pub(crate) async fn next_piece(key: &str, object: &mut Object) -> Result<Option<Bytes>, Failed> {
    let broken = |reason: String| Failed::Broken {
        doing: "read",
        key: key.to_owned(),
        reason,
    };
    match tokio::time::timeout(SILENCE, object.body.next()).await {
        Ok(None) => Ok(None),
        Ok(Some(Ok(piece))) => Ok(Some(piece)),
        Ok(Some(Err(error))) => Err(broken(format!("the store broke off: {error}"))),
        Err(_elapsed) => Err(broken(silence())),
    }
}

/// Waits for an answer, but not for ever.
async fn answered<T>(
    doing: &'static str,
    key: &str,
    call: impl Future<Output = stream_s3_store::Result<T>>,
) -> Result<T, Failed> {
    match tokio::time::timeout(SILENCE, call).await {
        Ok(answer) => answer.map_err(Failed::from),
        Err(_elapsed) => Err(Failed::Broken {
            doing,
            key: key.to_owned(),
            reason: silence(),
        }),
    }
}

fn silence() -> String {
    format!("the store sent nothing for {} s", SILENCE.as_secs())
}

/// Counts attempts of one piece of work.
pub(crate) struct Patience {
    left: u32,
    pause: Duration,
}

impl Patience {
    /// All attempts left.
    pub(crate) fn new() -> Self {
        Self {
            left: ATTEMPTS - 1,
            pause: FIRST_PAUSE,
        }
    }

    /// Pauses before another attempt, or gives the failure back where another one makes no sense.
    pub(crate) async fn wait_or_give_up(&mut self, failed: Failed) -> Result<(), Failed> {
        let passing = match &failed {
            Failed::Store(error) => error.kind == ErrorKind::Transient,
            Failed::Broken { .. } => true,
            Failed::Usage(_) | Failed::Output(_) | Failed::Damaged { .. } | Failed::Broker(_) => {
                false
            }
        };
        if !passing || self.left == 0 {
            return Err(failed);
        }
        self.left -= 1;
        tokio::time::sleep(self.pause).await;
        self.pause *= 2;
        Ok(())
    }
}
