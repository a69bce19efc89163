//! Canonical JSON (docs/reference/protocol.md#canonical-json), in one pass over the received bytes.
//!
//! Most of a text is canonical already. It is copied in runs that end where the canonical text differs. Members
//! are written in the order of the input; if that is not the canonical order, the texts of the members of the
//! finished object are reordered.

use crate::error::CoreError;
use crate::json_number::{self, Form};
use crate::json_string::{self, Key};
use std::cmp::Ordering;
use std::mem::take;
use std::ops::Range;

/// Maximum nesting depth of objects and arrays, including the outermost.
pub const MAX_DEPTH: u32 = 64;

/// Keys that are not stored (docs/reference/protocol.md#push-a-document).
const UNSAFE_KEYS: [&[u8]; 5] = [
    b"__proto__",
    b"constructor",
    b"prototype",
    b"__class__",
    b"__dict__",
];

/// Returns the canonical text of `text`, with all its members.
pub fn canonicalize(text: &[u8]) -> Result<Vec<u8>, CoreError> {
    rewrite(text, Integers::Rounded, MAX_DEPTH)
}

/// Returns the canonical text of `text`, with all its members, except for integers that `integers` changes.
pub fn rewrite(text: &[u8], integers: Integers, max_depth: u32) -> Result<Vec<u8>, CoreError> {
    let mut reader = Reader::new(text, integers)?;
    reader.max_depth = max_depth;
    let canonical = take(reader.read_value(Keys::All)?);
    reader.end()?;
    Ok(canonical)
}

/// Makes room in `list` for `more` items.
pub fn reserve<T>(list: &mut Vec<T>, more: usize) -> Result<(), CoreError> {
    list.try_reserve(more).map_err(|_| CoreError::OutOfMemory)
}

/// Selects the members of an object that are kept.
#[derive(Clone, Copy, PartialEq)]
pub enum Keys {
    All,
    /// All but the unsafe ones. These are removed only from objects that are not inside an array: the content
    /// of arrays is kept unchanged.
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

/// Reads a JSON text, and writes the canonical text of its values.
pub struct Reader<'a> {
    text: &'a str,
    /// Position of the next byte to read.
    at: usize,
    /// Position from which the text is still to be copied to `out`.
    copied: usize,
    /// Has room for the rest of the text, and for `SHORT` bytes, wherever bytes are added to it. Numbers may
    /// take more than they do in the text, so it begins with a little more.
    out: Vec<u8>,
    /// True if an integer was met that `Integers` affects; otherwise both settings write the same text.
    pub met_large: bool,
    integers: Integers,
    /// Members of all open objects, those of the outermost object first.
    members: Vec<Member>,
    /// Keys of these members that have escapes, without the escapes.
    unescaped: Vec<u8>,
    scratch: Vec<u8>,
    depth: u32,
    max_depth: u32,
}

/// A member of an open object, and the location of `"key":value` in the canonical text.
#[derive(Clone, Copy)]
pub struct Member {
    key: Key,
    start: usize,
    end: usize,
}

impl<'a> Reader<'a> {
    pub fn new(text: &'a [u8], integers: Integers) -> Result<Self, CoreError> {
        Ok(Self {
            // Validating all of it at once is faster than string by string.
            text: simdutf8::basic::from_utf8(text).map_err(|_| CoreError::InvalidJson)?,
            at: 0,
            copied: 0,
            out: Vec::new(),
            met_large: false,
            integers,
            members: Vec::new(),
            unescaped: Vec::new(),
            scratch: Vec::new(),
            depth: 0,
            max_depth: MAX_DEPTH,
        })
    }

    /// Reads the next value, and returns its canonical text.
    pub fn read_value(&mut self, keys: Keys) -> Result<&mut Vec<u8>, CoreError> {
        self.peek();
        self.copied = self.at;
        self.out.clear();
        let rest = self.text.len() - self.at;
        reserve(&mut self.out, rest + rest / 16 + SHORT)?;
        self.value(keys)?;
        self.copy_to(self.at);
        Ok(&mut self.out)
    }

    /// Reads the end of the text.
    pub fn end(&mut self) -> Result<(), CoreError> {
        self.peek();
        check(self.at == self.text.len())
    }

    /// Enters an object or an array.
    pub fn enter(&mut self) -> Result<(), CoreError> {
        if self.depth == self.max_depth {
            return Err(CoreError::BodyTooDeep);
        }
        self.depth += 1;
        self.at += 1;
        Ok(())
    }

