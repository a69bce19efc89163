//! Append-only logs: appends to the head of a log, and the elements that a read returns. See
//! docs/reference/protocol.md#append-only-logs.
//!
//! A log consists of a head and of immutable objects. The head contains the newest elements (the tail) and an
//! index. Segments contain the elements before the tail, and blocks contain entries of the index. Positions
//! count from 0.

use crate::envelope::{Author, Content, Member, decode_body, write_author};
use crate::error::CoreError;
use crate::hash_check::is_hash_of;
use crate::log_format::{self, Entry, Lines, hash, hashed};
use crate::log_index::{self, Index, Node, Object, select};
use crate::log_range::LogRange;
use std::fmt::Write;

/// Maximum milliseconds by which the time of an element may be ahead of the clock.
pub const MAX_AHEAD_MS: u64 = 300_000;

/// A decoded append body.
pub struct Append {
    pub content: Content,
    pub ts_ms: Option<u64>,
    /// Not verified. None unless both members are strings.
    pub author: Option<Author>,
}

impl Append {
    pub fn decode(body: &[u8]) -> Result<Self, CoreError> {
        let (content, members) = decode_body(body)?;
        let ts_ms = match &members.ts[..] {
            b"" | b"null" => None,
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

/// Returns the value of a canonical number, if it is whole and not negative; `u64::MAX` for any larger one.
fn whole_number(text: &[u8]) -> Option<u64> {
    let text = str::from_utf8(text).ok()?;
    text.parse().ok().or_else(|| {
        let number: f64 = text.parse().ok()?;
        (number >= u64::MAX as f64).then_some(u64::MAX)
    })
}

/// The reason why an element was rejected.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Refusal {
    TooFarAhead,
    NonMonotonic,
    Full,
}

/// The result of an appended element: the hash of the log after it, and its time.
pub type Written = (String, u64);

/// The head of a log: everything but its segments and blocks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Head {
    /// Part of the keys of its segments. Empty for a log that Starfish wrote.
    pub id: String,
    /// The id of an expired log at the same key, whose segments are still to be deleted.
    pub previous: Option<String>,
    pub count: u64,
    /// Time of the newest element.
    pub ts_ms: Option<u64>,
    pub written_ms: u64,
    /// Empty for an empty log.
    pub hash: String,
    /// The other members of `data`, as a JSON object; empty without any.
    pub beside: String,
    /// Position of the first retained element.
    pub start: u64,
    /// Time of the newest element before `start`; 0 if there is none.
    pub dropped_ms: u64,
    index: Index,
    /// Marks of elements of the tail.
    marks: Vec<(u64, String)>,
    pub tail: Vec<u8>,
    pub tail_count: u64,
}

impl Head {
    pub fn read(stored: &[u8]) -> Result<Self, CoreError> {
        log_format::read(stored, |header, elements| {
            let index = Index(header.index);
            index.is_ordered(header.start, header.from).then_some(())?;
            Some(Self {
                id: header.log.into(),
                previous: header.previous.map(Into::into),
                count: header.to,
                ts_ms: (header.to > 0).then_some(header.ts),
                written_ms: header.at,
                hash: header.hash.into(),
                beside: header.beside.map_or("", |text| text.get()).into(),
                start: header.start,
                dropped_ms: header.dropped,
                index,
                marks: header.marks,
                tail: elements.into(),
                tail_count: header.to - header.from,
            })
        })
    }

    /// Compares the hash with that of the newest element and the count. A stored head has that element, unless
    /// no element is retained.
    pub fn verify(&self) -> bool {
        match Lines::of(&self.tail).last() {
            None => self.hash.is_empty() == (self.count == 0) && self.start == self.count,
            Some(newest) => log_format::data_of(newest)
                .is_some_and(|data| is_hash_of(&self.hash, &hashed(self.count, data))),
        }
    }

    /// Returns the object to store.
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
        if self.start > 0 {
            let (start, dropped) = (self.start, self.dropped_ms);
            let _ = write!(header, ",\"start\":{start},\"dropped\":{dropped}");
        }
        self.index.write(&mut header);
        log_format::write_marks(&mut header, &self.marks);
        log_format::write(&header, Some(&self.tail))
    }

