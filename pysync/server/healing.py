"""Announces writes whose announcement was lost: their process ended, or the coordinator was out of reach."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from pysync.engine.outbox import Outbox
from pysync.errors import CoordinatorUnavailable

HEAL_EVERY_S = 5.0
FIRST_TURNS = 2
"""The last of them comes when all that was there at the start has become old enough to be announced early."""

log = logging.getLogger("pysync.server")


class Healing:
    """The background healer of one service. Every few seconds it settles what this process could not, and, if
    it `sweeps`, announces what nobody else can be expected to; in its first turns what an earlier process may
    have left behind. It rests where writes and their changes cannot come apart."""

    def __init__(
        self,
        outbox: Outbox,
        *,
        sweeps: bool = True,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._outbox = outbox
        self._sleep = sleep
        self._sweeps = sweeps
        self._task = asyncio.create_task(self._run()) if outbox.needs_healing else None

    def close(self) -> None:
        """Heal no more."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        first, was_told = FIRST_TURNS, False
        while True:
            try:
                await self._turn(early=first > 0)
            except CoordinatorUnavailable as error:
                if not was_told:
                    log.warning("changes of writes wait to be announced: %s", error.why)
                was_told = True
            else:
                first, was_told = first - 1, False
            await self._sleep(HEAL_EVERY_S)

    async def _turn(self, *, early: bool) -> None:
        if not self._sweeps:
            await self._outbox.settle()
        elif healed := await self._outbox.heal(early=early):
            log.info("announced %d writes that may have been announced by nobody", healed)
