//! Append-only logs: what an append makes of a log's head, and which elements a read takes.
//! See docs/reference/protocol.md#append-only-logs.
//!
//! A log is a head, which holds its newest elements (the tail) and an index, and immutable objects: segments,
//! which hold the elements before the tail, and blocks, which hold entries of the index. Positions count from 0.

use crate::canonical::{hex, sha256};
use crate::envelope::{Author, Content, Member, decode_body, write_author};
use crate::error::CoreError;
use crate::log_format::{self, Entry, Lines};
use crate::log_index::{self, Index, Node, Object, select};
use crate::log_range::LogRange;
use std::fmt::Write;

/// How far ahead of the clock an element may be dated.
pub const MAX_AHEAD_MS: u64 = 300_000;

/// An append body, decoded.
pub struct Append {
    pub content: Content,
    pub ts_ms: Option<u64>,
    /// Unverified, and None unless both members are strings.
    pub author: Option<Author>,
}

impl Append {
    pub fn decode(body: &[u8]) -> Result<Self, CoreError> {
        let (content, members) = decode_body(body)?;
        let ts_ms = match &members.ts[..] {
            b"" => None,
            text => Some(whole_number(text).ok_or(CoreError::InvalidTs)?),
        };
        let author = match (members.author_pubkey, members.author_signature) {
            (Member::Text(pubkey), Member::Text(signature)) => Some(Author { pubkey, signature }),
            _ => None,
        };
        Ok(Self {
            content,
            ts_ms,
            author,
        })
    }
}

/// The number of a canonical text, if it is whole and not negative; the largest there is for any beyond it.
fn whole_number(text: &[u8]) -> Option<u64> {
    let text = str::from_utf8(text).ok()?;
    text.parse().ok().or_else(|| {
        let number: f64 = text.parse().ok()?;
        (number >= u64::MAX as f64).then_some(u64::MAX)
    })
}

/// Why an element was not appended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Refusal {
    TooFarAhead,
    NonMonotonic,
    Full,
}

/// What became of an element that was appended: the log's hash after it, and its time.
pub type Written = (String, u64);

/// What is known of a log without its segments.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Head {
    /// In the keys of its segments; empty of a log that Starfish wrote.
    pub id: String,
    /// The id of an expired log at the same key, whose segments are still to be deleted.
    pub previous: Option<String>,
    pub count: u64,
    /// The newest element's.
    pub ts_ms: Option<u64>,
    pub written_ms: u64,
    /// Empty of an empty log.
    pub hash: String,
    /// Members of `data` beside the elements, as an object; empty for none.
    pub beside: String,
    index: Index,
    /// Of the tail's elements.
    marks: Vec<(u64, String)>,
    pub tail: Vec<u8>,
    pub tail_count: u64,
}

impl Head {
    pub fn read(stored: &[u8]) -> Result<Self, CoreError> {
        log_format::read(stored, |header, elements| {
            let index = Index(header.index);
            index.is_ordered(header.from).then_some(())?;
            Some(Self {
                id: header.log.into(),
                previous: header.previous.map(Into::into),
                count: header.to,
                ts_ms: (header.to > 0).then_some(header.ts),
                written_ms: header.at,
                hash: header.hash.into(),
                beside: header.beside.map_or("", |text| text.get()).into(),
                index,
                marks: header.marks,
                tail: elements.into(),
                tail_count: header.to - header.from,
            })
        })
    }

    /// The object to store.
    pub fn stored(&self) -> Vec<u8> {
        let mut header = String::with_capacity(256 + 24 * self.index.count());
        let _ = write!(
            header,
            "\"log\":\"{}\",\"from\":{},\"to\":{},\"ts\":{},\"at\":{},\"hash\":\"{}\"",
            self.id,
            self.tail_start(),
            self.count,
            self.ts_ms.unwrap_or(0),
            self.written_ms,
            self.hash,
        );
        if let Some(previous) = &self.previous {
            let _ = write!(header, ",\"previous\":\"{previous}\"");
        }
        if !self.beside.is_empty() {
            let _ = write!(header, ",\"beside\":{}", self.beside);
        }
        self.index.write(&mut header);
        log_format::write_marks(&mut header, &self.marks);
        log_format::write(&header, Some(&self.tail))
    }

    /// About how many bytes `stored` has, rather too many than too few.
    pub fn size(&self) -> usize {
        let entries = self.index.count();
        self.tail.len() + self.beside.len() + 28 * (entries + self.marks.len()) + 280
    }

