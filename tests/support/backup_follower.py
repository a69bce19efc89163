"""Followers of a store: one in this process, whose rounds a test counts, and that of a service."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp

from pysync.backup.follow import BackupFollower, FollowerSettings, FollowStatus
from pysync.backup.target import FolderTarget
from pysync.config import StoreConfig
from pysync.testing import FakeClock


class Follower:
    """A follower of the store in `data` below the folder, and what it has said. Its pauses take no time."""

    def __init__(self, folder: Path, clock: FakeClock) -> None:
        self.clock = clock
        self.statuses: list[FollowStatus] = []
        self.pauses_s: list[float] = []
        self.target = FolderTarget(folder / "backup")
        store = StoreConfig(url=f"file:{folder}/data")
        self._changed = asyncio.Condition()
        settings = FollowerSettings(store, f"file:{folder}/backup", None, 10)
        follower = BackupFollower(settings, self._report, sleep=self._sleep, now_ms=clock)
        self._task = asyncio.create_task(follower.run())

    def _report(self, status: FollowStatus) -> None:
        self.statuses.append(status)

    async def _sleep(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        async with self._changed:
            self._changed.notify_all()
        await asyncio.sleep(0)

    async def round(self) -> FollowStatus:
        """Return the status of the next whole round."""
        count = len(self.statuses)
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.statuses) > count + 1)
        return self.statuses[-1]

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})


async def gauges(session: aiohttp.ClientSession, base: str) -> dict[str, float]:
    """The metrics of the backup."""
    async with session.get(f"{base}/metrics") as response:
        lines = (await response.text()).splitlines()
    named = (line.split() for line in lines if line.startswith("pysync_backup"))
    return {name: float(value) for name, value in named}


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until the condition, which asks the service or reads the backup each time, is true."""
    while not await condition():
        pass
