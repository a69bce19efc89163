"""Keys and signatures: what verifies, and all that does not."""

import base64
import hashlib
import re
from typing import Any

import orjson
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import example, given
from hypothesis import strategies as st
from support import reference
from support.clients import ISSUER, root_device

import pysync._core as core
from pysync.auth import certificates

SIGNER = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC_KEY = SIGNER.public_key().public_bytes_raw().hex()


def sign(message: bytes) -> str:
    return base64.b64encode(SIGNER.sign(message)).decode()


header_texts = st.text(st.characters(codec="utf-8"), max_size=12)


@given(
    header_texts,
    header_texts,
    st.binary(max_size=40),
    header_texts,
    st.integers(-(2**60), 2**60),
    header_texts,
)
def test_a_request_message_is_the_twins(
    method: str, target: str, body: bytes, host: str, ts_ms: int, nonce: str
) -> None:
    message = core.request_message(method, target, body, host, ts_ms, nonce)
    assert message == reference.request_message(method, target, body, host, ts_ms, nonce)


_is_timestamp = re.compile(r"-?[0-9]{1,16}").fullmatch
_is_nonce = re.compile(r"[A-Za-z0-9+/]{21}[AQgw]==").fullmatch
NONCE = "0123456789abcdefghijkA=="


@given(st.one_of(st.text("-+0123456789_ ٣\ud800\n", max_size=18), st.integers().map(str)))
@example("-")
@example("1" * 16)
@example("-" + "1" * 17)
def test_a_timestamp_has_the_twins_form(text: str) -> None:
    assert core.signed_time(text, NONCE) == (int(text) if _is_timestamp(text) else None)


@given(
    st.one_of(
        st.binary(max_size=20).map(lambda given: base64.b64encode(given).decode()),
        st.from_regex(r"[A-Za-z0-9+/]{20,22}[A-Za-z0-9+/]={0,2}\n?", fullmatch=True),
        st.text("Aw=-\ud800é", min_size=22, max_size=25),
    )
)
def test_a_nonce_has_the_twins_form(text: str) -> None:
    assert core.signed_time("-1", text) == (-1 if _is_nonce(text) else None)


def request_verifies(**changes: Any) -> bool:
    """A well signed request, verified with some of its parts changed."""
    request: dict[str, Any] = {
        "method": "POST",
        "body": b'{"data":{}}',
        "host": "h:1",
        "ts_ms": 1_700_000_000_000,
        "nonce": "bm9uY2U=",
    }
    signature = sign(core.request_message(target="/v1/push/a?b=1", **request))
    arguments = {"signature": signature, "targets": ["/push/a?b=1", "/v1/push/a?b=1"], **request}
    return core.verify_request(core.PublicKey(PUBLIC_KEY), **{**arguments, **changes})


def test_a_signed_request_verifies_with_the_target_that_was_signed() -> None:
    assert request_verifies()


@pytest.mark.parametrize(
    "change",
    [
        {"method": "PUT"},
        {"body": b'{"data":{ }}'},
        {"host": "h:2"},
        {"ts_ms": 1_700_000_000_001},
        {"nonce": "bm9uY2V="},
        {"targets": ["/push/a?b=1"]},
        {"targets": []},
        {"signature": sign(b"something else")},
        {"signature": ""},
        {"nonce": "\udcff"},
        {"host": "\udcff"},
        {"method": "\udcff"},
        {"signature": "\udcff"},
        {"targets": ["\udcff"]},
    ],
    ids=repr,
)
def test_a_request_changed_in_any_part_does_not_verify(change: dict[str, Any]) -> None:
    assert not request_verifies(**change)


def test_only_strict_base64_of_sixty_four_bytes_is_a_signature() -> None:
    key, message = core.PublicKey(PUBLIC_KEY), b"message"
    good = sign(message)
    assert key.verify(message, good)
    url_safe = good.replace("+", "-").replace("/", "_")
    long = base64.b64encode(base64.b64decode(good) + b"\0").decode()
    short = base64.b64encode(base64.b64decode(good)[:63]).decode()
    stray_bits = good[:85] + chr(ord(good[85]) + 1) + "=="
    for bad in (
        good[:-2],
        good[:-1],
        good + "=",
        f" {good}",
        f"{good}\n",
        f"*{good}",
        long,
        short,
        stray_bits,
        "",
    ):
        assert not key.verify(message, bad), bad
    assert url_safe == good or not key.verify(message, url_safe)


