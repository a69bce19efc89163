"""Keys and signatures: the published vectors, made and verified."""

import base64
import json
import stat
from pathlib import Path
from typing import Any

import orjson
import pytest

from pysync import protocol
from pysync._core import PublicKey, canonicalize, request_message, verify_author, verify_request
from pysync.auth import signing
from pysync.auth.identity_keys import IdentityKeys

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors/protocol.json").read_text())


def keys(ed_priv: str) -> IdentityKeys:
    return IdentityKeys.from_private(bytes.fromhex(ed_priv), bytes(31) + b"\x01")


@pytest.mark.parametrize("case", VECTORS["request_signing"], ids=lambda case: case["id"])
def test_a_request_is_signed_as_every_client_signs_it(case: dict[str, Any]) -> None:
    body = bytes.fromhex(case["bodyHex"] or "")
    request = (case["method"], case["pathAndQuery"], body, case["host"] or "", case["ts"])
    expected = case["expected"]
    headers = signing.sign_request(keys(case["privKey"]), *request, bytes.fromhex(case["nonceHex"]))
    assert headers == {
        protocol.HEADER_SIGNATURE: expected["sig"],
        protocol.HEADER_TIMESTAMP: expected["tsHeader"],
        protocol.HEADER_NONCE: expected["nonce"],
    }
    assert request_message(*request, expected["nonce"]).decode() == expected["canonicalInput"]


# Whitespace in a signature passes in both published packages; the strict form refuses it.
# See docs/reference/protocol.md#authentication.
STRICTER = {"sig-newline": False}


@pytest.mark.parametrize("case", VECTORS["request_verify"], ids=lambda case: case["id"])
def test_a_request_is_verified_as_every_server_verifies_it(case: dict[str, Any]) -> None:
    verified = verify_request(
        PublicKey(case["pubKey"]),
        case["sig"],
        case["method"],
        [case["pathAndQuery"]],
        bytes.fromhex(case["bodyHex"]),
        case["host"],
        case["ts"],
        case["nonce"],
    )
    expected = case["expected"] if case["agree"] else case["recommended"]
    assert verified is STRICTER.get(case["id"], expected)


@pytest.mark.parametrize("case", VECTORS["append_author"], ids=lambda case: case["id"])
def test_an_author_proof_holds_for_its_own_kind_key_and_author(case: dict[str, Any]) -> None:
    author, key = keys(case["authorPriv"]), case["documentKey"]
    data = canonicalize(orjson.dumps(case["data"]))
    expected = case["expected"]
    append = signing.sign_author(author, signing.APPEND_AUTHOR, key, data)
    assert append == expected["append"]
    assert signing.sign_author(author, signing.DOCUMENT_AUTHOR, key, data) == expected["doc"]
    signature = append["authorSignature"]
    assert verify_author(signing.APPEND_AUTHOR, key, data, author.ed_pub, signature)
    assert not verify_author(signing.DOCUMENT_AUTHOR, key, data, author.ed_pub, signature)
    assert not verify_author(signing.APPEND_AUTHOR, key + "x", data, author.ed_pub, signature)
    assert not verify_author(signing.APPEND_AUTHOR, key, data, keys("33" * 32).ed_pub, signature)


# The recommendation of these two is a sentence: the WHATWG reading of a URL.
WHATWG = {"http://127.1": "127.0.0.1", "//foo": ""}


@pytest.mark.parametrize(
    "case", VECTORS["signing_host_from_base_url"], ids=lambda case: case["id"] or "empty"
)
def test_the_signed_host_follows_from_the_base_url(case: dict[str, Any]) -> None:
    expected = case["expected"] if case["agree"] else WHATWG[case["id"]]
    assert signing.canonical_host(case["baseUrl"]) == expected


@pytest.mark.parametrize(
    ("base_url", "host"),
    [
        ("HTTPS://H.COM:443", "h.com"),
        ("http://[::1]:8080/x", "[::1]:8080"),
        ("http://[::1]", "[::1]"),
        ("https://bücher.example", "xn--bcher-kva.example"),
    ],
)
def test_the_signed_host_has_one_spelling(base_url: str, host: str) -> None:
    assert signing.canonical_host(base_url) == host


@pytest.mark.parametrize("base_url", ["http://1.2.3.4.5", "http://..", "http://h:x", "http://h:65536"])
def test_an_address_that_cannot_be_is_a_value_error(base_url: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        signing.canonical_host(base_url)


@pytest.mark.parametrize(
    ("header", "scheme", "host"),
    [
        ("API.example.com", "https", "api.example.com"),
        ("h.com:443", "https", "h.com"),
        ("h.com:80", "http", "h.com"),
        ("h.com:443", "http", "h.com:443"),
        ("localhost:3000", "http", "localhost:3000"),
        ("[::1]:80", "http", "[::1]"),
        ("[::1]", "http", "[::1]"),
        ("[fe80::80]", "http", "[fe80::80]"),
        ("", "http", ""),
    ],
)
def test_client_and_server_arrive_at_one_host(header: str, scheme: str, host: str) -> None:
    assert signing.canonical_host_of_header(header, scheme) == host


@pytest.mark.parametrize("case", VECTORS["root_identity"], ids=lambda case: ascii(case["id"]))
def test_a_passphrase_gives_the_same_root_everywhere(case: dict[str, Any]) -> None:
    root = IdentityKeys.from_passphrase(case["passphrase"])
    members = orjson.loads(root.to_json())
    assert members == {**case["expected"]["keys"], "userId": case["expected"]["userId"]}


@pytest.mark.parametrize("passphrase", ["", "  ", "\n"])
def test_a_blank_passphrase_is_no_passphrase(passphrase: str) -> None:
    with pytest.raises(ValueError, match="empty"):
        IdentityKeys.from_passphrase(passphrase)


def test_keys_come_back_from_their_file_which_only_the_owner_reads(tmp_path: Path) -> None:
    made, path = IdentityKeys.generate(), tmp_path / "key.json"
    made.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert IdentityKeys.from_json(path.read_bytes()) == made
    with pytest.raises(FileExistsError):
        IdentityKeys.generate().save(path)


def test_private_keys_show_up_in_no_repr_and_no_error() -> None:
    made = IdentityKeys.generate()
    assert made.ed_priv not in repr(made)
    assert made.kem_priv not in repr(made)
    members = {**orjson.loads(made.to_json()), "kemPriv": made.kem_priv[:-1]}
    with pytest.raises(ValueError, match="64 hex digits") as caught:
        IdentityKeys.from_json(orjson.dumps(members))
    assert made.ed_priv not in str(caught.value)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b'{"edPriv":1,"kemPriv":2}', b'{"edPriv":"00","kemPriv":"00"}']
)
def test_malformed_key_file_is_rejected(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        IdentityKeys.from_json(text)


@pytest.mark.parametrize("name", ["edPub", "kemPub", "userId"])
def test_a_public_half_that_does_not_fit_is_noticed(name: str) -> None:
    members = {**orjson.loads(IdentityKeys.generate().to_json()), name: "00" * 32}
    with pytest.raises(ValueError, match=name):
        IdentityKeys.from_json(orjson.dumps(members))


def test_a_signature_is_padded_standard_base64() -> None:
    made = IdentityKeys.generate()
    signature = made.sign(b"text")
    assert len(base64.b64decode(signature, validate=True)) == 64
    assert PublicKey(made.ed_pub).verify(b"text", signature)
