//! Python bindings of batch pulls.

use crate::log_range::LogRange;
use crate::py_scope::Scope;
use crate::py_shared::{concat_bytes, detach_if_large};
use crate::{batch, batch_response};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString, PyTuple};
use std::collections::HashMap;

/// A collection from Python: name, template, servable, scoped, ttl_ms, grouped_by, and the maximum number of
/// elements of a log read (0: no limit).
type Row = (
    String,
    String,
    bool,
    bool,
    Option<u64>,
    Vec<String>,
    Option<u64>,
);

/// A log read for Python: key, group, since, newest, oldest.
type Tail<'a> = (&'a str, usize, Option<u64>, Option<u64>, Option<u64>);

#[pyclass(frozen, module = "pysync._core")]
pub struct BatchPlanner(batch::Planner);

#[pymethods]
impl BatchPlanner {
    #[new]
    fn new(
        rows: Vec<Row>,
        max_reads: usize,
        max_append_elements: u64,
        deny_suffixes: Vec<String>,
    ) -> Self {
        let collection = |(name, template, servable, scoped, ttl_ms, grouped_by, most): Row| {
            let log = most.map(|most| batch::Log {
                max_elements: (most > 0).then_some(most),
            });
            let row = batch::Collection::new(&template, servable, scoped, ttl_ms, grouped_by, log);
            (name, row)
        };
        let limits = batch::Limits {
            max_reads,
            max_append_elements,
            deny_suffixes,
        };
        let collections = rows.into_iter().map(collection).collect();
        Self(batch::Planner::new(collections, limits))
    }

    #[pyo3(signature = (query, identity, scope=None))]
    fn plan(&self, query: &[u8], identity: &str, scope: Option<&Scope>) -> PyResult<BatchPlan> {
        let scope = scope.map(|scope| &scope.0);
        let caller = batch::Caller { identity, scope };
        Ok(BatchPlan(self.0.plan(query, &caller)?))
    }
}

#[pyclass(frozen, module = "pysync._core")]
pub struct BatchPlan(batch::Plan);

#[pymethods]
impl BatchPlan {
    #[getter]
    fn collections(&self) -> Vec<usize> {
        self.0.collections.clone()
    }

    #[getter]
    fn groups(&self) -> Vec<(usize, Option<&str>, Vec<&str>)> {
        let mut groups = Vec::with_capacity(self.0.groups.len());
        for group in &self.0.groups {
            let values = group.values.iter().map(String::as_str).collect();
            groups.push((group.collection, group.identity.as_deref(), values));
        }
        groups
    }

    #[getter]
    fn reads(&self) -> Vec<(&str, usize)> {
        let reads = self.0.reads.iter();
        reads.map(|read| (read.key.as_str(), read.group)).collect()
    }

    #[getter]
    fn known(&self) -> HashMap<usize, (&str, Option<u64>)> {
        let reads = self.0.reads.iter().zip(&self.0.ttls_ms).enumerate();
        reads
            .filter_map(|(at, (read, ttl_ms))| Some((at, (read.known.as_deref()?, *ttl_ms))))
            .collect()
    }

    #[getter]
    fn tails(&self) -> Vec<Tail<'_>> {
        let mut tails = Vec::with_capacity(self.0.tails.len());
        for tail in &self.0.tails {
            let LogRange {
                since,
                newest,
                oldest,
            } = tail.bounds;
            tails.push((tail.key.as_str(), tail.group, since, newest, oldest));
        }
        tails
    }

    #[getter]
    fn times(&self) -> (Vec<usize>, Vec<usize>) {
        self.0.times()
    }

    #[pyo3(signature = (stored, now_ms, variant=None, tails=None, unchanged=None))]
    fn answer(
        slf: Bound<'_, Self>,
        stored: Vec<Bound<'_, PyAny>>,
        now_ms: u64,
        variant: Option<&[u8]>,
        tails: Option<Vec<TailOutcome<'_>>>,
        unchanged: Option<HashMap<usize, String>>,
    ) -> PyResult<BatchAnswer> {
        let plan = &slf.get().0;
        let tails = tails.unwrap_or_default();
        if stored.len() != plan.reads.len() || tails.len() != plan.tails.len() {
            return Err(PyValueError::new_err("one outcome for each read"));
        }
        let stored = stored
            .into_iter()
            .map(first)
            .collect::<PyResult<Vec<_>>>()?;
        let outcomes = stored.iter().map(stored_of).collect::<PyResult<Vec<_>>>()?;
        let size = outcomes.iter().map(|stored| match stored {
            batch_response::Stored::Bytes(bytes) => bytes.len(),
            _ => 0,
        });
        let mut reads = detach_if_large(slf.py(), size.sum(), || plan.find(&outcomes, now_ms));
        for (at, hash) in unchanged.unwrap_or_default() {
            let read = reads.get_mut(at);
            *read.ok_or_else(|| PyValueError::new_err("no such read"))? =
                batch_response::Found::Unchanged(hash);
        }
        let (tail_outcomes, elements) = tails.into_iter().map(TailOutcome::parts).unzip();
        let outcomes = batch_response::Outcomes {
            reads,
            tails: tail_outcomes,
        };
        Ok(BatchAnswer {
            version: plan.version(&outcomes, variant.unwrap_or_default()),
            failed: plan.failed(&outcomes),
            outcomes,
            now_ms,
            plan: slf.clone().unbind(),
            stored: stored.into_iter().map(Bound::unbind).collect(),
            elements,
        })
    }
}

