"""Plugins that keep what is pushed to a collection as files of their own (`FileBackedCollection`)."""

import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from support.clients import Browser, Start
from support.collections import LOG, PUBLIC
from support.plugin_samples import CARDS, NotifiedPlugin, batch

from pysync import config
from pysync.config import ConfigError
from pysync.engine.changes import DocumentRef, WriteContext, parse_change
from pysync.model import WriteResult
from pysync.plugins import FileBackedCollection, PluginContext, PluginPush, PushResponse
from pysync.plugins.loader import load_plugins
from pysync.store import Store
from pysync.store.memory import MemoryStore

EVENTS = {"name": "events", "storagePath": "in/{app}/{id}", "listable": True, **PUBLIC}
ROWS = b"rows of many columns"


class Keeping:
    """Stores each push as a file with a name of its own."""

    name = "keeping"
    stored_files: Mapping[str, FileBackedCollection]

    def __init__(self, template: str = "out/{app}/{id}", *, announces: bool = True) -> None:
        self.hidden: str | None = None
        self.stored_files = {"events": FileBackedCollection(template, ".rows", lambda: self.hidden)}
        self.announces = announces
        self.pushes: list[PluginPush] = []

    @asynccontextmanager
    async def lifespan(self, services: PluginContext) -> AsyncIterator[None]:
        self.services = services
        yield

    async def intercept_push(self, push: PluginPush) -> PushResponse | None:
        self.pushes.append(push)
        params = {**push.request.params, "id": f"n{len(self.pushes)}"}
        key = f"out/{params['app']}/{params['id']}.rows"
        if not self.announces:
            sha256 = await self.services.store.write(key, _chunks(), "application/x-rows")
            return PushResponse(WriteResult(sha256, 5), {"id": params["id"]}, params)
        written = await self.services.files.push(
            key, _chunks(), "application/x-rows", WriteContext(DocumentRef("events", params))
        )
        return PushResponse(written, {"id": params["id"]}, params, announced=True)


async def _chunks() -> AsyncIterator[bytes]:
    yield ROWS


async def test_a_pull_is_answered_with_the_file_at_the_template_and_suffix(
    start: Start, session: aiohttp.ClientSession, store: Store
) -> None:
    keeping = Keeping()
    browser = Browser(await start({"collections": [EVENTS]}, store, plugins=[keeping]), session)
    answer = await browser.push("in/web/whatever", {"n": 1})
    assert answer.json.keys() == {"hash", "timestamp", "id"}
    pulled = await browser.pull("in/web/n1")
    assert (pulled.status, pulled.body) == (200, ROWS)
    assert pulled.headers["Content-Type"] == "application/x-rows"
    version = pulled.headers["ETag"]
    assert version == f'"{answer.json["hash"]}"'
    assert (await browser.pull("in/web/n1", {"If-None-Match": version})).status == 304
    part = await browser.pull("in/web/n1", {"Range": "bytes=0-3"})
    assert (part.status, part.body) == (206, ROWS[:4])
    missing = await browser.pull("in/web/whatever")
    assert (missing.status, missing.json["data"], missing.json["hash"]) == (200, {}, "")


async def test_a_list_names_the_files_without_their_suffix(
    start: Start, session: aiohttp.ClientSession, store: Store
) -> None:
    browser = Browser(await start({"collections": [EVENTS]}, store, plugins=[Keeping()]), session)
    for _ in range(5):
        await browser.push("in/web/x", {})
    for name in ("n3", ".rows", "n3.other", "n 6.rows"):
        await store.write(f"out/web/_{name}" if name == "n3" else f"out/web/{name}", _chunks(), "x/y")

    async def listed(query: str = "") -> Any:
        return (await browser.request("GET", f"/list/in/web{query}")).json

    assert await listed() == {"items": ["n1", "n2", "n3", "n4", "n5"], "hasMore": False}
    assert await listed("?limit=2") == {"items": ["n1", "n2"], "hasMore": True}
    assert await listed("?limit=2&after=n2") == {"items": ["n3", "n4"], "hasMore": True}
    assert await listed("?after=n4") == {"items": ["n5"], "hasMore": False}
    assert await listed("?after=n5") == {"items": [], "hasMore": False}
    digits = hashlib.sha256(ROWS).hexdigest()[:16]
    assert await listed("?limit=2&hashes=true") == {
        "items": ["n1", "n2"], "hashes": [digits] * 2, "hasMore": True
    }  # fmt: skip


async def test_a_list_ends_before_what_may_still_come_to_light(
    start: Start, session: aiohttp.ClientSession
) -> None:
    keeping = Keeping()
    browser = Browser(await start({"collections": [EVENTS]}, plugins=[keeping]), session)
    for _ in range(4):
        await browser.push("in/web/x", {})
    for hidden, items, has_more in (
        ("n3", ["n1", "n2"], False),
        ("n2~", ["n1", "n2"], False),
        ("n1", [], False),
        ("n9", ["n1", "n2", "n3"], True),
    ):
        keeping.hidden = hidden
        answer = await browser.request("GET", "/list/in/web?limit=3")
        assert answer.json == {"items": items, "hasMore": has_more}, hidden