    fn tail_start(&self) -> u64 {
        self.count - self.tail_count
    }

    /// Appends those of `elements`, each with its mark (empty: none), that the log admits, in order.
    pub fn append(
        &mut self,
        elements: &[(&Append, &str)],
        now_ms: u64,
        max_count: Option<u64>,
    ) -> Vec<Result<Written, Refusal>> {
        // A node whose clock is behind must not make the log look older than its last append.
        self.written_ms = self.written_ms.max(now_ms);
        let add = |(element, mark): &(&Append, &str)| {
            let ts_ms = self.admit(element.ts_ms, now_ms, max_count)?;
            let mut author = Vec::new();
            write_author(&mut author, element.author.as_ref());
            log_format::write_element(&mut self.tail, ts_ms, &element.content.data, &author);
            if !mark.is_empty() {
                self.marks.push((self.count, (*mark).into()));
            }
            self.count += 1;
            self.tail_count += 1;
            self.ts_ms = Some(ts_ms);
            self.hash = hash(self.count, element.content.canonical());
            Ok((self.hash.clone(), ts_ms))
        };
        elements.iter().map(add).collect()
    }

    /// The time of the next element, which asks for `wanted`.
    fn admit(
        &self,
        wanted: Option<u64>,
        now_ms: u64,
        max_count: Option<u64>,
    ) -> Result<u64, Refusal> {
        if wanted.is_some_and(|ts_ms| ts_ms > now_ms.saturating_add(MAX_AHEAD_MS)) {
            return Err(Refusal::TooFarAhead);
        }
        if max_count.is_some_and(|max_count| self.count >= max_count) {
            return Err(Refusal::Full);
        }
        let earliest = self.ts_ms.map_or(Some(0), |last| last.checked_add(1));
        let earliest = earliest.ok_or(Refusal::NonMonotonic)?;
        match wanted {
            Some(ts_ms) if ts_ms < earliest => Err(Refusal::NonMonotonic),
            Some(ts_ms) => Ok(ts_ms),
            None => Ok(now_ms.max(earliest)),
        }
    }

    /// Empties the tail, and returns the objects, by name, that must be stored before the next head.
    ///
    /// A name is never given to other bytes: a segment's elements are stored already, and a block's entries are
    /// those of a stored head. Only a log that has just got its id spills entries at once that it has just made.
    pub fn seal(&mut self, max_bytes: usize) -> Vec<Object> {
        let mut objects = Vec::new();
        let is_new = self.index.is_empty();
        let mut start = self.tail_start();
        self.index.spill(&self.id, start, &mut objects);
        let (tail, marks) = (
            std::mem::take(&mut self.tail),
            std::mem::take(&mut self.marks),
        );
        let mut rest = &tail[..];
        while !rest.is_empty() {
            let (text, count, after) = cut(rest, max_bytes, u64::MAX);
            let end = start + count;
            let mut header = format!("\"log\":\"{}\",\"from\":{start},\"to\":{end}", self.id);
            let own = marks.iter().filter(|(at, _)| (start..end).contains(at));
            log_format::write_marks(&mut header, &own.cloned().collect::<Vec<_>>());
            if is_new {
                self.index.spill(&self.id, start, &mut objects);
            }
            let entry = Entry(start, log_format::ts_of(text).unwrap_or(0));
            objects.push((
                self.index.add(entry, end).name(),
                log_format::write(&header, Some(text)),
            ));
            (rest, start) = (after, end);
        }
        self.tail_count = 0;
        objects
    }

    /// The nodes to read, beside the tail, for the elements within `bounds`, in the log's order.
    pub fn nodes(&self, bounds: LogRange) -> Vec<Node> {
        let nodes = self
            .index
            .nodes(self.tail_start(), log_format::ts_of(&self.tail));
        select(nodes, self.first(bounds), bounds)
    }

    /// The same of what lies below `node`, whose object is `block`.
    pub fn expand(
        &self,
        block: &[u8],
        node: &Node,
        bounds: LogRange,
    ) -> Result<Vec<Node>, CoreError> {
        let nodes = log_index::expand(block, &self.id, node)?;
        Ok(select(nodes, self.first(bounds), bounds))
    }

    /// The first position that the number of the newest elements allows.
    fn first(&self, bounds: LogRange) -> u64 {
        bounds
            .newest
            .map_or(0, |newest| self.count.saturating_sub(newest))
    }

