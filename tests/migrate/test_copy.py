"""What one store holds, in another: nothing lost, nothing changed, nothing taken that does not verify."""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from dataclasses import replace as replace_members
from pathlib import Path

import pytest
import pytest_asyncio
from contracts.files import chunks_of, read_file
from support.append_log_nodes import Node, keys_below, numbered
from support.clients import ISSUER
from support.faulty_store import FaultyStore
from support.store_samples import (
    DOCUMENTS,
    ELEMENTS,
    LOG,
    REVOCATIONS,
    UNREAD,
    contents,
    copy,
    document,
    fill,
    flipped,
    log_objects,
    put_all,
    replace,
)

from pysync.auth import issuing
from pysync.changelog import Change, ChangeLog
from pysync.coordinator.memory import MemoryCoordinator
from pysync.errors import StoreUnavailable
from pysync.migrate import Copier, CopyReport
from pysync.protocol import JSON_TYPE
from pysync.store import (
    ANY,
    NotModified,
    OpenFile,
    Precondition,
    Store,
    StoredObject,
)
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock


@pytest_asyncio.fixture(params=["memory to file", "file to memory"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Store, Store]]:
    """Two empty stores, to copy from and to."""
    pair: list[Store] = [MemoryStore(), await LocalStore.open_folder(tmp_path / "data")]
    if request.param == "file to memory":
        pair.reverse()
    yield pair[0], pair[1]
    for store in pair:
        await store.close()


@pytest.fixture
def source(stores: tuple[Store, Store]) -> Store:
    return stores[0]


@pytest.fixture
def target(stores: tuple[Store, Store]) -> Store:
    return stores[1]


async def test_everything_arrives_as_it_was_and_once(source: Store, target: Store) -> None:
    await fill(source)
    before = await contents(source)
    levels = {key.rpartition("/")[2].partition("-")[0] for key in before if key.startswith("_pysync/logs/")}
    assert {"index1", "index2"} <= levels
    outcomes, reports = await copy(source, target)
    assert reports == []
    assert await contents(target) == before
    size = sum(len(body) for _, body in before.values())
    assert outcomes == CopyReport(copied=len(before), bytes=size)
    assert outcomes.is_complete
    second, reports = await copy(source, target)
    assert (second, reports) == (CopyReport(already_there=len(before)), [])


async def test_how_far_projections_and_webhooks_followed_is_not_copied(source: Store, target: Store) -> None:
    """It is a place in the log of changes, which is not copied either."""
    await source.put("_pysync/projections/p", b'{"after":"1"}', expect=ANY)
    await source.put("_pysync/webhooks/w", b'{"after":"1"}', expect=ANY)
    assert await copy(source, target) == (CopyReport(), [])
    assert await contents(target) == {}


async def test_a_log_is_read_and_appended_to_where_it_was_copied_to(source: Store, target: Store) -> None:
    await fill(source)
    await copy(source, target)
    node = Node(target, MemoryCoordinator(), FakeClock())
    await node.append({"n": ELEMENTS}, key=LOG)
    assert await node.datas(key=LOG) == numbered(ELEMENTS + 1)
    await node.logs.close()


async def test_another_run_copies_later_writes(source: Store, target: Store) -> None:
    await fill(source)
    await copy(source, target)
    await source.put("notes/a", document(b'{"text":"two"}'))
    await source.write("files/b/c", chunks_of(b"d"), "text/plain")
    node = Node(source, MemoryCoordinator(), FakeClock())
    await node.append_at_once(numbered(40, ELEMENTS), key=LOG)
    await node.logs.close()
    before = await contents(target)
    outcomes, reports = await copy(source, target)
    assert (outcomes.different, outcomes.copied) == (3, 0)
    assert sorted(reports) == [
        (key, "different: the target has another object at this key") for key in ("files/b/c", LOG, "notes/a")
    ]
    assert await contents(target) == before
    outcomes, reports = await copy(source, target, overwrite=True)
    assert reports == []
    assert outcomes.is_complete
    assert await contents(target) == await contents(source)


