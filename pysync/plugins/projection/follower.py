"""The plugins that keep lists. One process of a service follows the change log and folds changes into lists;
if it ends, another takes over."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cached_property
from hashlib import sha256
from typing import Final

import orjson

from pysync._core import PanicException
from pysync.config import Config, ConfigError, Problem
from pysync.coordinator import LEASE_RENEW_S, holds_lease
from pysync.engine.changes import parse_change
from pysync.errors import Unavailable
from pysync.plugins import PluginContext
from pysync.plugins.projection.lists import ListWriter
from pysync.plugins.projection.rebuild import rebuild
from pysync.plugins.projection.spec import ProjectionSpec, spec_from_config
from pysync.store import StoredObject

PAGE: Final = 500
"""Maximum number of changes that are folded together."""

MIN_INTERVAL_S: Final = 0.1
"""Seconds between pages that are not full. A list with constant writes is therefore put ten times a second,
whatever their number. A process in which pushes wait for another one's lists polls its progress as often."""

CLOSE_S: Final = 5.0


log = logging.getLogger("pysync.projections")


class ProjectionWorker:
    """Folds changes into lists, from the checkpoint on, while this process holds the lease."""

    def __init__(self, name: str, projections: Sequence[ProjectionSpec], services: PluginContext) -> None:
        """Needs a running event loop."""
        digest = sha256(name.encode()).hexdigest()[:32]
        self._checkpoint = f"_pysync/projections/{digest}"
        self._name = f"projections-{digest}"
        self._lists = ListWriter(projections, services)
        self._store = services.store
        self._log = services.outbox.log
        self._coordinator = services.coordinator
        self._now_ms, self._set_gauge = services.now_ms, services.set_gauge
        self._loop = asyncio.get_running_loop()
        self._is_leader = self._closing = self._is_idle = False
        self._after = self._saved = ""
        self._saved_at = 0.0
        self._advanced = asyncio.Event()
        self._poll_lock = asyncio.Lock()
        self._next_poll_at, self._polled = 0.0, ""
        # Somebody elsewhere may wait for what the checkpoint says.
        self._saves_each_page = any(one.wait for one in projections) and services.config.is_multi_process
        self._task = self._loop.create_task(self._run())

    async def wait_until_folded(self, change_id: str) -> None:
        """Return once all changes up to `change_id` are folded, here or by the process that holds the lease.
        Raises Unavailable."""
        while self._after < change_id and (self._is_leader or await self._poll_leader() < change_id):
            with suppress(TimeoutError):
                async with asyncio.timeout(MIN_INTERVAL_S):
                    await self._advanced.wait()

    async def _poll_leader(self) -> str:
        """Poll the progress of the process that holds the lease, for all waiting callers."""
        async with self._poll_lock:
            if self._loop.time() >= self._next_poll_at:
                self._polled = await self._read_checkpoint() or ""
                self._next_poll_at = self._loop.time() + MIN_INTERVAL_S
        return self._polled

    async def close(self) -> None:
        """Finish the current page, within some seconds, and save the checkpoint."""
        self._closing = True
        if self._is_idle:
            self._task.cancel()
        await asyncio.wait([self._task], timeout=CLOSE_S)
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        while not self._closing:
            try:
                self._is_leader = await self._coordinator.acquire_lease(self._name)
                if self._is_leader:
                    await self._lead()
            except Unavailable as error:
                log.warning("projections wait: %s", error.detail)
            except (Exception, PanicException):
                log.exception("projections failed, and go on from where they were a moment ago")
            if not self._closing:
                with self._idle():
                    await asyncio.sleep(LEASE_RENEW_S)

    async def _lead(self) -> None:
        keeping = self._loop.create_task(self._renew_lease())
        try:
            self._after = await self._resume_position()
            while self._is_leader and not self._closing:
                await self._advance()
        finally:
            self._report_lag(0)
            keeping.cancel()
            await asyncio.wait([keeping])
            # It is cancelled where it only waits; then this is the last that is done.
            with suppress(Unavailable):
                await self._save()
        if not self._closing:
            await self._drain_after_handover()

    async def _renew_lease(self) -> None:
        """Renew the lease periodically, also during a long page."""
        while self._is_leader:
            await asyncio.sleep(LEASE_RENEW_S)
            self._is_leader = await holds_lease(self._coordinator, self._name)

    def _report_lag(self, lag_s: int) -> None:
        """Report the age of the writes that are being folded, in seconds."""
        self._set_gauge("pysync_projection_lag_seconds", lag_s, self._name)

    async def _advance(self) -> None:
        """Fold the next page; after the last one, wait for changes."""
        began = self._loop.time()
        found = await self._fold_page()
        if found is None:
            self._after = await self._rebuild_all()
            return
        if self._saves_each_page or self._loop.time() >= self._saved_at + LEASE_RENEW_S:
            await self._save()
        if found < PAGE:
            self._report_lag(0)
        if found < PAGE and not self._closing:
            with self._idle():
                await self._log.wait_for_change(self._after)
                await asyncio.sleep(began + MIN_INTERVAL_S - self._loop.time())

    async def _fold_page(self) -> int | None:
        """Fold the next changes and return their number; None if the change log no longer has them."""
        found = await self._log.read(self._after, PAGE)
        if found:
            changes = [parse_change(change) for _, change in found]
            self._report_lag(max(0, self._now_ms() - changes[0].timestamp_ms) // 1000)
            await self._lists.fold(changes)
            self._after = found[-1][0]
            self._advanced.set()
            self._advanced = asyncio.Event()
        # A log may answer at once, and of a page no source of a list be written.
        await asyncio.sleep(0)
        return None if found is None else len(found)

    async def _drain_after_handover(self) -> None:
        """Fold the changes up to now. Another process already holds the lease, and the last put of this
        process may predate a write that the other one has folded."""
        until = await self._log.last_id()
        while self._after < until and await self._fold_page():
            pass

    async def _resume_position(self) -> str:
        """Return the id to continue from; without a checkpoint, the one before the oldest change."""
        self._saved, self._saved_at = "", 0.0
        found = await self._read_checkpoint()
        if found is None:
            return await self._rebuild_all()
        if found:
            self._saved = found
            return found
        newest = await self._log.last_id()
        # At an empty log that one has a name, so that it is known again when the log is another.
        return "" if await self._log.read("", 1) else newest

    async def _read_checkpoint(self) -> str | None:
        """Return the id in the checkpoint: `""` without one, None if it cannot be read."""
        found = await self._store.get(self._checkpoint)
        if not isinstance(found, StoredObject):
            return ""
        try:
            return str(orjson.loads(found.body)["after"])
        except (ValueError, KeyError, TypeError):
            return None

    async def _rebuild_all(self) -> str:
        """Rebuild all lists from their sources, and continue with the changes since the start of the
        rebuild."""
        log.warning("the change log does not reach back to where projections were: all lists are rebuilt")
        begun, lists = await rebuild(self._lists, self._lists.projections, self._log)
        log.warning("rebuilt %s lists", len(lists))
        self._saved_at = 0.0
        return begun

    async def _save(self) -> None:
        """Save the checkpoint."""
        if self._after != self._saved:
            await self._store.put(self._checkpoint, orjson.dumps({"after": self._after}))
            self._saved, self._saved_at = self._after, self._loop.time()

    @contextmanager
    def _idle(self) -> Iterator[None]:
        """Mark a section that `close` may interrupt."""
        self._is_idle = True
        try:
            yield
        finally:
            self._is_idle = False


class ProjectionsPlugin:
    """The plugin that keeps the lists of several projections. Its name identifies the checkpoint."""

    def __init__(self, name: str, projections: Sequence[ProjectionSpec]) -> None:
        self.name = name
        self.projections = tuple(projections)
        self._worker: ProjectionWorker | None = None

    @asynccontextmanager
    async def lifespan(self, services: PluginContext) -> AsyncIterator[None]:
        """Follow the change log while the service runs."""
        self._worker = follower = ProjectionWorker(self.name, self.projections, services)
        try:
            yield
        finally:
            self._worker = None
            await follower.close()

    async def wait_until_folded(self, change_id: str) -> None:
        """Return once the lists contain all changes up to `change_id`. Raises Unavailable."""
        if self._worker is None:
            raise Unavailable
        await self._worker.wait_until_folded(change_id)


class Projection(ProjectionSpec):
    """A projection that is a plugin by itself: `create_app(..., plugins=[Projection(...)])`."""

    @cached_property
    def plugin(self) -> ProjectionsPlugin:
        """Return the plugin that keeps its list."""
        return ProjectionsPlugin(self.name, [self])

    @asynccontextmanager
    async def lifespan(self, services: PluginContext) -> AsyncIterator[None]:
        """Keep the list while the service runs."""
        async with self.plugin.lifespan(services):
            yield


def projections_of(config: Config) -> Sequence[ProjectionsPlugin]:
    """Return the plugin for the projections that the configuration declares; empty without any. Raises
    ConfigError with all problems of the code that they name."""
    made, problems = [], []
    for at, section in enumerate(config.projections):
        try:
            made.append(spec_from_config(section))
        except ValueError as error:
            problems.append(Problem(f"projections[{at}]", str(error)))
    if problems:
        raise ConfigError(problems)
    return (ProjectionsPlugin("projections", made),) if made else ()


def projections_in(plugins: Iterable[object]) -> list[ProjectionSpec]:
    """Return the projections among these plugins."""
    return [projection for plugin in projections_plugins_in(plugins) for projection in plugin.projections]


def projections_plugins_in(plugins: Iterable[object]) -> list[ProjectionsPlugin]:
    """Return those of these plugins that keep lists."""
    return [
        plugin if isinstance(plugin, ProjectionsPlugin) else plugin.plugin
        for plugin in plugins
        if isinstance(plugin, ProjectionsPlugin | Projection)
    ]
