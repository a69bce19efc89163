//! Push bodies and stored documents (wire section 4): what lies around `data`.

use crate::canonical::{self, Integers, Keys, Writer, canonicalize, hex, sha256, write_string};
use crate::error::CoreError;
use serde::de::{DeserializeSeed, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

/// Who vouches for a document, unverified.
#[derive(Clone, Debug, PartialEq)]
pub struct Author {
    pub pubkey: String,
    pub signature: String,
}

/// The `data` of a request body.
pub struct Content {
    /// What is stored and sent back: sanitised, canonical but for its integers of 64 bits, which are exact.
    pub data: Vec<u8>,
    /// The canonical text, where it is not that of `data`.
    rounded: Option<Vec<u8>>,
}

impl Content {
    /// What is hashed, and what an author signs.
    pub fn canonical(&self) -> &[u8] {
        self.rounded.as_ref().unwrap_or(&self.data)
    }
}

/// A push body, decoded.
pub struct Push {
    pub content: Content,
    /// SHA-256 of the canonical text.
    pub hash: String,
    pub base_hash: Option<String>,
    pub author: Option<Author>,
}

impl Push {
    pub fn decode(body: &[u8]) -> Result<Self, CoreError> {
        let (content, members) = decode_body(body)?;
        let base_hash = match members.base_hash {
            Member::Null => None,
            Member::Text(text) => Some(text),
            Member::Other => return Err(CoreError::InvalidBaseHash),
        };
        let author = match (members.author_pubkey, members.author_signature) {
            (Member::Null, Member::Null) => None,
            (Member::Text(pubkey), Member::Text(signature)) => Some(Author { pubkey, signature }),
            _ => return Err(CoreError::AuthorProofMissing),
        };
        Ok(Self {
            hash: hex(&sha256(content.canonical())),
            content,
            base_hash,
            author,
        })
    }

    /// The text of the stored object up to its `data`, which is followed by `}`.
    pub fn stored_head(&self, ts_ms: u64) -> Vec<u8> {
        let mut head = Vec::with_capacity(384);
        head.extend_from_slice(OWN_START);
        head.extend_from_slice(itoa::Buffer::new().format(ts_ms).as_bytes());
        head.extend_from_slice(OWN_HASH);
        head.extend_from_slice(self.hash.as_bytes());
        head.push(b'"');
        write_author(&mut head, self.author.as_ref());
        head.extend_from_slice(OWN_DATA);
        head
    }
}

/// The `data` of a push or append body, and its other members that count.
pub fn decode_body(body: &[u8]) -> Result<(Content, Members), CoreError> {
    let mut writer = Writer::with_capacity(body.len(), Integers::Exact);
    let first = body.iter().find(|byte| !byte.is_ascii_whitespace());
    if first != Some(&b'{') {
        canonical::parse(body, writer.value(Keys::Safe))?;
        return Err(CoreError::BodyNotObject);
    }
    let members = canonical::parse(body, Body(&mut writer))?;
    if writer.out.first() != Some(&b'{') {
        return Err(CoreError::InvalidData);
    }
    let data = writer.out;
    let canonical = writer.met_large.then(|| canonicalize(&data)).transpose()?;
    let rounded = canonical.filter(|text| *text != data);
    Ok((Content { data, rounded }, members))
}

/// Writes `data` to the writer, nothing else, and returns the other members that count.
struct Body<'w>(&'w mut Writer);

/// The members of a body beside `data`.
#[derive(Default)]
pub struct Members {
    base_hash: Member,
    pub author_pubkey: Member,
    pub author_signature: Member,
    /// The text of `ts`, empty where it is absent or null.
    pub ts: Vec<u8>,
}

#[derive(Default)]
pub enum Member {
    #[default]
    Null,
    Text(String),
    Other,
}

impl<'de> DeserializeSeed<'de> for Body<'_> {
    type Value = Members;

    fn deserialize<D: Deserializer<'de>>(self, tokens: D) -> Result<Members, D::Error> {
        tokens.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Body<'_> {
    type Value = Members;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a push body")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members, A::Error> {
        let writer = self.0;
        let mut members = Members::default();
        writer.enter()?;
        while let Some(key) = map.next_key::<String>()? {
            if key == "data" {
                writer.out.clear();
                map.next_value_seed(writer.value(Keys::Safe))?;
                continue;
            }
            // Members without meaning are written too, and taken back: so they are checked like the others.
            let mark = writer.out.len();
            map.next_value_seed(writer.value(Keys::All))?;
            let text = &writer.out[mark..];
            match key.as_str() {
                "baseHash" => members.base_hash = Member::read(text),
                "authorPubkey" => members.author_pubkey = Member::read(text),
                "authorSignature" => members.author_signature = Member::read(text),
                "ts" if text == b"null" => members.ts.clear(),
                "ts" => members.ts = text.to_vec(),
                _ => {}
            }
            writer.out.truncate(mark);
        }
        writer.leave();
        Ok(members)
    }
}

