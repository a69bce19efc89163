"""Certificates and revocation lists: what holds, what does not, and for which reason."""

import base64
import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pysync._core import canonicalize
from pysync.auth import certificates, issuing
from pysync.auth.certificates import CertificateError
from pysync.auth.identity_keys import IdentityKeys
from pysync.errors import BadRequest, BadSignature, InvalidRevocation

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors/protocol.json").read_text())
ISSUER, SUBJECT, PRESENTER = (
    IdentityKeys.from_private(bytes.fromhex(pair["edPriv"]), bytes.fromhex(pair["kemPriv"]))
    for pair in VECTORS["meta"]["keys"].values()
)
NONCE = bytes(range(16))
NOW_S = 1_700_000_000

# Where pysync is stricter than what both published packages accept.
# See docs/reference/protocol.md#authentication.
STRICTER = {
    "iss-uppercase-hex-accepted": "malformed",
    "DIS-nonce-unpadded": "malformed-shape",
    "DIS-nonce-whitespace": "malformed-shape",
    "DIS-sig-unpadded": "bad-signature",
}
CERTIFICATES: list[dict[str, Any]] = VECTORS["cap_certs"]
SHARED = [case for case in CERTIFICATES if case["cert"]["kind"] != "device"]


def reason_of(text: bytes, now_s: int = NOW_S) -> str:
    try:
        certificates.verify(certificates.parse(text), now_s)
    except CertificateError as error:
        return error.reason
    return "ok"


def signed(**members: Any) -> bytes:
    """The certificate of ISSUER for SUBJECT with these members in place of its own, signed anew."""
    own = orjson.loads(device().text)
    changed = {name: value for name, value in {**own, **members}.items() if value is not ...}
    changed["sig"] = ISSUER.sign(certificates.signing_input(certificates.CERTIFICATE_TAG, changed))
    return orjson.dumps(changed)


def device() -> certificates.Certificate:
    return issuing.issue_device_certificate(ISSUER, SUBJECT.ed_pub, SUBJECT.kem_pub, now_s=NOW_S, nonce=NONCE)


@pytest.mark.parametrize("case", CERTIFICATES, ids=lambda case: case["id"])
def test_a_certificate_is_judged_as_the_protocol_judges_it(case: dict[str, Any]) -> None:
    verdict = case["expected"] if case["agree"] else case["recommended"]
    expected = "ok" if verdict["verify"]["ok"] else verdict["verify"]["reason"]
    assert reason_of(orjson.dumps(case["cert"]), case["now"]) == STRICTER.get(case["id"], expected)


@pytest.mark.parametrize("case", SHARED, ids=lambda case: case["id"])
def test_sharing_is_judged_as_the_protocol_judges_it(case: dict[str, Any]) -> None:
    try:
        certificates.check_delegation(certificates.parse(orjson.dumps(case["cert"])))
        reason = "ok"
    except CertificateError as error:
        reason = error.reason
    assert reason == case["expected"][case["cert"]["kind"] + "Shape"]


def test_a_device_certificate_is_not_bound_to_one_collection() -> None:
    certificates.check_delegation(device())


def test_the_signed_text_is_the_one_that_every_implementation_signs() -> None:
    for case in CERTIFICATES:
        verdict = case["expected"] if case["agree"] else case["recommended"]
        input_ = certificates.signing_input(certificates.CERTIFICATE_TAG, case["cert"])
        assert input_.decode() == verdict["canonicalInput"], case["id"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "malformed"),
        (b"\xff", "malformed"),
        (b"{", "malformed"),
        (b'{"nbf":NaN}', "malformed"),
        (b"[" * 100_000, "malformed"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "malformed"),
        (b"null", "malformed-shape"),
        (b"[]", "malformed-shape"),
        (b'"cert"', "malformed-shape"),
        (b"{}", "malformed-shape"),
    ],
)
def test_malformed_certificate_is_rejected_and_raises_nothing_else(text: bytes, reason: str) -> None:
    assert reason_of(text) == reason


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"nbf": True}, "malformed-shape"),
        ({"exp": "1702592000"}, "malformed-shape"),
        ({"exp": None}, "malformed-shape"),
        ({"exp": NOW_S}, "inverted-window"),
        ({"exp": 1e300}, "ok"),
        ({"kind": "root"}, "malformed-shape"),
        ({"kind": ["device"]}, "malformed-shape"),
        ({"scope": []}, "malformed-shape"),
        ({"scope": {"ops": "read", "collections": []}}, "malformed-shape"),
        ({"scope": {"ops": [], "collections": []}}, "ok"),
        ({"scope": {"ops": [], "collections": [], "paths": None}}, "malformed-shape"),
        ({"scope": {"ops": [], "collections": [1]}}, "malformed-shape"),
        ({"iss": 1}, "malformed-shape"),
        ({"subKem": 1}, "malformed-shape"),
        ({"sub": SUBJECT.ed_pub.upper()}, "malformed"),
        ({"sub": SUBJECT.ed_pub + "\n"}, "malformed"),
        ({"aud": None}, "non-audience-has-aud"),
        ({"nonce": base64.b64encode(bytes(17)).decode()}, "malformed-shape"),
        ({"nonce": "AAAAAAAAAAAAAAAAAAAAAB=="}, "malformed-shape"),
        ({"nonce": "é"}, "malformed-shape"),
    ],
)
def test_each_member_keeps_its_type_even_under_a_good_signature(members: Any, reason: str) -> None:
    assert reason_of(signed(**members)) == reason


