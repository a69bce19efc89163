//! The loops over bytes of pysync: no I/O, no clock, no randomness, no threads.
#![forbid(unsafe_code)]

#[cfg(feature = "python")]
mod py;
