"""The coordinators: one contract, and what several processes and crashes must not break."""

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from contracts.change_logs import RETENTION, change
from contracts.coordinators import BoundedNoncesContract, CoordinatorContract, LeaseContract
from support.python_process import run_python, run_together
from support.round_robin import first_member, round_robin

from pysync.clock import MAX_COUNTER, HybridTimestamp, boot_clock_ms, wall_clock_ms
from pysync.coordinator import (
    EPOCH_MS,
    LEASE_MS,
    Coordinator,
    memory,
    nonce_epoch,
    open_coordinator,
)
from pysync.coordinator.local import SCHEMA, LocalCoordinator
from pysync.coordinator.memory import MemoryCoordinator
from pysync.errors import CoordinatorUnavailable
from pysync.sqlite import changelog
from pysync.sqlite.database_file import Schema, create_database
from pysync.testing import FakeClock

MAX_LIVE = 1_000


@pytest.fixture(autouse=True)
def brief_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "WAIT_S", 0.05)
    monkeypatch.setattr(changelog, "WAIT_S", 0.05)


class TestMemoryCoordinator(CoordinatorContract, BoundedNoncesContract):
    @pytest.fixture
    async def coordinator(self, clock: FakeClock) -> AsyncIterator[Coordinator]:
        coordinator = MemoryCoordinator(clock, MAX_LIVE, RETENTION)
        yield coordinator
        await coordinator.close()


class TestLocalCoordinator(CoordinatorContract, BoundedNoncesContract):
    @pytest.fixture
    async def coordinator(self, clock: FakeClock, tmp_path: Path) -> AsyncIterator[Coordinator]:
        coordinator = await LocalCoordinator.open_folder(tmp_path, clock, MAX_LIVE, RETENTION)
        yield coordinator
        await coordinator.close()


class TestTwoLocalCoordinatorsOnOneFolder(CoordinatorContract, BoundedNoncesContract):
    @pytest.fixture
    async def coordinator(self, clock: FakeClock, tmp_path: Path) -> AsyncIterator[Coordinator]:
        pair = [await LocalCoordinator.open_folder(tmp_path, clock, MAX_LIVE, RETENTION) for _ in range(2)]
        yield round_robin(*pair)
        for coordinator in pair:
            await coordinator.close()

    @pytest.fixture
    def one(self, coordinator: Coordinator) -> Coordinator:
        return first_member(coordinator)


class TestLocalLeaders(LeaseContract):
    @pytest.fixture
    async def pair(self, clock: FakeClock, tmp_path: Path) -> AsyncIterator[tuple[Coordinator, ...]]:
        pair = tuple([await LocalCoordinator.open_folder(tmp_path, clock) for _ in range(2)])
        yield pair
        for coordinator in pair:
            await coordinator.close()


def ledger(folder: Path, clock: FakeClock) -> Path:
    return folder / "nonces" / str(nonce_epoch(clock()))


async def test_a_url_names_its_coordinator(tmp_path: Path) -> None:
    for url, folder in ((f"file:{tmp_path}/a", None), ("file:", f"{tmp_path}/b")):
        local = await open_coordinator(url, folder)
        assert isinstance(local, LocalCoordinator)
        await local.close()
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}
    assert isinstance(await open_coordinator("memory:"), MemoryCoordinator)
    for url in ("file:", "memory:x", "http://x", ""):
        with pytest.raises(
            ValueError, match="is no coordinator of this version: use memory:, file: or redis:"
        ):
            await open_coordinator(url)


async def test_nonces_counts_and_claims_survive_a_restart(tmp_path: Path, clock: FakeClock) -> None:
    first = await LocalCoordinator.open_folder(tmp_path, clock)
    for n in range(100):
        assert await first.consume_nonce("aa", f"{n}", 0)
        clock.now_ms += EPOCH_MS // 50
    await first.increment("b", 10 * EPOCH_MS)
    await first.put_if_absent("k", b"held", EPOCH_MS)
    await first.close()
    second = await LocalCoordinator.open_folder(tmp_path, clock)
    for n in range(100):
        assert not await second.consume_nonce("aa", f"{n}", 0)
    assert await second.increment("b", 10 * EPOCH_MS) == 2
    assert await second.put_if_absent("k", b"other", EPOCH_MS) == b"held"
    await second.close()


async def test_ticks_go_on_after_a_restart_with_the_clock_set_back(tmp_path: Path, clock: FakeClock) -> None:
    first = await LocalCoordinator.open_folder(tmp_path, clock)
    before = await first.next_timestamp()
    await first.close()
    clock.now_ms -= EPOCH_MS
    second = await LocalCoordinator.open_folder(tmp_path, clock)
    assert await second.next_timestamp() == (before.ms, before.counter + 1)
    clock.now_ms += 2 * EPOCH_MS
    assert await second.next_timestamp() == (clock.now_ms, 0)
    await second.close()


def test_ticks_of_a_clock_that_was_set_back_do_not_run_out_of_numbers() -> None:
    tick = HybridTimestamp(1_000, MAX_COUNTER - 1)
    ticks = [tick := tick.next(0) for _ in range(3)]
    assert ticks == [(1_000, MAX_COUNTER), (1_001, 0), (1_001, 1)]


