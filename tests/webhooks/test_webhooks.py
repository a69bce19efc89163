"""Webhooks: a program is sent the changes of its collections in order, at least once each, until it accepts
them."""

import asyncio
from typing import Any

import aiohttp
import aiohttp.web
import pytest
from components import RedisServer
from support.clients import Browser, Start
from support.collections import UNSIGNED, collection
from support.configurations import patient
from support.faulty_store import FaultyStore
from support.redis_losses import flush
from support.sse_client import Listen
from support.webhook_receiver import (
    SECOND_SECRET,
    Answer,
    Waits,
    accept,
    app_of,
    drop,
    hang,
    receiving,
    respond,
    sending,
    webhook,
    with_webhooks,
)

from pysync.config import parse
from pysync.coordinator.memory import MemoryCoordinator
from pysync.coordinator.redis.coordinator import RedisCoordinator
from pysync.erase import EraseRequest
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

NOTES = collection("notes", deletable=True)
SERVICE: dict[str, Any] = {"collections": [NOTES, collection("other")]}


async def push(base: str, session: aiohttp.ClientSession, *names: str) -> None:
    for name in names:
        answer = await Browser(base, session).push(f"notes/{name}", {"a": name})
        assert answer.status == 200


async def test_receiver_is_sent_the_events_of_the_change_stream(
    start: Start, session: aiohttp.ClientSession, subscribe: Listen
) -> None:
    async with receiving() as inbox:
        base = await start(SERVICE | {"webhooks": [webhook(inbox.url)]})
        stream = await subscribe(Browser(base, session), collections="notes")
        await push(base, session, "a", "b")
        hash_ = (await Browser(base, session).pull("notes/a")).json["hash"]
        await Browser(base, session).request("DELETE", f"/push/notes/a?baseHash={hash_}")
        events = [await stream.event() for _ in range(3)]
        await inbox.until(lambda: len(inbox.changes) == 3)
        assert inbox.changes == [event.data for event in events]
        assert all(one.body["type"] == "changes" for one in inbox.deliveries)
        assert inbox.deliveries[-1].id == events[-1].id


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (["notes"], ["root", "acme"]),
        (["/notes"], ["root"]),
        (["acme/notes"], ["acme"]),
        (["inbox", "ticks"], ["inbox", "ticks"]),
    ],
)
async def test_collections_are_named_as_the_sources_of_projections(
    start: Start, session: aiohttp.ClientSession, named: list[str], expected: list[str]
) -> None:
    """Also those that nobody may pull, and those that store nothing."""
    members = {
        "collections": [
            NOTES,
            collection("inbox", pushOnly=True),
            collection("ticks", appendOnly={"persist": False, **UNSIGNED}),
        ],
        "namespaces": {"acme": {"collections": [collection("notes", "acme/{id}")]}},
    }
    async with receiving() as inbox:
        base = await start(members | {"webhooks": [webhook(inbox.url, collections=named)]})
        browser = Browser(base, session)
        for target in ("/push/notes/root", "/acme/push/acme/acme", "/push/inbox/inbox"):
            assert (await browser.request("POST", target, {"data": {}, "baseHash": None})).status == 200
        assert (await browser.request("POST", "/push/ticks/ticks", {"data": {}})).status == 200
        await inbox.until(lambda: len(inbox.changes) >= len(expected))
        assert [change["params"]["id"] for change in inbox.changes] == expected


async def test_changes_are_posted_in_order_and_up_to_100_together(
    start: Start, session: aiohttp.ClientSession
) -> None:
    names = [f"n{number}" for number in range(251)]
    async with receiving(respond(503)) as inbox:
        base = await start(SERVICE)
        waits = Waits()
        waits.is_over.clear()
        async with sending(app_of(start), webhook(inbox.url), sleep=waits):
            await push(base, session, *names)
            await Browser(base, session).push("other/x", {})
            await waits.first(1)
            waits.is_over.set()
            first, *others = await inbox.until(lambda: inbox.keys[-1:] == ["n250"])
        assert [one.keys for one in others] == [first.keys, *in_batches(names[len(first.keys) :])]
        assert len({one.id for one in others}) == len(others)


def in_batches(names: list[str]) -> list[list[str]]:
    return [names[at : at + 100] for at in range(0, len(names), 100)]


