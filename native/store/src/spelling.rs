//! How keys, checksums, tags and ranges are written on the wire.

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;

/// The value of `x-amz-checksum-crc32`.
pub(crate) fn encode_crc32(crc32: u32) -> String {
    BASE64.encode(crc32.to_be_bytes())
}

/// Whether an XML document can hold the key as it is.
pub(crate) fn fits_xml(key: &str) -> bool {
    !key.chars()
        .any(|c| c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}'))
}

/// A key as forms have it: a space is a plus, or `%20` with some stores. `None` where it is no UTF-8.
pub(crate) fn decode_key(key: &str) -> Option<String> {
    let spaced = key.replace('+', " ");
    let decoded = percent_encoding::percent_decode_str(&spaced).decode_utf8();
    decoded.ok().map(std::borrow::Cow::into_owned)
}

/// Entity tags travel in quotes, and callers may have lost them.
pub(crate) fn quoted(etag: &str) -> String {
    if etag.starts_with('"') {
        etag.to_owned()
    } else {
        format!("\"{etag}\"")
    }
}

/// `bytes 5-9/20` as `(5, 10, 20)`.
pub(crate) fn parse_content_range(header: &str) -> Option<(u64, u64, u64)> {
    let (range, size) = header.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    Some((first, last.checked_add(1)?, size.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checksum_is_base64_of_its_big_endian_bytes() {
        assert_eq!(encode_crc32(crc32fast::hash(b"123456789")), "y/Q5Jg==");
    }

    #[test]
    fn a_key_of_a_listing_is_decoded_as_forms_are() {
        for (encoded, key) in [
            ("a%2Bb+c%20d", "a+b c d"),
            ("%C3%BC/%01", "ü/\u{1}"),
            ("100%25", "100%"),
        ] {
            assert_eq!(decode_key(encoded).as_deref(), Some(key));
        }
        assert_eq!(decode_key("%FF"), None);
    }

    #[test]
    fn a_content_range_is_read_as_a_half_open_range() {
        assert_eq!(parse_content_range("bytes 5-9/20"), Some((5, 10, 20)));
        assert_eq!(parse_content_range("bytes */20"), None);
        assert_eq!(parse_content_range("bytes 5-9/*"), None);
    }
}