async def test_the_cap_counts_what_other_processes_remember(tmp_path: Path, clock: FakeClock) -> None:
    first, second = [await LocalCoordinator.open_folder(tmp_path, clock, MAX_LIVE) for _ in range(2)]
    for n in range(MAX_LIVE):
        assert await first.consume_nonce("aa", f"{n}", 0)
    with pytest.raises(CoordinatorUnavailable):
        await second.consume_nonce("aa", "one more", 0)
    await first.close()
    await second.close()


async def test_a_torn_record_is_truncated_and_costs_no_other(tmp_path: Path, clock: FakeClock) -> None:
    first, second = [await LocalCoordinator.open_folder(tmp_path, clock) for _ in range(2)]
    assert await first.consume_nonce("aa", "1", 0)
    with open(ledger(tmp_path, clock), "ab") as torn:
        torn.write(b"seven..")
    assert await second.consume_nonce("aa", "2", 0)
    assert not await second.consume_nonce("aa", "1", 0)
    assert not await first.consume_nonce("aa", "2", 0)
    assert ledger(tmp_path, clock).stat().st_size == 32
    await first.close()
    await second.close()
    third = await LocalCoordinator.open_folder(tmp_path, clock)
    assert not await third.consume_nonce("aa", "1", 0)
    assert not await third.consume_nonce("aa", "2", 0)
    await third.close()


async def test_ledgers_that_nobody_needs_are_deleted(tmp_path: Path, clock: FakeClock) -> None:
    coordinator = await LocalCoordinator.open_folder(tmp_path, clock)
    for n in range(10):
        assert await coordinator.consume_nonce("aa", f"{n}", 0)
        clock.now_ms += EPOCH_MS
    assert len([path for path in (tmp_path / "nonces").iterdir() if path.name.isdecimal()]) == 3
    await coordinator.close()


async def test_a_process_whose_clock_lags_meets_what_others_accepted(tmp_path: Path) -> None:
    ahead, behind = FakeClock(), FakeClock()
    first = await LocalCoordinator.open_folder(tmp_path, ahead)
    second = await LocalCoordinator.open_folder(tmp_path, behind)
    assert await second.consume_nonce("aa", "before", 0)
    ahead.now_ms += 2 * EPOCH_MS
    assert await first.consume_nonce("aa", "ahead", 0)
    assert not await first.consume_nonce("aa", "before", 0)
    assert not await second.consume_nonce("aa", "ahead", 0)
    assert await second.consume_nonce("aa", "behind", 0)
    assert not await first.consume_nonce("aa", "behind", 0)
    await first.close()
    await second.close()


async def test_a_closed_ledger_without_successor_is_not_reopened(tmp_path: Path, clock: FakeClock) -> None:
    first = await LocalCoordinator.open_folder(tmp_path, clock)
    assert await first.consume_nonce("aa", "1", 0)
    with open(ledger(tmp_path, clock), "ab") as killed_while_advancing:
        killed_while_advancing.write(bytes(16))
    assert await first.consume_nonce("aa", "2", 0)
    second = await LocalCoordinator.open_folder(tmp_path, clock)
    assert not await second.consume_nonce("aa", "1", 0)
    assert not await second.consume_nonce("aa", "2", 0)
    await first.close()
    await second.close()


FILL_DISK = """
import asyncio, resource, signal, sys
from pysync.coordinator.local import LocalCoordinator
from pysync.errors import CoordinatorUnavailable

async def main(folder):
    coordinator = await LocalCoordinator.open_folder(folder, lambda: 1_700_000_000_000)
    for n in range(100):
        assert await coordinator.consume_nonce("aa", f"{n}", 0)
    # No file may grow past these bytes: the write of the next record is cut short, the one after refused.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 * 16 + 5, hard))
    for _ in range(3):
        try:
            await coordinator.consume_nonce("aa", "100", 0)
        except CoordinatorUnavailable:
            print("refused")
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert await coordinator.consume_nonce("aa", "100", 0)
    assert not await coordinator.consume_nonce("aa", "99", 0)
    await coordinator.close()

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.process
async def test_a_full_disk_rejects_and_remembers_nothing_by_halves(tmp_path: Path) -> None:
    process = run_python(FILL_DISK, str(tmp_path))
    outputs, _ = await asyncio.to_thread(process.communicate)
    assert process.returncode == 0
    assert outputs == "refused\n" * 3
    again = await LocalCoordinator.open_folder(tmp_path, lambda: 1_700_000_000_000)
    for n in range(101):
        assert not await again.consume_nonce("aa", f"{n}", 0)
    assert await again.consume_nonce("aa", "101", 0)
    await again.close()


RACE = """
import asyncio, sys
from pysync.coordinator.local import LocalCoordinator

