"""Readiness: whether requests would succeed, and if a coordinator that nodes share can be reached."""

import asyncio
import concurrent.futures
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pysync.errors import CoordinatorUnavailable, Unavailable
from pysync.server.process.metrics import COORDINATOR_DOWN

READY_S = 2.0
"""Seconds after which an unfinished probe counts as a failure."""
PROBE_EVERY_S = 1.0
"""Shortest time between probes. A probe writes to the disk, and any caller may cause one."""
RETRY_S = 0.25
"""Seconds after which a failed probe is repeated."""
FAILURES = 2
"""Consecutive failures after which a service that was ready no longer is. One success makes it ready."""

log = logging.getLogger("pysync.server")


class Readiness:
    """The readiness of a service. `probes` raise Unavailable if something that requests need does not work;
    that of a store includes a group commit. The outcome is cached, and only its changes are logged.

    Until the first success a single failure counts. `draining` is set when the service is about to stop.
    `reaches_coordinator` is what `CoordinatorMonitor` found. It does not change readiness, because public
    reads go on without a coordinator that nodes share.
    """

    def __init__(self, probes: Sequence[Callable[[], Awaitable[None]]]) -> None:
        self._probes = probes
        self._lock = threading.Lock()
        self._was_ready: bool | None = None
        self._error: Unavailable | None = Unavailable("Not probed yet")
        self._failures = 0
        self._probing: asyncio.Task[None] | None = None
        self._probed_at = 0.0
        self.draining = False
        self.reaches_coordinator = True

    @property
    def error(self) -> Unavailable | None:
        """The reason why the service is not ready, as of the last probe; None if it is ready."""
        return Unavailable("Draining") if self.draining else self._error

    @property
    def is_ready(self) -> bool:
        """True if the last probe succeeded, or there was none yet."""
        return not self.is_known or self.error is None

    @property
    def is_known(self) -> bool:
        """False before the end of the first probe."""
        return self.draining or self._was_ready is not None

    def body(self, ts_ms: int) -> dict[str, Any]:
        """Return the body of the response of a service that is ready."""
        unreachable = {} if self.reaches_coordinator else {"coordinator": "unreachable"}
        return {"ok": True, "ts": ts_ms, **unreachable}

    async def check(self) -> Unavailable | None:
        """Return the reason why the service is not ready; None if it is. Takes at most `READY_S`."""
        task = self.begin_check()
        left_s = self._probed_at + READY_S - asyncio.get_running_loop().time()
        await asyncio.wait({task}, timeout=max(0.0, left_s))
        return self.error

    def begin_check(self) -> "asyncio.Task[None]":
        """Probe, unless that is done already or was done a moment ago, and return the newest probe."""
        loop = asyncio.get_running_loop()
        task = self._probing
        if task is None or (task.done() and loop.time() - self._probed_at > PROBE_EVERY_S):
            self._probed_at = loop.time()
            task = self._probing = loop.create_task(self._probe())
        return task

    def check_from_thread(self, loop: asyncio.AbstractEventLoop) -> Unavailable | None:
        """Return the same in another thread than that of `loop`. A loop that does not get round to it in time
        is a failed probe."""
        if self.draining:
            return self.error
        checking = self.check()
        try:
            return asyncio.run_coroutine_threadsafe(checking, loop).result(READY_S)
        except (TimeoutError, concurrent.futures.CancelledError):
            self.record(Unavailable(f"No answer from the event loop in {READY_S:g} s"))
        except RuntimeError:  # the loop is closed
            checking.close()
            return Unavailable("Draining")
        return self.error

    async def _probe(self) -> None:
        """Probe until one probe succeeds or `FAILURES` have failed. A probe that takes too long is not
        cancelled, because a flush cannot be: it counts as a failure each time that `READY_S` pass."""
        for _ in range(FAILURES):
            attempt = asyncio.create_task(self._first_error())
            while not (await asyncio.wait({attempt}, timeout=READY_S))[0]:
                self.record(Unavailable(f"No answer from the store in {READY_S:g} s"))
            self.record(attempt.result())
            if attempt.result() is None:
                return
            await asyncio.sleep(RETRY_S)

    async def _first_error(self) -> Unavailable | None:
        try:
            for probe in self._probes:
                await probe()
        except Unavailable as error:
            return error.with_traceback(None)
        except Exception as error:
            unavailable = Unavailable()
            unavailable.__cause__ = error
            return unavailable
        return None

    def record(self, error: Unavailable | None) -> None:
        """Record the outcome of a probe. Called in any thread."""
        with self._lock:
            self._failures = 0 if error is None else self._failures + 1
            if error is not None and self._was_ready and self._failures < FAILURES:
                return
            self._error = error
            changed = self._was_ready is not (error is None)
            is_first, self._was_ready = self._was_ready is None, error is None
        if error is not None and changed:
            log.warning("not ready: %s", error.detail, exc_info=_unforeseen(error))
        elif changed and not is_first:
            log.info("ready again")


class CoordinatorMonitor:
    """Keeps `readiness` and the metrics informed of whether the server of the coordinator can be reached."""

    def __init__(
        self, diagnose: Callable[[], Awaitable[object]], readiness: Readiness, gauges: Counter[str]
    ) -> None:
        self._diagnose = diagnose
        self._readiness = readiness
        self._gauges = gauges

    async def check(self) -> None:
        """Query the server once."""
        try:
            await self._diagnose()
        except CoordinatorUnavailable:
            self._readiness.reaches_coordinator = False
        else:
            self._readiness.reaches_coordinator = True
        self._gauges[COORDINATOR_DOWN] = int(not self._readiness.reaches_coordinator)


def _unforeseen(error: Unavailable) -> BaseException | None:
    """Return the exception behind a probe's failure that is no error of the store or the coordinator."""
    return error.__cause__ if type(error) is Unavailable else None
