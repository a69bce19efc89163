"""Erased names leave the feed of changes, and only readers of their collections get a reset."""

from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from support.clients import Browser, Start
from support.collections import collection
from support.faulty_store import FaultyStore
from support.folder_search import files_with
from support.s3_stores import new_prefix

from pysync.changelog import Change
from pysync.coordinator.redis.coordinator import RedisCoordinator
from pysync.erase import EraseRequest
from pysync.server.app import App
from pysync.store import open_store
from pysync.store.memory import MemoryStore

pytestmark = pytest.mark.usefixtures("hasty_erasures")

NAME = "5ecret-name"
MEMBERS = {
    "collections": [collection("notes", deletable=True), collection("other", deletable=True)],
    "namespaces": {
        "acme": {"collections": [collection("mine", "notes/{id}"), collection("own", "acme/{id}")]}
    },
    "changes": {"maxCount": 1},
}


class Service(NamedTuple):
    app: App
    browser: Browser

    async def write(self, *keys: str) -> None:
        for key in keys:
            assert (await self.browser.push(key, {})).status == 200

    async def delete(self, key: str) -> None:
        hash_ = (await self.browser.pull(key)).json["hash"]
        assert (await self.browser.request("DELETE", f"/push/{key}?baseHash={hash_}")).status == 200

    async def erase(self, key: str) -> None:
        await self.app.eraser.run(EraseRequest("key", key))

    async def changes(self, query: str = "", namespace: str = "") -> Any:
        page = await self.browser.request("GET", f"{namespace}/changes?{query}")
        assert page.status == 200, page.body
        return page.json

    async def is_reset(self, since: str, namespace: str = "", collections: str = "") -> bool:
        chosen = collections and f"&collections={collections}"
        return "reset" in await self.changes(f"since={since}{chosen}", namespace)

    async def trim_log(self) -> None:
        """Have the log forget all changes up to now, in which the feed differs from it."""
        change = b'{"collection":"other","params":{"id":"x"},"hash":"","timestamp":1}'
        await self.app.engine.outbox.log.append([Change(change, "", "/other")] * 600)
        await self.app.engine.outbox.log.append([Change(change, "", "/other")])


@pytest.fixture(params=["memory", "folder"])
async def service(
    request: pytest.FixtureRequest, start: Start, session: aiohttp.ClientSession, folder: Path
) -> Service:
    """A service whose store is in memory, a folder or a bucket, or whose coordinator is Redis."""
    store, members, options = None, MEMBERS, dict[str, Any]()
    if request.param == "folder":
        members = MEMBERS | {"store": f"file:{folder}"}
    elif request.param == "bucket":
        store = await open_store(request.getfixturevalue("moto").store(new_prefix()))
        members = MEMBERS | {"coordinator": f"file:{folder}", "changes": {}}
    elif request.param == "redis":
        options["coordinator"] = await RedisCoordinator.connect(request.getfixturevalue("redis").url)
    base = await start(members, store, **options)
    return Service(start.apps[-1], Browser(base, session))  # type: ignore[attr-defined]


async def test_the_feed_names_nothing_that_was_erased(service: Service) -> None:
    await service.write("notes/a", f"notes/{NAME}", "other/a")
    before = (await service.changes("since=now"))["cursor"]
    await service.erase(f"notes/{NAME}")
    assert [each["params"]["id"] for each in (await service.changes())["changes"]] == ["a", "a"]
    after = (await service.changes())["cursor"]
    assert (await service.changes(f"since={after}"))["changes"] == []
    assert (await service.changes(f"since={before}&collections=other"))["changes"] == []


@pytest.mark.parametrize(
    "service", ["memory", "folder", "redis", pytest.param("bucket", marks=pytest.mark.slow)], indirect=True
)
async def test_only_readers_of_the_collections_of_what_was_erased_get_a_reset(service: Service) -> None:
    await service.write("notes/a", f"notes/{NAME}", "other/a")
    before = (await service.changes("since=now"))["cursor"]
    middle = (await service.changes("limit=1"))["cursor"]
    await service.erase(f"notes/{NAME}")
    after = (await service.changes("since=now"))["cursor"]
    await service.write("notes/b")
    for cursor in (before, middle):
        assert await service.is_reset(cursor)
        assert await service.is_reset(cursor, collections="notes,other")
        assert await service.is_reset(cursor, "/acme", "mine")
        assert not await service.is_reset(cursor, collections="other")
        assert not await service.is_reset(cursor, "/acme", "own")
    assert not await service.is_reset(after)
    assert [each["params"]["id"] for each in (await service.changes(f"since={after}"))["changes"]] == ["b"]


async def test_a_removal_that_the_log_forgot_long_ago_leaves_the_feed_with_a_reset(service: Service) -> None:
    """Else a reader that was away would keep the document for ever."""
    await service.write("notes/a", f"notes/{NAME}")
    before = (await service.changes("since=now"))["cursor"]
    await service.delete(f"notes/{NAME}")
    await service.trim_log()
    page = await service.changes(f"since={before}&collections=notes")
    assert [each["removed"] for each in page["changes"]] == [True]
    await service.erase(f"notes/{NAME}")
    assert await service.is_reset(before, collections="notes")
    assert not await service.is_reset(page["cursor"], collections="other")


async def test_a_reader_that_has_everything_costs_no_read_of_the_store(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = FaultyStore(MemoryStore())
    base = await start(MEMBERS, store)
    service = Service(start.apps[-1], Browser(base, session))  # type: ignore[attr-defined]
    await service.write("notes/a")
    newest = (await service.changes("since=now"))["cursor"]
    before = store.calls["get"]
    assert await service.changes(f"since={newest}") == {"changes": [], "cursor": newest}
    assert store.calls["get"] == before


async def test_no_byte_of_an_old_removal_is_left(
    start: Start, session: aiohttp.ClientSession, folder: Path
) -> None:
    base = await start(MEMBERS | {"store": f"file:{folder}"})
    service = Service(start.apps[-1], Browser(base, session))  # type: ignore[attr-defined]
    await service.write(f"notes/{NAME}")
    await service.delete(f"notes/{NAME}")
    await service.trim_log()
    assert files_with(folder, NAME)
    await service.erase(f"notes/{NAME}")
    assert files_with(folder, NAME) == set()
