"""The outbox and files: whatever fails between a file and its announcement, it is announced."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from contracts.files import chunks_of, read_file
from hypothesis import given, settings
from hypothesis import strategies as st
from support.depth import depth
from support.faulty_coordinator import Scene, announced_despite_faults, made_scene
from support.faulty_store import FaultyStore

from pysync.changelog import Change
from pysync.engine.changes import DocumentRef, WriteContext
from pysync.engine.idempotency import SETTLED_MS
from pysync.engine.outbox import EARLY_RECOVERY_MS, Outbox, outbox_of
from pysync.errors import CoordinatorUnavailable, KeyConflict, StoreUnavailable
from pysync.store import OnReceived
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

Written = Coroutine[Any, Any, str]

CONTEXT = WriteContext(DocumentRef("files", {"id": "a"}), "somebody")


@pytest.fixture
def scene() -> Scene:
    return made_scene()


def hash_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def change_of(sha256: str) -> list[Change]:
    return [CONTEXT.change(sha256, 1)]


def announced_text(content: bytes) -> str:
    return change_of(hash_of(content))[0].text.decode()


async def write(outbox: Outbox, content: bytes, key: str = "a") -> str:
    return await outbox.write(key, chunks_of(content[:1], content[1:]), "text/plain", change_of)


async def test_a_file_is_announced_once_and_leaves_no_intent(scene: Scene) -> None:
    assert await write(scene.outbox, b"one") == hash_of(b"one")
    assert (await read_file(scene.kept, "a"))[1] == b"one"
    assert await scene.announced() == [announced_text(b"one")]
    assert await scene.coordinator.prepared(10) == []
    await scene.recover()
    assert len(await scene.announced()) == 1


async def test_nothing_is_intended_before_all_has_come_in(scene: Scene) -> None:
    """However long an upload takes, its intent is young when it is made visible."""

    async def slow() -> AsyncIterator[bytes]:
        for chunk in (b"o", b"ne"):
            yield chunk
            scene.clock.now_ms += SETTLED_MS
            assert await scene.outbox.recover() == 0
            assert await scene.coordinator.prepared(10) == []

    scene.coordinator.fail("announce")
    await scene.outbox.write("a", slow(), "text/plain", change_of)
    assert await scene.announced() == []
    await outbox_of(scene.kept, scene.coordinator).recover(early=True)
    assert await scene.announced() == [], "it is young"
    await scene.recover()
    assert await scene.announced() == [announced_text(b"one")]


@pytest.mark.parametrize("error", [ConnectionResetError, asyncio.CancelledError])
async def test_an_upload_that_breaks_off_is_neither_written_nor_announced(
    scene: Scene, error: type[BaseException]
) -> None:
    async def broken_body() -> AsyncIterator[bytes]:
        yield b"o"
        raise error

    with pytest.raises(error):
        await scene.outbox.write("a", broken_body(), "text/plain", change_of)
    assert await scene.coordinator.prepared(10) == []
    assert await scene.kept.open("a") is None
    await write(scene.outbox, b"two")
    assert await scene.announced() == [announced_text(b"two")]


async def test_a_file_that_cannot_be_intended_is_not_written(scene: Scene) -> None:
    for verb in ("intend", "intents"):
        for done in (False, True):
            scene.coordinator.fail(verb, done=done)
            with pytest.raises(CoordinatorUnavailable):
                await write(scene.outbox, b"one")
    assert await scene.kept.open("a") is None


async def test_file_without_a_location_is_aborted(tmp_path: Path, scene: Scene) -> None:
    store = await LocalStore.open_folder(tmp_path)
    await store.write("a", chunks_of(b"one"), "text/plain")
    outbox = outbox_of(FaultyStore(store), scene.coordinator)  # it shows no log of its own
    with pytest.raises(KeyConflict):
        await write(outbox, b"two", "a/b")
    assert await scene.coordinator.prepared(10) == []
    await scene.recover()
    assert await scene.announced() == []
    await store.close()


async def test_a_file_whose_reply_was_lost_is_announced(scene: Scene) -> None:
    scene.store.lose_reply("write")
    with pytest.raises(StoreUnavailable):
        await write(scene.outbox, b"one")
    assert (await read_file(scene.kept, "a"))[1] == b"one"
    await scene.recover()
    assert await scene.announced() == [announced_text(b"one")]


async def test_failed_file_announcement_is_made_by_the_next_write(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.coordinator.fail("announce")
    await write(scene.outbox, b"one")
    assert "failed to announce a stored write, will retry" in caplog.text
    await write(scene.outbox, b"two", "b")
    assert await scene.announced() == [announced_text(b"one"), announced_text(b"two")]


class Traced(MemoryStore):
    """Remembers each file that came to light; waits for `hold` then, where there is one."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.applied: list[str] = []
        self.hold: asyncio.Event | None = None

    async def write(
        self, key: str, chunks: AsyncIterable[bytes], content_type: str, received: OnReceived | None = None
    ) -> str:
        sha256 = await super().write(key, chunks, content_type, received)
        self.applied.append(sha256)
        hold, self.hold = self.hold, None
        if hold is not None:
            await hold.wait()
        return sha256


