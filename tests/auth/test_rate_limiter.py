"""The rate limiter counts in memory, shares its counts once a second, and allows no more than the limit."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from pysync.auth.rate_limits import Counter, RateLimiter
from pysync.cache import CACHED_ENTRIES
from pysync.config import Limit
from pysync.coordinator.memory import MemoryCoordinator
from pysync.errors import CoordinatorUnavailable, RateLimited
from pysync.testing import FakeClock

WINDOW_MS = 60_000


class Counting(MemoryCoordinator):
    """Notes what it is asked."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.queries: list[int] = []
        self.is_shared = asyncio.Event()
        self.is_away = False

    async def increment(self, bucket: str, window_ms: int, by: int = 1) -> int:
        await asyncio.sleep(0)
        if self.is_away:
            raise CoordinatorUnavailable
        self.queries.append(by)
        if by > 1:
            self.is_shared.set()
        return await super().increment(bucket, window_ms, by)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(WINDOW_MS * 1_000_000)


@pytest.fixture
def coordinator(clock: FakeClock) -> Counting:
    return Counting(clock)


Connect = Callable[[], RateLimiter]


@pytest_asyncio.fixture
async def connect(coordinator: Counting, clock: FakeClock) -> AsyncIterator[Connect]:
    """Return a rate limiter of another process at each call."""
    made: list[RateLimiter] = []

    def connected() -> RateLimiter:
        made.append(RateLimiter(coordinator, clock))
        return made[-1]

    yield connected
    for limiter in made:
        await limiter.close()


def counter(max_requests: int, bucket: str = "bucket") -> Counter:
    return Counter(Limit(window_ms=WINDOW_MS, max_requests=max_requests), bucket)


async def is_allowed(limiter: RateLimiter, max_requests: int, bucket: str = "bucket") -> bool:
    try:
        await limiter.enforce([counter(max_requests, bucket)])
    except RateLimited:
        return False
    return True


@pytest.mark.parametrize("limit", [1, 7, 100, 1000])
async def test_one_process_allows_as_many_requests_as_the_limit_says(
    connect: Connect, clock: FakeClock, limit: int
) -> None:
    limiter = connect()
    for _ in range(3):
        counted = [await is_allowed(limiter, limit) for _ in range(limit + 10)]
        assert counted == [True] * limit + [False] * 10
        clock.now_ms += WINDOW_MS


@pytest.mark.parametrize("limit", [1, 3, 100])
async def test_concurrent_requests_of_one_process_are_no_more_than_the_limit(
    connect: Connect, limit: int
) -> None:
    limiter = connect()
    assert sum(await asyncio.gather(*(is_allowed(limiter, limit) for _ in range(2 * limit)))) == limit


@pytest.mark.parametrize("limit", [3, 40])
async def test_several_processes_with_a_request_a_second_allow_no_more_than_the_limit(
    connect: Connect, clock: FakeClock, limit: int
) -> None:
    limiters = [connect() for _ in range(4)]
    allowed = 0
    for _ in range(limit):
        allowed += sum([await is_allowed(limiter, limit) for limiter in limiters])
        clock.now_ms += 1_000
    assert allowed == limit


async def test_limit_that_one_process_has_reached_is_reached_in_others_a_second_later(
    connect: Connect, clock: FakeClock, coordinator: Counting
) -> None:
    first, second = connect(), connect()
    assert await is_allowed(second, 10)
    assert [await is_allowed(first, 10) for _ in range(10)] == [True] * 9 + [False]
    await coordinator.is_shared.wait()
    assert coordinator.queries == [1, 1, 9]
    clock.now_ms += 1_000
    assert not await is_allowed(second, 10)


async def test_the_coordinator_is_queried_once_a_second(
    connect: Connect, coordinator: Counting, clock: FakeClock
) -> None:
    limiter = connect()
    for _ in range(1000):
        await limiter.enforce([counter(100_000)])
    assert coordinator.queries == [1]
    clock.now_ms += 1_000
    await limiter.enforce([counter(100_000)])
    assert coordinator.queries == [1, 1000]


async def test_above_the_limit_the_coordinator_is_not_queried_until_the_window_ends(
    connect: Connect, coordinator: Counting, clock: FakeClock
) -> None:
    limiter = connect()
    assert await is_allowed(limiter, 1)
    assert not await is_allowed(limiter, 1)
    coordinator.queries.clear()
    clock.now_ms += WINDOW_MS - 1
    with pytest.raises(RateLimited) as rejected:
        await limiter.enforce([counter(1)])
    assert rejected.value.headers == {
        "Retry-After": "1",
        "RateLimit": '"default";r=0;t=1',
        "RateLimit-Policy": '"default";q=1;w=60',
    }
    assert coordinator.queries == []
    clock.now_ms += 1
    assert await is_allowed(limiter, 1)


async def test_a_clock_that_is_set_back_rejects_nobody_for_longer(connect: Connect, clock: FakeClock) -> None:
    limiter = connect()
    assert await is_allowed(limiter, 1)
    assert not await is_allowed(limiter, 1)
    clock.now_ms -= 10 * WINDOW_MS
    assert await is_allowed(limiter, 1)


async def test_process_that_ends_leaves_its_counts_to_others(connect: Connect) -> None:
    first, second = connect(), connect()
    assert all([await is_allowed(first, 100) for _ in range(50)])
    await first.close()
    assert [await is_allowed(second, 100) for _ in range(60)] == [True] * 50 + [False] * 10


async def test_unreachable_coordinator_is_queried_again(
    connect: Connect, coordinator: Counting, clock: FakeClock
) -> None:
    limiter = connect()
    assert await is_allowed(limiter, 2)
    clock.now_ms += 1_000
    coordinator.is_away = True
    with pytest.raises(CoordinatorUnavailable):
        await limiter.enforce([counter(2)])
    coordinator.is_away = False
    assert await is_allowed(limiter, 2)
    assert not await is_allowed(limiter, 2)


async def test_counters_that_are_not_remembered_are_the_coordinators(connect: Connect) -> None:
    limiter = connect()
    for n in range(CACHED_ENTRIES + 1):
        assert await is_allowed(limiter, 1, f"bucket {n}")
    assert not await is_allowed(limiter, 1, "bucket 0")
