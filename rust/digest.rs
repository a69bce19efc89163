//! SHA-256, and bytes as hex digits.

use sha2::{Digest, Sha256};

pub fn sha256(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

pub fn hex(bytes: &[u8]) -> String {
    let mut digits = vec![0; 2 * bytes.len()];
    write_hex(&mut digits, bytes);
    String::from_utf8(digits).expect("digits are ASCII")
}

/// Fills `digits`, twice as long as `bytes`, with their hex digits.
pub fn write_hex(digits: &mut [u8], bytes: &[u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for (pair, byte) in digits.chunks_exact_mut(2).zip(bytes) {
        pair[0] = DIGITS[usize::from(byte >> 4)];
        pair[1] = DIGITS[usize::from(byte & 15)];
    }
}
