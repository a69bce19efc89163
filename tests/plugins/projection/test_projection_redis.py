"""Lists of nodes that share a store and a Redis: one node keeps them, another takes over, and what Redis
forgets is made up for."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
import pytest_asyncio
from components import RedisServer
from support.projection_follower import following, lists
from support.projection_site import TITLES, Site, entry, members
from support.redis_losses import flush

from pysync.coordinator.redis.coordinator import RedisCoordinator
from pysync.errors import CoordinatorUnavailable
from pysync.store.memory import MemoryStore


@pytest_asyncio.fixture
async def nodes(redis: RedisServer) -> AsyncIterator[list[Site]]:
    """Two nodes of one service."""
    store = MemoryStore()
    async with AsyncExitStack() as stack:
        sites = []
        for _ in range(2):
            coordinator = await RedisCoordinator.connect(redis.url)
            stack.push_async_callback(coordinator.close)
            sites.append(Site(members(TITLES), store=store, coordinator=coordinator))
        yield sites


async def test_write_on_any_node_is_in_the_list_of_all(nodes: list[Site]) -> None:
    one, other = nodes
    async with following(one), following(other):
        await one.note("a", title="A")
        await lists(other, [entry("a", title="A")])
        await other.note("b", title="B")
        await lists(one, [entry("a", title="A"), entry("b", title="B")])


@pytest.mark.slow
async def test_another_node_takes_over_projections_when_the_leader_leaves(nodes: list[Site]) -> None:
    one, other = nodes
    expected: list[Any] = []
    async with following(one):
        await one.note("a", title="A")
        expected.append(entry("a", title="A"))
        await lists(other, expected)
        async with following(other):
            await other.note("b", title="B")
            expected.append(entry("b", title="B"))
            await lists(other, expected)
    async with following(other):
        await other.note("c", title="C")
        await lists(other, [*expected, entry("c", title="C")])


async def test_lists_are_rebuilt_after_redis_lost_the_changes(nodes: list[Site], redis: RedisServer) -> None:
    one, _ = nodes
    async with following(one):
        await one.note("a", title="A")
        await lists(one, [entry("a", title="A")])
    await one.note("b", title="B")
    await flush(redis)
    async with following(one):
        await lists(one, [entry("a", title="A"), entry("b", title="B")])
        await flush(redis)
        while True:
            with suppress(CoordinatorUnavailable):
                await one.note("c", title="C")
                break
        await lists(one, [entry("a", title="A"), entry("b", title="B"), entry("c", title="C")])
