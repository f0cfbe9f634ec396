//! A record as a JSON document.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value as Json, json};
use stream_s3_core::units::{Offset, TimestampMs};

use super::amqp::{Body, Message, Pairs, Value};

/// Fields of the header section, in their order.
const HEADER: [&str; 5] = [
    "durable",
    "priority",
    "ttl",
    "first_acquirer",
    "delivery_count",
];
/// Fields of the properties section, in their order.
const PROPERTIES: [&str; 13] = [
    "message_id",
    "user_id",
    "to",
    "subject",
    "reply_to",
    "correlation_id",
    "content_type",
    "content_encoding",
    "absolute_expiry_time",
    "creation_time",
    "group_id",
    "group_sequence",
    "reply_to_group_id",
];

/// The document of one record: its offset, the timestamp of its chunk (milliseconds since the Unix epoch), the sections of its message that are
/// there, and, of a message that came through an exchange, how AMQP 0.9.1 says it. What is no AMQP message is `raw`, in base64.
pub(crate) fn line(offset: Offset, timestamp: TimestampMs, record: &[u8]) -> Json {
    let mut line = Map::new();
    line.insert("offset".to_owned(), offset.0.into());
    line.insert("timestamp".to_owned(), timestamp.0.into());
    let Some(message) = Message::decode(record) else {
        line.insert("raw".to_owned(), base64(record));
        return Json::Object(line);
    };
    let mut put = |name: &str, value: Option<Json>| {
        if let Some(value) = value {
            line.insert(name.to_owned(), value);
        }
    };
    put(
        "header",
        message.header.as_ref().map(|f| fields(&HEADER, f)),
    );
    put(
        "delivery_annotations",
        message.delivery_annotations.as_ref().map(map),
    );
    put(
        "message_annotations",
        message.message_annotations.as_ref().map(map),
    );
    put(
        "properties",
        message.properties.as_ref().map(|f| fields(&PROPERTIES, f)),
    );
    put(
        "application_properties",
        message.application_properties.as_ref().map(map),
    );
    put("body", message.body.as_ref().map(body));
    put("footer", message.footer.as_ref().map(map));
    put("amqp091", amqp091(&message));
    Json::Object(line)
}

/// The fields that are set, by name.
fn fields(names: &[&str], values: &[Value<'_>]) -> Json {
    let set = names
        .iter()
        .zip(values)
        .filter(|(_, value)| **value != Value::Null);
    Json::Object(
        set.map(|(name, field)| ((*name).to_owned(), value(field)))
            .collect(),
    )
}

fn map(pairs: &Pairs<'_>) -> Json {
    let name = |key: &Value<'_>| match key.as_text() {
        Some(text) => text.to_owned(),
        None => value(key).to_string(),
    };
    Json::Object(
        pairs
            .iter()
            .map(|(key, of)| (name(key), value(of)))
            .collect(),
    )
}

fn body(body: &Body<'_>) -> Json {
    match body {
        Body::Data(parts) => {
            let whole = parts.concat();
            match str::from_utf8(&whole) {
                Ok(text) => json!({ "text": text }),
                Err(_) => json!({ "base64": STANDARD.encode(&whole) }),
            }
        }
        Body::Sequence(lists) => {
            json!({ "sequence": lists.iter().map(value).collect::<Vec<_>>() })
        }
        Body::Value(of) => json!({ "value": value(of) }),
    }
}

fn value(of: &Value<'_>) -> Json {
    match of {
        Value::Null => Json::Null,
        Value::Bool(bool) => (*bool).into(),
        Value::Unsigned(number) => (*number).into(),
        Value::Signed(number) | Value::Timestamp(number) => (*number).into(),
        // JSON has no words for infinity and what is no number.
        Value::Float(number) if number.is_finite() => (*number).into(),
        Value::Float(number) => number.to_string().into(),
        Value::Char(char) => char.to_string().into(),
        Value::Uuid(bytes) => uuid(bytes).into(),
        Value::Decimal(bytes) | Value::Binary(bytes) => json!({ "base64": STANDARD.encode(bytes) }),
        Value::Text(text) | Value::Symbol(text) => (*text).into(),
        Value::List(list) => list.iter().map(value).collect(),
        Value::Map(pairs) => map(pairs),
        Value::Described(described) => {
            json!({ "descriptor": value(&described.0), "value": value(&described.1) })
        }
    }
}