impl Member {
    fn read(text: &[u8]) -> Self {
        if text == b"null" {
            return Self::Null;
        }
        serde_json::from_slice(text).map_or(Self::Other, Self::Text)
    }
}

const OWN_START: &[u8] = b"{\"v\":1,\"ts\":";
const OWN_HASH: &[u8] = b",\"hash\":\"";
const OWN_PUBKEY: &[u8] = b",\"authorPubkey\":\"";
const OWN_SIGNATURE: &[u8] = b",\"authorSignature\":\"";
const OWN_DATA: &[u8] = b",\"data\":";

/// Appends the members of an author proof, each with the comma before it.
pub fn write_author(out: &mut Vec<u8>, author: Option<&Author>) {
    if let Some(author) = author {
        out.extend_from_slice(b",\"authorPubkey\":");
        write_string(out, &author.pubkey);
        out.extend_from_slice(b",\"authorSignature\":");
        write_string(out, &author.signature);
    }
}

/// A stored document: its small parts, and where its `data` lies.
#[derive(Debug, PartialEq)]
pub struct Document {
    pub hash: String,
    pub ts_ms: u64,
    pub author: Option<Author>,
    pub data: Range<usize>,
}

impl Document {
    pub fn locate(stored: &[u8]) -> Result<Self, CoreError> {
        Self::locate_own(stored)
            .or_else(|| Self::locate_any(stored))
            .ok_or(CoreError::DocumentCorrupt)
    }

    /// In the layout of `Push::stored_head`, perhaps with white space after it. The hash vouches for `data`, so
    /// that nothing has to be parsed.
    ///
    /// None, too, where `data` holds an integer that the canonical text, which was hashed, rounds. Such
    /// documents are rare enough to be parsed on each pull.
    fn locate_own(stored: &[u8]) -> Option<Self> {
        let stored = stored.trim_ascii_end();
        let rest = stored.strip_prefix(OWN_START)?;
        let (digits, rest) = rest.split_at(rest.iter().position(|byte| !byte.is_ascii_digit())?);
        let ts_ms = str::from_utf8(digits).ok()?.parse().ok()?;
        let (hash, rest) = quoted(rest.strip_prefix(OWN_HASH)?)?;
        let (author, rest) = match rest.strip_prefix(OWN_PUBKEY) {
            None => (None, rest),
            Some(rest) => {
                let (pubkey, rest) = quoted(rest)?;
                let (signature, rest) = quoted(rest.strip_prefix(OWN_SIGNATURE)?)?;
                (
                    Some(Author {
                        pubkey: pubkey.into(),
                        signature: signature.into(),
                    }),
                    rest,
                )
            }
        };
        let data = rest.strip_prefix(OWN_DATA)?.strip_suffix(b"}")?;
        if hex(&sha256(data)) != hash {
            return None;
        }
        let end = stored.len() - 1;
        Some(Self {
            hash: hash.into(),
            ts_ms,
            author,
            data: end - data.len()..end,
        })
    }

    /// In any layout, as Starfish writes documents, and where `data` holds a rounded integer: the hash is of
    /// the canonical `data`, not of its text.
    fn locate_any(stored: &[u8]) -> Option<Self> {
        let members: HashMap<String, &RawValue> = serde_json::from_slice(stored).ok()?;
        let text = |name| serde_json::from_str::<String>(members.get(name)?.get()).ok();
        // It goes into a header: nothing but what a hash looks like may.
        let hash = text("hash").filter(|hash| is_hash(hash))?;
        let author = text("authorPubkey").zip(text("authorSignature"));
        let data = members.get("data")?.get();
        if !data.starts_with('{') {
            return None;
        }
        let start = data.as_ptr() as usize - stored.as_ptr() as usize;
        Some(Self {
            hash,
            ts_ms: members
                .get("ts")
                .and_then(|ts| ts.get().parse().ok())
                .unwrap_or(0),
            author: author.map(|(pubkey, signature)| Author { pubkey, signature }),
            data: start..start + data.len(),
        })
    }

    /// The members of a pull answer that follow its `data`, each with the comma before it.
    pub fn write_answer_tail(&self, out: &mut Vec<u8>, timestamp_ms: u64) {
        out.extend_from_slice(b",\"hash\":");
        write_string(out, &self.hash);
        out.extend_from_slice(b",\"timestamp\":");
        out.extend_from_slice(itoa::Buffer::new().format(timestamp_ms).as_bytes());
        write_author(out, self.author.as_ref());
    }
}

pub fn is_hash(text: &str) -> bool {
    text.len() == 64
        && text
            .bytes()
            .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// The string that ends at the next quote, and what follows it; None where it holds an escape.
fn quoted(text: &[u8]) -> Option<(&str, &[u8])> {
    let end = text
        .iter()
        .position(|&byte| byte == b'"' || byte == b'\\')
        .filter(|&end| text[end] == b'"')?;
    Some((str::from_utf8(&text[..end]).ok()?, &text[end + 1..]))
}