async def test_new_name_begins_at_now_and_known_one_continues(
    start: Start, session: aiohttp.ClientSession
) -> None:
    """Whatever else changes: its receiver, its secret, its collections."""
    async with receiving() as first, receiving() as second:
        base = await start(SERVICE)
        app = app_of(start)
        await push(base, session, "before")
        async with sending(app, webhook(first.url)):
            await push(base, session, "a")
            await first.first(1)
        await push(base, session, "b")
        second.secret = SECOND_SECRET
        changed = webhook(second.url, secret=SECOND_SECRET, collections=["notes", "other"])
        async with sending(app, changed, webhook(first.url, name="another")):
            await push(base, session, "c")
            await second.until(lambda: len(second.changes) == 2)
            await first.first(2)
        assert (first.keys, second.keys) == (["a", "c"], ["b", "c"])


@pytest.mark.parametrize(
    "answer",
    [respond(500), respond(302, Location="/hook"), respond(304), drop, hang],
    ids=["fails", "redirects", "answers no 2xx", "resets", "hangs"],
)
async def test_repetition_carries_the_same_changes_and_the_same_id(
    start: Start, session: aiohttp.ClientSession, answer: Answer
) -> None:
    """Until the answer is 2xx; a redirect is not followed."""
    async with receiving(answer, answer) as inbox:
        base = await start(SERVICE)
        waits = Waits()
        waits.is_over.clear()
        async with sending(app_of(start), webhook(inbox.url), sleep=waits, timeout_s=0.5):
            await push(base, session, "a")
            await waits.first(1)
            await push(base, session, "b")
            waits.is_over.set()
            one, two, three, last = await inbox.first(4)
        assert one[:2] == two[:2] == three[:2]
        assert (one.keys, last.keys) == (["a"], ["b"])


async def test_repetition_is_the_same_after_a_restart_with_other_collections(
    start: Start, session: aiohttp.ClientSession
) -> None:
    async with receiving(respond(500)) as inbox:
        base = await start(SERVICE)
        waits = Waits()
        waits.is_over.clear()
        async with sending(app_of(start), webhook(inbox.url), sleep=waits):
            await Browser(base, session).push("other/x", {})
            await push(base, session, "a")
            await waits.first(1)
        await push(base, session, "b")
        async with sending(app_of(start), webhook(inbox.url, collections=["notes", "other"])):
            await Browser(base, session).push("other/y", {})
            await inbox.until(lambda: inbox.keys[-1] == "y")
        assert inbox.deliveries[0][:2] == inbox.deliveries[1][:2]
        assert inbox.keys == ["a", "a", "b", "y"]


async def test_changes_of_a_collection_that_a_webhook_loses_are_not_repeated(
    start: Start, session: aiohttp.ClientSession
) -> None:
    async with receiving(respond(500)) as inbox:
        base = await start(SERVICE)
        waits = Waits()
        waits.is_over.clear()
        async with sending(app_of(start), webhook(inbox.url), sleep=waits):
            await push(base, session, "a")
            await waits.first(1)
        async with sending(app_of(start), webhook(inbox.url, collections=["other"])):
            await Browser(base, session).push("other/y", {})
            await inbox.first(2)
        assert inbox.keys == ["a", "y"]


async def test_waits_grow_from_a_second_to_an_hour(start: Start, session: aiohttp.ClientSession) -> None:
    async with receiving(*[respond(500)] * 20) as inbox:
        base = await start(SERVICE)
        waits = Waits()
        async with sending(app_of(start), webhook(inbox.url), sleep=waits):
            await push(base, session, "a")
            await inbox.first(21)
        for number, wait_s in enumerate(waits.seconds, 1):
            assert min(2**number, 3600) / 2 <= wait_s <= min(2**number, 3600)
        assert len(set(waits.seconds)) == 20
        async with sending(app_of(start), webhook(inbox.url), sleep=waits):
            inbox.answers.append(respond(500))
            await push(base, session, "b")
            await inbox.first(23)
        assert 1 <= waits.seconds[20] <= 2


