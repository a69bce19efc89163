//! Canonical JSON (docs/reference/protocol.md#canonical-json), in one pass over the received bytes.
//!
//! The tokenizer is that of serde_json. Values are written to the output as they are parsed, without building a
//! tree. Members are written in the order of the input; if that is not the canonical order, the texts of the
//! members of the finished object are reordered.

use crate::error::CoreError;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::error::Category;
use sha2::{Digest, Sha256};
use std::cmp::Ordering;
use std::fmt;

/// Maximum nesting depth of objects and arrays, including the outermost.
pub const MAX_DEPTH: u32 = 64;

/// Every whole number below this magnitude is exactly a double, so its digits are its canonical text.
const EXACT: u64 = 1 << 53;

/// Keys that are not stored (docs/reference/protocol.md#push-a-document), as canonical texts.
const UNSAFE_KEYS: [&[u8]; 5] = [
    b"\"__proto__\"",
    b"\"constructor\"",
    b"\"prototype\"",
    b"\"__class__\"",
    b"\"__dict__\"",
];

/// Returns the canonical text of `text`, with all its members.
pub fn canonicalize(text: &[u8]) -> Result<Vec<u8>, CoreError> {
    let mut writer = Writer::with_capacity(text.len(), Integers::Rounded);
    parse(text, writer.value(Keys::All))?;
    Ok(writer.out)
}

/// Runs `seed` over the whole of `text`.
///
/// A seed must accept every kind of value that it can meet. The only error of its own that it may raise is that
/// of `Writer::enter`.
pub fn parse<'de, S: DeserializeSeed<'de>>(
    text: &'de [u8],
    seed: S,
) -> Result<S::Value, CoreError> {
    // Validating all of it at once is faster than string by string.
    let text = std::str::from_utf8(text).map_err(|_| CoreError::InvalidJson)?;
    let mut tokens = serde_json::Deserializer::from_str(text);
    let value = seed
        .deserialize(&mut tokens)
        .and_then(|value| tokens.end().map(|()| value));
    value.map_err(|error| match error.classify() {
        Category::Data => CoreError::BodyTooDeep,
        Category::Syntax | Category::Eof | Category::Io => CoreError::InvalidJson,
    })
}

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

/// Appends `text` as a canonical JSON string.
pub fn write_string(out: &mut Vec<u8>, text: &str) {
    out.push(b'"');
    let bytes = text.as_bytes();
    let mut done = 0;
    for (at, &byte) in bytes.iter().enumerate() {
        if byte >= 0x20 && byte != b'"' && byte != b'\\' {
            continue;
        }
        out.extend_from_slice(&bytes[done..at]);
        done = at + 1;
        match byte {
            b'"' | b'\\' => out.extend_from_slice(&[b'\\', byte]),
            0x08 => out.extend_from_slice(b"\\b"),
            b'\t' => out.extend_from_slice(b"\\t"),
            b'\n' => out.extend_from_slice(b"\\n"),
            0x0c => out.extend_from_slice(b"\\f"),
            b'\r' => out.extend_from_slice(b"\\r"),
            _ => {
                out.extend_from_slice(b"\\u");
                out.extend_from_slice(hex(&[0, byte]).as_bytes());
            }
        }
    }
    out.extend_from_slice(&bytes[done..]);
    out.push(b'"');
}

/// Appends a whole number as ECMAScript writes it.
pub fn write_integer(out: &mut Vec<u8>, number: i64) {
    if number.unsigned_abs() < EXACT {
        write_digits(out, number);
    } else {
        write_double(out, number as f64);
    }
}

fn write_digits(out: &mut Vec<u8>, number: impl itoa::Integer) {
    out.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
}

fn write_double(out: &mut Vec<u8>, number: f64) {
    out.extend_from_slice(ryu_js::Buffer::new().format(number).as_bytes());
}

/// Selects the members of an object that are kept.
#[derive(Clone, Copy, PartialEq)]
pub enum Keys {
    All,
    Safe,
}

