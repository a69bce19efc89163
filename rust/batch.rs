//! The requests of batch pulls (docs/reference/protocol.md#batch-pull). `batch_response` builds the responses.

use crate::batch_params::{Known, Listed, ParamSet, ParamValue, are_known, listed};
use crate::canonical::canonicalize;
use crate::error::CoreError;
use crate::log_range::LogRange;
use crate::query::parameter;
use crate::scope::Scope;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;

const MAX_VALUE_BYTES: usize = 255;
const MAX_KEY_BYTES: usize = 1000;
const RESERVED_SEGMENT: &str = "_pysync";

const MISSING_PARAMETER: &str = "Missing required path parameter";
const INVALID_PARAMETER: &str = "Invalid path parameter";
const UNKNOWN_COLLECTION: &str = "Collection not found";
const OUT_OF_SCOPE: &str = "Forbidden";
const NOT_A_LOG: &str = "append_params_not_supported";

/// A collection, as far as batch pulls need it.
pub struct Collection {
    segments: Vec<Segment>,
    /// True if batches can read the collection.
    servable: bool,
    /// True if the scope of the caller applies.
    scoped: bool,
    ttl_ms: Option<u64>,
    /// Parameters whose values determine who may read.
    grouped_by: Vec<String>,
    log: Option<Log>,
}

/// A collection of logs.
#[derive(Clone, Copy)]
pub struct Log {
    /// Maximum number of elements that a read returns; None for no limit.
    pub max_elements: Option<u64>,
}

enum Segment {
    Literal(String),
    Parameter(String),
}

impl Collection {
    pub fn new(
        template: &str,
        servable: bool,
        scoped: bool,
        ttl_ms: Option<u64>,
        grouped_by: Vec<String>,
        log: Option<Log>,
    ) -> Self {
        let segment = |text: &str| match text
            .strip_prefix('{')
            .and_then(|rest| rest.strip_suffix('}'))
        {
            Some(name) => Segment::Parameter(name.into()),
            None => Segment::Literal(text.into()),
        };
        Self {
            segments: template.split('/').map(segment).collect(),
            servable,
            scoped,
            ttl_ms,
            grouped_by,
            log,
        }
    }
}

/// Limits of one request.
pub struct Limits {
    pub max_reads: usize,
    pub max_append_elements: u64,
    pub deny_suffixes: Vec<String>,
}

/// The collections of one namespace.
pub struct Planner {
    collections: Vec<Collection>,
    by_name: HashMap<String, usize>,
    limits: Limits,
}

/// The caller: the value of `{identity}` if a request gives none (empty: no value), and the scope of its
/// certificate.
pub struct Caller<'a> {
    pub identity: &'a str,
    pub scope: Option<&'a Scope>,
}

/// Entries of one collection that share one authorisation decision.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Group {
    pub collection: usize,
    pub identity: Option<String>,
    /// Values of the `grouped_by` of the collection.
    pub values: Vec<String>,
}

/// One document to read.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Read {
    pub key: String,
    pub group: usize,
    pub known: Known,
}

/// One log to read, with the range of its elements.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Tail {
    pub key: String,
    pub group: usize,
    pub bounds: LogRange,
}

/// One entry of the response: an error already, or a read.
#[derive(Clone, Copy)]
pub enum Entry {
    Failed(&'static str),
    Read(usize),
    Tail(usize),
}

/// A parsed request, in its order.
#[derive(Default)]
pub struct Plan {
    /// The requested names, and the ranges of their entries.
    pub names: Vec<(String, Range<usize>)>,
    pub entries: Vec<Entry>,
    /// The known ones among the names.
    pub collections: Vec<usize>,
    pub groups: Vec<Group>,
    pub reads: Vec<Read>,
    /// Indexed by read.
    pub ttls_ms: Vec<Option<u64>>,
    pub tails: Vec<Tail>,
}

type AppendParams = Map<String, Value>;

impl Planner {
    pub fn new(collections: Vec<(String, Collection)>, limits: Limits) -> Self {
        let by_name = collections
            .iter()
            .enumerate()
            .map(|(at, (name, _))| (name.clone(), at))
            .collect();
        Self {
            collections: collections.into_iter().map(|(_, row)| row).collect(),
            by_name,
            limits,
        }
    }