async def test_a_file_and_a_document_under_one_key_are_different(source: Store, target: Store) -> None:
    await source.put("a", DOCUMENTS["top"])
    await source.write("b", chunks_of(b"b"), "text/plain")
    await target.write("a", chunks_of(b"a"), "text/plain")
    await target.put("b", DOCUMENTS["top"])
    outcomes, _ = await copy(source, target)
    assert outcomes == CopyReport(different=2)
    outcomes, _ = await copy(source, target, overwrite=True)
    assert outcomes.copied == 2
    assert await contents(target) == await contents(source)


async def test_of_a_log_that_is_overwritten_nothing_stays(source: Store, target: Store) -> None:
    await fill(source)
    other = Node(target, MemoryCoordinator(), FakeClock())
    for start in range(0, 100, 10):
        await other.append_at_once(numbered(10, start), key=LOG)
    await other.logs.close()
    outcomes, _ = await copy(source, target)
    assert outcomes.different == 1
    assert len(await keys_below(target, "_pysync/logs")) < 20
    await copy(source, target, overwrite=True)
    assert await contents(target) == await contents(source)


async def test_corrupt_objects_are_reported_and_stay_behind(source: Store, target: Store) -> None:
    await fill(source)
    whole = await contents(source)
    await source.put("notes/cut", DOCUMENTS["notes/a"][:-4])
    await source.put("notes/text", b"not JSON")
    await source.put("notes/bare", b'{"owner":"somebody"}')
    await replace(source, "top", flipped)
    await replace(source, REVOCATIONS, lambda text: text.replace(b'"generation":3', b'"generation":4'))
    outcomes, reports = await copy(source, target)
    assert dict(reports) == {
        **dict.fromkeys(("notes/cut", "notes/text", "notes/bare", "top"), f"corrupt: {UNREAD}"),
        REVOCATIONS: "corrupt: bad-signature",
    }
    assert (outcomes.corrupt, outcomes.is_complete) == (5, False)
    assert await contents(target) == {
        key: held for key, held in whole.items() if key not in ("top", REVOCATIONS)
    }


async def test_corrupt_objects_are_copied_if_they_are_to_be_kept(source: Store, target: Store) -> None:
    await fill(source)
    await source.put("notes/bare", b'{"owner":"somebody"}')
    first = (await keys_below(source, "_pysync/logs"))[0]
    await replace(source, first, flipped)
    outcomes, reports = await copy(source, target, keep_corrupt=True)
    assert {key for key, _ in reports} == {"notes/bare", first}
    assert outcomes.corrupt == 2
    assert await contents(target) == await contents(source)


@pytest.mark.parametrize("part", ["segment", "block"])
@pytest.mark.parametrize("damage", ["flipped", "missing", "of another place"])
async def test_a_log_that_lacks_a_part_gets_no_head(
    source: Store, target: Store, part: str, damage: str
) -> None:
    await fill(source)
    parts = await keys_below(source, "_pysync/logs")
    damaged, other, *_ = [key for key in parts if ("/index1-" in key) == (part == "block")]
    if damage == "missing":
        await source.delete(damaged)
    elif damage == "flipped":
        await replace(source, damaged, flipped)
    else:
        held = await source.get(other)
        assert isinstance(held, StoredObject)
        await source.put(damaged, held.body)
    outcomes, reports = await copy(source, target)
    assert {key for key, _ in reports} == {damaged, LOG}
    assert (outcomes.corrupt, outcomes.refused) == (1, 1)
    assert await target.get(LOG) is None


async def grown(backup: Store, store: Store) -> Node:
    """A node of `store`, whose log has grown since all of it was copied to `backup`."""
    await fill(store)
    await copy(store, backup)
    node = Node(store, MemoryCoordinator(), FakeClock())
    await node.append_at_once(numbered(40, ELEMENTS), key=LOG)
    return node


