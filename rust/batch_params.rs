//! The parameters of batch pulls, parsed without a copy of their texts.

use crate::envelope::are_hex;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Number, Value};
use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;

/// Digits of a hash by which a client names the version that it has.
const KNOWN_DIGITS: usize = 16;

/// A value for each entry, by collection.
pub type Listed<T> = HashMap<String, Vec<T>>;

/// The first digits of the hash of the version that the client has.
pub type Known = Option<String>;

/// Parses the JSON of a parameter: empty if the text is empty, None if it has another shape.
pub fn listed<'de, T: Deserialize<'de>>(text: &'de str) -> Option<Listed<T>> {
    match text {
        "" => Some(Listed::new()),
        _ => serde_json::from_str(text).ok(),
    }
}

/// Returns true if each version is named by as many digits as it must be.
pub fn are_known(versions: &Listed<Known>) -> bool {
    let mut named = versions.values().flatten().flatten();
    named.all(|digits| digits.len() == KNOWN_DIGITS && are_hex(digits))
}

/// The parameters of one entry, by name.
#[derive(Default)]
pub struct ParamSet<'a>(Vec<(Text<'a>, ParamValue<'a>)>);

/// The value of a parameter.
pub enum ParamValue<'a> {
    Text(Cow<'a, str>),
    Number(Number),
    Other,
}

impl ParamSet<'_> {
    /// Returns the value of a parameter, the last one if there are several.
    pub fn get(&self, name: &str) -> Option<&ParamValue<'_>> {
        let mut values = self.0.iter().rev();
        values
            .find(|(known, _)| known.0 == name)
            .map(|(_, value)| value)
    }
}

impl<'de> Deserialize<'de> for ParamSet<'de> {
    fn deserialize<D: Deserializer<'de>>(tokens: D) -> Result<Self, D::Error> {
        struct Members;

        impl<'de> Visitor<'de> for Members {
            type Value = ParamSet<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("parameters by name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(ParamSet(members))
            }
        }

        tokens.deserialize_map(Members)
    }
}

/// A string, borrowed unless it contains an escape.
struct Text<'a>(Cow<'a, str>);

impl<'de> Deserialize<'de> for Text<'de> {
    fn deserialize<D: Deserializer<'de>>(tokens: D) -> Result<Self, D::Error> {
        match ParamValue::deserialize(tokens)? {
            ParamValue::Text(text) => Ok(Self(text)),
            _ => Err(D::Error::custom("not a string")),
        }
    }
}

impl<'de> Deserialize<'de> for ParamValue<'de> {
    fn deserialize<D: Deserializer<'de>>(tokens: D) -> Result<Self, D::Error> {
        tokens.deserialize_any(AnyValue)
    }
}

struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
    type Value = ParamValue<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(ParamValue::Text(Cow::Borrowed(text)))
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(ParamValue::Text(Cow::Owned(text.into())))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Self::Value, E> {
        Ok(ParamValue::Number(number.into()))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Self::Value, E> {
        Ok(ParamValue::Number(number.into()))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Self::Value, E> {
        Ok(Number::from_f64(number).map_or(ParamValue::Other, ParamValue::Number))
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self::Value, E> {
        Ok(ParamValue::Other)
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(ParamValue::Other)
    }

    // Parsed in full, because a value that is not valid JSON is an error.
    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Self::Value, A::Error> {
        Value::deserialize(SeqAccessDeserializer::new(seq))?;
        Ok(ParamValue::Other)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        Value::deserialize(MapAccessDeserializer::new(map))?;
        Ok(ParamValue::Other)
    }
}
