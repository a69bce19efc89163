"""The rate limiter asks the coordinator only if that could matter, and allows no more than the limit."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from pysync.auth.rate_limits import MAX_COUNTERS, RESERVED_S, Counter, RateLimiter
from pysync.config import Limit
from pysync.coordinator import Window
from pysync.coordinator.memory import MemoryCoordinator
from pysync.errors import CoordinatorUnavailable, RateLimited
from pysync.testing import FakeClock

WINDOW_MS = 60_000


class Counting(MemoryCoordinator):
    """Notes what it is asked."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.queries: list[int] = []
        self.is_away = False

    async def increment(self, bucket: str, window_ms: int, by: int = 1) -> Window:
        await asyncio.sleep(0)
        if self.is_away:
            raise CoordinatorUnavailable
        self.queries.append(by)
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


async def is_allowed(counted: Awaitable[None]) -> bool:
    try:
        await counted
    except RateLimited:
        return False
    return True


@pytest.mark.parametrize("limit", [1, 7, 100, 1000])
async def test_one_process_allows_as_many_requests_as_the_limit_says(
    connect: Connect, clock: FakeClock, limit: int
) -> None:
    limiter = connect()
    for _ in range(3):
        counted = [await is_allowed(limiter.count(counter(limit))) for _ in range(limit + 10)]
        assert counted == [True] * limit + [False] * 10
        clock.now_ms += WINDOW_MS


@pytest.mark.parametrize("limit", [3, 100, 1000])
async def test_several_processes_allow_no_more_than_the_limit_and_little_less(
    connect: Connect, limit: int
) -> None:
    limiters = [connect() for _ in range(4)]
    allowed = 0
    for n in range(2 * limit):
        allowed += await is_allowed(limiters[n % 4].count(counter(limit)))
    for limiter in limiters:
        allowed += sum([await is_allowed(limiter.count(counter(limit))) for _ in range(limit)])
    assert allowed == limit


@pytest.mark.parametrize("limit", [3, 100, 1000])
async def test_requests_at_one_time_are_no_more_than_the_limit(connect: Connect, limit: int) -> None:
    limiters = [connect() for _ in range(4)]
    counts = (limiter.count(counter(limit)) for _ in range(limit) for limiter in limiters)
    assert sum(await asyncio.gather(*map(is_allowed, counts))) <= limit
    rest = [await is_allowed(limiter.count(counter(limit))) for limiter in limiters for _ in range(limit)]
    assert sum(rest) <= limit


async def test_the_coordinator_is_queried_for_few_of_many_requests(
    connect: Connect, coordinator: Counting
) -> None:
    limiter = connect()
    for _ in range(1000):
        await limiter.count(counter(100_000))
    assert len(coordinator.queries) < 30


async def test_a_slow_caller_reserves_nothing(
    connect: Connect, coordinator: Counting, clock: FakeClock
) -> None:
    limiter = connect()
    for _ in range(50):
        await limiter.count(counter(1000))
        clock.now_ms += int(RESERVED_S * 1000)
    assert coordinator.queries == [1] * 50


async def test_caller_with_a_request_every_second_is_counted_several_times_at_once(
    connect: Connect, coordinator: Counting, clock: FakeClock
) -> None:
    limiter = connect()
    for _ in range(60):
        await limiter.count(counter(600))
        clock.now_ms += 1000
    assert len(coordinator.queries) < 20


async def test_above_the_limit_the_coordinator_is_not_queried_until_the_window_ends(
    connect: Connect, coordinator: Counting, clock: FakeClock
) -> None:
    limiter = connect()
    await limiter.count(counter(1))
    with pytest.raises(RateLimited):
        await limiter.count(counter(1))
    coordinator.queries.clear()
    clock.now_ms += WINDOW_MS - 1
    with pytest.raises(RateLimited) as refused:
        await limiter.count(counter(1))
    assert refused.value.headers == {
        "Retry-After": "1",
        "RateLimit": '"default";r=0;t=1',
        "RateLimit-Policy": '"default";q=1;w=60',
    }
    with pytest.raises(RateLimited):
        limiter.check([counter(1)])
    assert coordinator.queries == []
    clock.now_ms += 1
    limiter.check([counter(1)])
    await limiter.count(counter(1))


async def test_a_clock_that_is_set_back_rejects_nobody_for_longer(connect: Connect, clock: FakeClock) -> None:
    limiter = connect()
    await limiter.count(counter(1))
    with pytest.raises(RateLimited):
        await limiter.count(counter(1))
    clock.now_ms -= 10 * WINDOW_MS
    await limiter.count(counter(1))


async def test_unused_reservation_is_given_back(connect: Connect, coordinator: Counting) -> None:
    first, second = connect(), connect()
    for _ in range(50):
        await first.count(counter(100))
    await first.close()
    counted = [await is_allowed(second.count(counter(100))) for _ in range(60)]
    assert counted == [True] * 50 + [False] * 10


async def test_reservation_expires_after_some_time(
    connect: Connect, coordinator: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pysync.auth.rate_limits.RESERVED_S", 0.01)
    given_back = asyncio.Event()

    async def decrement(*args: object) -> None:
        given_back.set()

    monkeypatch.setattr(coordinator, "decrement", decrement)
    limiter = connect()
    for _ in range(50):
        await limiter.count(counter(10_000))
    await given_back.wait()


async def test_unreachable_coordinator_is_queried_again(connect: Connect, coordinator: Counting) -> None:
    limiter = connect()
    await limiter.count(counter(2))
    coordinator.is_away = True
    with pytest.raises(CoordinatorUnavailable):
        await limiter.count(counter(2))
    coordinator.is_away = False
    await limiter.count(counter(2))
    with pytest.raises(RateLimited):
        await limiter.count(counter(2))


async def test_the_counters_that_are_remembered_are_bounded(connect: Connect, coordinator: Counting) -> None:
    limiter = connect()
    for n in range(MAX_COUNTERS + 100):
        await limiter.count(counter(1, f"bucket {n}"))
    assert len(limiter._known) == MAX_COUNTERS
    assert not await is_allowed(limiter.count(counter(1, "bucket 0"))), "the coordinator remembers"
