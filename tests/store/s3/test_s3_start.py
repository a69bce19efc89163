"""What a bucket is asked at start, and what people are told who cannot use it."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from components import S3Server, free_port
from contracts.files import chunks_of, read_file
from multidict import CIMultiDict
from support.injected_faults import s3_error
from support.s3_fault_proxy import FaultProxy
from support.s3_stores import (
    HASTY,
    another_program,
    new_prefix,
    no_pause,
    opened,
    proxied,
    without_credentials,
)

from pysync.clock import wall_clock_ms
from pysync.errors import StoreUnavailable
from pysync.store import ABSENT, NOT_MODIFIED, Etag, EtagMismatch, StoredObject
from pysync.store.s3 import RetryPolicy, S3Store
from pysync.store.s3.http import RetryState


@pytest.fixture
async def proxy(radosgw: S3Server) -> AsyncIterator[FaultProxy]:
    async with FaultProxy(radosgw.endpoint) as proxy:
        yield proxy


@pytest.fixture
async def lax(moto: S3Server) -> AsyncIterator[FaultProxy]:
    """A server that checks no signatures, so that a proxy may change what it hears."""
    async with FaultProxy(moto.endpoint) as proxy:
        yield proxy


async def error_of(server: S3Server, endpoint: str | None = None, **members: Any) -> str:
    with pytest.raises(StoreUnavailable) as rejected:
        await S3Store.connect(replace(server.store("x", endpoint), **members), retry_policy=HASTY)
    return rejected.value.message


class TestABucketThatCannotBeUsed:
    """The reason is one sentence, and says what to do."""

    async def test_the_access_key_is_unknown(self, radosgw: S3Server) -> None:
        message = await error_of(radosgw, access_key_id="nobody")
        assert message.startswith("s3://pysync at 127.0.0.1: the access key is not known there: correct ")
        assert "store.accessKeyId or AWS_ACCESS_KEY_ID" in message

    async def test_the_secret_is_wrong(self, radosgw: S3Server) -> None:
        message = await error_of(radosgw, secret_access_key="hush")
        assert "the secret key is not that of the access key" in message
        assert "store.secretAccessKey or AWS_SECRET_ACCESS_KEY" in message
        assert "hush" not in message

    async def test_there_is_no_such_bucket(self, radosgw: S3Server) -> None:
        message = await error_of(radosgw, url="s3://nowhere/x")
        assert (
            message == "s3://nowhere at 127.0.0.1: there is no such bucket: create it, or correct store.url"
        )

    async def test_nobody_listens(self, radosgw: S3Server) -> None:
        message = await error_of(radosgw, endpoint=f"http://127.0.0.1:{free_port()}")
        assert "it cannot be reached: ClientConnectorError" in message

    async def test_there_are_no_credentials(
        self, radosgw: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        without_credentials(monkeypatch, tmp_path)
        message = await error_of(radosgw, access_key_id=None, secret_access_key=None)
        for name in ("store.accessKeyId", "AWS_ACCESS_KEY_ID", "~/.aws", "role"):
            assert name in message

    @pytest.mark.parametrize(
        ("status", "body", "headers"),
        [
            (
                301,
                s3_error("PermanentRedirect"),
                {"x-amz-bucket-region": "eu-west-1", "Location": "http://127.0.0.1:1/pysync"},
            ),
            (400, s3_error("AuthorizationHeaderMalformed", "expecting 'eu-west-1'"), {}),
            (400, s3_error("AuthorizationHeaderMalformed") + b"<Region>eu-west-1</Region>", {}),
        ],
    )
    async def test_it_is_in_another_region(
        self, radosgw: S3Server, proxy: FaultProxy, status: int, body: bytes, headers: dict[str, str]
    ) -> None:
        proxy.respond(status=status, body=body, headers=headers, times=None)
        assert "set store.region to eu-west-1" in await error_of(radosgw, proxy.url)

    @pytest.mark.parametrize(("off_s", "side"), [(-1200, "ahead of"), (1200, "behind")])
    async def test_the_clock_is_wrong(
        self, radosgw: S3Server, proxy: FaultProxy, off_s: int, side: str
    ) -> None:
        date = {"Date": formatdate(wall_clock_ms() / 1000 + off_s, usegmt=True)}
        proxy.respond(status=403, body=s3_error("RequestTimeTooSkewed"), headers=date, times=None)
        credentials_file = await error_of(radosgw, proxy.url)
        assert credentials_file.endswith(f"s {side} the server's: set it")
        assert any(f"clock is {seconds} s" in credentials_file for seconds in range(1190, 1210))

    async def test_too_little_is_allowed(self, radosgw: S3Server, proxy: FaultProxy) -> None:
        proxy.respond("PUT", status=403, body=s3_error("AccessDenied"))
        credentials_file = await error_of(radosgw, proxy.url)
        assert "s3:ListBucket, s3:GetObject, s3:PutObject, s3:DeleteObject" in credentials_file
        proxy.respond("LIST", status=403, body=s3_error("AccessDenied"))
        assert "its keys cannot be listed" in await error_of(radosgw, proxy.url)


class TestCredentials:
    async def test_come_from_the_environment(
        self, radosgw: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        without_credentials(monkeypatch, tmp_path)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", radosgw.access_key_id)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", radosgw.secret_access_key)
        async with opened(radosgw, new_prefix(), access_key_id=None, secret_access_key=None) as store:
            await store.put("a", b"one")
            assert await store.list("", None, 10) == ["a"]

    async def test_come_from_the_shared_files(
        self, radosgw: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        without_credentials(monkeypatch, tmp_path)
        (tmp_path / "credentials").write_text(
            "[default]\n"
            f"aws_access_key_id = {radosgw.access_key_id}\n"
            f"aws_secret_access_key = {radosgw.secret_access_key}\n"
        )
        async with opened(radosgw, new_prefix(), access_key_id=None, secret_access_key=None) as store:
            await store.put("a", b"one")
            assert isinstance(await store.get("a"), StoredObject)

    @pytest.mark.process
    async def test_are_awaited_if_they_are_renewed_late(
        self, radosgw: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        without_credentials(monkeypatch, tmp_path)
        own = {"AccessKeyId": radosgw.access_key_id, "SecretAccessKey": radosgw.secret_access_key}
        credentials_file = tmp_path / "told"
        (tmp_path / "config").write_text(f"[default]\ncredential_process = cat {credentials_file}\n")

        def write_credentials(until_s: float) -> None:
            until = formatdate(wall_clock_ms() / 1000 + until_s, usegmt=True)
            credentials_file.write_text(json.dumps({"Version": 1, **own, "Expiration": until}))

        write_credentials(-1)
        of_a_role = replace(radosgw.store("x"), access_key_id=None, secret_access_key=None)
        with pytest.raises(StoreUnavailable) as rejected:
            await S3Store.connect(of_a_role)
        assert "are still expired" in rejected.value.detail
        write_credentials(60)  # so soon that each request asks for newer ones
        async with opened(radosgw, new_prefix(), access_key_id=None, secret_access_key=None) as store:
            write_credentials(-1)
            with pytest.raises(StoreUnavailable, match=StoreUnavailable.default_message):
                await store.get("a")
            credentials_file.write_text("")
            with pytest.raises(StoreUnavailable, match=StoreUnavailable.default_message):
                await store.get("a")
            write_credentials(3600)
            await store.put("a", b"{}")


class TestConditions:
    async def test_radosgw_takes_etags_without_quotes_and_deletes_whatever_is_there(
        self, radosgw: S3Server
    ) -> None:
        async with opened(radosgw, new_prefix(), shared=True) as store:
            bucket = store.bucket
        assert (bucket.if_none_match, bucket.if_match, bucket.delete_if_match, bucket.quoted_etags) == (
            True,
            True,
            False,
            False,
        )
        assert bucket.url == f"{radosgw.endpoint}/{radosgw.bucket}"
        assert abs(bucket.skew_ms) < 60_000

    async def test_moto_takes_them_with_quotes_and_honours_all(self, moto: S3Server) -> None:
        async with opened(moto, new_prefix(), shared=True) as store:
            bucket = store.bucket
        assert (bucket.if_none_match, bucket.if_match, bucket.delete_if_match, bucket.quoted_etags) == (
            True,
            True,
            True,
            True,
        )

    async def test_the_probe_leaves_nothing_behind_and_cleans_up_after_itself(
        self, radosgw: S3Server, proxy: FaultProxy
    ) -> None:
        prefix = new_prefix()
        for kind in ("PUT", "DELETE", "LIST"):
            for after in range(0, 12, 4):
                proxy.abort(kind, after=after)
                proxy.lose_reply(kind, after=after + 1)
                proxy.throttle(kind, after=after + 2)
        async with opened(radosgw, prefix, proxy.url, shared=True) as store:
            assert store.bucket.is_conditional
        proxy.reset()
        async with another_program(radosgw) as client:
            page = await client.list_objects_v2(Bucket=radosgw.bucket, Prefix=prefix)
        assert page["KeyCount"] == 0

    @pytest.mark.parametrize("header", ["If-None-Match", "If-Match"])
    async def test_a_server_that_ignores_one_cannot_be_shared(
        self, moto: S3Server, lax: FaultProxy, header: str
    ) -> None:
        lax.drop_header(header)
        with pytest.raises(ValueError, match=f"ignores {header}: it cannot be served by more than one"):
            await S3Store.connect(moto.store("x", lax.url), shared=True, retry_policy=HASTY)

    async def test_alone_it_is_served_with_a_warning(
        self, moto: S3Server, lax: FaultProxy, caplog: pytest.LogCaptureFixture
    ) -> None:
        lax.drop_header("If-None-Match")
        lax.drop_header("If-Match")
        async with opened(moto, new_prefix(), lax.url) as store:
            assert [record.levelno for record in caplog.records if "ignores" in record.message] == [
                logging.WARNING
            ]
            for _ in range(2):
                writes = (store.put("a", b"%d" % n, expect=ABSENT) for n in range(16))
                outcomes = await asyncio.gather(*writes, return_exceptions=True)
                assert sum(isinstance(outcome, str) for outcome in outcomes) == 1
                assert sum(isinstance(outcome, EtagMismatch) for outcome in outcomes) == 15
                found = await store.get("a")
                assert isinstance(found, StoredObject)
                with pytest.raises(EtagMismatch):
                    await store.delete("a", Etag("another"))
                await store.write("f", chunks_of(b"file"), "text/plain")
                await store.delete("a", Etag(found.etag))
            assert (await read_file(store, "f"))[1] == b"file"

    async def test_a_signed_condition_cannot_be_lost_on_the_way(
        self, radosgw: S3Server, proxy: FaultProxy
    ) -> None:
        async with opened(radosgw, new_prefix(), proxy.url) as store:
            etag = await store.put("a", b"one")
            newer = await store.put("a", b"two")
            proxy.drop_header("If-Match")
            with pytest.raises(StoreUnavailable):
                await store.put("a", b"three", expect=Etag(etag))
            proxy.reset()
            assert await store.get("a", newer) is NOT_MODIFIED


async def test_a_server_that_ignores_ranges_gets_no_file_mixed_up(moto: S3Server, lax: FaultProxy) -> None:
    async with opened(moto, new_prefix(), lax.url) as store:
        await store.write("f", chunks_of(b"file"), "text/plain")
        lax.drop_header("Range")
        with pytest.raises(StoreUnavailable):
            await store.open("f", 1, 3)


class TestEtags:
    @pytest.mark.parametrize("form", ["{}", '"{}"', 'W/"{}"'])
    async def test_are_taken_in_any_form(self, moto: S3Server, form: str) -> None:
        def rewritten(headers: CIMultiDict[str]) -> None:
            if "ETag" in headers:
                headers["ETag"] = form.format(headers["ETag"].strip('"'))

        async with proxied(moto) as bucket:
            bucket.proxy.rewrite(answered=rewritten)
            etag = await bucket.store.put("a", b"one")
            assert not {'"', "/"} & {*etag}
            assert await bucket.other.get("a", etag) is NOT_MODIFIED
            etag = await bucket.store.put("a", b"two", expect=Etag(etag))
            assert await bucket.store.get("a", etag) is NOT_MODIFIED
            assert [listed.etag async for listed in bucket.store.walk("")] == [etag]


async def test_slightly_wrong_clock_is_reported(
    radosgw: S3Server, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    def late(headers: CIMultiDict[str]) -> None:
        headers["Date"] = formatdate(wall_clock_ms() / 1000 + 90, usegmt=True)

    proxy.rewrite(answered=late)
    async with opened(radosgw, new_prefix(), proxy.url) as store:
        assert -95_000 < store.bucket.skew_ms < -85_000
    assert "s behind the server's: set it" in caplog.text


async def test_tries_are_counted_and_end_in_time() -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    attempts = RetryState(RetryPolicy(random=lambda: 1.0, clock_s=lambda: 0.0, sleep=pause))
    assert [await attempts.next_attempt() for _ in range(6)] == [True, True, True, True, False, False]
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8])
    spread = RetryState(RetryPolicy(random=lambda: 0.25, clock_s=lambda: 0.0, sleep=pause))
    assert await spread.next_attempt()
    assert pauses[-1] == pytest.approx(0.025)
    clock = iter((0.0, 5.0, 9.95))
    late = RetryState(RetryPolicy(random=lambda: 1.0, clock_s=lambda: next(clock), sleep=no_pause))
    assert [await late.next_attempt() for _ in range(2)] == [True, False]