@pytest.mark.parametrize(
    ("asked", "wait_s"),
    [
        ("7", 7),
        ("0", 1),
        ("99999999999999999999", 3600),
        ("Tue, 14 Nov 2023 22:13:50 GMT", 30),
        ("Tue, 14 Nov 2022 22:13:50 GMT", 1),
    ],
)
async def test_retry_after_is_honoured_up_to_an_hour(
    start: Start, session: aiohttp.ClientSession, asked: str, wait_s: float
) -> None:
    async with receiving(respond(429, Retry_After=asked), verifies=False) as inbox:
        base = await start(SERVICE, now_ms=FakeClock(1_700_000_000_000))
        waits = Waits()
        async with sending(app_of(start), webhook(inbox.url), sleep=waits):
            await push(base, session, "a")
            await inbox.first(2)
        assert waits.seconds == [wait_s]


@pytest.mark.parametrize("asked", ["soon", f"Mon, 01 Jan {'9' * 30} 00:00:00 GMT"])
async def test_unreadable_retry_after_is_ignored(
    start: Start, session: aiohttp.ClientSession, asked: str
) -> None:
    async with receiving(respond(503, Retry_After=asked)) as inbox:
        base = await start(SERVICE)
        waits = Waits()
        async with sending(app_of(start), webhook(inbox.url), sleep=waits):
            await push(base, session, "a")
            await inbox.first(2)
        assert 1 <= waits.seconds[0] <= 2


