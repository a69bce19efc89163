//! The paths of a certificate (clients-and-crypto section 1.6): globs where `**` stands for any run of
//! characters, `*` for one without `/`, and everything else for itself.

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

/// As published clients read a glob: only the latest star is ever widened, and a single one never over a `/`.
/// So it matches less than a regular expression would, which is safe where a match allows.
pub fn matches_narrowly(glob: &[u8], text: &[u8]) -> bool {
    struct Star {
        double: bool,
        glob_after: usize,
        text_end: usize,
    }
    let mut star: Option<Star> = None;
    let (mut g, mut t) = (0, 0);
    while t < text.len() {
        if glob.get(g) == Some(&b'*') {
            let double = glob.get(g + 1) == Some(&b'*');
            g += if double { 2 } else { 1 };
            star = Some(Star {
                double,
                glob_after: g,
                text_end: t,
            });
        } else if glob.get(g) == Some(&text[t]) {
            (g, t) = (g + 1, t + 1);
        } else {
            match &mut star {
                Some(star) if star.double || text[star.text_end] != b'/' => {
                    star.text_end += 1;
                    (g, t) = (star.glob_after, star.text_end);
                }
                _ => return false,
            }
        }
    }
    glob[g..].iter().all(|&byte| byte == b'*')
}

/// A deny entry, read as a regular expression so that it never denies less than its author meant.
pub struct Deny {
    /// What every match starts with.
    literal: Vec<u8>,
    /// The rest of the glob.
    steps: Vec<Step>,
}

#[derive(Clone, Copy, PartialEq)]
enum Step {
    Byte(u8),
    Any,
    Segment,
}

impl Step {
    /// Whether a run of this step may go on over `byte`.
    fn runs_over(self, byte: u8) -> bool {
        match self {
            Self::Byte(_) => false,
            Self::Any => true,
            Self::Segment => byte != b'/',
        }
    }
}

impl Deny {
    pub fn new(glob: &str) -> Self {
        let star = glob.find('*').unwrap_or(glob.len());
        let (literal, mut rest) = (&glob.as_bytes()[..star], &glob.as_bytes()[star..]);
        let mut steps = Vec::new();
        while let Some(&byte) = rest.first() {
            let step = match rest {
                [b'*', b'*', ..] => Step::Any,
                [b'*', ..] => Step::Segment,
                _ => Step::Byte(byte),
            };
            rest = &rest[if step == Step::Any { 2 } else { 1 }..];
            steps.push(step);
        }
        Self {
            literal: literal.to_vec(),
            steps,
        }
    }

    /// Whether `key`, or a key that it lies below, matches. All partial matches advance together, so the
    /// time is bounded by the product of both lengths.
    pub fn covers(&self, key: &[u8]) -> bool {
        let Some(text) = key.strip_prefix(self.literal.as_slice()) else {
            return false;
        };
        // reached[i]: the text so far matches the steps before i.
        let mut reached = vec![false; self.steps.len() + 1];
        reached[0] = true;
        self.skip_runs(&mut reached);
        for &byte in text {
            if byte == b'/' && reached[self.steps.len()] {
                return true;
            }
            for i in (0..reached.len()).rev() {
                let goes_on =
                    reached[i] && self.steps.get(i).is_some_and(|step| step.runs_over(byte));
                let arrives = i > 0 && reached[i - 1] && self.steps[i - 1] == Step::Byte(byte);
                reached[i] = goes_on || arrives;
            }
            self.skip_runs(&mut reached);
        }
        reached[self.steps.len()]
    }

    /// A run may be empty, so what reaches it has also reached what follows it.
    fn skip_runs(&self, reached: &mut [bool]) {
        for (i, step) in self.steps.iter().enumerate() {
            if reached[i] && !matches!(step, Step::Byte(_)) {
                reached[i + 1] = true;
            }
        }
    }
}
