"""Snapshots keep their order, and their age is known, although the clock is set forward and back."""

import asyncio
import errno
import json
import random
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest
from support.backup_follower import Follower
from support.backups import restored
from support.depth import depth
from support.faulty_disk import failing
from support.store_samples import contents, document, fill

from pysync.backup import following
from pysync.backup import target as target_module
from pysync.backup.repository import Repository, time_of
from pysync.backup.restoring import find_snapshot_at, parse_time
from pysync.backup.target import FolderTarget
from pysync.store.local.store import LocalStore
from pysync.testing import FakeClock

pytestmark = pytest.mark.timeout(depth(300, 1800))

HOUR_MS = 3_600_000

STEPPED = """
import sys, time
from pathlib import Path

real_ns, step = time.time_ns, Path(sys.argv[1])
time.time_ns = lambda: real_ns() + int(step.read_text()) * 1_000_000

from pysync.cli import main
sys.exit(main.main(sys.argv[2:]))
"""
"""The command line, with a clock that is ahead by the milliseconds in a file."""


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LocalStore]:
    store = await LocalStore.open_folder(tmp_path / "data")
    yield store
    await store.close()


async def put(store: LocalStore, n: int) -> None:
    await store.put("notes/a", document(b'{"n":%d}' % n))


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.long
async def test_each_time_that_a_follower_prints_restores_what_was_stored_then(
    store: LocalStore, tmp_path: Path
) -> None:
    step, chosen = tmp_path / "step", random.Random(18)
    steps_h = [0, 5, -3, 1, -48, *(chosen.randint(-20, 20) for _ in range(depth(2, 100)))]
    step.write_text("0")
    await fill(store, 50)
    arguments = ("--store", f"file:{tmp_path}/data", "--to", f"file:{tmp_path}/backup")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STEPPED, str(step), "backup", *arguments, "--follow", "--every", "0.01",
        stdout=PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    await process.stdout.readline()
    held: dict[int, dict[str, tuple[str, bytes]]] = {}
    for n, hours in enumerate(steps_h):
        replacement = step.with_suffix(".new")
        replacement.write_text(str(int(step.read_text()) + hours * HOUR_MS))
        replacement.replace(step)
        await put(store, n)
        printed = json.loads(await process.stdout.readline())
        held[parse_time(printed["time"])] = await contents(store)
    process.terminate()
    await process.communicate()
    assert [*held] == sorted(held)
    assert len(held) == len(steps_h)
    target = FolderTarget(tmp_path / "backup")
    repository = await Repository.open(target)
    for at_ms, expected in held.items():
        assert await restored(target, await find_snapshot_at(repository, at_ms, print)) == expected


async def test_a_time_that_the_clock_showed_twice_is_the_first_one(store: LocalStore, tmp_path: Path) -> None:
    clock = FakeClock()
    follower = Follower(tmp_path, clock)
    target = follower.target
    for n, step_ms in enumerate((0, 5 * HOUR_MS, -3 * HOUR_MS)):
        clock.step(step_ms)
        clock.now_ms += 1000
        await put(store, n)
        await follower.round()
    await follower.close()
    repository = await Repository.open(target)
    names = await repository.snapshot_names()
    assert clock() < time_of(names[-1])
    for at_ms, expected in (
        (clock() - HOUR_MS, 0),
        (clock(), 0),
        (time_of(names[-1]) - 1, 1),
        (clock() + 3 * HOUR_MS, 2),
    ):
        found = await find_snapshot_at(repository, at_ms, print)
        assert (await restored(target, found))["notes/a"][1] == document(b'{"n":%d}' % expected)


@pytest.mark.slow
async def test_a_follower_keeps_snapshots_by_the_time_that_has_passed(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "TRIM_EVERY_S", 0)
    clock = FakeClock()
    follower = Follower(tmp_path, clock)
    await follower.round()

    async def made(count: int) -> int:
        for n in range(count):
            clock.now_ms += 1000
            await follower.round()  # a round that began before has the time of the last snapshot
            await put(store, n)
            await follower.round()
        return len(await follower.target.names("snapshots"))

    before = await made(5)
    clock.step(5 * HOUR_MS)
    assert await made(5) == before + 5, "none is older than ten minutes"
    clock.step(-5 * HOUR_MS)
    assert await made(5) == before + 10
    clock.now_ms += HOUR_MS
    assert await made(5) < before + 10, "although the clock shows a time before that of the newest"
    await follower.close()


async def test_a_failure_after_a_success_is_retried_soon_although_the_clock_was_set_back(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    follower = Follower(tmp_path, clock)
    await follower.round()
    for n in range(3):
        clock.step(-HOUR_MS)
        await follower.round()
        with failing(monkeypatch, tmp_path / "backup", errno.EIO, ("fsync",), target_module):
            await put(store, n)
            while not (await follower.round()).error:
                pass
        while (await follower.round()).error:
            pass
    await follower.close()
    rounds = [
        (bool(status.error), pause)
        for status, pause in zip(follower.statuses, follower.pauses_s, strict=False)
    ]
    first = [pause for (failed, _), (fails, pause) in pairwise(rounds) if fails and not failed]
    assert first == [following.RETRY_S] * 3
