"""Projections follow the change log: as a plugin of a running service, with a checkpoint, in any number of
processes."""

import asyncio
import json
import random
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clients import Browser, Start
from support.collections import PUBLIC
from support.depth import depth
from support.faulty_store import FaultyStore
from support.projection_follower import following, lists, until
from support.projection_site import NOTES, TITLES, Site, entry, members, titled

from pysync.changelog import Retention
from pysync.clock import wall_clock_ms
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.changes import parse_change
from pysync.errors import CoordinatorUnavailable
from pysync.plugins.projection import Projection
from pysync.server.process.metrics import Counters
from pysync.store import StoredObject
from pysync.store.memory import MemoryStore


async def checkpoint(site: Site) -> str:
    async for listed in site.store.walk("_pysync/projections"):
        found = await site.store.get(listed.key)
        assert isinstance(found, StoredObject)
        return str(json.loads(found.body)["after"])
    return ""


async def test_a_running_service_keeps_its_lists(start: Start, session: aiohttp.ClientSession) -> None:
    base = await start(members(TITLES))
    (app,) = start.apps  # type: ignore[attr-defined]
    browser = Browser(base, session)
    for id_ in ("a", "b"):
        assert (await browser.push(f"notes/s/{id_}", {"title": id_})).status == 200
    expected = [entry("a", title="a"), entry("b", title="b")]
    log = app.engine.outbox.log
    while True:
        newest = await log.last_id()
        pulled = await browser.pull("lists/s")
        if pulled.json["data"].get("items") == expected:
            break
        await log.wait_for_change(newest)
    assert pulled.headers["ETag"] == f'"{pulled.json["hash"]}"'
    assert (await browser.request("GET", "/list/lists")).json["items"] == ["s"]
    assert (await browser.push("lists/s", {"items": []})).status in (404, 405)
    assert b'pysync_projection_puts_total{projection="lists/{space}"}' in (
        (await browser.request("GET", "/metrics")).body
    )


async def test_a_projection_is_a_plugin(start: Start, session: aiohttp.ClientSession) -> None:
    mine = Projection("notes", "lists/{space}", titled)
    base = await start(members(), plugins=[mine])
    (app,) = start.apps  # type: ignore[attr-defined]
    browser = Browser(base, session)
    await browser.push("notes/s/a", {"title": "A"})
    log = app.engine.outbox.log
    while (await browser.pull("lists/s")).json["data"] != {"items": [entry("a", title="A")]}:
        await log.wait_for_change(await log.last_id())


async def test_writes_while_nobody_followed_are_folded_later() -> None:
    site = Site(members(TITLES))
    await site.note("a", title="A")
    async with following(site):
        await lists(site, [entry("a", title="A")])
    await site.note("b", title="B")
    assert await site.items() == [entry("a", title="A")]
    async with following(site):
        await lists(site, [entry("a", title="A"), entry("b", title="B")])


async def test_leaving_in_good_order_saves_how_far_it_came() -> None:
    site = Site(members(TITLES))
    async with following(site):
        for n in range(3):
            await site.note("a", title=n)
            await lists(site, [entry("a", title=n)])
    found = await site.log.read(await checkpoint(site), 10)
    assert found is not None
    assert [json.loads(change.text)["collection"] for _, change in found] in ([], ["lists"])


async def test_an_empty_log_has_a_checkpoint_too() -> None:
    site = Site(members(TITLES))
    async with following(site):
        while not await checkpoint(site):
            await asyncio.sleep(0)
    assert await site.log.read(await checkpoint(site), 10) == []


async def test_one_that_dies_before_its_checkpoint_leaves_nothing_undone() -> None:
    memory, coordinator = MemoryStore(), MemoryCoordinator()
    store = FaultyStore(memory)
    dying = Site(members(TITLES), store=store, coordinator=coordinator)
    for at in range(20):
        await dying.note(f"n{at}", space=f"s{at % 4}", title=f"T{at}")
    store.crash(2, done=True)
    async with following(dying):
        await until(dying, lambda: _is_down(store))
    survivor = Site(members(TITLES), store=memory, coordinator=coordinator)
    async with following(survivor):
        for space in range(4):
            wanted = [entry(f"n{at}", title=f"T{at}") for at in range(space, 20, 4)]
            await lists(survivor, wanted, f"lists/s{space}")