/// Format of 64-bit integers of magnitude `EXACT` and above.
#[derive(Clone, Copy, PartialEq)]
pub enum Integers {
    /// All digits.
    Exact,
    /// The nearest double, which is canonical.
    Rounded,
}

/// The text written so far, and the state of its open objects.
pub struct Writer {
    pub out: Vec<u8>,
    /// True if an integer was met that `Integers` affects; otherwise both settings write the same text.
    pub met_large: bool,
    integers: Integers,
    /// Members of all open objects, those of the outermost object first.
    members: Vec<Member>,
    scratch: Vec<u8>,
    depth: u32,
    pub max_depth: u32,
}

/// Location of a member in `Writer::out`: `"key":value`.
#[derive(Clone, Copy)]
struct Member {
    start: usize,
    key_end: usize,
    end: usize,
    /// True if the key had escapes, so that its text may sort differently from its characters.
    escaped: bool,
}

impl Writer {
    pub fn with_capacity(bytes: usize, integers: Integers) -> Self {
        Self {
            out: Vec::with_capacity(bytes),
            met_large: false,
            integers,
            members: Vec::new(),
            scratch: Vec::new(),
            depth: 0,
            max_depth: MAX_DEPTH,
        }
    }

    /// Returns the seed that appends one JSON value.
    pub fn value(&mut self, keys: Keys) -> Value<'_> {
        Value { writer: self, keys }
    }

    /// Enters a nested value; `leave` returns from it.
    pub fn enter<E: Error>(&mut self) -> Result<(), E> {
        self.depth += 1;
        if self.depth > self.max_depth {
            Err(E::custom(CoreError::BodyTooDeep))
        } else {
            Ok(())
        }
    }

    pub fn leave(&mut self) {
        self.depth -= 1;
    }

    #[cold]
    fn large_integer(&mut self, number: impl itoa::Integer, rounded: f64) {
        self.met_large = true;
        match self.integers {
            Integers::Exact => write_digits(&mut self.out, number),
            Integers::Rounded => write_double(&mut self.out, rounded),
        }
    }

    /// Ends a list of items, each followed by a comma.
    fn close(&mut self, opened: usize, bracket: u8) {
        if self.out.len() > opened {
            self.out.pop();
        }
        self.out.push(bracket);
        self.leave();
    }

    /// Sorts the members from `first` on, which must be the last text written, by their keys. Of duplicate keys
    /// the last one is kept.
    fn sort_members(&mut self, first: usize) {
        let Some(begin) = self.members.get(first).map(|member| member.start) else {
            return;
        };
        let out = &self.out;
        self.members[first..].sort_by(|a, b| a.compare_key(b, out));
        self.scratch.clear();
        let members = &self.members[first..];
        for (at, member) in members.iter().enumerate() {
            if members
                .get(at + 1)
                .is_some_and(|next| member.compare_key(next, out) == Ordering::Equal)
            {
                continue;
            }
            self.scratch
                .extend_from_slice(&out[member.start..member.end]);
            self.scratch.push(b',');
        }
        self.out.truncate(begin);
        self.out.extend_from_slice(&self.scratch);
    }
}

impl Member {
    /// Sorts by code point, which is the byte order in UTF-8.
    fn compare_key(&self, other: &Self, out: &[u8]) -> Ordering {
        // Excludes the quotes: the closing one is not part of the key.
        let (mine, theirs) = (
            &out[self.start + 1..self.key_end - 1],
            &out[other.start + 1..other.key_end - 1],
        );
        if self.escaped || other.escaped {
            unescape(mine).cmp(unescape(theirs))
        } else {
            mine.cmp(theirs)
        }
    }
}

