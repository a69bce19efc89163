//! Whether a hash is that of a stored text, also of one that Starfish has written.

use crate::canonical::{Integers, Keys, Writer, hex, parse, sha256};
use crate::error::CoreError;

/// Whether `hash` is the SHA-256 of this JSON: of the text as it is, of the canonical one, or of that with all
/// digits of its whole numbers, as Starfish's Python server has them.
pub fn is_hash_of(hash: &str, text: &[u8]) -> bool {
    if hex(&sha256(text)) == hash {
        return true;
    }
    canonicalize_foreign(text).is_ok_and(|canonical| {
        hex(&sha256(&canonical)) == hash || hex(&sha256(&with_all_digits(&canonical))) == hash
    })
}

/// `canonicalize` of what others have stored, which may nest deeper than ours (as deep as serde_json goes), and
/// hold halves of surrogate pairs: those are escapes in the canonical text too.
fn canonicalize_foreign(text: &[u8]) -> Result<Vec<u8>, CoreError> {
    let marked = mark_halves(text);
    let text = marked.as_ref().map_or(text, |marked| marked.as_bytes());
    let mut writer = Writer::with_capacity(text.len(), Integers::Rounded);
    writer.max_depth = u32::MAX;
    parse(text, writer.value(Keys::All))?;
    if marked.is_none() {
        return Ok(writer.out);
    }
    let canonical = str::from_utf8(&writer.out).map_err(|_| CoreError::InvalidJson)?;
    Ok(canonical.replace(HALF, "\\u").into_bytes())
}

/// Stands for the `\u` of half a surrogate pair. No character has this code, and it sorts as the halves do.
const HALF: char = '\u{d7ff}';

/// The text with `HALF` in the escapes of halves of surrogate pairs; None where there are none, or where it
/// holds that itself.
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

/// The code unit of a text that begins with `\uXXXX`.
fn escaped_unit(text: &str) -> Option<u16> {
    let digits = text.strip_prefix("\\u")?.get(..4)?;
    u16::from_str_radix(digits, 16).ok()
}

fn is_low(unit: Option<u16>) -> bool {
    matches!(unit, Some(0xdc00..=0xdfff))
}

/// A canonical text whose whole numbers have all digits of the doubles that they are.
fn with_all_digits(canonical: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(canonical.len());
    let (mut rest, mut in_string) = (canonical, false);
    while let Some((&byte, after)) = rest.split_first() {
        // A fraction or an exponent begins with no digit of ours.
        let begins = !matches!(out.last(), Some(b'0'..=b'9' | b'.' | b'+' | b'e'));
        if !in_string && byte.is_ascii_digit() && begins {
            let end = rest.iter().position(|byte| !byte.is_ascii_digit());
            let (digits, after) = rest.split_at(end.unwrap_or(rest.len()));
            let is_whole = !matches!(after.first(), Some(b'.' | b'e'));
            let number = str::from_utf8(digits)
                .ok()
                .and_then(|digits| digits.parse::<f64>().ok());
            // Below 17 digits all of them are there.
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
