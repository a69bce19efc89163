"""The coordinator in Redis: the contract, and what loss of memory, of replies and of room must not break."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis_server import RedisServer

from pysync.clock import wall_clock_ms
from pysync.coordinator import Coordinator
from pysync.coordinator.redis import RedisCoordinator
from pysync.testing import Advance, CoordinatorContract, MovedClock


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[RedisServer]:
    server = RedisServer(tmp_path)
    await server.start()
    yield server
    await server.close()


@pytest.fixture
async def coordinator(redis: RedisServer) -> AsyncIterator[RedisCoordinator]:
    coordinator = await RedisCoordinator.at(redis.url)
    yield coordinator
    await coordinator.close()


class TestRedisCoordinator(CoordinatorContract):
    slack_ms = 10_000

    @pytest.fixture
    def clock(self) -> MovedClock:
        # Ahead of Redis', whose memory begins with the test: the contract signs at the clock's time.
        return MovedClock(wall_clock_ms() + 3_600_000)

    @pytest.fixture
    def advance(self, clock: MovedClock, redis: RedisServer) -> Advance:
        async def advance(ms: int) -> None:
            clock.now_ms += ms
            async with redis.client() as client:
                async for key in client.scan_iter():
                    left_ms = await client.pttl(key)
                    if left_ms >= 0:
                        await client.pexpire(key, left_ms - ms)

        return advance

    @pytest.fixture
    async def coordinator(self, redis: RedisServer, clock: MovedClock) -> AsyncIterator[Coordinator]:
        coordinator = await RedisCoordinator.at(redis.url, clock, changes_kept=100)
        yield coordinator
        await coordinator.close()
