//! Revocation lists (docs/reference/protocol.md#revocation-lists).

use crate::canonical::canonicalize;
use crate::ed25519::PublicKey;
use crate::replay::ReplayWindow;
use crate::signing::SignedObject;
use serde::Deserialize;

const TAG: &[u8] = b"starfish-revlist-v1\n";
const MAX_GENERATION: f64 = (1u64 << 53) as f64;

/// A list with a well-formed head. Neither its signature nor its entries are checked yet.
pub struct RevocationList {
    pub text: Vec<u8>,
    pub issuer: String,
    pub issuer_user_id: String,
    pub generation: u64,
}

impl RevocationList {
    pub fn parse(text: &[u8]) -> Option<Self> {
        let text = canonicalize(text).ok()?;
        let members = SignedObject::parse(&text)?;
        let (issuer, issuer_user_id) = (members.string("iss")?, members.string("issUserId")?);
        let generation = members.integer("generation")?;
        let has_list = members.contains("revoked");
        let is_right = has_list && (0.0..MAX_GENERATION).contains(&generation);
        if !is_right || PublicKey::user_id_of(&issuer)? != issuer_user_id {
            return None;
        }
        Some(Self {
            text,
            issuer,
            issuer_user_id,
            generation: generation as u64,
        })
    }

    /// Verifies the signature of the issuer.
    pub fn is_signed(&self) -> bool {
        SignedObject::parse(&self.text).is_some_and(|members| members.is_signed(TAG))
    }

    /// Returns the entries of the list; None if one is malformed.
    pub fn revoked(&self) -> Option<Revoked> {
        let entries: Entries = serde_json::from_slice(&self.text).ok()?;
        let mut found = Revoked::default();
        for entry in &entries.revoked {
            found
                .certificates
                .add(ReplayWindow::digest(&entry.sub, &entry.nonce));
            found.last_expiry_s = found.last_expiry_s.max(whole(entry.exp)?);
        }
        for entry in &entries.revoked_subjects {
            found.subjects.add(ReplayWindow::digest(&entry.sub, ""));
            found.last_expiry_s = found.last_expiry_s.max(whole(entry.exp)?);
        }
        found.entries = entries.revoked.len() + entries.revoked_subjects.len();
        Some(found)
    }
}

fn whole(seconds: f64) -> Option<i64> {
    (seconds.fract() == 0.0).then_some(seconds as i64)
}

/// The certificates and subjects of a list, as digests: about 20 bytes per entry.
pub struct Revoked {
    certificates: ReplayWindow,
    subjects: ReplayWindow,
    pub entries: usize,
    /// Expiry time of the last of them, in seconds.
    pub last_expiry_s: i64,
}

impl Default for Revoked {
    fn default() -> Self {
        Self {
            certificates: ReplayWindow::default(),
            subjects: ReplayWindow::default(),
            entries: 0,
            last_expiry_s: i64::MIN,
        }
    }
}

impl Revoked {
    /// Returns true if the list revokes the certificate of `subject` (empty: of an audience) with this nonce,
    /// or every certificate of `subject`.
    pub fn contains(&self, subject: &str, nonce: &str) -> bool {
        self.certificates
            .contains(ReplayWindow::digest(subject, nonce))
            || (!subject.is_empty() && self.subjects.contains(ReplayWindow::digest(subject, "")))
    }
}

#[derive(Deserialize)]
struct Entries {
    revoked: Vec<Certificate>,
    #[serde(default, rename = "revokedSubjects")]
    revoked_subjects: Vec<Subject>,
}

#[derive(Deserialize)]
struct Certificate {
    sub: String,
    nonce: String,
    exp: f64,
}

#[derive(Deserialize)]
struct Subject {
    sub: String,
    exp: f64,
}
