"""A store is backed up again and again, by a process of its own."""

import asyncio
import errno
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import cast

import aiohttp
import pytest
from support.backup_follower import Follower, eventually, gauges
from support.backups import restored
from support.clients import Browser, Start
from support.collections import collection
from support.faulty_disk import failing
from support.server_process import serving
from support.store_samples import contents, document, fill

from pysync.backup import follow
from pysync.backup import target as target_module
from pysync.backup.follow import FollowerSettings, thinned
from pysync.backup.source import FolderSnapshotSource
from pysync.backup.target import FolderTarget
from pysync.cli.main import build_parser
from pysync.clock import wall_clock_ms
from pysync.config import BackupConfig, StoreConfig
from pysync.store import STORE_KEY
from pysync.store.local import capture
from pysync.store.local.capture import FolderCapture
from pysync.store.local.store import LocalStore
from pysync.testing import FakeClock

HOUR_MS = 3_600_000


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LocalStore]:
    store = await LocalStore.open_folder(tmp_path / "data")
    yield store
    await store.close()


@pytest.fixture
async def follower(store: LocalStore, tmp_path: Path) -> AsyncIterator[Follower]:
    """A follower of the store that has made a snapshot."""
    await fill(store, 50)
    follower = Follower(tmp_path, FakeClock())
    await follower.round()
    yield follower
    await follower.close()


async def put(store: LocalStore, n: int) -> None:
    await store.put("notes/a", document(b'{"n":%d}' % n))


async def held(store: LocalStore) -> dict[str, tuple[str, bytes]]:
    """Everything in the store, apart from its id."""
    found = await contents(store)
    del found[STORE_KEY]
    return found


async def test_each_round_has_what_was_written_before_it(store: LocalStore, follower: Follower) -> None:
    for n in range(5):
        await put(store, n)
        follower.clock.now_ms += 1
        assert (await follower.round()).error == ""
        assert await restored(follower.target) == await held(store)
    before = await follower.target.list_files("snapshots")
    await follower.round()
    assert await follower.target.list_files("snapshots") == before, "nothing has changed"
    assert follower.statuses[-1].moment_ms > follower.statuses[0].moment_ms


