//! Messages of AMQP 1.0, which is what RabbitMQ stores in streams, whatever protocol they were published by. OASIS AMQP 1.0: part 1
//! (types) and section 3.2 (the format of messages).
//!
//! A message is a sequence of sections, each of them a described value:
//! `0x00, descriptor, value`, where the descriptor is a ulong (0x70 header ... 0x78 footer) or a symbol. A value is a
//! constructor byte, whose high half says how its length is known, and the bytes.

/// How deep values may lie in each other. RabbitMQ's own messages have three levels.
const MAX_DEPTH: u32 = 32;
/// Elements of an array that take no bytes: more would be memory for nothing.
const MAX_EMPTY: u32 = 65536;

/// A value of AMQP 1.0. Texts and bytes are the message's own.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value<'a> {
    /// null
    Null,
    /// boolean
    Bool(bool),
    /// ubyte, ushort, uint, ulong
    Unsigned(u64),
    /// byte, short, int, long
    Signed(i64),
    /// float, double
    Float(f64),
    /// decimal32, decimal64, decimal128: their bytes
    Decimal(&'a [u8]),
    /// char
    Char(char),
    /// timestamp: milliseconds since the Unix epoch
    Timestamp(i64),
    /// uuid
    Uuid([u8; 16]),
    /// binary
    Binary(&'a [u8]),
    /// string
    Text(&'a str),
    /// symbol
    Symbol(&'a str),
    /// list, array
    List(Vec<Value<'a>>),
    /// map: pairs in their order
    Map(Vec<(Value<'a>, Value<'a>)>),
    /// a described value: descriptor and value
    Described(Box<(Value<'a>, Value<'a>)>),
}

/// What a message carries.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Body<'a> {
    /// data sections, one behind the other
    Data(Vec<&'a [u8]>),
    /// amqp-sequence sections: their lists
    Sequence(Vec<Value<'a>>),
    /// amqp-value
    Value(Value<'a>),
}

/// A message, section by section.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Message<'a> {
    /// durable, priority, ttl, first-acquirer, delivery-count
    pub(crate) header: Option<Vec<Value<'a>>>,
    /// delivery-annotations
    pub(crate) delivery_annotations: Option<Pairs<'a>>,
    /// message-annotations: what brokers add, such as `x-exchange`
    pub(crate) message_annotations: Option<Pairs<'a>>,
    /// message-id, user-id, to, subject, reply-to, correlation-id, content-type, content-encoding, absolute-expiry-time,
    /// creation-time, group-id, group-sequence, reply-to-group-id
    pub(crate) properties: Option<Vec<Value<'a>>>,
    /// application-properties
    pub(crate) application_properties: Option<Pairs<'a>>,
    /// The body, `None` where there is none.
    pub(crate) body: Option<Body<'a>>,
    /// footer
    pub(crate) footer: Option<Pairs<'a>>,
}

/// The pairs of a map in their order.
pub(crate) type Pairs<'a> = Vec<(Value<'a>, Value<'a>)>;

impl<'a> Message<'a> {
    /// Reads a message; `None` where the bytes are none. Copies no text and no body.
    pub(crate) fn decode(bytes: &'a [u8]) -> Option<Self> {
        let mut input = Input { rest: bytes };
        let mut message = Self::default();
        if bytes.is_empty() {
            return None;
        }
        while !input.rest.is_empty() {
            let Value::Described(section) = input.value(0)? else {
                return None;
            };
            let (descriptor, value) = *section;
            message.add(section_code(&descriptor)?, value)?;
        }
        Some(message)
    }

    fn add(&mut self, code: u64, value: Value<'a>) -> Option<()> {
        match (code, value) {
            (0x70, Value::List(fields)) => self.header = Some(fields),
            (0x71, Value::Map(pairs)) => self.delivery_annotations = Some(pairs),
            (0x72, Value::Map(pairs)) => self.message_annotations = Some(pairs),
            (0x73, Value::List(fields)) => self.properties = Some(fields),
            (0x74, Value::Map(pairs)) => self.application_properties = Some(pairs),
            (0x75, Value::Binary(bytes)) => match &mut self.body {
                None => self.body = Some(Body::Data(vec![bytes])),
                Some(Body::Data(parts)) => parts.push(bytes),
                Some(Body::Sequence(_) | Body::Value(_)) => return None,
            },
            (0x76, list @ Value::List(_)) => match &mut self.body {
                None => self.body = Some(Body::Sequence(vec![list])),
                Some(Body::Sequence(lists)) => lists.push(list),
                Some(Body::Data(_) | Body::Value(_)) => return None,
            },
            (0x77, value) if self.body.is_none() => self.body = Some(Body::Value(value)),
            (0x78, Value::Map(pairs)) => self.footer = Some(pairs),
            _ => return None,
        }
        Some(())
    }

    /// The value of a message annotation.
    pub(crate) fn annotation(&self, name: &str) -> Option<&Value<'a>> {
        let mut pairs = self.message_annotations.iter().flatten();
        let found = pairs.find(|(key, _)| key.as_text() == Some(name));
        found.map(|(_, value)| value)
    }
}

impl<'a> Value<'a> {
    /// A text or a symbol.
    pub(crate) fn as_text(&self) -> Option<&'a str> {
        if let Value::Text(text) | Value::Symbol(text) = self {
            Some(text)
        } else {
            None
        }
    }
}

fn section_code(descriptor: &Value<'_>) -> Option<u64> {
    if let Value::Unsigned(code) = descriptor {
        return Some(*code);
    }
    Some(match descriptor.as_text()? {
        "amqp:header:list" => 0x70,
        "amqp:delivery-annotations:map" => 0x71,
        "amqp:message-annotations:map" => 0x72,
        "amqp:properties:list" => 0x73,
        "amqp:application-properties:map" => 0x74,
        "amqp:data:binary" => 0x75,
        "amqp:amqp-sequence:list" => 0x76,
        "amqp:amqp-value:*" => 0x77,
        "amqp:footer:map" => 0x78,
        _ => return None,
    })
}

/// What is left to read.
struct Input<'a> {
    rest: &'a [u8],
}

impl<'a> Input<'a> {
    fn value(&mut self, depth: u32) -> Option<Value<'a>> {
        let constructor = self.byte()?;
        if constructor == 0 {
            if depth == MAX_DEPTH {
                return None;
            }
            let descriptor = self.value(depth + 1)?;
            let value = self.value(depth + 1)?;
            return Some(Value::Described(Box::new((descriptor, value))));
        }
        self.plain(constructor, depth)
    }

    /// The value behind a constructor byte.
    fn plain(&mut self, constructor: u8, depth: u32) -> Option<Value<'a>> {
        Some(match constructor {
            0x40 => Value::Null,
            0x41 => Value::Bool(true),
            0x42 => Value::Bool(false),
            0x56 => Value::Bool(self.byte()? != 0),
            0x43 | 0x44 => Value::Unsigned(0),
            0x50 | 0x52 | 0x53 => Value::Unsigned(u64::from(self.byte()?)),
            0x60 => Value::Unsigned(u64::from(u16::from_be_bytes(self.array()?))),
            0x70 => Value::Unsigned(u64::from(u32::from_be_bytes(self.array()?))),
            0x80 => Value::Unsigned(u64::from_be_bytes(self.array()?)),
            0x51 | 0x54 | 0x55 => Value::Signed(i64::from(i8::from_be_bytes(self.array()?))),
            0x61 => Value::Signed(i64::from(i16::from_be_bytes(self.array()?))),
            0x71 => Value::Signed(i64::from(i32::from_be_bytes(self.array()?))),
            0x81 => Value::Signed(i64::from_be_bytes(self.array()?)),
            0x72 => Value::Float(f64::from(f32::from_be_bytes(self.array()?))),
            0x82 => Value::Float(f64::from_be_bytes(self.array()?)),
            0x74 => Value::Decimal(self.bytes(4)?),
            0x84 => Value::Decimal(self.bytes(8)?),
            0x94 => Value::Decimal(self.bytes(16)?),
            0x73 => Value::Char(char::from_u32(u32::from_be_bytes(self.array()?))?),
            0x83 => Value::Timestamp(i64::from_be_bytes(self.array()?)),
            0x98 => Value::Uuid(self.array()?),
            0xa0 | 0xb0 => Value::Binary(self.sized(constructor)?),
            0xa1 | 0xb1 => Value::Text(str::from_utf8(self.sized(constructor)?).ok()?),
            0xa3 | 0xb3 => Value::Symbol(str::from_utf8(self.sized(constructor)?).ok()?),
            0x45 => Value::List(Vec::new()),
            0xc0 | 0xd0 => {
                let (mut inner, count) = self.compound(constructor, depth)?;
                Value::List(inner.list(count, depth)?)
            }
            0xc1 | 0xd1 => {
                let (mut inner, count) = self.compound(constructor, depth)?;
                Value::Map(inner.map(count, depth)?)
            }
            0xe0 | 0xf0 => {
                let (mut inner, count) = self.compound(constructor, depth)?;
                Value::List(inner.elements(count, depth)?)
            }
            _ => return None,
        })
    }

    fn list(&mut self, count: u32, depth: u32) -> Option<Vec<Value<'a>>> {
        let list = (0..count)
            .map(|_| self.value(depth + 1))
            .collect::<Option<_>>()?;
        self.is_done().then_some(list)
    }

    fn map(&mut self, count: u32, depth: u32) -> Option<Pairs<'a>> {
        if !count.is_multiple_of(2) {
            return None;
        }
        let map = (0..count / 2)
            .map(|_| Some((self.value(depth + 1)?, self.value(depth + 1)?)))
            .collect::<Option<_>>()?;
        self.is_done().then_some(map)
    }

    /// Elements of an array: one constructor, perhaps described, and the bytes of each.
    fn elements(&mut self, count: u32, depth: u32) -> Option<Vec<Value<'a>>> {
        let mut constructor = self.byte()?;
        let mut descriptor = None;
        if constructor == 0 {
            descriptor = Some(self.value(depth + 1)?);
            constructor = self.byte()?;
        }
        if constructor >> 4 == 4 && count > MAX_EMPTY {
            return None;
        }
        let mut elements = Vec::new();
        for _ in 0..count {
            let element = self.plain(constructor, depth + 1)?;
            elements.push(match &descriptor {
                None => element,
                Some(descriptor) => Value::Described(Box::new((descriptor.clone(), element))),
            });
        }
        self.is_done().then_some(elements)
    }

    /// The inside of a list, map or array, and how many values it has.
    fn compound(&mut self, constructor: u8, depth: u32) -> Option<(Self, u32)> {
        if depth == MAX_DEPTH {
            return None;
        }
        let mut inner = Input {
            rest: self.sized(constructor)?,
        };
        let count = if constructor & 0x10 == 0 {
            u32::from(inner.byte()?)
        } else {
            u32::from_be_bytes(inner.array()?)
        };
        Some((inner, count))
    }

    /// Bytes whose number stands before them: in one byte, or in four where the constructor's bit 4 is set.
    fn sized(&mut self, constructor: u8) -> Option<&'a [u8]> {
        let len = if constructor & 0x10 == 0 {
            usize::from(self.byte()?)
        } else {
            u32::from_be_bytes(self.array()?) as usize
        };
        self.bytes(len)
    }

    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(*first)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        Some(*first)
    }

    fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (first, rest) = self.rest.split_at_checked(len)?;
        self.rest = rest;
        Some(first)
    }

    fn is_done(&self) -> bool {
        self.rest.is_empty()
    }
}

#[cfg(test)]
mod tests;
