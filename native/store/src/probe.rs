//! Finds out whether a place can be used, by using it.

use std::future::Future;

use bytes::Bytes;
use futures::StreamExt;
use tokio::sync::Mutex;

use crate::error::{ErrorKind, Failure, Op, StoreError};
use crate::{Capabilities, ObjectStore, Part, Precondition, PutOptions, Result};

/// What the probe objects hold.
const CONTENT: &[u8] = b"stream-s3 probe: may be deleted\n";

/// Names the objects of one store's probes, which take turns. The same for each of them, so that a store that lets nobody delete does not fill up
/// with them, and so that the same complaint is the same sentence; another for each node, so that they do not probe each other's.
#[derive(Debug)]
pub(crate) struct Name {
    id: u64,
    turn: Mutex<()>,
}

impl Name {
    pub(crate) fn new() -> Self {
        Self {
            id: rand::random(),
            turn: Mutex::default(),
        }
    }
}

/// Lists, puts, gets, overwrites conditionally, sends a wrong checksum, and deletes what it stored, whatever came out. `put` stores
/// an object and reports what the store itself said, without comparing its echo. Waits while another probe of the same name goes on.
pub(crate) async fn run<S, P, F>(
    store: &S,
    prefix: &str,
    name: &Name,
    put: P,
) -> Result<Capabilities>
where
    S: ObjectStore + ?Sized,
    P: Fn(String, Bytes, PutOptions) -> F,
    F: Future<Output = Result<()>> + Send,
{
    let _turn = name.turn.lock().await;
    let found = once(store, prefix, name.id, &put).await?;
    if found.conditional_writes {
        return Ok(found);
    }
    // An earlier probe may have been given up while its deletion was on its way, and that may just have taken away what was to be found. This name nobody
    // else knows.
    once(store, prefix, rand::random(), &put).await
}

async fn once<S, P, F>(store: &S, prefix: &str, id: u64, put: &P) -> Result<Capabilities>
where
    S: ObjectStore + ?Sized,
    P: Fn(String, Bytes, PutOptions) -> F,
    F: Future<Output = Result<()>> + Send,
{
    store
        .list(prefix, None, 1)
        .await
        .map_err(|error| error.during(Op::Probe))?;
    let base = prefix.trim_end_matches('/');
    let separator = if base.is_empty() { "" } else { "/" };
    let key = format!("{base}{separator}probe-{id:016x}");
    let keys = vec![key.clone(), format!("{key}-checksum")];
    let tried = attempt(store, &keys[0], &keys[1], put).await;
    let failed = store.delete(&keys).await;
    let capabilities = tried.map_err(|error| error.during(Op::Probe))?;
    if let Some((_, error)) = failed
        .map_err(|error| error.during(Op::Probe))?
        .into_iter()
        .next()
    {
        return Err(error.during(Op::Probe));
    }
    Ok(capabilities)
}

async fn attempt<S, P, F>(store: &S, key: &str, other: &str, put: &P) -> Result<Capabilities>
where
    S: ObjectStore + ?Sized,
    P: Fn(String, Bytes, PutOptions) -> F,
    F: Future<Output = Result<()>> + Send,
{
    let content = Bytes::from_static(CONTENT);
    let crc32 = crc32fast::hash(CONTENT);
    let options = |crc32, precondition| PutOptions {
        crc32: Some(crc32),
        precondition,
    };
    put(
        key.to_owned(),
        content.clone(),
        options(crc32, Precondition::None),
    )
    .await?;
    read_back(store, key).await?;
    // A store that does not know these headers overwrites; one that refuses them by another error has no use for us either.
    let absent = put(
        key.to_owned(),
        content.clone(),
        options(crc32, Precondition::Absent),
    )
    .await;
    let unlike = Precondition::Matches("\"00000000000000000000000000000000\"".to_owned());
    let matches = put(key.to_owned(), content.clone(), options(crc32, unlike)).await;
    let conditional_writes = honoured(absent)? && honoured(matches)?;
    let wrong = put(
        other.to_owned(),
        content,
        options(!crc32, Precondition::None),
    )
    .await;
    let verifies_checksums = match wrong {
        Ok(()) => false,
        Err(error) if error.failure == Failure::ChecksumMismatch => true,
        // Some stores say InvalidRequest or InvalidArgument: refused is refused.
        Err(error) if error.kind == ErrorKind::Invalid => true,
        Err(error) => return Err(error),
    };
    Ok(Capabilities {
        conditional_writes,
        verifies_checksums,
    })
}

fn honoured(answer: Result<()>) -> Result<bool> {
    match answer {
        Ok(()) => Ok(false),
        Err(error) if error.kind == ErrorKind::Conflict => Ok(true),
        Err(error) if matches!(error.failure, Failure::Http(400 | 501)) => Ok(false),
        Err(error) => Err(error),
    }
}

async fn read_back<S: ObjectStore + ?Sized>(store: &S, key: &str) -> Result<()> {
    let object = store.get(key, Part::Whole).await?;
    let mut body = object.body;
    let mut read = Vec::new();
    while let Some(bytes) = body.next().await {
        let bytes = bytes.map_err(|error| {
            let message = format!("get {key:?}: the answer broke off: {error}");
            StoreError::new(Op::Get, Failure::Connection, message).with_source(error)
        })?;
        read.extend_from_slice(&bytes);
    }
    if read != CONTENT {
        let message = format!("get {key:?}: the store gave back other bytes than it was given");
        return Err(StoreError::new(Op::Get, Failure::ChecksumMismatch, message));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::Body;
    use crate::fs::FsStore;

    /// A request of a probe that was given up takes effect in the middle of the next one.
    #[tokio::test]
    async fn what_an_earlier_probe_still_deletes_proves_nothing() {
        let dir = tempfile::tempdir().expect("a folder");
        let store = FsStore::open(dir.path()).expect("a store");
        let late = AtomicUsize::new(1);
        let put = |key: String, body: Bytes, options: PutOptions| {
            let (store, late) = (&store, &late);
            async move {
                if options.precondition == Precondition::Absent
                    && late.swap(0, Ordering::Relaxed) == 1
                {
                    store.delete(std::slice::from_ref(&key)).await?;
                }
                store
                    .put(&key, Body::Bytes(body), options)
                    .await
                    .map(|_| ())
            }
        };
        let found = run(&store, "p", &Name::new(), put).await.expect("usable");
        assert_eq!(late.load(Ordering::Relaxed), 0);
        assert!(found.conditional_writes);
        let left = store.list("", None, 10).await.expect("a page");
        assert!(left.objects.is_empty());
    }

    #[tokio::test]
    async fn a_store_that_never_minds_a_condition_is_found_out() {
        let dir = tempfile::tempdir().expect("a folder");
        let store = FsStore::open(dir.path()).expect("a store");
        let put = |key: String, body: Bytes, options: PutOptions| {
            let store = &store;
            async move {
                let options = PutOptions {
                    precondition: Precondition::None,
                    ..options
                };
                store
                    .put(&key, Body::Bytes(body), options)
                    .await
                    .map(|_| ())
            }
        };
        let found = run(&store, "p", &Name::new(), put).await.expect("usable");
        assert!(!found.conditional_writes && found.verifies_checksums);
        assert_eq!(
            store
                .list("", None, 10)
                .await
                .map(|page| page.objects.len())
                .ok(),
            Some(0)
        );
    }
}