async def _is_down(store: FaultyStore) -> bool:
    return store.has_crashed


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["get", "put"])
async def test_a_store_that_is_away_for_a_while_costs_nothing(verb: Any) -> None:
    memory, coordinator = MemoryStore(), MemoryCoordinator()
    store = FaultyStore(memory)
    site = Site(members(TITLES), store=store, coordinator=coordinator)
    other = Site(members(TITLES), store=memory, coordinator=coordinator)
    await other.note("a", title="A")
    store.fail(verb, times=3)
    async with following(site):
        await lists(other, [entry("a", title="A")])


class Away(MemoryCoordinator):
    """Out of reach for what followers ask, the first few times."""

    left = 3

    async def acquire_lease(self, name: str) -> bool:
        self._fail()
        return await super().acquire_lease(name)

    async def read(self, after: str, limit: int) -> Any:
        self._fail()
        return await super().read(after, limit)

    def _fail(self) -> None:
        if self.left:
            self.left -= 1
            raise CoordinatorUnavailable


@pytest.mark.slow
async def test_a_coordinator_that_is_away_for_a_while_costs_nothing() -> None:
    site = Site(members(TITLES), coordinator=Away())
    await site.note("a", title="A")
    async with following(site):
        await lists(site, [entry("a", title="A")])


