//! Ed25519: verification of one signature, and of several at once.
//!
//! A `Claim` holds if [8]([s]B - [k]A - R) is the identity, for the signature (R, s) by the key A and k =
//! SHA-512(R, A, message) (RFC 8032, 5.1.7). Of several claims, `all_hold` takes the sum with a coefficient for
//! each. The factor 8 removes what points outside the prime-order subgroup add; without it the sum could hold
//! although a claim does not, whatever the coefficients are.
//!
//! Requests and author proofs are claims. `PublicKey::verify`, for certificates and revocation lists, computes R
//! and compares its bytes, which is the same without the factor 8. So it accepts a
//! little less: not some signatures that only the holder of the key can make, and only on purpose.

use crate::digest::{hex, sha256};
use crate::error::CoreError;
use base64::{Engine, prelude::BASE64_STANDARD};
use curve25519_dalek::constants::ED25519_BASEPOINT_POINT;
use curve25519_dalek::edwards::{
    CompressedEdwardsY, EdwardsPoint, VartimeEdwardsPrecomputation as Table,
};
use curve25519_dalek::scalar::Scalar;
use curve25519_dalek::traits::VartimePrecomputedMultiscalarMul;
use ed25519_dalek::{Signature, Verifier, VerifyingKey};
use sha2::{Digest, Sha512};
use std::iter::once;
use std::sync::LazyLock;

/// An Ed25519 public key, its point decompressed once.
pub struct PublicKey(VerifyingKey);

impl PublicKey {
    /// Parses 64 lower-case hex digits. Rejects keys of small order, for which signatures over anything can be
    /// forged, and non-canonical encodings.
    pub fn parse(text: &str) -> Result<Self, CoreError> {
        let bytes = unhex(text)
            .filter(is_reduced)
            .ok_or(CoreError::InvalidPublicKey)?;
        let key = VerifyingKey::from_bytes(&bytes).map_err(|_| CoreError::InvalidPublicKey)?;
        if key.is_weak() {
            Err(CoreError::InvalidPublicKey)
        } else {
            Ok(Self(key))
        }
    }

    pub fn hex(&self) -> String {
        hex(self.0.as_bytes())
    }

    pub fn user_id(&self) -> String {
        hex(&sha256(self.0.as_bytes())[..16])
    }

    /// Returns the user id of 64 lower-case hex digits, even if they are not a valid key.
    pub fn user_id_of(text: &str) -> Option<String> {
        Some(hex(&sha256(&unhex(text)?)[..16]))
    }

    /// Returns true if `signature`, in padded standard base64, is a signature of `message` by this key.
    ///
    /// Uses `verify`, not `verify_strict`. It rejects S >= L and compares R as bytes, so neither another S nor
    /// another encoding of R passes. The strict one adds a decompression (4 us) to reject an R of small order,
    /// which only the holder of the private key can produce once the key itself is not of small order.
    pub fn verify(&self, message: &[u8], signature: &str) -> bool {
        decode_signature(signature)
            .is_some_and(|signature| self.0.verify(message, &signature).is_ok())
    }
}

/// The claim that a key signed a message. Claims are checked one by one or together, with the same result.
pub struct Claim<'a> {
    key: &'a PublicKey,
    r: [u8; 32],
    s: Scalar,
    /// SHA-512 of R, the key and the message.
    digest: [u8; 64],
}

impl<'a> Claim<'a> {
    /// Returns the claim of a signature in padded standard base64. None if that is malformed, or S >= L.
    pub fn new(key: &'a PublicKey, message: &[u8], signature: &str) -> Option<Self> {
        let signature = decode_signature(signature)?;
        let digest = Sha512::new()
            .chain_update(signature.r_bytes())
            .chain_update(key.0.as_bytes())
            .chain_update(message)
            .finalize();
        Some(Self {
            key,
            r: *signature.r_bytes(),
            s: Option::from(Scalar::from_canonical_bytes(*signature.s_bytes()))?,
            digest: digest.into(),
        })
    }

    pub fn holds(&self) -> bool {
        let minus_key = -self.key.0.to_edwards();
        let r = EdwardsPoint::vartime_double_scalar_mul_basepoint(&self.k(), &minus_key, &self.s);
        // The bytes are compared first, since those of honest signers are equal.
        r.compress().0 == self.r || self.r().is_some_and(|sent| (r - sent).is_small_order())
    }

