//! CRC-32 of bytes that are not at hand, from the CRCs of their parts.

/// x^32 + ... + 1, reflected.
const POLYNOMIAL: u32 = 0xedb8_8320;
/// x^0, reflected.
const ONE: u32 = 1 << 31;

/// `POWERS[k][b]` is x to the power of 8 * b * 256^k: what `b * 256^k` bytes that follow do to a CRC. `crc32fast` goes
/// by the bits of a length, this by its bytes: at most four multiplications in place of 32, and two for most chunks.
static POWERS: [[u32; 256]; 4] = powers();

/// The CRC of two byte strings in a row, from that of the first, and from CRC and length of the second.
#[must_use]
pub fn combine(first: u32, second: u32, second_len: u32) -> u32 {
    let mut crc = first;
    for (byte, powers) in second_len.to_le_bytes().into_iter().zip(&POWERS) {
        if byte != 0 {
            crc = multiply(powers[usize::from(byte)], crc);
        }
    }
    crc ^ second
}

/// The CRC of a byte string whose beginning has the CRC `first` and goes on with `bytes`.
#[must_use]
pub fn extend(first: u32, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(first);
    hasher.update(bytes);
    hasher.finalize()
}

/// The product of two polynomials, modulo the polynomial of the CRC.
const fn multiply(a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    let mut bit = 32;
    while bit > 0 {
        bit -= 1;
        product ^= b & ((a >> bit) & 1).wrapping_neg();
        b = (b >> 1) ^ ((b & 1).wrapping_neg() & POLYNOMIAL);
    }
    product
}

const fn powers() -> [[u32; 256]; 4] {
    let mut table = [[ONE; 256]; 4];
    // x^8: one byte more.
    let mut base = ONE >> 8;
    let mut k = 0;
    while k < 4 {
        let mut b = 1;
        while b < 256 {
            table[k][b] = multiply(table[k][b - 1], base);
            b += 1;
        }
        base = multiply(table[k][255], base);
        k += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn combining_is_the_crc_of_both_in_a_row() {
        let bytes: Vec<u8> = (0..200_000_u32).map(|n| (n * 31 + n / 255) as u8).collect();
        for cut in [
            0, 1, 7, 255, 256, 257, 4096, 65_535, 65_536, 199_999, 200_000,
        ] {
            let (first, second) = bytes.split_at(cut);
            let combined = combine(
                crc32fast::hash(first),
                crc32fast::hash(second),
                second.len() as u32,
            );
            assert_eq!(combined, crc32fast::hash(&bytes), "cut at {cut}");
            assert_eq!(extend(crc32fast::hash(first), second), combined);
        }
    }

    #[test]
    fn any_length_is_combined_as_crc32fast_does() {
        for len in [
            0,
            1,
            0xff,
            0x0100,
            0x0001_0000,
            0x0100_0000,
            0x1234_5678,
            u32::MAX,
        ] {
            let (first, second) = (0x89ab_cdef, 0x1357_9bdf);
            let mut expected = crc32fast::Hasher::new_with_initial(first);
            expected.combine(&crc32fast::Hasher::new_with_initial_len(
                second,
                u64::from(len),
            ));
            // Of no bytes there is no CRC but 0.
            let second = if len == 0 { 0 } else { second };
            assert_eq!(combine(first, second, len), expected.finalize(), "{len}");
        }
    }
}
