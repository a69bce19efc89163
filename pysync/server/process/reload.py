"""Reloads: another configuration for a process that serves, read from its file and applied as a whole, or not
at all."""

import asyncio
import gc
import logging
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from typing import Any, Final

from pysync.config import Config, ConfigError
from pysync.config.changes import changes
from pysync.errors import ReloadRefused
from pysync.server.app import App
from pysync.server.configured import ConfiguredService
from pysync.server.process import logs
from pysync.server.process.operator_action import AdminRequest, OperatorAction
from pysync.server.process.worker import Apply, Outcome, Prepare, ReloadRequest, Reply

RELOAD_PATH: Final = "/admin/reload"

ReadConfig = Callable[[], Config]
"""Reads the configuration again. Raises ConfigError."""

log = logging.getLogger("pysync.server")


class Reloads:
    """The reloads of one process, of which one runs at a time: those that are requested meanwhile follow.
    `read` reads the configuration; None: it comes from no file."""

    def __init__(self, app: App, read: ReadConfig | None, worker: int | None = None) -> None:
        self._app = app
        self._read = read
        self._worker = worker
        self._lock = asyncio.Lock()
        self._prepared: ConfiguredService | None = None

    async def reload(self) -> list[str]:
        """Read the configuration and apply it. Returns the members that have changed. Raises ReloadRefused,
        with the reason, if nothing changes. The log has the outcome."""
        async with self._lock:
            try:
                config = await asyncio.to_thread(read_again, self._read)
                await self.prepare(config)
            except ReloadRefused as error:
                log.error("did not reload the configuration: %s", error, exc_info=error.__cause__)
                raise
            changed = await self.apply()
        log.info("reloaded the configuration; changed: %s", ", ".join(changed) or "nothing")
        return changed

    async def prepare(self, config: Config) -> None:
        """Make everything that the configuration needs, and change nothing. Raises ReloadRefused."""
        gc.collect()  # what an earlier configuration has left in cycles, before this one makes others
        try:
            self._prepared = await asyncio.to_thread(self._app.prepare, config)
        except (ConfigError, ValueError) as error:
            raise ReloadRefused(str(error)) from None
        except Exception as error:
            raise ReloadRefused(f"unexpected error: {error!r}") from error

    async def apply(self) -> list[str]:
        """Apply what was prepared, and return the members that have changed."""
        prepared, self._prepared = self._prepared, None
        assert prepared is not None, "it was prepared"
        changed = changed_members(self._app.current.config, prepared.config)
        logs.configure(worker=self._worker, level=prepared.config.server.log_level)
        await self._app.apply(prepared)
        return changed


class WorkerReloads:
    """The reloads of a worker. Its parent reads the configuration, and has all workers apply it or none."""

    def __init__(self, reloads: Reloads, channel: Connection) -> None:
        self._reloads = reloads
        self._channel = channel
        self._outcome: asyncio.Future[Outcome] | None = None
        self._task: asyncio.Task[None] | None = None

    async def reload(self) -> list[str]:
        """Do as `Reloads.reload`."""
        self._outcome = asyncio.get_running_loop().create_future()
        self._channel.send(ReloadRequest())
        outcome = await self._outcome
        if outcome.reason:
            raise ReloadRefused(outcome.reason)
        return list(outcome.changed)

    def received(self, message: Prepare | Apply | Outcome) -> None:
        """Do what the parent says, in turn: it gives up a reload that takes too long, and may request another
        one meanwhile."""
        if not isinstance(message, Outcome):
            self._task = asyncio.get_running_loop().create_task(self._follow(message, self._task))
        elif self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(message)

    async def _follow(self, message: Prepare | Apply, after: asyncio.Task[None] | None) -> None:
        if after is not None:
            await asyncio.wait({after})
        reason = ""
        try:
            if isinstance(message, Prepare):
                await self._reloads.prepare(message.config)
            else:
                await self._reloads.apply()
        except ReloadRefused as error:
            reason = str(error)
        self._channel.send(Reply(message.number, reason))


def read_again(read: ReadConfig | None) -> Config:
    """Return the configuration as it is now. Raises ReloadRefused."""
    if read is None:
        raise ReloadRefused("the server was started without a configuration file")
    try:
        return read()
    except ConfigError as error:
        raise ReloadRefused(str(error)) from None
    except Exception as error:
        raise ReloadRefused(f"unexpected error: {error!r}") from error


def changed_members(before: Config, after: Config) -> list[str]:
    """Return the paths of the members that differ."""
    return [change.path for change in changes(before, after)]


def reload_action(reload: Callable[[], Coroutine[Any, Any, list[str]]]) -> OperatorAction:
    """Return what responds to requests to reload, once all workers have applied the configuration or none."""

    async def act(request: AdminRequest) -> dict[str, Any]:
        return {"changed": await reload()}

    return OperatorAction(
        act,
        busy="A reload is under way: try again when it has finished",
        stopped="the server stops; it reads the configuration when it starts again",
    )
