"""A store is backed up again and again, by a process of its own."""

import asyncio
import errno
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from threading import Event
from typing import cast

import aiohttp
import pytest
from support.backup_follower import Follower, eventually, gauges
from support.backups import restored
from support.cli_runner import running
from support.clients import Browser, Start
from support.faulty_disk import failing
from support.server_process import serving
from support.store_samples import contents, document, fill

from pysync.backup import following
from pysync.backup import target as target_module
from pysync.backup.following import FollowerSettings, thinned
from pysync.backup.repository import Repository
from pysync.backup.source import FolderSnapshotSource
from pysync.backup.target import FolderTarget
from pysync.cli.main import build_parser
from pysync.clock import wall_clock_ms
from pysync.config import BackupConfig, StoreConfig
from pysync.store.local import capture
from pysync.store.local.capture import FolderCapture
from pysync.store.local.store import LocalStore

NOTES = {"name": "notes", "storagePath": "n/{id}", "readRoles": ["public"], "writeRoles": ["public"]}


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LocalStore]:
    store = await LocalStore.open_folder(tmp_path / "data")
    yield store
    await store.close()


async def test_each_round_has_what_was_written_before_it(store: LocalStore, tmp_path: Path) -> None:
    await fill(store, 50)
    follower = Follower(tmp_path)
    await follower.round()
    for n in range(5):
        await store.put("notes/a", document(b'{"n":%d}' % n))
        status = await follower.round()
        assert status.error == ""
        assert await restored(follower.target) == await contents(store)
    before = len(await follower.target.names("snapshots"))
    await follower.round()
    assert len(await follower.target.names("snapshots")) == before, "nothing has changed"
    assert follower.statuses[-1].moment_ms > follower.statuses[0].moment_ms
    await follower.close()


@pytest.mark.slow
async def test_a_full_or_absent_destination_is_retried_and_then_complete(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(store, 50)
    follower = Follower(tmp_path)
    await follower.round()
    for number in (errno.ENOSPC, errno.EHOSTDOWN):
        reason = os.strerror(number)
        with failing(monkeypatch, tmp_path / "backup", number, ("fsync",), target_module):
            await store.put("notes/a", document(b'{"why":"%b"}' % reason.encode()))
            status = await follower.round()
            assert reason in status.error
            assert status.moment_ms == follower.statuses[0].moment_ms or status.moment_ms > 0
        while (await follower.round()).error:
            pass
        assert await restored(follower.target) == await contents(store)
    await follower.close()


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


def test_follower_makes_two_snapshots_a_second_by_default() -> None:
    """The recovery point is the pause and twice the time of a round, and should be below a second."""
    assert BackupConfig(to="file:./backup").every_ms == 500
    assert build_parser().parse_args(["backup", "--to", "file:./backup", "--follow"]).every == 0.5


@pytest.mark.slow
async def test_snapshots_become_fewer_while_the_store_is_written_all_the_time(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "TRIM_ROWS", 2)
    monkeypatch.setattr(following, "TRIM_EVERY_S", 0)
    monkeypatch.setattr(following, "KEEP_ALL_MS", -1)
    monkeypatch.setattr(following, "KEEP_MINUTES_MS", -1)
    follower = Follower(tmp_path)
    await follower.round()
    for n in range(8):
        for key in range(10):
            await store.put(f"notes/{key}", document(b'{"n":%d}' % n))
        await follower.round()
    assert len(await follower.target.names("snapshots")) <= 4, "one an hour, and those that were just made"
    await follower.close()


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
    assert sum(age < following.KEEP_ALL_MS for age in ages_ms) == 20
    assert 1430 <= sum(following.KEEP_ALL_MS <= age < following.KEEP_MINUTES_MS for age in ages_ms) <= 1432
    assert 59 <= sum(age >= following.KEEP_MINUTES_MS for age in ages_ms) <= 61
    assert ages_ms == sorted(ages_ms, reverse=True)
    assert "snapshots/0" in kept
    assert kept.items() <= made.items()
    assert thinned(kept, now_ms) == kept


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux only")
async def test_no_thread_of_the_process_competes_with_the_server(store: LocalStore, tmp_path: Path) -> None:
    await fill(store, 50)
    settings = FollowerSettings(StoreConfig(url=f"file:{tmp_path}/data"), f"file:{tmp_path}/backup", None, 10)
    command = [sys.executable, "-m", "pysync.backup.following"]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(settings.encode() + b"\n")
    await process.stdout.readline()
    threads = [int(name) for name in os.listdir(f"/proc/{process.pid}/task")]
    assert len(threads) > 1
    expected = min(19, os.getpriority(os.PRIO_PROCESS, 0) + following.NICENESS)
    assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {expected}
    assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_BATCH}
    process.stdin.close()
    await process.wait()


