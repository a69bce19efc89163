"""The contract of a `Store` for files, as tests."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import pytest

from pysync.errors import StoreUnavailable
from pysync.store import Etag, EtagMismatch, OpenFile, Store


async def chunks_of(*chunks: bytes) -> AsyncIterator[bytes]:
    """Yield the chunks, as `Store.write` takes them."""
    for chunk in chunks:
        yield chunk


async def _broken_chunks() -> AsyncIterator[bytes]:
    """Yield a chunk, and lose the connection."""
    yield bytes(300_000)
    raise ConnectionResetError


async def read_file(store: Store, key: str, start: int = 0, end: int | None = None) -> tuple[OpenFile, bytes]:
    """Return the file at `key`, which must exist, and the bytes of the range."""
    file = await store.open(key, start, end)
    assert file is not None
    return file, b"".join([chunk async for chunk in file.chunks])


class FileContract:
    """What `StoreContract` promises of files. The subclass provides the fixture `store`."""

    async def test_a_file_comes_back_whole_with_its_hash(self, store: Store) -> None:
        body = bytes(range(256)) * 5000
        chunks = [body[at : at + 100_000] for at in range(0, len(body), 100_000)]
        sha256 = await store.write("files/a.parquet", chunks_of(*chunks), "application/x-test")
        assert sha256 == hashlib.sha256(body).hexdigest()
        file, content = await read_file(store, "files/a.parquet")
        assert content == body
        assert (file.size, file.sha256, file.content_type) == (len(body), sha256, "application/x-test")

    async def test_an_empty_file_is_a_file(self, store: Store) -> None:
        await store.write("empty", chunks_of(), "text/plain")
        for start, end in ((0, None), (-5, None), (0, 1), (7, None)):
            file, content = await read_file(store, "empty", start, end)
            assert (file.size, file.start, file.end, content) == (0, 0, 0, b"")

    async def test_a_range_of_a_file_is_exact(self, store: Store) -> None:
        body = bytes(range(256)) * 3000
        await store.write("a", chunks_of(body), "text/plain")
        inside = [(0, 1), (5, 300_001), (262_144, 524_288), (767_999, None), (-1, None), (7, 7)]
        outside = [(768_000, None), (9, 10**9), (-300_000, 10**9), (-(10**9), 7)]
        for start, end in inside + outside:
            file, content = await read_file(store, "a", start, end)
            assert content == body[start:end]
            assert file.size == len(body)
            assert body[file.start : file.end] == content

    async def test_a_stat_returns_what_opening_would(self, store: Store) -> None:
        for body in (b"one", b"another"):
            await store.write("f/a", chunks_of(body), "application/x-test")
            file, _ = await read_file(store, "f/a")
            known = file.stat
            assert await store.stat("f/a") == known
            assert (known.size, known.content_type) == (len(body), "application/x-test")
        await store.put("document", b"{}")
        for key in ("document", "f", "f/b", "f/a/b"):
            assert await store.stat(key) is None
        await store.delete("f/a")
        assert await store.stat("f/a") is None

    async def test_a_rejected_file_leaves_the_old_one(self, store: Store) -> None:
        await store.write("a", chunks_of(b"old"), "text/plain")
        received = []

        async def reject(sha256: str) -> None:
            received.append(sha256)
            assert await store.open("b") is None
            assert (await read_file(store, "a"))[1] == b"old"
            raise LookupError

        for key in ("a", "b"):
            with pytest.raises(LookupError):
                await store.write(key, chunks_of(b"ne", b"w"), "text/plain", reject)
        assert received == [hashlib.sha256(b"new").hexdigest()] * 2
        assert (await read_file(store, "a"))[1] == b"old"
        assert await store.open("b") is None
        assert await store.list("", None, 10) == ["a"]

    async def test_a_file_read_while_it_is_replaced_is_one_whole_version(self, store: Store) -> None:
        bodies = [b"%d" % n * 70_000 for n in range(10)]
        await store.write("a", chunks_of(bodies[0]), "text/plain")

        async def replace(lane: int) -> None:
            for body in bodies[lane::2]:
                while True:  # a store that cannot know the outcome of a race says so, and the client repeats
                    with suppress(StoreUnavailable):
                        await store.write("a", chunks_of(body[:9], body[9:]), "text/plain")
                        break

        writing = [asyncio.ensure_future(replace(lane)) for lane in range(2)]
        while not all(writer.done() for writer in writing):
            file, content = await read_file(store, "a")
            assert content in bodies
            assert file.sha256 == hashlib.sha256(content).hexdigest()
            await asyncio.sleep(0)
        await asyncio.gather(*writing)
        assert (await read_file(store, "a"))[1] in bodies[8:]

    async def test_a_failing_upload_leaves_the_old_file(self, store: Store) -> None:
        await store.write("a", chunks_of(b"old"), "text/plain")
        for key in ("a", "b"):
            with pytest.raises(ConnectionResetError):
                await store.write(key, _broken_chunks(), "text/plain")
        assert (await read_file(store, "a"))[1] == b"old"
        assert await store.open("b") is None
        assert await store.list("", None, 10) == ["a"]

    async def test_an_opened_file_is_not_changed_by_a_later_write(self, store: Store) -> None:
        await store.write("a", chunks_of(b"old"), "text/plain")
        file = await store.open("a")
        assert file is not None
        await store.write("a", chunks_of(b"newer"), "text/plain")
        assert b"".join([chunk async for chunk in file.chunks]) == b"old"
        assert (await read_file(store, "a"))[1] == b"newer"

    async def test_a_deleted_file_is_gone(self, store: Store) -> None:
        await store.write("f/a", chunks_of(b"file"), "text/plain")
        await store.delete("f/a")
        assert await store.open("f/a") is None
        assert await store.list("f", None, 10) == []
        await store.write("f", chunks_of(b"file"), "text/plain")
        assert (await read_file(store, "f"))[1] == b"file"

    @pytest.mark.parametrize("size", [0, 3_000_000, 6_000_000, 9_000_000])
    async def test_a_delete_of_a_file_spares_a_later_one_with_the_same_bytes(
        self, store: Store, size: int
    ) -> None:
        """As an upload that comes while a file expires."""
        body, etags = bytes(size), list[str]()
        for _ in range(3):
            await store.write("a", chunks_of(body), "text/plain")
            stat = await store.stat("a")
            assert stat is not None
            if etags:
                with pytest.raises(EtagMismatch):
                    await store.delete("a", Etag(etags[-1]))
                assert (await read_file(store, "a"))[1] == body
            etags.append(stat.etag)
        await store.delete("a", Etag(etags[-1]))
        assert await store.stat("a") is None

    async def test_a_merged_file_takes_the_place_of_others(self, store: Store) -> None:
        merged = {f"m/{n}": await store.write(f"m/{n}", chunks_of(b"%d" % n), "text/plain") for n in range(5)}
        await store.write("m/9", chunks_of(b"other"), "text/plain")
        await store.put("m/document", b"{}")
        sha256 = await store.merge("m/4-", chunks_of(b"01", b"234"), "application/x-test", merged)
        file, content = await read_file(store, "m/4-")
        assert (content, file.sha256, file.content_type) == (b"01234", sha256, "application/x-test")
        assert await store.list("m", None, 100) == ["4-", "9", "document"]
        assert [await store.stat(key) for key in merged] == [None] * 5
        assert (await read_file(store, "m/9"))[1] == b"other"
        again = {"m/4-": sha256, "m/9": hashlib.sha256(b"other").hexdigest()}
        await store.merge("m/8", chunks_of(b"01234", b"other"), "text/plain", again)
        await store.recover_merges()
        assert {listed.key async for listed in store.walk("")} == {"m/8", "m/document"}
        assert (await read_file(store, "m/8"))[1] == b"01234other"

    async def test_a_file_that_is_sound_is_verified_as_it_is_read(self, store: Store) -> None:
        read: list[int] = []

        async def pace(size: int) -> None:
            read.append(size)

        await store.put("document", b"{}")
        assert await store.verify("document", pace) is None
        assert await store.verify("nothing", pace) is None
        assert read == []
        await store.write("f/a", chunks_of(bytes(600_000)), "text/plain")
        assert await store.verify("f/a", pace) == await store.stat("f/a")
        assert sum(read) == 600_000
        await store.write("f/a", chunks_of(b"other"), "text/plain")
        assert await store.verify("f/a") == await store.stat("f/a")

    async def test_only_what_was_read_is_merged_away(self, store: Store) -> None:
        merged = {key: await store.write(key, chunks_of(b"1"), "text/plain") for key in ("m/1", "m/2")}

        async def chunks_after(change: Callable[[], Awaitable[object]]) -> AsyncIterator[bytes]:
            await change()
            yield b"11"

        rewriting = chunks_after(lambda: store.write("m/2", chunks_of(b"newer"), "text/plain"))
        deleting = chunks_after(lambda: store.delete("m/2"))
        for chunks in (rewriting, chunks_of(b"11"), deleting, chunks_of(b"11")):
            with pytest.raises(EtagMismatch):
                await store.merge("m/1-", chunks, "text/plain", merged)
        await store.write("m/2", chunks_of(b"1"), "text/plain")
        await store.put("m/1-", b"{}")
        with pytest.raises(EtagMismatch):
            await store.merge("m/1-", chunks_of(b"11"), "text/plain", merged)
        assert {listed.key async for listed in store.walk("")} == {"m/1", "m/1-", "m/2"}

    async def test_a_failing_merge_leaves_everything(self, store: Store) -> None:
        merged = {key: await store.write(key, chunks_of(b"1"), "text/plain") for key in ("m/1", "m/2")}
        with pytest.raises(ConnectionResetError):
            await store.merge("m/1-", _broken_chunks(), "text/plain", merged)
        for key, others in (("n/1", merged), ("m/1", merged), ("x", {"y": "z"}), ("m/1-", {})):
            with pytest.raises(ValueError, match="merged into a new one beside them"):
                await store.merge(key, chunks_of(b"11"), "text/plain", others)
        assert {listed.key async for listed in store.walk("")} == {"m/1", "m/2"}
