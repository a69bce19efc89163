//! The range of a log that a read requests (docs/reference/protocol.md#read-a-log).

use serde_json::{Map, Value};

/// Maximum number of elements, and their count towards limits, of a read after a checkpoint if neither it nor
/// the log sets one.
const ELEMENTS_BY_DEFAULT: u64 = 1000;
/// Latest possible time of an element.
const LATEST_MS: u64 = i64::MAX as u64;

/// The elements with a time above `since`, and of these the `newest` or else the `oldest`. All elements if
/// every member is None.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct LogRange {
    pub since: Option<u64>,
    pub newest: Option<u64>,
    pub oldest: Option<u64>,
}

impl LogRange {
    /// Returns the range that an element of `appendParams` requests, with at most `max_elements` (None: any
    /// number); None if the element is not usable.
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

    /// Returns the number of elements that count towards limits.
    pub fn elements(&self) -> u64 {
        self.newest.or(self.oldest).unwrap_or(0)
    }
}
