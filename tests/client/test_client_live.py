"""Clients that are told by the service: what is written elsewhere is there without asking again and again."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.clients import ISSUER, Start, root_device
from support.collections import MINE, NOTES, collection
from support.s3_fault_proxy import FaultProxy
from support.server_process import serving

from pysync.client import ChangeEvent, Client, LogCursor, LogElement, Reset, RetryPolicy, SyncDocument, Watch
from pysync.errors import BadRequest, Forbidden, Unauthorized

LOG = collection("log", appendOnly={"requireAuthorSignature": False, "maxPullLimit": 5})
SERVICE: dict[str, Any] = {
    "collections": [NOTES, MINE, LOG],
    "namespaces": {"acme": {"collections": [NOTES]}},
}

Elements = AsyncGenerator[list[LogElement]]


async def for_ever(seconds: float) -> None:
    """A wait of somebody who looks again only when told."""
    await asyncio.Event().wait()


async def for_nothing(seconds: float) -> None:
    """A wait that only lets others go first."""
    await asyncio.sleep(0)


async def texts(watch: Watch, count: int) -> list[object]:
    """The ids of the documents that the next so many changes are of."""
    found = [await anext(watch) for _ in range(count)]
    return [event.params["id"] if isinstance(event, ChangeEvent) else event for event in found]


async def test_watch_receives_only_requested_changes(start: Start) -> None:
    base = await start(SERVICE)
    async with (
        Client(base) as anyone,
        Client(base, namespace="acme") as inside,
        anyone.watch() as all_,
        anyone.watch(["log"]) as logs,
        anyone.watch(["notes", "log"], {"notes": {"id": "b"}}) as some,
        inside.watch(["notes"]) as theirs,
    ):
        pushed = await anyone.push("notes/a", {"n": 1})
        assert await anext(all_) == ChangeEvent(
            "notes", {"id": "a"}, pushed.hash, pushed.timestamp_ms, None, str(all_.last_event_id)
        )
        appended = await anyone.append("log/c", {"n": 1})
        await anyone.push("notes/b", {})
        await inside.push("notes/d", {})
        appended_event = await anext(logs)
        assert isinstance(appended_event, ChangeEvent)
        assert (appended_event.hash, appended_event.timestamp_ms) == (appended.hash, appended.timestamp_ms)
        assert await texts(all_, 2) == await texts(some, 2) == ["c", "b"]
        for name in ("a", "b", "d"):  # a namespace that shares keys with the root shares their events
            appended_event = await anext(theirs)
            assert isinstance(appended_event, ChangeEvent)
            assert (appended_event.params, appended_event.namespace) == ({"id": name}, "acme")


async def test_a_watch_is_rejected_as_the_service_rejects(start: Start) -> None:
    base = await start({"collections": [NOTES, MINE]})
    async with Client(base) as anyone:
        with pytest.raises(Unauthorized):
            await anext(anyone.watch(["mine"]))
        for collections, params in ((["notes"], {"notes": {"other": "a"}}), (["none"], {})):
            with pytest.raises(BadRequest):
                await anext(anyone.watch(collections, params))


async def test_a_watch_goes_on_after_an_earlier_one(start: Start) -> None:
    async with Client(await start(SERVICE)) as anyone:
        async with anyone.watch(["notes"]) as earlier:
            await anyone.push("notes/a", {})
            assert await texts(earlier, 1) == ["a"]
        for name in "bcd":
            await anyone.push(f"notes/{name}", {})
        async with anyone.watch(["notes"], after=earlier.last_event_id) as later:
            assert await texts(later, 3) == ["b", "c", "d"]
        async with anyone.watch(["notes"], after="nonsense") as lost:
            assert isinstance(await anext(lost), Reset)
            await anyone.push("notes/e", {})
            assert await texts(lost, 1) == ["e"]


async def test_a_private_watch_reconnects_with_fresh_signatures(start: Start) -> None:
    async with (
        FaultProxy(await start(SERVICE)) as proxy,
        Client(proxy.url, keys=ISSUER, certificate=root_device(ISSUER)) as owner,
    ):
        proxy.truncate("GET", to_bytes=200, when=lambda sent: sent.path == "events", times=3)
        key = f"u/{ISSUER.user_id}"
        async with owner.watch(["mine"]) as changes:
            for name in "abcdefgh":
                await owner.push(f"{key}/{name}", {})
            assert await texts(changes, 8) == list("abcdefgh")
        assert proxy.met["truncate"] == 3


@asynccontextmanager
async def restarting(
    folder: Path, **members: Any
) -> AsyncIterator[tuple[Client, Callable[[], Awaitable[None]]]]:
    """A client of a server process, and what kills that and starts another in its place."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(folder, **members))
        client = await stack.enter_async_context(Client(server.base))

        async def restart() -> None:
            server.process.kill()
            await server.ended()
            port = int(server.base.rsplit(":", 1)[1])
            await stack.enter_async_context(serving(folder, port, **members))

        yield client, restart


