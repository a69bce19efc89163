"""Lineages of versions; signatures."""

import random

import botocore.auth
import pytest
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials
from hypothesis import given
from hypothesis import strategies as st

from pysync.store.s3.credentials import Request, Signer
from pysync.store.s3.versions import (
    MAX_REPLACED,
    NOTHING,
    Base,
    Lineage,
    Verdict,
    Version,
    decide,
    plain_etag,
)


def version(*ids: str, etag: str = "") -> Version:
    return Version(etag or f"etag-{ids[0]}", ids, "application/json", 0, None)


def base(*ids: str) -> Base:
    return Base(f"etag-{ids[0]}", ids)


@given(st.integers(0, 2**53), st.lists(st.text("0123456789abcdef", min_size=1), min_size=1, max_size=16))
def test_a_lineage_comes_back_from_its_header(modified_ms: int, ids: list[str]) -> None:
    lineage = Lineage(modified_ms, tuple(ids))
    assert Lineage.of({"x-amz-meta-pysync": lineage.header()}) == lineage


@pytest.mark.parametrize("header", ["", " ", "x", "12", "x 12", "-1 a"])
def test_a_lineage_of_others_is_none(header: str) -> None:
    assert Lineage.of({"x-amz-meta-pysync": header}) is None


@pytest.mark.parametrize(("said", "etag"), [("a", "a"), ('"a-2"', "a-2"), ('W/"a"', "a"), ("", "")])
def test_an_etag_is_kept_plain(said: str, etag: str) -> None:
    assert plain_etag(said) == etag


@pytest.mark.parametrize(
    ("over", "found", "verdict"),
    [
        (base("e"), version("w", "e"), Verdict.STORED),
        (base("e"), version("y", "x", "w", "e"), Verdict.REPLACED),
        (base("e"), version("e", "d"), Verdict.NOT_YET),
        (base("e"), version("y", "x", "e"), Verdict.NOT_STORED),
        (base("e"), version("y", "x"), Verdict.UNKNOWN),
        (base("e"), None, Verdict.UNKNOWN),
        (base("e"), Version("other", (), "application/json", 0, None), Verdict.UNKNOWN),
        (Base("f", ()), Version("f", (), "application/json", 0, None), Verdict.NOT_YET),
        (Base("f", ()), version("w"), Verdict.STORED),
        (Base("f", ()), version("x"), Verdict.UNKNOWN),
        # Two tombstones have one etag.
        (Base("t", ("t1", "e")), version("t2", "x", "t1", "e", etag="t"), Verdict.NOT_STORED),
        (Base("t", ("t1", "e")), version("t1", "e", etag="t"), Verdict.NOT_YET),
        (NOTHING, None, Verdict.NOT_YET),
        (NOTHING, version("w", "0"), Verdict.STORED),
        (NOTHING, version("x", "w", "0"), Verdict.REPLACED),
        (NOTHING, version("x", "0"), Verdict.NOT_STORED),
        (NOTHING, version("x"), Verdict.UNKNOWN),
    ],
)
def test_what_became_of_a_write_is_told_by_lineages(
    over: Base, found: Version | None, verdict: Verdict
) -> None:
    assert decide("w", over, found) is verdict


@given(st.integers(0, 10**9))
def test_a_verdict_is_never_wrong(seed: int) -> None:
    """A write is applied once, or never, among many others: whatever is decided fits."""
    chance = random.Random(seed)
    current: Version | None = None
    written = 0
    over: Base | None = None
    applied = False
    for _ in range(chance.randrange(1, 40)):
        if over is None and chance.random() < 0.2:
            over = NOTHING if current is None else Base(current.etag, current.ids)
            if chance.random() < 0.5:
                applied = True
                current = version("w", *over.replaced)
            continue
        written += 1
        known = () if chance.random() < 0.05 else NOTHING.ids if current is None else current.ids
        current = version(f"i{written}", *known[:MAX_REPLACED])
    if over is None:
        return
    verdict = decide("w", over, current)
    if verdict in (Verdict.STORED, Verdict.REPLACED):
        assert applied
    elif verdict is not Verdict.UNKNOWN:
        assert not applied
        assert (verdict is Verdict.NOT_YET) == (current is None or current.etag == over.etag)


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("http://127.0.0.1:7480/bucket/a/b%20c/%C3%A9", b"{}"),
        ("https://bucket.s3.eu-west-1.amazonaws.com/a", b""),
        ("https://host:443/bucket/a?partNumber=2&uploadId=x~y", b"part"),
    ],
)
@pytest.mark.parametrize("token", [None, "session"])
def test_a_signature_is_botocores(
    url: str, body: bytes, token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = botocore.auth.get_current_datetime()
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: now)
    credentials = ReadOnlyCredentials("key", "secret", token)
    headers = {"Content-Type": "text/plain;  charset=x", "If-Match": '"a"', "x-amz-meta-pysync": "1 a b"}
    expected = AWSRequest("PUT", url, headers=headers, data=body)
    botocore.auth.S3SigV4Auth(credentials, "s3", "eu-west-1").add_auth(expected)
    signer = Signer(credentials, "eu-west-1")
    for _ in range(2):
        request = Request("PUT", url, headers, body)
        signer.add_auth(request)
        assert request.headers["Authorization"] == expected.headers["Authorization"]
        assert request.headers.get("X-Amz-Security-Token") == token