    /// Returns the plan of a request with this query, as received.
    pub fn plan(&self, query: &[u8], caller: &Caller<'_>) -> Result<Plan, CoreError> {
        let names = names(query)?;
        let suffixes = &self.limits.deny_suffixes;
        let is_denied = |name: &String| suffixes.iter().any(|suffix| name.ends_with(suffix));
        if names.iter().any(is_denied) {
            return Err(CoreError::BatchKeyDenied);
        }
        let params = parameter(query, "params").unwrap_or_default();
        let params: Listed<ParamSet<'_>> = listed(&params).ok_or(CoreError::InvalidParams)?;
        let append = parameter(query, "appendParams").unwrap_or_default();
        let append: Listed<Option<AppendParams>> =
            listed(&append).ok_or(CoreError::InvalidAppendParams)?;
        let known = parameter(query, "known").unwrap_or_default();
        let known: Listed<Known> = listed(&known)
            .filter(are_known)
            .ok_or(CoreError::InvalidKnown)?;
        let alone = [ParamSet::default()];
        let sets_of = |name: &String| match params.get(name) {
            Some(sets) => sets.as_slice(),
            None => &alone,
        };
        let reads: usize = names.iter().map(|name| sets_of(name).len()).sum();
        if names.len() > self.limits.max_reads || reads > self.limits.max_reads {
            return Err(CoreError::TooManyCollections);
        }
        let mut elements: u64 = 0;
        let mut bounds: HashMap<&str, Vec<Option<LogRange>>> = HashMap::new();
        for name in &names {
            let versions = known.get(name);
            if versions.is_some_and(|versions| versions.len() != sets_of(name).len()) {
                return Err(CoreError::InvalidKnown);
            }
            if let Some(named) = append.get(name) {
                if named.len() != sets_of(name).len() {
                    return Err(CoreError::InvalidAppendParams);
                }
                let read = self
                    .bounds(name, named)
                    .ok_or(CoreError::InvalidAppendParams)?;
                let counted = read.iter().flatten().map(LogRange::elements);
                elements = counted.fold(elements, u64::saturating_add);
                bounds.insert(name, read);
            }
        }
        if elements > self.limits.max_append_elements {
            return Err(CoreError::BatchAppendBudgetExceeded);
        }
        let mut draft = Draft::new(self, caller);
        for name in &names {
            let versions = known.get(name).map_or(&[][..], Vec::as_slice);
            draft.add(name, sets_of(name), bounds.get(name.as_str()), versions)?;
        }
        Ok(draft.plan)
    }

    /// Returns the ranges of the entries of a collection; None if one of them is not usable.
    fn bounds(&self, name: &str, named: &[Option<AppendParams>]) -> Option<Vec<Option<LogRange>>> {
        let row = self.by_name.get(name).map(|&at| &self.collections[at]);
        let max_elements = row.and_then(|row| row.log?.max_elements);
        let read = |one: &Option<AppendParams>| match one {
            Some(one) => LogRange::read(one, max_elements).map(Some),
            None => Some(None),
        };
        named.iter().map(read).collect()
    }

    /// True if the key is a denied suffix, or ends in `/` and one.
    fn is_denied(&self, key: &str) -> bool {
        let is_last = |suffix: &String| {
            let rest = key.strip_suffix(suffix.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('/'))
        };
        self.limits.deny_suffixes.iter().any(is_last)
    }
}

/// A plan under construction.
struct Draft<'a> {
    planner: &'a Planner,
    caller: &'a Caller<'a>,
    plan: Plan,
    group_index: HashMap<Group, usize>,
    read_index: HashMap<Read, usize>,
    tail_index: HashMap<Tail, usize>,
}

impl<'a> Draft<'a> {
    fn new(planner: &'a Planner, caller: &'a Caller<'a>) -> Self {
        Self {
            planner,
            caller,
            plan: Plan::default(),
            group_index: HashMap::new(),
            read_index: HashMap::new(),
            tail_index: HashMap::new(),
        }
    }

