"""Backs up a store again and again, as it changes. `python -m pysync.backup.follow` does so for a service,
in a process of its own, so that neither a slow backup nor its processor time holds up a request.
"""

import asyncio
import dataclasses
import gc
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

import orjson

from pysync.backup.make import RENEW_MS, BackupMaker
from pysync.backup.snapshot import Repository, open_backup
from pysync.backup.source import SnapshotSource, identify_store, open_snapshot_source
from pysync.backup.target import check_apart
from pysync.clock import elapsed_of, wall_clock_ms
from pysync.concurrency import closing
from pysync.config import StoreConfig
from pysync.errors import Unavailable

log = logging.getLogger("pysync.backup")

RETRY_S: Final = 1.0
MAX_RETRY_S: Final = 30.0
"""Pauses after errors: each twice as long as the one before."""
TRIM_PAUSE_S: Final = 0.01
"""Pause in which others write, before more is trimmed."""
KEEP_ALL_MS: Final = 600_000
"""Age up to which every snapshot of a follower is kept; up to `KEEP_MINUTES_MS` it is one a minute, then one
an hour, until `prune` removes more."""
KEEP_MINUTES_MS: Final = 86_400_000
NICENESS: Final = 10
"""A tenth of the processor's time beside a busy server, on one core. Linux derives the priority of reads and
writes from it."""


class FollowerSettings(NamedTuple):
    """The store, the URL of the backup, the file of its key, and the milliseconds from one snapshot to the
    next."""

    store: StoreConfig
    to: str
    key_file: str | None
    every_ms: int

    def encode(self) -> bytes:
        """Return the settings as one line."""
        return orjson.dumps([dataclasses.asdict(self.store), self.to, self.key_file, self.every_ms])

    @classmethod
    def decode(cls, line: bytes) -> "FollowerSettings":
        """Return the settings that `encode` wrote."""
        store, *others = orjson.loads(line)
        return cls(StoreConfig(**store), *others)


class FollowStatus(NamedTuple):
    """The outcome of one round. The backup has everything that was written before `moment_ms`, which was at
    most `age_ms` before the end of the round. `objects` and `bytes_written` are those of the round,
    `unreadable` the objects of the newest snapshot that could not be read. After an error, which is its text,
    the moment is that of the last success, or 0."""

    moment_ms: int
    objects: int = 0
    bytes_written: int = 0
    unreadable: int = 0
    error: str = ""
    age_ms: int = 0


