"""Expired data is deleted, announced and leaves lists, at the price of what expired."""

import itertools
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.append_log_browser import append
from support.clients import Browser, Start
from support.collections import collection
from support.sse_client import listen
from support.watched_listing import Listing, WatchedIndex, WatchedMemoryStore

from pysync.server.process import expiry
from pysync.sqlite.connection import SnapshotReader
from pysync.store import ListEntry, Store
from pysync.store.local.store import LocalStore
from pysync.testing import FakeClock

TTL_MS = 60_000
NOTES = collection("notes", "notes/{id}", ttlMs=TTL_MS, listable=True)
KEPT = collection("kept", "notes/{id}/kept")
PICS = collection("pics", "{who}/pics/{id}", ttlMs=TTL_MS, allowedMimeTypes=["image/png"])
LOG = collection("log", "log/{id}", ttlMs=TTL_MS, appendOnly={"requireAuthorSignature": False})
LISTS = collection("titles", "titles", pullOnly=True)
TITLES = {"source": "notes", "target": "titles", "id": "{id}", "value": {"title": "/title"}}
SERVICE: dict[str, Any] = {"collections": [NOTES, KEPT, PICS, LOG, LISTS], "projections": [TITLES]}


@pytest.fixture
def listing() -> Listing:
    return Listing()


@pytest.fixture(params=["memory", "local"])
async def kept(
    request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock, listing: Listing
) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield WatchedMemoryStore(listing, clock)
        return
    store: Any = await LocalStore.open_folder(tmp_path / "data", clock)
    store.time_index = WatchedIndex(listing, store.time_index)
    yield store
    await store.close()


async def sweep(start: Start) -> int:
    (app,) = start.apps  # type: ignore[attr-defined]
    swept: int = await app.jobs.ttl_sweeper.sweep()
    return swept


async def test_expiry_is_announced(
    start: Start, session: aiohttp.ClientSession, kept: Store, clock: FakeClock
) -> None:
    anybody = Browser(await start(SERVICE, kept, now_ms=clock), session)
    await anybody.push("notes/a", {"title": "a"})
    await anybody.request("POST", "/push/me/pics/p", b"png", headers={"Content-Type": "image/png"})
    for n in range(30):
        await append(anybody, "log/a", {"n": n, "text": "x" * 1000})
    await anybody.push("notes/a/kept", {"n": 1})
    stream = await listen(anybody, collections="notes,pics,log,kept")
    clock.now_ms += TTL_MS + 100
    assert await sweep(start) == 3
    events = [(await stream.event()).data for _ in range(3)]
    removal = {"hash": "", "removed": True, "timestamp": clock.now_ms}
    assert sorted(events, key=lambda event: str(event["collection"])) == [
        {"collection": "log", "params": {"id": "a"}, **removal},
        {"collection": "notes", "params": {"id": "a"}, **removal},
        {"collection": "pics", "params": {"who": "me", "id": "p"}, **removal},
    ]
    assert await sweep(start) == 0
    assert (await anybody.push("notes/a", {"title": "again"})).status == 200
    event = (await stream.event()).data
    assert (event["collection"], "removed" in event) == ("notes", False), "it is announced once"
    left = {entry.key async for entry in kept.walk("") if not entry.key.startswith("_pysync/")}
    assert {"notes/a", "notes/a/kept"} <= left <= {"notes/a", "notes/a/kept", "titles"}
    assert [entry async for entry in kept.walk("_pysync/logs")] == []
    await stream.close()


async def test_an_expired_document_leaves_lists(
    start: Start, session: aiohttp.ClientSession, kept: Store, clock: FakeClock
) -> None:
    anybody = Browser(await start(SERVICE, kept, now_ms=clock), session)

    async def titles() -> list[str]:
        data = (await anybody.pull("titles")).json["data"]
        return [entry["id"] for entry in data.get("items", [])]

    stream = await listen(anybody, collections="titles")
    await anybody.push("notes/a", {"title": "a"})
    clock.now_ms += TTL_MS // 2
    await anybody.push("notes/b", {"title": "b"})
    while await titles() != ["a", "b"]:
        await stream.event()
    clock.now_ms += TTL_MS // 2 + 1
    assert await sweep(start) == 1
    while await titles() != ["b"]:
        await stream.event()
    await stream.close()


