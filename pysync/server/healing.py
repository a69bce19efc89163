"""Announces writes whose announcement was lost: their process ended, or the coordinator was out of reach."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from pysync.errors import CoordinatorUnavailable
from pysync.outbox import Outbox

HEAL_EVERY_S = 5.0

log = logging.getLogger("pysync.server")


class Healing:
    """The background healer of one service: at once all that an earlier process may have left behind, then
    every few seconds what nobody else can be expected to announce. It rests where writes and their changes
    cannot come apart, or another process `sweeps`."""

    def __init__(
        self,
        outbox: Outbox,
        *,
        sweeps: bool = True,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._outbox = outbox
        self._sleep = sleep
        heals = sweeps and outbox.needs_healing
        self._task = asyncio.get_running_loop().create_task(self._run()) if heals else None

    def close(self) -> None:
        """Heal no more."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        is_first, was_told = True, False
        while True:
            try:
                healed = await self._outbox.heal(all_=is_first)
            except CoordinatorUnavailable as error:
                if not was_told:
                    log.warning("changes of writes wait to be announced: %s", error.why)
                was_told = True
            else:
                is_first = was_told = False
                if healed:
                    log.info("announced %d writes that may have been announced by nobody", healed)
            await self._sleep(HEAL_EVERY_S)
