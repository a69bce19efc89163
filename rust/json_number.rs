//! Numbers of JSON, and their canonical text: that of ECMAScript.

use crate::error::CoreError;

/// Every whole number below this magnitude is exactly a double, so its digits are its canonical text.
pub const EXACT: u64 = 1 << 53;

/// Significant digits of which a double keeps all. No shorter digits then read back as the same double.
const KEPT_DIGITS: usize = 15;

/// Zeros after the point with which a number below one is written with an exponent.
const ZEROS_OF_EXPONENT: &[u8] = b"000000";

/// Bytes of a number that the standard library parses. It does not read all digits of long exponents.
const SHORT: usize = 64;

/// What is known of a number from its digits.
#[derive(Clone, Copy, PartialEq)]
pub enum Form {
    /// It is canonical text.
    Canonical,
    /// It is whole, and has many digits.
    Whole,
    Other,
}

/// Returns the length of the number that `text` begins with, and its form.
#[inline]
pub fn scan(text: &[u8]) -> Result<(usize, Form), CoreError> {
    let byte = |at: usize| text.get(at).copied().unwrap_or(0);
    let is_negative = byte(0) == b'-';
    let start = usize::from(is_negative);
    let is_zero = byte(start) == b'0';
    let whole = count_digits(text, start);
    if whole == 0 || (is_zero && whole > 1) {
        return Err(CoreError::InvalidJson);
    }
    let mut end = start + whole;
    let mut form = match whole {
        _ if is_negative && is_zero => Form::Other,
        ..=KEPT_DIGITS => Form::Canonical,
        _ => Form::Whole,
    };
    if byte(end) == b'.' {
        let digits = count_digits(text, end + 1);
        let fraction = &text[end + 1..end + 1 + digits];
        let Some(last) = fraction.last() else {
            return Err(CoreError::InvalidJson);
        };
        let significant = if is_zero { digits } else { whole + digits };
        let is_canonical = significant <= KEPT_DIGITS
            && *last != b'0'
            && !(is_zero && fraction.starts_with(ZEROS_OF_EXPONENT));
        form = if is_canonical {
            Form::Canonical
        } else {
            Form::Other
        };
        end += 1 + digits;
    }
    if matches!(byte(end), b'e' | b'E') {
        let sign = usize::from(matches!(byte(end + 1), b'+' | b'-'));
        let digits = count_digits(text, end + 1 + sign);
        if digits == 0 {
            return Err(CoreError::InvalidJson);
        }
        form = Form::Other;
        end += 1 + sign + digits;
    }
    Ok((end, form))
}

fn count_digits(text: &[u8], from: usize) -> usize {
    const ONES: u64 = u64::MAX / 0xff;
    let text = text.get(from..).unwrap_or_default();
    let mut count = 0;
    while let Some(word) = text[count..].first_chunk() {
        // The highest bit of each byte says that it is no digit.
        let values = u64::from_le_bytes(*word) ^ (ONES * u64::from(b'0'));
        let others = (((values & (ONES * 0x7f)) + ONES * (0x80 - 10)) | values) & (ONES << 7);
        if others != 0 {
            return count + others.trailing_zeros() as usize / 8;
        }
        count += size_of::<u64>();
    }
    let rest = text[count..].iter().position(|byte| !byte.is_ascii_digit());
    rest.map_or(text.len(), |rest| count + rest)
}

/// Returns the magnitude of a whole number of at most 64 bits.
pub fn magnitude(text: &str) -> Option<u64> {
    let signed = || text.parse().ok().map(i64::unsigned_abs);
    text.parse().ok().or_else(signed)
}

/// Returns the double that is nearest to a number. A number beyond all doubles is not valid.
pub fn nearest_double(text: &str) -> Result<f64, CoreError> {
    let number = if text.len() <= SHORT {
        text.parse().ok()
    } else {
        serde_json::from_str(text).ok()
    };
    number
        .filter(|number: &f64| number.is_finite())
        .ok_or(CoreError::InvalidJson)
}

/// Appends a whole number as ECMAScript writes it.
pub fn write_integer(out: &mut Vec<u8>, number: i64) {
    if number.unsigned_abs() < EXACT {
        out.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
    } else {
        let number = number as f64;
        out.extend_from_slice(ryu_js::Buffer::new().format(number).as_bytes());
    }
}