    fn add(
        &mut self,
        name: &str,
        sets: &[ParamSet<'_>],
        bounds: Option<&Vec<Option<LogRange>>>,
        versions: &[Known],
    ) -> Result<(), CoreError> {
        let start = self.plan.entries.len();
        let row = self.planner.by_name.get(name).copied();
        match row.filter(|&at| self.planner.collections[at].servable) {
            None => {
                let failed = sets.iter().map(|_| Entry::Failed(UNKNOWN_COLLECTION));
                self.plan.entries.extend(failed);
            }
            Some(collection) => {
                self.plan.collections.push(collection);
                let is_log = self.planner.collections[collection].log.is_some();
                for (at, set) in sets.iter().enumerate() {
                    let bounds = bounds.and_then(|bounds| bounds[at]);
                    let entry = match self.resolve(collection, set)? {
                        Err(text) => Entry::Failed(text),
                        Ok((key, group)) if is_log => self.tail(key, group, bounds),
                        Ok(_) if bounds.is_some() => Entry::Failed(NOT_A_LOG),
                        Ok((key, group)) => {
                            let known = versions.get(at).cloned().flatten();
                            self.read(key, group, known)
                        }
                    };
                    self.plan.entries.push(entry);
                }
            }
        }
        let end = self.plan.entries.len();
        self.plan.names.push((name.into(), start..end));
        Ok(())
    }

    /// Returns the key of a param-set, and its group.
    fn resolve(
        &self,
        collection: usize,
        set: &ParamSet<'_>,
    ) -> Result<Result<(String, Group), &'static str>, CoreError> {
        let row = &self.planner.collections[collection];
        let mut key = String::with_capacity(64);
        let mut group = Group {
            collection,
            identity: None,
            values: Vec::new(),
        };
        let mut is_valid = true;
        for segment in &row.segments {
            if !key.is_empty() {
                key.push('/');
            }
            match segment {
                Segment::Literal(text) => key.push_str(text),
                Segment::Parameter(name) => {
                    let value = match set.get(name) {
                        Some(value) => text_of(value)?,
                        None if name == "identity" && !self.caller.identity.is_empty() => {
                            Cow::Borrowed(self.caller.identity)
                        }
                        None => return Ok(Err(MISSING_PARAMETER)),
                    };
                    is_valid = is_valid && is_parameter(&value);
                    key.push_str(&value);
                    if row.grouped_by.contains(name) {
                        group.values.push(value.clone().into_owned());
                    }
                    if name == "identity" {
                        group.identity = Some(value.into_owned());
                    }
                }
            }
        }
        let first = key.split('/').next();
        if !is_valid || key.len() > MAX_KEY_BYTES || first == Some(RESERVED_SEGMENT) {
            return Ok(Err(INVALID_PARAMETER));
        }
        if self.planner.is_denied(&key) {
            return Err(CoreError::BatchKeyDenied);
        }
        Ok(Ok((key, group)))
    }

    fn read(&mut self, key: String, group: Group, known: Known) -> Entry {
        let ttl_ms = self.planner.collections[group.collection].ttl_ms;
        let Some(group) = self.admit(&key, group) else {
            return Entry::Failed(OUT_OF_SCOPE);
        };
        let plan = &mut self.plan;
        let at = *self
            .read_index
            .entry(Read { key, group, known })
            .or_insert_with_key(|read| {
                plan.reads.push(read.clone());
                plan.ttls_ms.push(ttl_ms);
                plan.reads.len() - 1
            });
        Entry::Read(at)
    }

    fn tail(&mut self, key: String, group: Group, bounds: Option<LogRange>) -> Entry {
        let Some(group) = self.admit(&key, group) else {
            return Entry::Failed(OUT_OF_SCOPE);
        };
        let bounds = bounds.unwrap_or_default();
        let plan = &mut self.plan;
        let at = *self
            .tail_index
            .entry(Tail { key, group, bounds })
            .or_insert_with_key(|tail| {
                plan.tails.push(tail.clone());
                plan.tails.len() - 1
            });
        Entry::Tail(at)
    }

    /// Returns the index of the group in the plan; None if the scope of the caller does not cover the key.
    fn admit(&mut self, key: &str, group: Group) -> Option<usize> {
        let row = &self.planner.collections[group.collection];
        if row.scoped && self.caller.scope.is_some_and(|scope| !scope.allows(key)) {
            return None;
        }
        let plan = &mut self.plan;
        let at = *self.group_index.entry(group).or_insert_with_key(|group| {
            plan.groups.push(group.clone());
            plan.groups.len() - 1
        });
        Some(at)
    }
}

/// Returns the distinct names in the parameter `collections`.
fn names(query: &[u8]) -> Result<Vec<String>, CoreError> {
    let list = parameter(query, "collections").unwrap_or_default();
    let mut names: Vec<String> = Vec::new();
    let mut seen = std::collections::HashSet::new();
    for name in list.split(',').filter(|name| !name.is_empty()) {
        if seen.insert(name) {
            names.push(name.into());
        }
    }
    if names.is_empty() {
        return Err(CoreError::MissingCollections);
    }
    Ok(names)
}

/// Returns the value of a parameter as text: strings unchanged, numbers as ECMAScript writes them, 64-bit
/// integers with all their digits.
fn text_of<'a>(value: &'a ParamValue<'_>) -> Result<Cow<'a, str>, CoreError> {
    match value {
        ParamValue::Text(text) => Ok(Cow::Borrowed(text)),
        ParamValue::Number(number) if number.is_f64() => {
            let text = canonicalize(number.to_string().as_bytes());
            let text = text.ok().and_then(|text| String::from_utf8(text).ok());
            Ok(Cow::Owned(text.ok_or(CoreError::InvalidParams)?))
        }
        ParamValue::Number(number) => Ok(Cow::Owned(number.to_string())),
        ParamValue::Other => Err(CoreError::InvalidParams),
    }
}

fn is_parameter(value: &str) -> bool {
    (1..=MAX_VALUE_BYTES).contains(&value.len())
        && value != "."
        && !value.contains("..")
        && value
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"._:@-".contains(&byte))
}