@pytest.mark.parametrize("damage", ["flipped", "missing"])
async def test_damaged_log_is_repaired_from_an_older_backup(
    source: Store, target: Store, damage: str
) -> None:
    node = await grown(source, target)
    parts = await keys_below(source, "_pysync/logs")
    damaged = [next(key for key in parts if ("/index1-" in key) == is_block) for is_block in (False, True)]
    for key in damaged:
        await (target.delete(key) if damage == "missing" else replace(target, key, flipped))
    assert (await copy(source, target, quick=True))[0].healed == 0
    outcomes, reports = await copy(source, target)
    assert sorted(reports) == sorted(
        [
            *((key, "healed: it replaced a damaged object") for key in damaged),
            (LOG, "different: the target has another object at this key"),
        ]
    )
    assert outcomes.healed == 2
    assert await node.datas(key=LOG) == numbered(ELEMENTS + 40)
    await node.logs.close()


async def test_damaged_source_does_not_repair_a_log(source: Store, target: Store) -> None:
    node = await grown(source, target)
    segment = next(key for key in await keys_below(source, "_pysync/logs") if "/index" not in key)
    await replace(target, segment, flipped)
    before = await contents(target)
    await replace(source, segment, lambda body: flipped(flipped(body)[:-1]) + b"x")
    outcomes, _ = await copy(source, target)
    assert outcomes.healed == 0
    assert await contents(target) == before
    await node.logs.close()


async def test_a_file_that_changed_on_the_way_is_not_written(target: Store) -> None:
    class Rotten(MemoryStore):
        async def open(self, key: str, start: int = 0, end: int | None = None):  # type: ignore[no-untyped-def]
            file = await super().open(key, start, end)
            if file is not None:
                object.__setattr__(file, "sha256", "0" * 64)
            return file

    source = Rotten()
    await source.write("a", chunks_of(b"one", b"two"), "text/plain")
    outcomes, reports = await copy(source, target)
    assert (outcomes.corrupt, reports) == (1, [("a", "corrupt: its bytes do not match its sha256")])
    assert await target.open("a") is None
    assert await copy(source, target, keep_corrupt=True) == (CopyReport(corrupt=1), reports)
    assert (await read_file(target, "a"))[1] == b"onetwo"


async def test_key_that_the_store_does_not_take_is_reported(tmp_path: Path) -> None:
    source, target = MemoryStore(), await LocalStore.open_folder(tmp_path / "data")
    await source.write("a", chunks_of(b"a"), "text/plain")
    await source.write("~incoming/a", chunks_of(b"a"), "text/plain")
    await source.write("long/" + "x" * 300, chunks_of(b"a"), "text/plain")
    outcomes, reports = await copy(source, target)
    assert (outcomes.copied, outcomes.refused, len(reports)) == (1, 2, 2)
    await source.delete("a")
    await source.write("a/b", chunks_of(b"b"), "text/plain")
    outcomes, reports = await copy(source, target)
    assert (
        "a/b",
        "refused: the target stores folders, and another file has a key above or below this one",
    ) in reports
    await target.close()


async def test_no_head_comes_before_what_it_names() -> None:
    """Whatever write is the last of a run that is killed, the log is not there, or it is there whole."""
    source = MemoryStore()
    await put_all(source, log_objects(400))
    writes = len(await keys_below(source, ""))
    for after in range(writes):
        target = MemoryStore()
        killed = FaultyStore(target)
        killed.crash(after, done=True)
        with pytest.raises(StoreUnavailable):
            await copy(source, killed)
        reader = Node(target, MemoryCoordinator(), FakeClock())
        is_last = after == writes - 1
        assert await reader.datas(key=LOG) == (numbered(400) if is_last else [])


