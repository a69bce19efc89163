//! Helpers of the Python bindings: conversion of errors, and work without the interpreter lock.

use crate::canonical::reserve;
use crate::error::CoreError;
use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

/// Bytes from which the interpreter lock is released: about 0.25 ms of work. Taking it again costs less than 1
/// us, but up to the switch interval of the interpreter (5 ms, measured) beside a thread that computes.
const DETACH_FROM_BYTES: usize = 64 * 1024;

/// Errors of the core with classes of the same name in `pysync.errors`.
macro_rules! python_errors {
    ($($name:ident),* $(,)?) => {
        mod errors {
            $(pyo3::import_exception!(pysync.errors, $name);)*
        }

        impl From<CoreError> for PyErr {
            fn from(error: CoreError) -> Self {
                match error {
                    $(CoreError::$name => errors::$name::new_err(()),)*
                    CoreError::OutOfMemory => PyMemoryError::new_err(()),
                    CoreError::InvalidPublicKey => PyValueError::new_err(error.to_string()),
                }
            }
        }
    };
}

python_errors!(
    InvalidJson,
    BodyTooDeep,
    BodyNotObject,
    InvalidData,
    InvalidBaseHash,
    InvalidTs,
    AuthorProofMissing,
    DocumentCorrupt,
    MissingCollections,
    InvalidParams,
    InvalidAppendParams,
    InvalidKnown,
    TooManyCollections,
    BatchAppendBudgetExceeded,
    BatchKeyDenied,
    InvalidEvents,
);

/// Returns the result of `work` over `size` bytes.
pub fn detach_if_large<T: Send>(py: Python<'_>, size: usize, work: impl FnOnce() -> T + Send) -> T {
    if size < DETACH_FROM_BYTES {
        work()
    } else {
        py.detach(work)
    }
}

/// Memory that `with_memory` needs, as a multiple of the size of its input.
const MEMORY: usize = 4;

/// Returns the result of `work` over `size` bytes, which allocates a few times as many. Raises MemoryError if
/// there is no memory for it: the process would abort when an allocation in `work` fails.
pub fn with_memory<T: Send>(
    py: Python<'_>,
    size: usize,
    work: impl FnOnce() -> T + Send,
) -> PyResult<T> {
    if size >= DETACH_FROM_BYTES {
        reserve(&mut Vec::<u8>::new(), MEMORY * size)?;
    }
    Ok(detach_if_large(py, size, work))
}

/// Returns a copy of `bytes`.
pub fn copy_bytes<'py>(py: Python<'py>, bytes: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
    concat_bytes(py, &[bytes])
}

/// Concatenates `parts` in one copy.
pub fn concat_bytes<'py>(py: Python<'py>, parts: &[&[u8]]) -> PyResult<Bound<'py, PyBytes>> {
    let size = parts.iter().map(|part| part.len()).sum();
    PyBytes::new_with(py, size, |mut rest| {
        detach_if_large(py, size, || {
            for part in parts {
                let (target, after) = std::mem::take(&mut rest).split_at_mut(part.len());
                target.copy_from_slice(part);
                rest = after;
            }
        });
        Ok(())
    })
}

/// Returns the text as UTF-8; None if it contains surrogates, as header values of other encodings do.
pub fn utf8<'a>(text: &'a Bound<'_, PyString>) -> Option<&'a str> {
    text.to_str().ok()
}
