//! Ed25519 signatures of requests and authors (docs/reference/protocol.md#request-signature).

use crate::canonical::{canonicalize, hex, sha256};
use crate::error::CoreError;
use crate::json_number::write_integer;
use crate::json_string::write_string;
use base64::{Engine, prelude::BASE64_STANDARD};
use ed25519_dalek::{Signature, Verifier, VerifyingKey};
use serde_json::value::RawValue;
use std::collections::BTreeMap;

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
    pub fn verify(&self, message: &[u8], signature: &str) -> bool {
        decode_signature(signature)
            .is_some_and(|signature| self.verify_decoded(message, &signature))
    }

    /// Uses `verify`, not `verify_strict`. It rejects S >= L and compares R as bytes, so neither another S nor
    /// another encoding of R passes. The strict one adds a decompression (4 us) to reject an R of small order,
    /// which only the holder of the private key can produce once the key itself is not of small order.
    fn verify_decoded(&self, message: &[u8], signature: &Signature) -> bool {
        self.0.verify(message, signature).is_ok()
    }
}

fn decode_signature(text: &str) -> Option<Signature> {
    let mut bytes = [0; 66]; // the decoder requires this size; 64 are filled
    let filled = BASE64_STANDARD.decode_slice(text, &mut bytes).ok()?;
    Signature::from_slice(&bytes[..filled]).ok()
}

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

const CERTIFICATE_TAG: &[u8] = b"starfish-capcert-v1\n";

/// The members of a certificate that are needed to check the signature of a request.
pub struct SignedCertificate {
    /// The subject key; empty if any presenter may use the certificate.
    pub subject: String,
    pub not_before_s: i64,
    pub expires_s: i64,
}

impl SignedCertificate {
    /// Parses the JSON text of a certificate that is signed by its issuer; None if the signature is missing or
    /// wrong. Its form is not checked beyond the returned members.
    pub fn open(text: &[u8]) -> Option<Self> {
        let text = canonicalize(text).ok()?;
        let members = SignedObject::parse(&text)?;
        let subject = if members.contains("sub") {
            members.string("sub")?
        } else {
            String::new()
        };
        let opened = Self {
            subject,
            not_before_s: members.integer("nbf")? as i64,
            expires_s: members.integer("exp")? as i64,
        };
        members.is_signed(CERTIFICATE_TAG).then_some(opened)
    }
}

/// The members of an object with a signature `sig` by its `iss`, from its canonical text.
pub struct SignedObject<'a>(
    // Members by name in byte order, which is the canonical order.
    BTreeMap<String, &'a RawValue>,
);

impl<'a> SignedObject<'a> {
    pub fn parse(canonical: &'a [u8]) -> Option<Self> {
        serde_json::from_slice(canonical).ok().map(Self)
    }

    pub fn contains(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    pub fn string(&self, name: &str) -> Option<String> {
        serde_json::from_str(self.0.get(name)?.get()).ok()
    }

    /// Returns a whole number, as JSON defines it.
    pub fn integer(&self, name: &str) -> Option<f64> {
        let number: f64 = serde_json::from_str(self.0.get(name)?.get()).ok()?;
        (number.fract() == 0.0).then_some(number)
    }

    /// Verifies that `sig` is the signature of `iss` over `tag` and the canonical text of all other members.
    pub fn is_signed(&self, tag: &[u8]) -> bool {
        let verified = || {
            let issuer = PublicKey::parse(&self.string("iss")?).ok()?;
            let mut message = tag.to_vec();
            message.push(b'{');
            for (name, value) in self.0.iter().filter(|(name, _)| *name != "sig") {
                write_string(&mut message, name);
                message.push(b':');
                message.extend_from_slice(value.get().as_bytes());
                message.push(b',');
            }
            message.pop();
            message.push(b'}');
            Some(issuer.verify(&message, &self.string("sig")?))
        };
        verified().unwrap_or(false)
    }
}

/// The content of a request signature, for one or several targets.
pub struct Request<'a> {
    pub method: &'a str,
    pub body: &'a [u8],
    pub host: &'a str,
    pub ts_ms: i64,
    pub nonce: &'a str,
}

impl Request<'_> {
    pub fn message(&self, target: &str) -> Vec<u8> {
        let (mut message, after) = self.around_target();
        write_string(&mut message, target);
        message.extend_from_slice(&after);
        message
    }

    /// Returns true if `signature` is a signature by `key` of the request with any of `targets`.
    pub fn verify<'t>(
        &self,
        key: &PublicKey,
        signature: &str,
        targets: impl IntoIterator<Item = &'t str>,
    ) -> bool {
        let Some(signature) = decode_signature(signature) else {
            return false;
        };
        let (mut message, after) = self.around_target();
        let before = message.len();
        targets.into_iter().any(|target| {
            message.truncate(before);
            write_string(&mut message, target);
            message.extend_from_slice(&after);
            key.verify_decoded(&message, &signature)
        })
    }

    /// Returns the text before and after the target. It is the same for all targets, above all the hash of the
    /// body.
    fn around_target(&self) -> (Vec<u8>, Vec<u8>) {
        let mut before = Vec::with_capacity(384);
        before.extend_from_slice(b"starfish-req-v1\n{\"b\":\"");
        before.extend_from_slice(hex(&sha256(self.body)).as_bytes());
        before.extend_from_slice(b"\",\"h\":");
        write_string(&mut before, self.host);
        before.extend_from_slice(b",\"m\":");
        write_string(&mut before, self.method);
        before.extend_from_slice(b",\"nonce\":");
        write_string(&mut before, self.nonce);
        before.extend_from_slice(b",\"p\":");
        let mut after = b",\"ts\":".to_vec();
        write_integer(&mut after, self.ts_ms);
        after.push(b'}');
        (before, after)
    }
}

/// Verifies the author proof of `data`, a canonical text, under `document_key`.
pub fn verify_author(
    tag: &str,
    document_key: &str,
    data: &[u8],
    pubkey: &str,
    signature: &str,
) -> bool {
    let Ok(key) = PublicKey::parse(pubkey) else {
        return false;
    };
    let mut message = Vec::with_capacity(tag.len() + document_key.len() + data.len() + 32);
    message.extend_from_slice(tag.as_bytes());
    message.extend_from_slice(b"\n{\"d\":");
    message.extend_from_slice(data);
    message.extend_from_slice(b",\"k\":");
    write_string(&mut message, document_key);
    message.push(b'}');
    key.verify(&message, signature)
}
