//! The only file that knows Python.

#[pyo3::pymodule]
mod _core {
    #[pymodule_export]
    const SOURCE_DIGEST: &str = env!("PYSYNC_SOURCE_DIGEST");
}