AUDIENCE = {"kind": "audience", "sub": ..., "subKem": ..., "subUserId": ...}


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({}, "ok"),
        ({"sub": None}, "audience-has-sub"),
        ({"subUserId": ISSUER.user_id}, "audience-has-sub"),
        ({"aud": None}, "audience-aud-bad-entry"),
        ({"aud": "a" * 64}, "audience-aud-bad-entry"),
        ({"aud": ["A" * 64]}, "audience-aud-bad-entry"),
        ({"aud": [7]}, "audience-aud-bad-entry"),
        ({"aud": [f"{n:064x}" for n in range(65)]}, "audience-aud-too-large"),
    ],
)
def test_an_audience_is_a_list_of_distinct_keys_and_has_no_subject(members: Any, reason: str) -> None:
    assert reason_of(signed(**{**AUDIENCE, **members})) == reason


def test_a_small_order_issuer_signs_nothing() -> None:
    key = "01" + "00" * 31
    signature = base64.b64encode(b"\x01" + bytes(63)).decode()
    members = {
        **orjson.loads(device().text),
        "iss": key,
        "issUserId": certificates.user_id(key),
        "sig": signature,
    }
    assert reason_of(orjson.dumps(members)) == "bad-signature"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
MEMBERS = st.sampled_from([*orjson.loads(device().text), "subUserId", "aud"])


@pytest.mark.slow
@given(st.dictionaries(MEMBERS, JSON_VALUES), st.dictionaries(st.sampled_from(["ops", "paths"]), JSON_VALUES))
def test_whatever_is_changed_in_a_certificate_is_rejected_with_a_reason(members: Any, scope: Any) -> None:
    own = orjson.loads(device().text)
    changed = orjson.dumps({**own, "scope": {**own["scope"], **scope}, **members})
    try:
        same = canonicalize(changed) == device().text
    except BadRequest:
        same = False
    assert (reason_of(changed) == "ok") is same


def test_of_a_repeated_member_the_last_counts_and_is_what_was_signed() -> None:
    text = device().text
    assert reason_of(b'{"kind":"member",' + text[1:]) == "ok"
    assert reason_of(text[:-1] + b',"kind":"member"}') == "bad-signature"


def test_a_certificate_survives_its_way_through_the_header() -> None:
    assert certificates.from_authorization(device().authorization) == device()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda header: header.removeprefix("Cap "),
        lambda header: "cap" + header[3:],
        lambda header: header.rstrip("="),
        lambda header: header + " ",
        lambda header: header[:20] + "\n" + header[20:],
        lambda header: header[:20] + "*" + header[20:],
        lambda header: "Cap é",
        lambda header: "Cap ",
        lambda header: "Cap " + "A" * 8192,
    ],
)
def test_a_header_has_one_spelling(spoil: Any) -> None:
    headers = (certificates.parse(signed(label="x" * n)).authorization for n in range(3))
    header = next(header for header in headers if header.endswith("="))
    certificates.from_authorization(header)
    with pytest.raises(CertificateError):
        certificates.from_authorization(spoil(header))


def test_only_a_self_signed_device_is_a_root_device() -> None:
    own = issuing.issue_device_certificate(ISSUER, ISSUER.ed_pub, ISSUER.kem_pub, now_s=NOW_S, nonce=NONCE)
    assert own.is_root_device
    assert not device().is_root_device


def minted(name: str) -> dict[str, Any]:
    return next(case["expected"] for case in VECTORS["minted_caps"] if case["id"] == name)


def test_minted_certificates_are_the_published_ones() -> None:
    made = {
        "mint_device_cap root_all": issuing.issue_device_certificate(
            ISSUER,
            SUBJECT.ed_pub,
            SUBJECT.kem_pub,
            now_s=NOW_S,
            nonce=NONCE,
            expires_at_s=NOW_S + 3600,
        ),
        "mint_member_cap read_only": issuing.issue_member_certificate(
            ISSUER,
            SUBJECT.ed_pub,
            SUBJECT.kem_pub,
            "notes",
            now_s=NOW_S,
            nonce=NONCE,
            expires_at_s=1_700_009_999,
        ),
        "mint_audience_cap list": issuing.issue_audience_certificate(
            ISSUER,
            "notes",
            now_s=NOW_S,
            nonce=NONCE,
            expires_at_s=NOW_S + 60,
            aud=(PRESENTER.ed_pub,),
        ),
    }
    for name, certificate in made.items():
        assert orjson.loads(certificate.text) == minted(name)


