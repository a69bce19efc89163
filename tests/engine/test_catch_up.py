"""Listeners who begin in the past: what they have missed is read once for all, at a bounded cost."""

import asyncio

import pytest
from support.change_feed import Ear, Followed, Log, anybody, following, note, until
from support.sse_client import Listen, Serve

from pysync.changelog import OriginFilter
from pysync.engine import catch_up as module
from pysync.engine import subscriptions
from pysync.engine.subscriptions import Authorize, Deliveries


class Uncounted(Log):
    """A log that tells how much came after an id only to who reads it."""

    async def count_after(self, after: str, most: int, written_by: OriginFilter) -> int | None:
        return None


async def filled(log: Log, count: int) -> str:
    """The place before so many changes."""
    place = await log.last_id()
    await log.append([note(number) for number in range(count)])
    return place


async def test_what_several_have_missed_is_read_once() -> None:
    log = Log()
    place = await filled(log, 1_000)
    feed = following(log)
    ears = [Ear(place) for _ in range(20)]
    assert all(await asyncio.gather(*(feed.bring(ear) for ear in ears)))
    assert all(ear.heard == [str(number) for number in range(1_000)] for ear in ears)
    assert log.reads < 20
    feed.close()


async def test_a_page_is_handed_to_a_listener_in_one_piece() -> None:
    class Counting(Ear):
        times = 0

        def deliver(self, events: object) -> None:
            self.times += 1
            super().deliver(events)  # type: ignore[arg-type]

    log = Log()
    ear, feed = Counting(await filled(log, 1_000)), following(log)
    assert await feed.bring(ear)
    assert (len(ear.heard), ear.times) == (1_000, 8)
    feed.close()


async def test_only_what_its_collections_may_have_written_is_read_for_a_listener() -> None:
    log = Log()
    place = await filled(log, 1_000)
    feed, ear = following(log), Ear(place, {("elsewhere", "notes"): {}})
    assert await feed.bring(ear)
    assert (log.found, ear.heard) == (0, [])
    feed.close()


@pytest.mark.parametrize("kind", [Log, Uncounted])
async def test_who_has_missed_too_much_is_reset_and_goes_on(kind: type[Log]) -> None:
    log = kind()
    place = await filled(log, 1_000)
    feed, far, near = following(log, 400), Ear(place), Ear(place, {("elsewhere", "notes"): {}})
    assert await feed.bring(far)
    assert far.resets == 1
    assert far.cursor == await log.last_id()
    assert log.found <= (0 if kind is Log else 400 + module.PAGE_SIZE)
    if kind is Log:
        assert await feed.bring(near)
        assert near.resets == 0, "of what it follows it has missed nothing"
    await log.append([note("more")])
    while far.heard[-1:] != ["more"]:
        await asyncio.sleep(0)
    feed.close()


async def test_so_many_are_taken_along_at_a_time_and_the_others_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_SUBSCRIBERS", 6)
    monkeypatch.setattr(module, "MAX_PER_ACCOUNT", 2)
    most = {"all": 0, "greedy": 0}

    async def counted(plan: Deliveries) -> Authorize:
        listeners = {who for _, found in plan for who in found}
        most["all"] = max(most["all"], len(listeners))
        most["greedy"] = max(most["greedy"], sum(who.account == "greedy" for who in listeners))
        return await anybody(plan)

    log = Log()
    place = await filled(log, 300)
    feed, ears = Followed(log, counted), [Ear(place) for _ in range(20)]
    for number, ear in enumerate(ears):
        ear.needs_authorization, ear.account = True, "greedy" if number < 10 else f"{number}"
    assert all(await asyncio.gather(*(feed.bring(ear) for ear in ears)))
    assert all(len(ear.heard) == 300 for ear in ears)
    assert most == {"all": 6, "greedy": 2}
    feed.close()


async def test_who_is_further_back_waits_for_those_on_their_way_and_for_nobody_who_comes_later() -> None:
    log = Log(ticks=[2] * 10_000)
    oldest = await filled(log, 1_000)
    middle = await log.append([note("middle")])
    await log.append([note(number) for number in range(600)])
    feed, first, far, late = following(log), Ear(middle), Ear(oldest), Ear(middle)
    bringing = [asyncio.create_task(feed.bring(first))]
    await until(first, 1)
    for ear in (far, late):
        bringing.append(asyncio.create_task(feed.bring(ear)))
        await asyncio.sleep(0)
    assert await bringing[0]
    assert (far.heard, late.heard) == ([], [])
    assert all(await asyncio.gather(*bringing))
    assert (len(first.heard), len(far.heard), len(late.heard)) == (600, 1_601, 600)
    feed.close()


async def test_others_have_their_turn_while_many_are_told_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriptions, "SLICE_S", -1.0)
    log = Log()
    place = await filled(log, 100)
    feed, ears, turns = following(log), [Ear(place) for _ in range(50)], 0
    bringing = asyncio.gather(*(feed.bring(ear) for ear in ears))
    while not bringing.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 100 + 50, "one for each event, and for each listener"
    feed.close()


