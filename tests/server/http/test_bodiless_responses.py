"""HEAD and 304: no body is sent, and except for batches none is read for a version that is known."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
import pytest
from support.clients import Browser, Reply, Start
from support.watched_store import LOG, OPEN, Watched

from pysync.coordinator.memory import MemoryCoordinator
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore

COLLECTIONS = [
    {"name": "notes", "storagePath": "notes/{id}", **OPEN},
    {"name": "fading", "storagePath": "fading/{id}", "ttlMs": 1000, **OPEN},
    {"name": "log", "storagePath": "log/{id}", "appendOnly": LOG, **OPEN},
    {"name": "left", "storagePath": "board/{id}", "bundle": "board", **OPEN},
    {"name": "right", "storagePath": "board/{id}", "bundle": "board", **OPEN},
]
TARGETS = {
    "document": "/pull/notes/a",
    "log": "/pull/log/a?last=3",
    "long log": "/pull/log/b?full=1",
    "bundle": "/pull/board/a",
    "batch": "/batch/pull?"
    + urlencode(
        {
            "collections": "notes,log",
            "params": json.dumps({"notes": [{"id": "a"}, {"id": "none"}], "log": [{"id": "b"}]}),
            "appendParams": json.dumps({"log": [{"last": 30}]}),
        }
    ),
}


async def filled(start: Start, session: aiohttp.ClientSession, store: Any, **options: Any) -> Browser:
    browser = Browser(await start({"collections": COLLECTIONS}, store, **options), session)
    for key in ("notes/a", "board/a/left", "board/a/right"):
        assert (await browser.push(key, {"text": key * 1000})).status == 200
    for key, count in (("log/a", 5), ("log/b", 30)):
        for n in range(count):
            data = {"n": n, "text": "x" * 9000}
            assert (await browser.request("POST", f"/push/{key}", {"data": data})).status == 200
    return browser


@pytest.fixture
async def store() -> Watched:
    return Watched()


@pytest.fixture
async def browser(start: Start, session: aiohttp.ClientSession, store: Watched) -> Browser:
    return await filled(start, session, store)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
async def test_head_has_the_headers_of_get_but_no_length(browser: Browser, target: str) -> None:
    got, head = await browser.request("GET", target), await browser.request("HEAD", target)
    assert (got.status, head.status, head.body) == (200, 200, b"")
    for name in ("ETag", "Content-Type", "Cache-Control", "Vary"):
        assert head.headers[name] == got.headers[name]
    assert "Content-Length" not in head.headers
    assert "Transfer-Encoding" not in head.headers
    assert (await browser.request("GET", target)).status == 200, "the connection serves on"


@pytest.mark.parametrize("target", [target for name, target in TARGETS.items() if name != "batch"])
async def test_known_version_is_answered_without_reading_it(
    browser: Browser, store: Watched, target: str
) -> None:
    tag = (await browser.request("GET", target)).headers["ETag"]
    store.forget()
    for method, headers, status in (
        ("GET", {"If-None-Match": tag}, 304),
        ("HEAD", {"If-None-Match": tag}, 304),
        ("HEAD", {}, 200),
        ("HEAD", {"If-None-Match": '"other"'}, 200),
    ):
        answer = await browser.request(method, target, headers=headers)
        assert (answer.status, answer.body, answer.headers["ETag"]) == (status, b"", tag)
        assert [key for key in store.read if status == 304 or "/index" not in key] == []
    assert (await browser.request("GET", target, headers={"If-None-Match": '"other"'})).status == 200


async def revalidated(browser: Browser, target: str, tag: str) -> Reply:
    return await browser.request("GET", target, headers={"If-None-Match": tag})


@pytest.mark.parametrize("target", [TARGETS["document"], TARGETS["bundle"]])
async def test_a_version_that_another_process_wrote_is_read_once(
    start: Start, session: aiohttp.ClientSession, browser: Browser, store: Watched, target: str
) -> None:
    tag = (await browser.request("GET", target)).headers["ETag"]
    other = Browser(await start({"collections": COLLECTIONS}, store), session)
    assert (await revalidated(other, target, tag)).status == 304
    store.forget()
    assert (await revalidated(other, target, tag)).status == 304
    assert not [key for key in store.read if not key.startswith("log/")]


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
async def test_changed_document_is_never_answered_as_unchanged(
    start: Start, session: aiohttp.ClientSession, browser: Browser, store: Watched, target: str
) -> None:
    other = Browser(await start({"collections": COLLECTIONS}, store), session)
    tag = (await browser.request("GET", target)).headers["ETag"]
    assert (await revalidated(browser, target, tag)).status == 304
    for key in ("notes/a", "board/a/left"):
        base = (await other.pull("board/a")).json["collections"]["left"]["hash"]
        if key == "notes/a":
            base = (await other.pull(key)).json["hash"]
        assert (await other.push(key, {"other": 1}, base)).status == 200
    for key in ("log/a", "log/b"):
        assert (await other.request("POST", f"/push/{key}", {"data": {"n": -1}})).status == 200
    for method in ("HEAD", "GET"):
        answer = await browser.request(method, target, headers={"If-None-Match": tag})
        assert answer.status == 200
        assert answer.headers["ETag"] != tag


async def test_an_expired_document_is_missing_to_conditions_too(
    start: Start, session: aiohttp.ClientSession, store: Watched
) -> None:
    now = [1_800_000_000_000]
    browser = Browser(await start({"collections": COLLECTIONS}, store, now_ms=lambda: now[0]), session)
    assert (await browser.push("fading/a", {"n": 1})).status == 200
    query = {"collections": "fading", "params": json.dumps({"fading": [{"id": "a"}]})}
    batch = "/batch/pull?" + urlencode(query)
    tag = (await browser.pull("fading/a")).headers["ETag"]
    batch_tag = (await browser.request("GET", batch)).headers["ETag"]
    assert (await revalidated(browser, "/pull/fading/a", tag)).status == 304
    assert (await revalidated(browser, batch, batch_tag)).status == 304
    now[0] += 2000
    gone = await revalidated(browser, "/pull/fading/a", tag)
    assert (gone.status, gone.json["hash"]) == (200, "")
    assert "ETag" not in (await browser.request("HEAD", "/pull/fading/a")).headers
    assert (await revalidated(browser, batch, batch_tag)).json["collections"]["fading"][0]["hash"] == ""


async def test_a_corrupt_document_is_an_error_to_head_and_conditions(
    browser: Browser, store: Watched
) -> None:
    await store.put("notes/a", b'{"v":1,"data"')
    for method in ("HEAD", "GET"):
        for headers in ({}, {"If-None-Match": '"x"'}):
            assert (await browser.request(method, "/pull/notes/a", headers=headers)).status == 500


async def test_the_embedded_store_reports_versions_without_bodies(tmp_path: Path) -> None:
    store = await LocalStore.open_folder(tmp_path)
    try:
        etags = {
            key: await store.put(key, b"x" * size) for key, size in (("a/x", 5), ("a/y", 200_000), ("z", 0))
        }
        found = await store.info_many(["a/y", "none", "a/x", "z", "a/none"])
        assert found is not None
        assert {key: each and (each.etag, each.size) for key, each in found.items()} == {
            "a/y": (etags["a/y"], 200_000),
            "none": None,
            "a/x": (etags["a/x"], 5),
            "z": (etags["z"], 0),
            "a/none": None,
        }
    finally:
        await store.close()


async def test_write_of_another_process_is_answered_despite_a_known_earlier_version(
    start: Start, session: aiohttp.ClientSession
) -> None:
    notes = {"name": "notes", "storagePath": "notes/{id}", "readRoles": ["public"], "writeRoles": ["public"]}
    store, coordinator = MemoryStore(), MemoryCoordinator()
    one, other = [
        Browser(await start({"collections": [notes]}, store=store, coordinator=coordinator), session)
        for _ in range(2)
    ]
    batch = '/batch/pull?collections=notes&params={"notes":[{"id":"a"}]}'
    first = await one.push("notes/a", {"n": 1})
    for target in ("/pull/notes/a", batch):
        known = (await one.request("HEAD", target)).headers["ETag"]
        assert (await one.request("GET", target, headers={"If-None-Match": known})).status == 304
    batched = known
    second = await other.push("notes/a", {"n": 2}, first.json["hash"])
    assert (await one.request("GET", batch, headers={"If-None-Match": batched})).status == 200
    assert (await one.request("HEAD", "/pull/notes/a")).headers["ETag"] == f'"{second.json["hash"]}"'
