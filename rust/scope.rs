//! The paths of a certificate (clients-and-crypto section 1.6): globs where `**` stands for any run of
//! characters, `*` for one without `/`, and everything else for itself.

use memchr::memmem;
use std::borrow::Cow;

/// What the path entries of a certificate allow.
pub struct Scope {
    allows: Vec<String>,
    denies: Vec<Deny>,
}

impl Scope {
    /// `{identity}` in an entry stands for `identity`; a leading `!` makes it a deny.
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

    /// Whether an allow entry matches and no deny entry does; no entries at all allow everything.
    pub fn allows(&self, key: &str) -> bool {
        if self.allows.is_empty() {
            return self.denies.is_empty();
        }
        let key = plain_segments(key);
        let key = key.as_bytes();
        self.allows
            .iter()
            .any(|glob| matches_narrowly(glob.as_bytes(), key))
            && !self.denies.iter().any(|deny| deny.covers(key))
    }
}

/// The key without its empty and `.` segments.
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

/// As published clients read a glob: a star stops at the first place where what stands between it and the
/// next star matches, and that place is never reconsidered; a single star that would have to pass a `/` to
/// get there fails the whole. So it matches less than a regular expression would, which is safe where a
/// match allows. Linear in both lengths.
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

/// The star that a glob starts with, and what follows it. `***` is `**` and then `*`.
fn split_star(glob: &[u8]) -> Option<(Step, &[u8])> {
    match glob {
        [b'*', b'*', rest @ ..] => Some((Step::Any, rest)),
        [b'*', rest @ ..] => Some((Step::Segment, rest)),
        _ => None,
    }
}

/// A part of a glob: a byte, or a run of any bytes or of those of a segment.
#[derive(Clone, Copy, PartialEq)]
enum Step {
    Byte(u8),
    Any,
    Segment,
}

/// A deny entry, read as a regular expression so that it never denies less than its author meant.
pub struct Deny {
    /// What every match starts with.
    literal: Vec<u8>,
    /// The rest of the glob. No two runs are adjacent.
    steps: Vec<Step>,
}

impl Deny {
    pub fn new(glob: &str) -> Self {
        let (literal, mut rest) = until_star(glob.as_bytes());
        let mut steps = Vec::new();
        while let Some(&byte) = rest.first() {
            let (step, after) = split_star(rest).unwrap_or((Step::Byte(byte), &rest[1..]));
            match (steps.last_mut(), step) {
                // Stars are adjacent only where one of them is double, and takes in the other.
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

    /// Whether `key`, or a key that it lies below, matches. All partial matches advance together, 64 in a
    /// word, so a crafted glob costs what an honest one of its length does.
    pub fn covers(&self, key: &[u8]) -> bool {
        let Some(text) = key.strip_prefix(self.literal.as_slice()) else {
            return false;
        };
        // Bit i is set where the text so far matches the steps before i.
        let mut reached = self.bits(|_| false);
        reached[0] = 1;
        let (runs, slash_runs) = (
            self.bits(|step| !matches!(step, Step::Byte(_))),
            self.bits(|step| step == Step::Any),
        );
        let mut bytes: [Option<Vec<u64>>; 256] = [const { None }; 256];
        skip_runs(&mut reached, &runs);
        for &byte in text {
            if byte == b'/' && self.is_complete(&reached) {
                return true;
            }
            let steps = bytes[usize::from(byte)]
                .get_or_insert_with(|| self.bits(|step| step == Step::Byte(byte)));
            let staying = if byte == b'/' { &slash_runs } else { &runs };
            let mut carry = 0;
            for (word, (step, stay)) in reached.iter_mut().zip(steps.iter().zip(staying)) {
                let moved = *word & step;
                *word = (*word & stay) | moved << 1 | carry;
                carry = moved >> 63;
            }
            skip_runs(&mut reached, &runs);
        }
        self.is_complete(&reached)
    }

    /// A set of steps, with a place for the end.
    fn bits(&self, holds: impl Fn(Step) -> bool) -> Vec<u64> {
        let mut words = vec![0; self.steps.len() / 64 + 1];
        for (i, &step) in self.steps.iter().enumerate() {
            words[i / 64] |= u64::from(holds(step)) << (i % 64);
        }
        words
    }

    fn is_complete(&self, reached: &[u64]) -> bool {
        reached[self.steps.len() / 64] >> (self.steps.len() % 64) & 1 == 1
    }
}

/// A run may be empty, so what reaches it has also reached what follows it, which is no run.
fn skip_runs(reached: &mut [u64], runs: &[u64]) {
    let mut carry = 0;
    for (word, run) in reached.iter_mut().zip(runs) {
        let skipped = *word & run;
        *word |= skipped << 1 | carry;
        carry = skipped >> 63;
    }
}
