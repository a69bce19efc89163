//! The errors of the core.

use std::fmt;

/// Error cases that callers can distinguish; `py.rs` maps each to its Python class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CoreError {
    InvalidJson,
    BodyTooDeep,
    BodyNotObject,
    InvalidData,
    InvalidBaseHash,
    InvalidTs,
    AuthorProofMissing,
    DocumentCorrupt,
    InvalidPublicKey,
    MissingCollections,
    InvalidParams,
    InvalidAppendParams,
    InvalidKnown,
    TooManyCollections,
    BatchAppendBudgetExceeded,
    BatchKeyDenied,
    InvalidEvents,
    OutOfMemory,
}

impl fmt::Display for CoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InvalidJson => "not a JSON text",
            Self::BodyTooDeep => "nesting too deep",
            Self::BodyNotObject => "the body is not an object",
            Self::InvalidData => "data is missing or not an object",
            Self::InvalidBaseHash => "baseHash is neither a string nor null",
            Self::InvalidTs => "ts is not an integer, or negative",
            Self::AuthorProofMissing => "half an author proof",
            Self::DocumentCorrupt => "the stored bytes are not a document",
            Self::InvalidPublicKey => "not an Ed25519 public key in 64 lower-case hex digits",
            Self::MissingCollections => "the parameter collections is missing or empty",
            Self::InvalidParams => "the parameter params has another shape",
            Self::InvalidAppendParams => "the parameter appendParams has another shape",
            Self::InvalidKnown => "the parameter known has another shape",
            Self::TooManyCollections => "too many names or reads",
            Self::BatchAppendBudgetExceeded => "too many elements of logs",
            Self::BatchKeyDenied => "a name or key with a denied suffix",
            Self::InvalidEvents => "events is missing, empty or not an array of objects",
            Self::OutOfMemory => "out of memory",
        })
    }
}

impl std::error::Error for CoreError {}
