//! The index of a log: the objects that contain the elements before its tail.
//!
//! A list of level 0 names segments. A list of `FAN_OUT` entries is stored as a block, which becomes an entry
//! of the next higher level. The head therefore stays small, and a tail takes few reads, for logs of any
//! length.

use crate::error::CoreError;
use crate::log_format::{self, Entry};
use crate::log_range::LogRange;

/// Number of entries at which a list becomes a block.
pub const FAN_OUT: usize = 16;

/// A segment (level 0) or a block of the index, with the elements from `start` up to `end`.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    pub level: usize,
    pub start: u64,
    pub end: u64,
    /// Time of the first element.
    pub ts_ms: u64,
    /// Time of the first element after it, if known.
    pub next_ts_ms: Option<u64>,
}

impl Node {
    /// Returns the last part of the key of its object.
    pub fn name(&self) -> String {
        match self.level {
            0 => format!("{}-{}", self.start, self.end),
            level => format!("index{level}-{}-{}", self.start, self.end),
        }
    }
}

/// An object to store: its name and its bytes.
pub type Object = (String, Vec<u8>);

/// For each level, the entries that precede those of the next lower level.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Index(pub Vec<Vec<Entry>>);

impl Index {
    /// Returns true if the entries are consecutive, the first one contains the position `start`, and the last
    /// ends at `end`. A block may begin before `start`.
    pub fn is_ordered(&self, start: u64, end: u64) -> bool {
        let entries: Vec<Entry> = self.0.iter().rev().flatten().copied().collect();
        let first_end = entries.get(1).map_or(end, |second| second.0);
        match entries.first() {
            None => start == end,
            Some(first) => {
                first.0 <= start && start < first_end && is_ordered(&entries, first.0, end)
            }
        }
    }

    /// Removes the entries that end at the position `start` or before it. The last entry ends at `end`.
    pub fn drop_before(&mut self, start: u64, end: u64) {
        let mut ends: Vec<u64> = self.0.iter().rev().flatten().map(|entry| entry.0).collect();
        ends.push(end);
        let mut dropped = ends[1..].iter().take_while(|&&end| end <= start).count();
        for entries in self.0.iter_mut().rev() {
            let count = dropped.min(entries.len());
            entries.drain(..count);
            dropped -= count;
        }
        while self.0.last().is_some_and(Vec::is_empty) {
            self.0.pop();
        }
    }

    /// Returns the number of entries on all levels.
    pub fn count(&self) -> usize {
        self.0.iter().map(Vec::len).sum()
    }

    /// Appends the member `index`, preceded by a comma; nothing if there are no levels.
    pub fn write(&self, out: &mut String) {
        for (level, entries) in self.0.iter().enumerate() {
            out.push_str(if level == 0 { ",\"index\":[" } else { "," });
            log_format::write_entries(out, entries);
        }
        if !self.0.is_empty() {
            out.push(']');
        }
    }

    /// Adds the segment that begins with `entry` and ends at `end`.
    pub fn add(&mut self, entry: Entry, end: u64) -> Node {
        self.push(0, entry, end)
    }

    /// Turns the full lists of the log `id` into blocks; the last segment ends at `end`.
    pub fn spill(&mut self, id: &str, end: u64, objects: &mut Vec<Object>) {
        self.spill_level(0, id, end, objects);
    }

    fn spill_level(&mut self, level: usize, id: &str, end: u64, objects: &mut Vec<Object>) {
        let Some(entries) = self.0.get(level).filter(|entries| entries.len() >= FAN_OUT) else {
            return;
        };
        let first = entries[0];
        let mut header = format!(
            "\"log\":\"{id}\",\"level\":{},\"from\":{},\"to\":{end},\"entries\":",
            level + 1,
            first.0,
        );
        log_format::write_entries(&mut header, entries);
        self.spill_level(level + 1, id, first.0, objects);
        self.0[level].clear();
        let name = self.push(level + 1, first, end).name();
        objects.push((name, log_format::write(&header, None)));
    }

    fn push(&mut self, level: usize, entry: Entry, end: u64) -> Node {
        if self.0.len() == level {
            self.0.push(Vec::new());
        }
        self.0[level].push(entry);
        Node {
            level,
            start: entry.0,
            end,
            ts_ms: entry.1,
            next_ts_ms: None,
        }
    }

    /// Returns all nodes in order. `end` and `end_ts_ms` belong to the element after the last one.
    pub fn nodes(&self, end: u64, end_ts_ms: Option<u64>) -> Vec<Node> {
        let levels = self.0.iter().enumerate().rev();
        let entries =
            levels.flat_map(|(level, entries)| entries.iter().map(move |&entry| (level, entry)));
        nodes(entries, end, end_ts_ms)
    }
}

/// Returns the nodes below `node` of the log `id`, whose object is `block`.
pub fn expand(block: &[u8], id: &str, node: &Node) -> Result<Vec<Node>, CoreError> {
    log_format::read(block, |header, _| {
        let is_it = header.log == id
            && (header.level, header.from, header.to) == (node.level, node.start, node.end);
        let is_it = is_it && is_ordered(&header.entries, node.start, node.end);
        let below = node.level.checked_sub(1).filter(|_| is_it)?;
        let entries = header.entries.into_iter().map(|entry| (below, entry));
        Some(nodes(entries, node.end, node.next_ts_ms))
    })
}

/// Returns true if the entries cover the positions from `start` to `end` in order. An empty range has no
/// entries.
fn is_ordered(entries: &[Entry], start: u64, end: u64) -> bool {
    let follow = |pair: &[Entry]| pair[0].0 < pair[1].0 && pair[0].1 < pair[1].1;
    match (entries.first(), entries.last()) {
        (Some(first), Some(last)) => {
            first.0 == start && last.0 < end && entries.windows(2).all(follow)
        }
        _ => start == end,
    }
}

/// Returns those of the consecutive nodes that may contain elements from position `first` on within `bounds`.
pub fn select(mut nodes: Vec<Node>, first: u64, bounds: LogRange) -> Vec<Node> {
    nodes.retain(|node| {
        // Times strictly increase, so those in the node are below `next`, and the first requested one is `since
        // + 1`.
        let is_before = |since: u64| {
            node.next_ts_ms
                .is_some_and(|next| next.saturating_sub(1) <= since)
        };
        node.end > first && !bounds.since.is_some_and(is_before)
    });
    if let Some(oldest) = bounds.oldest {
        // The first node may contain any number of the requested elements.
        let mut sure = 0;
        let needed = nodes.iter().enumerate().take_while(|(at, node)| {
            let is_needed = *at == 0 || sure < oldest;
            sure += if *at == 0 { 0 } else { node.end - node.start };
            is_needed
        });
        let needed = needed.count();
        nodes.truncate(needed);
    }
    nodes
}

/// Returns the nodes of consecutive entries. `end` and `end_ts_ms` belong to the element after the last one.
fn nodes(
    entries: impl Iterator<Item = (usize, Entry)>,
    end: u64,
    end_ts_ms: Option<u64>,
) -> Vec<Node> {
    let mut nodes: Vec<Node> = Vec::new();
    for (level, Entry(start, ts_ms)) in entries {
        if let Some(before) = nodes.last_mut() {
            (before.end, before.next_ts_ms) = (start, Some(ts_ms));
        }
        nodes.push(Node {
            level,
            start,
            end,
            ts_ms,
            next_ts_ms: end_ts_ms,
        });
    }
    nodes
}
