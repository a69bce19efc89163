"""The promise of `Coordinator`, as tests."""

import asyncio

import pytest

from pysync.coordinator import EPOCH_MS, Coordinator
from pysync.errors import CoordinatorUnavailable


class MovedClock:
    """A clock in milliseconds that stands until a test moves it. Call it to read it."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms


class CoordinatorContract:
    """The promise of `Coordinator`. The subclass gives the fixture `coordinator`, which reads the fixture
    `clock` and holds at most 1,000 live nonces."""

    @pytest.fixture
    def clock(self) -> MovedClock:
        return MovedClock()

    async def test_a_nonce_is_accepted_once_per_key(self, coordinator: Coordinator) -> None:
        assert await coordinator.remember_nonce("aa", "n")
        assert not await coordinator.remember_nonce("aa", "n")
        assert await coordinator.remember_nonce("bb", "n")
        assert await coordinator.remember_nonce("aa", "m")

    async def test_of_many_with_one_nonce_one_is_accepted(self, coordinator: Coordinator) -> None:
        outcomes = await asyncio.gather(*(coordinator.remember_nonce("aa", "n") for _ in range(50)))
        assert outcomes.count(True) == 1

    async def test_a_nonce_is_refused_for_ten_minutes(
        self, coordinator: Coordinator, clock: MovedClock
    ) -> None:
        start_ms = clock.now_ms - clock.now_ms % EPOCH_MS
        for offset_ms in (0, 1, EPOCH_MS - 1):
            clock.now_ms = start_ms + offset_ms
            assert await coordinator.remember_nonce("aa", f"{offset_ms}")
        for offset_ms in (0, 1, EPOCH_MS - 1):
            for step_ms in (0, 300_000, 599_999):
                clock.now_ms = max(clock.now_ms, start_ms + offset_ms + step_ms)
                assert not await coordinator.remember_nonce("aa", f"{offset_ms}")

    async def test_old_nonces_make_room(self, coordinator: Coordinator, clock: MovedClock) -> None:
        for round_ in range(3):
            for n in range(1000):
                assert await coordinator.remember_nonce("aa", f"{round_}-{n}")
            clock.now_ms += 3 * EPOCH_MS

    async def test_full_memory_refuses_and_forgets_nothing(self, coordinator: Coordinator) -> None:
        for n in range(1000):
            assert await coordinator.remember_nonce("aa", f"{n}")
        with pytest.raises(CoordinatorUnavailable):
            await coordinator.remember_nonce("aa", "one more")
        for n in range(1000):
            assert not await coordinator.remember_nonce("aa", f"{n}")

    async def test_a_clock_that_steps_back_lets_no_nonce_through(
        self, coordinator: Coordinator, clock: MovedClock
    ) -> None:
        assert await coordinator.remember_nonce("aa", "early")
        clock.now_ms += EPOCH_MS
        assert await coordinator.remember_nonce("aa", "late")
        clock.now_ms -= EPOCH_MS
        assert not await coordinator.remember_nonce("aa", "early")
        assert not await coordinator.remember_nonce("aa", "late")
        assert await coordinator.remember_nonce("aa", "meanwhile")
        clock.now_ms += EPOCH_MS
        assert not await coordinator.remember_nonce("aa", "meanwhile")

    async def test_a_counter_counts_within_its_window(
        self, coordinator: Coordinator, clock: MovedClock
    ) -> None:
        clock.now_ms = 60_000 * 1_000_000 + 59_000
        for expected in (1, 2, 3):
            window = await coordinator.count("a", 60_000)
            assert (window.count, window.resets_in_ms) == (expected, 1_000)
        assert (await coordinator.count("b", 60_000)).count == 1
        assert (await coordinator.count("a", 30_000)).count == 1
        clock.now_ms += 1_000
        window = await coordinator.count("a", 60_000)
        assert (window.count, window.resets_in_ms) == (1, 60_000)

    async def test_counting_at_once_loses_no_count(self, coordinator: Coordinator) -> None:
        windows = await asyncio.gather(*(coordinator.count("a", 60_000) for _ in range(100)))
        assert sorted(window.count for window in windows) == list(range(1, 101))

    async def test_a_claim_holds_until_it_expires(self, coordinator: Coordinator, clock: MovedClock) -> None:
        assert await coordinator.claim("k", b"first", 1_000) == b"first"
        clock.now_ms += 999
        assert await coordinator.claim("k", b"second", 1_000) == b"first"
        assert await coordinator.claim("other", b"second", 1_000) == b"second"
        clock.now_ms += 1
        assert await coordinator.claim("k", b"third", 1_000) == b"third"

    async def test_of_many_claims_at_once_one_wins(self, coordinator: Coordinator) -> None:
        held = await asyncio.gather(*(coordinator.claim("k", b"%d" % n, 1_000) for n in range(50)))
        assert len(set(held)) == 1
