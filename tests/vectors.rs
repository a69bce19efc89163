//! The protocol's test vectors that concern the core, read from where the Python tests read them.
//!
//! Where the two published implementations disagree, a record holds what to follow in `recommended`, in
//! words or as a value; the words are kept by the tests named for them.

use _core::canonical::canonicalize;
use _core::digest::{hex, sha256};
use _core::ed25519::PublicKey;
use _core::envelope::{Author, Document, Push};
use _core::error::CoreError;
use _core::scope::{Deny, Scope, matches_narrowly};
use _core::signing::{Request, verify_author};
use serde_json::Value;

fn section(name: &str) -> Vec<Value> {
    let all: Value =
        serde_json::from_str(include_str!("vectors/protocol.json")).expect("vectors are JSON");
    let records = all[name].as_array().expect("a section is a list").clone();
    assert!(!records.is_empty(), "{name} holds vectors");
    records
}

fn text<'a>(record: &'a Value, pointer: &str) -> &'a str {
    record
        .pointer(pointer)
        .and_then(Value::as_str)
        .unwrap_or_else(|| panic!("{pointer} in {record}"))
}

/// What to follow: what both sides do, or the recommended side.
fn followed(record: &Value) -> &Value {
    if record["agree"] == true {
        &record["expected"]
    } else {
        &record["recommended"]
    }
}

fn canonical(value: &Value) -> String {
    let text = canonicalize(value.to_string().as_bytes()).expect("a value has a canonical text");
    String::from_utf8(text).expect("canonical text is UTF-8")
}

#[test]
fn canonical_text_and_hash_are_those_of_the_vectors() {
    for record in section("canonical") {
        let (id, input) = (text(&record, "/id"), text(&record, "/inputJson"));
        let got = canonicalize(input.as_bytes());
        // Read as null, or not at all, by the published sides; the service refuses it.
        // See docs/reference/protocol.md#requests-and-responses.
        if id.starts_with("overflow-") || id.starts_with("lone-") {
            assert_eq!(got, Err(CoreError::InvalidJson), "{id}");
            continue;
        }
        let got = got.unwrap_or_else(|error| panic!("{id}: {error}"));
        assert_eq!(
            String::from_utf8_lossy(&got),
            text(followed(&record), "/canonical"),
            "{id}"
        );
        assert_eq!(
            hex(&sha256(&got)),
            text(followed(&record), "/sha256"),
            "{id}"
        );
    }
}

#[test]
fn request_signatures_of_the_vectors_verify() {
    for record in section("request_signing") {
        let body = unhex(record["bodyHex"].as_str().unwrap_or_default());
        let request = Request {
            method: text(&record, "/method"),
            body: &body,
            host: record["host"].as_str().unwrap_or_default(),
            ts_ms: record["ts"].as_i64().expect("ts is a number"),
            nonce: text(&record, "/expected/nonce"),
        };
        let target = text(&record, "/pathAndQuery");
        let message = String::from_utf8(request.message(target)).expect("a message is UTF-8");
        assert_eq!(message, text(&record, "/expected/canonicalInput"));
        let key = PublicKey::parse(text(&record, "/pubKey")).expect("a key");
        let signature = text(&record, "/expected/sig");
        assert!(
            request.verify(&key, signature, ["/elsewhere", target]),
            "{record}"
        );
        assert!(!request.verify(&key, signature, ["/elsewhere"]), "{record}");
        assert!(!request.verify(&key, signature, []), "{record}");
    }
}

#[test]
fn tampered_requests_do_not_verify() {
    for record in section("request_verify") {
        let body = unhex(text(&record, "/bodyHex"));
        let request = Request {
            method: text(&record, "/method"),
            body: &body,
            host: text(&record, "/host"),
            ts_ms: record["ts"].as_i64().expect("ts is a number"),
            nonce: text(&record, "/nonce"),
        };
        let key = PublicKey::parse(text(&record, "/pubKey")).expect("a key");
        let verified = request.verify(
            &key,
            text(&record, "/sig"),
            [text(&record, "/pathAndQuery")],
        );
        // Stricter than both published sides: padded standard base64 and nothing else.
        // See docs/reference/protocol.md#authentication.
        let lenient_base64 = text(&record, "/id") == "sig-newline";
        assert_eq!(
            verified,
            followed(&record) == true && !lenient_base64,
            "{record}"
        );
    }
}