@pytest.mark.process
async def test_a_watch_outlives_the_server_without_a_gap(tmp_path: Path) -> None:
    async with restarting(tmp_path) as (anyone, restart), anyone.watch(["notes"]) as changes:
        await anyone.push("notes/a", {})
        assert await texts(changes, 1) == ["a"]
        await anyone.push("notes/b", {})
        await restart()
        await anyone.push("notes/c", {})
        assert await texts(changes, 2) == ["b", "c"]


@pytest.mark.process
async def test_watch_is_notified_of_a_lost_history_after_a_restart(tmp_path: Path) -> None:
    async with restarting(tmp_path, store="memory:") as (anyone, restart), anyone.watch() as changes:
        await anyone.push("notes/a", {})
        assert await texts(changes, 1) == ["a"]
        await restart()
        assert isinstance(await anext(changes), Reset)
        await anyone.push("notes/b", {})
        assert await texts(changes, 1) == ["b"]


@asynccontextmanager
async def followed(client: Client, key: str, **options: Any) -> AsyncIterator[Elements]:
    """The elements of a log, looked for when its stream tells of them alone."""
    cursor = LogCursor(client, key, since=0, sleep=for_ever)
    async with aclosing(cursor.follow(**options)) as found:
        yield found


async def some(found: Elements, count: int) -> list[int]:
    """The times of the next so many elements."""
    times: list[int] = []
    while len(times) < count:
        times += [element.ts_ms for element in await anext(found)]
    return times


@pytest.mark.parametrize("options", [{}, {"collection": "log"}, {"collection": "log", "params": {"id": "a"}}])
async def test_log_is_followed_by_its_change_events(start: Start, options: dict[str, Any]) -> None:
    async with Client(await start(SERVICE)) as anyone, followed(anyone, "/pull/log/a", **options) as found:
        for first, last in ((1, 12), (13, 13), (20, 26)):
            waiting = asyncio.ensure_future(some(found, last - first + 1))
            for ts_ms in range(first, last + 1):
                await anyone.append("log/a", {}, ts_ms=ts_ms)
            assert await waiting == [*range(first, last + 1)]


async def test_a_quiet_log_costs_no_requests_whatever_else_is_written(start: Start) -> None:
    async with (
        FaultProxy(await start(SERVICE)) as proxy,
        Client(proxy.url) as anyone,
        followed(anyone, "log/a") as found,
        anyone.watch() as all_,
    ):
        waiting = asyncio.ensure_future(some(found, 1))
        await anyone.append("log/a", {}, ts_ms=1)
        assert await waiting == [1]
        waiting = asyncio.ensure_future(some(found, 1))
        proxy.reset_counts()
        for n in range(20):
            await anyone.append("log/b", {})
            await anyone.push(f"notes/{n}", {})
        await texts(all_, 41)
        await anyone.append("log/a", {}, ts_ms=2)
        assert await waiting == [2]
    # Two that found nothing may be left from the first append, and one from the beginning of the stream.
    assert proxy.calls["GET"] <= 4


async def test_other_documents_with_such_parameters_hide_no_append(start: Start) -> None:
    async with Client(await start(SERVICE)) as anyone, followed(anyone, "log/a") as found:
        base: str | None = None
        for n in range(1, 30):
            waiting = asyncio.ensure_future(some(found, 1))
            base = (await anyone.push("notes/a", {"n": n}, base)).hash
            await anyone.append("log/a", {}, ts_ms=n)
            base = (await anyone.push("notes/a", {"again": n}, base)).hash
            assert await waiting == [n]


@pytest.mark.parametrize("options", [{"collection": "none"}, {"collection": "log", "params": {"x": "a"}}])
async def test_a_collection_that_does_not_exist_is_not_followed(
    start: Start, options: dict[str, Any]
) -> None:
    async with Client(await start(SERVICE)) as anyone:
        with pytest.raises(BadRequest):
            await anext(LogCursor(anyone, "log/a").follow(**options))


@pytest.mark.process
async def test_log_is_followed_across_a_restart_that_loses_the_history(tmp_path: Path) -> None:
    members: dict[str, Any] = {"collections": [LOG], "coordinator": "memory:"}
    async with (
        restarting(tmp_path, **members) as (anyone, restart),
        aclosing(LogCursor(anyone, "log/a", since=0).follow()) as found,
    ):
        await anyone.append("log/a", {}, ts_ms=1)
        assert await some(found, 1) == [1]
        await restart()
        for ts_ms in (2, 3):
            await anyone.append("log/a", {}, ts_ms=ts_ms)
        assert await some(found, 2) == [2, 3]


async def until(found: AsyncGenerator[dict[str, Any]], wanted: dict[str, Any]) -> None:
    """Return when a document has become what is wanted."""
    while await anext(found) != wanted:
        pass