@given(st.binary(max_size=100), st.integers(0, 511))
def test_a_signature_verifies_whole_and_with_no_bit_changed(message: bytes, bit: int) -> None:
    key, signature = core.PublicKey(PUBLIC_KEY), bytearray(SIGNER.sign(message))
    assert key.verify(message, base64.b64encode(signature).decode())
    signature[bit // 8] ^= 1 << bit % 8
    assert not key.verify(message, base64.b64encode(signature).decode())


P = 2**255 - 19
SMALL_ORDER = [0, 1, P - 1, 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7]
SMALL_ORDER.append(P - SMALL_ORDER[-1])


@pytest.mark.parametrize("sign_bit", [0, 1])
@pytest.mark.parametrize("y", [*SMALL_ORDER, *range(P, 2**255)])
def test_small_order_keys_and_long_encodings_are_rejected(y: int, sign_bit: int) -> None:
    with pytest.raises(ValueError, match="not an Ed25519 public key"):
        core.PublicKey((y | sign_bit << 255).to_bytes(32, "little").hex())


@pytest.mark.parametrize(
    "text",
    [
        "",
        PUBLIC_KEY.upper(),
        PUBLIC_KEY[:-1],
        PUBLIC_KEY + "0",
        f" {PUBLIC_KEY[1:]}",
        "é" * 32,
        "g" * 64,
        "\udcff" * 64,
    ],
)
def test_only_lower_case_hex_is_a_key(text: str) -> None:
    with pytest.raises(ValueError, match=r"public key|surrogates"):
        core.PublicKey(text)


def test_a_key_knows_its_text_and_user() -> None:
    key = core.PublicKey(PUBLIC_KEY)
    assert key.hex == PUBLIC_KEY
    assert key.user_id == hashlib.sha256(bytes.fromhex(PUBLIC_KEY)).hexdigest()[:32]


def test_an_author_proof_holds_for_its_tag_key_and_data_only() -> None:
    tag, document_key, data = "starfish-doc-author-v1", "notes/a", {"m": [1, "é"]}
    text = reference.canonical(data).encode()
    signature = sign(reference.author_message(tag, document_key, data))
    assert core.verify_author(tag, document_key, text, PUBLIC_KEY, signature)
    assert not core.verify_author("starfish-append-author-v1", document_key, text, PUBLIC_KEY, signature)
    assert not core.verify_author(tag, "notes/b", text, PUBLIC_KEY, signature)
    assert not core.verify_author(tag, document_key, b"{}", PUBLIC_KEY, signature)
    assert not core.verify_author(tag, document_key, text, "0" * 64, signature)
    assert not core.verify_author(tag, document_key, text, "\udcff", signature)
    assert not core.verify_author(tag, document_key, text, PUBLIC_KEY, "\udcff")


@given(st.sampled_from(["sub", "label", "sig", "é", '"', "nbf", "scope"]), st.text(max_size=5))
def test_a_certificate_opens_where_its_issuer_signed_it_and_nowhere_else(name: str, value: str) -> None:
    certificate = root_device(ISSUER)
    own = {key: held for key, held in orjson.loads(certificate.text).items() if key != "sig"}
    members = {**own, "nested": {"sig": "x", "a": 1}} | ({name: value} if name not in own else {})
    members.pop("sig", None)
    members["sig"] = ISSUER.sign(certificates.signing_input(certificates.CERTIFICATE_TAG, members))
    opened = (certificate.sub, certificate.nbf, certificate.exp)
    assert core.open_certificate(orjson.dumps(members)) == opened
    shuffled = dict(reversed(members.items()))
    assert core.open_certificate(orjson.dumps(shuffled, option=orjson.OPT_INDENT_2)) == opened
    assert core.open_certificate(orjson.dumps({**members, "nonce": "other"})) is None
    assert core.open_certificate(orjson.dumps({**members, "more": value})) is None


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"{}", b"null", b'{"sig":1}', b'{"iss":1,"sig":"","nbf":0,"exp":1}', b'{"a":NaN}',
        b'{"iss":"' + b"0" * 64 + b'","sig":"","nbf":0,"exp":1}', b"[" * 70, b"\xff",
    ],
)  # fmt: skip
def test_malformed_certificate_does_not_open(text: bytes) -> None:
    assert core.open_certificate(text) is None


@pytest.mark.parametrize("seconds", [1.5, "1", None, True, [1]])
def test_a_certificate_whose_time_is_no_integer_does_not_open(seconds: object) -> None:
    own = {key: held for key, held in orjson.loads(root_device(ISSUER).text).items() if key != "sig"}
    own["exp"] = seconds
    sig = ISSUER.sign(certificates.signing_input(certificates.CERTIFICATE_TAG, own))
    assert core.open_certificate(orjson.dumps({**own, "sig": sig})) is None