@pytest.mark.process
@pytest.mark.slow
async def test_a_service_backs_up_its_store(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    members = {
        "store": f"file:{tmp_path}/data",
        "collections": [NOTES],
        "backup": {"to": f"file:{tmp_path}/backup", "everyMs": 50},
    }
    base = await start(members)
    browser, target = Browser(base, session), FolderTarget(tmp_path / "backup")
    for n in range(3):
        assert (await browser.push(f"n/new{n}", {"n": n})).status == 200

        async def has_it(name: str = f"n/new{n}") -> bool:
            repository = await Repository.open(target, create=True)
            newest = await repository.newest()
            return newest is not None and newest.is_complete and name in await restored(target)

        await eventually(has_it)

    async def has_metrics() -> bool:
        found = await gauges(session, base)
        return found["pysync_backup_last_success_timestamp_seconds"] > 1e9

    await eventually(has_metrics)
    found = await gauges(session, base)
    assert found.get("pysync_backup_failures_total", 0) == 0
    assert found["pysync_backup_bytes_total"] > 0
    assert found["pysync_backup_lag_seconds"] < 60


@pytest.mark.process
@pytest.mark.slow
async def test_readiness_does_not_depend_on_the_backup(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    (tmp_path / "backup").write_text("a file is in the place of the folder")
    members = {
        "store": f"file:{tmp_path}/data",
        "collections": [NOTES],
        "backup": {"to": f"file:{tmp_path}/backup", "everyMs": 50},
    }
    base = await start(members)

    async def has_failed() -> bool:
        return (await gauges(session, base)).get("pysync_backup_failures_total", 0) > 0

    await eventually(has_failed)
    async with session.get(f"{base}/health/ready") as response:
        assert response.status == 200
    assert (await Browser(base, session).push("n/a", {})).status == 200
    os.unlink(tmp_path / "backup")

    async def has_succeeded() -> bool:
        return (await gauges(session, base))["pysync_backup_last_success_timestamp_seconds"] > 0

    await eventually(has_succeeded)


@pytest.mark.process
@pytest.mark.slow
async def test_failures_of_a_services_backup_are_lines_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "backup").write_text("a file is in the place of the folder")
    async with serving(tmp_path, backup={"to": f"file:{tmp_path}/backup", "everyMs": 50}) as server:

        async def has_failed() -> bool:
            return "the backup failed; will retry" in server.log.read_text()

        await eventually(has_failed)
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
    failures = [line for line in lines if line["message"].startswith("the backup failed; will retry: ")]
    assert {(line["level"], line["logger"]) for line in failures} == {("warning", "pysync.backup")}


@pytest.mark.process
async def test_a_follower_that_cannot_go_on_ends_with_an_error(store: LocalStore, tmp_path: Path) -> None:
    locations = ("--store", f"file:{tmp_path}/data", "--to", f"file:{tmp_path}/backup")
    async with running("backup", *locations, "--follow", "--key", f"{tmp_path}/away.pub") as process:
        output, errors = await process.communicate()
    said = f"pysync: {tmp_path}/away.pub: No such file or directory\n".encode()
    assert (process.returncode, output, errors) == (1, b"", said)