async def test_two_clients_edit_one_document_live(start: Start) -> None:
    base = await start(SERVICE)
    async with Client(base) as one, Client(base) as two:
        here = SyncDocument(one, "notes/a", sleep=for_ever)
        there = SyncDocument(two, "notes/a", sleep=for_ever)
        async with aclosing(here.follow(collection="notes")) as mine, aclosing(there.follow()) as theirs:
            assert await anext(mine) == await anext(theirs) == {}
            wanted: dict[str, Any] = {}
            for n in range(5):
                for name, document, found in (("title", here, theirs), ("text", there, mine)):
                    wanted |= {name: n}
                    waiting = asyncio.ensure_future(until(found, wanted))
                    await document.update(partial(dict, **{name: n}))
                    await waiting
            waiting = asyncio.ensure_future(until(theirs, {"text": 9}))
            await here.push({"text": 9})  # the title is gone
            await waiting
            assert here.hash == there.hash


async def test_a_draft_is_resolved_with_what_comes_and_not_before(start: Start) -> None:
    async with Client(await start(SERVICE)) as anyone:
        first = await anyone.push("notes/a", {"text": "one", "by": "them"})
        document = SyncDocument(anyone, "notes/a", sleep=for_ever)
        async with aclosing(document.follow()) as found:
            await anext(found)
            document.data["draft"], document.data["text"] = True, "mine"
            waiting = asyncio.ensure_future(anext(found))
            async with anyone.watch() as all_:
                await anyone.push("notes/b", {})
                await texts(all_, 1)
            assert document.data == {"text": "mine", "by": "them", "draft": True}
            await anyone.push("notes/a", {"text": "two"}, first.hash)
            assert await waiting == {"text": "mine", "draft": True}
            assert [drop.value for drop in document.dropped] == ["two"]


def rough(proxy: FaultProxy, rng: random.Random, cuts: int) -> None:
    """Cut so many streams anywhere, and delay what else is asked."""
    for _ in range(cuts):
        proxy.truncate("GET", to_bytes=rng.randrange(1500), when=lambda sent: sent.path == "events")
    proxy.chaos(rng, delay=0.3, delay_s=0.01)


@pytest.mark.parametrize("seed", range(3))
async def test_watch_that_is_aborted_anywhere_receives_each_write_once(start: Start, seed: int) -> None:
    base = await start(SERVICE)
    async with (
        FaultProxy(base) as proxy,
        Client(proxy.url, backoff=RetryPolicy(initial_s=0.001)) as anyone,
        Client(base) as writer,
        anyone.watch() as changes,
    ):
        rough(proxy, random.Random(seed), cuts=20)
        receiving = asyncio.ensure_future(texts(changes, 200))
        written = [f"{n}" for n in range(200)]
        for name in written:
            await writer.push(f"notes/{name}", {})
        assert await receiving == written


@pytest.mark.parametrize("seed", range(3))
async def test_a_document_that_flickers_is_followed_to_what_it_is_at_last(start: Start, seed: int) -> None:
    base = await start(SERVICE)
    rng = random.Random(seed)
    seen = asyncio.Event()

    async def flicker(client: Client) -> None:
        document = SyncDocument(client, "notes/a", retries=1000, sleep=for_nothing)
        for _ in range(3):
            await document.update(lambda _: {"on": rng.random() < 0.5})

    async def see(found: AsyncGenerator[dict[str, Any]]) -> None:
        async for _ in found:
            seen.set()

    async with (
        FaultProxy(base) as proxy,
        Client(proxy.url, backoff=RetryPolicy(initial_s=0.001)) as one,
        Client(base) as others,
    ):
        document = SyncDocument(one, "notes/a", sleep=for_ever)
        seeing = asyncio.ensure_future(see(document.follow()))
        rough(proxy, rng, cuts=5)
        for _ in range(20):
            await asyncio.gather(flicker(others), flicker(others))
            now = await others.pull("notes/a")
            while document.data != now.data:
                seen.clear()
                await seen.wait()
        seeing.cancel()


async def test_document_of_a_server_without_streams_is_polled(start: Start) -> None:
    async with FaultProxy(await start(SERVICE)) as proxy, Client(proxy.url) as anyone:
        proxy.respond(status=404, when=lambda sent: sent.path == "events")
        waits: list[float] = []

        async def wait(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 4:
                await anyone.push("notes/a", {"n": 1})

        document = SyncDocument(anyone, "notes/a", sleep=wait)
        async with aclosing(document.follow(initial_s=1.0, max_s=4.0)) as found:
            assert [await anext(found), await anext(found)] == [{}, {"n": 1}]
    assert waits == [1.0, 2.0, 4.0, 4.0]


async def test_rejected_document_ends_following_it(start: Start) -> None:
    async with Client(await start(SERVICE), keys=ISSUER, certificate=root_device(ISSUER)) as owner:
        with pytest.raises(Forbidden):
            await anext(SyncDocument(owner, f"u/{'0' * 32}/a").follow())