    /// Returns R; None if it is not the canonical encoding of a point.
    fn r(&self) -> Option<EdwardsPoint> {
        let is_canonical = is_reduced(&self.r) && !MINUS_ZERO.contains(&self.r);
        is_canonical.then(|| CompressedEdwardsY(self.r).decompress())?
    }

    fn k(&self) -> Scalar {
        Scalar::from_bytes_mod_order_wide(&self.digest)
    }
}

/// Returns true if all claims hold. If one does not, the result is true with a probability of 2^-128.
pub fn all_hold(claims: &[Claim]) -> bool {
    let Some(rs) = claims.iter().map(Claim::r).collect::<Option<Vec<_>>>() else {
        return false;
    };
    let coefficients = coefficients(claims);
    let mut of_base = Scalar::ZERO;
    let mut of_keys: Vec<(&PublicKey, Scalar)> = Vec::with_capacity(claims.len());
    for (claim, z) in claims.iter().zip(&coefficients) {
        of_base += z * claim.s;
        let of_key = z * claim.k();
        match of_keys.iter_mut().find(|(key, _)| key.0 == claim.key.0) {
            Some((_, sum)) => *sum += of_key,
            None => of_keys.push((claim.key, of_key)),
        }
    }
    let (keys, of_keys): (Vec<_>, Vec<_>) = of_keys
        .into_iter()
        .map(|(key, sum)| (-key.0.to_edwards(), sum))
        .unzip();
    BASE.vartime_mixed_multiscalar_mul(
        once(of_base),
        coefficients.iter().chain(&of_keys),
        rs.into_iter().map(|r| -r).chain(keys),
    )
    .is_small_order()
}

static BASE: LazyLock<Table> = LazyLock::new(|| Table::new(once(ED25519_BASEPOINT_POINT)));

/// Returns a coefficient of 128 bits for each claim. Each depends on all signatures, keys and messages, so that
/// nobody can choose signatures for the coefficients that they will get.
fn coefficients(claims: &[Claim]) -> Vec<Scalar> {
    let seed = claims
        .iter()
        .fold(Sha512::new(), |hash, claim| {
            hash.chain_update(claim.digest)
                .chain_update(claim.s.as_bytes())
        })
        .finalize();
    (0..claims.len().div_ceil(4) as u64)
        .map(|n| {
            Sha512::new()
                .chain_update(seed)
                .chain_update(n.to_le_bytes())
        })
        .flat_map(|hash| {
            let digest: [u8; 64] = hash.finalize().into();
            let (parts, _) = digest.as_chunks();
            <[[u8; 16]; 4]>::try_from(parts).expect("64 bytes are 4 times 16")
        })
        .map(|bytes| Scalar::from(u128::from_le_bytes(bytes)))
        .take(claims.len())
        .collect()
}

fn decode_signature(text: &str) -> Option<Signature> {
    let mut bytes = [0; 66]; // the decoder requires this size; 64 are filled
    let filled = BASE64_STANDARD.decode_slice(text, &mut bytes).ok()?;
    Signature::from_slice(&bytes[..filled]).ok()
}

/// The encodings of the points whose x is 0, with the sign of an x that is negative.
const MINUS_ZERO: [[u8; 32]; 2] = {
    let (mut one, mut minus_one) = ([0; 32], [0xff; 32]);
    (one[0], one[31], minus_one[0]) = (0x01, 0x80, 0xec);
    [one, minus_one]
};

fn unhex(text: &str) -> Option<[u8; 32]> {
    let nibble = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    if text.len() != 64 {
        return None;
    }
    let mut bytes = [0; 32];
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = nibble(pair[0])? << 4 | nibble(pair[1])?;
    }
    Some(bytes)
}

/// Returns true if the coordinate, without the sign in the top bit, is below the prime of the field, 2^255 -
/// 19.
fn is_reduced(bytes: &[u8; 32]) -> bool {
    !(bytes[31] & 0x7f == 0x7f && bytes[1..31].iter().all(|&byte| byte == 0xff) && bytes[0] >= 0xed)
}