def test_a_public_link_is_the_published_one() -> None:
    vector = minted("public link fragment")
    assert issuing.public_link(certificates.parse(orjson.dumps(vector["cap"]))) == vector["fragment"]
    with pytest.raises(ValueError, match="audience"):
        issuing.public_link(device())


def test_a_certificate_lasts_thirty_days_by_default_and_never_backwards() -> None:
    assert device().exp - device().nbf == 30 * 24 * 3600
    with pytest.raises(CertificateError, match="expiresAt-not-after-nbf"):
        issuing.issue_audience_certificate(ISSUER, "notes", now_s=NOW_S, nonce=NONCE, expires_at_s=NOW_S)


def test_nothing_is_minted_that_a_server_would_reject() -> None:
    with pytest.raises(CertificateError, match="audience-empty"):
        issuing.issue_audience_certificate(ISSUER, "notes", now_s=NOW_S, nonce=NONCE, aud=())
    with pytest.raises(CertificateError, match="member-self"):
        issuing.issue_member_certificate(
            ISSUER, ISSUER.ed_pub, ISSUER.kem_pub, "notes", now_s=NOW_S, nonce=NONCE
        )
    everything = issuing.Grant(("read", "list", "write"), ("notes/**",))
    with pytest.raises(CertificateError, match="audience-members-not-denied"):
        issuing.issue_audience_certificate(ISSUER, "notes", now_s=NOW_S, nonce=NONCE, grant=everything)


def test_a_revocation_list_is_the_published_one() -> None:
    vector = VECTORS["revocation_list"][0]
    found = certificates.parse_revocation_list(orjson.dumps(vector["expected"]))
    assert found.generation == 3
    assert found.iss == ISSUER.ed_pub
    assert found.text == canonicalize(orjson.dumps(vector["expected"]))
    without_sig = {name: value for name, value in vector["expected"].items() if name != "sig"}
    assert (
        certificates.signing_input(certificates.REVOCATION_TAG, without_sig).decode()
        == vector["canonicalInput"]
    )


def test_a_revoked_certificate_is_revoked_and_its_neighbour_is_not() -> None:
    other = issuing.issue_device_certificate(
        ISSUER, SUBJECT.ed_pub, SUBJECT.kem_pub, now_s=NOW_S, nonce=bytes(16)
    )
    listed = issuing.issue_revocation_list(ISSUER, 1, certificates=[device()])
    assert listed.revokes(device())
    assert not listed.revokes(other)


def test_an_audience_certificate_is_revoked_by_its_nonce() -> None:
    shared = issuing.issue_audience_certificate(ISSUER, "notes", now_s=NOW_S, nonce=NONCE)
    assert issuing.issue_revocation_list(ISSUER, 1, certificates=[shared]).revokes(shared)
    assert not issuing.issue_revocation_list(ISSUER, 1, subjects=[("", NOW_S)]).revokes(shared)


def test_a_revoked_subject_loses_all_its_certificates_from_that_issuer_alone() -> None:
    listed = issuing.issue_revocation_list(ISSUER, 1, subjects=[(SUBJECT.ed_pub, NOW_S)])
    assert listed.revokes(device())
    other_issuers = issuing.issue_device_certificate(
        PRESENTER, SUBJECT.ed_pub, SUBJECT.kem_pub, now_s=NOW_S, nonce=NONCE
    )
    assert not listed.revokes(other_issuers)


def test_a_list_that_its_issuer_did_not_sign_is_rejected() -> None:
    members = orjson.loads(issuing.issue_revocation_list(ISSUER, 1).text)
    for forged in ({**members, "generation": 2}, {**members, "sig": None}, {**members, "sig": ""}):
        with pytest.raises(BadSignature):
            certificates.parse_revocation_list(orjson.dumps(forged))


@pytest.mark.parametrize(
    "members",
    [
        {"iss": "zz"},
        {"issUserId": "0" * 32},
        {"generation": 1.5},
        {"generation": -1},
        {"generation": "1"},
        {"revoked": None},
        {"revoked": [1]},
        {"revoked": [{"sub": "", "nonce": ""}]},
        {"revoked": [{"sub": 1, "nonce": "", "exp": 1}]},
        {"revokedSubjects": {}},
        {"revokedSubjects": [{"exp": 1}]},
    ],
)
def test_malformed_revocation_list_is_rejected(members: Any) -> None:
    own = orjson.loads(issuing.issue_revocation_list(ISSUER, 1).text)
    with pytest.raises(InvalidRevocation):
        certificates.parse_revocation_list(orjson.dumps({**own, **members}))
    without = {name: value for name, value in own.items() if name not in members}
    if "revokedSubjects" not in members:
        with pytest.raises(InvalidRevocation):
            certificates.parse_revocation_list(orjson.dumps(without))


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"[" * 100_000])
def test_text_that_is_no_object_is_no_revocation_list(text: bytes) -> None:
    with pytest.raises(InvalidRevocation):
        certificates.parse_revocation_list(text)
