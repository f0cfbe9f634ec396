//! Values and messages, byte by byte as the standard has them.

use proptest::prelude::*;

use super::*;

fn value(bytes: &[u8]) -> Option<Value<'_>> {
    let mut input = Input { rest: bytes };
    let value = input.value(0)?;
    input.is_done().then_some(value)
}

#[test]
fn every_constructor_is_read() {
    let text = |text: &'static str| Value::Text(text);
    let cases: Vec<(Vec<u8>, Value<'_>)> = vec![
        (vec![0x40], Value::Null),
        (vec![0x41], Value::Bool(true)),
        (vec![0x56, 0], Value::Bool(false)),
        (vec![0x43], Value::Unsigned(0)),
        (vec![0x44], Value::Unsigned(0)),
        (vec![0x50, 200], Value::Unsigned(200)),
        (vec![0x60, 1, 0], Value::Unsigned(256)),
        (vec![0x70, 0, 1, 0, 0], Value::Unsigned(65536)),
        (
            vec![0x80, 255, 255, 255, 255, 255, 255, 255, 255],
            Value::Unsigned(u64::MAX),
        ),
        (vec![0x51, 0xff], Value::Signed(-1)),
        (vec![0x61, 0xff, 0], Value::Signed(-256)),
        (
            vec![0x71, 0x80, 0, 0, 0],
            Value::Signed(i64::from(i32::MIN)),
        ),
        (
            vec![0x81, 0x80, 0, 0, 0, 0, 0, 0, 0],
            Value::Signed(i64::MIN),
        ),
        (vec![0x72, 0x3f, 0x80, 0, 0], Value::Float(1.0)),
        (vec![0x82, 0xbf, 0xf0, 0, 0, 0, 0, 0, 0], Value::Float(-1.0)),
        (vec![0x74, 1, 2, 3, 4], Value::Decimal(&[1, 2, 3, 4])),
        (vec![0x73, 0, 0, 0, 0x41], Value::Char('A')),
        (vec![0x83, 0, 0, 0, 0, 0, 0, 1, 0], Value::Timestamp(256)),
        (vec![0xa0, 2, 8, 9], Value::Binary(&[8, 9])),
        (vec![0xb0, 0, 0, 0, 1, 8], Value::Binary(&[8])),
        (vec![0xa1, 2, b'h', b'i'], text("hi")),
        (vec![0xb3, 0, 0, 0, 1, b's'], Value::Symbol("s")),
        (vec![0x45], Value::List(vec![])),
        (
            vec![0xc0, 3, 2, 0x41, 0x40],
            Value::List(vec![Value::Bool(true), Value::Null]),
        ),
        (
            vec![0xd1, 0, 0, 0, 8, 0, 0, 0, 2, 0xa1, 1, b'k', 0x43],
            Value::Map(vec![(text("k"), Value::Unsigned(0))]),
        ),
        (
            vec![0xe0, 4, 2, 0x50, 1, 2],
            Value::List(vec![Value::Unsigned(1), Value::Unsigned(2)]),
        ),
        (
            vec![0x00, 0x53, 9, 0x41],
            Value::Described(Box::new((Value::Unsigned(9), Value::Bool(true)))),
        ),
    ];
    for (bytes, expected) in cases {
        assert_eq!(value(&bytes), Some(expected), "{bytes:02x?}");
    }
}

#[test]
fn values_that_lie_about_their_size_are_refused() {
    let deep = [[0xc0u8, 255, 1].repeat(100), vec![0x40]].concat();
    let cases: [&[u8]; 8] = [
        &[],
        &[0x99],
        &[0xa1, 5, b'a'],
        &[0xc0, 2, 2, 0x40],
        &[0xc0, 3, 1, 0x40, 0x40],
        &[0xc1, 2, 1, 0x40],
        // Four billion nulls.
        &[0xf0, 0, 0, 0, 5, 255, 255, 255, 255, 0x40],
        &deep,
    ];
    for bytes in cases {
        assert_eq!(value(bytes), None, "{bytes:02x?}");
    }
}

#[test]
fn a_message_is_read_section_by_section() {
    let bytes = [
        &[0x00, 0x53, 0x70, 0xc0, 2, 1, 0x41][..],
        &[
            0x00, 0x80, 0, 0, 0, 0, 0, 0, 0, 0x72, 0xc1, 6, 2, 0xa3, 1, b'x', 0x50, 3,
        ],
        &[0x00, 0x53, 0x75, 0xa0, 2, 1, 2],
        &[0x00, 0x53, 0x75, 0xa0, 1, 3],
    ]
    .concat();
    let message = Message::decode(&bytes).unwrap();
    assert_eq!(message.header, Some(vec![Value::Bool(true)]));
    assert_eq!(message.annotation("x"), Some(&Value::Unsigned(3)));
    assert_eq!(message.body, Some(Body::Data(vec![&[1, 2], &[3]])));
    assert_eq!(message.properties, None);
}

#[test]
fn what_is_no_message_is_none() {
    for bytes in [&b""[..], b"hello", &[0x00, 0x53, 0x99, 0x40], &[0x41]] {
        assert_eq!(Message::decode(bytes), None, "{bytes:02x?}");
    }
    // Two bodies of different kinds.
    let mixed = [0x00, 0x53, 0x75, 0xa0, 0, 0x00, 0x53, 0x77, 0x40];
    assert_eq!(Message::decode(&mixed), None);
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = Message::decode(&bytes);
        let _ = Message::decode(&[&[0x00, 0x53, 0x77][..], &bytes].concat());
    }
}
