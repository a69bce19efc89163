"""Subscribers that resume in the past: each reads what it has missed, at a bounded cost."""

import asyncio

import pytest
from support.change_feed import Followed, Listener, Log, following, note, until
from support.sse_client import Listen, Serve

from pysync.changelog import OriginFilter
from pysync.engine import subscriptions
from pysync.engine.subscriptions import Authorize, PlannedDeliveries


class Uncounted(Log):
    """A log that tells how much came after an id only to who reads it."""

    async def count_after(self, after: str, most: int, written_by: OriginFilter) -> int | None:
        return None


async def filled(log: Log, count: int) -> str:
    """The place before so many changes."""
    cursor = await log.last_id()
    await log.append([note(number) for number in range(count)])
    return cursor


async def test_page_is_delivered_to_a_subscriber_at_once() -> None:
    class Counting(Listener):
        times = 0

        def deliver(self, events: object) -> None:
            self.times += 1
            super().deliver(events)  # type: ignore[arg-type]

    log = Log()
    listener, dispatcher = Counting(await filled(log, 1_000)), following(log)
    assert await dispatcher.bring(listener)
    assert (len(listener.delivered), listener.times) == (1_000, 8)
    dispatcher.close()


async def test_only_changes_of_its_collections_are_read_for_a_subscriber() -> None:
    log = Log()
    cursor = await filled(log, 1_000)
    dispatcher, listener = following(log), Listener(cursor, {("elsewhere", "notes"): {}})
    assert await dispatcher.bring(listener)
    assert (log.found, listener.delivered) == (0, [])
    dispatcher.close()


@pytest.mark.parametrize("kind", [Log, Uncounted])
async def test_subscriber_that_missed_too_much_is_reset_and_continues(kind: type[Log]) -> None:
    log = kind()
    cursor = await filled(log, 1_000)
    dispatcher, far, near = (
        following(log, 400),
        Listener(cursor),
        Listener(cursor, {("elsewhere", "notes"): {}}),
    )
    assert await dispatcher.bring(far)
    assert far.resets == 1
    assert far.cursor == await log.last_id()
    assert log.found <= (0 if kind is Log else 400 + subscriptions.PAGE_SIZE)
    if kind is Log:
        assert await dispatcher.bring(near)
        assert near.resets == 0, "of what it follows it has missed nothing"
    await log.append([note("more")])
    while far.delivered[-1:] != ["more"]:
        await asyncio.sleep(0)
    dispatcher.close()


async def test_others_run_while_many_receive_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriptions, "SLICE_S", -1.0)
    log = Log()
    cursor = await filled(log, 100)
    dispatcher, listeners, ticks = following(log), [Listener(cursor) for _ in range(50)], 0
    bringing = asyncio.gather(*(dispatcher.bring(listener) for listener in listeners))
    while not bringing.done():
        await asyncio.sleep(0)
        ticks += 1
    assert ticks >= 100 + 50, "one for each event, and for each listener"
    dispatcher.close()


async def test_slow_reader_keeps_nobody_waiting() -> None:
    class Stuck(Listener):
        async def drained(self) -> bool:
            if not self.delivered:
                return True
            await release.wait()
            self.is_writable = True
            return True

    release, log = asyncio.Event(), Log()
    cursor = await filled(log, 1_000)
    dispatcher, stuck, other = following(log), Stuck(cursor), Listener(cursor)
    stuck.slow = True
    bringing = asyncio.create_task(dispatcher.bring(stuck))
    assert await dispatcher.bring(other)
    assert len(other.delivered) == 1_000
    assert 0 < len(stuck.delivered) < 1_000
    stuck.slow = False
    release.set()
    assert await bringing
    assert stuck.delivered == other.delivered
    dispatcher.close()


async def test_leaving_subscriber_receives_nothing_more_and_others_do() -> None:
    log = Log(ticks=[3] * 1_000)
    cursor = await filled(log, 1_000)
    dispatcher, leaving, other = following(log), Listener(cursor), Listener(cursor)
    bringing = asyncio.create_task(dispatcher.bring(leaving)), asyncio.create_task(dispatcher.bring(other))
    await until(leaving, 100)
    bringing[0].cancel()
    assert await bringing[1]
    assert len(leaving.delivered) < 1_000
    assert len(other.delivered) == 1_000
    dispatcher.close()


async def test_subscriber_that_cannot_be_authorized_does_not_end_the_others() -> None:
    async def breaks(plan: PlannedDeliveries) -> Authorize:
        raise RuntimeError("a bug")

    log = Log()
    cursor = await filled(log, 10)
    dispatcher, subscriber = Followed(log, breaks), Listener(cursor)
    subscriber.needs_authorization = True
    with pytest.raises(RuntimeError):
        await dispatcher.bring(subscriber)
    other = Listener(cursor)
    assert await dispatcher.bring(other)
    assert len(other.delivered) == 10
    dispatcher.close()


async def test_a_stream_that_resumes_too_far_back_is_reset(serve: Serve, subscribe: Listen) -> None:
    public = {"readRoles": ["public"], "writeRoles": ["public"]}
    notes, other = ({"name": name, "storagePath": f"{name}/{{id}}", **public} for name in ("notes", "other"))
    browser = await serve(notes, other, changes={"maxResumed": 3})
    cursor = (await (await subscribe(browser)).block()).id
    for number in range(3):
        await browser.push(f"notes/{number}", {})
    assert len(await (await subscribe(browser, collections="notes", lastEventId=cursor)).events(3)) == 3
    await browser.push("notes/3", {})
    await browser.push("other/a", {})
    event = await (await subscribe(browser, collections="notes", lastEventId=cursor)).event()
    assert (event.event, event.data) == ("reset", {"reset": True})
    (found,) = await (await subscribe(browser, collections="other", lastEventId=cursor)).events(1)
    assert found["collection"] == "other"
