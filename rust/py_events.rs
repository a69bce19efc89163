//! Python bindings of event columns.

use crate::error::CoreError;
use crate::event_columns;
use crate::py_shared::detach_if_large;
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

#[pyclass(frozen, module = "pysync._core")]
pub struct EventColumns(event_columns::Columns);

#[pymethods]
impl EventColumns {
    #[new]
    fn new(py: Python<'_>, data: &[u8]) -> PyResult<Self> {
        // Column offsets have 32 bits.
        if i32::try_from(data.len()).is_err() {
            return Err(CoreError::InvalidEvents.into());
        }
        let columns = detach_if_large(py, data.len(), || event_columns::Columns::read(data))?;
        Ok(Self(columns))
    }

    fn __len__(&self) -> usize {
        self.0.count
    }

    fn column<'py>(
        &self,
        py: Python<'py>,
        at: usize,
    ) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)> {
        let column = self
            .0
            .columns
            .get(at)
            .ok_or_else(|| PyIndexError::new_err("no such column"))?;
        let size = 4 * (column.ends.len() + 1);
        let offsets = PyBytes::new_with(py, size, |offsets| {
            let (slots, _) = offsets[4..].as_chunks_mut::<4>();
            for (slot, end) in slots.iter_mut().zip(&column.ends) {
                // Fits into 32 bits, because `data` does.
                *slot = (*end as u32).to_le_bytes();
            }
            Ok(())
        })?;
        Ok((offsets, PyBytes::new(py, &column.text)))
    }
}
