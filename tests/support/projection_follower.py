"""A service that follows its projections."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from pysync.errors import CoordinatorUnavailable
from pysync.plugins.projection import ProjectionsPlugin
from support.projection_site import Site

Until = Callable[[], Awaitable[bool]]


@contextlib.asynccontextmanager
async def following(site: Site, name: str = "projections") -> AsyncIterator[None]:
    async with ProjectionsPlugin(name, site.projections).lifespan(site.services):
        yield


async def until(site: Site, holds: Until) -> None:
    """Wait, from one change to the next, until it holds."""
    while True:
        try:
            newest = await site.log.last_id()
        except CoordinatorUnavailable:
            await asyncio.sleep(0)
            continue
        if await holds():
            return
        await site.log.wait_for_change(newest)


async def lists(site: Site, expected: Any, key: str = "lists/s") -> None:
    """Wait until the list is as expected."""

    async def holds() -> bool:
        return bool(await site.items(key) == expected)

    await until(site, holds)
