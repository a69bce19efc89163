"""Nonces of requests that are handled in one tick of the event loop: they are decided together."""

import asyncio
import errno
import fcntl
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.faulty_disk import WRITES, failing
from support.python_process import run_python

from pysync.coordinator import nonce_log
from pysync.coordinator.local import LocalCoordinator
from pysync.coordinator.protocol import AHEAD_MS, ReplayMemoryFull, Standing
from pysync.errors import CoordinatorUnavailable
from pysync.testing import FakeClock


@pytest.fixture
async def coordinator(folder: Path, clock: FakeClock) -> AsyncIterator[LocalCoordinator]:
    coordinator = await LocalCoordinator.open_folder(folder, clock)
    yield coordinator
    await coordinator.close()


async def outcomes(
    coordinator: LocalCoordinator, clock: FakeClock, *nonces: str, **options: Any
) -> list[Any]:
    """What becomes of the nonces of requests that are handled in one tick."""
    each = (coordinator.consume_nonce("aa", nonce, clock(), **options) for nonce in nonces)
    return await asyncio.gather(*each, return_exceptions=True)


async def test_each_of_many_is_decided_for_itself(coordinator: LocalCoordinator, clock: FakeClock) -> None:
    found = await outcomes(coordinator, clock, *(f"{n}" for n in range(30)))
    assert found == [True] * 30
    found = await outcomes(coordinator, clock, *(f"{n}" for n in range(10, 40)))
    assert found == [False] * 20 + [True] * 10


async def test_one_that_is_alone_does_not_wait(coordinator: LocalCoordinator, clock: FakeClock) -> None:
    await outcomes(coordinator, clock, *"abc")
    await coordinator.consume_nonce("aa", "the last one of many", clock())
    await asyncio.sleep(0)
    lone = coordinator.consume_nonce("aa", "n", clock())
    with pytest.raises(StopIteration) as ended:
        lone.send(None)
    assert ended.value.value is True


async def test_each_is_accepted_once_and_known_to_other_processes_and_after_a_restart(
    coordinator: LocalCoordinator, folder: Path, clock: FakeClock
) -> None:
    other = await LocalCoordinator.open_folder(folder, clock)
    assert await outcomes(coordinator, clock, "a", "b", "a", "c", "b") == [True, True, False, True, False]
    assert await outcomes(other, clock, "c", "d", "a") == [False, True, False]
    await other.close()
    restarted = await LocalCoordinator.open_folder(folder, clock)
    assert await outcomes(restarted, clock, "a", "b", "c", "d", "e") == [False] * 4 + [True]
    await restarted.close()


async def test_those_beyond_the_capacity_are_rejected(tmp_path: Path, clock: FakeClock) -> None:
    coordinator = await LocalCoordinator.open_folder(tmp_path, clock, max_live_nonces=8)
    strangers = await outcomes(coordinator, clock, *"abcdefgh", standing=Standing.STRANGER)
    assert [outcome for outcome in strangers if outcome is True] == [True] * 6
    assert {type(outcome) for outcome in strangers[6:]} == {ReplayMemoryFull}
    trusted = await outcomes(coordinator, clock, *"ijk")
    assert trusted[:2] == [True, True]
    assert isinstance(trusted[2], ReplayMemoryFull)
    await coordinator.close()


async def test_a_request_that_is_cancelled_leaves_the_others(
    coordinator: LocalCoordinator, clock: FakeClock
) -> None:
    _, cancelled, other = (
        asyncio.ensure_future(coordinator.consume_nonce("aa", nonce, clock())) for nonce in "xab"
    )
    asyncio.get_running_loop().call_soon(cancelled.cancel)
    assert await other
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert not await coordinator.consume_nonce("aa", "b", clock())