    /// The elements of a segment, whose object is `stored`.
    fn elements<'a>(&self, stored: &'a [u8], node: &Node) -> Result<&'a [u8], CoreError> {
        log_format::read(stored, |header, elements| {
            let is_it = header.log == self.id
                && (header.from, header.to) == (node.start, node.end)
                && node.level == 0;
            is_it.then_some(elements)
        })
    }

    /// The text of the elements within `bounds` that lie in `segments`, which follow each other, and in the tail
    /// if `with_tail`: pieces that belong together with a separator between any two.
    pub fn slice<'a>(
        &'a self,
        segments: &[(Node, &'a [u8])],
        with_tail: bool,
        bounds: LogRange,
    ) -> Result<Vec<&'a [u8]>, CoreError> {
        let mut pieces = Vec::with_capacity(segments.len() + 1);
        let mut left = bounds.oldest;
        let mut add = |start: u64, text: &'a [u8]| {
            let text = after(text, self.first(bounds).saturating_sub(start), bounds.since);
            let text = match &mut left {
                None => text,
                Some(left) => {
                    let (text, count, _) = cut(text, usize::MAX, *left);
                    *left -= count;
                    text
                }
            };
            if !text.is_empty() {
                pieces.push(text);
            }
        };
        for (node, stored) in segments {
            add(node.start, self.elements(stored, node)?);
        }
        if with_tail {
            add(self.tail_start(), &self.tail);
        }
        Ok(pieces)
    }

    /// What `append` answered for the element with this mark, in `segments` or the tail; None where it is not.
    pub fn written(
        &self,
        mark: &str,
        segments: &[(Node, &[u8])],
    ) -> Result<Option<Written>, CoreError> {
        let in_tail = written(mark, &self.marks, self.tail_start(), &self.tail)?;
        if in_tail.is_some() {
            return Ok(in_tail);
        }
        for (node, stored) in segments {
            let elements = self.elements(stored, node)?;
            let marks = log_format::read(stored, |header, _| Some(header.marks))?;
            let found = written(mark, &marks, node.start, elements)?;
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }
}

/// The hash of a log of `count` elements, `last` being the canonical text of the last one's data.
pub fn hash(count: u64, last: &[u8]) -> String {
    hex(&sha256(&hashed(count, last)))
}

/// The text that is hashed.
pub fn hashed(count: u64, last: &[u8]) -> Vec<u8> {
    let mut text = Vec::with_capacity(last.len() + 40);
    text.extend_from_slice(b"{\"last\":");
    text.extend_from_slice(last);
    text.extend_from_slice(b",\"n\":");
    text.extend_from_slice(itoa::Buffer::new().format(count).as_bytes());
    text.push(b'}');
    text
}

/// The text without its first `skip` elements, and those that are not after `since`.
fn after(text: &[u8], skip: u64, since: Option<u64>) -> &[u8] {
    let mut lines = Lines::of(text);
    for _ in 0..skip {
        if lines.next().is_none() {
            break;
        }
    }
    if let Some(since) = since {
        while log_format::ts_of(lines.rest()).is_some_and(|ts_ms| ts_ms <= since) {
            lines.next();
        }
    }
    lines.rest()
}

/// The first elements of a text, at most `max_count` and `max_bytes` of them but at least one where any are
/// allowed; how many they are; and the rest.
fn cut(text: &[u8], max_bytes: usize, max_count: u64) -> (&[u8], u64, &[u8]) {
    let mut lines = Lines::of(text);
    let (mut end, mut count, mut rest) = (0, 0, text);
    while count < max_count {
        let start = text.len() - lines.rest().len();
        let Some(line) = lines.next() else {
            break;
        };
        if count > 0 && start + line.len() > max_bytes {
            break;
        }
        end = start + line.len();
        rest = lines.rest();
        count += 1;
    }
    (&text[..end], count, rest)
}

/// What became of the element with this mark, among `elements`, of which the first is at `start`.
fn written(
    mark: &str,
    marks: &[(u64, String)],
    start: u64,
    elements: &[u8],
) -> Result<Option<Written>, CoreError> {
    let Some(&(position, _)) = marks.iter().find(|(_, known)| known == mark) else {
        return Ok(None);
    };
    let found = || {
        let at = usize::try_from(position.checked_sub(start)?).ok()?;
        let element = Lines::of(elements).nth(at)?;
        let data = crate::canonical::canonicalize(log_format::data_of(element)?).ok()?;
        Some((hash(position + 1, &data), log_format::ts_of(element)?))
    };
    found().map(Some).ok_or(CoreError::DocumentCorrupt)
}