async def test_a_document_that_is_written_again_stays(
    start: Start, session: aiohttp.ClientSession, kept: Store, clock: FakeClock, listing: Listing
) -> None:
    anybody = Browser(await start(SERVICE, kept, now_ms=clock), session)
    await anybody.push("notes/a", {"title": "old"})
    clock.now_ms += TTL_MS + 1
    pushed: list[int] = []

    async def push(listed: ListEntry) -> None:
        if listed.key == "notes/a" and not pushed:
            pushed.append((await anybody.push("notes/a", {"title": "new"})).status)

    listing.on_listed = push
    assert await sweep(start) == 0
    assert pushed == [200]
    assert (await anybody.pull("notes/a")).json["data"] == {"title": "new"}


async def test_a_file_that_is_pushed_again_with_the_same_bytes_stays(
    start: Start,
    session: aiohttp.ClientSession,
    clock: FakeClock,
    listing: Listing,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a bucket both have the same etag."""
    kept = WatchedMemoryStore(listing, clock)
    monkeypatch.setattr(kept, "_writes", itertools.repeat(1))
    anybody = Browser(await start(SERVICE, kept, now_ms=clock), session)
    png = {"Content-Type": "image/png"}
    await anybody.request("POST", "/push/me/pics/p", b"png", headers=png)
    clock.now_ms += TTL_MS + 1
    pushed: list[int] = []

    async def push(listed: ListEntry) -> None:
        pushed.append((await anybody.request("POST", "/push/me/pics/p", b"png", headers=png)).status)

    listing.on_listed = push
    assert await sweep(start) == 0
    assert 200 in pushed
    assert (await anybody.request("GET", "/pull/me/pics/p")).status == 200


async def test_sweep_of_a_folder_costs_only_expired_documents(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts the steps that SQLite takes for the reads of a sweep, and the rows that it returns."""
    rows = SnapshotReader.rows
    costs: list[tuple[int, int]] = []

    async def cost(fresh: int) -> tuple[int, int]:
        folder = tmp_path / str(fresh)
        store = await LocalStore.open_folder(folder, clock := FakeClock())
        await start(SERVICE, store, now_ms=clock)
        for n in range(5):
            await store.put(f"notes/old{n}", b'{"data":{}}')
            await store.put(f"me/pics/old{n}/deeper", b'{"data":{}}')
        (*_, app) = start.apps  # type: ignore[attr-defined]
        await app.jobs.ttl_sweeper.sweep()  # creates the indexes
        clock.now_ms += TTL_MS + 1
        for n in range(fresh):
            await store.put(f"notes/{n}", b'{"data":{}}')
            await store.put(f"me/pics/{n}", b'{"data":{}}')
            await store.put(f"notes/{n}/kept", b'{"data":{}}')
        steps = [0, 0]
        with sqlite3.connect(folder / "pysync.db") as observer:

            def count() -> None:
                steps[0] += 1

            observer.set_progress_handler(count, 1)

            def counted(reader: SnapshotReader, statement: str, *args: Any) -> list[Any]:
                if "FROM object" in statement:
                    steps[1] += len(observer.execute(statement, args).fetchall())
                return rows(reader, statement, *args)

            monkeypatch.setattr(SnapshotReader, "rows", counted)
            assert await app.jobs.ttl_sweeper.sweep() == 5
            monkeypatch.setattr(SnapshotReader, "rows", rows)
        await store.close()
        return steps[0], steps[1]

    costs = [await cost(fresh) for fresh in (1, 400)]
    assert costs[0] == costs[1]
    assert costs[0][1] <= 30


async def test_a_sweep_without_an_index_lists_a_bounded_number_of_keys(
    start: Start, clock: FakeClock, listing: Listing, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert expiry.MAX_LISTED >= 1_000
    monkeypatch.setattr(expiry, "MAX_LISTED", 4)
    store = WatchedMemoryStore(listing, clock)
    await start({"collections": [NOTES]}, store, now_ms=clock)
    for n in range(10):
        await store.put(f"notes/{n}", b'{"data":{}}')
    assert await sweep(start) == 0
    assert len(listing.keys) == 4
    listing.keys.clear()
    clock.now_ms += TTL_MS + 1
    assert [await sweep(start) for _ in range(4)] == [4, 2, 4, 0]
    assert len(listing.keys) <= 16
    assert [entry async for entry in store.walk("notes")] == []
