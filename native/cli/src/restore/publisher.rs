//! A publisher of RabbitMQ's stream protocol: one connection, one stream, messages as they are.
//!
//! Own code, because clients encode messages themselves, and what is restored must be stored byte for byte as it was.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, split};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::protocol::{
    Builder, Frame, HEAD_LEN, MESSAGE_HEAD_LEN, OK, PUBLISH_HEAD_LEN, key, refusal,
};
use super::tls::{self, Trust};
use crate::reader::Failed;

/// How long the broker may keep silent while it owes an answer.
const SILENCE: Duration = Duration::from_secs(60);
/// Largest frame that is read: a broker sends a publisher only small ones.
const MAX_READ: u32 = 16 * 1024 * 1024;
/// Messages that may wait for their confirms, and bytes of messages that are sent in one frame, where they fit.
const MAX_UNCONFIRMED: usize = 10_000;
const BATCH: usize = 64 * 1024;
const PUBLISHER_ID: u8 = 0;

/// Where to publish, and as whom.
#[derive(Clone)]
pub(crate) struct Address {
    /// `HOST:PORT` of a node of the cluster, any one.
    pub(crate) broker: String,
    /// Whom to trust where the connection is to be encrypted; `None`: it is not.
    pub(crate) tls: Option<Trust>,
    /// Virtual host.
    pub(crate) vhost: String,
    /// User.
    pub(crate) user: String,
    /// Password.
    pub(crate) password: String,
    /// Name of the stream.
    pub(crate) stream: String,
    /// What the broker knows the publisher by, across connections.
    pub(crate) publisher: String,
}

/// A publisher that is connected.
pub(crate) struct Publisher {
    connection: Connection,
    /// Largest frame that the broker takes, without its size; 0: any.
    frame_max: usize,
    sequence: u64,
    batch: Vec<u8>,
    batched: Vec<u64>,
    unconfirmed: BTreeSet<u64>,
    confirmed: u64,
}

struct Connection {
    out: Box<dyn AsyncWrite + Send + Unpin>,
    frames: mpsc::Receiver<Frame>,
    correlation: u32,
    broker: String,
}

impl Publisher {
    /// Connects, logs in, and declares a publisher of the stream, which must be there.
    pub(crate) async fn connect(address: &Address) -> Result<Self, Failed> {
        for (name, text) in [
            ("--into", &address.stream),
            ("--publisher", &address.publisher),
        ] {
            if text.is_empty() || text.len() > 255 {
                return Err(Failed::Usage(format!(
                    "{name} must have 1 to 255 bytes, and {text:?} has {}",
                    text.len()
                )));
            }
        }
        let mut connection = Connection::open(address).await?;
        let frame_max = connection.log_in(address).await?;
        let query = Builder::default()
            .string(&address.publisher)
            .string(&address.stream);
        let (code, mut answer) = connection.ask(key::QUERY_PUBLISHER_SEQUENCE, query).await?;
        connection.expect_ok(code, &format!("publish to {}", address.stream))?;
        let sequence = answer.u64().ok_or_else(|| connection.nonsense())?;
        let declare = Builder::default()
            .u8(PUBLISHER_ID)
            .string(&address.publisher)
            .string(&address.stream);
        let (code, _) = connection.ask(key::DECLARE_PUBLISHER, declare).await?;
        connection.expect_ok(code, &format!("publish to {}", address.stream))?;
        Ok(Self {
            connection,
            frame_max: frame_max as usize,
            sequence,
            batch: Vec::new(),
            batched: Vec::new(),
            unconfirmed: BTreeSet::new(),
            confirmed: 0,
        })
    }

    /// Highest publishing id of this publisher that the stream holds; 0 where there is none.
    pub(crate) fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Messages confirmed on this connection.
    pub(crate) fn confirmed(&self) -> u64 {
        self.confirmed
    }

    /// Publishes a message, some time; waits only while too many wait for their confirms. Ids must ascend; the broker drops a message
    /// whose id is not above all that it has confirmed.
    pub(crate) async fn publish(&mut self, id: u64, message: &[u8]) -> Result<(), Failed> {
        let len = MESSAGE_HEAD_LEN + message.len();
        let largest = self.frame_max;
        if largest > 0 && PUBLISH_HEAD_LEN + len > largest {
            return Err(Failed::Broker(format!(
                "the message with publishing id {id} has {} bytes, and {} takes no frame beyond {largest}: raise stream.frame_max there for as long as this takes; what came before is confirmed, and a repetition goes on behind it",
                message.len(),
                self.connection.broker
            )));
        }
        let limit = if largest == 0 {
            BATCH
        } else {
            BATCH.min(largest)
        };
        if !self.batch.is_empty() && PUBLISH_HEAD_LEN + self.batch.len() + len > limit {
            self.send().await?;
        }
        self.batch.extend_from_slice(&id.to_be_bytes());
        self.batch
            .extend_from_slice(&(message.len() as u32).to_be_bytes());
        self.batch.extend_from_slice(message);
        self.batched.push(id);
        while self.unconfirmed.len() + self.batched.len() > MAX_UNCONFIRMED {
            if self.unconfirmed.is_empty() {
                self.send().await?;
            }
            self.wait().await?;
        }
        Ok(())
    }