class BackupFollower:
    """Makes snapshots of a store until it is cancelled. `on_status` is called after each round."""

    def __init__(
        self,
        settings: FollowerSettings,
        on_status: Callable[[FollowStatus], None],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now_ms: Callable[[], int] = wall_clock_ms,
    ) -> None:
        self._settings = settings
        self._on_status = on_status
        self._sleep = sleep
        self._now_ms = now_ms
        self._elapsed_ms = elapsed_of(now_ms)
        self._status = FollowStatus(0)
        self._made: dict[str, int] = {}

    async def run(self) -> None:
        """Follow the store. Errors of the store or the backup end a round, and are retried after a pause."""
        pause_s = RETRY_S
        while True:
            before = self._status
            try:
                await self._follow()
            except (Unavailable, ValueError, OSError) as error:
                why = error.detail if isinstance(error, Unavailable) else str(error)
                log.warning("the backup failed; will retry: %s", why)
                self._on_status(self._status._replace(objects=0, bytes_written=0, error=why or str(error)))
            pause_s = min(2 * pause_s, MAX_RETRY_S) if self._status is before else RETRY_S
            await self._sleep(pause_s)

    async def _follow(self) -> None:
        """Make snapshots until something fails."""
        settings = self._settings
        check_apart(settings.store.url, settings.to)
        async with open_backup(settings.to, settings.key_file, create=True) as repository:
            store_id = await identify_store(settings.store, repository)
            async with closing(open_snapshot_source(settings.store, self._now_ms)) as source:
                await self._make_snapshots(source, repository, store_id)

    async def _make_snapshots(self, source: SnapshotSource, repository: Repository, store_id: str) -> None:
        """Make snapshots until something fails."""
        url, every_ms = self._settings.store.url, self._settings.every_ms
        maker = BackupMaker(source, repository, self._now_ms, _log_problem, url, store_id)
        trimmed_ms = self._elapsed_ms()
        try:
            while True:
                started_ms = self._elapsed_ms()
                objects, written = maker.report.objects, repository.bytes_written
                snapshot = await maker.make(only_changes=True)
                if snapshot is not None:
                    self._made[snapshot.name] = started_ms
                self._status = FollowStatus(
                    maker.moment_ms,
                    maker.report.objects - objects,
                    repository.bytes_written - written,
                    maker.report.unreadable,
                    age_ms=self._elapsed_ms() - started_ms,
                )
                self._on_status(self._status)
                if started_ms - trimmed_ms >= RENEW_MS:
                    while not await source.trim():
                        await self._sleep(TRIM_PAUSE_S)
                    trimmed_ms = started_ms
                    gc.collect()
                    await self._thin(repository.target.delete)
                took_ms = self._elapsed_ms() - started_ms
                await self._sleep(max(0, every_ms - took_ms) / 1000)
        finally:
            await maker.close()

    async def _thin(self, delete: Callable[[str], Awaitable[None]]) -> None:
        """Remove snapshots of this follower that are close to later ones."""
        kept = thinned(self._made, self._elapsed_ms())
        for name in sorted(self._made.keys() - kept.keys()):
            await delete(name)
        self._made = kept


def thinned(made: Mapping[str, int], now_ms: int) -> dict[str, int]:
    """Return the snapshots that a follower keeps, the last one of each minute or hour. `made` has the name of
    each, oldest first, and when it was made by the clock that shows `now_ms`."""
    kept: dict[tuple[int, int], tuple[str, int]] = {}
    for name, at_ms in made.items():
        age_ms = now_ms - at_ms
        span_ms = 1 if age_ms < KEEP_ALL_MS else 60_000 if age_ms < KEEP_MINUTES_MS else 3_600_000
        kept[span_ms, at_ms // span_ms] = name, at_ms
    return dict(kept.values())


def adjust_process() -> None:
    """Let other processes go first, and leave garbage collection to `BackupFollower`: a round makes many
    objects and hardly a cycle. For processes that only follow a store. The priority is that of this thread
    and of those that it starts, so call it before there are others."""
    gc.disable()
    with suppress(OSError):
        os.nice(NICENESS)
        if sys.platform == "linux":  # it never interrupts a thread that runs
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _log_problem(key: str, why: str) -> None:
    log.error("cannot back up %r: %s", key, why)


def _print(value: object) -> None:
    with suppress(BrokenPipeError):
        sys.stdout.buffer.write(orjson.dumps(value) + b"\n")
        sys.stdout.buffer.flush()


class _PrintRecords(logging.Handler):
    """Prints what is logged, so that the service logs it in its own format."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record."""
        _print({"logger": record.name, "level": record.levelno, "message": self.format(record)})


async def _serve() -> None:
    """Read settings from the first line of standard input, and follow the store until the input ends. Print
    the status of each round, and what is logged, as lines of JSON: an array and an object."""
    loop = asyncio.get_running_loop()
    adjust_process()
    settings = FollowerSettings.decode(await asyncio.to_thread(sys.stdin.buffer.readline))

    following = asyncio.ensure_future(BackupFollower(settings, lambda status: _print([*status])).run())
    ended = loop.run_in_executor(None, sys.stdin.buffer.read)
    await asyncio.wait({following, ended}, return_when=asyncio.FIRST_COMPLETED)
    if following.done():
        log.critical("the backup ended", exc_info=following.exception())
        os._exit(1)  # the thread that reads the input would keep the process
    following.cancel()
    await asyncio.wait({following})


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", level=logging.WARNING, handlers=[_PrintRecords()])
    asyncio.run(_serve())