@pytest.mark.slow
async def test_full_or_absent_destination_is_retried_and_then_complete(
    store: LocalStore, follower: Follower, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (errno.ENOSPC, errno.EHOSTDOWN):
        reason = os.strerror(number)
        moment_ms = follower.statuses[-1].moment_ms
        with failing(monkeypatch, tmp_path / "backup", number, ("fsync",), target_module):
            await store.put("notes/a", document(b'{"why":"%b"}' % reason.encode()))
            status = await follower.round()
            assert reason in status.error
            assert status.moment_ms == moment_ms
        while (await follower.round()).error:
            pass
        assert await restored(follower.target) == await held(store)


async def test_failure_after_a_success_is_retried_soon_although_the_clock_was_set_back(
    store: LocalStore, follower: Follower, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(3):
        follower.clock.step(-HOUR_MS)
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
    assert first == [follow.RETRY_S] * 3


async def test_read_rows_are_forgotten_in_small_transactions(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "TRIM_ROWS", 2)
    follower = FolderCapture(tmp_path / "data", wall_clock_ms)
    follower.follow()
    await fill(store, 50)
    assert follower.begin()
    while follower.next_batch():
        pass
    follower.end(done=True)
    rounds = 1
    while not follower.trim():
        rounds += 1
    assert rounds >= 3
    await store.put("notes/a", document(b"{}"))
    assert follower.begin()
    assert [row.key for row in follower.next_batch()] == ["notes/a"]
    follower.end(done=True)
    follower.close()


def test_follower_makes_a_snapshot_each_five_seconds_by_default() -> None:
    assert BackupConfig(to="file:./backup").every_ms == 5000
    assert build_parser().parse_args(["backup", "--to", "file:./backup", "--follow"]).every == 5


@pytest.mark.slow
async def test_snapshots_become_fewer_with_the_time_that_has_passed(
    store: LocalStore, follower: Follower
) -> None:
    clock = follower.clock

    async def made(count: int) -> int:
        for n in range(count):
            clock.now_ms += 1000
            await put(store, n)
            await follower.round()
        return len(await follower.target.list_files("snapshots"))

    before = await made(5)
    clock.step(5 * HOUR_MS)
    assert await made(5) == before + 5, "none is older than ten minutes"
    clock.step(-5 * HOUR_MS)
    assert await made(5) == before + 10
    clock.now_ms += HOUR_MS
    assert await made(5) < before + 10, "although the clock shows a time before that of the newest"
    assert await restored(follower.target) == await held(store)


class SlowCapture:
    """A capture whose `begin` takes a while, and ends at once if anything else is called meanwhile."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.begun = Event()
        self._disturbed = Event()

    def begin(self, *, exclusive: bool) -> bool:
        self.begun.set()
        self._disturbed.wait(0.2)
        self.calls.append("began")
        return False

    def end(self, *, done: bool) -> None:
        self._call("end")

    def close(self) -> None:
        self._call("close")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        self._disturbed.set()


async def test_a_store_is_not_closed_while_a_thread_reads_it() -> None:
    capture = SlowCapture()
    source = FolderSnapshotSource(cast(FolderCapture, capture))
    reading = asyncio.ensure_future(anext(source.changes(exclusive=False)))
    await asyncio.to_thread(capture.begun.wait)
    reading.cancel()
    await asyncio.wait({reading})
    await source.close()
    assert capture.calls == ["began", "end", "close"]


def test_snapshots_of_a_follower_become_fewer_with_their_age() -> None:
    now_ms = 1_700_000_000_000
    made = {f"snapshots/{n}": now_ms - 30_000 * n for n in reversed(range(10_000))}
    kept = thinned(made, now_ms)
    ages_ms = [now_ms - at_ms for at_ms in kept.values()]
    assert sum(age < follow.KEEP_ALL_MS for age in ages_ms) == 20
    assert 1430 <= sum(follow.KEEP_ALL_MS <= age < follow.KEEP_MINUTES_MS for age in ages_ms) <= 1432
    assert 59 <= sum(age >= follow.KEEP_MINUTES_MS for age in ages_ms) <= 61
    assert ages_ms == sorted(ages_ms, reverse=True)
    assert "snapshots/0" in kept
    assert kept.items() <= made.items()
    assert thinned(kept, now_ms) == kept


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux only")
async def test_no_thread_of_the_process_competes_with_the_server(store: LocalStore, tmp_path: Path) -> None:
    await fill(store, 50)
    settings = FollowerSettings(StoreConfig(url=f"file:{tmp_path}/data"), f"file:{tmp_path}/backup", None, 10)
    command = [sys.executable, "-m", "pysync.backup.follow"]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(settings.encode() + b"\n")
    await process.stdout.readline()
    threads = [int(name) for name in os.listdir(f"/proc/{process.pid}/task")]
    assert len(threads) > 1
    expected = min(19, os.getpriority(os.PRIO_PROCESS, 0) + follow.NICENESS)
    assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {expected}
    assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_BATCH}
    process.stdin.close()
    await process.wait()


def settings_of(folder: Path) -> dict[str, object]:
    """The configuration of a service that backs up its store."""
    backup = {"to": f"file:{folder}/backup", "everyMs": 50}
    return {"store": f"file:{folder}/data", "collections": [collection("notes")], "backup": backup}


@pytest.mark.process
@pytest.mark.slow
async def test_service_backs_up_its_store(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    base = await start(settings_of(tmp_path))
    browser, target = Browser(base, session), FolderTarget(tmp_path / "backup")
    for n in range(3):
        assert (await browser.push(f"notes/new{n}", {"n": n})).status == 200

        async def has_it(name: str = f"notes/new{n}") -> bool:
            return bool(await target.list_files("snapshots")) and name in await restored(target)

        await eventually(has_it)

    async def has_metrics() -> bool:
        return (await gauges(session, base))["pysync_backup_last_success_timestamp_seconds"] > 1e9

    await eventually(has_metrics)
    found = await gauges(session, base)
    assert found.get("pysync_backup_failures_total", 0) == 0
    assert found["pysync_backup_bytes_total"] > 0
    assert found["pysync_backup_lag_seconds"] < 60
    assert found["pysync_backup_unreadable_objects"] == 0


@pytest.mark.process
@pytest.mark.slow
async def test_one_process_backs_up_through_all_reloads(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    browser, target = Browser(await start(settings_of(tmp_path)), session), FolderTarget(tmp_path / "backup")
    app = start.apps[-1]  # type: ignore[attr-defined]

    def followers() -> set[str]:
        """The processes of this test that back up."""
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        return {
            pid for pid in children if b"pysync.backup.follow" in Path(f"/proc/{pid}/cmdline").read_bytes()
        }

    async def has_snapshot() -> bool:
        return bool(await target.list_files("snapshots"))

    await eventually(has_snapshot)
    before = followers()
    for n in range(20):
        assert (await browser.push(f"notes/{n}", {"n": n})).status == 200
        await app.apply(app.prepare(app.current.config))

    async def has_last() -> bool:
        return "notes/19" in await restored(target)

    await eventually(has_last)
    assert followers() == before
    assert len(before) == 1


@pytest.mark.process
@pytest.mark.slow
async def test_readiness_does_not_depend_on_the_backup(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    (tmp_path / "backup").write_text("a file is in the place of the folder")
    base = await start(settings_of(tmp_path))

    async def has_failed() -> bool:
        return (await gauges(session, base)).get("pysync_backup_failures_total", 0) > 0

    await eventually(has_failed)
    async with session.get(f"{base}/health/ready") as response:
        assert response.status == 200
    assert (await Browser(base, session).push("notes/a", {})).status == 200
    os.unlink(tmp_path / "backup")

    async def has_succeeded() -> bool:
        return (await gauges(session, base))["pysync_backup_last_success_timestamp_seconds"] > 0

    await eventually(has_succeeded)


@pytest.mark.process
@pytest.mark.slow
async def test_failures_of_the_backup_of_a_service_are_lines_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "backup").write_text("a file is in the place of the folder")
    async with serving(tmp_path, backup={"to": f"file:{tmp_path}/backup", "everyMs": 50}) as server:

        async def has_failed() -> bool:
            return "the backup failed; will retry" in server.log.read_text()

        await eventually(has_failed)
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    failures = [line for line in lines if line["message"].startswith("the backup failed; will retry: ")]
    assert {(line["level"], line["logger"]) for line in failures} == {("warning", "pysync.backup")}
