//! The answer to a batch pull, joined from stored bytes (wire section 6).

use crate::batch::{Entry, Plan};
use crate::canonical::write_string;
use crate::envelope::Document;
use xxhash_rust::xxh3::Xxh3;

/// What the store said of a read.
#[derive(Clone, Copy)]
pub enum Stored<'a> {
    Missing,
    Bytes(&'a [u8]),
    Failed(&'a str),
}

/// What became of a read.
pub enum Found {
    Missing,
    Document(Document),
    Failed(String),
}

impl Found {
    fn of(stored: Stored<'_>, ttl_ms: Option<u64>, now_ms: u64) -> Self {
        match stored {
            Stored::Missing => Self::Missing,
            Stored::Failed(text) => Self::Failed(text.into()),
            Stored::Bytes(bytes) => match Document::locate(bytes) {
                Err(_) => Self::Failed("document_corrupt".into()),
                Ok(document) => match ttl_ms {
                    Some(ttl_ms) if document.ts_ms.saturating_add(ttl_ms) < now_ms => Self::Missing,
                    _ => Self::Document(document),
                },
            },
        }
    }
}

impl Plan {
    /// What became of each read, `stored` being what the store said of it.
    pub fn find(&self, stored: &[Stored<'_>], now_ms: u64) -> Vec<Found> {
        stored
            .iter()
            .zip(&self.ttls_ms)
            .map(|(&stored, &ttl_ms)| Found::of(stored, ttl_ms, now_ms))
            .collect()
    }

    /// A number for what the entries are: names, keys, hashes, errors and `variant`.
    pub fn version(&self, found: &[Found], variant: &[u8]) -> u64 {
        let mut state = Xxh3::new();
        let mut add = |mark: u8, text: &[u8]| {
            state.update(&[mark]);
            state.update(text);
        };
        add(0xF8, variant);
        for (name, range) in &self.names {
            add(0xF9, name.as_bytes());
            for entry in &self.entries[range.clone()] {
                match entry {
                    Entry::Failed(text) => add(0xFA, text.as_bytes()),
                    Entry::Read(at) => {
                        add(0xFB, self.reads[*at].key.as_bytes());
                        match &found[*at] {
                            Found::Missing => add(0xFC, b""),
                            Found::Document(document) => add(0xFD, document.hash.as_bytes()),
                            Found::Failed(text) => add(0xFA, text.as_bytes()),
                        }
                    }
                }
            }
        }
        state.digest()
    }

    /// Whether any entry is an error.
    pub fn failed(&self, found: &[Found]) -> bool {
        self.entries.iter().any(|entry| match entry {
            Entry::Failed(_) => true,
            Entry::Read(at) => matches!(found[*at], Found::Failed(_)),
        })
    }

    /// The answer's text, but for the `data` of documents.
    pub fn frame(&self, found: &[Found], now_ms: u64) -> Frame {
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
                    Entry::Read(at) => frame.entry(*at, &found[*at], now_ms),
                }
            }
            frame.text.push(b']');
        }
        frame.text.extend_from_slice(b"}}");
        frame
    }
}

/// Text with gaps for the `data` of reads.
#[derive(Default)]
pub struct Frame {
    text: Vec<u8>,
    /// Where in `text`, and of which read.
    gaps: Vec<(usize, usize)>,
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

    fn entry(&mut self, at: usize, found: &Found, now_ms: u64) {
        match found {
            Found::Failed(text) => return self.error(text),
            Found::Missing => {
                self.text
                    .extend_from_slice(b"{\"data\":{},\"hash\":\"\",\"timestamp\":");
                let mut digits = itoa::Buffer::new();
                self.text
                    .extend_from_slice(digits.format(now_ms).as_bytes());
            }
            Found::Document(document) => {
                self.text.extend_from_slice(b"{\"data\":");
                self.gaps.push((self.text.len(), at));
                document.write_answer_tail(&mut self.text, now_ms);
            }
        }
        self.text.push(b'}');
    }

    /// The pieces of the whole text, the `data` of a read being what `data` says.
    pub fn pieces<'a>(&'a self, data: impl Fn(usize) -> &'a [u8]) -> Vec<&'a [u8]> {
        let mut pieces = Vec::with_capacity(2 * self.gaps.len() + 1);
        let mut start = 0;
        for &(end, read) in &self.gaps {
            pieces.push(&self.text[start..end]);
            pieces.push(data(read));
            start = end;
        }
        pieces.push(&self.text[start..]);
        pieces
    }
}
