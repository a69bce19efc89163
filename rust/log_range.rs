//! How much of a log one read asks for (docs/reference/protocol.md#read-a-log).

use serde_json::{Map, Value};

/// What a read after a checkpoint asks for, and counts for, where neither it nor its log names a count.
const ELEMENTS_BY_DEFAULT: u64 = 1000;
/// No element's time is above it.
const LATEST_MS: u64 = i64::MAX as u64;

/// The elements with a time above `since`, of those the `newest` or else the `oldest`; all None: none were
/// named, which stands for all.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct LogRange {
    pub since: Option<u64>,
    pub newest: Option<u64>,
    pub oldest: Option<u64>,
}

impl LogRange {
    /// Those that an element of `appendParams` names, within what one read may return (None: any number);
    /// None where they are not usable.
    pub fn read(named: &Map<String, Value>, max_elements: Option<u64>) -> Option<Self> {
        if named.contains_key("full") {
            return None;
        }
        let bound = |name| {
            named
                .get(name)
                .map_or(Some(None), |value| value.as_u64().map(Some))
        };
        let (since, last, limit) = (bound("since")?, bound("last")?, bound("limit")?);
        let most = max_elements.unwrap_or(u64::MAX);
        let newest = limit.or(last).map(|count| count.min(most));
        let oldest = since
            .filter(|_| newest.is_none())
            .map(|_| max_elements.unwrap_or(ELEMENTS_BY_DEFAULT));
        Some(Self {
            since: since.map(|since| since.min(LATEST_MS)),
            newest,
            oldest,
        })
    }

    /// How many elements they count for.
    pub fn elements(&self) -> u64 {
        self.newest.or(self.oldest).unwrap_or(0)
    }
}
