//! Append-only logs as Starfish stored them: one document whose `data` contains all elements, or a head with
//! `"seg":true` and chunks, which are arrays of elements.

use crate::hash_check::is_hash_of;
use crate::log_format::hashed;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::collections::BTreeMap;

/// The head of a log, or a document that is one.
#[derive(Deserialize)]
pub struct Stored<'a> {
    #[serde(borrow)]
    pub data: &'a RawValue,
    #[serde(default)]
    pub seg: bool,
    /// Number of elements that the head of a log in chunks counts; `ts` is the time of the newest.
    pub n: Option<&'a RawValue>,
    pub ts: Option<&'a RawValue>,
    pub hash: Option<&'a RawValue>,
}

/// An element of a log.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Element<'a> {
    pub ts: u64,
    #[serde(borrow)]
    pub data: &'a RawValue,
    pub author_pubkey: Option<String>,
    pub author_signature: Option<String>,
}

/// Returns true if these bytes are the head of a log in chunks.
pub fn is_chunked(stored: &[u8]) -> bool {
    serde_json::from_slice(stored).is_ok_and(|stored: Stored<'_>| stored.seg)
}

/// Returns true if any member of `data` is a log with this hash.
pub fn is_hash_of_log(hash: &str, data: &[u8]) -> bool {
    let members: BTreeMap<String, &RawValue> = serde_json::from_slice(data).unwrap_or_default();
    members.values().any(|elements| {
        let elements: Result<Vec<Element<'_>>, _> = serde_json::from_str(elements.get());
        elements.is_ok_and(|elements| is_hash_after(hash, &elements))
    })
}

/// Returns true if this is the hash of a log of these elements.
pub fn is_hash_after(hash: &str, elements: &[Element<'_>]) -> bool {
    let count = elements.len() as u64;
    let last = elements.last();
    last.is_some_and(|last| is_hash_of(hash, &hashed(count, last.data.get().as_bytes())))
}