    /// Returns the approximate size of `stored` in bytes, rather too large than too small.
    pub fn size(&self) -> usize {
        let entries = self.index.count();
        self.tail.len() + self.beside.len() + 28 * (entries + self.marks.len()) + 280
    }

    fn tail_start(&self) -> u64 {
        self.count - self.tail_count
    }

    /// Appends the elements that the log accepts, in order. Each comes with its mark (empty: none).
    pub fn append(
        &mut self,
        elements: &[(&Append, &str)],
        now_ms: u64,
        max_count: Option<u64>,
    ) -> Vec<Result<Written, Refusal>> {
        // If the clock of this node is behind, the log must not look older than its last append.
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

    /// Returns the time of the next element, which requests `wanted`.
    fn admit(
        &self,
        wanted: Option<u64>,
        now_ms: u64,
        max_count: Option<u64>,
    ) -> Result<u64, Refusal> {
        if wanted.is_some_and(|ts_ms| ts_ms > now_ms.saturating_add(MAX_AHEAD_MS)) {
            return Err(Refusal::TooFarAhead);
        }
        if max_count.is_some_and(|max_count| self.count - self.start >= max_count) {
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
    /// A name is never reused for other bytes: the elements of a segment are stored already, and the entries of
    /// a block are those of a stored head. Only a log with a new id may put entries into blocks as soon as it
    /// creates them.
    pub fn seal(&mut self, max_bytes: usize) -> Vec<Object> {
        let mut objects = Vec::new();
        let mut start = self.tail_start();
        let is_new = start == 0;
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

    /// Drops the elements before the position `start`, the newest of which has the time `dropped_ms`. `start` is
    /// that of a segment or of the tail, or `count`, which drops the tail as well.
    pub fn drop_before(&mut self, start: u64, dropped_ms: u64) {
        (self.start, self.dropped_ms) = (start, dropped_ms);
        if start == self.count {
            (self.tail, self.tail_count) = (Vec::new(), 0);
            self.marks = Vec::new();
        }
        self.index.drop_before(start, self.tail_start());
    }

    /// Returns the nodes to read, in addition to the tail, for the elements within `bounds`, in order.
    pub fn nodes(&self, bounds: LogRange) -> Vec<Node> {
        let nodes = self
            .index
            .nodes(self.tail_start(), log_format::ts_of(&self.tail));
        select(nodes, self.first(bounds), bounds)
    }

    /// Returns the nodes to read below `node`, whose object is `block`.
    pub fn expand(
        &self,
        block: &[u8],
        node: &Node,
        bounds: LogRange,
    ) -> Result<Vec<Node>, CoreError> {
        let nodes = log_index::expand(block, &self.id, node)?;
        Ok(select(nodes, self.first(bounds), bounds))
    }

    /// Returns the first retained position that the maximum number of newest elements includes.
    fn first(&self, bounds: LogRange) -> u64 {
        let newest = bounds.newest.unwrap_or(u64::MAX);
        self.count.saturating_sub(newest).max(self.start)
    }

    /// Returns the elements of a segment, whose object is `stored`.
    fn elements<'a>(&self, stored: &'a [u8], node: &Node) -> Result<&'a [u8], CoreError> {
        log_format::read(stored, |header, elements| {
            let is_it = header.log == self.id
                && (header.from, header.to) == (node.start, node.end)
                && node.level == 0;
            is_it.then_some(elements)
        })
    }

    /// Returns the time of the last element of a segment, whose object is `stored`.
    pub fn last_ts_ms(&self, node: &Node, stored: &[u8]) -> Result<u64, CoreError> {
        let last = Lines::of(self.elements(stored, node)?).last();
        last.and_then(log_format::ts_of)
            .ok_or(CoreError::DocumentCorrupt)
    }

    /// Returns the text of the elements within `bounds`, from consecutive `segments` and, if `with_tail`, from
    /// the tail. Join the slices with the separator.
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

    /// Returns the result of the earlier append with this mark, found in `segments` or the tail; None without
    /// one.
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

/// Returns the text without its first `skip` elements, and without those that are not after `since`.
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

/// Returns the first elements of a text, their number, and the rest: at most `max_count` elements and
/// `max_bytes` bytes, but at least one element if any are allowed.
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

/// Returns the result of the append with this mark, among `elements`; the first of these is at `start`.
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
