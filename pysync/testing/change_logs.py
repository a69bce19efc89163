"""The promise of `ChangeLog`, as tests."""

import asyncio
from typing import Final

import pytest

from pysync.changelog import Change, ChangeLog, Retention
from pysync.testing.times import Advance, MovedTime

RETENTION: Final = Retention(count=100, age_ms=3_600_000)


def change(text: str, identity: str = "") -> Change:
    """A change that is told as `{"t":text}`."""
    return Change(b'{"t":"%b"}' % text.encode(), identity)


class ChangeLogContract(MovedTime):
    """The promise of `ChangeLog`. The subclass gives the fixture `log`: a log without changes that reads the
    fixture `clock` and keeps them by `RETENTION`."""

    async def test_changes_are_read_in_the_order_of_their_ids(self, log: ChangeLog) -> None:
        assert await log.changes("", 10) == []
        announced = [(await log.announce([change(f"{n}")]), change(f"{n}")) for n in range(10)]
        assert announced == sorted(announced)
        assert await log.changes("", 100) == announced
        assert await log.changes("", 3) == announced[:3]
        for place, (id_, _) in enumerate(announced):
            assert await log.changes(id_, 100) == announced[place + 1 :]
            assert await log.changes(id_, 2) == announced[place + 1 : place + 3]

    async def test_a_change_comes_back_as_it_was_with_who_made_it(self, log: ChangeLog) -> None:
        changes = [Change(b"{}", "somebody"), change("\u20ac\U0001f600"), Change(bytes(9), "x" * 300)]
        await log.announce(changes)
        found = await log.changes("", 10)
        assert found is not None
        assert [told for _, told in found] == changes

    async def test_changes_announced_together_keep_their_order_and_the_last_ones_id(
        self, log: ChangeLog
    ) -> None:
        first = await log.announce([change("first")])
        several = [change(f"{n}") for n in range(40)]
        last = await log.announce(several)
        found = await log.changes(first, 100)
        assert found is not None
        assert [told for _, told in found] == several
        ids = [first, *(id_ for id_, _ in found)]
        assert ids == sorted(set(ids))
        assert ids[-1] == last

    async def test_of_changes_announced_at_once_none_is_lost(self, log: ChangeLog) -> None:
        ids = await asyncio.gather(*(log.announce([change(f"{n}")]) for n in range(50)))
        found = await log.changes("", 100)
        assert found == sorted((id_, change(f"{n}")) for n, id_ in enumerate(ids))

    async def test_who_fell_behind_the_changes_that_are_kept_is_told(self, log: ChangeLog) -> None:
        before = await log.newest()
        ids = [await log.announce([change(f"{n}")]) for n in range(500)]
        assert await log.changes(before, 10) is None
        assert await log.changes(ids[0], 10) is None
        kept = await log.changes("", 500)
        assert kept is not None
        assert [id_ for id_, _ in kept] == ids[-len(kept) :]
        assert RETENTION.count <= len(kept) < 4 * RETENTION.count
        assert await log.changes(ids[-len(kept)], 500) == kept[1:]

    async def test_changes_that_are_young_enough_are_kept(self, log: ChangeLog, advance: Advance) -> None:
        ids = []
        for n in range(50):
            ids.append(await log.announce([change(f"{n}")]))
            await advance(RETENTION.age_ms // 100)
        found = await log.changes(ids[0], 100)
        assert found is not None
        assert [id_ for id_, _ in found] == ids[1:]

    @pytest.mark.parametrize("unknown", ["0", "x", "~" * 100, "9" * 30, "\u0663", "\0"])
    async def test_an_id_that_nobody_was_given_is_told_from_one_that_is_kept(
        self, log: ChangeLog, unknown: str
    ) -> None:
        assert await log.changes(unknown, 10) is None
        id_ = await log.announce([change("x")])
        for near in (unknown, id_[:-1], id_ + "0", id_[:-1] + "x"):
            assert await log.changes(near, 10) is None

    async def test_some_collections_changes_are_read_without_missing_any(self, log: ChangeLog) -> None:
        start = await log.newest()
        names = ["/a", "/b", "/c", "", "x/a"]
        made = [change(f"{n}")._replace(origin=names[n * n % 7 % 5]) for n in range(60)]
        ids = [await log.announce([one]) for one in made]
        for wanted in ({"/a", ""}, {"/a", "/b", ""}, {"gone", ""}, {*names}):
            for after in (start, ids[9], ids[-1]):
                place, found = after, list[tuple[str, Change]]()
                while True:
                    page = await log.matching(place, 7, wanted.__contains__)
                    assert page is not None
                    assert page.last >= place
                    found += page.changes
                    if page.is_end:
                        break
                    place = page.last
                assert page.last == ids[-1]
                told = [each for each in found if each[1].origin in wanted]
                told_of = zip(ids, made, strict=True)
                assert told == [(id_, one) for id_, one in told_of if id_ > after and one.origin in wanted]
                count = await log.count_after(after, 5, wanted.__contains__)
                assert count is None or min(count, 6) >= min(len(told), 6)
                assert count is None or wanted != {"gone", ""} or min(count, 6) == min(len(told), 6)
        assert await log.matching("0", 7, bool) is None

    async def test_the_newest_id_is_between_what_was_and_what_will_be_announced(self, log: ChangeLog) -> None:
        empty = await log.newest()
        assert await log.changes(empty, 10) == []
        assert await log.newest() == empty
        first = await log.announce([change("1")])
        assert empty < first
        assert await log.newest() == first
        assert await log.changes(first, 10) == []
        second = await log.announce([change("2")])
        assert await log.changes(empty, 10) == [(first, change("1")), (second, change("2"))]
        assert await log.changes(first, 10) == [(second, change("2"))]

    async def test_who_waits_hears_of_a_change_that_was_or_will_be_announced(self, log: ChangeLog) -> None:
        place = await log.newest()
        for n in range(10):
            is_late = n % 2
            waiting = asyncio.ensure_future(log.wait(place)) if is_late else None
            await asyncio.sleep(0)
            last = await log.announce([change(f"{n}")])
            await (waiting or log.wait(place))
            assert await log.changes(place, 10) == [(last, change(f"{n}"))]
            place = last

    async def test_many_wait_at_once(self, log: ChangeLog) -> None:
        place = await log.newest()
        waiting = [asyncio.ensure_future(log.wait(place)) for _ in range(50)]
        await asyncio.sleep(0)
        await log.announce([change("x")])
        await asyncio.gather(*waiting)

    async def test_a_wait_ends_though_nothing_is_announced(self, log: ChangeLog) -> None:
        await log.wait(await log.newest())
        await log.announce([change("x")])
        await log.wait(await log.newest())
