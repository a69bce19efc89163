//! Checks of the hashes of stored texts, including those that Starfish wrote.

use crate::canonical::{Integers, rewrite};
use crate::digest::{hex, sha256};
use crate::error::CoreError;

/// Returns true if `hash` is the SHA-256 of this JSON: of the text itself, of its canonical form, or of that
/// form with all digits of whole numbers, as the Python server of Starfish writes them.
pub fn is_hash_of(hash: &str, text: &[u8]) -> bool {
    if hex(&sha256(text)) == hash {
        return true;
    }
    canonicalize_foreign(text).is_ok_and(|canonical| {
        hex(&sha256(&canonical)) == hash || hex(&sha256(&with_all_digits(&canonical))) == hash
    })
}

/// Maximum nesting depth of text that other programs stored.
const MAX_DEPTH: u32 = 127;

/// Canonicalises text that other programs stored. It may nest deeper than ours, and contain unpaired surrogates, which are escapes in the canonical text too.
fn canonicalize_foreign(text: &[u8]) -> Result<Vec<u8>, CoreError> {
    let marked = mark_halves(text);
    let text = marked.as_ref().map_or(text, |marked| marked.as_bytes());
    let canonical = rewrite(text, Integers::Rounded, MAX_DEPTH)?;
    if marked.is_none() {
        return Ok(canonical);
    }
    let canonical = str::from_utf8(&canonical).map_err(|_| CoreError::InvalidJson)?;
    Ok(canonical.replace(HALF, "\\u").into_bytes())
}

/// Replaces the `\u` of an unpaired surrogate. No character has this code, and it sorts as surrogates do.
const HALF: char = '\u{d7ff}';

/// Returns the text with `HALF` in the escapes of unpaired surrogates; None if there are none, or if the text
/// contains `HALF` already.
fn mark_halves(text: &[u8]) -> Option<String> {
    let text = str::from_utf8(text).ok()?;
    let mut marked = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        let (before, escape) = rest.split_at(at);
        marked.push_str(before);
        let size = match escaped_unit(escape) {
            None => 1 + escape.chars().nth(1)?.len_utf8(),
            Some(0xd800..=0xdbff) if is_low(escaped_unit(&escape[6..])) => 12,
            Some(0xd800..=0xdfff) => {
                marked.push(HALF);
                marked.push_str(&escape[2..6].to_ascii_lowercase());
                rest = &escape[6..];
                continue;
            }
            Some(0xd7ff) => return None,
            Some(_) => 6,
        };
        marked.push_str(escape.get(..size)?);
        rest = &escape[size..];
    }
    marked.push_str(rest);
    let has_own = text.contains(HALF);
    (!has_own && marked.contains(HALF)).then_some(marked)
}

/// Returns the code unit of a text that begins with `\uXXXX`.
fn escaped_unit(text: &str) -> Option<u16> {
    let digits = text.strip_prefix("\\u")?.get(..4)?;
    u16::from_str_radix(digits, 16).ok()
}

fn is_low(unit: Option<u16>) -> bool {
    matches!(unit, Some(0xdc00..=0xdfff))
}

/// Returns a canonical text in which whole numbers have all the digits of their doubles.
fn with_all_digits(canonical: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(canonical.len());
    let (mut rest, mut in_string) = (canonical, false);
    while let Some((&byte, after)) = rest.split_first() {
        // The digits of a fraction or an exponent do not begin a number.
        let begins = !matches!(out.last(), Some(b'0'..=b'9' | b'.' | b'+' | b'e'));
        if !in_string && byte.is_ascii_digit() && begins {
            let end = rest.iter().position(|byte| !byte.is_ascii_digit());
            let (digits, after) = rest.split_at(end.unwrap_or(rest.len()));
            let is_whole = !matches!(after.first(), Some(b'.' | b'e'));
            let number = str::from_utf8(digits)
                .ok()
                .and_then(|digits| digits.parse::<f64>().ok());
            // Numbers of fewer than 17 digits are complete.
            if let Some(number) = number.filter(|_| is_whole && digits.len() >= 17) {
                out.extend_from_slice(format!("{number:.0}").as_bytes());
                rest = after;
                continue;
            }
        }
        out.push(byte);
        rest = after;
        if in_string && byte == b'\\' {
            out.extend(rest.first());
            rest = rest.get(1..).unwrap_or_default();
        } else if byte == b'"' {
            in_string = !in_string;
        }
    }
    out
}