    /// Leaves an object or an array.
    pub fn leave(&mut self) {
        self.depth -= 1;
        self.at += 1;
    }

    /// Reads the key and the colon of the next member. Returns None at the end of the object.
    pub fn next_member(&mut self, is_first: bool) -> Result<Option<Member>, CoreError> {
        let mut next = self.peek();
        if next == b'}' {
            return Ok(None);
        }
        if !is_first {
            check(next == b',')?;
            self.at += 1;
            next = self.peek();
        }
        check(next == b'"')?;
        let (start, opened) = (self.position(), self.at + 1);
        let is_escaped = self.string()?;
        if is_escaped {
            reserve(&mut self.unescaped, self.at - opened)?;
        }
        let key = Key::new(
            self.text.as_bytes(),
            opened..self.at - 1,
            is_escaped,
            &mut self.unescaped,
        );
        check(self.peek() == b':')?;
        self.at += 1;
        let end = start;
        Ok(Some(Member { key, start, end }))
    }

    /// Returns the key of a member, without escapes.
    pub fn key(&self, member: &Member) -> &[u8] {
        member.key.characters(self.text.as_bytes(), &self.unescaped)
    }

    /// Returns the first byte of the next token; 0 at the end.
    #[inline]
    pub fn peek(&mut self) -> u8 {
        match self.text.as_bytes().get(self.at) {
            Some(&byte) if byte > b' ' => byte,
            _ => self.skip_whitespace(),
        }
    }

    fn skip_whitespace(&mut self) -> u8 {
        self.copy_to(self.at);
        let text = self.text.as_bytes();
        while let Some(b' ' | b'\n' | b'\t' | b'\r') = text.get(self.at) {
            self.at += 1;
        }
        self.copied = self.at;
        text.get(self.at).copied().unwrap_or(0)
    }

    /// Copies what is still to be copied of the text before `end`.
    fn copy_to(&mut self, end: usize) {
        append(&mut self.out, self.text.as_bytes(), self.copied..end);
        self.copied = end;
    }

    /// Returns the position in the canonical text, as if all that was read were copied.
    fn position(&self) -> usize {
        self.out.len() + self.at - self.copied
    }

    fn value(&mut self, keys: Keys) -> Result<(), CoreError> {
        match self.peek() {
            b'"' => self.string().map(drop),
            b'{' => self.object(keys),
            b'[' => self.array(),
            b'-' | b'0'..=b'9' => self.number(),
            b't' => self.literal(b"true"),
            b'f' => self.literal(b"false"),
            b'n' => self.literal(b"null"),
            _ => Err(CoreError::InvalidJson),
        }
    }

    fn literal(&mut self, literal: &[u8]) -> Result<(), CoreError> {
        check(self.text.as_bytes()[self.at..].starts_with(literal))?;
        self.at += literal.len();
        Ok(())
    }

    fn number(&mut self) -> Result<(), CoreError> {
        let start = self.at;
        let (size, form) = json_number::scan(&self.text.as_bytes()[start..])?;
        self.at += size;
        if form == Form::Canonical {
            return Ok(());
        }
        let text = &self.text[start..self.at];
        if form == Form::Whole
            && let Some(magnitude) = json_number::magnitude(text)
        {
            let is_large = magnitude >= json_number::EXACT;
            self.met_large |= is_large;
            if !is_large || self.integers == Integers::Exact {
                return Ok(());
            }
        }
        let mut buffer = ryu_js::Buffer::new();
        let canonical = buffer.format(json_number::nearest_double(text)?);
        if canonical != text {
            self.copy_to(start);
            let rest = self.text.len() - self.at;
            reserve(&mut self.out, canonical.len() + rest + SHORT)?;
            self.out.extend_from_slice(canonical.as_bytes());
            self.copied = self.at;
        }
        Ok(())
    }

    /// Reads a string. Returns true if it has escapes.
    #[inline]
    fn string(&mut self) -> Result<bool, CoreError> {
        let text = self.text.as_bytes();
        self.at = json_string::plain_end(text, self.at + 1);
        let is_escaped = text.get(self.at) == Some(&b'\\');
        if is_escaped {
            self.escapes()?;
        }
        check(text.get(self.at) == Some(&b'"'))?;
        self.at += 1;
        Ok(is_escaped)
    }