class Elected(MemoryCoordinator):
    """`leader` is who leads, and everybody is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.requested = asyncio.Event()
        self.is_leader = True

    async def acquire_lease(self, name: str) -> bool:
        self.requested.set()
        return self.is_leader


async def test_follower_without_the_lease_writes_nothing() -> None:
    coordinator = Elected()
    coordinator.is_leader = False
    store = FaultyStore(MemoryStore())
    site = Site(members(TITLES), store=store, coordinator=coordinator)
    await site.note("a", title="A")
    puts = store.calls["put"]
    async with following(site):
        await coordinator.requested.wait()
    assert store.calls["put"] == puts


@pytest.mark.slow
async def test_former_leader_finishes_announced_changes_and_stops() -> None:
    coordinator = Elected()
    site = Site(members(TITLES), coordinator=coordinator)
    async with following(site):
        await site.note("a", title="A")
        await lists(site, [entry("a", title="A")])
        coordinator.is_leader = False
        coordinator.requested.clear()
        await coordinator.requested.wait()  # it is told so, and then only looks for what came before
        coordinator.requested.clear()
        await coordinator.requested.wait()
        announced_count = len(await site.announced())
        await site.note("b", title="B")
        coordinator.requested.clear()
        await coordinator.requested.wait()
        assert len(await site.announced()) == announced_count
        coordinator.is_leader = True
        await lists(site, [entry("a", title="A"), entry("b", title="B")])


async def test_gap_in_the_change_log_rebuilds_the_lists(
    caplog: pytest.LogCaptureFixture,
) -> None:
    coordinator = MemoryCoordinator(retention=Retention(count=5))
    site = Site(members(TITLES), coordinator=coordinator)
    await site.note("a", title="A")
    await site.note("gone", title="G")
    async with following(site):
        await lists(site, [entry("a", title="A"), entry("gone", title="G")])
    for at in range(10):
        await site.note(f"n{at}", title=f"T{at}")
    await site.store.delete("notes/s/gone")
    async with following(site):
        await lists(site, [entry("a", title="A"), *(entry(f"n{at}", title=f"T{at}") for at in range(10))])
    assert "does not reach back" in caplog.text


async def test_a_checkpoint_that_cannot_be_read_makes_all_lists_anew() -> None:
    site = Site(members(TITLES))
    async with following(site):
        await site.note("a", title="A")
        await lists(site, [entry("a", title="A")])
    async for listed in site.store.walk("_pysync/projections"):
        await site.store.put(listed.key, b"torn")
    await site.store.delete("lists/s")
    async with following(site):
        await lists(site, [entry("a", title="A")])


async def test_a_thousand_writes_cost_far_fewer_writes_of_the_list(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = FaultyStore(MemoryStore())
    base = await start(members(TITLES), store=store)
    (app,) = start.apps  # type: ignore[attr-defined]
    browser = Browser(base, session)
    pushes = iter(range(1000))

    async def push_on() -> None:
        for at in pushes:
            assert (await browser.push(f"notes/s/n{at}", {"title": f"T{at}"})).status == 200

    async with asyncio.TaskGroup() as tasks:
        for _ in range(32):
            tasks.create_task(push_on())
    log = app.engine.outbox.log
    while True:
        newest = await log.last_id()
        if len((await browser.pull("lists/s")).json["data"].get("items", ())) == 1000:
            break
        await log.wait_for_change(newest)
    found = await log.read("", 100_000)
    assert sum(json.loads(change.text)["collection"] == "lists" for _, change in found) < 250


@pytest.mark.slow
@given(seed=st.integers(0, 2**32))
@settings(max_examples=depth(37, 600))
def test_the_last_put_has_the_newest_state_in_any_order_of_folds(seed: int) -> None:
    dice = random.Random(seed)
    schedule = [dice.choice([0, 1, 2, 40]) for _ in range(60)]
    asyncio.run(_fold_in_any_order([dice.choice("ab") for _ in range(6)], schedule))


async def _fold_in_any_order(writes: list[str], schedule: list[int]) -> None:
    """Each change is folded once, by one process of two, all at once, as the schedule delays their calls."""
    store, coordinator = Scheduled(schedule), MemoryCoordinator()
    settings_ = members(TITLES | {"maxRetries": 100})
    writer, one, other = (Site(settings_, store=store, coordinator=coordinator) for _ in range(3))
    async with asyncio.TaskGroup() as tasks:
        after = ""
        for n, id_ in enumerate(writes):
            await writer.note(id_, title=n)
            found = await writer.log.read(after, 100)
            assert found is not None
            after = found[-1][0]
            announced = [parse_change(change) for _, change in found]
            tasks.create_task((one, other)[n % 2].lists.fold(announced))
    items = await one.items() or []
    newest = {id_: n for n, id_ in enumerate(writes)}
    assert {item["id"]: item["value"]["title"] for item in items} == newest
    assert one.count("drops") == other.count("drops") == 0


class Scheduled(MemoryStore):
    """Waits some turns of the loop before each call."""

    is_remote = True

    def __init__(self, schedule: list[int]) -> None:
        super().__init__(wall_clock_ms)
        self._ticks = iter(schedule)

    async def get(self, *arguments: Any) -> Any:
        await self._wait()
        return await super().get(*arguments)

    async def put(self, *arguments: Any, **options: Any) -> Any:
        await self._wait()
        return await super().put(*arguments, **options)

    async def _wait(self) -> None:
        for _ in range(next(self._ticks, 1)):
            await asyncio.sleep(0)


async def test_a_chain_of_projections_comes_to_rest() -> None:
    index = {"name": "index", "storagePath": "index", **PUBLIC}
    lists_ = members()["collections"][2]
    counted = {
        "name": "counted",
        "source": "lists",
        "target": "index",
        "id": "{space}",
        "value": {"all": "/items"},
    }
    site = Site(members(TITLES, counted, collections=[NOTES, lists_, index]))
    async with following(site):
        await site.note("a", title="A")
        await site.note("b", space="t", title="B")
        wanted = [entry("s", all=[entry("a", title="A")]), entry("t", all=[entry("b", title="B")])]
        await lists(site, wanted, "index")


async def test_metrics_say_how_old_the_writes_are_that_are_folded() -> None:
    site, counters, seen = Site(members(TITLES)), Counters(), list[float]()

    def set_gauge(metric: str, lag_s: float, name: str) -> None:
        counters.set_gauge(metric, lag_s, name)
        seen.append(counters.gauge("pysync_projection_lag_seconds"))

    await site.push("notes", {"space": "s", "id": "a"}, {"title": "A"})
    late_ms = site.services.now_ms() + 90_500
    site.services = replace(site.services, set_gauge=set_gauge, now_ms=lambda: late_ms)
    async with following(site):
        await lists(site, [entry("a", title="A")])
        while seen[-1]:
            await asyncio.sleep(0)
    assert 90 in seen
    assert seen[-1] == 0
