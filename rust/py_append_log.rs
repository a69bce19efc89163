//! Append-only logs as Python sees them.

use crate::append_log::{self, Head, Refusal};
use crate::log_range::LogRange;
use crate::py_shared::{concat_bytes, copy_bytes, with_memory};
use crate::{log_format, log_index, starfish_log};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

#[pyclass(frozen, module = "pysync._core")]
pub struct Append(append_log::Append);

#[pymethods]
impl Append {
    #[getter]
    fn data<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        copy_bytes(py, &self.0.content.data)
    }

    #[getter]
    fn canonical<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        copy_bytes(py, self.0.content.canonical())
    }

    #[getter]
    fn ts_ms(&self) -> Option<u64> {
        self.0.ts_ms
    }

    #[getter]
    fn author_pubkey(&self) -> Option<&str> {
        self.0.author.as_ref().map(|author| author.pubkey.as_str())
    }

    #[getter]
    fn author_signature(&self) -> Option<&str> {
        self.0
            .author
            .as_ref()
            .map(|author| author.signature.as_str())
    }

    fn __len__(&self) -> usize {
        self.0.content.data.len()
    }
}

#[pyfunction]
pub fn decode_append(py: Python<'_>, body: &[u8]) -> PyResult<Append> {
    Ok(Append(with_memory(py, body.len(), || {
        append_log::Append::decode(body)
    })??))
}

#[pyfunction]
pub fn is_log(stored: &[u8]) -> bool {
    log_format::is_own(stored)
}

#[pyfunction]
pub fn is_intact_log_object(stored: &[u8]) -> bool {
    log_format::is_intact(stored)
}

#[pyclass(frozen, module = "pysync._core")]
pub struct LogNode(log_index::Node);

#[pymethods]
impl LogNode {
    #[getter]
    fn name(&self) -> String {
        self.0.name()
    }

    #[getter]
    fn level(&self) -> usize {
        self.0.level
    }

    #[getter]
    fn start(&self) -> u64 {
        self.0.start
    }

    #[getter]
    fn end(&self) -> u64 {
        self.0.end
    }

    #[getter]
    fn ts_ms(&self) -> u64 {
        self.0.ts_ms
    }

    #[getter]
    fn next_ts_ms(&self) -> Option<u64> {
        self.0.next_ts_ms
    }
}

#[pyclass(frozen, module = "pysync._core")]
pub struct LogHead {
    head: Head,
    chunked: Option<starfish_log::Chunked>,
}

impl From<Head> for LogHead {
    fn from(head: Head) -> Self {
        Self {
            head,
            chunked: None,
        }
    }
}

impl LogHead {
    /// Returns a copy of the head, to which elements of `added` bytes may be added.
    fn copy_head(&self, py: Python<'_>, added: usize) -> PyResult<Head> {
        with_memory(py, self.head.size() + added, || self.head.clone())
    }
}

/// An object's name and its bytes.
type Object<'py> = (String, Bound<'py, PyBytes>);

/// A segment's node and its object.
type Segment<'py> = (PyRef<'py, LogNode>, Bound<'py, PyBytes>);

#[pymethods]
impl LogHead {
    #[new]
    #[pyo3(signature = (id, previous=None))]
    fn new(id: String, previous: Option<String>) -> Self {
        let mut head = Head::default();
        (head.id, head.previous) = (id, previous);
        Self::from(head)
    }

    #[staticmethod]
    fn read(py: Python<'_>, stored: &[u8], field: &str) -> PyResult<Self> {
        if log_format::is_own(stored) {
            let head = with_memory(py, stored.len(), || Head::read(stored))??;
            return Ok(Self::from(head));
        }
        let (head, chunked) = with_memory(py, stored.len(), || starfish_log::read(stored, field))??;
        Ok(Self { head, chunked })
    }

    #[getter]
    fn is_chunked(&self) -> bool {
        self.chunked.is_some()
    }

    #[pyo3(signature = (chunks, *, whole=false))]
    fn gather(
        &self,
        py: Python<'_>,
        chunks: Vec<Bound<'_, PyBytes>>,
        whole: bool,
    ) -> PyResult<Self> {
        let chunks: Vec<&[u8]> = chunks.iter().map(|chunk| chunk.as_bytes()).collect();
        let size = chunks.iter().map(|chunk| chunk.len()).sum();
        let Some(chunked) = self.chunked else {
            return Ok(Self::from(self.copy_head(py, 0)?));
        };
        let gather = || starfish_log::gather(self.head.clone(), chunked, &chunks, whole);
        Ok(Self::from(with_memory(py, size, gather)??))
    }

    fn verify(&self, py: Python<'_>) -> PyResult<bool> {
        with_memory(py, self.head.size(), || self.head.verify())
    }

    fn adopted(&self, py: Python<'_>, id: String) -> PyResult<Self> {
        let mut head = self.copy_head(py, 0)?;
        head.id = id;
        Ok(Self::from(head))
    }

    fn without_previous(&self, py: Python<'_>) -> PyResult<Self> {
        let mut head = self.copy_head(py, 0)?;
        head.previous = None;
        Ok(Self::from(head))
    }

    #[getter]
    fn id(&self) -> &str {
        &self.head.id
    }

    #[getter]
    fn previous(&self) -> Option<&str> {
        self.head.previous.as_deref()
    }