/// Returns the bytes that a canonical string represents.
fn unescape(text: &[u8]) -> impl Iterator<Item = u8> {
    let nibble = |digit: u8| {
        if digit <= b'9' {
            digit - b'0'
        } else {
            digit - b'a' + 10
        }
    };
    let mut rest = text.iter().copied();
    std::iter::from_fn(move || {
        let byte = rest.next()?;
        if byte != b'\\' {
            return Some(byte);
        }
        Some(match rest.next()? {
            b'b' => 0x08,
            b't' => b'\t',
            b'n' => b'\n',
            b'f' => 0x0c,
            b'r' => b'\r',
            b'u' => nibble(rest.nth(2)?) << 4 | nibble(rest.next()?),
            itself => itself,
        })
    })
}

/// Appends one value. Unsafe keys are removed only from objects that are not inside an array: the content of
/// arrays is kept unchanged.
pub struct Value<'w> {
    writer: &'w mut Writer,
    keys: Keys,
}

impl<'de> DeserializeSeed<'de> for Value<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, tokens: D) -> Result<(), D::Error> {
        tokens.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Value<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        self.writer.out.extend_from_slice(b"null");
        Ok(())
    }

    fn visit_bool<E>(self, value: bool) -> Result<(), E> {
        self.writer
            .out
            .extend_from_slice(if value { b"true" } else { b"false" });
        Ok(())
    }

    fn visit_u64<E>(self, value: u64) -> Result<(), E> {
        if value < EXACT {
            write_digits(&mut self.writer.out, value);
        } else {
            self.writer.large_integer(value, value as f64);
        }
        Ok(())
    }

    fn visit_i64<E>(self, value: i64) -> Result<(), E> {
        if value.unsigned_abs() < EXACT {
            write_digits(&mut self.writer.out, value);
        } else {
            self.writer.large_integer(value, value as f64);
        }
        Ok(())
    }

    fn visit_f64<E>(self, value: f64) -> Result<(), E> {
        write_double(&mut self.writer.out, value);
        Ok(())
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<(), E> {
        write_plain(&mut self.writer.out, text);
        Ok(())
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        write_string(&mut self.writer.out, text);
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let writer = self.writer;
        writer.enter()?;
        writer.out.push(b'[');
        let opened = writer.out.len();
        while items.next_element_seed(writer.value(Keys::All))?.is_some() {
            writer.out.push(b',');
        }
        writer.close(opened, b']');
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Self { writer, keys } = self;
        writer.enter()?;
        writer.out.push(b'{');
        let opened = writer.out.len();
        let first = writer.members.len();
        let mut in_order = true;
        loop {
            let start = writer.out.len();
            let Some(escaped) = map.next_key_seed(Key(&mut writer.out))? else {
                break;
            };
            let key_end = writer.out.len();
            writer.out.push(b':');
            map.next_value_seed(writer.value(keys))?;
            if keys == Keys::Safe && UNSAFE_KEYS.contains(&&writer.out[start..key_end]) {
                writer.out.truncate(start);
                continue;
            }
            let member = Member {
                start,
                key_end,
                end: writer.out.len(),
                escaped,
            };
            if let Some(last) = writer.members[first..].last() {
                in_order = in_order && last.compare_key(&member, &writer.out) == Ordering::Less;
            }
            writer.members.push(member);
            writer.out.push(b',');
        }
        if !in_order {
            writer.sort_members(first);
        }
        writer.members.truncate(first);
        writer.close(opened, b'}');
        Ok(())
    }
}

/// Appends a key, and returns true if it had escapes.
struct Key<'w>(&'w mut Vec<u8>);

impl<'de> DeserializeSeed<'de> for Key<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, tokens: D) -> Result<bool, D::Error> {
        tokens.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Key<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<bool, E> {
        write_plain(self.0, text);
        Ok(false)
    }

    fn visit_str<E>(self, text: &str) -> Result<bool, E> {
        write_string(self.0, text);
        Ok(true)
    }
}

/// Appends a string that the tokenizer could borrow: it had no escapes, so it needs none.
fn write_plain(out: &mut Vec<u8>, text: &str) {
    out.push(b'"');
    out.extend_from_slice(text.as_bytes());
    out.push(b'"');
}
