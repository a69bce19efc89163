//! The byte-level loops of pysync. They do no I/O, read no clock, use no randomness and start no threads.
#![forbid(unsafe_code)]

pub mod append_log;
pub mod batch;
pub mod batch_params;
pub mod batch_response;
pub mod canonical;
pub mod digest;
pub mod ed25519;
pub mod envelope;
pub mod error;
pub mod event_columns;
pub mod hash_check;
pub mod json_number;
pub mod json_string;
pub mod log_format;
pub mod log_index;
pub mod log_range;
pub mod parquet;
pub mod query;
pub mod replay;
pub mod revocation;
pub mod scope;
pub mod signing;
pub mod starfish;
pub mod starfish_log;
pub mod store_key;

#[cfg(feature = "python")]
mod py;
#[cfg(feature = "python")]
mod py_append_log;
#[cfg(feature = "python")]
mod py_batch;
#[cfg(feature = "python")]
mod py_events;
#[cfg(feature = "python")]
mod py_revocation;
#[cfg(feature = "python")]
mod py_scope;
#[cfg(feature = "python")]
mod py_shared;
