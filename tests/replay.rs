//! The set of used nonces, and what the errors of the core say.

use _core::error::CoreError;
use _core::replay::ReplayWindow;

#[test]
fn nonces_are_known_however_they_were_added() {
    let [first, second, other] = ["a", "b", "c"].map(|nonce| ReplayWindow::digest("me", nonce));
    let mut window = ReplayWindow::default();
    assert!(window.is_empty());
    assert!(window.add(first));
    assert!(!window.add(first), "it is used");
    window.extend(&[first, second].concat());
    assert_eq!(window.len(), 2);
    assert!(window.contains(first) && window.contains(second) && !window.contains(other));
    assert_ne!(first, ReplayWindow::digest("you", "a"));
}

#[test]
fn each_error_says_something_else() {
    let errors = [
        CoreError::InvalidJson,
        CoreError::BodyTooDeep,
        CoreError::BodyNotObject,
        CoreError::InvalidData,
        CoreError::InvalidBaseHash,
        CoreError::InvalidTs,
        CoreError::AuthorProofMissing,
        CoreError::DocumentCorrupt,
        CoreError::InvalidPublicKey,
        CoreError::MissingCollections,
        CoreError::InvalidParams,
        CoreError::InvalidAppendParams,
        CoreError::InvalidKnown,
        CoreError::TooManyCollections,
        CoreError::BatchAppendBudgetExceeded,
        CoreError::BatchKeyDenied,
        CoreError::InvalidEvents,
    ];
    let mut texts = errors.map(|error| error.to_string()).to_vec();
    texts.sort();
    texts.dedup();
    assert_eq!(texts.len(), errors.len());
    assert!(!texts.contains(&String::new()));
}
