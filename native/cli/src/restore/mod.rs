//! `restore`: publishes records to another stream, in their order, with confirms, byte for byte.

mod protocol;
mod publisher;
mod tls;

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

use bytes::Bytes;
use stream_s3_core::units::Offset;

pub(crate) use self::publisher::Address;
use self::publisher::Publisher;
pub(crate) use self::tls::Trust;
use crate::export::records::Records;
use crate::export::source::Source;
use crate::progress::Progress;
use crate::reader::Failed;

/// Longest record that is taken from a file. RabbitMQ takes no message beyond 512 MiB.
const MAX_RECORD: u32 = 512 * 1024 * 1024;

/// What a restoration came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Restored {
    /// Records that were confirmed now.
    pub(crate) published: u64,
    /// Publishing id behind which it began: an earlier run of the same publisher had come so far. 0: there was none.
    pub(crate) behind: u64,
}

/// Publishes the records of a bucket. The publishing id of a record is its offset and one: so what a publisher of the same name has
/// brought there before is not brought there again, as long as ranges are restored in ascending order.
pub(crate) async fn from_bucket(
    mut source: Source,
    address: &Address,
    progress: &Progress,
) -> Result<Restored, Failed> {
    let mut publisher = Publisher::connect(address).await?;
    let behind = publisher.sequence();
    source.skip_to(Offset(behind));
    progress.start("restore", source.total_bytes());
    let published = publish_source(&mut source, &mut publisher, progress).await;
    progress.finish();
    finish(published, publisher, behind).await
}

async fn publish_source(
    source: &mut Source,
    publisher: &mut Publisher,
    progress: &Progress,
) -> Result<(), Failed> {
    while let Some(chunk) = source.next_chunk().await? {
        let len = chunk.header.len_in_segment();
        let mut records = Records::of(chunk);
        while let Some((offset, record)) = records.next()? {
            if source.wants(offset) {
                let Offset(id) = offset.advanced_by(1);
                publisher.publish(id, &record).await?;
            }
        }
        progress.advance(len);
    }
    Ok(())
}

/// Publishes the records of a file that `export` has written with lengths before them. The publishing id of a record is its place in
/// the file, counted from 1.
pub(crate) async fn from_file(
    path: &Path,
    address: &Address,
    progress: &Progress,
) -> Result<Restored, Failed> {
    let unreadable =
        |error: io::Error| Failed::Usage(format!("--input {}: {error}", path.display()));
    let file = File::open(path).map_err(unreadable)?;
    let total = file.metadata().map_err(unreadable)?.len();
    let mut input = BufReader::with_capacity(1 << 20, file);
    let mut publisher = Publisher::connect(address).await?;
    let behind = publisher.sequence();
    progress.start("restore", total);
    let mut place = 0;
    let published = loop {
        place += 1;
        let record = match read_record(&mut input) {
            Ok(Some(record)) => record,
            Ok(None) => break Ok(()),
            Err(why) => {
                let name = path.display();
                break Err(Failed::Usage(format!(
                    "--input {name}: record {place} {why}; the records before it are published"
                )));
            }
        };
        progress.advance(4 + record.len() as u64);
        if place > behind
            && let Err(failed) = publisher.publish(place, &record).await
        {
            break Err(failed);
        }
    };
    progress.finish();
    finish(published, publisher, behind).await
}

/// Sees to it that all that was published is confirmed, also when something went wrong behind it.
async fn finish(
    published: Result<(), Failed>,
    mut publisher: Publisher,
    behind: u64,
) -> Result<Restored, Failed> {
    if let Err(failed) = published {
        // That the broker has gone is what `failed` says, or it comes on top of it.
        return match publisher.flush().await {
            Ok(()) | Err(Failed::Broker(_)) => Err(failed.behind(publisher.confirmed())),
            Err(other) => Err(other),
        };
    }
    publisher.flush().await?;
    let restored = Restored {
        published: publisher.confirmed(),
        behind,
    };
    publisher.close().await?;
    Ok(restored)
}

/// The next record of a file, `None` at its end, else what is wrong with it.
fn read_record(input: &mut impl Read) -> Result<Option<Bytes>, String> {
    let mut head = Vec::new();
    input
        .by_ref()
        .take(4)
        .read_to_end(&mut head)
        .map_err(|error| format!("cannot be read: {error}"))?;
    let len = match head[..] {
        [] => return Ok(None),
        [a, b, c, d] => u32::from_be_bytes([a, b, c, d]),
        _ => return Err("is cut off".to_owned()),
    };
    if len > MAX_RECORD {
        return Err(format!(
            "says that it has {len} bytes: is this a file that export has written without --json?"
        ));
    }
    let mut record = Vec::new();
    input
        .by_ref()
        .take(u64::from(len))
        .read_to_end(&mut record)
        .map_err(|error| format!("cannot be read: {error}"))?;
    if record.len() as u64 != u64::from(len) {
        return Err("is cut off".to_owned());
    }
    Ok(Some(record.into()))
}

#[cfg(test)]
mod tests;