    /// Sends what is left, and waits until all is confirmed.
    pub(crate) async fn flush(&mut self) -> Result<(), Failed> {
        self.send().await?;
        while !self.unconfirmed.is_empty() {
            self.wait().await?;
        }
        Ok(())
    }

    /// Says goodbye. All that was published is confirmed already, so nothing depends on the answer.
    pub(crate) async fn close(mut self) -> Result<(), Failed> {
        self.flush().await?;
        let goodbye = Builder::default().u16(OK).string("done");
        self.connection.ask(key::CLOSE, goodbye).await?;
        Ok(())
    }

    async fn send(&mut self) -> Result<(), Failed> {
        if self.batched.is_empty() {
            return Ok(());
        }
        let mut frame = Builder::new(key::PUBLISH)
            .u8(PUBLISHER_ID)
            .u32(self.batched.len() as u32)
            .finish();
        frame.append(&mut self.batch);
        self.connection.send(&frame).await?;
        self.unconfirmed.extend(self.batched.drain(..));
        while let Ok(frame) = self.connection.frames.try_recv() {
            self.handle(frame).await?;
        }
        Ok(())
    }

    async fn wait(&mut self) -> Result<(), Failed> {
        let frame = self.connection.next().await?;
        self.handle(frame).await
    }

    async fn handle(&mut self, mut frame: Frame) -> Result<(), Failed> {
        let nonsense = self.connection.nonsense();
        match frame.key() {
            Some(key::PUBLISH_CONFIRM) => {
                let confirmed = self.confirm(&mut frame);
                confirmed.ok_or(nonsense)
            }
            Some(key::PUBLISH_ERROR) => {
                let _publisher = frame.u8();
                let _count = frame.u32();
                let (id, code) = (frame.u64(), frame.u16());
                let code = refusal(code.unwrap_or_default());
                Err(Failed::Broker(format!(
                    "{} does not take the message with publishing id {}: {code}; mend that and repeat, which goes on behind what is confirmed",
                    self.connection.broker,
                    id.unwrap_or_default()
                )))
            }
            Some(other) => self.connection.handle_other(other, frame).await,
            None => Err(nonsense),
        }
    }

    fn confirm(&mut self, frame: &mut Frame) -> Option<()> {
        let _publisher = frame.u8()?;
        for _ in 0..frame.u32()? {
            let id = frame.u64()?;
            self.confirmed += u64::from(self.unconfirmed.remove(&id));
        }
        Some(())
    }
}

impl Connection {
    async fn open(address: &Address) -> Result<Self, Failed> {
        let broker = &address.broker;
        let unreachable = |why: String| {
            Failed::Broker(format!(
                "cannot connect to {broker}: {why}; check --broker, and that the plugin rabbitmq_stream is enabled there"
            ))
        };
        let stream = match timeout(SILENCE, TcpStream::connect(broker)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return Err(unreachable(error.to_string())),
            Err(_elapsed) => return Err(unreachable("no answer".to_owned())),
        };
        stream
            .set_nodelay(true)
            .map_err(|error| unreachable(error.to_string()))?;
        match &address.tls {
            None => Ok(Self::over(stream, broker)),
            Some(trust) => {
                let handshake = tls::handshake(trust, broker, stream);
                let encrypted = timeout(SILENCE, handshake)
                    .await
                    .map_err(|_elapsed| unreachable("no answer to TLS".to_owned()))?;
                Ok(Self::over(encrypted?, broker))
            }
        }
    }

    fn over(stream: impl AsyncRead + AsyncWrite + Send + 'static, broker: &str) -> Self {
        let (input, out) = split(stream);
        let (sender, frames) = mpsc::channel(64);
        tokio::spawn(read_frames(BufReader::new(input), sender));
        Self {
            out: Box::new(out),
            frames,
            correlation: 0,
            broker: broker.to_owned(),
        }
    }

