//! Push bodies and stored documents (docs/reference/protocol.md#push-a-document): everything around `data`.
//!
//! A stored document is `{"v":1,"ts":..,"hash":"..",<author>,"data":..,"xxh3":"<32 hex digits>"}`, optionally
//! followed by a mark. The checksum covers everything else in the object, and the mark. Earlier versions wrote
//! no checksum.

use crate::canonical::{Integers, Keys, Reader, canonicalize};
use crate::digest::{hex, sha256, write_hex};
use crate::error::CoreError;
use crate::hash_check::is_hash_of;
use crate::json_string::write_string;
use crate::starfish;
use serde_json::value::RawValue;
use std::collections::HashMap;
use std::mem::swap;
use std::ops::Range;
use std::sync::Arc;
use twox_hash::xxhash3_128::{Hasher, RawHasher, SecretBuffer};

/// The author proof of a document, not verified.
#[derive(Clone, Debug, PartialEq)]
pub struct Author {
    pub pubkey: String,
    pub signature: String,
}

/// The `data` of a request body.
pub struct Content {
    /// The text that is stored and sent back: sanitised, and canonical except for exact 64-bit integers.
    pub data: Vec<u8>,
    /// The canonical text, if it differs from `data`.
    rounded: Option<Vec<u8>>,
}

impl Content {
    /// Returns the text that is hashed, and that an author signs.
    pub fn canonical(&self) -> &[u8] {
        self.rounded.as_ref().unwrap_or(&self.data)
    }
}

/// A decoded push body.
#[derive(Clone)]
pub struct Push {
    pub content: Arc<Content>,
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
            content: content.into(),
            base_hash,
            author,
        })
    }

    /// Returns the same push with another base.
    pub fn rebased(&self, base_hash: &str) -> Self {
        Self {
            base_hash: Some(base_hash.into()),
            ..self.clone()
        }
    }

    /// Returns the text of the object to store before and after its `data`; it ends with `mark`.
    pub fn stored_frame(&self, ts_ms: u64, mark: &[u8]) -> (Vec<u8>, Vec<u8>) {
        stored_frame(
            ts_ms,
            &self.hash,
            self.author.as_ref(),
            &self.content.data,
            mark,
        )
    }
}

fn stored_frame(
    ts_ms: u64,
    hash: &str,
    author: Option<&Author>,
    data: &[u8],
    mark: &[u8],
) -> (Vec<u8>, Vec<u8>) {
    let head = stored_head(ts_ms, hash, author);
    let mut end = Vec::with_capacity(SEAL + mark.len());
    end.extend_from_slice(SEAL_START);
    end.extend_from_slice(&checksum(&[&head, data, mark]));
    end.extend_from_slice(SEAL_END);
    end.extend_from_slice(mark);
    (head, end)
}

/// Returns the text of a stored document up to its `data`.
fn stored_head(ts_ms: u64, hash: &str, author: Option<&Author>) -> Vec<u8> {
    let mut head = Vec::with_capacity(384);
    head.extend_from_slice(OWN_START);
    head.extend_from_slice(itoa::Buffer::new().format(ts_ms).as_bytes());
    head.extend_from_slice(OWN_HASH);
    head.extend_from_slice(hash.as_bytes());
    head.push(b'"');
    write_author(&mut head, author);
    head.extend_from_slice(OWN_DATA);
    head
}

/// Returns the 128-bit XXH3 of the concatenated `parts`, in hex digits.
fn checksum(parts: &[&[u8]]) -> [u8; CHECKSUM] {
    let sum = match parts {
        [whole, []] => Hasher::oneshot(whole),
        _ => {
            let mut state = RawHasher::new(SecretBuffer::default());
            for part in parts {
                state.write(part);
            }
            state.finish_128()
        }
    };
    let mut digits = [0; CHECKSUM];
    write_hex(&mut digits, &sum.to_be_bytes());
    digits
}