/// The result of a log read: its hash, the text of `data` and a flag for omitted elements, or the text of an
/// error.
#[derive(FromPyObject)]
enum TailOutcome<'py> {
    Tail(String, Bound<'py, PyBytes>, bool),
    Failed(String),
}

impl TailOutcome<'_> {
    fn parts(self) -> (batch_response::TailOutcome, Option<Py<PyBytes>>) {
        match self {
            Self::Tail(hash, data, has_more) => (Ok((hash, has_more)), Some(data.unbind())),
            Self::Failed(text) => (Err(text), None),
        }
    }
}

/// Takes a result of a read, or a tuple that begins with one.
fn first(stored: Bound<'_, PyAny>) -> PyResult<Bound<'_, PyAny>> {
    match stored.cast::<PyTuple>() {
        Ok(tuple) => tuple.get_item(0),
        Err(_) => Ok(stored),
    }
}

/// The result of a read of the store: bytes, None, or the text of an error.
fn stored_of<'a>(value: &'a Bound<'_, PyAny>) -> PyResult<batch_response::Stored<'a>> {
    if let Ok(bytes) = value.cast::<PyBytes>() {
        return Ok(batch_response::Stored::Bytes(bytes.as_bytes()));
    }
    if value.is_none() {
        return Ok(batch_response::Stored::Missing);
    }
    let text = value.cast::<PyString>()?.to_str()?;
    Ok(batch_response::Stored::Failed(text))
}

#[pyclass(frozen, module = "pysync._core")]
pub struct BatchAnswer {
    plan: Py<BatchPlan>,
    stored: Vec<Py<PyAny>>,
    /// Texts of `data`, indexed by log read.
    elements: Vec<Option<Py<PyBytes>>>,
    outcomes: batch_response::Outcomes,
    now_ms: u64,
    version: u64,
    #[pyo3(get)]
    failed: bool,
}

#[pymethods]
impl BatchAnswer {
    #[getter]
    fn etag(&self) -> String {
        format!("{:016x}", self.version)
    }

    #[getter]
    fn corrupt(&self, py: Python<'_>) -> Vec<String> {
        let reads = self.outcomes.reads.iter().zip(&self.stored);
        let reads = reads.zip(&self.plan.get().0.reads);
        let corrupt = reads.filter(|((found, stored), _)| {
            matches!(found, batch_response::Found::Failed(_))
                && stored.bind(py).is_instance_of::<PyBytes>()
        });
        corrupt.map(|(_, read)| read.key.clone()).collect()
    }

    fn body<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let frame = self.plan.get().0.frame(&self.outcomes, self.now_ms);
        let read = |at: usize| {
            let stored = self.stored[at].bind(py).cast::<PyBytes>();
            match (stored, &self.outcomes.reads[at]) {
                (Ok(stored), batch_response::Found::Document(document)) => {
                    Some(&stored.as_bytes()[document.data.clone()])
                }
                _ => None,
            }
        };
        let tail = |at: usize| Some(self.elements[at].as_ref()?.as_bytes(py));
        let data = |gap| match gap {
            batch_response::Gap::Read(at) => read(at),
            batch_response::Gap::Tail(at) => tail(at),
        };
        concat_bytes(py, &frame.pieces(|gap| data(gap).unwrap_or(b"{}")))
    }
}
