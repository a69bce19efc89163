"""The feed of a process: each change reaches whoever listens for it, once and in order."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.change_feed import NOTES, Ear, Followed, Log, following, note, until
from support.depth import depth

from pysync.changelog import Retention
from pysync.engine import subscriptions as feed_module
from pysync.engine.subscriptions import (
    Authorize,
    Deliveries,
    Event,
    Subscriber,
)


@pytest.mark.slow
@given(
    st.lists(
        st.sampled_from(["write", "burst", "begin", "resume", "slow", "one", "leave", "turn"]), max_size=60
    ),
    st.lists(st.sampled_from([0, 0, 0, 1, 12]), max_size=200),
)
@settings(max_examples=depth(75, 1200))
def test_every_subscriber_gets_each_change_exactly_once(steps: list[str], ticks: list[int]) -> None:
    async def play() -> None:
        log, written = Log(ticks), 0
        feed = following(log)
        cursors = [(await log.last_id(), 0)]
        ears: list[tuple[Ear, int]] = []
        bringing: list[asyncio.Task[bool]] = []

        async def write(count: int) -> None:
            nonlocal written
            for _ in range(count):
                cursors.append((await log.append([note(written)]), written + 1))
                written += 1

        for at, step in enumerate(steps):
            if step in ("write", "burst"):
                await write(1 if step == "write" else 5)
            elif step == "leave" and ears:
                feed.unsubscribe(ears.pop(at % len(ears))[0])
            elif step == "turn":
                for _ in range(at % 6):
                    await asyncio.sleep(0)
            elif step == "begin":
                start = await feed.resolve_start("")
                ears.append((Ear(start.cursor), written))
                if not feed.subscribe(ears[-1][0]):
                    bringing.append(asyncio.create_task(feed.bring(ears[-1][0])))
            elif step in ("resume", "slow", "one"):
                cursor, count = cursors[at * 7 % len(cursors)]
                ears.append((Ear(cursor, {NOTES: {"id": "5"} if step == "one" else {}}), count))
                ears[-1][0].slow = step == "slow"
                bringing.append(asyncio.create_task(feed.bring(ears[-1][0])))
        await asyncio.gather(*bringing)
        await write(1)
        for ear, first in ears:
            one = ear.filter[NOTES].get("id")
            received = [str(n) for n in range(first, written) if one in (None, str(n))]
            assert await until(ear, len(received)) == received
        feed.close()

    page = feed_module.PAGE_SIZE
    feed_module.PAGE_SIZE = 3  # type: ignore[misc]
    try:
        asyncio.run(asyncio.wait_for(play(), 20))
    finally:
        feed_module.PAGE_SIZE = page  # type: ignore[misc]


async def test_change_during_a_catch_up_is_not_lost() -> None:
    log = Log()
    feed, cursor = following(log), await log.last_id()
    other, late = Ear(cursor), Ear(cursor)
    assert feed.subscribe(other)
    await log.append([note(1)])
    await until(other, 1)
    arrived, release = log.hold()
    bringing = asyncio.create_task(feed.bring(late))
    await arrived.wait()
    await log.append([note(2)])
    await until(other, 2)
    release.set()
    assert await bringing
    assert late.delivered == ["1", "2"]
    await log.append([note(3)])
    assert await until(late, 3) == ["1", "2", "3"]
    feed.close()


async def test_idle_dispatcher_does_not_read_the_log() -> None:
    log = Log()
    feed, ear = following(log), Ear(await log.last_id())
    assert feed.subscribe(ear)
    await log.append([note(1)])
    await until(ear, 1)
    feed.unsubscribe(ear)
    await asyncio.sleep(0)
    reads = log.reads
    await log.append([note(2)])
    for _ in range(20):
        await asyncio.sleep(0)
    assert log.reads == reads


async def test_log_is_read_once_for_all_subscribers() -> None:
    log = Log()
    feed = following(log)
    ears = [Ear(await log.last_id()) for _ in range(100)]
    assert all(feed.subscribe(ear) for ear in ears)
    await log.append([note(n) for n in range(10)])
    for ear in ears:
        assert len(await until(ear, 10)) == 10
    assert log.reads <= 3
    feed.close()


async def test_subscriber_receives_the_values_that_it_filters_for() -> None:
    log = Log()
    feed, cursor = following(log), await log.last_id()
    two = ("acme", "notes")
    one, other = Ear(cursor, {NOTES: {"id": "1"}}), Ear(cursor, {NOTES: {"id": "2"}, two: {}})
    none = Ear(cursor, {(None, "lists"): {}})
    for ear in (one, other, none):
        assert feed.subscribe(ear)
    await log.append([note(1), note(2), note(1, "acme"), note(3), note(2, "elsewhere")])
    assert await until(other, 2) == ["2", "1"]
    assert (one.delivered, none.delivered) == (["1"], [])
    feed.close()


async def test_subscribers_are_reset_if_the_log_forgets_faster_than_it_is_read() -> None:
    log = Log(ticks=[0, 0] + [50] * 100, retention=Retention(count=2))
    feed, ear = following(log), Ear(await log.last_id())
    assert feed.subscribe(ear)
    await log.append([note(0)])
    await until(ear, 1)
    for n in range(1, 30):
        await log.append([note(n)])
        await asyncio.sleep(0)
    while not ear.resets:
        await asyncio.sleep(0)
    await log.append([note("last")])
    while ear.delivered[-1] != "last":
        await asyncio.sleep(0)
    feed.close()


async def test_a_log_that_cannot_be_read_for_a_while_costs_no_listener_an_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed_module, "RETRY_S", 0.0)
    log = Log()
    feed, ear, late = following(log), Ear(await log.last_id()), Ear(await log.last_id())
    assert feed.subscribe(ear)
    log.fails = 3
    await log.append([note(1)])
    assert await until(ear, 1) == ["1"]
    log.fails = 1
    assert not await feed.bring(late)
    assert late.is_aborted
    feed.close()


async def test_failed_delivery_aborts_every_subscriber() -> None:
    async def breaks(plan: Deliveries) -> Authorize:
        raise RuntimeError("a bug")

    log = Log()
    feed = Followed(log, breaks)
    ear, other = Ear(await log.last_id()), Ear(await log.last_id())
    ear.needs_authorization = True
    assert feed.subscribe(ear)
    assert feed.subscribe(other)
    await log.append([note(1)])
    while not (ear.is_aborted and other.is_aborted):
        await asyncio.sleep(0)
    assert (ear.delivered, other.delivered) == ([], ["1"])
    fresh = Ear(await log.last_id())
    feed.unsubscribe(ear)
    feed.unsubscribe(other)
    assert feed.subscribe(fresh)
    await log.append([note(2)])
    assert await until(fresh, 1) == ["2"]
    feed.close()


async def test_authorization_of_one_subscriber_delays_no_other() -> None:
    release = asyncio.Event()

    async def slowly(plan: Deliveries) -> Authorize:
        await release.wait()
        return lambda listener, event: None if event.params["id"] == "2" else event

    log = Log()
    feed = Followed(log, slowly)
    quick, authorized = Ear(await log.last_id()), Ear(await log.last_id())
    authorized.needs_authorization = True
    listeners: list[Subscriber] = [quick, authorized]
    assert all(feed.subscribe(ear) for ear in listeners)
    await log.append([note(1), note(2), note(3)])
    assert await until(quick, 3) == ["1", "2", "3"]
    assert authorized.delivered == []
    release.set()
    assert await until(authorized, 2) == ["1", "3"]
    feed.close()


@pytest.mark.parametrize("is_past", [True, False])
async def test_others_run_while_much_is_read_without_subscribers(is_past: bool) -> None:
    log = Log()
    feed = following(log)
    ear = Ear(await log.last_id(), {NOTES: {"id": "nobody"}})
    if not is_past:
        assert feed.subscribe(ear)
        await asyncio.sleep(0)
    await log.append([note(number) for number in range(10 * feed_module.PAGE_SIZE)])
    bringing = asyncio.create_task(feed.bring(ear)) if is_past else None
    read_before = most = 0
    while feed.watermark != await log.last_id():
        await asyncio.sleep(0)
        most = max(most, log.reads - read_before)
        read_before = log.reads
    assert bringing is None or await bringing
    feed.close()
    assert log.reads >= 10
    assert most == 1, "pages that were read in one turn of the loop"


class Noting(Ear):
    """A listener that also remembers how many events it was given at a time."""

    def __init__(self, cursor: str) -> None:
        super().__init__(cursor)
        self.deliveries: list[int] = []

    def deliver(self, events: Sequence[Event]) -> None:
        super().deliver(events)
        self.deliveries.append(len(events))


@pytest.mark.parametrize("needs_authorization", [False, True])
async def test_others_run_while_thousands_are_notified(needs_authorization: bool) -> None:
    log = Log()
    feed = following(log)
    ears = [Noting(await log.last_id()) for _ in range(2_000)]
    for ear in ears:
        ear.needs_authorization = needs_authorization
        assert feed.subscribe(ear)
    await log.append([note(1), note(2)])
    received = most = 0
    while received < len(ears):
        await asyncio.sleep(0)
        before, received = received, sum(len(ear.deliveries) for ear in ears)
        most = max(most, received - before)
    feed.close()
    assert 0 < most <= feed_module.SLICE_WRITES
    assert all(ear.deliveries == [2] for ear in ears)


async def test_changes_during_a_large_delivery_are_delivered_together() -> None:
    log = Log()
    feed = following(log)
    ears = [Noting(await log.last_id()) for _ in range(501)]
    assert all(feed.subscribe(ear) for ear in ears)
    await log.append([note(0)])
    await until(ears[0], 1)
    for number in range(1, 20):
        await log.append([note(number)])
    for ear in ears:
        await until(ear, 20)
        assert ear.deliveries == [1, 19]
    feed.close()


async def test_no_more_is_authorised_at_a_time_than_takes_a_moment() -> None:
    most = 0

    async def counted(plan: Deliveries) -> Authorize:
        nonlocal most
        most = max(most, len(plan))
        return lambda listener, event: event

    log = Log()
    feed = Followed(log, counted)
    ears = [Noting(await log.last_id()) for _ in range(feed_module.MAX_AUTHORIZED // 2)]
    for ear in ears:
        ear.needs_authorization = True
        assert feed.subscribe(ear)
    await log.append([note(number) for number in range(7)])
    for ear in ears:
        assert await until(ear, 7) == [str(number) for number in range(7)]
        assert ear.deliveries == [7]
    assert most == 2
    feed.close()
