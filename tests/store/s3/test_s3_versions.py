"""Lineages of versions; signatures."""

import random

import botocore.auth
import pytest
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials
from hypothesis import given
from hypothesis import strategies as st

from pysync.store.s3.credentials import SignableRequest, SigV4Signer
from pysync.store.s3.versions import (
    MAX_REPLACED,
    NO_VERSION,
    ExpectedVersion,
    Lineage,
    Version,
    WriteOutcome,
    resolve_outcome,
    unquote_etag,
)


def version(*ids: str, etag: str = "") -> Version:
    return Version(etag or f"etag-{ids[0]}", ids, "application/json", 0, None)


def base(*ids: str) -> ExpectedVersion:
    return ExpectedVersion(f"etag-{ids[0]}", ids)


@given(st.integers(0, 2**53), st.lists(st.text("0123456789abcdef", min_size=1), min_size=1, max_size=16))
def test_a_lineage_comes_back_from_its_header(modified_ms: int, ids: list[str]) -> None:
    lineage = Lineage(modified_ms, tuple(ids))
    assert Lineage.of({"x-amz-meta-pysync": lineage.header()}) == lineage


@pytest.mark.parametrize("header", ["", " ", "x", "12", "x 12", "-1 a"])
def test_a_lineage_of_others_is_none(header: str) -> None:
    assert Lineage.of({"x-amz-meta-pysync": header}) is None


@pytest.mark.parametrize(("said", "etag"), [("a", "a"), ('"a-2"', "a-2"), ('W/"a"', "a"), ("", "")])
def test_an_etag_is_kept_plain(said: str, etag: str) -> None:
    assert unquote_etag(said) == etag


@pytest.mark.parametrize(
    ("over", "found", "verdict"),
    [
        (base("e"), version("w", "e"), WriteOutcome.STORED),
        (base("e"), version("y", "x", "w", "e"), WriteOutcome.REPLACED),
        (base("e"), version("e", "d"), WriteOutcome.NOT_YET),
        (base("e"), version("y", "x", "e"), WriteOutcome.NOT_STORED),
        (base("e"), version("y", "x"), WriteOutcome.UNKNOWN),
        (base("e"), None, WriteOutcome.UNKNOWN),
        (base("e"), Version("other", (), "application/json", 0, None), WriteOutcome.UNKNOWN),
        (ExpectedVersion("f", ()), Version("f", (), "application/json", 0, None), WriteOutcome.NOT_YET),
        (ExpectedVersion("f", ()), version("w"), WriteOutcome.STORED),
        (ExpectedVersion("f", ()), version("x"), WriteOutcome.UNKNOWN),
        # Two tombstones have one etag.
        (ExpectedVersion("t", ("t1", "e")), version("t2", "x", "t1", "e", etag="t"), WriteOutcome.NOT_STORED),
        (ExpectedVersion("t", ("t1", "e")), version("t1", "e", etag="t"), WriteOutcome.NOT_YET),
        (NO_VERSION, None, WriteOutcome.NOT_YET),
        (NO_VERSION, version("w", "0"), WriteOutcome.STORED),
        (NO_VERSION, version("x", "w", "0"), WriteOutcome.REPLACED),
        (NO_VERSION, version("x", "0"), WriteOutcome.NOT_STORED),
        (NO_VERSION, version("x"), WriteOutcome.UNKNOWN),
    ],
)
def test_outcome_of_a_write_is_decided_by_lineages(
    over: ExpectedVersion, found: Version | None, verdict: WriteOutcome
) -> None:
    assert resolve_outcome("w", over, found) is verdict


@given(st.integers(0, 10**9))
def test_a_verdict_is_never_wrong(seed: int) -> None:
    """A write is applied once, or never, among many others: whatever is decided fits."""
    rng = random.Random(seed)
    current: Version | None = None
    written = 0
    over: ExpectedVersion | None = None
    applied = False
    for _ in range(rng.randrange(1, 40)):
        if over is None and rng.random() < 0.2:
            over = NO_VERSION if current is None else ExpectedVersion(current.etag, current.ids)
            if rng.random() < 0.5:
                applied = True
                current = version("w", *over.replaced)
            continue
        written += 1
        known = () if rng.random() < 0.05 else NO_VERSION.ids if current is None else current.ids
        current = version(f"i{written}", *known[:MAX_REPLACED])
    if over is None:
        return
    verdict = resolve_outcome("w", over, current)
    if verdict in (WriteOutcome.STORED, WriteOutcome.REPLACED):
        assert applied
    elif verdict is not WriteOutcome.UNKNOWN:
        assert not applied
        assert (verdict is WriteOutcome.NOT_YET) == (current is None or current.etag == over.etag)


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
    signer = SigV4Signer(credentials, "eu-west-1")
    for _ in range(2):
        request = SignableRequest("PUT", url, headers, body)
        signer.add_auth(request)
        assert request.headers["Authorization"] == expected.headers["Authorization"]
        assert request.headers.get("X-Amz-Security-Token") == token
