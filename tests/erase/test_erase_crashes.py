"""An erasure that is interrupted anywhere is finished by the next one, or by the next service."""

import asyncio
import itertools
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from support.clients import Start
from support.collections import collection
from support.depth import depth
from support.erasure import ANNE, ANNES, SECRET, keys_with, members, person, serve, stored_keys, write_all
from support.faulty_store import FaultyStore
from support.folder_search import files_with
from support.python_process import run_python

from pysync import config
from pysync.changelog import ChangeLog
from pysync.clock import wall_clock_ms
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.append_log import AppendLogs
from pysync.engine.documents import Documents
from pysync.engine.files import Files
from pysync.engine.outbox import outbox_of
from pysync.engine.subscriptions import Topic
from pysync.erase import Eraser, EraseRequest
from pysync.erase.record import ErasureRecord
from pysync.errors import BadRequest, Unavailable
from pysync.plugins import PluginContext
from pysync.plugins.projection import projections_in, projections_of
from pysync.store import Store, StoredObject
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

pytestmark = pytest.mark.usefixtures("hasty_erasures")

BOARD = EraseRequest("key", "board/lobby")


def eraser_on(
    store: Store,
    coordinator: MemoryCoordinator,
    served: dict[str, Any] | None = None,
    clock: FakeClock | None = None,
) -> Eraser:
    """The eraser of a process of its own, which lets the time of the clock pass when it waits."""
    clock = clock or FakeClock(wall_clock_ms())

    async def sleep(seconds: float) -> None:
        clock.now_ms += int(seconds * 1000)

    settings = config.parse({"version": 1, "store": "memory:", **(served or members())})
    outbox = outbox_of(store, coordinator)
    services = PluginContext(
        config=settings,
        store=store,
        coordinator=coordinator,
        outbox=outbox,
        files=Files(store, clock, outbox),
        documents=Documents(store, coordinator, clock, outbox),
        logs=AppendLogs(store, coordinator, clock, outbox=outbox),
        now_ms=clock,
        sweeps=False,
        count=lambda metric, *labels, by=1: None,
    )
    return Eraser(services, projections_in(projections_of(settings)), {}, sleep=sleep)


async def copied(store: Store) -> MemoryStore:
    """A store with the same objects and files."""
    copy = MemoryStore()
    for key in await stored_keys(store):
        found = await store.get(key)
        if isinstance(found, StoredObject):
            await copy.put(key, found.body, found.content_type)
        else:
            file = await store.open(key)
            assert file is not None
            await copy.write(key, file.chunks, file.content_type)
    return copy


async def check_recorded(store: Store, log: ChangeLog, before: str) -> set[Topic]:
    """Return the collections that the log has erased changes of. Readers of each of them who stand at the id
    `before` are known to miss something."""
    topics = {topic for _, change in await log.read("", 1000) or [] for topic in change.erased_from}
    record = await ErasureRecord.load(store)
    assert all(record.covers(before, [topic]) for topic in topics)
    return topics


@pytest.mark.slow
async def test_killed_at_any_write_and_run_again_it_ends_the_same(
    start: Start, session: aiohttp.ClientSession
) -> None:
    filled = (await serve(start, session)).store
    whole = FaultyStore(await copied(filled))
    report = await eraser_on(whole, MemoryCoordinator()).run(ANNES)
    expected = await stored_keys(whole)
    writes = whole.calls["put"] + whole.calls["delete"]
    assert writes > 15
    # What is stored after a write that is done is what is stored before the next one that is not.
    for done in (False, True):
        for at in range(0, writes, depth(2, 1)):
            stored, clock = await copied(filled), FakeClock(wall_clock_ms())
            coordinator = MemoryCoordinator(clock)
            before = await coordinator.last_id()
            faulty = FaultyStore(stored)
            faulty.crash(at, done=done)
            with pytest.raises(Unavailable):
                await eraser_on(faulty, coordinator, clock=clock).run(ANNES)
            await check_recorded(stored, coordinator, before)
            again = await eraser_on(FaultyStore(stored), coordinator, clock=clock).run(ANNES)
            assert await stored_keys(stored) == expected, at
            assert again.bytes <= report.bytes, at
            assert await keys_with(stored, ANNE.user_id) == set()
            assert await check_recorded(stored, coordinator, before) >= {(None, "notes"), (None, "diary")}
            announced = [change for _, change in await coordinator.read("", 1000) or []]
            pending = [change for intent in await coordinator.prepared(1000) for change in intent.changes]
            assert not [each for each in (*announced, *pending) if ANNE.user_id.encode() in each.text]