fn base64(bytes: &[u8]) -> Json {
    STANDARD.encode(bytes).into()
}

fn uuid(bytes: &[u8; 16]) -> String {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let parts = [
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..],
    ];
    parts.join("-")
}

/// How a consumer of AMQP 0.9.1 sees a message that came through an exchange: RabbitMQ notes exchange and routing key then.
///
/// The way back of RabbitMQ 4's conversion (`mc_amqpl`): `durable` is the delivery mode, `group-id` the application id, `subject` or
/// the annotation `x-basic-type` the type; times are seconds; ids that are UUIDs had been written as `urn:uuid:...`; RabbitMQ 4.1 and
/// later write a reply-to as `/queues/` and its name, percent-encoded. Application properties are headers, and so are
/// annotations that begin with `x-`, but for those that the broker keeps for itself.
fn amqp091(message: &Message<'_>) -> Option<Json> {
    let exchange = message.annotation("x-exchange")?;
    let routing_key = message.annotation("x-routing-key");
    let header = |at: usize| message.header.as_ref().and_then(|list| set(list, at));
    let property = |at: usize| message.properties.as_ref().and_then(|list| set(list, at));
    let mut properties = Map::new();
    let mut put = |name: &str, value: Option<Json>| {
        if let Some(value) = value {
            properties.insert(name.to_owned(), value);
        }
    };
    put("content_type", property(6).map(value));
    put("content_encoding", property(7).map(value));
    put(
        "delivery_mode",
        header(0).map(|durable| if *durable == Value::Bool(true) { 2 } else { 1 }.into()),
    );
    put("priority", header(1).map(value));
    put("correlation_id", property(5).map(id));
    put("reply_to", property(4).map(reply_to));
    put(
        "expiration",
        header(2).map(|ttl| value(ttl).to_string().into()),
    );
    put("message_id", property(0).map(id));
    put("timestamp", property(9).and_then(seconds));
    let kind = property(3).or_else(|| message.annotation("x-basic-type"));
    put("type", kind.map(value));
    put("user_id", property(1).map(text_of_bytes));
    put("app_id", property(10).map(value));
    let headers = headers(message);
    put(
        "headers",
        (!headers.is_empty()).then_some(Json::Object(headers)),
    );
    Some(json!({
        "exchange": value(exchange),
        "routing_key": routing_key.map(value),
        "properties": properties,
    }))
}

fn set<'b, 'a>(list: &'b [Value<'a>], at: usize) -> Option<&'b Value<'a>> {
    list.get(at).filter(|value| **value != Value::Null)
}

fn headers(message: &Message<'_>) -> Map<String, Json> {
    let properties = message.application_properties.iter().flatten();
    let annotations = message
        .message_annotations
        .iter()
        .flatten()
        .filter(|(key, _)| key.as_text().is_some_and(is_header));
    properties
        .chain(annotations)
        .filter_map(|(key, of)| {
            let name = match key.as_text()? {
                "x-cc" => "CC",
                other => other,
            };
            Some((name.to_owned(), value(of)))
        })
        .collect()
}

fn is_header(annotation: &str) -> bool {
    annotation.starts_with("x-")
        && !annotation.starts_with("x-basic-")
        && !annotation.starts_with("x-opt-")
        && !["x-exchange", "x-routing-key"].contains(&annotation)
}

fn id(of: &Value<'_>) -> Json {
    if let Value::Uuid(bytes) = of {
        format!("urn:uuid:{}", uuid(bytes)).into()
    } else {
        value(of)
    }
}

fn text_of_bytes(of: &Value<'_>) -> Json {
    if let Value::Binary(bytes) = of {
        match str::from_utf8(bytes) {
            Ok(text) => text.into(),
            Err(_) => base64(bytes),
        }
    } else {
        value(of)
    }
}

fn reply_to(of: &Value<'_>) -> Json {
    let Some(queue) = of.as_text().and_then(|text| text.strip_prefix("/queues/")) else {
        return value(of);
    };
    percent_encoding::percent_decode_str(queue)
        .decode_utf8_lossy()
        .into()
}

fn seconds(of: &Value<'_>) -> Option<Json> {
    if let Value::Timestamp(ms) = of {
        Some(ms.div_euclid(1000).into())
    } else {
        None
    }
}

#[cfg(test)]
mod tests;
