//! Batches of events as columns of text (docs/reference/protocol.md#events).

use crate::error::CoreError;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use std::fmt;

/// Members of an event that have columns of their own, as canonical texts.
const NAMES: [&str; 9] = [
    "\"event_type\"",
    "\"event\"",
    "\"distinct_id\"",
    "\"anonymous_id\"",
    "\"ts\"",
    "\"message_id\"",
    "\"properties\"",
    "\"context\"",
    "\"dt\"",
];
/// Members that only the server sets.
const RECEIVED_AT: &str = "\"received_at\"";

/// Texts of one column, concatenated. No column is longer than the data that it is made of.
#[derive(Default)]
pub struct Column {
    pub text: Vec<u8>,
    /// End offset of each text.
    pub ends: Vec<usize>,
}

/// The columns of a batch: those of `NAMES`, and `extra`, a JSON object of the other members of an event.
#[derive(Default)]
pub struct Columns {
    pub columns: [Column; NAMES.len() + 1],
    /// Number of events.
    pub count: usize,
}

impl Columns {
    /// Returns the columns of the events in `data`, canonical text except for large integers. Strings become
    /// their characters, null an empty text, and any other value its JSON text.
    pub fn read(data: &[u8]) -> Result<Self, CoreError> {
        let text = str::from_utf8(data).map_err(|_| CoreError::InvalidEvents)?;
        let mut columns = Self::default();
        let mut tokens = serde_json::Deserializer::from_str(text);
        Data(&mut columns)
            .deserialize(&mut tokens)
            .map_err(|_| CoreError::InvalidEvents)?;
        if columns.count == 0 {
            return Err(CoreError::InvalidEvents);
        }
        Ok(columns)
    }
}

impl Column {
    fn push(&mut self, value: &str) -> Result<(), serde_json::Error> {
        match value.as_bytes() {
            b"null" => {}
            [b'"', text @ .., b'"'] if memchr::memchr(b'\\', text).is_none() => {
                self.text.extend_from_slice(text);
            }
            [b'"', ..] => {
                let text: String = serde_json::from_str(value)?;
                self.text.extend_from_slice(text.as_bytes());
            }
            text => self.text.extend_from_slice(text),
        }
        Ok(())
    }
}

/// The member `events` of an object.
struct Data<'c>(&'c mut Columns);

impl<'de> DeserializeSeed<'de> for Data<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, tokens: D) -> Result<(), D::Error> {
        tokens.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Data<'_> {
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
struct Events<'c>(&'c mut Columns);

impl<'de> DeserializeSeed<'de> for Events<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, tokens: D) -> Result<(), D::Error> {
        tokens.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Events<'_> {
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
struct Event<'c>(&'c mut Columns);

impl<'de> DeserializeSeed<'de> for Event<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, tokens: D) -> Result<(), D::Error> {
        tokens.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Event<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an event, which is an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Columns { columns, count } = self.0;
        let [known @ .., extra] = columns;
        let opened = extra.text.len();
        while let Some(key) = map.next_key::<&RawValue>()? {
            let (key, value) = (key.get(), map.next_value::<&RawValue>()?.get());
            if let Some(at) = NAMES.iter().position(|name| *name == key) {
                known[at].push(value).map_err(serde::de::Error::custom)?;
            } else if key != RECEIVED_AT {
                let first = extra.text.len() == opened;
                extra.text.push(if first { b'{' } else { b',' });
                extra.text.extend_from_slice(key.as_bytes());
                extra.text.push(b':');
                extra.text.extend_from_slice(value.as_bytes());
            }
        }
        if extra.text.len() > opened {
            extra.text.push(b'}');
        }
        for column in columns {
            column.ends.push(column.text.len());
        }
        *count += 1;
        Ok(())
    }
}