async def test_those_of_writes_are_rejected_among_reads_while_the_disk_takes_none(
    coordinator: LocalCoordinator,
    folder: Path,
    tmp_path: Path,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(nonce_log, "SHARED_MEMORY", memory)
    with failing(monkeypatch, folder, errno.ENOSPC, WRITES, nonce_log):
        reads, writes = await asyncio.gather(
            outcomes(coordinator, clock, "a", "b", "a", is_read=True), outcomes(coordinator, clock, "c", "d")
        )
    assert reads == [True, True, False]
    assert {type(outcome) for outcome in writes} == {CoordinatorUnavailable}
    assert await outcomes(coordinator, clock, "a", "b", "c", "d") == [False, False, True, True]


async def test_a_write_that_the_disk_cuts_short_adds_none_of_them(
    coordinator: LocalCoordinator, folder: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await LocalCoordinator.open_folder(folder, clock)
    real = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda file, text: real(file, text[:24]))
        first, *found = await outcomes(coordinator, clock, "first", "a", "b", "c")
    assert first is True
    assert {type(outcome) for outcome in found} == {CoordinatorUnavailable}
    assert await outcomes(other, clock, "a", "b") == [True, True]
    assert await outcomes(coordinator, clock, "a", "b", "c") == [False, False, True]
    await other.close()


async def test_one_that_is_valid_again_later_and_cannot_be_recorded_is_rejected_alone(
    coordinator: LocalCoordinator, folder: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with failing(monkeypatch, folder, errno.ENOSPC, ("open-to-write",), nonce_log):
        _, ahead, now = await asyncio.gather(
            coordinator.consume_nonce("aa", "first", clock()),
            coordinator.consume_nonce("aa", "ahead", clock() + AHEAD_MS + 1),
            coordinator.consume_nonce("aa", "now", clock()),
            return_exceptions=True,
        )
    assert isinstance(ahead, CoordinatorUnavailable)
    assert now is True


async def test_they_wait_for_another_process_that_holds_the_lock(
    coordinator: LocalCoordinator, folder: Path, clock: FakeClock
) -> None:
    with (folder / "nonces" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = asyncio.gather(*(coordinator.consume_nonce("aa", nonce, clock()) for nonce in "aab"))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not waiting.done()
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert await waiting == [True, False, True]


async def test_others_are_decided_after_one_that_found_no_memory(
    coordinator: LocalCoordinator, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(asyncio.get_running_loop(), "call_soon", fail)
        with pytest.raises(MemoryError):
            coordinator.consume_nonce("aa", "n", clock()).send(None)
    async with asyncio.timeout(10):
        assert await outcomes(coordinator, clock, "a", "b", "a") == [True, True, False]


async def test_those_that_wait_when_the_coordinator_closes_are_rejected(
    folder: Path, clock: FakeClock
) -> None:
    coordinator = await LocalCoordinator.open_folder(folder, clock)
    with (folder / "nonces" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = asyncio.ensure_future(coordinator.consume_nonce("aa", "n", clock()))
        await asyncio.sleep(0)
        await coordinator.close()
        with pytest.raises(CoordinatorUnavailable):
            await waiting


KILLED = """
import asyncio, itertools, sys
from pysync.coordinator.local import LocalCoordinator

async def accept(coordinator, n):
    assert await coordinator.consume_nonce("aa", f"{n}", 0)
    print(n, flush=True)

async def main(folder):
    coordinator = await LocalCoordinator.open_folder(folder)
    for first in itertools.count(step=10):
        await asyncio.gather(*(accept(coordinator, n) for n in range(first, first + 10)))

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.process
async def test_every_nonce_that_was_accepted_survives_a_kill(tmp_path: Path) -> None:
    process = run_python(KILLED, str(tmp_path))
    assert process.stdout is not None
    lines = [await asyncio.to_thread(process.stdout.readline) for _ in range(505)]
    process.kill()
    lines += await asyncio.to_thread(process.stdout.readlines)
    process.communicate()
    accepted = [line.strip() for line in lines if line.endswith("\n")]
    assert len(accepted) >= 505
    coordinator = await LocalCoordinator.open_folder(tmp_path)
    for nonce in accepted:
        assert not await coordinator.consume_nonce("aa", nonce, 0)
    await coordinator.close()
