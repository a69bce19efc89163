"""Files in a bucket: when they come to light, and what is left of them where something fails."""

import asyncio
import hashlib
import random
import sys
import tempfile
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from components import S3Server
from contracts.files import chunks_of, read_file
from support.python_process import WITH_HELPERS
from support.s3_stores import Proxied, another_program, proxied

from pysync.errors import StoreUnavailable
from pysync.store import FileStat, Store

KB, MB = 1024, 1024 * 1024


@pytest.fixture
async def bucket(radosgw: S3Server) -> AsyncIterator[Proxied]:
    async with proxied(radosgw) as found:
        yield found


@pytest.fixture
async def client(radosgw: S3Server) -> AsyncIterator[Any]:
    """Another program with access to the bucket."""
    async with another_program(radosgw) as client:
        yield client


async def uploads(client: Any, server: S3Server, bucket: Proxied) -> list[Any]:
    """What has been begun in parts, and neither completed nor aborted."""
    found = await client.list_multipart_uploads(Bucket=server.bucket, Prefix=f"{bucket.prefix}/")
    return list(found.get("Uploads", ()))


async def content_of(store: Store, key: str) -> bytes:
    return (await read_file(store, key))[1]


class TestStat:
    async def test_it_is_one_request_without_a_body(self, bucket: Proxied) -> None:
        sha256 = await bucket.other.write("a", chunks_of(bytes(MB)), "application/x-test")
        file, _ = await read_file(bucket.other, "a")
        expected = FileStat(MB, sha256, "application/x-test", file.modified_ms, etag=file.etag)
        assert await bucket.store.stat("a") == expected
        assert bucket.proxy.calls == {"HEAD": 1}

    async def test_of_an_object_that_is_no_file_is_none(self, bucket: Proxied) -> None:
        etag = await bucket.other.put("document", b"{}")
        assert await bucket.store.stat("document") is None
        assert await bucket.store.stat("nothing") is None
        await bucket.other.delete("document")
        assert etag
        assert await bucket.store.stat("document") is None

    async def test_is_retried_if_that_can_help(self, bucket: Proxied) -> None:
        await bucket.other.write("a", chunks_of(b"one"), "text/plain")
        for fault in (bucket.proxy.throttle, bucket.proxy.abort, bucket.proxy.lose_reply):
            fault("HEAD")
            assert await bucket.store.stat("a") is not None
        bucket.proxy.respond("HEAD", status=403)
        with pytest.raises(StoreUnavailable):
            await bucket.store.stat("a")


class TestRanges:
    async def test_one_from_the_end_is_one_request_and_goes_on_after_a_break(self, bucket: Proxied) -> None:
        body = random.Random(2).randbytes(MB)
        await bucket.other.write("a", chunks_of(body), "text/plain")
        file, content = await read_file(bucket.store, "a", -1_000)
        assert (file.start, file.end, content) == (MB - 1_000, MB, body[-1_000:])
        assert (bucket.proxy.calls, bucket.proxy.statuses) == ({"GET": 1}, {206: 1})
        bucket.proxy.truncate("GET", to_bytes=300_000, times=2)
        assert (await read_file(bucket.store, "a", -900_000))[1] == body[-900_000:]
        assert bucket.proxy.calls["GET"] == 4

    @pytest.mark.parametrize("size", [0, 10])
    async def test_one_beyond_the_file_is_what_there_is_of_it(self, bucket: Proxied, size: int) -> None:
        body = bytes(range(size))
        await bucket.other.write("a", chunks_of(body), "text/plain")
        for start, end in ((-100, None), (size, None), (size + 5, size + 9), (0, 100), (5, 100)):
            file, content = await read_file(bucket.store, "a", start, end)
            assert content == body[start:end], (start, end)
            assert (file.size, file.end - file.start) == (size, len(content))


@pytest.mark.parametrize("size", [0, 9, 3 * MB])
class TestReceived:
    """What is told of a file that has come in and that nobody sees yet."""

    async def test_is_reported_before_the_file_is_seen(self, bucket: Proxied, size: int) -> None:
        await bucket.other.write("a", chunks_of(b"old"), "text/plain")
        reported = []

        async def received(sha256: str) -> None:
            reported.append(sha256)
            assert await content_of(bucket.other, "a") == b"old"

        sha256 = await bucket.store.write("a", chunks_of(bytes(size)), "text/plain", received)
        assert reported == [sha256] == [hashlib.sha256(bytes(size)).hexdigest()]
        assert await content_of(bucket.other, "a") == bytes(size)

    async def test_rejected_upload_leaves_no_trace(
        self, bucket: Proxied, client: Any, radosgw: S3Server, size: int
    ) -> None:
        async def reject(sha256: str) -> None:
            raise PermissionError

        await bucket.other.write("a", chunks_of(b"old"), "text/plain")
        for key in ("a", "b"):
            with pytest.raises(PermissionError):
                await bucket.store.write(key, chunks_of(bytes(size)), "text/plain", reject)
        assert await content_of(bucket.other, "a") == b"old"
        assert await bucket.other.list("", None, 10) == ["a"]
        assert await uploads(client, radosgw, bucket) == []

    async def test_only_one_request_follows_it_that_could_fail_a_large_file(
        self, bucket: Proxied, size: int
    ) -> None:
        """What is intended for long is announced though nothing was written."""
        before = 0

        async def received(sha256: str) -> None:
            nonlocal before
            before = bucket.proxy.calls.total()

        await bucket.store.write("a", chunks_of(bytes(size)), "text/plain", received)
        assert bucket.proxy.calls.total() - before == (1 if size > 2 * MB else 2)