async def test_a_file_that_overtakes_another_of_its_key_is_announced_after_it(scene: Scene) -> None:
    store = Traced(scene.clock)
    hold = store.hold = asyncio.Event()
    outbox = outbox_of(store, scene.coordinator)
    first = asyncio.ensure_future(write(outbox, b"one"))
    while not store.applied:
        await asyncio.sleep(0)
    second = asyncio.ensure_future(write(outbox, b"two"))
    await write(outbox, b"other", "b")
    assert store.applied == [hash_of(b"one"), hash_of(b"other")]
    hold.set()
    await asyncio.gather(first, second)
    own = [text for text in await scene.announced() if text != announced_text(b"other")]
    assert list(dict.fromkeys(own)) == [announced_text(b"one"), announced_text(b"two")]


async def test_next_write_of_a_key_first_announces_leftovers_of_another_node(scene: Scene) -> None:
    for content in (b"one", b"two"):
        scene.coordinator.fail("announce")
        await write(outbox_of(scene.kept, scene.coordinator), content)
    assert await scene.announced() == []
    await write(scene.outbox, b"three")
    assert await scene.announced() == [
        announced_text(b"one"),
        announced_text(b"two"),
        announced_text(b"three"),
    ]
    assert len(await scene.coordinator.prepared(10)) == 2, "they may be of writers who are still at it"
    await scene.recover()


async def test_a_write_announces_none_of_another_file(scene: Scene) -> None:
    scene.coordinator.fail("announce")
    await write(outbox_of(scene.kept, scene.coordinator), b"one")
    other = DocumentRef("files", {"id": "b"}).change(hash_of(b"two"), 1)
    await scene.outbox.write("b", chunks_of(b"two"), "text/plain", lambda _: [other])
    assert await scene.announced() == [other.text.decode()]


CRASHES = ["chunks", "intend", "intended", "write", "stored", "announce", "announced"]


@pytest.mark.parametrize("crash", CRASHES)
@pytest.mark.parametrize("early", [True, False])
async def test_a_crash_at_any_step_loses_no_announcement_of_a_file(
    scene: Scene, crash: str, early: bool
) -> None:
    """A process that is gone does nothing more: neither store nor coordinator hear of it."""

    async def chunks() -> AsyncIterator[bytes]:
        yield b"one"
        if crash == "chunks":
            scene.coordinator.crash()
            raise ConnectionResetError

    if crash.startswith("inten"):
        scene.coordinator.fail("intend", done=crash == "intended")
    elif crash in ("write", "stored"):
        scene.store.crash(0, done=crash == "stored")
        scene.coordinator.fail("announce")
    else:
        scene.coordinator.fail("announce", done=crash == "announced")
    with contextlib.suppress(StoreUnavailable, CoordinatorUnavailable, ConnectionResetError):
        await scene.outbox.write("a", chunks(), "text/plain", change_of)
    scene.coordinator.restart()
    scene.clock.now_ms += EARLY_RECOVERY_MS if early else SETTLED_MS
    await outbox_of(scene.kept, scene.coordinator).recover(early=early)
    if await scene.kept.open("a") is not None:
        assert crash in ("stored", "announce", "announced")
        assert announced_text(b"one") in await scene.announced()
    elif crash in ("chunks", "intend"):
        assert await scene.announced() == []
    await scene.recover()


@settings(max_examples=depth(20, 240), deadline=None)
@given(st.integers(0, 2**32))
async def test_whatever_fails_every_file_that_came_to_light_is_announced_in_order(seed: int) -> None:
    clock = FakeClock()
    kept = Traced(clock)

    def write_all(chosen: Random, nodes: Sequence[Outbox], contents: Sequence[bytes]) -> list[Written]:
        node = chosen.choice(nodes)  # on two nodes at once nobody could tell their order
        return [write(node, content) for content in contents]

    announced = await announced_despite_faults(
        seed, kept, clock, "write", ["intend", "announce", "intents"], write_all
    )
    assert [hash_ for hash_ in announced if hash_ in kept.applied] == kept.applied