/// Parses `data` of a push or append body, and its other members that have a meaning.
pub fn decode_body(body: &[u8]) -> Result<(Content, Members), CoreError> {
    let mut reader = Reader::new(body, Integers::Exact)?;
    if reader.peek() != b'{' {
        reader.read_value(Keys::All)?;
        reader.end()?;
        return Err(CoreError::BodyNotObject);
    }
    let mut data = Vec::new();
    let mut members = Members::default();
    let mut is_first = true;
    reader.enter()?;
    while let Some(member) = reader.next_member(is_first)? {
        is_first = false;
        match reader.key(&member) {
            b"data" => swap(&mut data, reader.read_value(Keys::Safe)?),
            b"baseHash" => members.base_hash = Member::read(&mut reader)?,
            b"authorPubkey" => members.author_pubkey = Member::read(&mut reader)?,
            b"authorSignature" => members.author_signature = Member::read(&mut reader)?,
            b"ts" => members.ts = reader.read_value(Keys::All)?.to_vec(),
            // Members without a meaning are read too, so that they are validated like the others.
            _ => reader.read_value(Keys::All)?.clear(),
        }
    }
    reader.leave();
    reader.end()?;
    if data.first() != Some(&b'{') {
        return Err(CoreError::InvalidData);
    }
    let canonical = reader.met_large.then(|| canonicalize(&data)).transpose()?;
    let rounded = canonical.filter(|text| *text != data);
    Ok((Content { data, rounded }, members))
}

/// Members of a body other than `data`.
#[derive(Default)]
pub struct Members {
    base_hash: Member,
    pub author_pubkey: Member,
    pub author_signature: Member,
    /// Text of `ts`, empty if it is absent.
    pub ts: Vec<u8>,
}

#[derive(Default)]
pub enum Member {
    #[default]
    Null,
    Text(String),
    Other,
}

impl Member {
    fn read(reader: &mut Reader<'_>) -> Result<Self, CoreError> {
        let text = reader.read_value(Keys::All)?;
        if text == b"null" {
            return Ok(Self::Null);
        }
        Ok(serde_json::from_slice(text).map_or(Self::Other, Self::Text))
    }
}

const OWN_START: &[u8] = b"{\"v\":1,\"ts\":";
const OWN_HASH: &[u8] = b",\"hash\":\"";
const OWN_PUBKEY: &[u8] = b",\"authorPubkey\":\"";
const OWN_SIGNATURE: &[u8] = b",\"authorSignature\":\"";
const OWN_DATA: &[u8] = b",\"data\":";
const SEAL_START: &[u8] = b",\"xxh3\":\"";
const SEAL_END: &[u8] = b"\"}";
const CHECKSUM: usize = 32;
const SEAL: usize = SEAL_START.len() + CHECKSUM + SEAL_END.len();

/// Appends the members of an author proof, each preceded by a comma.
pub fn write_author(out: &mut Vec<u8>, author: Option<&Author>) {
    if let Some(author) = author {
        out.extend_from_slice(b",\"authorPubkey\":");
        write_string(out, &author.pubkey);
        out.extend_from_slice(b",\"authorSignature\":");
        write_string(out, &author.signature);
    }
}

/// A stored document: its small members, and the range of its `data`.
#[derive(Debug, PartialEq)]
pub struct Document {
    pub hash: String,
    pub ts_ms: u64,
    pub author: Option<Author>,
    pub data: Range<usize>,
}

/// Returns true if these bytes are a document that pysync wrote, as far as a damaged one can be recognised.
pub fn is_own(stored: &[u8]) -> bool {
    begins_as_own(stored) || unseal(stored.trim_ascii_end()).is_some()
}

/// Returns true if a text begins as our documents do, except for one damaged byte before its time.
fn begins_as_own(text: &[u8]) -> bool {
    let begins = || {
        let (start, rest) = text.split_at_checked(OWN_START.len())?;
        let digits = rest.iter().position(|byte| !byte.is_ascii_digit())?;
        Some(start.ends_with(b":") && digits > 0 && rest[digits..].starts_with(OWN_HASH))
    };
    begins().unwrap_or(false)
}

/// Returns the text of a stored document before its checksum, and the checksum; None without one.
fn unseal(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let (body, seal) = text.split_at_checked(text.len().checked_sub(SEAL)?)?;
    let digits = seal.strip_prefix(SEAL_START)?.strip_suffix(SEAL_END)?;
    Some((body, digits))
}

