//! Reads the logs of Starfish (`starfish.rs`) as heads of ours.

use crate::append_log::Head;
use crate::canonical::{self, Integers, MAX_DEPTH};
use crate::envelope::{self, Author, Document, is_hash, write_author};
use crate::error::CoreError;
use crate::hash_check::is_hash_of;
use crate::json_string::write_string;
use crate::log_format::{Lines, data_of, hash, hashed, ts_of, write_element};
use crate::starfish::{Element, Stored, is_hash_after};
use serde_json::value::RawValue;
use std::collections::BTreeMap;

/// The counters of the head of a log in chunks.
#[derive(Clone, Copy)]
pub struct Chunked {
    count: u64,
    ts_ms: u64,
}

/// Reads a log whose elements are in `data.<field>`, or the counters of its head if they are in chunks.
pub fn read(stored: &[u8], field: &str) -> Result<(Head, Option<Chunked>), CoreError> {
    if envelope::is_own(stored) {
        Document::locate(stored)?; // a document in a collection that contains logs now
    }
    let stored: Stored<'_> =
        serde_json::from_slice(stored).map_err(|_| CoreError::DocumentCorrupt)?;
    let mut members: BTreeMap<String, &RawValue> =
        serde_json::from_str(stored.data.get()).map_err(|_| CoreError::DocumentCorrupt)?;
    let elements = match members.remove(field) {
        Some(text) if !stored.seg => text.get(),
        _ => "[]",
    };
    let elements: Vec<Element<'_>> =
        serde_json::from_str(elements).map_err(|_| CoreError::DocumentCorrupt)?;
    let mut head = Head::default();
    head.beside = beside(&members)?;
    head.written_ms = said(stored.ts).unwrap_or(0);
    let hash = said(stored.hash).filter(|hash: &String| is_hash(hash));
    if let Some(hash) = hash.as_ref().filter(|_| !stored.seg) {
        let data = stored.data.get().as_bytes();
        if !is_hash_after(hash, &elements) && !is_hash_of(hash, data) {
            return Err(CoreError::DocumentCorrupt);
        }
    }
    let last = add(&mut head, elements)?;
    if stored.seg || head.count > 0 {
        head.hash = hash.unwrap_or(last);
    }
    let chunked = Chunked {
        count: said(stored.n).unwrap_or(0),
        ts_ms: head.written_ms,
    };
    Ok((head, stored.seg.then_some(chunked)))
}

/// Returns the value of a member, if it is present and of this type.
fn said<T: serde::de::DeserializeOwned>(member: Option<&RawValue>) -> Option<T> {
    serde_json::from_str(member?.get()).ok()
}

/// Adds the elements of these chunks, in order, to the log of a head of `read`. The newest chunk must be
/// included. `whole` says that all chunks are, so that they contain at least the elements that the head counts.
///
/// After a crash the head may not count the newest elements; its hash is then recomputed. Otherwise it must
/// match.
pub fn gather(
    mut head: Head,
    chunked: Chunked,
    chunks: &[&[u8]],
    whole: bool,
) -> Result<Head, CoreError> {
    for chunk in chunks {
        let elements = serde_json::from_slice(chunk).map_err(|_| CoreError::DocumentCorrupt)?;
        add(&mut head, elements)?;
    }
    if whole && head.count < chunked.count {
        return Err(CoreError::DocumentCorrupt);
    }
    let unknown = Lines::of(&head.tail).filter(|line| ts_of(line) > Some(chunked.ts_ms));
    if let Some((at, newest)) = unknown.enumerate().last() {
        let data = data_of(newest).ok_or(CoreError::DocumentCorrupt)?;
        let count = chunked.count + at as u64 + 1;
        head.hash = hash(count, &canonical::canonicalize(data)?);
    } else if !head.hash.is_empty() {
        let newest = Lines::of(&head.tail).last();
        // Without the newest chunk the hash cannot be checked.
        if let Some(newest) = newest.filter(|line| ts_of(line) == Some(chunked.ts_ms)) {
            let data = data_of(newest).ok_or(CoreError::DocumentCorrupt)?;
            if !is_hash_of(&head.hash, &hashed(chunked.count, data)) {
                return Err(CoreError::DocumentCorrupt);
            }
        }
    }
    Ok(head)
}

/// Adds elements, and returns the hash of the log after them.
fn add(head: &mut Head, elements: Vec<Element<'_>>) -> Result<String, CoreError> {
    let mut after = String::new();
    let last = elements.len().saturating_sub(1);
    for (at, element) in elements.into_iter().enumerate() {
        if head.ts_ms.is_some_and(|before| element.ts <= before) {
            return Err(CoreError::DocumentCorrupt);
        }
        let author = element.author_pubkey.zip(element.author_signature);
        let author = author.map(|(pubkey, signature)| Author { pubkey, signature });
        let mut proof = Vec::new();
        write_author(&mut proof, author.as_ref());
        let data = exact(element.data)?;
        write_element(&mut head.tail, element.ts, &data, &proof);
        head.ts_ms = Some(element.ts);
        head.count += 1;
        head.tail_count += 1;
        if at == last {
            after = hash(head.count, &canonical::canonicalize(&data)?);
        }
    }
    Ok(after)
}

/// Returns the other members of `data`, as a JSON object; empty without any.
fn beside(members: &BTreeMap<String, &RawValue>) -> Result<String, CoreError> {
    let mut text = String::new();
    for (name, value) in members {
        text.push(if text.is_empty() { '{' } else { ',' });
        let mut member = Vec::new();
        write_string(&mut member, name);
        member.push(b':');
        member.extend_from_slice(&exact(value)?);
        text.push_str(str::from_utf8(&member).map_err(|_| CoreError::DocumentCorrupt)?);
    }
    if !text.is_empty() {
        text.push('}');
    }
    Ok(text)
}

/// Returns the value as pysync stores it.
fn exact(value: &RawValue) -> Result<Vec<u8>, CoreError> {
    let text = value.get().as_bytes();
    canonical::rewrite(text, Integers::Exact, MAX_DEPTH).map_err(|_| CoreError::DocumentCorrupt)
}
