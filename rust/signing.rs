//! Ed25519 signatures of requests and authors (docs/reference/protocol.md#request-signature).

use crate::canonical::canonicalize;
use crate::digest::{hex, sha256};
use crate::ed25519::{Claim, PublicKey};
use crate::json_number::write_integer;
use crate::json_string::write_string;
use base64::{Engine, prelude::BASE64_STANDARD};
use serde_json::value::RawValue;
use std::collections::BTreeMap;

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

/// Returns the milliseconds of a timestamp: up to 16 digits, perhaps after a minus sign. None if it has another
/// form.
pub fn parse_timestamp(text: &str) -> Option<i64> {
    let digits = text.strip_prefix('-').unwrap_or(text);
    let has_form = matches!(digits.len(), 1..=16) && digits.bytes().all(|b| b.is_ascii_digit());
    has_form.then(|| text.parse().ok())?
}

/// Returns true if `text` is 16 bytes in padded standard base64.
pub fn is_nonce(text: &str) -> bool {
    let mut bytes = [0; 18]; // the decoder requires this size; 16 are filled
    text.len() == 24 && BASE64_STANDARD.decode_slice(text, &mut bytes) == Ok(16)
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
        let (mut message, after) = self.around_target();
        let before = message.len();
        targets.into_iter().any(|target| {
            message.truncate(before);
            write_string(&mut message, target);
            message.extend_from_slice(&after);
            Claim::new(key, &message, signature).is_some_and(|claim| claim.holds())
        })
    }

    /// Returns the claim that `key` signed the request with `target`. None if the signature is malformed.
    pub fn claim<'k>(
        &self,
        key: &'k PublicKey,
        signature: &str,
        target: &str,
    ) -> Option<Claim<'k>> {
        Claim::new(key, &self.message(target), signature)
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
    PublicKey::parse(pubkey).is_ok_and(|key| {
        author_claim(&key, tag, document_key, data, signature).is_some_and(|claim| claim.holds())
    })
}

/// Returns the claim that `key` is the author of `data`. None if the signature is malformed.
pub fn author_claim<'k>(
    key: &'k PublicKey,
    tag: &str,
    document_key: &str,
    data: &[u8],
    signature: &str,
) -> Option<Claim<'k>> {
    let mut message = Vec::with_capacity(tag.len() + document_key.len() + data.len() + 32);
    message.extend_from_slice(tag.as_bytes());
    message.extend_from_slice(b"\n{\"d\":");
    message.extend_from_slice(data);
    message.extend_from_slice(b",\"k\":");
    write_string(&mut message, document_key);
    message.push(b'}');
    Claim::new(key, &message, signature)
}
