//! Python bindings of scopes.

use crate::scope;
use pyo3::prelude::*;

#[pyclass(frozen, module = "pysync._core")]
pub struct Scope(pub scope::Scope);

#[pymethods]
impl Scope {
    #[new]
    fn new(paths: Vec<String>, identity: &str) -> Self {
        Self(scope::Scope::new(
            paths.iter().map(String::as_str),
            identity,
        ))
    }

    fn allows(&self, document_key: &str) -> bool {
        self.0.allows(document_key)
    }

    #[getter]
    fn has_denies(&self) -> bool {
        self.0.has_denies()
    }

    fn undenied(&self, prefix: &str, names: Vec<String>) -> Vec<String> {
        let mut names = names;
        let mut key = String::from(prefix);
        names.retain(|name| {
            key.truncate(prefix.len());
            key.push_str(name);
            !self.0.denies(&key)
        });
        names
    }
}