KILLED = """
import asyncio, os, signal, sys
from pysync.cli import main
from pysync.coordinator.local import LocalCoordinator
from pysync.erase import eraser
from pysync.sqlite.changelog import SqliteChangeLog
from pysync.store.local.store import LocalStore

left = int(sys.argv[1])

def killing(owner, name):
    method = getattr(owner, name)

    async def step(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        result = await method(*args, **kwargs)
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, step)

for owner, names in (
    (LocalStore, ("commit", "purge_deleted")),
    (LocalCoordinator, ("forget", "purge_deleted")),
    (SqliteChangeLog, ("erase",)),
):
    for name in names:
        killing(owner, name)
eraser.SETTLE_S = 0
sys.exit(main.main(sys.argv[2:]))
"""


@pytest.mark.process
@pytest.mark.slow
async def test_process_killed_at_any_step_leaves_work_that_the_next_service_finishes(
    start: Start, session: aiohttp.ClientSession, folder: Path, tmp_path: Path
) -> None:
    """Every so many steps of the command, which runs beside a service."""
    store = f"file:{folder}"
    (tmp_path / "pysync.json").write_bytes(orjson.dumps({"version": 1, "store": store, **members()}))
    base = await start(members(store=store))
    arguments = ["erase", "--identity", ANNE.user_id, "--config", str(tmp_path / "pysync.json")]
    step, killed = 2, 0  # the first step stores the journal
    while True:
        await write_all(person(ANNE, base, session), f"{SECRET}-{step}")
        process = run_python(KILLED, str(step), *arguments)
        await asyncio.to_thread(process.communicate)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        killed += 1
        await start(members(store=store))
        next_service = start.apps[-1]  # type: ignore[attr-defined]
        await next_service.jobs.erasure.wait()
        await next_service.close()  # the next process does not wait for its lease
        assert files_with(folder, ANNE.user_id) == set(), step
        step += depth(17, 1)
    assert killed >= 3
    await start.apps[0].eraser.run(BOARD)  # type: ignore[attr-defined]
    assert files_with(folder, SECRET, ANNE.user_id) == set()


MEMBERS = {"readRoles": ["space:member"], "writeRoles": ["space:member"]}
OWNER = {"readRoles": ["space:member"], "writeRoles": ["space:owner"]}
SPACES: dict[str, Any] = {
    "auth": {"spaces": {"accessPath": "rooms/{spaceId}/_access"}},
    "collections": [
        collection("access", "rooms/{spaceId}/_access", **OWNER, history={"versions": 9}),
        collection("docs", "rooms/{spaceId}/{doc}", **MEMBERS, history={"versions": 9}),
        collection("logs", "logs/{spaceId}/{doc}", **MEMBERS, history={"versions": 9}),
        collection("open", "open/{spaceId}/{doc}"),
    ],
}
ROOM = EraseRequest("prefix", "rooms/r1")
ACCESS = "rooms/r1/_access"
LATE = "logs/r1/late"


async def write_room(base: str, session: aiohttp.ClientSession, *others: str) -> None:
    """Have Anne make the space r1, and write each document twice: in keys before and behind the access
    document's, and at `others`."""
    anne = person(ANNE, base, session)
    for key in (ACCESS, "rooms/r1/Agenda", "rooms/r1/minutes", *others):
        data = {"owner": ANNE.user_id, "members": []}
        first = await anne.push(key, data)
        assert first.status == 200, first.body
        assert (await anne.push(key, data | {"members": ["somebody"]}, first.json["hash"])).status == 200


def is_left_to_others(keys: set[str]) -> bool:
    """Return True if something of the space is stored, and its access document is not."""
    return ACCESS not in keys and any("rooms/r1/" in key for key in keys)


def others_of_room(keys: set[str]) -> set[str]:
    """What is stored of the space besides the access document and its versions."""
    return {key for key in keys if "r1" in key and ACCESS not in key}


async def test_killed_at_any_write_no_space_is_left_without_its_access_document(
    start: Start, session: aiohttp.ClientSession
) -> None:
    await write_room(await start(SPACES), session)
    filled = start.apps[-1].store  # type: ignore[attr-defined]
    whole = FaultyStore(await copied(filled))
    await eraser_on(whole, MemoryCoordinator(), SPACES).run(ROOM)
    assert {key for key in await stored_keys(whole) if "r1" in key} == set()
    for at in range(0, whole.calls["put"] + whole.calls["delete"], depth(2, 1)):
        for done in (False, True):
            stored = await copied(filled)
            faulty = FaultyStore(stored)
            faulty.crash(at, done=done)
            with pytest.raises(Unavailable):
                await eraser_on(faulty, MemoryCoordinator(), SPACES).run(ROOM)
            assert not is_left_to_others(await stored_keys(stored)), at
            # A member writes before the next process continues, which is killed too.
            if ACCESS in await stored_keys(stored):
                await stored.put("rooms/r1/late", b"{}")
            again = FaultyStore(stored)
            again.crash(at, done=done)
            with suppress(Unavailable):
                await eraser_on(again, MemoryCoordinator(), SPACES).run(ROOM)
            assert not is_left_to_others(await stored_keys(stored)), at
            await eraser_on(FaultyStore(stored), MemoryCoordinator(), SPACES).run(ROOM)
            assert {key for key in await stored_keys(stored) if "r1" in key} == set()


