//! Python bindings of batches of events.

use crate::event_columns;
use crate::py_shared::{copy_bytes, with_memory};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

#[pyfunction]
pub fn encode_events<'py>(
    py: Python<'py>,
    data: &[u8],
    received_at: &str,
) -> PyResult<Bound<'py, PyBytes>> {
    let file = with_memory(py, data.len(), || event_columns::encode(data, received_at))??;
    copy_bytes(py, &file)
}