    #[getter]
    fn count(&self) -> u64 {
        self.head.count
    }

    #[getter]
    fn start(&self) -> u64 {
        self.head.start
    }

    #[getter]
    fn dropped_ms(&self) -> u64 {
        self.head.dropped_ms
    }

    #[getter]
    fn ts_ms(&self) -> Option<u64> {
        self.head.ts_ms
    }

    #[getter]
    fn written_ms(&self) -> u64 {
        self.head.written_ms
    }

    #[getter]
    fn hash(&self) -> &str {
        &self.head.hash
    }

    #[getter]
    fn beside(&self) -> &str {
        &self.head.beside
    }

    #[getter]
    fn size(&self) -> usize {
        self.head.size()
    }

    #[getter]
    fn tail_count(&self) -> u64 {
        self.head.tail_count
    }

    fn append<'py>(
        &self,
        py: Python<'py>,
        elements: Vec<(PyRef<'py, Append>, Bound<'py, PyString>)>,
        now_ms: u64,
        max_count: Option<u64>,
    ) -> PyResult<(Self, Vec<Bound<'py, PyAny>>)> {
        let added = elements.iter().map(|(element, _)| element.__len__()).sum();
        let mut head = self.copy_head(py, added)?;
        let mut group = Vec::with_capacity(elements.len());
        for (element, mark) in &elements {
            group.push((&element.0, mark.to_str()?));
        }
        let outcomes = head.append(&group, now_ms, max_count);
        let outcomes = outcomes.into_iter().map(|outcome| match outcome {
            Ok(written) => written.into_pyobject(py).map(Bound::into_any),
            Err(refusal) => Ok(PyString::new(py, code(refusal)).into_any()),
        });
        let outcomes = outcomes.collect::<PyResult<_>>()?;
        Ok((Self::from(head), outcomes))
    }

    fn seal<'py>(&self, py: Python<'py>, max_bytes: usize) -> PyResult<(Self, Vec<Object<'py>>)> {
        let mut head = self.copy_head(py, 0)?;
        let objects = with_memory(py, head.size(), || head.seal(max_bytes))?;
        let objects = objects.into_iter();
        let objects = objects.map(|(name, body)| Ok((name, copy_bytes(py, &body)?)));
        Ok((Self::from(head), objects.collect::<PyResult<_>>()?))
    }

    fn drop_before(&self, py: Python<'_>, start: u64, dropped_ms: u64) -> PyResult<Self> {
        let mut head = self.copy_head(py, 0)?;
        head.drop_before(start, dropped_ms);
        Ok(Self::from(head))
    }

    fn last_ts_ms(&self, node: &LogNode, segment: &[u8]) -> PyResult<u64> {
        Ok(self.head.last_ts_ms(&node.0, segment)?)
    }

    fn stored<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let stored = with_memory(py, self.head.size(), || self.head.stored())?;
        copy_bytes(py, &stored)
    }

    #[pyo3(signature = (since=None, newest=None, oldest=None))]
    fn nodes(&self, since: Option<u64>, newest: Option<u64>, oldest: Option<u64>) -> Vec<LogNode> {
        let bounds = bounds(since, newest, oldest);
        self.head.nodes(bounds).into_iter().map(LogNode).collect()
    }

    #[pyo3(signature = (block, node, since=None, newest=None, oldest=None))]
    fn expand(
        &self,
        block: &[u8],
        node: &LogNode,
        since: Option<u64>,
        newest: Option<u64>,
        oldest: Option<u64>,
    ) -> PyResult<Vec<LogNode>> {
        let bounds = bounds(since, newest, oldest);
        let nodes = self.head.expand(block, &node.0, bounds)?;
        Ok(nodes.into_iter().map(LogNode).collect())
    }

    #[pyo3(signature = (segments, with_tail, since=None, newest=None, oldest=None))]
    fn slice<'py>(
        &self,
        py: Python<'py>,
        segments: Vec<Segment<'py>>,
        with_tail: bool,
        since: Option<u64>,
        newest: Option<u64>,
        oldest: Option<u64>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let bounds = bounds(since, newest, oldest);
        let pieces = self.head.slice(&located(&segments), with_tail, bounds)?;
        let mut parts: Vec<&[u8]> = Vec::with_capacity(2 * pieces.len());
        for piece in pieces {
            if !parts.is_empty() {
                parts.push(log_format::SEPARATOR);
            }
            parts.push(piece);
        }
        concat_bytes(py, &parts)
    }

    fn written(
        &self,
        mark: &str,
        segments: Vec<Segment<'_>>,
    ) -> PyResult<Option<append_log::Written>> {
        Ok(self.head.written(mark, &located(&segments))?)
    }
}

fn bounds(since: Option<u64>, newest: Option<u64>, oldest: Option<u64>) -> LogRange {
    LogRange {
        since,
        newest,
        oldest,
    }
}

fn located<'a>(segments: &'a [Segment<'_>]) -> Vec<(log_index::Node, &'a [u8])> {
    let located = segments.iter();
    located
        .map(|(node, stored)| (node.0.clone(), stored.as_bytes()))
        .collect()
}

fn code(refusal: Refusal) -> &'static str {
    match refusal {
        Refusal::TooFarAhead => "ts_too_far_ahead",
        Refusal::NonMonotonic => "non_monotonic_timestamp",
        Refusal::Full => "append_limit_exceeded",
    }
}