    /// Logs in and opens the virtual host. Answers the largest frame allowed, 0 for any.
    async fn log_in(&mut self, address: &Address) -> Result<u32, Failed> {
        let properties = Builder::default()
            .u32(1)
            .string("product")
            .string("stream-s3");
        let (code, _) = self.ask(key::PEER_PROPERTIES, properties).await?;
        self.expect_ok(code, "say who we are")?;
        let (code, _) = self.ask(key::SASL_HANDSHAKE, Builder::default()).await?;
        self.expect_ok(code, "agree on how to log in")?;
        let plain = format!("\0{}\0{}", address.user, address.password);
        let login = Builder::default().string("PLAIN").bytes(plain.as_bytes());
        let (code, _) = self.ask(key::SASL_AUTHENTICATE, login).await?;
        self.expect_ok(code, &format!("log in as {}", address.user))?;
        let mut tune = self.next().await?;
        let (Some(key::TUNE), Some(frame_max)) = (tune.key(), tune.u32()) else {
            return Err(self.nonsense());
        };
        // Heartbeats off: whoever waits for an answer gives up after a while, and else nobody needs to know.
        let tuned = Builder::new(key::TUNE | key::ANSWER).u32(frame_max).u32(0);
        self.send(&tuned.finish()).await?;
        let open = Builder::default().string(&address.vhost);
        let (code, _) = self.ask(key::OPEN, open).await?;
        self.expect_ok(code, &format!("open the virtual host {}", address.vhost))?;
        Ok(frame_max)
    }

    /// Asks, and waits for the answer: its code and what follows.
    async fn ask(&mut self, key: u16, content: Builder) -> Result<(u16, Frame), Failed> {
        self.correlation += 1;
        let mut frame = Builder::new(key).u32(self.correlation).finish();
        frame.extend_from_slice(&content.finish());
        self.send(&frame).await?;
        loop {
            let mut frame = self.next().await?;
            match frame.key() {
                Some(answer) if answer == key | key::ANSWER => {
                    return match (frame.u32(), frame.u16()) {
                        (Some(correlation), Some(code)) if correlation == self.correlation => {
                            Ok((code, frame))
                        }
                        _ => Err(self.nonsense()),
                    };
                }
                Some(other) => self.handle_other(other, frame).await?,
                None => return Err(self.nonsense()),
            }
        }
    }

    /// A frame that nobody waits for.
    async fn handle_other(&mut self, kind: u16, mut frame: Frame) -> Result<(), Failed> {
        match kind {
            key::HEARTBEAT => Ok(()),
            key::METADATA_UPDATE => Err(Failed::Broker(format!(
                "the stream has been deleted, or {} has lost its leader: look at it, then repeat, which goes on behind what is confirmed",
                self.broker
            ))),
            key::CLOSE => {
                let (_correlation, code) = (frame.u32(), frame.u16());
                Err(Failed::Broker(format!(
                    "{} closes the connection: {} (code {}); repeat, which goes on behind what is confirmed",
                    self.broker,
                    frame.string().unwrap_or_default(),
                    code.unwrap_or_default()
                )))
            }
            _ => Err(self.nonsense()),
        }
    }

    fn expect_ok(&self, code: u16, doing: &str) -> Result<(), Failed> {
        if code == OK {
            return Ok(());
        }
        Err(Failed::Broker(format!(
            "{} does not let us {doing}: {}",
            self.broker,
            refusal(code)
        )))
    }

    async fn send(&mut self, frame: &[u8]) -> Result<(), Failed> {
        let mut bytes = Vec::with_capacity(HEAD_LEN + frame.len());
        bytes.extend_from_slice(&(frame.len() as u32).to_be_bytes());
        bytes.extend_from_slice(frame);
        let out = &mut self.out;
        // With TLS, what is written waits for the flush.
        let sent = async { out.write_all(&bytes).await.and(out.flush().await) };
        match timeout(SILENCE, sent).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) | Err(_) => Err(self.gone()),
        }
    }

    async fn next(&mut self) -> Result<Frame, Failed> {
        match timeout(SILENCE, self.frames.recv()).await {
            Ok(Some(frame)) => Ok(frame),
            Ok(None) | Err(_) => Err(self.gone()),
        }
    }

    fn gone(&self) -> Failed {
        Failed::Broker(format!(
            "{} does not answer any more: repeat, which goes on behind what is confirmed",
            self.broker
        ))
    }

    fn nonsense(&self) -> Failed {
        Failed::Broker(format!(
            "{} sends what the stream protocol does not have here: is that its port (5552 by default)? With TLS it is another one (5551), and needs --broker-tls",
            self.broker
        ))
    }
}

/// Hands on what comes until the connection ends or nobody listens.
async fn read_frames(mut input: BufReader<impl AsyncRead + Unpin>, frames: mpsc::Sender<Frame>) {
    loop {
        let Ok(len) = input.read_u32().await else {
            return;
        };
        if len > MAX_READ {
            return;
        }
        let mut bytes = vec![0; len as usize];
        if input.read_exact(&mut bytes).await.is_err()
            || frames.send(Frame::new(bytes)).await.is_err()
        {
            return;
        }
    }
}
