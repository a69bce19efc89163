"""An erasure that is interrupted anywhere is finished by the next one, or by the next service."""

import asyncio
import signal
from pathlib import Path

import aiohttp
import orjson
import pytest
from support.clients import Start
from support.depth import depth
from support.erasure import ANNE, ANNES, SECRET, keys_with, members, person, serve, stored_keys, write_all
from support.folder_search import files_with
from support.python_process import run_python

from pysync import config
from pysync.clock import wall_clock_ms
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.append_log import AppendLogs
from pysync.engine.documents import Documents
from pysync.engine.files import Files
from pysync.engine.outbox import Outbox
from pysync.erase import Eraser, EraseRequest
from pysync.errors import Unavailable
from pysync.plugins import PluginContext
from pysync.plugins.projection import projections_in, projections_of
from pysync.store import Store, StoredObject
from pysync.store.memory import MemoryStore
from pysync.testing import FaultyStore

pytestmark = pytest.mark.usefixtures("hasty_erasures")

BOARD = EraseRequest("key", "board/lobby")


def eraser_on(store: Store, coordinator: MemoryCoordinator) -> Eraser:
    """The eraser of a process of its own."""
    settings = config.parse({"version": 1, "store": "memory:", **members()})
    outbox = Outbox(store, coordinator)
    services = PluginContext(
        config=settings,
        store=store,
        coordinator=coordinator,
        outbox=outbox,
        files=Files(store, wall_clock_ms, outbox),
        documents=Documents(store, coordinator, wall_clock_ms, outbox),
        logs=AppendLogs(store, coordinator, wall_clock_ms, outbox=outbox),
        now_ms=wall_clock_ms,
        sweeps=False,
        count=lambda metric, *labels, by=1: None,
    )
    return Eraser(services, projections_in(projections_of(settings)), {})


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


async def test_killed_at_any_write_and_run_again_it_ends_the_same(
    start: Start, session: aiohttp.ClientSession
) -> None:
    filled = (await serve(start, session)).store
    whole = FaultyStore(await copied(filled))
    report = await eraser_on(whole, MemoryCoordinator()).run(ANNES)
    expected = await stored_keys(whole)
    writes = whole.calls["put"] + whole.calls["delete"]
    assert writes > 15
    for done in (False, True):
        for at in range(writes):
            stored, coordinator = await copied(filled), MemoryCoordinator()
            faulty = FaultyStore(stored)
            faulty.crash(at, done=done)
            with pytest.raises(Unavailable):
                await eraser_on(faulty, coordinator).run(ANNES)
            again = await eraser_on(FaultyStore(stored), coordinator).run(ANNES)
            assert await stored_keys(stored) == expected, at
            assert again.bytes in (report.bytes, 0), at
            assert await keys_with(stored, ANNE.user_id) == set()


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
    (LocalStore, ("put", "delete", "purge_deleted")),
    (LocalCoordinator, ("forget", "purge_deleted")),
    (SqliteChangeLog, ("clear",)),
):
    for name in names:
        killing(owner, name)
eraser.SETTLE_S = 0
sys.exit(main.main(sys.argv[2:]))
"""


@pytest.mark.process
@pytest.mark.slow
async def test_a_process_killed_at_any_step_leaves_what_the_next_service_finishes(
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
        await start.apps[-1].erasure  # type: ignore[attr-defined]
        assert files_with(folder, ANNE.user_id) == set(), step
        step += depth(17, 1)
    assert killed >= 3
    await start.apps[-1].eraser.run(BOARD)  # type: ignore[attr-defined]
    assert files_with(folder, SECRET, ANNE.user_id) == set()