#[test]
fn certificates_are_signed_over_their_canonical_text() {
    for record in section("cap_certs") {
        let mut certificate = record["cert"].clone();
        certificate
            .as_object_mut()
            .expect("a certificate is an object")
            .remove("sig");
        let message = format!("starfish-capcert-v1\n{}", canonical(&certificate));
        assert_eq!(
            message,
            text(followed(&record), "/canonicalInput"),
            "{}",
            record["id"]
        );
        if record["agree"] == true {
            let key = PublicKey::parse(&text(&certificate, "/iss").to_lowercase()).expect("a key");
            assert!(
                key.verify(message.as_bytes(), text(&record, "/expected/signature")),
                "{}",
                record["id"]
            );
        }
    }
}

#[test]
fn revocation_lists_are_signed_over_their_canonical_text() {
    for record in section("revocation_list") {
        let mut list = record["expected"].clone();
        let signature = list
            .as_object_mut()
            .expect("an object")
            .remove("sig")
            .expect("a signature");
        let message = format!("starfish-revlist-v1\n{}", canonical(&list));
        assert_eq!(message, text(&record, "/canonicalInput"));
        let key = PublicKey::parse(text(&list, "/iss")).expect("a key");
        assert!(key.verify(message.as_bytes(), signature.as_str().expect("text")));
    }
}

#[test]
fn author_proofs_hold_for_their_kind_key_and_data_only() {
    const APPEND: &str = "starfish-append-author-v1";
    const DOCUMENT: &str = "starfish-doc-author-v1";
    for record in section("append_author") {
        let (document_key, author) = (text(&record, "/documentKey"), text(&record, "/authorPub"));
        let data = canonical(&record["data"]);
        let verify = |tag, key, data: &str, signature| {
            verify_author(tag, key, data.as_bytes(), author, signature)
        };
        let append = text(&record, "/expected/append/authorSignature");
        let document = text(&record, "/expected/doc/authorSignature");
        assert!(verify(APPEND, document_key, &data, append), "{record}");
        assert!(verify(DOCUMENT, document_key, &data, document), "{record}");
        assert!(!verify(DOCUMENT, document_key, &data, append), "{record}");
        assert!(!verify(APPEND, "another/key", &data, append), "{record}");
        assert!(
            !verify(APPEND, document_key, "{\"other\":1}", append),
            "{record}"
        );
    }
}

#[test]
fn small_order_keys_and_oversized_scalars_carry_no_authorship() {
    for record in section("ed25519_edges") {
        let data = canonical(&record["data"]);
        let (author, signature) = (text(&record, "/pubKey"), text(&record, "/authorSignature"));
        let verified = verify_author(
            "starfish-append-author-v1",
            text(&record, "/documentKey"),
            data.as_bytes(),
            author,
            signature,
        );
        assert!(!verified, "{record}");
        if text(&record, "/id").starts_with("small-order") {
            assert_eq!(
                PublicKey::parse(author).err(),
                Some(CoreError::InvalidPublicKey),
                "{record}"
            );
        }
    }
}

#[test]
fn allow_globs_match_as_published_clients_do() {
    for record in section("path_glob") {
        let (glob, target) = (text(&record, "/glob"), text(&record, "/target"));
        assert_eq!(
            matches_narrowly(glob.as_bytes(), target.as_bytes()),
            record["expected"] == true,
            "{record}"
        );
        // A deny reads widely, and covers descendants besides.
        if record["naiveRegexWouldSay"] == true {
            assert!(Deny::new(glob).covers(target.as_bytes()), "{record}");
        }
    }
}

