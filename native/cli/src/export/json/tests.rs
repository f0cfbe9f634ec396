//! Documents of records as brokers store them.

use super::*;

fn text(text: &str) -> Vec<u8> {
    [&[0xa1, text.len() as u8][..], text.as_bytes()].concat()
}

fn symbol(text: &str) -> Vec<u8> {
    [&[0xa3, text.len() as u8][..], text.as_bytes()].concat()
}

fn section(code: u8, value: &[u8]) -> Vec<u8> {
    [&[0x00, 0x53, code][..], value].concat()
}

fn compound(constructor: u8, values: &[Vec<u8>]) -> Vec<u8> {
    let inner = values.concat();
    [
        &[constructor, inner.len() as u8 + 1, values.len() as u8][..],
        &inner,
    ]
    .concat()
}

#[test]
fn a_message_of_an_exchange_is_told_in_both_protocols() {
    let id = [vec![0x98], (0..16).collect()].concat();
    let time = [&[0x83][..], &1_700_000_000_000i64.to_be_bytes()].concat();
    let null = || vec![0x40];
    let properties = [
        id,
        vec![0xa0, 2, b'm', b'e'],
        null(),
        null(),
        text("/queues/a%20b"),
        text("c1"),
        symbol("text/plain"),
        null(),
        null(),
        time,
        text("app"),
    ];
    let annotations = [
        symbol("x-exchange"),
        text("ex"),
        symbol("x-routing-key"),
        text("rk"),
        symbol("x-basic-type"),
        text("kind"),
        symbol("x-mine"),
        vec![0x54, 7],
    ];
    let record = [
        section(
            0x70,
            &compound(0xc0, &[vec![0x41], vec![0x50, 5], vec![0x52, 60]]),
        ),
        section(0x72, &compound(0xc1, &annotations)),
        section(0x73, &compound(0xc0, &properties)),
        section(0x74, &compound(0xc1, &[text("h"), vec![0x54, 1]])),
        section(0x75, &[0xa0, 2, b'h', b'i']),
    ]
    .concat();
    let uuid = "00010203-0405-0607-0809-0a0b0c0d0e0f";
    let expected = json!({
        "offset": 9, "timestamp": 12,
        "header": {"durable": true, "priority": 5, "ttl": 60},
        "message_annotations": {"x-exchange": "ex", "x-routing-key": "rk", "x-basic-type": "kind", "x-mine": 7},
        "properties": {
            "message_id": uuid, "user_id": {"base64": "bWU="}, "reply_to": "/queues/a%20b", "correlation_id": "c1",
            "content_type": "text/plain", "creation_time": 1_700_000_000_000i64, "group_id": "app",
        },
        "application_properties": {"h": 1},
        "body": {"text": "hi"},
        "amqp091": {
            "exchange": "ex", "routing_key": "rk",
            "properties": {
                "content_type": "text/plain", "delivery_mode": 2, "priority": 5, "correlation_id": "c1", "reply_to": "a b",
                "expiration": "60", "message_id": format!("urn:uuid:{uuid}"), "timestamp": 1_700_000_000, "type": "kind",
                "user_id": "me", "app_id": "app", "headers": {"h": 1, "x-mine": 7},
            },
        },
    });
    assert_eq!(line(Offset(9), TimestampMs(12), &record), expected);
}

#[test]
fn what_is_no_message_is_raw_and_a_body_that_is_no_text_is_base64() {
    assert_eq!(
        line(Offset(1), TimestampMs(2), b"\xff\xfe"),
        json!({"offset": 1, "timestamp": 2, "raw": "//4="})
    );
    let record = section(0x75, &[0xa0, 1, 0xff]);
    assert_eq!(
        line(Offset(1), TimestampMs(2), &record),
        json!({"offset": 1, "timestamp": 2, "body": {"base64": "/w=="}})
    );
}

#[test]
fn keys_that_are_no_text_and_numbers_that_json_lacks_are_written_as_text() {
    let nan = [&[0x82][..], &f64::NAN.to_be_bytes()].concat();
    let record = section(0x77, &compound(0xc1, &[vec![0x50, 1], nan]));
    assert_eq!(
        line(Offset(1), TimestampMs(2), &record),
        json!({"offset": 1, "timestamp": 2, "body": {"value": {"1": "NaN"}}})
    );
}