async def test_write_that_begins_during_a_list_ends_it_too(
    start: Start, session: aiohttp.ClientSession
) -> None:
    keeping = Keeping()

    class Meanwhile(MemoryStore):
        async def list(self, parent: str, after: str | None, limit: int) -> list[str]:
            found = await super().list(parent, after, limit)
            keeping.hidden = "n2"
            return found

    browser = Browser(await start({"collections": [EVENTS]}, Meanwhile(), plugins=[keeping]), session)
    for _ in range(3):
        await browser.push("in/web/x", {})
    keeping.hidden = None
    assert (await browser.request("GET", "/list/in/web")).json["items"] == ["n1"]


async def test_write_is_announced_with_the_parameters_of_the_plugin(
    start: Start, session: aiohttp.ClientSession
) -> None:
    for announces in (True, False):
        plugin, keeping = NotifiedPlugin(), Keeping(announces=announces)
        browser = Browser(await start({"collections": [EVENTS]}, plugins=[keeping, plugin]), session)
        log = keeping.services.outbox.log
        before = await log.last_id()
        answer = await browser.push("in/web/x", {"n": 1})
        found = await log.read(before, 10)
        assert found is not None
        ((_, change),) = found  # once, whoever announced it
        ref, hash_, *_ = parse_change(change)
        assert (ref.params, hash_) == ({"app": "web", "id": "n1"}, answer.json["hash"])
        assert plugin.events[0].params == {"app": "web", "id": "n1"}
        assert plugin.events[0].body == {"n": 1}


async def test_a_push_says_under_what_its_repetition_is_known(
    start: Start, session: aiohttp.ClientSession
) -> None:
    keeping = Keeping()
    browser = Browser(await start({"collections": [EVENTS]}, plugins=[keeping]), session)
    for key, headers in (("a", {"Idempotency-Key": "k"}), ("a", {"Idempotency-Key": "k"}), ("a", {})):
        assert (await browser.push(f"in/web/{key}", {}, headers=headers)).status == 200
    one, again, other = (push.request_key for push in keeping.pushes)
    assert one is not None
    assert (one, other) == (again, None)
    rejected = await browser.push("in/web/a", {}, headers={"Idempotency-Key": "k" * 129})
    assert rejected.status == 400


async def test_a_batch_does_not_read_them(start: Start, session: aiohttp.ClientSession) -> None:
    browser = Browser(await start({"collections": [EVENTS]}, plugins=[Keeping()]), session)
    await browser.push("in/web/x", {})
    entries = await batch(browser, events=[{"app": "web", "id": "n1"}])
    assert entries == {"events": [{"error": "Collection not found"}]}


async def test_they_are_swept_when_they_have_outlived_the_collection(
    start: Start, session: aiohttp.ClientSession, store: Store, clock: Any
) -> None:
    short = {**EVENTS, "ttlMs": 1000}
    base = await start({"collections": [short]}, store, plugins=[Keeping()], now_ms=clock)
    browser = Browser(base, session)
    await browser.push("in/web/x", {})
    await store.write("out/web/n1.other", _chunks(), "x/y")
    clock.now_ms += 2000
    assert (await browser.pull("in/web/n1")).json["hash"] == ""
    (app,) = start.apps  # type: ignore[attr-defined]
    await app.jobs.ttl_sweeper.sweep()
    assert await store.list("out/web", None, 10) == ["n1.other"]


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ({"events": "out/{app}/{id}"}, "must be a mapping of names of collections to StoredFiles"),
        ([], "must be a mapping"),
        ({"event": FileBackedCollection("out/{app}/{id}")}, "there is no collection 'event'"),
        ({"log": FileBackedCollection("out/{id}")}, "'log' is a log, or in a bundle"),
        ({"cards": FileBackedCollection("out/{id}")}, "'cards' is a log, or in a bundle"),
        ({"events": FileBackedCollection("out/{day}/{id}")}, "'events' has no path parameter {day}"),
        (
            {"events": FileBackedCollection("out/{id}/{app}")},
            "'events' is listable: the template must end in {id}",
        ),
        (
            {"events": FileBackedCollection("out//{id}")},
            "the template of 'events' must not hold an empty segment",
        ),
    ],
)
def test_files_that_do_not_fit_their_collection_are_rejected_at_the_start(stored: Any, said: str) -> None:
    class Odd:
        name = "odd"
        stored_files = stored

    settings = config.parse({"collections": [EVENTS, LOG, CARDS]})
    with pytest.raises(ConfigError) as caught:
        load_plugins(settings, [Odd()])
    assert said in str(caught.value)


def test_two_plugins_cannot_keep_the_files_of_one_collection() -> None:
    other = Keeping()
    other.name = "other"
    with pytest.raises(ConfigError) as caught:
        load_plugins(config.parse({"collections": [EVENTS]}), [Keeping(), other])
    assert "keeps the files of 'events' already" in str(caught.value)
