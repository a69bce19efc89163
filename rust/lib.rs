//! The loops over bytes of pysync: no I/O, no clock, no randomness, no threads.
#![forbid(unsafe_code)]

pub mod canonical;
pub mod envelope;
pub mod error;
pub mod replay;
pub mod scope;
pub mod signing;

#[cfg(feature = "python")]
mod py;
