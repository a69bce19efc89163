//! The loops over bytes of pysync: no I/O, no clock, no randomness, no threads.
#![forbid(unsafe_code)]

pub mod batch;
pub mod canonical;
pub mod envelope;
pub mod error;
pub mod joined;
pub mod query;
pub mod replay;
pub mod scope;
pub mod signing;

#[cfg(feature = "python")]
mod py;
#[cfg(feature = "python")]
mod py_batch;
