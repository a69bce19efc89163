"""The order of batches, for who lists while they come; attempts at one push, wherever they are made."""

import asyncio
import io
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow.parquet as pq
import pytest
from support.clients import Browser, Start
from support.collections import PUBLIC
from support.event_batches import SERVICE, listed, pushed
from support.faulty_store import FaultyStore
from support.loop_time import loop_time

from pysync.config import parse
from pysync.coordinator import Coordinator
from pysync.coordinator.local import LocalCoordinator
from pysync.coordinator.memory import MemoryCoordinator
from pysync.errors import InvalidEvents, Unavailable
from pysync.plugins import HOOK_TIMEOUT_S
from pysync.plugins.events import Events
from pysync.plugins.events.plugin import INGEST_TIMEOUT_S, Encoder
from pysync.server.app import create_app
from pysync.server.process.serve import serve_on
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

ONCE = {"Idempotency-Key": "once"}


class Folder:
    """Workers on one folder, in this process, and a clock each."""

    def __init__(
        self, start: Start, session: aiohttp.ClientSession, path: Path, stack: AsyncExitStack
    ) -> None:
        self._start = start
        self._session = session
        self._path = path
        self._stack = stack

    async def worker(self, clock: FakeClock) -> Browser:
        store = await LocalStore.open_folder(self._path, clock)
        coordinator: Coordinator = await LocalCoordinator.open_folder(self._path, clock)
        self._stack.push_async_callback(store.close)
        self._stack.push_async_callback(coordinator.close)
        base = await self._start(SERVICE, store, coordinator=coordinator, now_ms=clock)
        return Browser(base, self._session)


@pytest.fixture
async def folder(start: Start, session: aiohttp.ClientSession, tmp_path: Path) -> Any:
    async with AsyncExitStack() as stack:
        yield Folder(start, session, tmp_path, stack)


@pytest.mark.slow
async def test_listing_during_two_writes_misses_nothing(folder: Folder) -> None:
    early, late = FakeClock(1_700_000_000_000), FakeClock(1_700_000_000_777)
    workers = [await folder.worker(early), await folder.worker(late)]
    stored: list[str] = []

    async def store(client: int) -> None:
        for n in range(25):
            size = 1 if n % 5 else 4_000  # those are long in the making
            answer = await pushed(workers[client % 2], *[{"event": f"{client} {n}"}] * size)
            stored.append(answer["batchId"])
            early.now_ms += 3 if n % 7 else -40
            late.now_ms += 2

    storing = asyncio.gather(*(store(client) for client in range(8)))
    known: list[str] = []
    while True:
        ended = storing.done()
        page = await listed(workers[len(known) % 2], after=known[-1] if known else "", limit=7)
        known += page
        if ended and not page:
            break
    await storing
    assert len(stored) == 200
    assert known == sorted(stored)


async def test_each_client_sees_the_ids_of_its_pushes_increase(folder: Folder) -> None:
    clock = FakeClock()
    workers = [await folder.worker(clock), await folder.worker(clock)]
    ids = []
    for n in range(30):
        clock.now_ms += 1 - n % 3
        ids.append((await pushed(workers[n % 2], {"event": "a"}))["batchId"])
    assert ids == sorted(set(ids))


async def test_attempts_at_one_push_in_two_workers_are_one(folder: Folder) -> None:
    clock = FakeClock()
    workers = [await folder.worker(clock), await folder.worker(clock)]
    attempts = (pushed(workers[n % 2], {"event": "a"}, **ONCE) for n in range(12))
    answers = await asyncio.gather(*attempts)
    assert all(answer == answers[0] for answer in answers)
    # And later, after others, when the clock was set back, or in a worker that has just begun.
    await asyncio.gather(*(pushed(workers[n % 2], {"event": "b"}) for n in range(20)))
    clock.now_ms -= 30_000
    assert await pushed(workers[1], {"event": "a"}, **ONCE) == answers[0]
    assert await pushed(await folder.worker(clock), {"event": "a"}, **ONCE) == answers[0]
    assert len(await listed(workers[0])) == 21


