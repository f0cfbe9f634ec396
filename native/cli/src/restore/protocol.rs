//! The frames of RabbitMQ's stream protocol that publishing needs.
//!
//! ```text
//! frame    = size u32, key u16, version u16 = 1, content       the highest bit of the key marks an answer
//! request  = correlation id u32, ...                           answered by the key with that bit, correlation id, code u16, ...
//! string   = length u16, bytes
//! ```

/// Kinds of frames.
pub(crate) mod key {
    pub(crate) const DECLARE_PUBLISHER: u16 = 1;
    pub(crate) const PUBLISH: u16 = 2;
    pub(crate) const PUBLISH_CONFIRM: u16 = 3;
    pub(crate) const PUBLISH_ERROR: u16 = 4;
    pub(crate) const QUERY_PUBLISHER_SEQUENCE: u16 = 5;
    pub(crate) const METADATA_UPDATE: u16 = 16;
    pub(crate) const PEER_PROPERTIES: u16 = 17;
    pub(crate) const SASL_HANDSHAKE: u16 = 18;
    pub(crate) const SASL_AUTHENTICATE: u16 = 19;
    pub(crate) const TUNE: u16 = 20;
    pub(crate) const OPEN: u16 = 21;
    pub(crate) const CLOSE: u16 = 22;
    pub(crate) const HEARTBEAT: u16 = 23;
    /// Set in the key of an answer.
    pub(crate) const ANSWER: u16 = 0x8000;
}

/// The code of an answer that grants what was asked for.
pub(crate) const OK: u16 = 1;

/// What the size of a frame is followed by, before the content.
pub(crate) const HEAD_LEN: usize = 4;
/// What a publish frame takes before its messages: head, publisher u8, count u32.
pub(crate) const PUBLISH_HEAD_LEN: usize = HEAD_LEN + 5;
/// What a message takes in a publish frame besides its bytes: publishing id u64, length u32.
pub(crate) const MESSAGE_HEAD_LEN: usize = 12;

/// Why a broker refuses, in words.
pub(crate) fn refusal(code: u16) -> String {
    let why = match code {
        2 => "there is no such stream",
        6 => "the stream is not available at the moment",
        7 => "the authentication mechanism is not supported",
        8 => "user name or password are wrong",
        9 => "the authentication challenge is wrong",
        10 => "this user may not connect from here",
        12 => "there is no such virtual host, or this user may not use it",
        13 => "it knows no such frame",
        14 => "the frame is too large",
        15 => "it failed inside",
        16 => "this user may not write to the stream",
        17 => "a condition does not hold",
        18 => "there is no such publisher",
        _ => return format!("code {code}"),
    };
    format!("{why} (code {code})")
}

/// Builds the content of a frame.
#[derive(Default)]
pub(crate) struct Builder {
    bytes: Vec<u8>,
}

impl Builder {
    /// A frame of a kind.
    pub(crate) fn new(key: u16) -> Self {
        Self::default().u16(key).u16(1)
    }

    pub(crate) fn u8(mut self, value: u8) -> Self {
        self.bytes.push(value);
        self
    }

    pub(crate) fn u16(mut self, value: u16) -> Self {
        self.bytes.extend_from_slice(&value.to_be_bytes());
        self
    }

    pub(crate) fn u32(mut self, value: u32) -> Self {
        self.bytes.extend_from_slice(&value.to_be_bytes());
        self
    }

    /// A string of at most 65,535 bytes; what is longer is refused before it comes here.
    pub(crate) fn string(self, text: &str) -> Self {
        let mut next = self.u16(text.len() as u16);
        next.bytes.extend_from_slice(text.as_bytes());
        next
    }

    /// Bytes with their length in four bytes.
    pub(crate) fn bytes(self, bytes: &[u8]) -> Self {
        let mut next = self.u32(bytes.len() as u32);
        next.bytes.extend_from_slice(bytes);
        next
    }

    /// The frame without its size.
    pub(crate) fn finish(self) -> Vec<u8> {
        self.bytes
    }
}

/// Reads the content of a frame.
pub(crate) struct Frame {
    bytes: Vec<u8>,
    at: usize,
}

impl Frame {
    /// A frame without its size.
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        Self { bytes, at: 0 }
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let value = self.bytes.get(self.at..)?.first_chunk().copied()?;
        self.at += N;
        Some(value)
    }

    pub(crate) fn u8(&mut self) -> Option<u8> {
        Some(u8::from_be_bytes(self.take()?))
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        Some(u16::from_be_bytes(self.take()?))
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        Some(u32::from_be_bytes(self.take()?))
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        Some(u64::from_be_bytes(self.take()?))
    }

    pub(crate) fn string(&mut self) -> Option<String> {
        let len = usize::from(self.u16()?);
        let bytes = self.bytes.get(self.at..self.at + len)?;
        self.at += len;
        Some(String::from_utf8_lossy(bytes).into_owned())
    }

    /// The kind, whose version must be 1.
    pub(crate) fn key(&mut self) -> Option<u16> {
        let key = self.u16()?;
        (self.u16()? == 1).then_some(key)
    }
}