async def main(folder):
    coordinator = await LocalCoordinator.open_folder(folder)
    print("ready", flush=True)
    sys.stdin.readline()
    for n in range(1000):
        if await coordinator.consume_nonce("aa", f"{n}", 0):
            print(n)
    await coordinator.close()

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.process
async def test_of_processes_racing_with_one_nonce_one_accepts_it(tmp_path: Path) -> None:
    outputs = await run_together(RACE, str(tmp_path))
    accepted = [int(line) for output in outputs for line in output.split()]
    assert sorted(accepted) == list(range(1000))


KILLED = """
import asyncio, itertools, sys
from pysync.coordinator.local import LocalCoordinator

async def main(folder):
    coordinator = await LocalCoordinator.open_folder(folder)
    for n in itertools.count():
        assert await coordinator.consume_nonce("aa", f"{n}", 0)
        print(n, flush=True)

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.process
async def test_every_accepted_nonce_survives_a_kill(tmp_path: Path) -> None:
    process = run_python(KILLED, str(tmp_path))
    assert process.stdout is not None
    for _ in range(500):
        await asyncio.to_thread(process.stdout.readline)
    process.kill()
    # Not `communicate`, which would begin in the middle of a line: `readline` has read ahead.
    rest = await asyncio.to_thread(process.stdout.readlines)
    process.communicate()
    accepted = 500 + len([line for line in rest if line.endswith("\n")])
    coordinator = await LocalCoordinator.open_folder(tmp_path)
    for n in range(accepted):
        assert not await coordinator.consume_nonce("aa", f"{n}", 0)
    await coordinator.close()


@pytest.mark.process
async def test_a_stopped_process_that_holds_the_lock_does_not_hang_the_others(tmp_path: Path) -> None:
    coordinator = await LocalCoordinator.open_folder(tmp_path)
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX);"
            "print('held', flush=True); sys.stdin.read()",
            os.fspath(tmp_path / "nonces" / "lock"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert await asyncio.to_thread(holder.stdout.readline) == "held\n"
    with pytest.raises(CoordinatorUnavailable):
        await coordinator.consume_nonce("aa", "1", 0)
    await asyncio.to_thread(holder.communicate)
    assert await coordinator.consume_nonce("aa", "1", 0)
    await coordinator.close()


async def test_expired_counters_and_claims_are_removed(tmp_path: Path, clock: FakeClock) -> None:
    coordinator = await LocalCoordinator.open_folder(tmp_path, clock)
    for turn in range(5):
        for n in range(100):
            await coordinator.increment(f"{turn}-{n}", 1_000)
            await coordinator.put_if_absent(f"{turn}-{n}", b"x", 1_000)
        clock.now_ms += 2_000
    with contextlib.closing(sqlite3.connect(tmp_path / "coordinator.db")) as database:
        for table in ("counter", "claim"):
            assert database.execute(f"SELECT count(*) FROM {table}").fetchone()[0] <= 200
    await coordinator.close()


LEAD = """
import asyncio, sys
from pysync.coordinator.local import LocalCoordinator

async def main(folder):
    coordinator = await LocalCoordinator.open_folder(folder)
    assert await coordinator.acquire_lease("a/b")
    print("leads", flush=True)
    sys.stdin.read()

asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture
def leader(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process, which leads in "a/b"."""
    with run_python(LEAD, str(tmp_path)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "leads\n"
        yield process
        process.kill()


@pytest.mark.process
async def test_kill_of_a_leader_frees_its_lease_at_once(
    tmp_path: Path, leader: "subprocess.Popen[str]"
) -> None:
    coordinator = await LocalCoordinator.open_folder(tmp_path)
    assert not await coordinator.acquire_lease("a/b")
    assert await coordinator.acquire_lease("a")
    leader.kill()
    leader.wait()
    assert await coordinator.acquire_lease("a/b")
    await coordinator.close()


@pytest.mark.process
async def test_lease_of_a_hanging_leader_expires(tmp_path: Path, leader: "subprocess.Popen[str]") -> None:
    leader.send_signal(signal.SIGSTOP)
    clock = FakeClock(wall_clock_ms())
    clock.booted_ms = clock.now_ms - boot_clock_ms()
    coordinator = await LocalCoordinator.open_folder(tmp_path, clock)
    assert not await coordinator.acquire_lease("a/b")
    clock.now_ms += LEASE_MS + 1_000
    assert await coordinator.acquire_lease("a/b")
    await coordinator.close()


async def test_a_folder_of_version_0_1_0_keeps_its_claims(tmp_path: Path, clock: FakeClock) -> None:
    create_database(tmp_path / "coordinator.db", Schema(SCHEMA.steps[:4]))
    with contextlib.closing(sqlite3.connect(tmp_path / "coordinator.db", isolation_level=None)) as database:
        database.execute("INSERT INTO claim VALUES('k', ?, x'68656c64')", (clock.now_ms + 1_000,))
    coordinator = await LocalCoordinator.open_folder(tmp_path, clock)
    assert await coordinator.put_if_absent("k", b"other", 1_000) == b"held"
    assert await coordinator.read("", 10) == []
    last = await coordinator.append([change("1")])
    assert await coordinator.read("", 10) == [(last, change("1"))]
    await coordinator.close()