async def test_lists_end_before_unfinished_batches_with_reserved_ids(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store, release = FaultyStore(MemoryStore()), asyncio.Event()
    browser = Browser(await start(SERVICE, store), session)
    first = await pushed(browser, {"event": "a"})
    arrived = store.delay("write", release)
    slow = asyncio.ensure_future(pushed(browser, {"event": "b"}))
    await arrived.wait()
    quick = await pushed(browser, {"event": "c"})
    assert await listed(browser) == [first["batchId"]]
    release.set()
    ids = [first["batchId"], (await slow)["batchId"], quick["batchId"]]
    assert await listed(browser) == ids == sorted(ids)


@pytest.mark.parametrize("done", [False, True])
async def test_an_attempt_that_was_lost_is_decided_by_its_file(
    start: Start, session: aiohttp.ClientSession, clock: FakeClock, done: bool
) -> None:
    shared, coordinator = MemoryStore(clock), MemoryCoordinator(clock)
    dying = FaultyStore(shared)
    lost = Browser(await start(SERVICE, dying, coordinator=coordinator, now_ms=clock), session)
    other = Browser(await start(SERVICE, shared, coordinator=coordinator, now_ms=clock), session)
    dying.crash(0, done=done)
    answer = await lost.push("events/web/new", {"events": [{"event": "a"}]}, headers=ONCE)
    assert answer.status == 503
    ids = await listed(other)
    assert len(ids) == done
    if not done:
        answer = await other.push("events/web/new", {"events": [{"event": "a"}]}, headers=ONCE)
        assert answer.status == 503, "it may still be under way"
    clock.now_ms += 30_000
    for _ in range(2):
        answer = await other.push("events/web/new", {"events": [{"event": "a"}]}, headers=ONCE)
        if done:
            assert (answer.status, answer.json["batchId"]) == (200, ids[0])
        else:
            assert (answer.status, answer.json["code"]) == (409, "outcome_unknown")
    assert await listed(other) == ids


@pytest.mark.parametrize("hook_s", [HOOK_TIMEOUT_S, 0])
async def test_a_batch_that_takes_long_is_stored_and_found_by_the_push_repeated(
    start: Start, session: aiohttp.ClientSession, hook_s: float
) -> None:
    """Also if the event loop was busy while both its limit and that of the hook passed."""
    store, coordinator, release = FaultyStore(MemoryStore()), MemoryCoordinator(), asyncio.Event()
    base = {"collections": SERVICE["collections"]}
    hasty = Events("events", "lake/{app}/{batchId}", timeout_s=0)
    patient = Events("events", "lake/{app}/{batchId}")
    one, other = [
        Browser(await start(base, store, coordinator=coordinator, plugins=[plugin], hook_s=limit_s), session)
        for plugin, limit_s in ((hasty, hook_s), (patient, HOOK_TIMEOUT_S))
    ]
    arrived = store.delay("write", release)
    answer = await one.push("events/web/new", {"events": [{"event": "a"}]}, headers=ONCE)
    assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
    await arrived.wait()
    repeated = asyncio.ensure_future(pushed(other, {"event": "a"}, **ONCE))
    release.set()
    assert await listed(other) == [(await repeated)["batchId"]]


async def test_nothing_comes_of_a_batch_once_it_is_given_up(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store, release = FaultyStore(MemoryStore()), asyncio.Event()
    browser = Browser(await start(SERVICE, store), session)
    arrived = store.delay("write", release)
    with loop_time() as time:
        pushing = asyncio.ensure_future(browser.push("events/web/new", {"events": [{"event": "a"}]}))
        await arrived.wait()
        time.now_s += INGEST_TIMEOUT_S
        rejection = await pushing
    assert rejection.status == 503
    release.set()
    assert await listed(browser) == []


async def test_more_batches_than_may_be_stored_at_once_are_rejected(
    start: Start, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pysync.plugins.events.plugin.MAX_IN_FLIGHT", 1)
    store, release = FaultyStore(MemoryStore()), asyncio.Event()
    browser = Browser(await start(SERVICE, store), session)
    arrived = store.delay("write", release)
    first = asyncio.ensure_future(pushed(browser, {"event": "a"}))
    await arrived.wait()
    rejected = await browser.push("events/web/new", {"events": [{"event": "b"}]})
    assert (rejected.status, rejected.headers["Retry-After"]) == (503, "1")
    release.set()
    assert await listed(browser) == [(await first)["batchId"]]


async def test_a_service_that_stops_stores_the_batches_that_are_on_their_way(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    store, release = FaultyStore(await LocalStore.open_folder(tmp_path)), asyncio.Event()
    hasty = Events("events", "lake/{app}/{batchId}", timeout_s=0)
    settings = parse({"version": 1, "store": "memory:", "collections": SERVICE["collections"]})
    async with await create_app(settings, store, plugins=[hasty]) as app, serve_on(app) as port:
        arrived = store.delay("write", release)
        browser = Browser(f"http://127.0.0.1:{port}", session)
        assert (await browser.push("events/web/new", {"events": [{"event": "a"}]})).status == 503
        await arrived.wait()
        asyncio.get_running_loop().call_soon(release.set)
    assert len(list((tmp_path / "files/lake/web").glob("*.parquet"))) == 1


async def test_pushes_to_other_collections_are_stored_as_documents(
    start: Start, session: aiohttp.ClientSession
) -> None:
    notes = {"name": "notes", "storagePath": "notes/{id}", **PUBLIC}
    members = {**SERVICE, "collections": [*SERVICE["collections"], notes]}
    browser = Browser(await start(members), session)
    assert (await browser.push("notes/a", {"events": []})).status == 200
    assert (await browser.pull("notes/a")).json["data"] == {"events": []}


async def test_the_event_loop_goes_on_while_a_long_batch_is_encoded() -> None:
    encoder, ticks = Encoder(), 0
    events = b",".join(b'{"event":"e%d","properties":{"n":%d}}' % (n, n) for n in range(100_000))
    encoding = asyncio.ensure_future(encoder.encode(b'{"events":[%b]}' % events, "now"))
    while not encoding.done():
        await asyncio.sleep(0)
        ticks += 1
    assert pq.read_metadata(io.BytesIO(await encoding)).num_rows == 100_000
    assert ticks > 10, "on the loop it would be one or two"
    await encoder.close()


async def test_batches_above_the_queue_limit_are_rejected_until_there_is_room() -> None:
    encoder = Encoder(max_waiting_bytes=100, in_thread_above=0)
    batch = b'{"events":[{"event":"%b"}]}' % (b"x" * 60)
    first = asyncio.ensure_future(encoder.encode(batch, "now"))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable) as rejection:
        await encoder.encode(batch, "now")
    assert rejection.value.headers == {"Retry-After": "1"}
    assert await first == await encoder.encode(batch, "now")
    with pytest.raises(InvalidEvents):
        await encoder.encode(b'{"events":[]}', "now")
    long = b'{"events":[{"event":"%b"}]}' % (b"x" * 200)
    assert await encoder.encode(long, "now")
    await encoder.close()


async def test_a_batch_that_nobody_waits_for_any_more_makes_room_and_no_noise() -> None:
    changes: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: changes.append(context))
    encoder = Encoder(max_waiting_bytes=100, in_thread_above=0)
    batch = b'{"events":[{"event":"%b"}]}' % (b"x" * 60)
    waiting = asyncio.ensure_future(encoder.encode(batch, "now"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await encoder.encode(batch, "now")
    await encoder.close()
    assert changes == []
