//! Files of records.

use super::*;

#[test]
fn records_of_a_file_are_read_up_to_its_end() {
    let mut input = &b"\x00\x00\x00\x02hi\x00\x00\x00\x00"[..];
    assert_eq!(read_record(&mut input), Ok(Some(Bytes::from_static(b"hi"))));
    assert_eq!(read_record(&mut input), Ok(Some(Bytes::new())));
    assert_eq!(read_record(&mut input), Ok(None));
}

#[test]
fn a_file_that_is_cut_off_or_of_another_kind_is_refused() {
    let refused = |mut bytes: &[u8]| read_record(&mut bytes).unwrap_err();
    assert!(refused(b"\x00\x00").contains("cut off"));
    assert!(refused(b"\x00\x00\x00\x05hi").contains("cut off"));
    assert!(refused(b"{\"offset\": 1}").contains("without --json"));
}