impl Document {
    /// Parses and verifies a stored document in any of its layouts.
    pub fn locate(stored: &[u8]) -> Result<Self, CoreError> {
        let text = stored.trim_ascii_end();
        let found = match unseal(text) {
            Some((body, digits)) => (checksum(&[body, &stored[text.len()..]]) == digits)
                .then(|| Self::slice(body).or_else(|| Self::parse(stored)))
                .flatten(),
            None if begins_as_own(text) => Self::without_checksum(text),
            None => Self::foreign(stored),
        };
        found.ok_or(CoreError::DocumentCorrupt)
    }

    /// Parses a text of our layout up to the end of its `data`. Returns None also if a string contains an
    /// escape.
    fn slice(body: &[u8]) -> Option<Self> {
        let rest = body.strip_prefix(OWN_START)?;
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
        let data = rest.strip_prefix(OWN_DATA)?;
        Some(Self {
            hash: hash.into(),
            ts_ms,
            author,
            data: body.len() - data.len()..body.len(),
        })
    }

    /// Parses the layout of earlier versions, or of Starfish with the same order of members. The hash verifies
    /// `data`.
    fn without_checksum(text: &[u8]) -> Option<Self> {
        let found = Self::slice(text.strip_suffix(b"}")?).or_else(|| Self::parse(text))?;
        let head = stored_head(found.ts_ms, &found.hash, found.author.as_ref());
        let is_whole = text[..found.data.start] == head && text[found.data.end..] == *b"}";
        (is_whole && found.is_vouched_for(text)).then_some(found)
    }

    /// Returns true if the hash is that of `data`, or of the log in it.
    fn is_vouched_for(&self, stored: &[u8]) -> bool {
        let data = &stored[self.data.clone()];
        is_hash_of(&self.hash, data) || starfish::is_hash_of_log(&self.hash, data)
    }

    /// Parses documents that Starfish wrote, with members in any order. The hash verifies `data`, or the newest
    /// element if that is a log. It does not cover anything in the head of a log in chunks.
    fn foreign(stored: &[u8]) -> Option<Self> {
        let found = Self::parse(stored)?;
        (starfish::is_chunked(stored) || found.is_vouched_for(stored)).then_some(found)
    }

    /// Compares the hash with that of `data`, even if a checksum verified the object. `locate` must have found
    /// it in `stored`.
    pub fn verify(&self, stored: &[u8]) -> bool {
        starfish::is_chunked(stored) || self.is_vouched_for(stored)
    }

    fn parse(stored: &[u8]) -> Option<Self> {
        let members: HashMap<String, &RawValue> = serde_json::from_slice(stored).ok()?;
        let text = |name| serde_json::from_str::<String>(members.get(name)?.get()).ok();
        // The hash is sent in a header, so it must be well-formed.
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

    /// Returns the text around `data`, as `Push::stored_frame` does, of a document that differs from this one
    /// in `data` and `hash` and has no author.
    pub fn redacted_frame(&self, data: &[u8], hash: &str) -> (Vec<u8>, Vec<u8>) {
        stored_frame(self.ts_ms, hash, None, data, b"")
    }

    /// Returns the members of a pull response that follow its `data`, each preceded by a comma.
    pub fn write_answer_tail(&self, out: &mut Vec<u8>, timestamp_ms: u64) {
        out.extend_from_slice(b",\"hash\":");
        write_string(out, &self.hash);
        out.extend_from_slice(b",\"timestamp\":");
        out.extend_from_slice(itoa::Buffer::new().format(timestamp_ms).as_bytes());
        write_author(out, self.author.as_ref());
    }
}

pub fn is_hash(text: &str) -> bool {
    text.len() == 64 && are_hex(text)
}

/// Returns true if a text has digits of hashes alone.
pub fn are_hex(text: &str) -> bool {
    text.bytes()
        .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Returns the string that ends at the next quote, and the text after it; None if the string contains an
/// escape.
fn quoted(text: &[u8]) -> Option<(&str, &[u8])> {
    let end = memchr::memchr2(b'"', b'\\', text).filter(|&end| text[end] == b'"')?;
    Some((str::from_utf8(&text[..end]).ok()?, &text[end + 1..]))
}
