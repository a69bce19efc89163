//! Batches of events as Parquet files (docs/reference/protocol.md#events).

use crate::error::CoreError;
use crate::parquet::{self, Column};
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use std::fmt;

/// The columns. Members of an event that have none are in the last one, as a JSON object.
const NAMES: [&str; 11] = [
    "event_type",
    "event",
    "distinct_id",
    "anonymous_id",
    "ts",
    "message_id",
    "properties",
    "context",
    "dt",
    "received_at",
    "extra",
];
const RECEIVED_AT: usize = 9;
const EXTRA: usize = 10;

/// Returns a file with a row for each of the events in `data`, canonical text except for large integers.
/// Strings become their characters, null an empty text, and any other value its JSON text. `received_at` is
/// the value of that column, which only the server sets.
pub fn encode(data: &[u8], received_at: &str) -> Result<Vec<u8>, CoreError> {
    let mut rows = Rows {
        columns: Default::default(),
        count: 0,
        received_at,
    };
    let text = str::from_utf8(data).map_err(|_| CoreError::InvalidEvents)?;
    let mut tokens = serde_json::Deserializer::from_str(text);
    Data(&mut rows)
        .deserialize(&mut tokens)
        .map_err(|_| CoreError::InvalidEvents)?;
    if rows.count == 0 {
        return Err(CoreError::InvalidEvents);
    }
    parquet::encode(NAMES, rows.columns, rows.count).ok_or(CoreError::InvalidEvents)
}

struct Rows<'r> {
    columns: [Column; NAMES.len()],
    count: usize,
    received_at: &'r str,
}

/// Appends the text of a cell to the value that its column has begun.
fn append(column: &mut Column, value: &str) -> Result<(), serde_json::Error> {
    match value.as_bytes() {
        b"null" => {}
        [b'"', text @ .., b'"'] if memchr::memchr(b'\\', text).is_none() => column.extend(text),
        [b'"', ..] => {
            let text: String = serde_json::from_str(value)?;
            column.extend(text.as_bytes());
        }
        text => column.extend(text),
    }
    Ok(())
}

/// The member `events` of an object.
struct Data<'r, 'd>(&'r mut Rows<'d>);

impl<'de> DeserializeSeed<'de> for Data<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, tokens: D) -> Result<(), D::Error> {
        tokens.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Data<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<&RawValue>()? {
            if key.get() == "\"events\"" {
                map.next_value_seed(Events(self.0))?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }
}

/// A list of events.
struct Events<'r, 'd>(&'r mut Rows<'d>);

impl<'de> DeserializeSeed<'de> for Events<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, tokens: D) -> Result<(), D::Error> {
        tokens.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Events<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of events")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut events: A) -> Result<(), A::Error> {
        while events.next_element_seed(Event(self.0))?.is_some() {}
        Ok(())
    }
}

/// One event, which becomes the next row.
struct Event<'r, 'd>(&'r mut Rows<'d>);

impl<'de> DeserializeSeed<'de> for Event<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, tokens: D) -> Result<(), D::Error> {
        tokens.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Event<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an event, which is an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Rows {
            columns,
            count,
            received_at,
        } = self.0;
        for column in columns.iter_mut() {
            column.begin();
        }
        while let Some(key) = map.next_key::<&RawValue>()? {
            let (key, value) = (key.get(), map.next_value::<&RawValue>()?.get());
            match NAMES[..EXTRA].iter().position(|name| is_text(key, name)) {
                Some(RECEIVED_AT) => {}
                Some(at) => append(&mut columns[at], value).map_err(serde::de::Error::custom)?,
                None => {
                    let extra = &mut columns[EXTRA];
                    extra.extend(if extra.value().is_empty() { b"{" } else { b"," });
                    extra.extend(key.as_bytes());
                    extra.extend(b":");
                    extra.extend(value.as_bytes());
                }
            }
        }
        columns[RECEIVED_AT].extend(received_at.as_bytes());
        if !columns[EXTRA].value().is_empty() {
            columns[EXTRA].extend(b"}");
        }
        columns.iter_mut().for_each(Column::end);
        *count += 1;
        Ok(())
    }
}

/// Returns true if `text` is this string as canonical JSON.
fn is_text(text: &str, string: &str) -> bool {
    matches!(text.as_bytes(), [b'"', inner @ .., b'"'] if inner == string.as_bytes())
}