class TestASmallFile:
    """One that is put whole."""

    @pytest.mark.parametrize(
        ("fault", "met"), [("abort", "abort"), ("lose_reply", "lose_reply"), ("throttle", "throttle")]
    )
    async def test_is_stored_though_the_network_loses_its_put(
        self, bucket: Proxied, fault: str, met: str
    ) -> None:
        for n in range(3):
            getattr(bucket.proxy, fault)("PUT")
            await bucket.store.write("a", chunks_of(b"%d" % n), "text/plain")
            assert await content_of(bucket.other, "a") == b"%d" % n
        assert bucket.proxy.met == {met: 3}

    async def test_does_not_come_back_over_a_later_write(self, bucket: Proxied) -> None:
        """Its first attempt was stored and its answer lost; another file took its place before it was tried
        again."""
        await bucket.other.write("a", chunks_of(b"one"), "text/plain")
        bucket.proxy.lose_reply("PUT")
        go_on = asyncio.Event()
        second_attempt = bucket.proxy.delay(until=go_on, when=lambda _: bucket.proxy.met["lose_reply"] > 0)
        writing = asyncio.ensure_future(bucket.store.write("a", chunks_of(b"two"), "text/plain"))
        await second_attempt.wait()
        assert await content_of(bucket.other, "a") == b"two"
        await bucket.other.write("a", chunks_of(b"three"), "text/plain")
        go_on.set()
        await writing
        assert await content_of(bucket.other, "a") == b"three"

    async def test_is_written_over_any_earlier_write(self, bucket: Proxied, client: Any) -> None:
        await bucket.other.put("a", b"{}")
        held = asyncio.Event()
        arrived = bucket.proxy.delay("PUT", until=held)
        writing = asyncio.ensure_future(bucket.store.write("a", chunks_of(b"last"), "text/plain"))
        await arrived.wait()
        for content in (b"file", bytes(3 * MB)):
            await bucket.other.write("a", chunks_of(content), "text/plain")
        held.set()
        await writing
        assert await content_of(bucket.other, "a") == b"last"

    async def test_of_many_at_once_one_stays_and_none_fails(self, bucket: Proxied) -> None:
        stores = [bucket.store, bucket.other]
        contents = [b"%d" % n for n in range(12)]
        await asyncio.gather(
            *(stores[n % 2].write("a", chunks_of(body), "text/plain") for n, body in enumerate(contents))
        )
        assert await content_of(bucket.store, "a") in contents


class TestALargeFile:
    """One that goes in parts."""

    async def test_of_a_cancelled_upload_leaves_no_parts(
        self, bucket: Proxied, client: Any, radosgw: S3Server
    ) -> None:
        arrived = bucket.proxy.delay("PUT partNumber", until=asyncio.Event())
        writing = asyncio.ensure_future(bucket.store.write("a", chunks_of(bytes(9 * MB)), "text/plain"))
        await arrived.wait()
        assert len(await uploads(client, radosgw, bucket)) == 1
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert await uploads(client, radosgw, bucket) == []
        assert await bucket.other.stat("a") is None

    @pytest.mark.process
    async def test_of_a_killed_writer_is_not_seen(self, radosgw: S3Server, bucket: Proxied) -> None:
        await bucket.other.write("a", chunks_of(b"old"), "text/plain")
        completes = bucket.proxy.delay("POST uploadId", until=asyncio.Event())
        url = f"s3://{radosgw.bucket}/{bucket.prefix}?endpoint={bucket.proxy.url}&path_style=true"
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            WRITE,
            url,
            radosgw.access_key_id,
            radosgw.secret_access_key,
            env=WITH_HELPERS,
        )
        await completes.wait()
        process.kill()
        await process.wait()
        assert await content_of(bucket.other, "a") == b"old"
        assert await bucket.other.list("", None, 10) == ["a"]

    async def test_is_never_held_in_memory(self, bucket: Proxied) -> None:
        size, block = 64 * MB, random.Random(3).randbytes(256 * KB)

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(size // len(block)):
                yield block

        tracemalloc.start()
        try:
            sha256 = await bucket.other.write("a", chunks(), "text/plain")
            digest = hashlib.sha256()
            file = await bucket.other.open("a")
            assert file is not None
            async for chunk in file.chunks:
                digest.update(chunk)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert digest.hexdigest() == sha256
        assert peak < 16 * MB


WRITE = """
import asyncio, sys
from pysync.config import StoreConfig
from pysync.store import open_store
from contracts.files import chunks_of

async def main(url, key, secret):
    store = await open_store(StoreConfig(url=url, access_key_id=key, secret_access_key=secret))
    await store.write("a", chunks_of(bytes(9_000_000)), "text/plain")

asyncio.run(main(*sys.argv[1:]))
"""


async def test_an_upload_that_finds_no_room_to_be_spooled_is_rejected(
    bucket: Proxied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(StoreUnavailable):
        await bucket.store.write("a", chunks_of(b"one"), "text/plain")
    assert await bucket.store.stat("a") is None
