//! Strings of JSON: their ends, their escapes, and the keys of members.

use crate::digest::hex;
use crate::error::CoreError;
use std::cmp::Ordering;
use std::ops::Range;

/// Returns the position of the first quote, backslash or control character from `at` on; the length of `text`
/// without one.
#[inline]
pub fn plain_end(text: &[u8], mut at: usize) -> usize {
    while let Some(word) = text[at..].first_chunk() {
        let found = special_bytes(u64::from_le_bytes(*word));
        if found != 0 {
            return at + found.trailing_zeros() as usize / 8;
        }
        at += size_of::<u64>();
    }
    let size = text[at..].iter().position(|&byte| is_special(byte));
    size.map_or(text.len(), |size| at + size)
}

fn is_special(byte: u8) -> bool {
    byte < b' ' || byte == b'"' || byte == b'\\'
}

/// Marks the special bytes of a word by their highest bits. Only the lowest mark is certain.
#[inline]
fn special_bytes(word: u64) -> u64 {
    const ONES: u64 = u64::MAX / 0xff;
    let below = |word: u64, limit: u8| word.wrapping_sub(ONES * u64::from(limit)) & !word;
    let equal = |byte: u8| below(word ^ (ONES * u64::from(byte)), 1);
    (below(word, b' ') | equal(b'"') | equal(b'\\')) & (ONES << 7)
}

/// Returns the character of the escape that `text` begins with, and the length of the escape. The escapes of a
/// surrogate pair are one. Surrogates without the other half are not JSON.
pub fn read_escape(text: &[u8]) -> Result<(char, usize), CoreError> {
    let character = match text.get(1) {
        Some(b'b') => '\u{8}',
        Some(b'f') => '\u{c}',
        Some(b'n') => '\n',
        Some(b'r') => '\r',
        Some(b't') => '\t',
        Some(&itself @ (b'"' | b'\\' | b'/')) => char::from(itself),
        _ => return read_code_units(text).ok_or(CoreError::InvalidJson),
    };
    Ok((character, 2))
}

fn read_code_units(text: &[u8]) -> Option<(char, usize)> {
    let (first, rest) = read_code_unit(text)?;
    if let Some(character) = char::from_u32(first.into()) {
        return Some((character, 6));
    }
    let (second, _) = read_code_unit(rest)?;
    let character = char::decode_utf16([first, second]).next()?.ok()?;
    Some((character, 12))
}

/// Returns the code unit of a text that begins with `\uXXXX`, and the text after it.
fn read_code_unit(text: &[u8]) -> Option<(u16, &[u8])> {
    let (escape, rest) = text.split_first_chunk::<6>()?;
    let digits = escape.strip_prefix(b"\\u")?;
    let unit = digits.iter().try_fold(0, |unit, &digit| {
        Some(unit << 4 | char::from(digit).to_digit(16)? as u16)
    })?;
    Some((unit, rest))
}

/// Appends `text` as a canonical JSON string.
pub fn write_string(out: &mut Vec<u8>, text: &str) {
    let text = text.as_bytes();
    out.push(b'"');
    let mut done = 0;
    loop {
        let end = plain_end(text, done);
        out.extend_from_slice(&text[done..end]);
        let Some(&special) = text.get(end) else { break };
        write_escape(out, special);
        done = end + 1;
    }
    out.push(b'"');
}

/// Appends a character of a canonical string.
pub fn write_char(out: &mut Vec<u8>, character: char) {
    match u8::try_from(character) {
        Ok(byte) if is_special(byte) => write_escape(out, byte),
        _ => push_char(out, character),
    }
}

fn push_char(out: &mut Vec<u8>, character: char) {
    out.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
}

fn write_escape(out: &mut Vec<u8>, special: u8) {
    let letter = match special {
        b'"' | b'\\' => special,
        0x08 => b'b',
        b'\t' => b't',
        b'\n' => b'n',
        0x0c => b'f',
        b'\r' => b'r',
        _ => {
            out.extend_from_slice(b"\\u00");
            return out.extend_from_slice(hex(&[special]).as_bytes());
        }
    };
    out.extend_from_slice(&[b'\\', letter]);
}

/// The key of a member. Its characters are in the text that was read or, if it has escapes, in a list of keys
/// without their escapes.
#[derive(Clone, Copy)]
pub struct Key {
    /// The first characters.
    prefix: u64,
    start: usize,
    end: usize,
    is_escaped: bool,
}

impl Key {
    /// Returns the key at `place` of `text`, which is valid.
    pub fn new(
        text: &[u8],
        place: Range<usize>,
        is_escaped: bool,
        unescaped: &mut Vec<u8>,
    ) -> Self {
        let place = if is_escaped {
            let start = unescaped.len();
            unescape(&text[place], unescaped);
            start..unescaped.len()
        } else {
            place
        };
        let source = if is_escaped { unescaped } else { text };
        Self {
            prefix: prefix(source, place.start, place.end),
            start: place.start,
            end: place.end,
            is_escaped,
        }
    }

    pub fn characters<'a>(&self, text: &'a [u8], unescaped: &'a [u8]) -> &'a [u8] {
        let source = if self.is_escaped { unescaped } else { text };
        &source[self.start..self.end]
    }

    /// Sorts by code point, which is the byte order in UTF-8.
    #[inline]
    pub fn compare(&self, other: &Self, text: &[u8], unescaped: &[u8]) -> Ordering {
        let all = |key: &Self| key.characters(text, unescaped);
        let by_prefix = self.prefix.cmp(&other.prefix);
        by_prefix.then_with(|| all(self).cmp(all(other)))
    }
}

/// Returns a number that sorts as the characters at `start..end` do, as far as the first of them differ.
fn prefix(text: &[u8], start: usize, end: usize) -> u64 {
    let size = end - start;
    match text[start..].first_chunk() {
        Some(first) if size < first.len() => {
            // Zeros take the place of what follows the key.
            u64::from_be_bytes(*first) & !(u64::MAX >> (8 * size))
        }
        Some(first) => u64::from_be_bytes(*first),
        None => text[start..end]
            .iter()
            .rev()
            .fold(0, |all, &byte| all >> 8 | u64::from(byte) << 56),
    }
}

/// Appends the characters of a string without its escapes, which are valid.
fn unescape(mut text: &[u8], out: &mut Vec<u8>) {
    loop {
        let (plain, rest) = text.split_at(plain_end(text, 0));
        out.extend_from_slice(plain);
        let Ok((character, size)) = read_escape(rest) else {
            return;
        };
        push_char(out, character);
        text = &rest[size..];
    }
}
