//! Append-only logs as Starfish stores them: one document whose `data` holds all elements, or a head with
//! `"seg":true` and chunks, which are arrays of elements.

use crate::applog::{Head, hash};
use crate::canonical::{self, Integers, Keys, Writer};
use crate::envelope::{Author, is_hash, write_author};
use crate::error::CoreError;
use crate::log_text::write_element;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::collections::BTreeMap;

#[derive(Deserialize)]
struct Stored<'a> {
    #[serde(borrow)]
    data: BTreeMap<String, &'a RawValue>,
    #[serde(default)]
    seg: bool,
    ts: Option<&'a RawValue>,
    hash: Option<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Element<'a> {
    ts: u64,
    #[serde(borrow)]
    data: &'a RawValue,
    author_pubkey: Option<String>,
    author_signature: Option<String>,
}

/// A log whose elements are in `data.<field>`, and whether they are in chunks instead.
pub fn read(stored: &[u8], field: &str) -> Result<(Head, bool), CoreError> {
    let mut stored: Stored<'_> =
        serde_json::from_slice(stored).map_err(|_| CoreError::DocumentCorrupt)?;
    let elements = match stored.data.remove(field) {
        Some(text) if !stored.seg => text.get(),
        _ => "[]",
    };
    let mut head = Head::default();
    head.beside = beside(&stored.data)?;
    head.written_ms = said(stored.ts).unwrap_or(0);
    let last = add(&mut head, elements)?;
    if stored.seg || head.count > 0 {
        head.hash = said(stored.hash)
            .filter(|hash: &String| is_hash(hash))
            .unwrap_or(last);
    }
    Ok((head, stored.seg))
}

/// A member's value, where it is there and of this kind.
fn said<T: serde::de::DeserializeOwned>(member: Option<&RawValue>) -> Option<T> {
    serde_json::from_str(member?.get()).ok()
}

/// The log of a head of `read` with the elements of these chunks, in order.
pub fn gather(mut head: Head, chunks: &[&[u8]]) -> Result<Head, CoreError> {
    for chunk in chunks {
        let text = str::from_utf8(chunk).map_err(|_| CoreError::DocumentCorrupt)?;
        add(&mut head, text)?;
    }
    Ok(head)
}

/// Adds an array of elements, and returns the log's hash after it.
fn add(head: &mut Head, elements: &str) -> Result<String, CoreError> {
    let elements: Vec<Element<'_>> =
        serde_json::from_str(elements).map_err(|_| CoreError::DocumentCorrupt)?;
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

/// The members of `data` beside the elements, as an object; empty for none.
fn beside(members: &BTreeMap<String, &RawValue>) -> Result<String, CoreError> {
    let mut text = String::new();
    for (name, value) in members {
        text.push(if text.is_empty() { '{' } else { ',' });
        let mut member = Vec::new();
        canonical::write_string(&mut member, name);
        member.push(b':');
        member.extend_from_slice(&exact(value)?);
        text.push_str(str::from_utf8(&member).map_err(|_| CoreError::DocumentCorrupt)?);
    }
    if !text.is_empty() {
        text.push('}');
    }
    Ok(text)
}

/// The value as this service stores values.
fn exact(value: &RawValue) -> Result<Vec<u8>, CoreError> {
    let text = value.get().as_bytes();
    let mut writer = Writer::with_capacity(text.len(), Integers::Exact);
    canonical::parse(text, writer.value(Keys::All)).map_err(|_| CoreError::DocumentCorrupt)?;
    Ok(writer.out)
}
