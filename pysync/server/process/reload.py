"""Reloads: another configuration for a process that serves, read from its file and applied as a whole, or not
at all."""

import asyncio
import gc
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from pysync.config import Config, ConfigError
from pysync.config.changes import changes
from pysync.errors import ReloadRefused
from pysync.server.app import App
from pysync.server.configured import ConfiguredService
from pysync.server.process import logs
from pysync.server.process.operator_action import AdminRequest, OperatorAction

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
        log_reload(changed)
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


def read_again(read: ReadConfig | None) -> Config:
    """Return the configuration as it is now. Raises ReloadRefused."""
    if read is None:
        raise ReloadRefused("the server was started without a configuration file")
    try:
        return read()
    except ConfigError as error:
        raise ReloadRefused(str(error)) from None


def changed_members(before: Config, after: Config) -> list[str]:
    """Return the paths of the members that differ."""
    return [change.path for change in changes(before, after)]


def log_reload(changed: Sequence[str]) -> None:
    """Log that a configuration was applied."""
    log.info("reloaded the configuration; changed: %s", ", ".join(changed) or "nothing")


class ReloadEndpoint(OperatorAction):
    """Responds to requests to reload, once the configuration is applied by all workers or by none."""

    busy = "A reload is under way: try again when it has finished"
    stopped = "the server stops; it reads the configuration when it starts again"

    def __init__(self, reload: Callable[[], Coroutine[Any, Any, list[str]]]) -> None:
        super().__init__()
        self._reload = reload

    async def act(self, request: AdminRequest) -> dict[str, Any]:
        """Reload, and return the names of the members that have changed. Raises ReloadRefused."""
        return {"changed": await self._reload()}
