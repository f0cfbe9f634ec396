//! Objects of history segments: put, and compared with what is there. The payload is whatever memory its owner lends; nothing here copies it.

use std::ops::Range;

use bytes::Bytes;
use stream_s3_core::history::{Existing, decode, encode_header, encoded_len, judge_existing};
use stream_s3_core::key::{self, RunId};
use stream_s3_store::{
    Body, ErrorKind, Failure, Op, Part, Precondition, PutOptions, Result, StoreError,
};

use crate::executor::Executor;
use crate::store::{Store, collect_sized};

/// What is handed to the connection at a time: a slice of the payload, not a copy.
const PIECE: usize = 256 << 10;

/// A payload that somebody lends. It is let go of as soon as the request that it is for has ended.
pub type Payload = Bytes;

/// What came of a put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HistoryPut {
    /// Stored.
    Stored {
        /// CRC-32/IEEE of the payload.
        crc: u32,
        /// Length of the object in bytes.
        size: u64,
    },
    /// A create-only put has found an object.
    Exists {
        /// CRC-32/IEEE of the payload.
        crc: u32,
        /// Its length in bytes.
        payload_len: u64,
    },
    /// A replacing put has found another object, or none.
    Changed,
}

/// What lies under the key of a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HistoryObject {
    /// The same content.
    Same {
        /// Length of the object in bytes.
        size: u64,
    },
    /// Something else.
    Other {
        /// Its entity tag.
        etag: String,
    },
    /// Nothing.
    Vanished,
}

impl Store {
    /// Stores a segment: one request, with a checksum. Two passes over the payload, both on reader threads or by the connection; copies none
    /// of it. `replaces`: the entity tag of the object that is to be replaced; otherwise the object must not be there.
    ///
    /// # Errors
    /// As [`stream_s3_store::ObjectStore::put`].
    pub async fn put_history(
        &self,
        executor: &Executor,
        run: &RunId,
        seq: u64,
        payload: Payload,
        replaces: Option<String>,
    ) -> Result<HistoryPut> {
        let payload_len = payload.len() as u64;
        let header_of = run.clone();
        let bytes = payload.clone();
        let (header, crc, object_crc) = executor
            .read(move || {
                let mut of_payload = crc32fast::Hasher::new();
                of_payload.update(&bytes);
                let crc = of_payload.clone().finalize();
                let header = encode_header(&header_of, seq, payload_len, crc);
                let mut of_object = crc32fast::Hasher::new();
                of_object.update(&header);
                of_object.combine(&of_payload);
                (header, crc, of_object.finalize())
            })
            .await
            .map_err(|text| failed(Op::Put, format!("the segment cannot be encoded: {text}")))?;
        let size = encoded_len(run, payload_len);
        let creates = replaces.is_none();
        let options = PutOptions {
            crc32: Some(object_crc),
            precondition: replaces.map_or(Precondition::Absent, Precondition::Matches),
        };
        let body = Body::Stream {
            len: size,
            stream: Box::pin(futures::stream::iter(
                std::iter::once(Bytes::from(header))
                    .chain(pieces(payload))
                    .map(Ok),
            )),
        };
        let key = key::history_segment(self.prefix(), run, seq);
        match self.objects().put(&key, body, options).await {
            Ok(_) => Ok(HistoryPut::Stored { crc, size }),
            Err(error) => match error.kind {
                ErrorKind::Conflict if creates => Ok(HistoryPut::Exists { crc, payload_len }),
                ErrorKind::Conflict | ErrorKind::NotFound if !creates => Ok(HistoryPut::Changed),
                ErrorKind::Conflict
                | ErrorKind::Transient
                | ErrorKind::NotFound
                | ErrorKind::Corrupt
                | ErrorKind::Closed
                | ErrorKind::Invalid => Err(error),
            },
        }
    }

    /// Compares what lies under the key of a segment with a payload of this checksum and length. One request; the object is held in memory only where
    /// it is as long as it should be, and decoded on a reader thread.
    ///
    /// # Errors
    /// As [`stream_s3_store::ObjectStore::get`]; `Invalid` where the store gives an object that has to be replaced no entity tag.
    pub async fn examine_history(
        &self,
        executor: &Executor,
        run: &RunId,
        seq: u64,
        crc: u32,
        payload_len: u64,
    ) -> Result<HistoryObject> {
        let key = key::history_segment(self.prefix(), run, seq);
        let object = match self.objects().get(&key, Part::Whole).await {
            Ok(object) => object,
            Err(error) if error.kind == ErrorKind::NotFound => return Ok(HistoryObject::Vanished),
            Err(error) => return Err(error),
        };
        let size = object.size;
        let verdict = if size == encoded_len(run, payload_len) {
            let bytes = collect_sized(&key, object.body, size).await?;
            let run = run.clone();
            executor
                .read(move || judge_existing(&bytes, &run, seq, crc))
                .await
                .map_err(|text| failed(Op::Get, format!("{key} cannot be decoded: {text}")))?
        } else {
            Existing::Replace
        };
        match (verdict, object.etag) {
            (Existing::AlreadyPresent { stored_size }, _) => {
                Ok(HistoryObject::Same { size: stored_size })
            }
            (Existing::Replace, Some(etag)) => Ok(HistoryObject::Other { etag }),
            (Existing::Replace, None) => Err(StoreError::new(
                Op::Get,
                Failure::Body,
                format!(
                    "{key}: is not this segment, and without an entity tag it cannot be replaced safely"
                ),
            )),
        }
    }

    /// Reads a segment's payload. One request; holds the object in memory once, and decodes it on a reader thread.
    ///
    /// # Errors
    /// As [`stream_s3_store::ObjectStore::get`]; `Corrupt` where the object is not this segment.
    pub async fn get_history(&self, executor: &Executor, run: &RunId, seq: u64) -> Result<Bytes> {
        let key = key::history_segment(self.prefix(), run, seq);
        let object = self.objects().get(&key, Part::Whole).await?;
        let bytes = collect_sized(&key, object.body, object.size).await?;
        let of = run.clone();
        let decoded = executor
            .read(move || match decode(&bytes) {
                Ok(segment) if segment.run == of && segment.seq == seq => {
                    Ok(bytes.slice_ref(segment.payload))
                }
                Ok(segment) => Err(format!("is segment {} of {}", segment.seq, segment.run)),
                Err(error) => Err(error.to_string()),
            })
            .await;
        let corrupt =
            |text| StoreError::new(Op::Get, Failure::ChecksumMismatch, format!("{key}: {text}"));
        decoded.map_err(corrupt)?.map_err(corrupt)
    }
}

fn pieces(payload: Bytes) -> impl Iterator<Item = Bytes> + Send + Sync {
    let len = payload.len();
    (0..len)
        .step_by(PIECE)
        .map(move |start| -> Range<usize> { start..len.min(start + PIECE) })
        .map(move |range| payload.slice(range))
}

fn failed(op: Op, message: String) -> StoreError {
    StoreError::new(op, Failure::Body, message)
}
