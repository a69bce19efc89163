"""The contracts of `Coordinator` and `ChangeLog`, as tests."""

import asyncio
from collections.abc import Awaitable
from typing import Final

import pytest

from pysync.changelog import Change, ChangeLog, Retention
from pysync.coordinator import EPOCH_MS, LEASE_MS, Coordinator, ReplayMemoryFull, Standing
from pysync.errors import CoordinatorUnavailable
from pysync.model import Usage
from pysync.testing.faults import Advance, FakeClock, FakeTime

RETENTION: Final = Retention(count=100, age_ms=3_600_000)


def change(text: str, identity: str = "") -> Change:
    """Return a change whose data is `{"t":text}`."""
    return Change(b'{"t":"%b"}' % text.encode(), identity)


async def _retained(log: ChangeLog, after: str = "") -> list[tuple[str, Change]]:
    """Return all changes after the id `after`, which the log must still know."""
    found = await log.read(after, 10 * RETENTION.count)
    assert found is not None
    return found


class ChangeLogContract(FakeTime):
    """The contract of `ChangeLog`. The subclass provides the fixture `log`: a change log without changes that
    reads the fixture `clock` and retains changes as `RETENTION` says."""

    async def test_changes_are_read_in_the_order_of_their_ids(self, log: ChangeLog) -> None:
        assert await log.read("", 10) == []
        announced = [(await log.append([change(f"{n}")]), change(f"{n}")) for n in range(10)]
        assert announced == sorted(announced)
        assert await log.read("", 100) == announced
        assert await log.read("", 3) == announced[:3]
        for place, (id_, _) in enumerate(announced):
            assert await log.read(id_, 100) == announced[place + 1 :]
            assert await log.read(id_, 2) == announced[place + 1 : place + 3]

    async def test_a_change_comes_back_as_it_was_with_who_made_it(self, log: ChangeLog) -> None:
        changes = [Change(b"{}", "somebody"), change("\u20ac\U0001f600"), Change(bytes(9), "x" * 300)]
        await log.append(changes)
        assert [stored for _, stored in await _retained(log)] == changes

    async def test_a_removal_comes_back_as_one(self, log: ChangeLog) -> None:
        texts = [
            b'{"params":{"removed":"true"}}',
            b'{"removed":true}',
            b'{"params":{"a":"\\"removed\\":true"}}',
        ]
        await log.append([Change(text) for text in texts])
        assert [stored.removed for _, stored in await _retained(log)] == [False, True, False]

    async def test_changes_announced_together_keep_their_order_and_the_last_ones_id(
        self, log: ChangeLog
    ) -> None:
        first = await log.append([change("first")])
        several = [change(f"{n}") for n in range(40)]
        last = await log.append(several)
        found = await _retained(log, first)
        assert [stored for _, stored in found] == several
        ids = [first, *(id_ for id_, _ in found)]
        assert ids == sorted(set(ids))
        assert ids[-1] == last

    async def test_of_changes_announced_at_once_none_is_lost(self, log: ChangeLog) -> None:
        ids = await asyncio.gather(*(log.append([change(f"{n}")]) for n in range(50)))
        assert await _retained(log) == sorted((id_, change(f"{n}")) for n, id_ in enumerate(ids))

    async def test_who_fell_behind_the_changes_that_are_kept_is_told(self, log: ChangeLog) -> None:
        before = await log.last_id()
        ids = [await log.append([change(f"{n}")]) for n in range(500)]
        assert await log.read(before, 10) is None
        assert await log.read(ids[0], 10) is None
        kept = await _retained(log)
        assert [id_ for id_, _ in kept] == ids[-len(kept) :]
        assert RETENTION.count <= len(kept) < 4 * RETENTION.count
        assert await _retained(log, ids[-len(kept)]) == kept[1:]

    async def test_changes_that_are_young_enough_are_kept(self, log: ChangeLog, advance: Advance) -> None:
        ids = []
        for n in range(50):
            ids.append(await log.append([change(f"{n}")]))
            await advance(RETENTION.age_ms // 100)
        assert [id_ for id_, _ in await _retained(log, ids[0])] == ids[1:]

    async def test_a_cleared_log_holds_no_change_and_tells_who_missed_some(self, log: ChangeLog) -> None:
        ids = [await log.append([change(f"{n}", "somebody")]) for n in range(10)]
        await log.clear()
        newest = await log.last_id()
        assert newest >= ids[-1]
        assert await log.read(newest, 10) == []
        for missed in ids[:-1]:
            assert await log.read(missed, 10) is None
            assert await log.read_matching(missed, 10, bool) is None
        found = await log.read("", 10)
        assert found is not None
        assert not [each for _, each in found if each.identity or b'"t"' in each.text]
        last = await log.append([change("after")])
        assert await log.read(newest, 10) == [(last, change("after"))]
        await log.clear()
        await log.clear()
        assert await log.last_id() >= last

    @pytest.mark.parametrize("unknown", ["0", "x", "~" * 100, "9" * 30, "\u0663", "\0"])
    async def test_an_id_that_nobody_was_given_is_told_from_one_that_is_kept(
        self, log: ChangeLog, unknown: str
    ) -> None:
        assert await log.read(unknown, 10) is None
        id_ = await log.append([change("x")])
        for near in (unknown, id_[:-1], id_ + "0", id_[:-1] + "x"):
            assert await log.read(near, 10) is None

    async def test_some_collections_changes_are_read_without_missing_any(self, log: ChangeLog) -> None:
        start = await log.last_id()
        names = ["/a", "/b", "/c", "", "x/a"]
        made = [change(f"{n}")._replace(origin=names[n * n % 7 % 5]) for n in range(60)]
        ids = [await log.append([one]) for one in made]
        for wanted in ({"/a", ""}, {"/a", "/b", ""}, {"gone", ""}, {*names}):
            for after in (start, ids[9], ids[-1]):
                place, found = after, list[tuple[str, Change]]()
                while True:
                    page = await log.read_matching(place, 7, wanted.__contains__)
                    assert page is not None
                    assert page.last >= place
                    found += page.changes
                    if page.is_end:
                        break
                    place = page.last
                assert page.last == ids[-1]
                matching = [each for each in found if each[1].origin in wanted]
                written = zip(ids, made, strict=True)
                assert matching == [
                    (id_, one) for id_, one in written if id_ > after and one.origin in wanted
                ]
                count = await log.count_after(after, 5, wanted.__contains__)
                assert count is None or min(count, 6) >= min(len(matching), 6)
                assert count is None or wanted != {"gone", ""} or min(count, 6) == min(len(matching), 6)
        assert await log.read_matching("0", 7, bool) is None

    async def test_the_newest_id_is_between_what_was_and_what_will_be_announced(self, log: ChangeLog) -> None:
        empty = await log.last_id()
        assert await log.read(empty, 10) == []
        assert await log.last_id() == empty
        first = await log.append([change("1")])
        assert empty < first
        assert await log.last_id() == first
        assert await log.read(first, 10) == []
        second = await log.append([change("2")])
        assert await log.read(empty, 10) == [(first, change("1")), (second, change("2"))]
        assert await log.read(first, 10) == [(second, change("2"))]

    async def test_who_knew_the_log_before_it_was_restarted_is_told(self, log: ChangeLog) -> None:
        ids = [await log.last_id(), *[await log.append([change(f"{n}")]) for n in range(5)]]
        waiting = asyncio.ensure_future(log.wait_for_change(ids[-1]))
        await log.begin_epoch()
        await waiting
        assert [await log.read(id_, 10) for id_ in ids] == [None] * 6
        assert await log.count_after(ids[0], 10, bool) in (0, None)
        fresh = await log.last_id()
        assert fresh > ids[-1]
        assert await log.read(fresh, 10) == []
        after = await log.append([change("x")])
        assert after > fresh
        assert await log.read(fresh, 10) == [(after, change("x"))]
        assert await log.read("", 10) == [(after, change("x"))]

    async def test_who_waits_hears_of_a_change_that_was_or_will_be_announced(self, log: ChangeLog) -> None:
        place = await log.last_id()
        for n in range(10):
            is_late = n % 2
            waiting = asyncio.ensure_future(log.wait_for_change(place)) if is_late else None
            await asyncio.sleep(0)
            last = await log.append([change(f"{n}")])
            await (waiting or log.wait_for_change(place))
            assert await log.read(place, 10) == [(last, change(f"{n}"))]
            place = last

    async def test_many_wait_at_once(self, log: ChangeLog) -> None:
        place = await log.last_id()
        waiting = [asyncio.ensure_future(log.wait_for_change(place)) for _ in range(50)]
        await asyncio.sleep(0)
        await log.append([change("x")])
        await asyncio.gather(*waiting)

    async def test_a_wait_ends_though_nothing_is_announced(self, log: ChangeLog) -> None:
        await log.wait_for_change(await log.last_id())
        await log.append([change("x")])
        await log.wait_for_change(await log.last_id())


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

    async def test_a_nonce_is_refused_for_ten_minutes(
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
            window = await coordinator.increment("a", 60_000)
            assert window.count == expected
            assert 20_000 - self.slack_ms <= window.resets_in_ms <= 20_000
        assert (await coordinator.increment("b", 60_000)).count == 1
        assert (await coordinator.increment("a", 30_000)).count == 1
        await advance(20_000)
        window = await coordinator.increment("a", 60_000)
        assert window.count == 1
        assert 60_000 - self.slack_ms <= window.resets_in_ms <= 60_000

    async def test_counts_that_are_taken_back_leave_their_window_and_no_later_one(
        self, coordinator: Coordinator, clock: FakeClock, advance: Advance
    ) -> None:
        clock.now_ms = 60_000 * 1_000_000 + 40_000
        window = await coordinator.increment("a", 60_000, by=10)
        assert window.count == 10
        await coordinator.decrement("a", 60_000, window.ends_ms, by=4)
        assert (await coordinator.increment("a", 60_000)).count == 7
        await coordinator.decrement("never counted", 60_000, window.ends_ms, by=4)
        assert (await coordinator.increment("never counted", 60_000)).count == 1
        await advance(20_000)
        await coordinator.decrement("a", 60_000, window.ends_ms, by=4)
        assert (await coordinator.increment("a", 60_000, by=2)).count == 2
        await coordinator.decrement("a", 60_000, window.ends_ms, by=1)
        assert (await coordinator.increment("a", 60_000)).count == 3

    async def test_counting_at_once_loses_no_count(self, coordinator: Coordinator) -> None:
        windows = await asyncio.gather(*(coordinator.increment("a", 60_000) for _ in range(100)))
        assert sorted(window.count for window in windows) == list(range(1, 101))

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
            await coordinator.compare_and_set("k", b"wrong", value)
            await coordinator.compare_and_set("unknown", b"first", value)
        assert await coordinator.put_if_absent("k", b"second", 60_000) == b"first"
        await coordinator.compare_and_set("k", b"first", b"second")
        assert await coordinator.put_if_absent("k", b"third", 60_000) == b"second"
        await coordinator.compare_and_set("k", b"second", None)
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
        assert (await coordinator.increment("notes/push:identity=a", 60_000)).count == 1
        assert (await coordinator.increment("notes/push:identity=ab", 60_000)).count == 2
        assert (await coordinator.increment("notes/push:ip=::1", 60_000)).count == 2
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

    async def test_what_another_has_announced_or_withdrawn_is_announced_all_the_same(
        self, coordinator: Coordinator
    ) -> None:
        names = [await coordinator.prepare([change("a")]) for _ in range(2)]
        await coordinator.append([change("a")], names[0])
        await coordinator.abort(names[1])
        await coordinator.abort(names[1])
        for name in names:
            await coordinator.append([change("a")], name)
        assert len(await _retained(coordinator)) == 3
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

    async def test_usage_is_the_sum_of_what_is_added(self, coordinator: Coordinator) -> None:
        one = Usage(10, 1, 0, 0)
        added = await asyncio.gather(*(coordinator.usage.add("a", {"me": one, "all": one}) for _ in range(9)))
        assert sorted(each.totals["all"].bytes for each in added) == list(range(10, 100, 10))
        await coordinator.usage.add("b", {"me": Usage(-90, -9, 0, 0), "all": Usage(0, 0, 3, 4)})
        assert await coordinator.usage.read() == {"all": Usage(90, 9, 3, 4)}
        assert await coordinator.usage.read(["me", "all"]) == {"all": Usage(90, 9, 3, 4)}
        assert await coordinator.usage.read([]) == {}

    async def test_a_count_of_usage_replaces_the_totals_and_keeps_what_it_cannot_have_seen(
        self, coordinator: Coordinator
    ) -> None:
        usage, one = coordinator.usage, Usage(1, 1, 0, 0)
        assert await usage.counted_ms() is None
        await usage.add("a", {"wrong": one})
        await usage.begin_count("first")
        assert not (await usage.add("a", {"me": one})).in_count
        assert await usage.count("first", "m", {"me": Usage(5, 5, 0, 0)})
        assert (await usage.add("m", {"me": one})).in_count
        assert (await usage.add("K\u00e4se", {"me": one})).in_count
        assert not (await usage.add("m/1", {"me": one})).in_count
        assert not (await usage.add("", {"me": one})).in_count
        assert await usage.read() == {"wrong": one, "me": Usage(5, 5, 0, 0)}
        assert await usage.count("first", "z", {"me": Usage(10, 0, 0, 0)})
        assert await usage.end_count("first", 1_234)
        assert await usage.read() == {"me": Usage(17, 7, 0, 0)}
        assert await usage.counted_ms() == 1_234
        assert not (await usage.add("a", {"me": one})).in_count

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

    async def test_a_new_epoch_has_no_usage_and_no_count(self, coordinator: Coordinator) -> None:
        usage, one = coordinator.usage, Usage(1, 1, 0, 0)
        await usage.begin_count("before")
        assert await usage.count("before", "a", {"me": one})
        assert await usage.end_count("before", 1)
        await usage.begin_count("under way")
        await coordinator.begin_epoch()
        assert (await usage.read(), await usage.counted_ms()) == ({}, None)
        assert not await usage.count("under way", "b", {"me": one})
        assert (await usage.add("a", {"me": one})).totals == {"me": one}


class LeaseContract(FakeTime):
    """The contract of `Coordinator.acquire_lease`. The subclass provides the fixture `pair`: two coordinators
    that share one memory, as those of two processes do, and read the fixture `clock`. The fixture closes
    both, even if a test has closed one already."""

    async def test_one_leads_at_a_time(self, pair: tuple[Coordinator, Coordinator], advance: Advance) -> None:
        one, other = pair
        for _ in range(3):
            assert await one.acquire_lease("a")
            assert not await other.acquire_lease("a")
            await advance(LEASE_MS // 2)
        assert await other.acquire_lease("b")
        assert not await one.acquire_lease("b")
        assert await one.acquire_lease("a")

    async def test_when_who_leads_has_closed_another_does(
        self, pair: tuple[Coordinator, Coordinator], advance: Advance
    ) -> None:
        one, other = pair
        assert await one.acquire_lease("a")
        assert not await other.acquire_lease("a")
        await one.close()
        await advance(LEASE_MS + 1)
        assert await other.acquire_lease("a")

    async def test_who_has_not_asked_for_the_time_of_a_lease_leads_no_longer(
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

    async def test_of_many_that_ask_at_once_one_leads(self, pair: tuple[Coordinator, Coordinator]) -> None:
        leads = await asyncio.gather(*(coordinator.acquire_lease("a") for coordinator in pair))
        assert sorted(leads) == [False, True]


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

    async def test_full_memory_refuses_and_forgets_nothing(
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

    async def test_a_probe_fails_where_owners_are_refused(
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
