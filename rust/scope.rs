//! Path scopes of certificates (docs/reference/protocol.md#path-scopes): globs in which `**` matches any
//! characters, `*` any characters but `/`, and every other character itself.

use memchr::memmem;
use std::borrow::Cow;

/// The scope that the path entries of a certificate define.
pub struct Scope {
    allows: Vec<String>,
    denies: Vec<Deny>,
}

impl Scope {
    /// Parses the entries. `{identity}` is replaced by `identity`; a leading `!` makes an entry a deny entry.
    pub fn new<'a>(entries: impl IntoIterator<Item = &'a str>, identity: &str) -> Self {
        let (mut allows, mut denies) = (Vec::new(), Vec::new());
        for entry in entries {
            let entry = entry.replace("{identity}", identity);
            match entry.strip_prefix('!') {
                Some(deny) => denies.push(Deny::new(deny)),
                None => allows.push(entry),
            }
        }
        Self { allows, denies }
    }

    /// Returns true if an allow entry matches and no deny entry does. Without any entries, everything is
    /// allowed.
    pub fn allows(&self, key: &str) -> bool {
        if self.allows.is_empty() {
            return self.denies.is_empty();
        }
        let key = plain_segments(key);
        let key = key.as_bytes();
        let mut allows = self.allows.iter();
        allows.any(|glob| matches_narrowly(glob.as_bytes(), key)) && !self.denies_plain(key)
    }

    pub fn has_denies(&self) -> bool {
        !self.denies.is_empty()
    }

    /// Returns true if a deny entry matches, whatever is allowed.
    pub fn denies(&self, key: &str) -> bool {
        self.denies_plain(plain_segments(key).as_bytes())
    }

    fn denies_plain(&self, key: &[u8]) -> bool {
        let mut positions = None;
        let mut denies = self.denies.iter().filter(|deny| deny.may_cover(key));
        denies.any(|deny| deny.covers_at(positions.get_or_insert_with(|| Positions::new(key))))
    }
}

/// Returns the key without its empty and `.` segments.
fn plain_segments(key: &str) -> Cow<'_, str> {
    let dropped = |segment: &str| segment.is_empty() || segment == ".";
    if !key.split('/').any(dropped) {
        return Cow::Borrowed(key);
    }
    Cow::Owned(
        key.split('/')
            .filter(|segment| !dropped(segment))
            .collect::<Vec<_>>()
            .join("/"),
    )
}

/// Matches a glob as published clients do. A star ends at the first position where the text between it and the
/// next star matches, without backtracking; a single star that would have to cross a `/` to get there fails the
/// match. This matches less than a regular expression would, which is safe for allow entries. Linear in both
/// lengths.
pub fn matches_narrowly(glob: &[u8], text: &[u8]) -> bool {
    let (literal, mut rest) = until_star(glob);
    let Some(mut text) = text.strip_prefix(literal) else {
        return false;
    };
    if rest.is_empty() {
        return text.is_empty();
    }
    while let Some((star, after)) = split_star(rest) {
        let (literal, next) = until_star(after);
        let found = if next.is_empty() {
            text.strip_suffix(literal).map(<[u8]>::len)
        } else {
            memmem::find(text, literal)
        };
        let Some(at) = found else { return false };
        if star == Step::Segment && text[..at].contains(&b'/') {
            return false;
        }
        text = &text[at + literal.len()..];
        rest = next;
    }
    true
}

fn until_star(glob: &[u8]) -> (&[u8], &[u8]) {
    glob.split_at(memchr::memchr(b'*', glob).unwrap_or(glob.len()))
}

/// Returns the star at the start of a glob, and the text after it. `***` is `**` followed by `*`.
fn split_star(glob: &[u8]) -> Option<(Step, &[u8])> {
    match glob {
        [b'*', b'*', rest @ ..] => Some((Step::Any, rest)),
        [b'*', rest @ ..] => Some((Step::Segment, rest)),
        _ => None,
    }
}

/// A step of a glob: a byte, a run of any bytes, or a run of bytes within a segment.
#[derive(Clone, Copy, PartialEq)]
enum Step {
    Byte(u8),
    Any,
    Segment,
}