@pytest.mark.process
@pytest.mark.slow
async def test_a_killed_process_leaves_no_space_without_its_access_document(
    start: Start, session: aiohttp.ClientSession, folder: Path, tmp_path: Path
) -> None:
    """Every so many steps of the command, on a folder, whose deletes are exact."""
    store = f"file:{folder}"
    (tmp_path / "pysync.json").write_bytes(orjson.dumps({"version": 1, "store": store, **SPACES}))
    arguments = ["erase", "--prefix", "rooms/r1", "--config", str(tmp_path / "pysync.json")]
    step, killed = 2, 0
    while True:
        await write_room(await start({"store": store, **SPACES}), session)
        process = run_python(KILLED, str(step), *arguments)
        await asyncio.to_thread(process.communicate)
        app = start.apps[-1]  # type: ignore[attr-defined]
        assert not is_left_to_others(await stored_keys(app.store)), step
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL
        killed += 1
        await app.eraser.run(ROOM)
        await app.close()  # the next process does not wait for its lease
        step += depth(11, 1)
    assert killed >= 3


@pytest.mark.parametrize(
    ("request_", "left"),
    [
        (ROOM, "logs/r1/plan"),
        (EraseRequest("key", ACCESS), "rooms/r1/Agenda"),
        (EraseRequest("prefix", ACCESS), "rooms/r1/Agenda"),
    ],
)
async def test_an_access_document_is_not_erased_while_its_space_has_more(
    start: Start, session: aiohttp.ClientSession, request_: EraseRequest, left: str
) -> None:
    others = ("logs/r1/plan", "open/r1/plan")
    await write_room(await start(SPACES), session, *others)
    app = start.apps[-1]  # type: ignore[attr-defined]
    before = await stored_keys(app.store)
    for erase in (app.eraser.run, app.eraser.dry_run):
        with pytest.raises(BadRequest, match=f"{left}.*{ACCESS}"):
            await erase(request_)
    assert await stored_keys(app.store) == before
    await app.eraser.run(EraseRequest("prefix", "logs/r1"))
    await app.eraser.run(ROOM)
    after = await stored_keys(app.store)
    assert {key for key in after if "r1" in key} == {"open/r1/plan"}  # everybody may read it anyway


async def test_what_a_member_writes_meanwhile_keeps_the_access_document(
    start: Start, session: aiohttp.ClientSession
) -> None:
    await write_room(await start(SPACES), session)
    stored = await copied(start.apps[-1].store)  # type: ignore[attr-defined]
    faulty, release = FaultyStore(stored), asyncio.Event()
    arrived = faulty.delay("delete", release)
    erasing = asyncio.create_task(eraser_on(faulty, MemoryCoordinator(), SPACES).run(ROOM))
    await arrived.wait()
    await stored.put(LATE, b"{}")
    release.set()
    with pytest.raises(BadRequest, match=f"{LATE}.*{ACCESS}"):
        await erasing
    keys = await stored_keys(stored)
    assert ACCESS in keys
    assert others_of_room(keys) == {LATE}


@pytest.mark.parametrize("continues", ["the next service", "the next erasure"])
async def test_what_a_member_writes_after_a_crash_keeps_the_access_document(
    start: Start, session: aiohttp.ClientSession, continues: str
) -> None:
    await write_room(await start(SPACES), session)
    filled = start.apps[-1].store  # type: ignore[attr-defined]
    for at in itertools.count(1):  # the first write is the note
        stored = await copied(filled)
        faulty = FaultyStore(stored)
        faulty.crash(at, done=False)
        with pytest.raises(Unavailable):
            await eraser_on(faulty, MemoryCoordinator(), SPACES).run(ROOM)
        if ACCESS not in await stored_keys(stored):
            break
        await stored.put(LATE, b"{}")
        if continues == "the next service":
            assert await eraser_on(stored, MemoryCoordinator(), SPACES).resume()
            keys = await stored_keys(stored)
            assert ACCESS in keys, at
            assert others_of_room(keys) == {LATE}, at
        await eraser_on(stored, MemoryCoordinator(), SPACES).run(EraseRequest("prefix", "logs/r1"))
        keys = await stored_keys(stored)
        assert ACCESS in keys, at
        assert others_of_room(keys) == set(), at
        await eraser_on(stored, MemoryCoordinator(), SPACES).run(ROOM)
        assert {key for key in await stored_keys(stored) if "r1" in key} == set()


async def test_earlier_versions_keep_an_access_document_too(
    start: Start, session: aiohttp.ClientSession
) -> None:
    await write_room(await start(SPACES), session, "logs/r1/plan")
    app = start.apps[-1]  # type: ignore[attr-defined]
    await app.store.delete("logs/r1/plan")
    with pytest.raises(BadRequest, match="logs/r1/plan"):
        await app.eraser.run(ROOM)