#[test]
fn scopes_allow_what_the_vectors_say() {
    for record in section("scope_path_match") {
        let entries = record["scopePaths"]
            .as_array()
            .expect("a list")
            .iter()
            .filter_map(Value::as_str);
        // Keys reach the core decoded ("decode once before matching").
        let key = text(&record, "/requestPath")
            .replace("%6b", "k")
            .replace("%2F", "/");
        let expected = record["agree"] == true && record["expected"] == true;
        assert_eq!(Scope::new(entries, "me").allows(&key), expected, "{record}");
    }
}

#[test]
fn a_stored_push_reads_back_with_its_author() {
    let body =
        br#" {"authorSignature":"s\"","data":{"a":0},"authorPubkey":"p","data":{"b":1,"a":2}} "#;
    let push = Push::decode(body).expect("a push");
    let (head, end) = push.stored_frame(12, b"");
    let stored = [&head, &push.content.data, &end]
        .map(|part| &part[..])
        .concat();
    let document = Document::locate(&stored).expect("a document");
    assert_eq!(&stored[document.data.clone()], br#"{"a":2,"b":1}"#);
    assert_eq!(
        document.author,
        Some(Author {
            pubkey: "p".into(),
            signature: "s\"".into()
        })
    );
    assert_eq!((document.hash, document.ts_ms), (push.hash, 12));
}

#[test]
fn integers_of_64_bits_are_stored_exactly_and_hashed_as_doubles() {
    for (integer, rounded) in [
        ("9007199254740991", "9007199254740991"),
        ("9007199254740992", "9007199254740992"),
        ("-9007199254740992", "-9007199254740992"),
        ("9007199254740993", "9007199254740992"),
        ("-9007199254740993", "-9007199254740992"),
        ("9223372036854775807", "9223372036854776000"),
        ("-9223372036854775808", "-9223372036854776000"),
        ("18446744073709551615", "18446744073709552000"),
    ] {
        let body = format!(r#"{{"data":{{"b":[{integer}],"a":{integer}}}}}"#);
        let push = Push::decode(body.as_bytes()).expect("a push");
        let exact = format!(r#"{{"a":{integer},"b":[{integer}]}}"#);
        let canonical = format!(r#"{{"a":{rounded},"b":[{rounded}]}}"#);
        assert_eq!(String::from_utf8_lossy(&push.content.data), exact);
        assert_eq!(String::from_utf8_lossy(push.content.canonical()), canonical);
        assert_eq!(push.hash, hex(&sha256(canonical.as_bytes())));
        // One text is kept where the two are alike.
        assert_eq!(
            exact == canonical,
            std::ptr::eq(push.content.canonical(), &push.content.data[..])
        );

        let (head, end) = push.stored_frame(12, b"");
        let stored = [&head, &push.content.data, &end]
            .map(|part| &part[..])
            .concat();
        let document = Document::locate(&stored).expect("a document");
        assert_eq!(
            String::from_utf8_lossy(&stored[document.data.clone()]),
            exact
        );
        assert_eq!((document.hash, document.ts_ms), (push.hash, 12));
    }
}

#[test]
fn what_no_integer_of_64_bits_holds_is_stored_as_a_double() {
    for (number, double) in [
        ("18446744073709551616", "18446744073709552000"),
        ("-9223372036854775809", "-9223372036854776000"),
        ("9007199254740993.0", "9007199254740992"),
        ("1e30", "1e+30"),
    ] {
        let body = format!(r#"{{"data":{{"a":{number}}}}}"#);
        let push = Push::decode(body.as_bytes()).expect("a push");
        assert_eq!(
            String::from_utf8_lossy(&push.content.data),
            format!(r#"{{"a":{double}}}"#)
        );
        assert_eq!(push.content.data, push.content.canonical());
    }
}

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<char> = text.chars().collect();
    digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(&pair.iter().collect::<String>(), 16).expect("hex"))
        .collect()
}