/// A deny entry, matched like a regular expression, so that it never denies less than its author meant.
pub struct Deny {
    /// Literal prefix of every match.
    literal: Vec<u8>,
    /// Steps of the rest of the glob. No two runs are adjacent.
    steps: Vec<Step>,
}

impl Deny {
    pub fn new(glob: &str) -> Self {
        let (literal, mut rest) = until_star(glob.as_bytes());
        let mut steps = Vec::new();
        while let Some(&byte) = rest.first() {
            let (step, after) = split_star(rest).unwrap_or((Step::Byte(byte), &rest[1..]));
            match (steps.last_mut(), step) {
                // Of two adjacent stars one is double, and includes the other.
                (Some(last @ (Step::Any | Step::Segment)), Step::Any | Step::Segment) => {
                    *last = Step::Any
                }
                _ => steps.push(step),
            }
            rest = after;
        }
        Self {
            literal: literal.to_vec(),
            steps,
        }
    }

    /// Returns true if `key`, or a key above it, matches.
    pub fn covers(&self, key: &[u8]) -> bool {
        self.may_cover(key) && self.covers_at(&Positions::new(key))
    }

    fn may_cover(&self, key: &[u8]) -> bool {
        key.starts_with(&self.literal)
    }

    /// Returns `covers` for a key that `may_cover` accepts. All partial matches advance together, 64 per word,
    /// so a crafted glob costs no more than another of its length.
    fn covers_at(&self, key: &Positions) -> bool {
        // Bit i is set if the steps so far match the key up to its byte i.
        let mut reached = vec![0; key.words()];
        reached[self.literal.len() / 64] = 1 << (self.literal.len() % 64);
        for &step in &self.steps {
            match step {
                Step::Byte(byte) => key.advance(&mut reached, byte),
                Step::Any => key.extend(&mut reached, &key.any),
                Step::Segment => key.extend(&mut reached, &key.in_segments),
            }
            if reached.iter().all(|&word| word == 0) {
                return false;
            }
        }
        reached
            .iter()
            .zip(&key.ends)
            .any(|(word, end)| word & end != 0)
    }
}

/// The positions of each byte in a key, shared by all deny entries.
struct Positions {
    /// Positions of each byte value: 256 sets, concatenated.
    of: Vec<u64>,
    any: Vec<u64>,
    in_segments: Vec<u64>,
    /// Positions at which a match may end: before a slash, and at the end.
    ends: Vec<u64>,
}

impl Positions {
    fn new(key: &[u8]) -> Self {
        let words = key.len() / 64 + 1;
        let mut of = vec![0; 256 * words];
        let mut any = vec![0; words];
        for (at, &byte) in key.iter().enumerate() {
            of[usize::from(byte) * words + at / 64] |= 1 << (at % 64);
            any[at / 64] |= 1 << (at % 64);
        }
        let mut ends = of[usize::from(b'/') * words..][..words].to_vec();
        let in_segments = any
            .iter()
            .zip(&ends)
            .map(|(any, slash)| any & !slash)
            .collect();
        ends[key.len() / 64] |= 1 << (key.len() % 64);
        Self {
            of,
            any,
            in_segments,
            ends,
        }
    }

    fn words(&self) -> usize {
        self.ends.len()
    }

    /// Advances every position whose byte is `byte`, and drops the others.
    fn advance(&self, reached: &mut [u64], byte: u8) {
        let words = self.words();
        let mut carry = 0;
        for (word, here) in reached
            .iter_mut()
            .zip(&self.of[usize::from(byte) * words..])
        {
            let moved = *word & here;
            *word = moved << 1 | carry;
            carry = moved >> 63;
        }
    }

    /// Adds the positions that are reachable by any number of bytes of `run`. The carry of an addition passes
    /// through all consecutive ones.
    fn extend(&self, reached: &mut [u64], run: &[u64]) {
        let mut carry = false;
        for (word, run) in reached.iter_mut().zip(run) {
            let (sum, over) = (*word & run).overflowing_add(*run);
            let (sum, again) = sum.overflowing_add(u64::from(carry));
            *word |= sum ^ run;
            carry = over || again;
        }
    }
}
