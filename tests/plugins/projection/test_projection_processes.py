"""Lists kept by real server processes that are killed while their sources are written."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.clients import Browser
from support.projection_site import LISTS, NOTES, TITLES
from support.server_process import serving
from support.worker_processes import workers

from pysync import _core
from pysync.store import StoredObject
from pysync.store.local.store import LocalStore

pytestmark = pytest.mark.process

SETTINGS: dict[str, Any] = {"collections": [NOTES, LISTS], "projections": [TITLES]}
SPACES = ("x", "y")


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[LocalStore]:
    """The store of the servers, beside them."""
    store = await LocalStore.open_folder(folder / "data")
    yield store
    await store.close()


async def stored(store: LocalStore, key: str) -> Any:
    found = await store.get(key)
    return json.loads(_core.read_document(found.body).data) if isinstance(found, StoredObject) else None


async def wanted(store: LocalStore, space: str) -> dict[str, Any]:
    """The list of a space as its sources have it now, without its order."""
    found = {}
    for name in await store.list(f"notes/{space}", None, 10_000):
        data = await stored(store, f"notes/{space}/{name}")
        if not data.get("deleted"):
            found[name] = {"title": data["title"]}
    return found


async def is_right(store: LocalStore, space: str) -> bool:
    """Whether the list of a space is what its sources say; each entry is there once."""
    list_ = await stored(store, f"lists/{space}") or {"items": []}
    entries = [(item["id"], item["value"]) for item in list_["items"]]
    return len(entries) == len(dict(entries)) and dict(entries) == await wanted(store, space)


async def become_right(store: LocalStore) -> None:
    """Wait until every list is."""
    log = store.change_log
    while True:
        newest = await log.last_id()
        if all([await is_right(store, space) for space in SPACES]):
            return
        await log.wait_for_change(newest)


async def write(base: str, number: int, enough: asyncio.Event) -> None:
    """Create, change and delete notes of one's own until it is enough, or there is no server any more."""
    hashes: dict[str, str | None] = {}
    async with aiohttp.ClientSession() as session:
        browser = Browser(base, session)
        n = 0
        while not enough.is_set():
            n += 1
            key = f"notes/{SPACES[n % 2]}/c{number}-{n % 23}"
            data = {"title": f"T{n}", "deleted": n % 5 == 0}
            answer = await browser.push(key, data, hashes.get(key))
            body = answer.json
            hashes[key] = body["hash"] if answer.status == 200 else body.get("currentHash") or None


async def writing(base: str, number: int, enough: asyncio.Event) -> None:
    """`write`, again where a connection ends."""
    while not enough.is_set():
        with suppress(aiohttp.ClientError):
            await write(base, number, enough)


@pytest.mark.timeout(120)
async def test_projected_lists_catch_up_after_a_kill_during_a_burst(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as store:
        for _ in range(2):
            async with serving(tmp_path, **SETTINGS) as server:
                clients = [
                    asyncio.ensure_future(write(server.base, number, asyncio.Event())) for number in range(6)
                ]
                await count(store, 150)
                server.process.kill()
                for outcome in await asyncio.gather(*clients, return_exceptions=True):
                    assert isinstance(outcome, aiohttp.ClientError)
        async with serving(tmp_path, **SETTINGS):
            await become_right(store)


async def count(store: LocalStore, changes: int) -> None:
    """Wait for so many changes from now on."""
    log = store.change_log
    after = await log.last_id()
    while changes > 0:
        await log.wait_for_change(after)
        found = await log.read(after, 1000)
        assert found is not None
        if found:
            changes -= len(found)
            after = found[-1][0]


@pytest.mark.timeout(120)
async def test_whichever_worker_is_killed_another_keeps_the_lists(tmp_path: Path) -> None:
    async with opened(tmp_path) as store, workers(tmp_path, **SETTINGS) as service:
        enough = asyncio.Event()
        clients = [asyncio.ensure_future(writing(service.base, number, enough)) for number in range(4)]
        for number in service.pids():
            await count(store, 100)
            await service.kill(number)
        await count(store, 100)
        enough.set()
        await asyncio.gather(*clients)
        await become_right(store)
