//! Python bindings of revocation lists.

use crate::py_shared::{copy_bytes, detach_if_large, with_memory};
use crate::revocation;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

#[pyclass(frozen, module = "pysync._core")]
pub struct RevocationList(revocation::RevocationList);

#[pymethods]
impl RevocationList {
    #[staticmethod]
    fn parse(py: Python<'_>, text: &[u8]) -> PyResult<Option<Self>> {
        with_memory(py, text.len(), || {
            revocation::RevocationList::parse(text).map(Self)
        })
    }

    #[getter]
    fn iss(&self) -> &str {
        &self.0.issuer
    }

    #[getter]
    fn iss_user_id(&self) -> &str {
        &self.0.issuer_user_id
    }

    #[getter]
    fn generation(&self) -> u64 {
        self.0.generation
    }

    #[getter]
    fn text<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        copy_bytes(py, &self.0.text)
    }

    fn is_signed(&self, py: Python<'_>) -> bool {
        detach_if_large(py, self.0.text.len(), || self.0.is_signed())
    }

    fn revoked(&self, py: Python<'_>) -> PyResult<Option<Revoked>> {
        with_memory(py, self.0.text.len(), || self.0.revoked().map(Revoked))
    }
}

#[pyclass(frozen, module = "pysync._core")]
pub struct Revoked(revocation::Revoked);

#[pymethods]
impl Revoked {
    #[getter]
    fn last_expiry_s(&self) -> i64 {
        self.0.last_expiry_s
    }

    fn contains(&self, subject: &str, nonce: &str) -> bool {
        self.0.contains(subject, nonce)
    }

    fn __len__(&self) -> usize {
        self.0.entries
    }
}