@pytest.mark.parametrize("verb", ["get", "put", "open", "write"])
async def test_a_store_that_fails_midway_is_named_and_the_next_run_goes_on(
    source: Store, target: Store, verb: str
) -> None:
    await fill(source)
    failing = FaultyStore(target)
    failing.fail(verb, after=2)  # type: ignore[arg-type]
    with pytest.raises(StoreUnavailable, match=r"(reading|writing|copying) .+: it does not answer"):
        await copy(source, failing)
    outcomes, reports = await copy(source, target)
    assert (reports, outcomes.is_complete) == ([], True)
    assert await contents(target) == await contents(source)


class LateReplies(MemoryStore):
    """A store that has stored ten objects before it answers the first put, and stores no more."""

    def __init__(self) -> None:
        super().__init__()
        self.full, self.release = asyncio.Event(), asyncio.Event()
        self._puts = 0

    async def put(
        self, key: str, body: bytes, content_type: str = JSON_TYPE, expect: Precondition = ANY
    ) -> str:
        self._puts += 1
        if self._puts > 10:
            self.full.set()
            await self.release.wait()
            raise StoreUnavailable
        etag = await super().put(key, body, content_type, expect)
        await self.release.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        return etag


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
async def test_the_counts_of_a_run_that_ends_early_are_those_of_the_run(how: str) -> None:
    source, target = MemoryStore(), LateReplies()
    await put_all(source, {f"notes/{n}": DOCUMENTS["top"] for n in range(50)})
    copier = Copier(source, target, lambda key, text: None)
    running = asyncio.ensure_future(copier.run())
    await target.full.wait()
    if how == "is cancelled":
        running.cancel()
        await asyncio.sleep(0)
    target.release.set()
    with pytest.raises(StoreUnavailable if how == "fails" else asyncio.CancelledError):
        await running
    assert copier.report.copied == len(await contents(target)) == 10


async def test_a_source_that_is_out_of_reach_is_named(source: Store, target: Store) -> None:
    await fill(source)
    for verb in ("walk", "get", "open"):
        failing = FaultyStore(source)
        failing.fail(verb, after=0 if verb == "walk" else 1, times=10_000)
        if verb == "open":
            failing.fail("get", after=len(await keys_below(source, "")), times=10_000)
        with pytest.raises(StoreUnavailable, match=r"(listing|reading) .+: it does not answer"):
            await copy(failing, target)


async def test_source_that_fails_for_a_moment_is_retried(source: Store, target: Store) -> None:
    await fill(source)
    failing = FaultyStore(source)
    failing.fail("get", "open", after=1)
    outcomes, reports = await copy(failing, target)
    assert (reports, outcomes.is_complete) == ([], True)
    assert await contents(target) == await contents(source)


class Unreadable(MemoryStore):
    """A store some of whose objects cannot be read."""

    unreadable: Collection[str] = ()

    async def get(self, key: str, if_none_match: str | None = None) -> StoredObject | NotModified | None:
        if key in self.unreadable:
            raise StoreUnavailable("the disk does not read it")
        return await super().get(key, if_none_match)

    async def open(self, key: str, start: int = 0, end: int | None = None) -> OpenFile | None:
        file = await super().open(key, start, end)
        if file is None or key not in self.unreadable:
            return file
        return replace_members(file, chunks=_breaking())


async def _breaking() -> AsyncGenerator[bytes, None]:
    yield b"some bytes"
    raise StoreUnavailable("the disk does not read it")


async def test_unreadable_objects_stay_behind_and_the_rest_is_copied(target: Store) -> None:
    source = Unreadable()
    await fill(source)
    whole = await contents(source)
    segment = next(key for key in await keys_below(source, "_pysync/logs") if "/index" not in key)
    source.unreadable = ("notes/a", "files/a.parquet", segment)
    outcomes, reports = await copy(source, target)
    assert dict(reports) == {
        "notes/a": "unreadable: the disk does not read it",
        "files/a.parquet": "unreadable: the disk does not read it",
        segment: "unreadable: the disk does not read it",
        LOG: "refused: objects of this log are missing",
    }
    copied = {key: held for key, held in whole.items() if key not in (*source.unreadable, LOG)}
    assert await contents(target) == copied
    assert (outcomes.unreadable, outcomes.copied, outcomes.is_complete) == (3, len(copied), False)
    assert (await copy(source, target, keep_corrupt=True))[0].unreadable == 3


