//! The response to a batch pull, assembled from stored bytes (docs/reference/protocol.md#batch-pull).

use crate::batch::{Entry, Plan, Tail};
use crate::envelope::Document;
use crate::json_string::write_string;
use twox_hash::XxHash3_64;

/// The result of a read of the store.
pub enum Stored<'a> {
    Missing,
    Bytes(&'a [u8]),
    Failed(&'a str),
}

/// The result of the read of a document.
pub enum Found {
    Missing,
    Document(Document),
    /// The client has this version.
    Unchanged(String),
    Failed(String),
}

/// The result of the read of a log: its hash and a flag for omitted elements, or the text of an error.
pub type TailOutcome = Result<(String, bool), String>;

/// The results of all reads of a plan.
pub struct Outcomes {
    pub reads: Vec<Found>,
    pub tails: Vec<TailOutcome>,
}

impl Found {
    fn of(stored: &Stored<'_>, ttl_ms: Option<u64>, now_ms: u64) -> Self {
        let has_expired =
            |ts_ms: u64| ttl_ms.is_some_and(|ttl_ms| ts_ms.saturating_add(ttl_ms) < now_ms);
        match stored {
            Stored::Missing => Self::Missing,
            Stored::Failed(text) => Self::Failed((*text).into()),
            Stored::Bytes(bytes) => match Document::locate(bytes) {
                Err(_) => Self::Failed("document_corrupt".into()),
                Ok(document) if has_expired(document.ts_ms) => Self::Missing,
                Ok(document) => Self::Document(document),
            },
        }
    }
}

impl Plan {
    /// Returns the result of each read; `stored` has the results of the store.
    pub fn find(&self, stored: &[Stored<'_>], now_ms: u64) -> Vec<Found> {
        stored
            .iter()
            .zip(&self.ttls_ms)
            .map(|(stored, &ttl_ms)| Found::of(stored, ttl_ms, now_ms))
            .collect()
    }

    /// Returns a hash of the content of the entries: names, keys, ranges, hashes, errors and `variant`.
    pub fn version(&self, outcomes: &Outcomes, variant: &[u8]) -> u64 {
        let mut content = Vec::with_capacity(128 * (self.entries.len() + 1));
        let mut add = |mark: u8, text: &[u8]| {
            content.push(mark);
            content.extend_from_slice(text);
        };
        add(0xF8, variant);
        for (name, range) in &self.names {
            add(0xF9, name.as_bytes());
            for entry in &self.entries[range.clone()] {
                match entry {
                    Entry::Failed(text) => add(0xFA, text.as_bytes()),
                    Entry::Read(at) => {
                        add(0xFB, self.reads[*at].key.as_bytes());
                        match &outcomes.reads[*at] {
                            Found::Missing => add(0xFC, b""),
                            Found::Document(document) => add(0xFD, document.hash.as_bytes()),
                            Found::Unchanged(hash) => add(0xF7, hash.as_bytes()),
                            Found::Failed(text) => add(0xFA, text.as_bytes()),
                        }
                    }
                    Entry::Tail(at) => {
                        let Tail { key, bounds, .. } = &self.tails[*at];
                        add(0xFB, key.as_bytes());
                        for bound in [bounds.since, bounds.newest, bounds.oldest] {
                            let digits = bound.map(|bound| bound.to_string());
                            add(0xFE, digits.unwrap_or_default().as_bytes());
                        }
                        match &outcomes.tails[*at] {
                            Ok((hash, _)) => add(0xFD, hash.as_bytes()),
                            Err(text) => add(0xFA, text.as_bytes()),
                        }
                    }
                }
            }
        }
        XxHash3_64::oneshot(&content)
    }

    /// Returns how many entries use each read, and each log read.
    pub fn times(&self) -> (Vec<usize>, Vec<usize>) {
        let (mut reads, mut tails) = (vec![0; self.reads.len()], vec![0; self.tails.len()]);
        for entry in &self.entries {
            match entry {
                Entry::Failed(_) => {}
                Entry::Read(at) => reads[*at] += 1,
                Entry::Tail(at) => tails[*at] += 1,
            }
        }
        (reads, tails)
    }

    /// Returns true if any entry is an error.
    pub fn failed(&self, outcomes: &Outcomes) -> bool {
        self.entries.iter().any(|entry| match entry {
            Entry::Failed(_) => true,
            Entry::Read(at) => matches!(outcomes.reads[*at], Found::Failed(_)),
            Entry::Tail(at) => outcomes.tails[*at].is_err(),
        })
    }

    /// Returns the text of the response, without the `data` of documents and logs.
    pub fn frame(&self, outcomes: &Outcomes, now_ms: u64) -> Frame {
        let mut frame = Frame::default();
        frame.text.extend_from_slice(b"{\"collections\":{");
        for (at, (name, range)) in self.names.iter().enumerate() {
            frame.separate(at);
            write_string(&mut frame.text, name);
            frame.text.extend_from_slice(b":[");
            for (at, entry) in self.entries[range.clone()].iter().enumerate() {
                frame.separate(at);
                match entry {
                    Entry::Failed(text) => frame.error(text),
                    Entry::Read(at) => frame.document(*at, &outcomes.reads[*at], now_ms),
                    Entry::Tail(at) => frame.log(*at, &outcomes.tails[*at], now_ms),
                }
            }
            frame.text.push(b']');
        }
        frame.text.extend_from_slice(b"}}");
        frame
    }
}

/// Response text with gaps for the `data` of reads.
#[derive(Default)]
pub struct Frame {
    text: Vec<u8>,
    /// Positions in `text`, and the read that fills each gap.
    gaps: Vec<(usize, Gap)>,
}

/// The read whose `data` fills a gap.
#[derive(Clone, Copy)]
pub enum Gap {
    Read(usize),
    Tail(usize),
}

impl Frame {
    fn separate(&mut self, at: usize) {
        if at > 0 {
            self.text.push(b',');
        }
    }

    fn error(&mut self, text: &str) {
        self.text.extend_from_slice(b"{\"error\":");
        write_string(&mut self.text, text);
        self.text.push(b'}');
    }

    fn document(&mut self, at: usize, found: &Found, now_ms: u64) {
        match found {
            Found::Failed(text) => return self.error(text),
            Found::Missing => {
                self.text
                    .extend_from_slice(b"{\"data\":{},\"hash\":\"\",\"timestamp\":");
                self.number(now_ms);
            }
            Found::Unchanged(hash) => {
                self.text
                    .extend_from_slice(b"{\"unchanged\":true,\"hash\":");
                write_string(&mut self.text, hash);
                self.text.extend_from_slice(b",\"timestamp\":");
                self.number(now_ms);
            }
            Found::Document(document) => {
                self.data(Gap::Read(at));
                document.write_answer_tail(&mut self.text, now_ms);
            }
        }
        self.text.push(b'}');
    }

    fn log(&mut self, at: usize, outcome: &TailOutcome, now_ms: u64) {
        match outcome {
            Err(text) => return self.error(text),
            Ok((hash, has_more)) => {
                self.data(Gap::Tail(at));
                self.text.extend_from_slice(b",\"hash\":");
                write_string(&mut self.text, hash);
                self.text.extend_from_slice(b",\"timestamp\":");
                self.number(now_ms);
                if *has_more {
                    self.text.extend_from_slice(b",\"hasMore\":true");
                }
            }
        }
        self.text.push(b'}');
    }

    fn data(&mut self, gap: Gap) {
        self.text.extend_from_slice(b"{\"data\":");
        self.gaps.push((self.text.len(), gap));
    }

    fn number(&mut self, number: u64) {
        let mut digits = itoa::Buffer::new();
        self.text
            .extend_from_slice(digits.format(number).as_bytes());
    }

    /// Returns the chunks of the whole text, with each gap filled by `data`.
    pub fn pieces<'a>(&'a self, data: impl Fn(Gap) -> &'a [u8]) -> Vec<&'a [u8]> {
        let mut pieces = Vec::with_capacity(2 * self.gaps.len() + 1);
        let mut start = 0;
        for &(end, gap) in &self.gaps {
            pieces.push(&self.text[start..end]);
            pieces.push(data(gap));
            start = end;
        }
        pieces.push(&self.text[start..]);
        pieces
    }
}
