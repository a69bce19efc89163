"""Expired data is deleted, announced and leaves lists, at the price of what expired."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.append_log_browser import append
from support.clients import Browser, Start
from support.collections import collection
from support.sse_client import listen
from support.watched_listing import Listing, WatchedIndex, WatchedMemoryStore

from pysync.server.process import background
from pysync.store import ANY, Etag, ListEntry, Precondition, Store
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
) -> None:
    """In a bucket both have the same etag."""

    class SameEtags(WatchedMemoryStore):
        async def walk(self, prefix: str, after: str | None = None) -> AsyncIterator[ListEntry]:
            async for entry in super().walk(prefix, after):
                yield replace(entry, etag="same")

        async def delete(self, key: str, expect: Precondition = ANY) -> None:
            await super().delete(key, ANY if expect == Etag("same") else expect)

    kept = SameEtags(listing, clock)
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


@pytest.mark.parametrize("kept", ["local"], indirect=True)
async def test_sweep_of_a_folder_costs_only_expired_documents(
    start: Start, kept: Store, clock: FakeClock, listing: Listing
) -> None:
    await start(SERVICE, kept, now_ms=clock)
    for n in range(5):
        await kept.put(f"notes/old{n}", b'{"data":{}}')
        await kept.put(f"me/pics/old{n}/deeper", b'{"data":{}}')
    clock.now_ms += TTL_MS + 1
    for n in range(400):
        await kept.put(f"notes/{n}", b'{"data":{}}')
        await kept.put(f"me/pics/{n}", b'{"data":{}}')
        await kept.put(f"notes/{n}/kept", b'{"data":{}}')
    assert await sweep(start) == 5
    assert sorted(listing.keys) == [f"notes/old{n}" for n in range(5)]


async def test_a_sweep_without_an_index_lists_a_bounded_number_of_keys(
    start: Start, clock: FakeClock, listing: Listing, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert background.MAX_LISTED >= 1_000
    monkeypatch.setattr(background, "MAX_LISTED", 4)
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
