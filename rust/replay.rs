//! The set of used nonces, stored as digests.

use sha2::{Digest, Sha256};
use std::collections::HashSet;
use std::hash::{BuildHasherDefault, Hasher};

/// Bytes of a digest. At 128 bits, a million nonces collide with a probability of 10^-27.
pub const DIGEST: usize = 16;

/// A set of digests: 17 bytes a slot, at least 7/16 of them used.
#[derive(Default)]
pub struct ReplayWindow(HashSet<u128, BuildHasherDefault<Prehashed>>);

impl ReplayWindow {
    /// Returns the digest of the nonce of a presenter: half of a SHA-256.
    pub fn digest(presenter: &str, nonce: &str) -> [u8; DIGEST] {
        let whole = Sha256::new()
            .chain_update(presenter)
            .chain_update([0])
            .chain_update(nonce)
            .finalize();
        std::array::from_fn(|i| whole[i])
    }

    /// Adds `digest`; returns false if it was present.
    pub fn add(&mut self, digest: [u8; DIGEST]) -> bool {
        self.0.insert(u128::from_ne_bytes(digest))
    }

    pub fn extend(&mut self, digests: &[u8]) {
        let (digests, _rest) = digests.as_chunks::<DIGEST>();
        self.0.reserve(digests.len());
        self.0
            .extend(digests.iter().copied().map(u128::from_ne_bytes));
    }

    pub fn contains(&self, digest: [u8; DIGEST]) -> bool {
        self.0.contains(&u128::from_ne_bytes(digest))
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Digests are uniformly distributed, so half of one serves as its hash.
#[derive(Default)]
struct Prehashed(u64);

impl Hasher for Prehashed {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    fn write_u128(&mut self, digest: u128) {
        self.0 = digest as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