@pytest.mark.parametrize("how", ["lost", "replaced by a folder"])
async def test_a_lost_file_stays_behind_and_the_rest_is_copied(tmp_path: Path, how: str) -> None:
    source, target = await LocalStore.open_folder(tmp_path / "data"), MemoryStore()
    await fill(source)
    path = tmp_path / "data/files/files/b/c"
    path.unlink()
    if how != "lost":
        path.mkdir()
    outcomes, reports = await copy(source, target)
    ((key, why),) = reports
    assert key == "files/b/c"
    assert why.startswith("unreadable: ")
    assert ("the file is lost" in why) == (how == "lost")
    assert (outcomes.unreadable, outcomes.copied) == (1, len(await contents(target)))
    assert {*await keys_below(source, "")} - {*await keys_below(target, "")} == {"files/b/c"}
    await source.close()


async def test_it_reads_so_many_at_once_and_no_more() -> None:
    source = MemoryStore()
    for n in range(200):
        await source.put(f"notes/{n}", document(b"{}"))
    release = asyncio.Event()
    slow = FaultyStore(source)
    arrived = [slow.delay("get", release) for _ in range(32)]
    copying = asyncio.ensure_future(copy(slow, MemoryStore()))
    for event in arrived:
        await event.wait()
    assert slow.calls["get"] == 32
    release.set()
    outcomes, _ = await copying
    assert outcomes.copied == 200
    assert slow.max_concurrent_reads == 32


async def test_a_large_file_arrives_whole(source: Store, target: Store) -> None:
    content = os.urandom(1024) * 20 * 1024
    await source.write("large", chunks_of(content), "text/plain")
    outcomes, _ = await copy(source, target)
    assert outcomes == CopyReport(copied=1, bytes=len(content))
    assert await contents(target) == {"large": ("text/plain", content)}


async def test_a_revocation_list_is_never_replaced_by_an_earlier_one(source: Store, target: Store) -> None:
    lists = {generation: issuing.issue_revocation_list(ISSUER, generation).text for generation in (3, 4)}
    await source.put(REVOCATIONS, lists[3])
    await target.put(REVOCATIONS, lists[4])
    outcomes, reports = await copy(source, target, overwrite=True)
    assert (outcomes.different, reports) == (1, [(REVOCATIONS, "different: the target has a later list")])
    await target.put(REVOCATIONS, lists[3])
    await source.put(REVOCATIONS, lists[4])
    outcomes, reports = await copy(source, target, overwrite=True)
    assert (outcomes.copied, reports) == (1, [])
    await source.put(f"{REVOCATIONS[:-1]}x", lists[4])
    _, reports = await copy(source, target)
    assert reports == [(f"{REVOCATIONS[:-1]}x", "corrupt: it is the revocation list of another issuer")]


@pytest.mark.parametrize("kind", ["folder", "coordinator"])
async def test_a_copy_that_writes_begins_the_change_log_of_its_target_anew(kind: str, tmp_path: Path) -> None:
    """Its writes are not announced, so who followed the target has missed them."""
    source, change = MemoryStore(), Change(b'{"collection":"","params":{},"hash":"","timestamp":1}')
    await source.put("a", document(b'{"a":1}'))
    folder, coordinator = await LocalStore.open_folder(tmp_path), MemoryCoordinator()
    target: Store = folder if kind == "folder" else MemoryStore()
    log: ChangeLog = folder.change_log if kind == "folder" else coordinator
    before = [await log.last_id(), await log.append([change])]
    outcomes, _ = await copy(source, target, change_log=coordinator)
    assert outcomes.copied == 1
    assert [await log.read(cursor, 10) for cursor in before] == [None, None]
    between = await log.append([change])
    await copy(source, target, change_log=coordinator)
    assert await log.read(between, 10) == []
    await folder.close()
