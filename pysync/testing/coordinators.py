"""The promise of `Coordinator`, as tests."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import ClassVar

import pytest

from pysync.coordinator import EPOCH_MS, Coordinator
from pysync.errors import CoordinatorUnavailable

Advance = Callable[[int], Awaitable[None]]
"""Lets so many milliseconds pass."""


class MovedClock:
    """A clock in milliseconds that stands until a test moves it. Call it to read it."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms


class MovedTime:
    """The time of a contract: the fixture `clock`, and `advance`, which moves it. For a coordinator that has
    a clock of its own, too, override `advance`, and say in `slack_ms` how far it may run on in a test."""

    slack_ms: ClassVar[int] = 0

    @pytest.fixture
    def clock(self) -> MovedClock:
        return MovedClock()

    @pytest.fixture
    def advance(self, clock: MovedClock) -> Advance:
        async def advance(ms: int) -> None:
            clock.now_ms += ms

        return advance


class CoordinatorContract(MovedTime):
    """The promise of `Coordinator`. The subclass gives the fixture `coordinator`, which reads the fixture
    `clock` and was told to keep 100 changes."""

    async def test_a_nonce_is_accepted_once_per_key(
        self, coordinator: Coordinator, clock: MovedClock
    ) -> None:
        assert await coordinator.remember_nonce("aa", "n", clock())
        assert not await coordinator.remember_nonce("aa", "n", clock())
        assert await coordinator.remember_nonce("bb", "n", clock())
        assert await coordinator.remember_nonce("aa", "m", clock())

    async def test_of_many_with_one_nonce_one_is_accepted(
        self, coordinator: Coordinator, clock: MovedClock
    ) -> None:
        outcomes = await asyncio.gather(*(coordinator.remember_nonce("aa", "n", clock()) for _ in range(50)))
        assert outcomes.count(True) == 1

    async def test_a_nonce_is_refused_for_ten_minutes(
        self, coordinator: Coordinator, clock: MovedClock, advance: Advance
    ) -> None:
        start_ms = clock.now_ms = clock.now_ms - clock.now_ms % EPOCH_MS
        for offset_ms in (0, 1, EPOCH_MS - 1):
            await advance(start_ms + offset_ms - clock())
            assert await coordinator.remember_nonce("aa", f"{offset_ms}", clock())
        for offset_ms in (0, 1, EPOCH_MS - 1):
            for step_ms in (0, 300_000, 599_999):
                await advance(max(0, start_ms + offset_ms + step_ms - clock()))
                assert not await coordinator.remember_nonce("aa", f"{offset_ms}", start_ms + offset_ms)

    async def test_a_clock_that_steps_back_lets_no_nonce_through(
        self, coordinator: Coordinator, clock: MovedClock, advance: Advance
    ) -> None:
        assert await coordinator.remember_nonce("aa", "early", clock())
        await advance(EPOCH_MS)
        assert await coordinator.remember_nonce("aa", "late", clock())
        clock.now_ms -= EPOCH_MS
        assert not await coordinator.remember_nonce("aa", "early", clock())
        assert not await coordinator.remember_nonce("aa", "late", clock())
        assert await coordinator.remember_nonce("aa", "meanwhile", clock())
        await advance(EPOCH_MS)
        assert not await coordinator.remember_nonce("aa", "meanwhile", clock())

    async def test_a_counter_counts_within_its_window(
        self, coordinator: Coordinator, clock: MovedClock, advance: Advance
    ) -> None:
        clock.now_ms = 60_000 * 1_000_000 + 40_000
        for expected in (1, 2, 3):
            window = await coordinator.count("a", 60_000)
            assert window.count == expected
            assert 20_000 - self.slack_ms <= window.resets_in_ms <= 20_000
        assert (await coordinator.count("b", 60_000)).count == 1
        assert (await coordinator.count("a", 30_000)).count == 1
        await advance(20_000)
        window = await coordinator.count("a", 60_000)
        assert window.count == 1
        assert 60_000 - self.slack_ms <= window.resets_in_ms <= 60_000

    async def test_counting_at_once_loses_no_count(self, coordinator: Coordinator) -> None:
        windows = await asyncio.gather(*(coordinator.count("a", 60_000) for _ in range(100)))
        assert sorted(window.count for window in windows) == list(range(1, 101))

    async def test_a_claim_holds_until_it_expires(self, coordinator: Coordinator, advance: Advance) -> None:
        assert await coordinator.claim("k", b"first", 60_000) == b"first"
        await advance(59_999 - self.slack_ms)
        assert await coordinator.claim("k", b"second", 60_000) == b"first"
        assert await coordinator.claim("other", b"second", 60_000) == b"second"
        await advance(1 + self.slack_ms)
        assert await coordinator.claim("k", b"third", 60_000) == b"third"

    async def test_of_many_claims_at_once_one_wins(self, coordinator: Coordinator) -> None:
        held = await asyncio.gather(*(coordinator.claim("k", b"%d" % n, 60_000) for n in range(50)))
        assert len(set(held)) == 1

    async def test_changes_are_read_in_the_order_of_their_ids(self, coordinator: Coordinator) -> None:
        assert await coordinator.changes("", 10) == []
        announced = [(await coordinator.announce(b"%d" % n), b"%d" % n) for n in range(10)]
        assert announced == sorted(announced)
        assert await coordinator.changes("", 100) == announced
        assert await coordinator.changes("", 3) == announced[:3]
        for place, (change_id, _) in enumerate(announced):
            assert await coordinator.changes(change_id, 100) == announced[place + 1 :]
            assert await coordinator.changes(change_id, 2) == announced[place + 1 : place + 3]

    async def test_of_changes_announced_at_once_none_is_lost(self, coordinator: Coordinator) -> None:
        ids = await asyncio.gather(*(coordinator.announce(b"%d" % n) for n in range(50)))
        found = await coordinator.changes("", 100)
        assert found == sorted((change_id, b"%d" % n) for n, change_id in enumerate(ids))

    async def test_who_fell_behind_the_changes_that_are_kept_is_told(self, coordinator: Coordinator) -> None:
        ids = [await coordinator.announce(b"%d" % n) for n in range(500)]
        assert await coordinator.changes(ids[0], 10) is None
        kept = await coordinator.changes("", 500)
        assert kept is not None
        assert [change_id for change_id, _ in kept] == ids[-len(kept) :]
        assert 100 <= len(kept) < 400
        assert await coordinator.changes(ids[-len(kept) - 1], 10) is None
        assert await coordinator.changes(ids[-len(kept)], 500) == kept[1:]

    @pytest.mark.parametrize("unknown", ["0", "x", "~" * 100, "9" * 30, "\u0663", "\0"])
    async def test_an_id_that_nobody_was_given_is_told_from_one_that_is_kept(
        self, coordinator: Coordinator, unknown: str
    ) -> None:
        assert await coordinator.changes(unknown, 10) is None
        change_id = await coordinator.announce(b"x")
        for near in (unknown, change_id[:-1], change_id + "0", change_id[:-1] + "x"):
            assert await coordinator.changes(near, 10) is None


class BoundedNoncesContract(MovedTime):
    """The promise of a coordinator with a bound of its own. The subclass gives the fixture `coordinator`,
    which reads the fixture `clock` and holds at most 1,000 live nonces."""

    async def test_old_nonces_make_room(
        self, coordinator: Coordinator, clock: MovedClock, advance: Advance
    ) -> None:
        for round_ in range(3):
            for n in range(1000):
                assert await coordinator.remember_nonce("aa", f"{round_}-{n}", clock())
            await advance(3 * EPOCH_MS)

    async def test_full_memory_refuses_and_forgets_nothing(
        self, coordinator: Coordinator, clock: MovedClock
    ) -> None:
        for n in range(1000):
            assert await coordinator.remember_nonce("aa", f"{n}", clock())
        with pytest.raises(CoordinatorUnavailable):
            await coordinator.remember_nonce("aa", "one more", clock())
        for n in range(1000):
            assert not await coordinator.remember_nonce("aa", f"{n}", clock())
