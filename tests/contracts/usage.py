"""The contract of what a `Coordinator` counts, as tests."""

import asyncio
from math import inf

import pytest

from contracts.change_logs import change
from pysync.coordinator import Coordinator
from pysync.errors import QuotaExceeded
from pysync.model import Addition, QuotaLimits, Usage


class UsageContract:
    """The part of the contract of `Coordinator` that concerns `usage`."""

    @pytest.fixture
    def one(self, coordinator: Coordinator) -> Coordinator:
        """The coordinator of one process."""
        return coordinator

    async def test_usage_is_the_sum_of_what_is_added(self, coordinator: Coordinator) -> None:
        usage, both = coordinator.usage, {"one": "me", "other": "all"}
        await asyncio.gather(*(usage.add(Addition("a", both, Usage(10, 1, 0, 0))) for _ in range(9)))
        assert await usage.read() == dict.fromkeys(both.values(), Usage(90, 9, 0, 0))
        await usage.add(Addition("b", {"one": "me"}, Usage(-90, -9, 0, 0)))
        await usage.add(Addition("b", {"other": "all"}, Usage(0, 0, 3, 4)))
        assert await usage.read() == {"all": Usage(90, 9, 3, 4)}
        assert await usage.read(["me", "all"]) == {"all": Usage(90, 9, 3, 4)}
        assert await usage.read([]) == {}
        await usage.add(Addition("b", {"one": "me"}, Usage(0, -5, 0, 0)))
        await usage.add(Addition("b", {"one": "me"}, Usage(0, 5, 0, 0)))
        assert await usage.read() == {"all": Usage(90, 9, 3, 4)}, "what uses nothing is not named"

    async def test_usage_is_added_to_all_subjects_or_none(self, coordinator: Coordinator) -> None:
        usage, subjects = coordinator.usage, {"free": "all", "one": "me", "other": "my space"}
        limits: QuotaLimits = {"one": (100, inf, 2, inf), "other": (inf, 9, inf, inf), "unused": (0, 0, 0, 0)}
        ten = Addition("a", subjects, Usage(10, 1, 0, 0), limits)
        ended = await asyncio.gather(*(usage.add(ten) for _ in range(20)), return_exceptions=True)
        assert sum(isinstance(error, QuotaExceeded) for error in ended) == 11
        nine = dict.fromkeys(subjects.values(), Usage(90, 9, 0, 0))
        for more, told in (
            (Usage(10, 1, 0, 0), ("other.documents", 9, 9)),
            (Usage(11, 0, 0, 0), ("one.bytes", 90, 100)),
            (Usage(11, 1, 3, 0), ("one.bytes", 90, 100)),
            (Usage(-50, 0, 3, 0), ("one.logElements", 0, 2)),
        ):
            with pytest.raises(QuotaExceeded) as refused:
                await usage.add(ten._replace(more=more))
            assert refused.value.extras == dict(zip(("quota", "used", "allowed"), told, strict=True))
            assert await usage.read() == nine
        await usage.add(ten._replace(more=Usage(10, 0, 2, 5)))
        await usage.add(ten._replace(more=Usage(500, 5, 0, 0), limits={}))
        await usage.add(ten._replace(more=Usage(-1, 0, 0, 1)))
        assert await usage.read() == dict.fromkeys(subjects.values(), Usage(599, 14, 2, 6))

    async def test_a_write_that_exceeds_a_quota_leaves_nothing_prepared_and_nothing_counted(
        self, coordinator: Coordinator
    ) -> None:
        me, limits = {"one": "me"}, {"one": (10, inf, inf, inf)}
        await coordinator.usage.begin_count("token")
        await coordinator.usage.count("token", "m", {})
        for addition in (
            Addition("a", me, Usage(11, 1, 0, 0), limits),
            Addition("z", {"free": "all", **me}, Usage(11, 1, 0, 0), limits),
        ):
            with pytest.raises(QuotaExceeded):
                await coordinator.prepare_counted([change("a")], addition)
        assert await coordinator.prepared(10) == []
        assert await coordinator.usage.read() == {}
        assert await coordinator.usage.end_count("token", 1)
        assert await coordinator.usage.read() == {}

    async def test_what_is_prepared_is_counted_until_it_is_withdrawn(self, coordinator: Coordinator) -> None:
        usage, one = coordinator.usage, Usage(5, 1, 0, 0)
        limits: QuotaLimits = {"one": (10, inf, inf, inf)}
        await usage.begin_count("token")
        await usage.count("token", "m", {})
        additions = [Addition(key, {"one": "me", "free": "all"}, one, limits) for key in ("a", "z")]
        changes = [change("a"), change("b", "somebody")]
        prepared = [await coordinator.prepare_counted(changes, addition) for addition in additions]
        assert [in_count for _, in_count in prepared] == [True, False]
        assert [each.changes for each in await coordinator.prepared(10)] == [changes, changes]
        with pytest.raises(QuotaExceeded):
            await coordinator.prepare_counted(changes, additions[0])
        both = {"me": Usage(10, 2, 0, 0), "all": Usage(10, 2, 0, 0)}
        assert await usage.read() == both
        last = await coordinator.append([change("a")], prepared[1][0])
        assert await coordinator.read("", 10) == [(last, change("a"))]
        assert await usage.read() == both
        for _ in range(2):  # repeated, as after a reply that was lost
            await coordinator.abort(prepared[0][0], additions[0].reverse(in_count=True))
            await coordinator.abort(prepared[1][0], additions[1].reverse(in_count=False))
        assert await coordinator.prepared(10) == []
        assert await usage.read() == {"me": one, "all": one}
        assert await usage.end_count("token", 1)
        assert await usage.read() == {}, "it contains neither what was withdrawn nor what it did not pass"

    async def test_a_count_of_usage_replaces_the_totals_and_keeps_what_it_cannot_have_seen(
        self, coordinator: Coordinator
    ) -> None:
        usage, one = coordinator.usage, Usage(1, 1, 0, 0)

        async def add(key: str) -> bool:
            return await usage.add(Addition(key, {"one": "me"}, one))

        assert await usage.counted_ms() is None
        await usage.add(Addition("a", {"one": "wrong"}, one))
        await usage.begin_count("first")
        assert not await add("a")
        assert await usage.count("first", "m", {"me": Usage(5, 5, 0, 0)})
        assert await add("m")
        assert await add("K\u00e4se")
        assert not await add("m/1")
        assert not await add("")
        assert await usage.read() == {"wrong": one, "me": Usage(5, 5, 0, 0)}
        assert await usage.count("first", "z", {"me": Usage(10, 0, 0, 0)})
        assert await usage.end_count("first", 1_234)
        assert await usage.read() == {"me": Usage(17, 7, 0, 0)}
        assert await usage.counted_ms() == 1_234
        assert not await add("a")

    async def test_what_comes_at_once_is_counted_in_its_order(self, one: Coordinator) -> None:
        usage, once = one.usage, Usage(1, 1, 0, 0)
        addition = Addition("a", {"one": "me"}, once, {"one": (2, inf, inf, inf)})
        ended = await asyncio.gather(
            usage.add(addition),
            usage.add(addition),
            usage.add(addition),
            usage.add(addition.reverse(in_count=False)),
            usage.begin_count("token"),
            usage.add(addition),
            usage.count("token", "m", {"me": Usage(7, 7, 0, 0)}),
            usage.add(addition),
            usage.add(addition._replace(limits={})),
            one.prepare_counted([change("a")], addition),
            return_exceptions=True,
        )
        kinds = [found if found is None else type(found) for found in ended]
        over = QuotaExceeded
        assert kinds == [bool, bool, over, bool, None, bool, bool, over, bool, over]
        assert await usage.read() == {"me": Usage(3, 3, 0, 0)}
        assert await one.prepared(10) == []
        assert await usage.end_count("token", 1)
        assert await usage.read() == {"me": Usage(8, 8, 0, 0)}

    async def test_of_two_counts_of_usage_the_later_one_holds(self, coordinator: Coordinator) -> None:
        usage, one = coordinator.usage, Usage(1, 1, 0, 0)
        for token in ("first", "second"):
            await usage.begin_count(token)
            assert await usage.count(token, "a", {token: one})
        assert not await usage.count("first", "b", {"first": one})
        assert not await usage.end_count("first", 1)
        assert await usage.end_count("second", 2)
        assert not await usage.end_count("second", 3)
        assert (await usage.read(), await usage.counted_ms()) == ({"second": one}, 2)
        await usage.begin_count("third")
        await usage.clear()
        assert not await usage.end_count("third", 4)
        assert (await usage.read(), await usage.counted_ms()) == ({}, None)

    async def test_forgotten_subjects_are_in_no_total_and_everything_is_counted_again(
        self, coordinator: Coordinator
    ) -> None:
        usage, one = coordinator.usage, Usage(1, 1, 0, 0)
        await usage.begin_count("before")
        assert await usage.count("before", "a", {"gone": one, "me": one})
        assert await usage.end_count("before", 1)
        await usage.begin_count("second")
        assert await usage.count("second", "a", {"gone": one, "me": one})
        await usage.forget(["gone", "never was"])
        assert (await usage.read(), await usage.counted_ms()) == ({"me": one}, None)
        assert not await usage.end_count("second", 2)

    async def test_a_new_epoch_has_no_usage_and_no_count(self, coordinator: Coordinator) -> None:
        usage, one = coordinator.usage, Usage(1, 1, 0, 0)
        await usage.begin_count("before")
        assert await usage.count("before", "a", {"me": one})
        assert await usage.end_count("before", 1)
        await usage.begin_count("second")
        await coordinator.begin_epoch()
        assert (await usage.read(), await usage.counted_ms()) == ({}, None)
        assert not await usage.count("second", "b", {"me": one})
        await usage.add(Addition("a", {"one": "me"}, one))
        assert await usage.read() == {"me": one}
