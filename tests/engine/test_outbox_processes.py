"""The outbox of processes that are killed, with the log of changes in a coordinator's folder."""

import asyncio
from pathlib import Path

import pytest
from support.faulty_store import FaultyStore
from support.python_process import run_python

from pysync.clock import wall_clock_ms
from pysync.coordinator.local import LocalCoordinator
from pysync.engine.idempotency import SETTLED_MS
from pysync.engine.outbox import outbox_of
from pysync.store.local.store import LocalStore
from pysync.testing import FakeClock

pytestmark = pytest.mark.process

WRITE_ON = """
import asyncio, itertools, sys
from pysync.changelog import Change
from pysync.coordinator.local import LocalCoordinator
from pysync.engine.outbox import outbox_of
from pysync.store import ABSENT, Write
from pysync.store.local import LocalStore
from support.faulty_store import FaultyStore

async def write(outbox, lane):
    for n in itertools.count():
        await outbox.commit(Write(f"{lane}/{n}", b"x", ABSENT, [Change(b"%d/%d" % (lane, n))]))
        print(flush=True)

async def main(folder):
    store = FaultyStore(await LocalStore.open_folder(folder))  # it shows no log of its own
    outbox = outbox_of(store, await LocalCoordinator.open_folder(folder))
    assert not outbox.is_transactional
    await asyncio.gather(*(write(outbox, lane) for lane in range(8)))

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("writes", [1, 100, 400])
async def test_write_of_a_killed_process_is_announced_by_the_next(tmp_path: Path, writes: int) -> None:
    process = run_python(WRITE_ON, str(tmp_path))
    assert process.stdout is not None
    for _ in range(writes):
        assert await asyncio.to_thread(process.stdout.readline), "it ended by itself"
    process.kill()
    await asyncio.to_thread(process.communicate)
    clock = FakeClock(wall_clock_ms())
    store, coordinator = (
        await LocalStore.open_folder(tmp_path),
        await LocalCoordinator.open_folder(tmp_path, clock),
    )
    outbox = outbox_of(FaultyStore(store), coordinator)
    left = await coordinator.prepared(1_000)
    assert len(left) <= 8
    clock.now_ms += SETTLED_MS
    assert await outbox.recover() == len(left)
    assert await coordinator.prepared(10) == []
    found = await coordinator.read("", 100_000)
    assert found is not None
    assert {listed.key async for listed in store.walk("")} <= {change.text.decode() for _, change in found}
    await coordinator.close()
    await store.close()
