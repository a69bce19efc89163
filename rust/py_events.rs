//! Python bindings of batches of events.

use crate::event_columns;
use crate::py_shared::{copy_bytes, with_memory};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::collections::BTreeMap;

#[pyfunction]
pub fn encode_events<'py>(
    py: Python<'py>,
    data: &[u8],
    received_at: &str,
    metadata: BTreeMap<String, String>,
) -> PyResult<Bound<'py, PyBytes>> {
    let pairs: Vec<_> = metadata
        .iter()
        .map(|(key, value)| (key.as_str(), value.as_str()))
        .collect();
    let file = with_memory(py, data.len(), || {
        event_columns::encode(data, received_at, &pairs)
    })??;
    copy_bytes(py, &file)
}
