//! The text format of the objects of an append-only log: head, segments, and blocks of the index.
//!
//! Each is one JSON object, `{"v":1,"xxh3":"<16 hex digits>",<header>,"items":[<newline><elements><newline>]}`.
//! The checksum covers everything that follows it. Each line has one element, and no element contains a line
//! break, so a slice of the elements is a slice of the text and is copied into a response unchanged. A block
//! has no items.

use crate::digest::{hex, sha256};
use crate::error::CoreError;
use memchr::memmem;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::fmt::Write;
use twox_hash::XxHash3_64;

const START: &[u8] = b"{\"v\":1,\"xxh3\":\"";
const CHECKSUM: usize = 16;
const AFTER_CHECKSUM: &[u8] = b"\",";
const ITEMS: &[u8] = b",\"items\":[\n";
const END: &[u8] = b"\n]}";
/// Separator of elements.
pub const SEPARATOR: &[u8] = b",\n";
const ELEMENT_START: &[u8] = b"{\"ts\":";

/// The location of elements in a log: the position of the first one, and its time in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct Entry(pub u64, pub u64);

/// The header of an object. Members that an object does not have are empty.
#[derive(Deserialize)]
pub struct Header<'a> {
    pub log: &'a str,
    #[serde(default)]
    pub level: usize,
    pub from: u64,
    pub to: u64,
    /// Head only: time of the write.
    #[serde(default)]
    pub at: u64,
    /// Head only: time of the newest element.
    #[serde(default)]
    pub ts: u64,
    #[serde(default)]
    pub hash: &'a str,
    pub previous: Option<&'a str>,
    /// Head only: other members of `data` than the elements.
    #[serde(borrow)]
    pub beside: Option<&'a RawValue>,
    /// Head only: position of the first retained element, and time of the newest one before it.
    #[serde(default)]
    pub start: u64,
    #[serde(default)]
    pub dropped: u64,
    /// Head only: for each level, the entries that precede those of the next lower level.
    #[serde(default)]
    pub index: Vec<Vec<Entry>>,
    /// Block only.
    #[serde(default)]
    pub entries: Vec<Entry>,
    /// Positions of elements that repeated appends recognise, with their marks.
    #[serde(default)]
    pub marks: Vec<(u64, String)>,
}

/// Returns true if these bytes are an object that pysync wrote, even a damaged one.
pub fn is_own(stored: &[u8]) -> bool {
    stored.starts_with(START)
}

/// Returns true if `write` made these bytes: an object that pysync wrote, with its checksum.
pub fn is_intact(stored: &[u8]) -> bool {
    split(stored).is_some()
}

/// Returns the object with this header, the inside of a JSON object, and these elements; None for a block.
pub fn write(header: &str, elements: Option<&[u8]>) -> Vec<u8> {
    let length = elements.map_or(0, <[u8]>::len);
    let mut out = Vec::with_capacity(header.len() + length + 64);
    out.extend_from_slice(START);
    out.extend_from_slice(&[b'0'; CHECKSUM]);
    out.extend_from_slice(AFTER_CHECKSUM);
    let checked = out.len();
    out.extend_from_slice(header.as_bytes());
    match elements {
        Some(elements) => {
            out.extend_from_slice(ITEMS);
            out.extend_from_slice(elements);
            out.extend_from_slice(END);
        }
        None => out.push(b'}'),
    }
    let checksum = format!("{:016x}", XxHash3_64::oneshot(&out[checked..]));
    out[START.len()..START.len() + CHECKSUM].copy_from_slice(checksum.as_bytes());
    out
}

/// Returns the header of an object as JSON, without the closing brace if elements follow, and the elements.
/// Returns None if `write` did not make these bytes.
fn split(stored: &[u8]) -> Option<(&[u8], &[u8])> {
    let rest = stored.strip_prefix(START)?;
    let (checksum, rest) = rest.split_at_checked(CHECKSUM)?;
    let rest = rest.strip_prefix(AFTER_CHECKSUM)?;
    if checksum != format!("{:016x}", XxHash3_64::oneshot(rest)).as_bytes() {
        return None;
    }
    match memmem::find(rest, ITEMS) {
        Some(at) => Some((&rest[..at], rest[at + ITEMS.len()..].strip_suffix(END)?)),
        None => Some((rest.strip_suffix(b"}")?, b"")),
    }
}

/// Applies `with` to the header of an object and the text of its elements.
pub fn read<'a, T>(
    stored: &'a [u8],
    with: impl FnOnce(Header<'_>, &'a [u8]) -> Option<T>,
) -> Result<T, CoreError> {
    let found = || {
        let (header, elements) = split(stored)?;
        let mut text = Vec::with_capacity(header.len() + 2);
        text.push(b'{');
        text.extend_from_slice(header);
        text.push(b'}');
        let mut header: Header<'_> = serde_json::from_slice(&text).ok()?;
        for entries in &mut header.index {
            read_entries(entries)?;
        }
        read_entries(&mut header.entries)?;
        let count = header.to.checked_sub(header.from)?;
        let is_whole = header.level > 0 || count_of(elements)? == count;
        is_whole.then(|| with(header, elements))?
    };
    found().ok_or(CoreError::DocumentCorrupt)
}