async def test_who_reads_slowly_keeps_nobody_waiting() -> None:
    class Stuck(Ear):
        async def drained(self) -> bool:
            if not self.heard:
                return True
            await release.wait()
            self.is_writable = True
            return True

    release, log = asyncio.Event(), Log()
    place = await filled(log, 1_000)
    feed, stuck, other = following(log), Stuck(place), Ear(place)
    stuck.slow = True
    bringing = asyncio.create_task(feed.bring(stuck))
    assert await feed.bring(other)
    assert len(other.heard) == 1_000
    assert 0 < len(stuck.heard) < 1_000
    stuck.slow = False
    release.set()
    assert await bringing
    assert stuck.heard == other.heard
    feed.close()


async def test_who_leaves_meanwhile_is_told_nothing_more_and_the_others_are() -> None:
    log = Log(ticks=[3] * 1_000)
    place = await filled(log, 1_000)
    feed, leaving, other = following(log), Ear(place), Ear(place)
    bringing = asyncio.create_task(feed.bring(leaving)), asyncio.create_task(feed.bring(other))
    await until(leaving, 100)
    bringing[0].cancel()
    assert await bringing[1]
    assert len(leaving.heard) < 1_000
    assert len(other.heard) == 1_000
    feed.close()


async def test_a_listener_that_nobody_can_decide_on_does_not_end_the_others() -> None:
    async def breaks(plan: Deliveries) -> Authorize:
        raise RuntimeError("a bug")

    log = Log()
    place = await filled(log, 10)
    feed, asking = Followed(log, breaks), Ear(place)
    asking.needs_authorization = True
    with pytest.raises(RuntimeError):
        await feed.bring(asking)
    other = Ear(place)
    assert await feed.bring(other)
    assert len(other.heard) == 10
    feed.close()


async def test_a_stream_that_resumes_too_far_back_is_reset(serve: Serve, subscribe: Listen) -> None:
    public = {"readRoles": ["public"], "writeRoles": ["public"]}
    notes, other = ({"name": name, "storagePath": f"{name}/{{id}}", **public} for name in ("notes", "other"))
    browser = await serve(notes, other, changes={"maxResumed": 3})
    place = (await (await subscribe(browser)).block()).id
    for number in range(3):
        await browser.push(f"notes/{number}", {})
    assert len(await (await subscribe(browser, collections="notes", lastEventId=place)).events(3)) == 3
    await browser.push("notes/3", {})
    await browser.push("other/a", {})
    told = await (await subscribe(browser, collections="notes", lastEventId=place)).event()
    assert (told.event, told.data) == ("reset", {"reset": True})
    (told_of,) = await (await subscribe(browser, collections="other", lastEventId=place)).events(1)
    assert told_of["collection"] == "other"


class Counting(Log):
    """A log that notes for which ids it counts, and in which turn of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: list[str] = []

    async def count_after(self, after: str, most: int, written_by: OriginFilter) -> int | None:
        self.counted.append(after)
        return await super().count_after(after, most, written_by)


async def test_what_came_after_a_place_is_counted_once_for_all_who_resume_there() -> None:
    log = Counting()
    place = await filled(log, 300)
    feed, ears = following(log), [Ear(place) for _ in range(100)]
    assert all(await asyncio.gather(*(feed.bring(ear) for ear in ears)))
    assert log.counted == [place]
    feed.close()
    await log.append([note("more")])
    again = Ear(place)
    assert await feed.bring(again)
    assert log.counted == [place] * 2, "for what has come since changes the count"
    assert len(again.heard) == 301
    feed.close()


async def test_others_have_their_turn_while_the_changes_of_many_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subscriptions, "SLICE_S", -1.0)
    log = Counting()
    await filled(log, 300)
    places = [id_ for id_, _ in await log.read("", 100) or ()]
    feed, ears = following(log, 10), [Ear(place) for place in places]
    bringing = asyncio.gather(*(feed.bring(ear) for ear in ears))
    most = before = 0
    while not bringing.done():
        await asyncio.sleep(0)
        most, before = max(most, len(log.counted) - before), len(log.counted)
    assert (log.counted, most) == (places, 1)
    assert all(ear.resets == 1 for ear in ears)
    feed.close()


async def test_who_waits_is_not_looked_at_until_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SUBSCRIBERS", 2)
    log = Counting()
    places = [await filled(log, 300) for _ in range(6)]
    feed, ears = following(log), [Ear(place) for place in places]
    bringing = [asyncio.create_task(feed.bring(ear)) for ear in ears]
    await until(ears[0], 1)
    assert log.counted == places[:2]
    bringing[3].cancel()
    bringing[5].cancel()
    assert all(await asyncio.gather(*bringing[:3], bringing[4]))
    assert log.counted == [*places[:3], places[4]], "and who has left is not counted"
    assert [len(ear.heard) for ear in ears] == [1_800, 1_500, 1_200, 0, 600, 0]
    feed.close()
