"""Nonces of reads while the disk takes none: they are kept in memory that all processes share."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from support.faulty_disk import WRITES, failing

from pysync.clock import wall_clock_ms
from pysync.coordinator import nonce_log
from pysync.coordinator.local import LocalCoordinator
from pysync.coordinator.protocol import EPOCH_MS
from pysync.errors import CoordinatorUnavailable
from pysync.testing import FakeClock

NUMBERS = [errno.EROFS, errno.ENOSPC, errno.EIO]


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for the memory of the machine."""
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(nonce_log, "SHARED_MEMORY", memory)
    return memory


@pytest.fixture
async def coordinator(folder: Path, clock: FakeClock, memory: Path) -> AsyncIterator[LocalCoordinator]:
    coordinator = await LocalCoordinator.open_folder(folder, clock)
    yield coordinator
    await coordinator.close()


Breaking = Callable[[], AbstractContextManager[None]]


@pytest.fixture(params=NUMBERS, ids=errno.errorcode.get)
def broken(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Breaking:
    """While it is entered, nothing can be written below the folder."""
    return lambda: failing(monkeypatch, folder, request.param, WRITES, nonce_log)


async def read(coordinator: LocalCoordinator, clock: FakeClock, nonce: str) -> bool:
    return await coordinator.consume_nonce("aa", nonce, clock(), is_read=True)


async def test_a_read_is_admitted_once_while_nonces_cannot_be_written(
    coordinator: LocalCoordinator, clock: FakeClock, broken: Breaking
) -> None:
    assert await coordinator.consume_nonce("aa", "written", clock())
    with broken():
        assert await read(coordinator, clock, "kept")
        assert not await read(coordinator, clock, "kept")
        assert not await read(coordinator, clock, "written")


async def test_a_write_is_rejected_while_nonces_cannot_be_written(
    coordinator: LocalCoordinator, clock: FakeClock, broken: Breaking
) -> None:
    with broken():
        for _ in range(2):
            with pytest.raises(CoordinatorUnavailable):
                await coordinator.consume_nonce("aa", "n", clock())
    assert await coordinator.consume_nonce("aa", "n", clock())


async def test_a_nonce_that_was_kept_in_memory_is_known_once_nonces_can_be_written_again(
    coordinator: LocalCoordinator, clock: FakeClock, broken: Breaking
) -> None:
    with broken():
        assert await read(coordinator, clock, "kept")
    assert not await coordinator.consume_nonce("aa", "kept", clock())
    assert not await read(coordinator, clock, "kept")
    assert await coordinator.consume_nonce("aa", "new", clock())


async def test_a_nonce_that_was_kept_in_memory_is_known_to_other_processes_and_after_a_restart(
    coordinator: LocalCoordinator, folder: Path, clock: FakeClock, broken: Breaking
) -> None:
    other = await LocalCoordinator.open_folder(folder, clock)
    with broken():
        assert await read(coordinator, clock, "kept")
        assert not await read(other, clock, "kept")
    assert not await other.consume_nonce("aa", "kept", clock())
    await other.close()
    restarted = await LocalCoordinator.open_folder(folder, clock)
    assert not await restarted.consume_nonce("aa", "kept", clock())
    assert await restarted.consume_nonce("aa", "new", clock())
    await restarted.close()


async def test_a_nonce_that_was_kept_in_memory_is_known_to_a_process_that_has_just_looked(
    folder: Path, memory: Path, broken: Breaking
) -> None:
    first, other = [await LocalCoordinator.open_folder(folder) for _ in range(2)]
    assert await other.consume_nonce("aa", "before", wall_clock_ms())
    with broken():
        assert await first.consume_nonce("aa", "kept", wall_clock_ms(), is_read=True)
    assert not await other.consume_nonce("aa", "kept", wall_clock_ms())
    for coordinator in (first, other):
        await coordinator.close()


async def test_first_read_on_a_full_disk_does_not_stop_the_event_loop(
    coordinator: LocalCoordinator, clock: FakeClock, broken: Breaking
) -> None:
    with broken():
        first = asyncio.ensure_future(read(coordinator, clock, "first"))
        again = asyncio.ensure_future(read(coordinator, clock, "first"))
        await asyncio.sleep(0)
        assert not first.done(), "other processes must have looked before a nonce is kept in memory"
        assert await first
        assert not await again


async def test_a_process_that_has_just_looked_does_not_admit_what_another_is_about_to_keep(
    folder: Path, memory: Path, broken: Breaking
) -> None:
    first, other = [await LocalCoordinator.open_folder(folder) for _ in range(2)]
    assert await other.consume_nonce("aa", "before", wall_clock_ms())
    with broken():
        waiting = asyncio.ensure_future(first.consume_nonce("aa", "n", wall_clock_ms(), is_read=True))
        await asyncio.sleep(0)
    assert await other.consume_nonce("aa", "n", wall_clock_ms())
    assert not await waiting
    for coordinator in (first, other):
        await coordinator.close()


async def test_a_process_that_has_not_opened_the_newest_file_reads_it(
    coordinator: LocalCoordinator, folder: Path, clock: FakeClock, broken: Breaking
) -> None:
    other = await LocalCoordinator.open_folder(folder, clock)
    clock.now_ms += EPOCH_MS
    assert await other.consume_nonce("aa", "written", clock())
    with broken():
        assert not await read(coordinator, clock, "written")
        assert await read(coordinator, clock, "kept")
        assert not await read(other, clock, "kept")
    await other.close()


async def test_nonces_are_kept_in_memory_for_ten_minutes(
    coordinator: LocalCoordinator, clock: FakeClock, broken: Breaking
) -> None:
    with broken():
        assert await read(coordinator, clock, "first")
        for n in range(2):
            clock.now_ms += EPOCH_MS
            assert await read(coordinator, clock, f"{n}")
            assert not await read(coordinator, clock, "first")
        clock.now_ms += 2 * EPOCH_MS
        assert await read(coordinator, clock, "first"), "its signature has expired long ago"
    assert await coordinator.consume_nonce("aa", "written", clock())


async def test_nonces_are_written_to_the_disk_as_long_as_it_takes_them(
    coordinator: LocalCoordinator, clock: FakeClock, memory: Path
) -> None:
    assert await read(coordinator, clock, "n")
    assert not list(memory.iterdir())


@pytest.mark.parametrize("kind", ["link", "open to others", "file"])
async def test_memory_that_others_may_have_prepared_is_not_used(
    coordinator: LocalCoordinator, folder: Path, clock: FakeClock, memory: Path, broken: Breaking, kind: str
) -> None:
    path = nonce_log.memory_folder(folder / "nonces")
    if kind == "link":
        (memory / "elsewhere").mkdir(mode=0o700)
        path.symlink_to(memory / "elsewhere")
    elif kind == "file":
        path.touch()
    else:
        path.mkdir()
        path.chmod(0o777)
    with broken(), pytest.raises(CoordinatorUnavailable):
        await read(coordinator, clock, "n")


async def test_nonces_kept_in_memory_are_closed_to_others(
    coordinator: LocalCoordinator, clock: FakeClock, memory: Path, broken: Breaking
) -> None:
    with broken():
        assert await read(coordinator, clock, "n")
    (kept,) = memory.iterdir()
    assert {path.stat().st_mode & 0o077 for path in (kept, *kept.iterdir())} == {0}
    assert kept.stat().st_uid == os.geteuid()
