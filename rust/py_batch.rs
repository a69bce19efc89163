//! Batch pulls as Python sees them.

use crate::py::_core::Scope;
use crate::py::{join, over};
use crate::{batch, joined};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

/// A collection as Python describes it: name, template, servable, scoped, ttl_ms, grouped_by.
type Row = (String, String, bool, bool, Option<u64>, Vec<String>);

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
        let collection = |(name, template, servable, scoped, ttl_ms, grouped_by): Row| {
            let row = batch::Collection::new(&template, servable, scoped, ttl_ms, grouped_by);
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
        let asker = batch::Asker { identity, scope };
        Ok(BatchPlan(self.0.plan(query, &asker)?))
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

    #[pyo3(signature = (stored, now_ms, variant=None))]
    fn answer(
        slf: Bound<'_, Self>,
        stored: Vec<Bound<'_, PyAny>>,
        now_ms: u64,
        variant: Option<&[u8]>,
    ) -> PyResult<BatchAnswer> {
        let plan = &slf.get().0;
        if stored.len() != plan.reads.len() {
            return Err(PyValueError::new_err("one outcome for each read"));
        }
        let outcomes = stored.iter().map(outcome).collect::<PyResult<Vec<_>>>()?;
        let size = outcomes.iter().map(|stored| match stored {
            joined::Stored::Bytes(bytes) => bytes.len(),
            _ => 0,
        });
        let found = over(slf.py(), size.sum(), || plan.find(&outcomes, now_ms));
        Ok(BatchAnswer {
            version: plan.version(&found, variant.unwrap_or_default()),
            failed: plan.failed(&found),
            found,
            now_ms,
            plan: slf.clone().unbind(),
            stored: stored.into_iter().map(Bound::unbind).collect(),
        })
    }
}

fn outcome<'a>(stored: &'a Bound<'_, PyAny>) -> PyResult<joined::Stored<'a>> {
    if let Ok(bytes) = stored.cast::<PyBytes>() {
        return Ok(joined::Stored::Bytes(bytes.as_bytes()));
    }
    if stored.is_none() {
        return Ok(joined::Stored::Missing);
    }
    Ok(joined::Stored::Failed(stored.cast::<PyString>()?.to_str()?))
}

#[pyclass(frozen, module = "pysync._core")]
pub struct BatchAnswer {
    plan: Py<BatchPlan>,
    stored: Vec<Py<PyAny>>,
    found: Vec<joined::Found>,
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

    fn body<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let frame = self.plan.get().0.frame(&self.found, self.now_ms);
        let data = |read: usize| {
            let stored = self.stored[read].bind(py).cast::<PyBytes>();
            match (stored, &self.found[read]) {
                (Ok(stored), joined::Found::Document(document)) => {
                    &stored.as_bytes()[document.data.clone()]
                }
                _ => b"{}",
            }
        };
        join(py, &frame.pieces(data))
    }
}
