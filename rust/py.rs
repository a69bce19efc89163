//! The module `pysync._core`. Only this file and the other `py_*.rs` depend on Python. The docstrings are in
//! `pysync/_core.pyi`.

use pyo3::prelude::*;

#[pymodule]
pub mod _core {
    use crate::envelope;
    use crate::py_shared::{concat_bytes, copy_bytes, detach_if_large, utf8, with_memory};
    use crate::replay::{self, DIGEST};
    use crate::{canonical, digest, ed25519, signing, store_key};
    use pyo3::exceptions::PyValueError;
    use pyo3::panic::PanicException;
    use pyo3::prelude::*;
    use pyo3::types::{PyBytes, PyString};

    #[pymodule_export]
    use crate::py_append_log::{
        Append, LogHead, LogNode, decode_append, is_intact_log_object, is_log,
    };

    #[pymodule_export]
    use crate::py_batch::{BatchAnswer, BatchPlan, BatchPlanner};

    #[pymodule_export]
    use crate::py_events::encode_events;

    #[pymodule_export]
    use crate::py_revocation::{RevocationList, Revoked};

    #[pymodule_export]
    use crate::py_scope::Scope;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("PanicException", module.py().get_type::<PanicException>())
    }

    #[pymodule_export]
    const SOURCE_DIGEST: &str = env!("PYSYNC_SOURCE_DIGEST");

    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");

    #[pyfunction]
    fn canonicalize<'py>(py: Python<'py>, text: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
        let canonical = with_memory(py, text.len(), || canonical::canonicalize(text))??;
        copy_bytes(py, &canonical)
    }

    #[pyfunction]
    fn content_hash(py: Python<'_>, text: &[u8]) -> PyResult<String> {
        let hash = || canonical::canonicalize(text).map(|text| digest::hex(&digest::sha256(&text)));
        Ok(with_memory(py, text.len(), hash)??)
    }

    #[pyclass(frozen, module = "pysync._core")]
    struct PushBody(envelope::Push);

    #[pymethods]
    impl PushBody {
        #[getter]
        fn hash(&self) -> &str {
            &self.0.hash
        }

        #[getter]
        fn base_hash(&self) -> Option<&str> {
            self.0.base_hash.as_deref()
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

        #[getter]
        fn data<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
            copy_bytes(py, &self.0.content.data)
        }

        #[getter]
        fn canonical<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
            copy_bytes(py, self.0.content.canonical())
        }

        fn rebased(&self, base_hash: &str) -> Self {
            Self(self.0.rebased(base_hash))
        }

        #[pyo3(signature = (ts_ms, mark=b"" as &[u8]))]
        fn stored<'py>(
            &self,
            py: Python<'py>,
            ts_ms: u64,
            mark: &[u8],
        ) -> PyResult<Bound<'py, PyBytes>> {
            let data = &self.0.content.data;
            let (head, end) = detach_if_large(py, data.len(), || self.0.stored_frame(ts_ms, mark));
            concat_bytes(py, &[&head, data, &end])
        }
    }

    #[pyfunction]
    fn decode_push(py: Python<'_>, body: &[u8]) -> PyResult<PushBody> {
        Ok(PushBody(with_memory(py, body.len(), || {
            envelope::Push::decode(body)
        })??))
    }

    #[pyclass(frozen, module = "pysync._core")]
    struct Document {
        stored: Py<PyBytes>,
        parts: envelope::Document,
    }

    impl Document {
        fn data_text<'a>(&'a self, py: Python<'a>) -> &'a [u8] {
            &self.stored.as_bytes(py)[self.parts.data.clone()]
        }
    }

    #[pymethods]
    impl Document {
        #[getter]
        fn hash(&self) -> &str {
            &self.parts.hash
        }

        #[getter]
        fn ts_ms(&self) -> u64 {
            self.parts.ts_ms
        }

        #[getter]
        fn author_pubkey(&self) -> Option<&str> {
            self.parts
                .author
                .as_ref()
                .map(|author| author.pubkey.as_str())
        }

        #[getter]
        fn author_signature(&self) -> Option<&str> {
            self.parts
                .author
                .as_ref()
                .map(|author| author.signature.as_str())
        }

        #[getter]
        fn data<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
            copy_bytes(py, self.data_text(py))
        }

        fn verify(&self, py: Python<'_>) -> PyResult<bool> {
            let stored = self.stored.as_bytes(py);
            with_memory(py, stored.len(), || self.parts.verify(stored))
        }

        fn redacted<'py>(
            &self,
            py: Python<'py>,
            data: &[u8],
            hash: &str,
        ) -> PyResult<Bound<'py, PyBytes>> {
            let (head, end) = self.parts.redacted_frame(data, hash);
            concat_bytes(py, &[&head, data, &end])
        }

        #[pyo3(signature = (timestamp_ms, keyring=None))]
        fn answer<'py>(
            &self,
            py: Python<'py>,
            timestamp_ms: u64,
            keyring: Option<&[u8]>,
        ) -> PyResult<Bound<'py, PyBytes>> {
            let mut tail = Vec::with_capacity(384);
            self.parts.write_answer_tail(&mut tail, timestamp_ms);
            let (name, keyring): (&[u8], _) =
                keyring.map_or((b"", b"" as _), |text| (b",\"keyring\":", text));
            concat_bytes(
                py,
                &[
                    b"{\"data\":",
                    self.data_text(py),
                    &tail,
                    name,
                    keyring,
                    b"}",
                ],
            )
        }
    }

    #[pyfunction]
    fn read_document(py: Python<'_>, stored: Bound<'_, PyBytes>) -> PyResult<Document> {
        let text = stored.as_bytes();
        let parts = with_memory(py, text.len(), || envelope::Document::locate(text))??;
        Ok(Document {
            stored: stored.unbind(),
            parts,
        })
    }

    #[pyfunction]
    fn is_document(stored: &[u8]) -> bool {
        envelope::is_own(stored)
    }

    #[pyfunction]
    fn split_key<'a>(key: &'a Bound<'_, PyString>) -> PyResult<(&'a str, &'a str)> {
        match store_key::split(key.to_str()?) {
            Some(parts) => Ok(parts),
            None => Err(PyValueError::new_err(format!("not a key: {}", key.repr()?))),
        }
    }

    #[pyclass(frozen, module = "pysync._core")]
    struct PublicKey(ed25519::PublicKey);

    #[pymethods]
    impl PublicKey {
        #[new]
        fn new(key: &str) -> PyResult<Self> {
            Ok(Self(ed25519::PublicKey::parse(key)?))
        }

        #[getter]
        fn hex(&self) -> String {
            self.0.hex()
        }

        #[getter]
        fn user_id(&self) -> String {
            self.0.user_id()
        }

        fn verify(&self, message: &[u8], signature: &Bound<'_, PyString>) -> bool {
            utf8(signature).is_some_and(|signature| self.0.verify(message, signature))
        }
    }

    #[pyfunction]
    fn open_certificate(text: &[u8]) -> Option<(String, i64, i64)> {
        let opened = signing::SignedCertificate::open(text)?;
        Some((opened.subject, opened.not_before_s, opened.expires_s))
    }

    #[pyfunction]
    fn signed_time(timestamp: &Bound<'_, PyString>, nonce: &Bound<'_, PyString>) -> Option<i64> {
        signing::is_nonce(utf8(nonce)?).then(|| signing::parse_timestamp(utf8(timestamp)?))?
    }

    #[pyfunction]
    fn request_message<'py>(
        py: Python<'py>,
        method: &str,
        target: &str,
        body: &[u8],
        host: &str,
        ts_ms: i64,
        nonce: &str,
    ) -> Bound<'py, PyBytes> {
        let request = signing::Request {
            method,
            body,
            host,
            ts_ms,
            nonce,
        };
        PyBytes::new(
            py,
            &detach_if_large(py, body.len(), || request.message(target)),
        )
    }

    /// A request: its key and signature, method, targets, body, host, time and nonce.
    type SignedRequest<'py> = (
        PyRef<'py, PublicKey>,
        Bound<'py, PyString>,
        Bound<'py, PyString>,
        Vec<Bound<'py, PyString>>,
        Bound<'py, PyBytes>,
        Bound<'py, PyString>,
        i64,
        Bound<'py, PyString>,
    );

    #[pyfunction]
    #[expect(clippy::too_many_arguments)] // the parts of a request, as the caller has them
    fn verify_request(
        py: Python<'_>,
        key: &PublicKey,
        signature: &Bound<'_, PyString>,
        method: &Bound<'_, PyString>,
        targets: Vec<Bound<'_, PyString>>,
        body: &[u8],
        host: &Bound<'_, PyString>,
        ts_ms: i64,
        nonce: &Bound<'_, PyString>,
    ) -> bool {
        let verified = || {
            let request = signing::Request {
                method: utf8(method)?,
                body,
                host: utf8(host)?,
                ts_ms,
                nonce: utf8(nonce)?,
            };
            let signature = utf8(signature)?;
            let targets: Vec<&str> = targets.iter().filter_map(utf8).collect();
            Some(detach_if_large(py, body.len(), || {
                request.verify(&key.0, signature, targets)
            }))
        };
        verified().unwrap_or(false)
    }

    /// An author proof: its tag, document key, canonical data, key and signature.
    type AuthorProof<'py> = (
        Bound<'py, PyString>,
        Bound<'py, PyString>,
        Bound<'py, PyBytes>,
        PyRef<'py, PublicKey>,
        Bound<'py, PyString>,
    );

    #[pyfunction]
    #[pyo3(signature = (requests, proofs=Vec::new()))]
    fn verify_requests(requests: Vec<SignedRequest<'_>>, proofs: Vec<AuthorProof<'_>>) -> bool {
        let claims = requests.iter().map(|request| {
            let (key, signature, method, targets, body, host, ts_ms, nonce) = request;
            let request = signing::Request {
                method: utf8(method)?,
                body: body.as_bytes(),
                host: utf8(host)?,
                ts_ms: *ts_ms,
                nonce: utf8(nonce)?,
            };
            request.claim(&key.0, utf8(signature)?, utf8(targets.first()?)?)
        });
        let proven = proofs
            .iter()
            .map(|(tag, document_key, data, key, signature)| {
                let (tag, document_key) = (utf8(tag)?, utf8(document_key)?);
                signing::author_claim(&key.0, tag, document_key, data.as_bytes(), utf8(signature)?)
            });
        let claims: Option<Vec<_>> = claims.chain(proven).collect();
        claims.is_some_and(|claims| ed25519::all_hold(&claims))
    }

    #[pyfunction]
    fn verify_author(
        py: Python<'_>,
        tag: &str,
        document_key: &str,
        data: &[u8],
        author_pubkey: &Bound<'_, PyString>,
        author_signature: &Bound<'_, PyString>,
    ) -> PyResult<bool> {
        let Some((pubkey, signature)) = utf8(author_pubkey).zip(utf8(author_signature)) else {
            return Ok(false);
        };
        with_memory(py, data.len(), || {
            signing::verify_author(tag, document_key, data, pubkey, signature)
        })
    }

    #[pyclass(module = "pysync._core")]
    struct ReplayWindow(replay::ReplayWindow);

    fn digest_of(bytes: &[u8]) -> PyResult<[u8; DIGEST]> {
        bytes
            .try_into()
            .map_err(|_| PyValueError::new_err("a digest has 16 bytes"))
    }

    #[pymethods]
    impl ReplayWindow {
        #[new]
        fn new() -> Self {
            Self(replay::ReplayWindow::default())
        }

        #[staticmethod]
        fn digest<'py>(py: Python<'py>, presenter: &str, nonce: &str) -> Bound<'py, PyBytes> {
            PyBytes::new(py, &replay::ReplayWindow::digest(presenter, nonce))
        }

        fn add(&mut self, digest: &[u8]) -> PyResult<bool> {
            Ok(self.0.add(digest_of(digest)?))
        }

        fn extend(&mut self, digests: &[u8]) {
            self.0.extend(digests);
        }

        fn __contains__(&self, digest: &[u8]) -> PyResult<bool> {
            Ok(self.0.contains(digest_of(digest)?))
        }

        fn __len__(&self) -> usize {
            self.0.len()
        }
    }
}
