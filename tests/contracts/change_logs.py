"""The contract of `ChangeLog`, as tests."""

import asyncio
from typing import Final

import pytest

from contracts.fake_time import Advance, FakeTime
from pysync.changelog import Change, ChangeLog, Retention

RETENTION: Final = Retention(count=100, age_ms=3_600_000)


def change(text: str, identity: str = "") -> Change:
    """Return a change whose data is `{"t":text}`."""
    return Change(b'{"t":"%b"}' % text.encode(), identity)


def written(hash_: str, identity: str = "") -> Change:
    """Return a change with a hash, as a write makes it."""
    return Change(b'{"collection":"a","params":{},"hash":"%b","timestamp":1}' % hash_.encode(), identity)


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
        for cursor, (id_, _) in enumerate(announced):
            assert await log.read(id_, 100) == announced[cursor + 1 :]
            assert await log.read(id_, 2) == announced[cursor + 1 : cursor + 3]

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

    async def test_reader_behind_the_retained_changes_receives_a_reset(self, log: ChangeLog) -> None:
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

    async def test_newest_changes_come_first(self, log: ChangeLog) -> None:
        assert await log.newest(10) == []
        announced = [(await log.append([change(f"{n}")]), change(f"{n}")) for n in range(10)]
        assert await log.newest(100) == announced[::-1]
        assert await log.newest(3) == announced[:-4:-1]
        await log.erase({id_: written("x").erased([]) for id_, _ in announced[5:]})
        assert await log.newest(5) == []
        assert await log.newest(100) == announced[4::-1]
        last = await log.append([change("after")])
        assert (await log.newest(3))[:1] == [(last, change("after"))]

    async def test_erased_changes_leave_their_places_and_no_cursor_is_lost(self, log: ChangeLog) -> None:
        first = await log.last_id()
        made = [written(f"{n}", "somebody")._replace(origin="/a") for n in range(10)]
        ids = [await log.append([each]) for each in made]
        newest = await log.last_id()
        for chosen in ([0, 1, 5], [9], [5, 9], range(10)):
            for n in chosen:
                made[n] = made[n].erased([("x", "a"), (None, "b")])
            await log.erase({ids[n]: made[n] for n in chosen})
            assert await log.last_id() == newest
            for known, cursor in enumerate([first, *ids]):
                assert await log.read(cursor, 100) == [*zip(ids, made, strict=True)][known:]
                page = await log.read_matching(cursor, 100, "/a".__eq__)
                assert page is not None
                assert [each for _, each in page.changes] == made[known:]
        assert all(each.erased_from == {("x", "a"), (None, "b")} for each in made)
        last = await log.append([change("after")])
        assert await log.read(newest, 10) == [(last, change("after"))]

    async def test_what_is_trimmed_is_not_written_again_by_an_erasure(self, log: ChangeLog) -> None:
        ids = [await log.append([written(f"{n}", "somebody")]) for n in range(500)]
        before = await _retained(log)
        await log.erase({id_: written("x").erased([]) for id_ in ids})
        assert await log.read(ids[0], 10) is None
        assert [id_ for id_, _ in await _retained(log)] == [id_ for id_, _ in before]
        await log.append([change(f"{n}") for n in range(500)])
        assert await log.read(ids[-1], 10) is None

    @pytest.mark.parametrize("unknown", ["0", "x", "~" * 100, "9" * 30, "\u0663", "\0"])
    async def test_an_id_that_nobody_was_given_is_distinct_from_one_that_is_kept(
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
                cursor, found = after, list[tuple[str, Change]]()
                while True:
                    page = await log.read_matching(cursor, 7, wanted.__contains__)
                    assert page is not None
                    assert page.last >= cursor
                    found += page.changes
                    if page.is_end:
                        break
                    cursor = page.last
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

    async def test_reader_of_a_log_from_before_a_restart_receives_a_reset(self, log: ChangeLog) -> None:
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

    async def test_waiting_reader_is_notified_of_an_earlier_or_later_change(self, log: ChangeLog) -> None:
        cursor = await log.last_id()
        for n in range(10):
            is_late = n % 2
            waiting = asyncio.ensure_future(log.wait_for_change(cursor)) if is_late else None
            await asyncio.sleep(0)
            last = await log.append([change(f"{n}")])
            await (waiting or log.wait_for_change(cursor))
            assert await log.read(cursor, 10) == [(last, change(f"{n}"))]
            cursor = last

    async def test_many_wait_at_once(self, log: ChangeLog) -> None:
        cursor = await log.last_id()
        waiting = [asyncio.ensure_future(log.wait_for_change(cursor)) for _ in range(50)]
        await asyncio.sleep(0)
        await log.append([change("x")])
        await asyncio.gather(*waiting)

    async def test_a_wait_ends_though_nothing_is_announced(self, log: ChangeLog) -> None:
        await log.wait_for_change(await log.last_id())
        await log.append([change("x")])
        await log.wait_for_change(await log.last_id())
