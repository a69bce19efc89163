"""The feed of a process: each change reaches whoever listens for it, once and in order."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.change_feed import NOTES, Followed, Listener, Log, following, note, until
from support.depth import depth

from pysync.changelog import Retention
from pysync.engine import subscriptions as subscriptions
from pysync.engine.subscriptions import (
    Authorize,
    Event,
    PlannedDeliveries,
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
        dispatcher = following(log)
        cursors = [(await log.last_id(), 0)]
        listeners: list[tuple[Listener, int]] = []
        bringing: list[asyncio.Task[bool]] = []

        async def write(count: int) -> None:
            nonlocal written
            for _ in range(count):
                cursors.append((await log.append([note(written)]), written + 1))
                written += 1

        for at, step in enumerate(steps):
            if step in ("write", "burst"):
                await write(1 if step == "write" else 5)
            elif step == "leave" and listeners:
                dispatcher.unsubscribe(listeners.pop(at % len(listeners))[0])
            elif step == "turn":
                for _ in range(at % 6):
                    await asyncio.sleep(0)
            elif step == "begin":
                start = await dispatcher.resolve_start("")
                listeners.append((Listener(start.cursor), written))
                if not dispatcher.subscribe(listeners[-1][0]):
                    bringing.append(asyncio.create_task(dispatcher.bring(listeners[-1][0])))
            elif step in ("resume", "slow", "one"):
                cursor, count = cursors[at * 7 % len(cursors)]
                listeners.append((Listener(cursor, {NOTES: {"id": "5"} if step == "one" else {}}), count))
                listeners[-1][0].slow = step == "slow"
                bringing.append(asyncio.create_task(dispatcher.bring(listeners[-1][0])))
        await asyncio.gather(*bringing)
        await write(1)
        for listener, first in listeners:
            one = listener.filter[NOTES].get("id")
            received = [str(n) for n in range(first, written) if one in (None, str(n))]
            assert await until(listener, len(received)) == received
        dispatcher.close()

    page = subscriptions.PAGE_SIZE
    subscriptions.PAGE_SIZE = 3  # type: ignore[misc]
    try:
        asyncio.run(asyncio.wait_for(play(), 20))
    finally:
        subscriptions.PAGE_SIZE = page  # type: ignore[misc]


async def test_change_during_a_catch_up_is_not_lost() -> None:
    log = Log()
    dispatcher, cursor = following(log), await log.last_id()
    other, late = Listener(cursor), Listener(cursor)
    assert dispatcher.subscribe(other)
    await log.append([note(1)])
    await until(other, 1)
    arrived, release = log.hold()
    bringing = asyncio.create_task(dispatcher.bring(late))
    await arrived.wait()
    await log.append([note(2)])
    await until(other, 2)
    release.set()
    assert await bringing
    assert late.delivered == ["1", "2"]
    await log.append([note(3)])
    assert await until(late, 3) == ["1", "2", "3"]
    dispatcher.close()


async def test_idle_dispatcher_does_not_read_the_log() -> None:
    log = Log()
    dispatcher, listener = following(log), Listener(await log.last_id())
    assert dispatcher.subscribe(listener)
    await log.append([note(1)])
    await until(listener, 1)
    dispatcher.unsubscribe(listener)
    await asyncio.sleep(0)
    reads = log.reads
    await log.append([note(2)])
    for _ in range(20):
        await asyncio.sleep(0)
    assert log.reads == reads


async def test_log_is_read_once_for_all_subscribers() -> None:
    log = Log()
    dispatcher = following(log)
    listeners = [Listener(await log.last_id()) for _ in range(100)]
    assert all(dispatcher.subscribe(listener) for listener in listeners)
    await log.append([note(n) for n in range(10)])
    for listener in listeners:
        assert len(await until(listener, 10)) == 10
    assert log.reads <= 3
    dispatcher.close()


async def test_subscriber_receives_the_values_that_it_filters_for() -> None:
    log = Log()
    dispatcher, cursor = following(log), await log.last_id()
    two = ("acme", "notes")
    one, other = Listener(cursor, {NOTES: {"id": "1"}}), Listener(cursor, {NOTES: {"id": "2"}, two: {}})
    none = Listener(cursor, {(None, "lists"): {}})
    for listener in (one, other, none):
        assert dispatcher.subscribe(listener)
    await log.append([note(1), note(2), note(1, "acme"), note(3), note(2, "elsewhere")])
    assert await until(other, 2) == ["2", "1"]
    assert (one.delivered, none.delivered) == (["1"], [])
    dispatcher.close()


async def test_subscribers_are_reset_if_the_log_forgets_faster_than_it_is_read() -> None:
    log = Log(ticks=[0, 0] + [50] * 100, retention=Retention(count=2))
    dispatcher, listener = following(log), Listener(await log.last_id())
    assert dispatcher.subscribe(listener)
    await log.append([note(0)])
    await until(listener, 1)
    for n in range(1, 30):
        await log.append([note(n)])
        await asyncio.sleep(0)
    while not listener.resets:
        await asyncio.sleep(0)
    await log.append([note("last")])
    while listener.delivered[-1] != "last":
        await asyncio.sleep(0)
    dispatcher.close()


async def test_a_log_that_cannot_be_read_for_a_while_costs_no_listener_an_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subscriptions, "RETRY_S", 0.0)
    log = Log()
    dispatcher, listener, late = following(log), Listener(await log.last_id()), Listener(await log.last_id())
    assert dispatcher.subscribe(listener)
    log.fails = 3
    await log.append([note(1)])
    assert await until(listener, 1) == ["1"]
    log.fails = 1
    assert not await dispatcher.bring(late)
    assert late.is_aborted
    dispatcher.close()


async def test_failed_delivery_aborts_every_subscriber() -> None:
    async def breaks(plan: PlannedDeliveries) -> Authorize:
        raise RuntimeError("a bug")

    log = Log()
    dispatcher = Followed(log, breaks)
    listener, other = Listener(await log.last_id()), Listener(await log.last_id())
    listener.needs_authorization = True
    assert dispatcher.subscribe(listener)
    assert dispatcher.subscribe(other)
    await log.append([note(1)])
    while not (listener.is_aborted and other.is_aborted):
        await asyncio.sleep(0)
    assert (listener.delivered, other.delivered) == ([], ["1"])
    fresh = Listener(await log.last_id())
    dispatcher.unsubscribe(listener)
    dispatcher.unsubscribe(other)
    assert dispatcher.subscribe(fresh)
    await log.append([note(2)])
    assert await until(fresh, 1) == ["2"]
    dispatcher.close()


async def test_authorization_of_one_subscriber_delays_no_other() -> None:
    release = asyncio.Event()

    async def slowly(plan: PlannedDeliveries) -> Authorize:
        await release.wait()
        return lambda listener, event: None if event.params["id"] == "2" else event

    log = Log()
    dispatcher = Followed(log, slowly)
    quick, authorized = Listener(await log.last_id()), Listener(await log.last_id())
    authorized.needs_authorization = True
    listeners: list[Subscriber] = [quick, authorized]
    assert all(dispatcher.subscribe(listener) for listener in listeners)
    await log.append([note(1), note(2), note(3)])
    assert await until(quick, 3) == ["1", "2", "3"]
    assert authorized.delivered == []
    release.set()
    assert await until(authorized, 2) == ["1", "3"]
    dispatcher.close()


@pytest.mark.parametrize("is_past", [True, False])
async def test_others_run_while_much_is_read_without_subscribers(is_past: bool) -> None:
    log = Log()
    dispatcher = following(log)
    listener = Listener(await log.last_id(), {NOTES: {"id": "nobody"}})
    if not is_past:
        assert dispatcher.subscribe(listener)
        await asyncio.sleep(0)
    await log.append([note(number) for number in range(10 * subscriptions.PAGE_SIZE)])
    bringing = asyncio.create_task(dispatcher.bring(listener)) if is_past else None
    read_before = most = 0
    while dispatcher.watermark != await log.last_id():
        await asyncio.sleep(0)
        most = max(most, log.reads - read_before)
        read_before = log.reads
    assert bringing is None or await bringing
    dispatcher.close()
    assert log.reads >= 10
    assert most == 1, "pages that were read in one turn of the loop"


class Noting(Listener):
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
    dispatcher = following(log)
    listeners = [Noting(await log.last_id()) for _ in range(2_000)]
    for listener in listeners:
        listener.needs_authorization = needs_authorization
        assert dispatcher.subscribe(listener)
    await log.append([note(1), note(2)])
    received = most = 0
    while received < len(listeners):
        await asyncio.sleep(0)
        before, received = received, sum(len(listener.deliveries) for listener in listeners)
        most = max(most, received - before)
    dispatcher.close()
    assert 0 < most <= subscriptions.SLICE_WRITES
    assert all(listener.deliveries == [2] for listener in listeners)


async def test_changes_during_a_large_delivery_are_delivered_together() -> None:
    log = Log()
    dispatcher = following(log)
    listeners = [Noting(await log.last_id()) for _ in range(501)]
    assert all(dispatcher.subscribe(listener) for listener in listeners)
    await log.append([note(0)])
    await until(listeners[0], 1)
    for number in range(1, 20):
        await log.append([note(number)])
    for listener in listeners:
        await until(listener, 20)
        assert listener.deliveries == [1, 19]
    dispatcher.close()


async def test_no_more_is_authorised_at_a_time_than_takes_a_moment() -> None:
    most = 0

    async def counted(plan: PlannedDeliveries) -> Authorize:
        nonlocal most
        most = max(most, len(plan))
        return lambda listener, event: event

    log = Log()
    dispatcher = Followed(log, counted)
    listeners = [Noting(await log.last_id()) for _ in range(subscriptions.MAX_AUTHORIZED // 2)]
    for listener in listeners:
        listener.needs_authorization = True
        assert dispatcher.subscribe(listener)
    await log.append([note(number) for number in range(7)])
    for listener in listeners:
        assert await until(listener, 7) == [str(number) for number in range(7)]
        assert listener.deliveries == [7]
    assert most == 2
    dispatcher.close()