/// Returns the number of elements in a text; None if the text is not a list of elements.
fn count_of(text: &[u8]) -> Option<u64> {
    let (mut rest, mut count) = (text, 0);
    while !rest.is_empty() {
        rest.starts_with(ELEMENT_START).then_some(())?;
        count += 1;
        let Some(end) = memchr::memchr(b'\n', rest) else {
            return Some(count);
        };
        rest[..end].ends_with(b",").then_some(())?;
        rest = &rest[end + 1..];
        (!rest.is_empty()).then_some(())?;
    }
    Some(count)
}

/// Appends `[[12,1763740000000],[14,95],..]`: every entry but the first as the difference to the previous one.
pub fn write_entries(out: &mut String, entries: &[Entry]) {
    out.push('[');
    let mut before = Entry(0, 0);
    for (at, entry) in entries.iter().enumerate() {
        let comma = if at > 0 { "," } else { "" };
        let _ = write!(
            out,
            "{comma}[{},{}]",
            entry.0 - before.0,
            entry.1 - before.1
        );
        before = *entry;
    }
    out.push(']');
}

/// Returns the entries of this format; None if the numbers overflow.
fn read_entries(entries: &mut [Entry]) -> Option<()> {
    let mut before = Entry(0, 0);
    for entry in entries {
        *entry = Entry(
            before.0.checked_add(entry.0)?,
            before.1.checked_add(entry.1)?,
        );
        before = *entry;
    }
    Some(())
}

/// Appends the member `marks`, preceded by a comma; nothing if there are none. Marks are hex digits.
pub fn write_marks(out: &mut String, marks: &[(u64, String)]) {
    for (at, (position, mark)) in marks.iter().enumerate() {
        let before = if at > 0 { "," } else { ",\"marks\":[" };
        let _ = write!(out, "{before}[{position},\"{mark}\"]");
    }
    if !marks.is_empty() {
        out.push(']');
    }
}

/// Appends an element. `author` is the text of the members of its proof.
pub fn write_element(out: &mut Vec<u8>, ts_ms: u64, data: &[u8], author: &[u8]) {
    if !out.is_empty() {
        out.extend_from_slice(SEPARATOR);
    }
    out.extend_from_slice(ELEMENT_START);
    out.extend_from_slice(itoa::Buffer::new().format(ts_ms).as_bytes());
    out.extend_from_slice(b",\"data\":");
    out.extend_from_slice(data);
    out.extend_from_slice(author);
    out.push(b'}');
}

/// Returns the time of the element at the start of `text`.
pub fn ts_of(text: &[u8]) -> Option<u64> {
    let rest = text.strip_prefix(ELEMENT_START)?;
    let end = rest.iter().position(|byte| !byte.is_ascii_digit())?;
    str::from_utf8(&rest[..end]).ok()?.parse().ok()
}

/// Returns the `data` of one element.
pub fn data_of(element: &[u8]) -> Option<&[u8]> {
    #[derive(Deserialize)]
    struct Element<'a> {
        #[serde(borrow)]
        data: &'a RawValue,
    }
    let element: Element<'_> = serde_json::from_slice(element).ok()?;
    Some(element.data.get().as_bytes())
}

/// Iterator over the elements of a text.
pub struct Lines<'a> {
    text: &'a [u8],
    at: Option<usize>,
}

impl<'a> Lines<'a> {
    pub fn of(text: &'a [u8]) -> Self {
        Self {
            text,
            at: (!text.is_empty()).then_some(0),
        }
    }

    /// Returns the text from the next element on.
    pub fn rest(&self) -> &'a [u8] {
        self.at.map_or(b"", |at| &self.text[at..])
    }
}

impl<'a> Iterator for Lines<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let start = self.at?;
        let length = memchr::memchr(b'\n', &self.text[start..]);
        self.at = length.map(|length| start + length + 1);
        // A line break is preceded by the comma of `SEPARATOR`.
        Some(length.map_or(&self.text[start..], |length| {
            &self.text[start..start + length.saturating_sub(1)]
        }))
    }
}

/// Returns the hash of a log of `count` elements; `last` is the canonical text of the data of the last one.
pub fn hash(count: u64, last: &[u8]) -> String {
    hex(&sha256(&hashed(count, last)))
}

/// Returns the text that is hashed.
pub fn hashed(count: u64, last: &[u8]) -> Vec<u8> {
    let mut text = Vec::with_capacity(last.len() + 40);
    text.extend_from_slice(b"{\"last\":");
    text.extend_from_slice(last);
    text.extend_from_slice(b",\"n\":");
    text.extend_from_slice(itoa::Buffer::new().format(count).as_bytes());
    text.push(b'}');
    text
}