    /// Reads the rest of a string, which begins with an escape.
    fn escapes(&mut self) -> Result<(), CoreError> {
        let text = self.text.as_bytes();
        while let [b'\\', escape, ..] = text[self.at..] {
            if matches!(escape, b'"' | b'\\' | b'b' | b'f' | b'n' | b'r' | b't') {
                self.at += 2;
            } else {
                let (character, size) = json_string::read_escape(&text[self.at..])?;
                self.copy_to(self.at);
                json_string::write_char(&mut self.out, character);
                self.at += size;
                self.copied = self.at;
            }
            self.at = json_string::plain_end(text, self.at);
        }
        Ok(())
    }

    fn array(&mut self) -> Result<(), CoreError> {
        self.enter()?;
        let mut next = self.peek();
        if next != b']' {
            self.value(Keys::All)?;
            next = self.peek();
        }
        while next != b']' {
            check(next == b',')?;
            self.at += 1;
            self.value(Keys::All)?;
            next = self.peek();
        }
        self.leave();
        Ok(())
    }

    fn object(&mut self, keys: Keys) -> Result<(), CoreError> {
        self.enter()?;
        let opened = self.position();
        let (first, unescaped) = (self.members.len(), self.unescaped.len());
        let (mut is_first, mut in_order) = (true, true);
        while let Some(mut member) = self.next_member(is_first)? {
            is_first = false;
            self.value(keys)?;
            if keys == Keys::Safe && UNSAFE_KEYS.contains(&self.key(&member)) {
                in_order = false;
                continue;
            }
            member.end = self.position();
            if let Some(last) = self.members[first..].last() {
                in_order = in_order && self.compare(last, &member).is_lt();
            }
            if self.members.len() == self.members.capacity() {
                reserve(&mut self.members, 1)?;
            }
            self.members.push(member);
        }
        if !in_order {
            self.sort_members(first, opened)?;
        }
        self.members.truncate(first);
        self.unescaped.truncate(unescaped);
        self.leave();
        Ok(())
    }

    fn compare(&self, a: &Member, b: &Member) -> Ordering {
        let text = self.text.as_bytes();
        a.key.compare(&b.key, text, &self.unescaped)
    }

    /// Rewrites the members of the innermost object, the canonical text from `opened` on, sorted by their keys.
    /// They are those from `first` on. Of duplicate keys the last one is kept.
    fn sort_members(&mut self, first: usize, opened: usize) -> Result<(), CoreError> {
        let (text, unescaped) = (self.text.as_bytes(), &self.unescaped);
        let compare = |a: &Member, b: &Member| a.key.compare(&b.key, text, unescaped);
        let members = &mut self.members[first..];
        if members.len() <= FEW {
            members.sort_by(compare);
        } else {
            members.sort_unstable_by(|a, b| compare(a, b).then(a.start.cmp(&b.start)));
        }
        let source = if let Some(before) = opened.checked_sub(self.out.len()) {
            // Nothing of the object has been copied: its members can be copied in their order at once.
            let (before, object) = text[self.copied..self.at].split_at(before);
            self.out.extend_from_slice(before);
            object
        } else {
            self.out.extend_from_slice(&text[self.copied..self.at]);
            self.scratch.clear();
            reserve(&mut self.scratch, self.out.len() - opened)?;
            self.scratch.extend_from_slice(&self.out[opened..]);
            self.out.truncate(opened);
            &self.scratch
        };
        self.copied = self.at;
        for (at, member) in members.iter().enumerate() {
            let next = members.get(at + 1);
            if next.is_some_and(|next| compare(member, next).is_eq()) {
                continue;
            }
            if self.out.len() > opened {
                self.out.push(b',');
            }
            let place = member.start - opened..member.end - opened;
            append(&mut self.out, source, place);
        }
        Ok(())
    }
}

/// Members up to which a stable sort allocates nothing. It is faster for these.
const FEW: usize = 20;

/// Length up to which `append` copies a constant number of bytes, which is faster than a call.
const SHORT: usize = 32;

/// Appends a part of `source`.
#[inline]
fn append(out: &mut Vec<u8>, source: &[u8], part: Range<usize>) {
    match source[part.start..].first_chunk::<SHORT>() {
        Some(short) if part.len() <= short.len() => {
            let end = out.len() + part.len();
            out.extend_from_slice(short);
            out.truncate(end);
        }
        _ => out.extend_from_slice(&source[part]),
    }
}

fn check(is_valid: bool) -> Result<(), CoreError> {
    is_valid.then_some(()).ok_or(CoreError::InvalidJson)
}