async def test_receiver_that_is_gone_is_left_alone_until_a_reload(
    start: Start, session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    async with receiving(respond(410)) as inbox, receiving() as other:
        base = await start(SERVICE)
        waits = Waits()
        hooks = webhook(inbox.url), webhook(other.url, name="other")
        async with sending(app_of(start), *hooks, sleep=waits) as sender:
            await push(base, session, "a")
            await other.first(1)
            await inbox.first(1)
            await push(base, session, "b")
            await other.first(2)
            assert (inbox.keys, waits.seconds) == (["a"], [])
            await sender.update(with_webhooks(app_of(start), *hooks))
            await inbox.first(3)
        assert inbox.keys == ["a", "a", "b"]
        assert "webhook search ends until a reload or restart: 410" in caplog.text


async def test_update_adds_changes_and_removes_webhooks(start: Start, session: aiohttp.ClientSession) -> None:
    async with receiving() as one, receiving() as two:
        base = await start(SERVICE)
        app = app_of(start)
        first, second = webhook(one.url, name="first"), webhook(two.url, name="second")
        async with sending(app, first) as sender:
            await push(base, session, "a")
            await one.first(1)
            await sender.update(with_webhooks(app, first, second))
            await push(base, session, "b")
            await two.first(1)
            await one.first(2)
            await sender.update(with_webhooks(app, second))
            await push(base, session, "c")
            await two.first(2)
            await sender.update(with_webhooks(app))
            await push(base, session, "d")
            await sender.update(with_webhooks(app, webhook(one.url, name="second")))
            await one.first(3)
        assert (one.keys, two.keys) == (["a", "b", "d"], ["b", "c"])


async def test_receiver_is_told_first_that_it_has_missed_changes(
    start: Start, session: aiohttp.ClientSession
) -> None:
    members = {**SERVICE, "changes": {"maxCount": 10}}
    async with receiving(respond(500), respond(500)) as inbox:
        base = await start(members)
        app = app_of(start)
        waits = Waits()
        waits.is_over.clear()
        async with sending(app, webhook(inbox.url), sleep=waits):
            await push(base, session, "a")
            await waits.first(1)
            await push(base, session, *[f"n{number}" for number in range(300)])
            newest = await app.engine.outbox.log.last_id()
            waits.is_over.set()
            first, reset, repeated = await inbox.first(3)
            await push(base, session, "z")
            last = (await inbox.first(4))[-1]
        assert first.keys == ["a"]
        assert reset[:2] == repeated[:2] == (newest, {"type": "reset"})
        assert last.keys == ["z"]


@pytest.mark.parametrize(("erased", "expected"), [("notes/b", "reset"), ("other/b", "changes")])
@pytest.mark.usefixtures("hasty_erasures")
async def test_erased_changes_are_not_sent_and_those_of_other_collections_no_gap(
    start: Start, session: aiohttp.ClientSession, erased: str, expected: str
) -> None:
    async with receiving(respond(500)) as inbox:
        base = await start(SERVICE)
        waits = Waits()
        waits.is_over.clear()
        async with sending(app_of(start), webhook(inbox.url), sleep=waits):
            await push(base, session, "a")
            await waits.first(1)
            assert (await Browser(base, session).push(erased, {})).status == 200
            await app_of(start).eraser.run(EraseRequest("key", erased))
            waits.is_over.set()
            await push(base, session, "c")
            _, again, last = await inbox.first(3)
        assert (again.body["type"], last.keys) == (expected, ["c"])
        assert not any(b'"b"' in delivery.raw for delivery in inbox.deliveries)


async def test_redis_that_lost_the_changes_is_a_reset(
    start: Start, session: aiohttp.ClientSession, redis: RedisServer
) -> None:
    coordinator = await RedisCoordinator.connect(redis.url)
    async with receiving() as inbox:
        base = await start(SERVICE, coordinator=coordinator)
        async with sending(app_of(start), webhook(inbox.url)):
            await push(base, session, "a")
            await inbox.first(1)
        await push(base, session, "b")
        await flush(redis)
        async with sending(app_of(start), webhook(inbox.url)):
            await inbox.first(2)
            while (await Browser(base, session).push("notes/c", {})).status == 503:
                pass
            await inbox.first(3)
        first, reset, last = inbox.deliveries
        assert (first.keys, reset.body, last.keys) == (["a"], {"type": "reset"}, ["c"])
        assert first.id < reset.id < last.id


async def test_damaged_position_is_a_reset(start: Start, session: aiohttp.ClientSession) -> None:
    async with receiving() as inbox:
        base = await start(SERVICE)
        app = app_of(start)
        async with sending(app, webhook(inbox.url)):
            await push(base, session, "a")
            await inbox.first(1)
        async for listed in app.store.walk("_pysync/webhooks"):
            await app.store.put(listed.key, b"{")
        async with sending(app, webhook(inbox.url)):
            await push(base, session, "b")
            await inbox.first(3)
        assert [one.body["type"] for one in inbox.deliveries] == ["changes", "reset", "changes"]


class WatchedCoordinator(MemoryCoordinator):
    """One that counts how often its change log is read. `followed` waits until a reader has all changes."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.reads = 0
        self._waiting = asyncio.Condition()
        self._waits_after = ""

    async def read(self, after: str, limit: int) -> Any:
        self.reads += 1
        return await super().read(after, limit)

    async def wait_for_change(self, after: str) -> None:
        self.reads += 1
        async with self._waiting:
            self._waits_after = after
            self._waiting.notify_all()
        await super().wait_for_change(after)

    async def followed(self) -> None:
        newest = await self.last_id()
        async with self._waiting:
            await self._waiting.wait_for(lambda: self._waits_after >= newest)


async def test_receiver_that_is_away_for_an_hour_costs_no_push_anything(
    start: Start, session: aiohttp.ClientSession
) -> None:
    clock = FakeClock()
    store, coordinator = MemoryStore(clock), WatchedCoordinator(clock)
    base = await start(SERVICE, store=store, coordinator=coordinator, now_ms=clock)
    ends_ms = clock() + 3_600_000
    reads_while_pushed = 0
    pushed: list[str] = []

    async def sleep(seconds: float) -> None:
        """An interval of the hour, in which documents are written."""
        nonlocal reads_while_pushed
        before = coordinator.reads
        clock.now_ms += round(seconds * 1000)
        names = [f"n{len(pushed) + number}" for number in range(20)]
        pushed.extend(names)
        await push(base, session, *names)
        reads_while_pushed += coordinator.reads - before

    async def away(request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        if clock() < ends_ms:
            inbox.answers.append(away)
            return await drop(request)
        return await accept(request)

    async with (
        receiving(away, verifies=False) as inbox,
        sending(app_of(start), webhook(inbox.url), sleep=sleep),
    ):
        await push(base, session, "first")
        await inbox.until(lambda: len(pushed) > 0 and inbox.keys[-1:] == pushed[-1:])
    assert clock() >= ends_ms
    assert reads_while_pushed == 0
    attempts = [one for one in inbox.deliveries if one.keys == ["first"]]
    assert len({one.id for one in attempts}) == 1
    assert inbox.keys[len(attempts) :] == pushed


async def test_webhook_of_a_quiet_collection_continues_though_the_log_has_forgotten_much(
    start: Start, session: aiohttp.ClientSession, clock: FakeClock
) -> None:
    coordinator = WatchedCoordinator(clock)
    members = {**SERVICE, "changes": {"maxCount": 200}}
    async with receiving(verifies=False) as inbox:
        base = await start(members, coordinator=coordinator, now_ms=clock)
        for number in range(10):
            async with sending(app_of(start), webhook(inbox.url)):
                for name in range(60):
                    await Browser(base, session).push(f"other/{number}-{name}", {})
                await coordinator.followed()
        async with sending(app_of(start), webhook(inbox.url)):
            await push(base, session, "a")
            await inbox.first(1)
        assert inbox.keys == ["a"]


async def test_deliveries_and_failures_are_counted_by_name(
    start: Start, session: aiohttp.ClientSession
) -> None:
    async with receiving(respond(500), respond(500)) as inbox:
        base = await start(SERVICE)
        async with sending(app_of(start), webhook(inbox.url), sleep=Waits()):
            await push(base, session, "a")
            await inbox.first(3)
            await push(base, session, "b")
            await inbox.first(4)
        # Requests in progress have ended.
        metrics = (await Browser(base, session).request("GET", "/metrics")).body.decode()
        assert 'pysync_webhook_deliveries_total{webhook="search"} 2.0' in metrics
        assert 'pysync_webhook_failures_total{webhook="search"} 2.0' in metrics


async def test_lag_is_the_age_of_the_oldest_change_that_is_not_accepted(
    start: Start, session: aiohttp.ClientSession, clock: FakeClock
) -> None:
    lags: list[tuple[str, float, str]] = []
    async with receiving(*[respond(500)] * 3, verifies=False) as inbox:
        base = await start(SERVICE, now_ms=clock)

        async def sleep(seconds: float) -> None:
            clock.now_ms += 100_000
            await push(base, session, f"later{clock()}")

        hook = webhook(inbox.url)
        async with sending(app_of(start), hook, sleep=sleep, set_gauge=lambda *set_: lags.append(set_)):
            await push(base, session, "a")
            await inbox.until(lambda: len(inbox.changes) == 7)
    metric = "pysync_webhook_lag_seconds"
    assert list(dict.fromkeys(lags)) == [(metric, lag_s, "search") for lag_s in (0, 100, 200, 300)]
    assert lags[-1] == (metric, 0, "search")


async def test_lag_of_each_webhook_is_a_metric(start: Start, session: aiohttp.ClientSession) -> None:
    async with receiving() as inbox:
        base = await start(SERVICE | {"webhooks": [webhook(inbox.url)]})
        await push(base, session, "a")
        await inbox.first(1)
        metrics = (await Browser(base, session).request("GET", "/metrics")).body.decode()
        assert 'pysync_webhook_lag_seconds{webhook="search"}' in metrics


class Leases:
    """The leases of one of several processes, which share `holders`. `refused` waits until it asked in vain
    this often."""

    def __init__(self, holders: dict[str, "Leases"]) -> None:
        self.holders = holders
        self._refused = 0
        self._changed = asyncio.Condition()

    async def acquire_lease(self, name: str) -> bool:
        holds = self.holders.setdefault(name, self) is self
        async with self._changed:
            self._refused += not holds
            self._changed.notify_all()
        return holds

    async def refused(self, times: int) -> None:
        async with self._changed:
            until = self._refused + times
            await self._changed.wait_for(lambda: self._refused >= until)


@pytest.mark.slow
async def test_process_that_loses_the_lease_stops_and_another_repeats_its_batch(
    start: Start, session: aiohttp.ClientSession
) -> None:
    async with receiving(respond(500)) as inbox:
        base = await start(SERVICE)
        holders: dict[str, Leases] = {}
        one, other = Leases(holders), Leases(holders)
        waits = Waits()
        waits.is_over.clear()
        hook = webhook(inbox.url)
        async with (
            sending(app_of(start), hook, sleep=waits, coordinator=one),
            sending(app_of(start), hook, coordinator=other),
        ):
            await push(base, session, "a")
            await waits.first(1)
            await push(base, session, "b")
            await other.refused(2)
            holders.update(dict.fromkeys(holders, other))
            await inbox.first(3)
            waits.is_over.set()
            await one.refused(2)
        assert inbox.keys == ["a", "a", "b"]
        assert inbox.deliveries[0].raw == inbox.deliveries[1].raw


@pytest.mark.slow
async def test_no_other_process_tries_a_receiver_that_is_gone(
    start: Start, session: aiohttp.ClientSession
) -> None:
    async with receiving(respond(410)) as inbox:
        base = await start(SERVICE)
        holders: dict[str, Leases] = {}
        one, other = Leases(holders), Leases(holders)
        hook = webhook(inbox.url)
        async with (
            sending(app_of(start), hook, coordinator=one),
            sending(app_of(start), hook, coordinator=other),
        ):
            await push(base, session, "a")
            await inbox.first(1)
            await other.refused(3)
        assert len(inbox.deliveries) == 1


async def test_process_that_was_suspended_does_not_move_the_position_back(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = MemoryStore()
    async with receiving() as inbox:
        base = await start(SERVICE, store=store)
        hook = webhook(inbox.url)
        async with sending(app_of(start), hook):
            await push(base, session, "a")
            await inbox.first(1)
        suspended, resumes = FaultyStore(store), asyncio.Event()
        saving = suspended.delay("put", resumes, after=1)
        async with sending(app_of(start), hook, store=suspended):
            await push(base, session, "b")
            await saving.wait()
            async with sending(app_of(start), hook):
                await push(base, session, "c")
                await inbox.until(lambda: inbox.keys[-1] == "c")
            resumes.set()
        sent = len(inbox.deliveries)
        async with sending(app_of(start), hook):
            await push(base, session, "d")
            await inbox.first(sent + 1)
        assert inbox.keys[-1] == "d"
        assert len(inbox.deliveries) == sent + 1


async def test_update_does_not_wait_for_a_store_that_hangs(
    start: Start, session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers that wait with their parent for it would be taken for stalled."""
    async with receiving() as inbox:
        base = await start(SERVICE)
        hooks = [webhook(inbox.url), webhook(inbox.url, name="other")]
        async with sending(app_of(start), *hooks):
            await push(base, session, "a")
            await inbox.first(2)
        hanging = FaultyStore(app_of(start).store)
        for _ in hooks:
            hanging.delay("get", asyncio.Event())
        async with sending(app_of(start), *hooks, store=hanging, timeout_s=0.5):
            await push(base, session, "b")
            await inbox.first(4)
        assert inbox.keys == ["a", "a", "b", "b"]
        assert "webhook search begins later: the store does not answer" in caplog.text


async def test_close_does_not_wait_for_a_store_that_hangs(
    start: Start, session: aiohttp.ClientSession
) -> None:
    """A reload closes webhooks, and workers that wait would be taken for stalled."""
    async with receiving() as inbox:
        base = await start(SERVICE)
        hook = webhook(inbox.url)
        async with sending(app_of(start), hook):
            await push(base, session, "a")
            await inbox.first(1)
        hanging, never = FaultyStore(app_of(start).store), asyncio.Event()
        saving = hanging.delay("put", never, after=1)
        hanging.delay("put", never)
        async with sending(app_of(start), hook, store=hanging):
            await push(base, session, "b")
            await saving.wait()
        async with sending(app_of(start), hook):
            await inbox.until(lambda: inbox.keys == ["a", "b", "b"])


async def test_slow_receiver_is_sent_one_request_at_a_time(
    start: Start, session: aiohttp.ClientSession
) -> None:
    may_answer = asyncio.Event()

    async def slow(request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        await may_answer.wait()
        return await accept(request)

    async with receiving(slow) as inbox:
        base = await start(SERVICE | {"webhooks": [webhook(inbox.url)]})
        await push(base, session, "a")
        await inbox.first(1)
        names = [f"n{number}" for number in range(150)]
        await push(base, session, *names)
        assert inbox.keys == ["a"]
        may_answer.set()
        await inbox.first(3)
        assert [one.keys for one in inbox.deliveries] == [["a"], *in_batches(names)]


async def test_reload_changes_webhooks_and_tries_those_that_were_gone(
    start: Start, session: aiohttp.ClientSession
) -> None:
    async with receiving(respond(410)) as first, receiving() as second:
        gone = webhook(first.url)
        base = await start(SERVICE | {"webhooks": [gone]})
        await push(base, session, "a")
        await first.first(1)
        members = SERVICE | {"webhooks": [gone, webhook(second.url, name="new")]}
        app = app_of(start)
        await app.apply(app.prepare(parse({"version": 1, "store": "memory:", **patient(members)})))
        await push(base, session, "b")
        await first.first(3)
        await second.first(1)
        assert (first.keys, second.keys) == (["a", "a", "b"], ["b"])
