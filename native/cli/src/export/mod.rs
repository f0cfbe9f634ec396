//! `export`: the records of a stream, from the bucket to a file or to stdout.

pub(crate) mod amqp;
pub(crate) mod chunks;
pub(crate) mod json;
pub(crate) mod range;
pub(crate) mod records;
pub(crate) mod source;

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};

use stream_s3_core::units::{Offset, TimestampMs};

use crate::progress::Progress;
use crate::reader::Failed;
use records::Records;
use source::Source;

/// How records are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// For each record its length, u32 big-endian, and its bytes.
    LengthPrefixed,
    /// A JSON document a line; see [`json::line`].
    JsonLines,
}

/// Where records are written.
#[derive(Debug, Clone)]
pub(crate) enum Target {
    /// Standard output.
    Stdout,
    /// A file, which must not be there unless `append` is set.
    File {
        /// Its path.
        path: PathBuf,
        /// Whether to write behind what it holds.
        append: bool,
    },
}

/// What an export came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Exported {
    /// Records written.
    pub(crate) records: u64,
    /// Bytes in them, without lengths or JSON around them.
    pub(crate) bytes: u64,
    /// First offset that was not looked at: where the next export goes on.
    pub(crate) next: Offset,
    /// Whether the reader of stdout went away before the end, which is no failure.
    pub(crate) cut_short: bool,
}

/// Writes all records of `source`. Memory: one chunk, and one record of a compressed batch.
///
/// What has been written when it fails is whole records, and the error says where to go on.
pub(crate) async fn export(
    mut source: Source,
    format: Format,
    target: &Target,
    progress: &Progress,
) -> Result<Exported, Failed> {
    let mut sink = Sink::open(format, target)?;
    progress.start("export", source.total_bytes());
    let written = write_all(&mut source, &mut sink, progress).await;
    progress.finish();
    let exported = Exported {
        records: sink.records,
        bytes: sink.bytes,
        next: source.next_offset(),
        cut_short: sink.closed,
    };
    // Also when it failed: what is there must be whole.
    let synced = sink.finish();
    match (written, synced) {
        (Err(failed), _) => Err(failed.behind(exported.records)),
        (Ok(()), Err(error)) => Err(Failed::Output(error)),
        (Ok(()), Ok(())) => Ok(exported),
    }
}

async fn write_all(
    source: &mut Source,
    sink: &mut Sink,
    progress: &Progress,
) -> Result<(), Failed> {
    while let Some(chunk) = source.next_chunk().await? {
        let len = chunk.header.len_in_segment();
        let timestamp = chunk.header.timestamp;
        let mut records = Records::of(chunk);
        while let Some((offset, record)) = records.next()? {
            if source.wants(offset) {
                sink.write(offset, timestamp, &record)
                    .map_err(Failed::Output)?;
            }
        }
        source.done_with(records.end());
        progress.advance(len);
        if sink.closed {
            return Ok(());
        }
    }
    Ok(())
}

/// Where the records go.
struct Sink {
    format: Format,
    out: BufWriter<Out>,
    records: u64,
    bytes: u64,
    closed: bool,
}

enum Out {
    Stdout(io::Stdout),
    File(File),
}

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Stdout(out) => out.write(bytes),
            Self::File(out) => out.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Stdout(out) => out.flush(),
            Self::File(out) => out.flush(),
        }
    }
}

impl Sink {
    fn open(format: Format, target: &Target) -> Result<Self, Failed> {
        let out = match target {
            Target::Stdout => {
                let out = io::stdout();
                if format == Format::LengthPrefixed && out.is_terminal() {
                    return Err(Failed::Usage(
                        "records are no text: send them to a file (--output FILE, or a redirection), or ask for JSON lines with --json".to_owned(),
                    ));
                }
                Out::Stdout(out)
            }
            Target::File { path, append } => Out::File(open_file(path, *append)?),
        };
        Ok(Self {
            format,
            out: BufWriter::with_capacity(1 << 20, out),
            records: 0,
            bytes: 0,
            closed: false,
        })
    }

    fn write(&mut self, offset: Offset, timestamp: TimestampMs, record: &[u8]) -> io::Result<()> {
        if self.closed {
            return Ok(());
        }
        let written = match self.format {
            Format::LengthPrefixed => self.write_prefixed(record),
            Format::JsonLines => self.write_line(offset, timestamp, record),
        };
        match written {
            Ok(()) => {
                self.records += 1;
                self.bytes += record.len() as u64;
                Ok(())
            }
            Err(error) if self.is_closed_pipe(&error) => {
                self.closed = true;
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn write_prefixed(&mut self, record: &[u8]) -> io::Result<()> {
        // A record has fewer than 2^31 bytes: its entry keeps the length in 31 bits.
        self.out.write_all(&(record.len() as u32).to_be_bytes())?;
        self.out.write_all(record)
    }

    fn write_line(
        &mut self,
        offset: Offset,
        timestamp: TimestampMs,
        record: &[u8],
    ) -> io::Result<()> {
        serde_json::to_writer(&mut self.out, &json::line(offset, timestamp, record))?;
        self.out.write_all(b"\n")
    }

    /// Whoever reads stdout may have seen enough, such as `head`.
    fn is_closed_pipe(&self, error: &io::Error) -> bool {
        matches!(self.out.get_ref(), Out::Stdout(_)) && error.kind() == io::ErrorKind::BrokenPipe
    }

    /// Writes out what is buffered; a file is on the disk afterwards.
    fn finish(&mut self) -> io::Result<()> {
        match self.out.flush() {
            Err(error) if self.is_closed_pipe(&error) => return Ok(()),
            flushed => flushed?,
        }
        match self.out.get_ref() {
            Out::Stdout(_) => Ok(()),
            Out::File(file) => file.sync_all(),
        }
    }
}

fn open_file(path: &Path, append: bool) -> Result<File, Failed> {
    let opened = if append {
        OpenOptions::new().append(true).create(true).open(path)
    } else {
        OpenOptions::new().write(true).create_new(true).open(path)
    };
    opened.map_err(|error| {
        let hint = if error.kind() == io::ErrorKind::AlreadyExists {
            "; name another file, or add to it with --append"
        } else {
            ""
        };
        Failed::Usage(format!("--output {}: {error}{hint}", path.display()))
    })
}
