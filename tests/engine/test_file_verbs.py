"""The verbs of files, on stores that may fail (docs/reference/protocol.md#files)."""

import asyncio
from collections.abc import AsyncIterator
from hashlib import sha256

import pytest
from contracts.files import chunks_of, read_file
from support.faulty_coordinator import Scene, made_scene
from support.faulty_store import FaultyStore

from pysync.engine.changes import DocumentRef, WriteContext, parse_change
from pysync.engine.files import Files
from pysync.engine.outbox import outbox_of
from pysync.errors import StoreUnavailable
from pysync.model import WriteResult

CONTEXT = WriteContext(DocumentRef("photos", {"id": "a"}, "acme"), "somebody")


@pytest.fixture
def scene() -> Scene:
    return made_scene()


@pytest.fixture
def files(scene: Scene) -> Files:
    return Files(scene.store, scene.clock, scene.outbox)


async def push(files: Files, content: bytes = b"one") -> WriteResult:
    return await files.push("photos/a", chunks_of(content), "image/png", CONTEXT)


async def test_a_push_is_answered_and_announced_as_one(scene: Scene, files: Files) -> None:
    before_ms = scene.clock.now_ms

    async def slow() -> AsyncIterator[bytes]:
        yield b"o"
        scene.clock.now_ms += 5_000
        yield b"ne"

    written = await files.push("photos/a", slow(), "image/png", CONTEXT)
    file, content = await read_file(scene.kept, "photos/a")
    assert (content, file.content_type, file.sha256) == (b"one", "image/png", written.hash)
    assert written.timestamp_ms == before_ms
    found = await scene.coordinator.read("", 10)
    assert found is not None
    [(_, announced)] = found
    change = parse_change(announced)
    assert (change.ref, change.identity) == CONTEXT[:2]
    assert change[1:3] == (written.hash, written.timestamp_ms)


async def test_a_push_that_fails_is_neither_stored_nor_announced(scene: Scene, files: Files) -> None:
    async def broken_body() -> AsyncIterator[bytes]:
        yield b"t"
        raise TimeoutError

    await push(files)
    with pytest.raises(TimeoutError):
        await files.push("photos/a", broken_body(), "image/png", CONTEXT)
    assert (await read_file(scene.kept, "photos/a"))[1] == b"one"
    assert len(await scene.announced()) == 1
    assert await scene.coordinator.prepared(10) == []


async def test_a_file_is_gone_when_its_time_is_over(scene: Scene, files: Files) -> None:
    await push(files)
    for passed_ms, is_there in ((0, True), (1_000, True), (1, False)):
        scene.clock.now_ms += passed_ms
        stat, file = await files.stat("photos/a", 1_000), await files.open("photos/a", ttl_ms=1_000)
        assert (stat is not None, file is not None) == (is_there, is_there)
    assert await files.stat("photos/a") is not None
    assert await files.open("photos/a") is not None
    await push(files, b"two")
    stat = await files.stat("photos/a", 1_000)
    assert stat is not None
    assert (stat.size, stat.modified_ms) == (3, scene.clock.now_ms)


async def test_missing_file_is_none(scene: Scene, files: Files) -> None:
    await scene.kept.put("photos/b", b"{}")
    for key in ("photos/a", "photos/b"):
        assert await files.stat(key) is None
        assert await files.open(key) is None


async def test_a_part_of_a_file_says_of_what(files: Files) -> None:
    await push(files, b"0123456789")
    for start, end, part in ((2, 5, b"234"), (-3, None, b"789"), (8, 100, b"89"), (20, None, b"")):
        file = await files.open("photos/a", start, end)
        assert file is not None
        assert b"".join([chunk async for chunk in file.chunks]) == part
        assert (file.size, file.end - file.start) == (10, len(part))


class TestFaultyStore:
    """Its faults, as files meet them."""

    async def test_a_write_that_fails_has_taken_all_and_kept_nothing(self, scene: Scene) -> None:
        taken, announced = [], []

        async def chunks() -> AsyncIterator[bytes]:
            for chunk in (b"o", b"ne"):
                taken.append(chunk)
                yield chunk

        async def received(hash_: str) -> None:
            announced.append(hash_)

        scene.store.fail("write")
        with pytest.raises(StoreUnavailable):
            await scene.store.write("a", chunks(), "text/plain", received)
        assert (taken, len(announced)) == ([b"o", b"ne"], 1)
        assert await scene.kept.open("a") is None

    async def test_each_verb_of_files_fails_and_loses_its_reply(self, scene: Scene) -> None:
        store = scene.store
        for fault in (store.fail, store.lose_reply):
            fault("stat", "open", "write", "merge")
            for call in (
                store.stat("f/a"),
                store.open("f/a"),
                store.write("f/a", chunks_of(b"one"), "text/plain"),
                store.merge("f/b", chunks_of(b"two"), "text/plain", {"f/a": sha256(b"one").hexdigest()}),
            ):
                with pytest.raises(StoreUnavailable):
                    await call
        assert await scene.kept.list("f", None, 10) == ["b"], "done, and nobody was told"

    async def test_a_crash_at_a_write_leaves_it_undone_or_done(self, scene: Scene) -> None:
        for done in (False, True):
            crashed = FaultyStore(scene.kept)
            crashed.crash(0, done=done)
            outbox = outbox_of(crashed, scene.coordinator)
            for content in (b"one", b"two"):
                with pytest.raises(StoreUnavailable):
                    await push(Files(crashed, scene.clock, outbox), content)
            assert (await scene.kept.stat("photos/a") is not None) is done
        assert (await read_file(scene.kept, "photos/a"))[1] == b"one"

    async def test_a_delayed_write_comes_to_light_when_it_is_let(self, scene: Scene, files: Files) -> None:
        release = asyncio.Event()
        arrived = scene.store.delay("write", release)
        pushing = asyncio.ensure_future(push(files))
        await arrived.wait()
        assert await files.stat("photos/a") is None
        release.set()
        assert (await pushing).hash == (await read_file(scene.kept, "photos/a"))[0].sha256
