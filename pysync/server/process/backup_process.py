"""The backup that a service makes of its own store: a process of its own, in one of all processes of the
service. The event loop only reads a line about each snapshot, so a slow backup holds up no request."""

import asyncio
import logging
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import orjson

from pysync.backup.follow import FollowerSettings, FollowStatus
from pysync.backup.repair import Repairer
from pysync.backup.snapshot import open_backup
from pysync.clock import SteadyClock, elapsed_of
from pysync.config import BackupConfig, StoreConfig
from pysync.coordinator import LEASE_RENEW_S, Coordinator, holds_lease
from pysync.errors import Unavailable
from pysync.migrate import Damage
from pysync.server.process.metrics import Counters
from pysync.store import Store

LEASE: Final = "backup"
END_WITHIN_S: Final = 5.0
"""Seconds until a process that does not end is killed. The next one continues."""
BACKUP_LAG: Final = "pysync_backup_lag_seconds"
BACKUP_SUCCESS: Final = "pysync_backup_last_success_timestamp_seconds"
BACKUP_FAILURES: Final = "pysync_backup_failures"
BACKUP_BYTES: Final = "pysync_backup_bytes"
BACKUP_UNREADABLE: Final = "pysync_backup_unreadable_objects"

log = logging.getLogger("pysync.server")


async def repair_from(config: BackupConfig, store: Store, damages: Sequence[Damage]) -> None:
    """Repair what is damaged from the backup of the service, and log the outcome for each key. A backup that
    cannot be used, or not with the key that the service has, is logged."""

    def outcome(key: str, why: str | None) -> None:
        if why is None:
            log.warning("repaired %r from the backup", key)
        else:
            log.error("cannot repair %r from the backup: %s", key, why)

    try:
        async with open_backup(config.to, config.key_file) as repository:
            await Repairer(repository, store, outcome).repair(damages)
    except (Unavailable, ValueError, OSError) as error:
        why = error.detail if isinstance(error, Unavailable) else error
        log.error("cannot repair anything from the backup: %s", why)


def of_config(
    store: StoreConfig, config: BackupConfig, coordinator: Coordinator, counters: Counters, clock: SteadyClock
) -> "BackupProcess":
    """Return the backup process that `config` asks for."""
    settings = FollowerSettings(store, config.to, config.key_file, config.every_ms)
    return BackupProcess(settings, coordinator, counters.gauges, counters.count, clock)


class BackupProcess:
    """Runs the follower while this process holds the lease, and reports what it says: `gauges` has the lag
    and the time of the newest snapshot, `count` adds failures and bytes."""

    def __init__(
        self,
        settings: FollowerSettings,
        coordinator: Coordinator,
        gauges: Counter[str],
        count: Callable[..., None],
        now_ms: Callable[[], int],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._settings = settings
        self._coordinator = coordinator
        self._gauges = gauges
        self._count = count
        self._elapsed_ms = elapsed_of(now_ms)
        self._sleep = sleep
        self._moment_ms: int | None = None
        """The newest moment that the backup has, or its beginning, by `_elapsed_ms`; None without the
        lease."""

    async def run(self) -> None:
        """Run the process while this one holds the lease, and start it again when it ends. Cancelling this
        ends the process; the next one continues the snapshot that it was making."""
        try:
            while True:
                if await holds_lease(self._coordinator, LEASE):
                    try:
                        await self._follow()
                    except OSError as error:
                        log.error("failed to start the backup; will retry: %s", error)
                        self._count(BACKUP_FAILURES)
                else:
                    self._forget()
                await self._sleep(LEASE_RENEW_S)
        finally:
            self._forget()

    async def _follow(self) -> None:
        """Run the process until it ends or the lease is lost."""
        if self._moment_ms is None:
            self._moment_ms = self._elapsed_ms()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pysync.backup.follow", stdin=PIPE, stdout=PIPE
        )
        assert process.stdin is not None
        reading = asyncio.create_task(self._read(process))
        try:
            process.stdin.write(self._settings.encode() + b"\n")
            while process.returncode is None and await holds_lease(self._coordinator, LEASE):
                self._update_lag()
                await self._sleep(LEASE_RENEW_S)
            if process.returncode is not None:
                log.error("the backup ended with status %s; will start it again", process.returncode)
                self._count(BACKUP_FAILURES)
        finally:
            process.stdin.close()  # the process ends
            try:
                await asyncio.wait_for(process.wait(), END_WITHIN_S)
            except TimeoutError:
                process.kill()
                await process.wait()
            reading.cancel()

    async def _read(self, process: Process) -> None:
        """Read the status of each round, and log what the process logs."""
        assert process.stdout is not None
        async for line in process.stdout:
            read = orjson.loads(line)
            if isinstance(read, dict):
                message = read["message"]
                logging.getLogger(read["logger"]).log(read["level"], "%s", message)
                continue
            status = FollowStatus(*read)
            self._count(BACKUP_BYTES, by=status.bytes_written)
            if status.error:
                self._count(BACKUP_FAILURES)
            else:
                self._gauges[BACKUP_SUCCESS] = status.moment_ms // 1000
                self._gauges[BACKUP_UNREADABLE] = status.unreadable
                self._moment_ms = self._elapsed_ms() - status.age_ms
            self._update_lag()

    def _update_lag(self) -> None:
        """Set the age of the newest moment that the backup has."""
        assert self._moment_ms is not None
        self._gauges[BACKUP_LAG] = (self._elapsed_ms() - self._moment_ms) // 1000

    def _forget(self) -> None:
        """Report nothing: another process makes the backup."""
        self._moment_ms = None
        for metric in (BACKUP_LAG, BACKUP_SUCCESS, BACKUP_UNREADABLE):
            self._gauges.pop(metric, None)
