"""The contract of `Coordinator`, as tests."""

import asyncio
from collections.abc import Awaitable

import pytest

from contracts.change_logs import ChangeLogContract, change
from contracts.fake_time import Advance, FakeTime
from pysync.changelog import ChangeLog
from pysync.coordinator import EPOCH_MS, LEASE_MS, Coordinator, ReplayMemoryFull, Standing
from pysync.errors import CoordinatorUnavailable
from pysync.testing import FakeClock


class CoordinatorContract(ChangeLogContract):
    """The contract of `Coordinator`, except for `acquire_lease`. The subclass provides the fixture
    `coordinator`, which reads the fixture `clock` and retains changes as `RETENTION` says."""

    @pytest.fixture
    def log(self, coordinator: Coordinator) -> ChangeLog:
        """The change log under test: the coordinator itself."""
        return coordinator

    async def test_a_nonce_is_accepted_once_per_key(self, coordinator: Coordinator, clock: FakeClock) -> None:
        assert await coordinator.consume_nonce("aa", "n", clock())
        assert not await coordinator.consume_nonce("aa", "n", clock())
        assert await coordinator.consume_nonce("bb", "n", clock())
        assert await coordinator.consume_nonce("aa", "m", clock())

    async def test_of_many_with_one_nonce_one_is_accepted(
        self, coordinator: Coordinator, clock: FakeClock
    ) -> None:
        outcomes = await asyncio.gather(*(coordinator.consume_nonce("aa", "n", clock()) for _ in range(50)))
        assert outcomes.count(True) == 1

    async def test_a_nonce_is_rejected_for_ten_minutes(
        self, coordinator: Coordinator, clock: FakeClock, advance: Advance
    ) -> None:
        start_ms = clock.now_ms = clock.now_ms - clock.now_ms % EPOCH_MS
        for offset_ms in (0, 1, EPOCH_MS - 1):
            await advance(start_ms + offset_ms - clock())
            assert await coordinator.consume_nonce("aa", f"{offset_ms}", clock())
        for offset_ms in (0, 1, EPOCH_MS - 1):
            for step_ms in (0, 300_000, 599_999):
                await advance(max(0, start_ms + offset_ms + step_ms - clock()))
                assert not await coordinator.consume_nonce("aa", f"{offset_ms}", start_ms + offset_ms)

    async def test_a_clock_that_steps_back_lets_no_nonce_through(
        self, coordinator: Coordinator, clock: FakeClock, advance: Advance
    ) -> None:
        assert await coordinator.consume_nonce("aa", "early", clock())
        await advance(EPOCH_MS)
        assert await coordinator.consume_nonce("aa", "late", clock())
        clock.now_ms -= EPOCH_MS
        assert not await coordinator.consume_nonce("aa", "early", clock())
        assert not await coordinator.consume_nonce("aa", "late", clock())
        assert await coordinator.consume_nonce("aa", "meanwhile", clock())
        await advance(EPOCH_MS)
        assert not await coordinator.consume_nonce("aa", "meanwhile", clock())

    async def test_a_clock_that_is_set_ahead_and_back_lets_no_nonce_through(
        self, coordinator: Coordinator, clock: FakeClock
    ) -> None:
        assert await coordinator.consume_nonce("aa", "early", clock())
        for _ in range(3):
            clock.step(3_600_000)
            assert await coordinator.consume_nonce("aa", f"{clock()}", clock())
        clock.step(-3 * 3_600_000)
        assert not await coordinator.consume_nonce("aa", "early", clock())
        assert await coordinator.consume_nonce("aa", "late", clock())

    async def test_a_counter_counts_within_its_window(
        self, coordinator: Coordinator, clock: FakeClock, advance: Advance
    ) -> None:
        clock.now_ms = 60_000 * 1_000_000 + 40_000
        for expected in (1, 2, 3):
            assert await coordinator.increment("a", 60_000) == expected
        assert await coordinator.increment("b", 60_000) == 1
        assert await coordinator.increment("a", 30_000) == 1
        await advance(20_000)
        assert await coordinator.increment("a", 60_000) == 1
        assert await coordinator.increment("a", 60_000, by=10) == 11

    async def test_counting_at_once_loses_no_count(self, coordinator: Coordinator) -> None:
        counts = await asyncio.gather(*(coordinator.increment("a", 60_000) for _ in range(100)))
        assert sorted(counts) == list(range(1, 101))

    async def test_a_claim_holds_until_it_expires(self, coordinator: Coordinator, advance: Advance) -> None:
        assert await coordinator.put_if_absent("k", b"first", 60_000) == b"first"
        await advance(59_999 - self.slack_ms)
        assert await coordinator.put_if_absent("k", b"second", 60_000) == b"first"
        assert await coordinator.put_if_absent("other", b"second", 60_000) == b"second"
        await advance(1 + self.slack_ms)
        assert await coordinator.put_if_absent("k", b"third", 60_000) == b"third"

    async def test_a_claim_is_replaced_or_released_by_who_knows_what_it_holds(
        self, coordinator: Coordinator, advance: Advance
    ) -> None:
        await coordinator.put_if_absent("k", b"first", 60_000)
        for value in (b"other", None):
            assert not await coordinator.compare_and_set("k", b"wrong", value)
            assert not await coordinator.compare_and_set("unknown", b"first", value)
        assert await coordinator.put_if_absent("k", b"second", 60_000) == b"first"
        assert await coordinator.compare_and_set("k", b"first", b"second")
        assert await coordinator.put_if_absent("k", b"third", 60_000) == b"second"
        assert await coordinator.compare_and_set("k", b"second", None)
        assert await coordinator.put_if_absent("k", b"third", 60_000) == b"third"
        assert await coordinator.put_if_absent("unknown", b"mine", 60_000) == b"mine"

    async def test_a_claim_that_is_replaced_is_held_no_longer_for_that(
        self, coordinator: Coordinator, advance: Advance
    ) -> None:
        await coordinator.put_if_absent("k", b"first", 60_000)
        await advance(30_000)
        await coordinator.compare_and_set("k", b"first", b"second")
        await advance(30_000 + self.slack_ms)
        assert await coordinator.put_if_absent("k", b"third", 60_000) == b"third"

    async def test_of_many_claims_at_once_one_wins(self, coordinator: Coordinator) -> None:
        held = await asyncio.gather(*(coordinator.put_if_absent("k", b"%d" % n, 60_000) for n in range(50)))
        assert len(set(held)) == 1

    async def test_chosen_counters_and_claims_are_forgotten(self, coordinator: Coordinator) -> None:
        for bucket in ("notes/push:identity=a", "notes/push:identity=ab", "notes/push:ip=::1"):
            for window_ms in (60_000, 3_600_000):
                await coordinator.increment(bucket, window_ms)
        for key, value in (("k", b"one"), ("l", b"two"), ("m", b"one more")):
            assert await coordinator.put_if_absent(key, value, 60_000) == value
        gone = await coordinator.forget(
            lambda bucket: bucket.endswith("identity=a"), lambda value: value.startswith(b"one")
        )
        assert gone == (2, 2)
        assert await coordinator.increment("notes/push:identity=a", 60_000) == 1
        assert await coordinator.increment("notes/push:identity=ab", 60_000) == 2
        assert await coordinator.increment("notes/push:ip=::1", 60_000) == 2
        assert await coordinator.put_if_absent("k", b"new", 60_000) == b"new"
        assert await coordinator.put_if_absent("l", b"new", 60_000) == b"two"
        await coordinator.purge_deleted()
        assert await coordinator.put_if_absent("l", b"new", 60_000) == b"two"

    async def test_an_intent_is_known_until_it_is_announced_or_withdrawn(
        self, coordinator: Coordinator, advance: Advance
    ) -> None:
        assert await coordinator.prepared(10) == []
        groups = [[change("a"), change("b", "somebody")], [change("c")], [change("d")]]
        names = []
        for changes in groups:
            names.append(await coordinator.prepare(changes))
            await advance(1_000)
        intents = await coordinator.prepared(10)
        assert [(intent.name, intent.changes) for intent in intents] == list(zip(names, groups, strict=True))
        for intent, age_ms in zip(intents, (3_000, 2_000, 1_000), strict=True):
            assert age_ms <= intent.age_ms <= age_ms + self.slack_ms
        assert [intent.name for intent in await coordinator.prepared(2)] == names[:2]
        await coordinator.abort(names[0])
        last = await coordinator.append(groups[1], names[1])
        assert [intent.name for intent in await coordinator.prepared(10)] == names[2:]
        assert await coordinator.read("", 10) == [(last, change("c"))]

    async def test_change_committed_or_aborted_by_another_is_announced_all_the_same(
        self, coordinator: Coordinator
    ) -> None:
        names = [await coordinator.prepare([change("a")]) for _ in range(2)]
        await coordinator.append([change("a")], names[0])
        await coordinator.abort(names[1])
        await coordinator.abort(names[1])
        for name in names:
            await coordinator.append([change("a")], name)
        found = await coordinator.read("", 10)
        assert found is not None
        assert len(found) == 3
        assert await coordinator.prepared(10) == []

    async def test_a_tick_is_later_than_all_before_whatever_the_clock_says(
        self, coordinator: Coordinator, clock: FakeClock
    ) -> None:
        ticks = []
        for step_ms in (0, 0, 1_000, -EPOCH_MS, 1, EPOCH_MS):
            clock.now_ms += step_ms
            ticks += [await coordinator.next_timestamp() for _ in range(3)]
        assert ticks == sorted(set(ticks))

    async def test_of_many_ticks_at_once_no_two_are_one(self, coordinator: Coordinator) -> None:
        ticks = await asyncio.gather(*(coordinator.next_timestamp() for _ in range(50)))
        assert len(set(ticks)) == 50
        assert await coordinator.next_timestamp() > max(ticks)

    async def test_no_two_intents_have_one_name(self, coordinator: Coordinator) -> None:
        names = list(await asyncio.gather(*(coordinator.prepare([change("a")]) for _ in range(20))))
        for name in names:
            await coordinator.abort(name)
        names += [await coordinator.prepare([change("a")]) for _ in range(5)]
        assert len(set(names)) == 25


class LeaseContract(FakeTime):
    """The contract of `Coordinator.acquire_lease`. The subclass provides the fixture `pair`: two coordinators
    that share one memory, as those of two processes do, and read the fixture `clock`. The fixture closes
    both, even if a test has closed one already."""

    async def test_one_leader_lease_is_held_at_a_time(
        self, pair: tuple[Coordinator, Coordinator], advance: Advance
    ) -> None:
        one, other = pair
        for _ in range(3):
            assert await one.acquire_lease("a")
            assert not await other.acquire_lease("a")
            await advance(LEASE_MS // 2)
        assert await other.acquire_lease("b")
        assert not await one.acquire_lease("b")
        assert await one.acquire_lease("a")

    async def test_closing_the_leader_frees_its_lease(
        self, pair: tuple[Coordinator, Coordinator], advance: Advance
    ) -> None:
        one, other = pair
        assert await one.acquire_lease("a")
        assert not await other.acquire_lease("a")
        await one.close()
        await advance(LEASE_MS + 1)
        assert await other.acquire_lease("a")

    async def test_leader_lease_that_is_not_renewed_expires(
        self, pair: tuple[Coordinator, Coordinator], advance: Advance
    ) -> None:
        one, other = pair
        for _ in range(2):
            assert await one.acquire_lease("a")
            await advance(LEASE_MS + 1)
            assert await other.acquire_lease("a")
            assert not await one.acquire_lease("a")
            assert await other.acquire_lease("a")
            await advance(LEASE_MS + 1)

    async def test_of_many_concurrent_requests_one_acquires_the_lease(
        self, pair: tuple[Coordinator, Coordinator]
    ) -> None:
        outcomes = await asyncio.gather(*(coordinator.acquire_lease("a") for coordinator in pair))
        assert sorted(outcomes) == [False, True]


class BoundedNoncesContract(FakeTime):
    """The contract of a coordinator that limits its memory for nonces itself. The subclass provides the
    fixture `coordinator`, which reads the fixture `clock` and stores at most 1,000 live nonces."""

    async def test_old_nonces_make_room(
        self, coordinator: Coordinator, clock: FakeClock, advance: Advance
    ) -> None:
        for round_ in range(3):
            for n in range(1000):
                assert await coordinator.consume_nonce("aa", f"{round_}-{n}", clock())
            await advance(3 * EPOCH_MS)

    async def test_full_memory_rejects_and_forgets_nothing(
        self, coordinator: Coordinator, clock: FakeClock
    ) -> None:
        for n in range(1000):
            assert await coordinator.consume_nonce("aa", f"{n}", clock())
        with pytest.raises(CoordinatorUnavailable):
            await coordinator.consume_nonce("aa", "one more", clock())
        for n in range(1000):
            assert not await coordinator.consume_nonce("aa", f"{n}", clock())

    async def test_strangers_leave_a_share_to_owners_and_these_to_whom_is_trusted(
        self, coordinator: Coordinator, clock: FakeClock
    ) -> None:
        def remember(n: int, standing: Standing) -> Awaitable[bool]:
            return coordinator.consume_nonce("aa", f"{n}", clock(), standing)

        for before, end, standing in (
            (0, 750, Standing.STRANGER),
            (750, 875, Standing.OWNER),
            (875, 1000, Standing.TRUSTED),
        ):
            for n in range(before, end):
                assert await remember(n, standing)
            with pytest.raises(ReplayMemoryFull):
                await remember(1000, standing)
            assert not await remember(0, standing), "a replay is told from what has no room"

    async def test_a_probe_fails_where_owners_are_rejected(
        self, coordinator: Coordinator, clock: FakeClock, advance: Advance
    ) -> None:
        for n in range(800):
            await coordinator.consume_nonce("aa", f"{n}", clock())
        await coordinator.probe()
        for n in range(800, 874):  # and the nonce of the probe
            await coordinator.consume_nonce("aa", f"{n}", clock())
        with pytest.raises(ReplayMemoryFull):
            await coordinator.probe()
        await advance(3 * EPOCH_MS)
        await coordinator.probe()
