"""Deletes: what is deleted is as if it had never been, on every path."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.clients import ISSUER, STRANGER, SUBJECT, Browser, Reply, Signed, Start, root_device
from support.collections import LOG, NOTES, OWN, collection, limit_of
from support.sse_client import listen

from pysync.errors import Forbidden
from pysync.plugins import PluginPush, PluginRequest, PushResponse, WriteEvent
from pysync.store import Store
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore

LISTED = {**NOTES, "deletable": True, "listable": True}
PICS = collection("pics", allowedMimeTypes=["image/png"], deletable=True)
LOGS = {**LOG, "deletable": True, "listable": True}
MIXED = collection("mixed", allowedMimeTypes=["image/png", "application/json"], deletable=True)
TITLES = {"source": "notes", "target": "titles", "id": "{id}", "value": {"title": "/title"}}
COLLECTIONS = [LISTED, PICS, LOGS, MIXED, collection("titles", "titles", pullOnly=True)]
PNG = {"Content-Type": "image/png"}


async def delete(browser: Browser, key: str, base: str, **headers: str) -> Reply:
    return await browser.request("DELETE", f"/push/{key}?baseHash={base}", headers=headers)


@pytest.fixture(params=["memory", "local"])
async def kept(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    local = request.param == "local"
    store: Store = await LocalStore.open_folder(tmp_path / "data") if local else MemoryStore()
    yield store
    await store.close()


@pytest.fixture
async def anybody(start: Start, session: aiohttp.ClientSession, kept: Store) -> Browser:
    members = {"collections": COLLECTIONS, "projections": [TITLES]}
    return Browser(await start(members, kept), session)


async def test_a_deleted_document_is_as_one_that_never_was(anybody: Browser) -> None:
    never = (await anybody.pull("notes/b")).json
    hash_ = (await anybody.push("notes/a", {"n": 1})).json["hash"]
    reply = await delete(anybody, "notes/a", hash_)
    assert (reply.status, reply.json["hash"]) == (200, "")
    assert {**(await anybody.pull("notes/a")).json, "timestamp": 0} == {**never, "timestamp": 0}
    assert (await anybody.request("GET", "/list/notes")).json["items"] == []
    batch = (await anybody.request("GET", '/batch/pull?collections=notes&params={"notes":[{"id":"a"}]}')).json
    assert batch["collections"]["notes"][0]["hash"] == ""
    assert (await anybody.push("notes/a", {"n": 2}, hash_)).json["currentHash"] == ""
    assert (await anybody.push("notes/a", {"n": 2})).status == 200


async def test_a_delete_names_the_version_that_it_removes(anybody: Browser) -> None:
    first = (await anybody.push("notes/a", {"n": 1})).json["hash"]
    second = (await anybody.push("notes/a", {"n": 2}, first)).json["hash"]
    for base in (first, "", "0" * 64):
        reply = await delete(anybody, "notes/a", base)
        assert (reply.status, reply.json["currentHash"]) == (409, second)
    assert (await anybody.request("DELETE", "/push/notes/a")).error[0] == 400
    assert (await anybody.pull("notes/a")).json["hash"] == second
    assert (await delete(anybody, "notes/a", second)).status == 200
    reply = await delete(anybody, "notes/a", second)
    assert (reply.status, reply.json["currentHash"]) == (409, "")


async def test_of_a_push_and_a_delete_over_one_version_one_wins(anybody: Browser) -> None:
    for n in range(10):
        hash_ = (await anybody.push(f"notes/{n}", {"n": 1})).json["hash"]
        pushed, deleted = await asyncio.gather(
            anybody.push(f"notes/{n}", {"n": 2}, hash_), delete(anybody, f"notes/{n}", hash_)
        )
        assert sorted((pushed.status, deleted.status)) == [200, 409]
        assert ((await anybody.pull(f"notes/{n}")).json["hash"] == "") == (deleted.status == 200)


async def test_a_repeated_delete_gets_the_same_answer(anybody: Browser) -> None:
    hash_ = (await anybody.push("notes/a", {"n": 1})).json["hash"]
    once = {"Idempotency-Key": "k"}
    assert [(await delete(anybody, "notes/a", hash_, **once)).status for _ in range(2)] == [200, 200]
    assert (await delete(anybody, "notes/a", hash_)).status == 409


async def test_a_rejected_delete_leaves_no_claim(anybody: Browser) -> None:
    once = {"Idempotency-Key": "k"}
    hash_ = hashlib.sha256(b'{"n":1}').hexdigest()
    assert (await delete(anybody, "notes/a", hash_, **once)).status == 409
    assert (await delete(anybody, "notes/a", hash_, **once)).status == 409


async def test_files_are_deleted_by_their_sha256(anybody: Browser) -> None:
    for key in ("pics/a", "mixed/a"):
        await anybody.request("POST", f"/push/{key}", b"png", PNG)
        etag = (await anybody.pull(key)).headers["ETag"].strip('"')
        assert etag == hashlib.sha256(b"png").hexdigest()
        assert (await delete(anybody, key, "0" * 64)).json["currentHash"] == etag
        assert (await delete(anybody, key, etag)).status == 200
        assert (await anybody.pull(key)).json["hash"] == ""
    document = (await anybody.push("mixed/a", {"n": 1})).json["hash"]
    assert (await delete(anybody, "mixed/a", document)).status == 200


async def test_a_deleted_log_leaves_nothing(anybody: Browser, kept: Store) -> None:
    before = {entry.key async for entry in kept.walk("")}
    for n in range(30):
        await anybody.request("POST", "/push/log/a", {"data": {"n": n, "text": "x" * 1000}})
    stale = (await anybody.pull("log/a?last=1")).json["hash"]
    await anybody.request("POST", "/push/log/a", {"data": {"n": 30}})
    hash_ = (await anybody.pull("log/a?last=1")).json["hash"]
    assert len({entry.key async for entry in kept.walk("")} - before) > 2, "it has segments"
    assert (await delete(anybody, "log/a", stale)).json["currentHash"] == hash_
    assert (await delete(anybody, "log/a", hash_)).status == 200
    assert (await anybody.pull("log/a?full=1")).json["data"] == {"items": []}
    assert (await anybody.request("GET", "/list/log")).json["items"] == []
    await anybody.request("POST", "/push/log/a", {"data": {"n": "new"}})
    items = (await anybody.pull("log/a?full=1")).json["data"]["items"]
    assert [item["data"] for item in items] == [{"n": "new"}]
    hash_ = (await anybody.pull("log/a?last=1")).json["hash"]
    assert (await delete(anybody, "log/a", hash_)).status == 200


async def test_its_segments_go_after_its_head(
    start: Start, session: aiohttp.ClientSession, kept: Store
) -> None:
    anybody = Browser(await start({"collections": [LOGS]}, kept), session)
    for n in range(30):
        await anybody.request("POST", "/push/log/a", {"data": {"n": n, "text": "x" * 1000}})
    hash_ = (await anybody.pull("log/a?last=1")).json["hash"]
    assert (await delete(anybody, "log/a", hash_)).status == 200
    (app,) = start.apps  # type: ignore[attr-defined]
    await app.engine.logs.close()
    assert [entry.key async for entry in kept.walk("") if "log" in entry.key] == []


async def test_a_removal_is_announced(anybody: Browser) -> None:
    stream = await listen(anybody, collections="notes,pics,log")
    hash_ = (await anybody.push("notes/a", {"n": 1})).json["hash"]
    assert (await stream.event()).data["hash"] == hash_
    reply = await delete(anybody, "notes/a", hash_)
    event = (await stream.event()).data
    removal = {"collection": "notes", "params": {"id": "a"}, "hash": "", "removed": True}
    assert event == {**removal, "timestamp": reply.json["timestamp"]}
    again = (await anybody.push("notes/a", {"n": 2})).json["hash"]
    event = (await stream.event()).data
    assert (event["hash"], "removed" in event) == (again, False)
    await stream.close()


async def test_its_entry_leaves_the_lists(anybody: Browser) -> None:
    async def titles() -> list[str]:
        data = (await anybody.pull("titles")).json["data"]
        return [entry["id"] for entry in data.get("items", [])]

    stream = await listen(anybody, collections="titles")
    hashes = {name: (await anybody.push(f"notes/{name}", {"title": name})).json["hash"] for name in "abc"}
    while await titles() != ["a", "b", "c"]:
        await stream.event()
    await delete(anybody, "notes/b", hashes["b"])
    while await titles() != ["a", "c"]:
        await stream.event()
    await anybody.push("notes/b", {"title": "again"})
    while await titles() != ["a", "c", "b"]:
        await stream.event()
    await stream.close()


async def test_only_a_deletable_collection_has_the_route(
    start: Start, session: aiohttp.ClientSession
) -> None:
    anybody = Browser(await start({"collections": [NOTES, PICS]}), session)
    reply = await delete(anybody, "notes/a", "0" * 64)
    assert (reply.status, reply.headers["Allow"]) == (405, "POST")
    reply = await anybody.request("GET", "/push/pics/a")
    assert reply.headers["Allow"] == "DELETE, POST"


async def test_pages_of_other_origins_may_delete_where_they_may_call(
    start: Start, session: aiohttp.ClientSession
) -> None:
    settings = {"collections": [LISTED], "server": {"cors": {"origins": ["https://app.example"]}}}
    anybody = Browser(await start(settings), session)
    headers = {"Origin": "https://app.example", "Access-Control-Request-Method": "DELETE"}
    reply = await anybody.request("OPTIONS", "/push/notes/a", headers=headers)
    assert reply.headers["Access-Control-Allow-Methods"] == "DELETE, POST"


def signed(base: str, session: aiohttp.ClientSession, keys: Any) -> Signed:
    return Signed(base, session, keys, root_device(keys))


async def test_delete_needs_a_delete_role(start: Start, session: aiohttp.ClientSession) -> None:
    mine = collection("mine", "u/{identity}/{id}", **OWN, deletable=True)
    guarded = collection("guarded", **{**OWN, "writeRoles": ["public"]}, requireAuth=True)
    guarded |= {"deletable": True, "deleteRoles": ["keeper"], "readRoles": ["public"]}
    auth = {"identityRoles": {ISSUER.user_id: ["keeper"]}}
    base = await start({"collections": [mine, guarded], "auth": auth})
    keeper, other = signed(base, session, ISSUER), signed(base, session, SUBJECT)
    key = f"u/{SUBJECT.user_id}/a"
    hash_ = (await other.push(key, {"n": 1})).json["hash"]
    assert (await delete(keeper, key, hash_)).status == 403
    assert (await delete(Browser(base, session), key, hash_)).status == 401
    assert (await delete(other, key, hash_)).status == 200
    hash_ = (await other.push("guarded/a", {"n": 1})).json["hash"]
    assert (await delete(other, "guarded/a", hash_)).status == 403
    assert (await delete(keeper, "guarded/a", hash_)).status == 200


async def test_a_delete_counts_as_a_push_and_is_restricted_as_one(
    start: Start, session: aiohttp.ClientSession
) -> None:
    limited = {**LISTED, "rateLimit": limit_of(2)}
    denied = collection("denied", deletable=True, requireAuth=True)
    denied |= {"restrictions": {"mode": "deny", "identities": [SUBJECT.user_id], "actions": ["push"]}}
    base = await start({"collections": [limited, denied]})
    anybody = Browser(base, session)
    hash_ = (await anybody.push("notes/a", {"n": 1})).json["hash"]
    assert (await delete(anybody, "notes/a", hash_)).status == 200
    assert (await delete(anybody, "notes/a", hash_)).status == 429
    hash_ = (await signed(base, session, ISSUER).push("denied/a", {})).json["hash"]
    assert (await delete(signed(base, session, SUBJECT), "denied/a", hash_)).status == 403
    assert (await delete(signed(base, session, ISSUER), "denied/a", hash_)).status == 200


async def test_fields_that_a_caller_may_not_write_keep_it_from_deleting(
    start: Start, session: aiohttp.ClientSession
) -> None:
    fields = {"secret": {"readRoles": ["chief"]}, "locked": {"writeRoles": ["chief"]}}
    hiding = collection("hiding", deletable=True, fieldPermissions={"secret": fields["secret"]})
    locking = collection("locking", deletable=True, fieldPermissions={"locked": fields["locked"]})
    logs = collection("logs", deletable=True, fieldPermissions={"secret": fields["secret"]},
                      appendOnly={"requireAuthorSignature": False})  # fmt: skip
    members = [{**each, "requireAuth": True} for each in (hiding, locking, logs)]
    auth = {"identityRoles": {ISSUER.user_id: ["chief"]}}
    base = await start({"collections": members, "auth": auth})
    chief, other = signed(base, session, ISSUER), signed(base, session, STRANGER)
    plain = (await chief.push("hiding/a", {"n": 1, "secret": 2})).json["hash"]
    keyed = (await other.pull("hiding/a")).json["hash"]
    assert keyed != plain
    assert (await delete(other, "hiding/a", plain)).json["currentHash"] == keyed
    once = {"Idempotency-Key": "k"}
    assert [(await delete(other, "hiding/a", keyed, **once)).status for _ in range(2)] == [200, 200]
    hash_ = (await chief.push("locking/a", {"n": 1})).json["hash"]
    assert (await delete(other, "locking/a", hash_)).json["error"].startswith('Forbidden: field "locked"')
    assert (await delete(chief, "locking/a", hash_)).status == 200
    await chief.request("POST", "/push/logs/a", {"data": {"n": 1, "secret": 2}})
    plain = (await chief.pull("logs/a?last=1")).json["hash"]
    keyed = (await other.pull("logs/a?last=1")).json["hash"]
    assert (await delete(other, "logs/a", plain)).json["currentHash"] == keyed
    assert (await delete(other, "logs/a", keyed)).status == 200


async def test_a_damaged_document_is_deleted_by_an_empty_base(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = MemoryStore()
    anybody = Browser(await start({"collections": [LISTED]}, store), session)
    await store.put("notes/a", b"{")
    assert (await anybody.pull("notes/a")).status == 500
    assert (await delete(anybody, "notes/a", "0" * 64)).json["currentHash"] == ""
    assert (await delete(anybody, "notes/a", "")).status == 200
    assert (await anybody.pull("notes/a")).json["hash"] == ""
    assert (await delete(anybody, "notes/a", "")).status == 200, "nothing is stored, as the base says"


class Guard:
    """Guards pushes; `sees` is what it was asked about."""

    name = "guard"

    def __init__(self) -> None:
        self.sees: list[str] = []

    async def intercept_push(self, push: PluginPush) -> PushResponse | None:
        self.sees.append(f"push {push.request.key}")
        return None


class DeleteGuard(Guard):
    async def before_delete(self, request: PluginRequest) -> None:
        self.sees.append(f"{request.action} {request.key}")
        if request.key == "notes/kept":
            raise Forbidden


class RoleGuard:
    name = "roles"

    async def authorize(self, request: PluginRequest) -> list[str]:
        if request.action == "push" and request.key == "notes/kept":
            raise Forbidden
        return []


@pytest.mark.parametrize("make", [DeleteGuard, RoleGuard])
async def test_a_delete_does_not_evade_a_plugin_that_guards_writes(
    start: Start, session: aiohttp.ClientSession, make: Callable[[], object]
) -> None:
    store, plugin = MemoryStore(), make()
    anybody = Browser(await start({"collections": [LISTED]}, store), session)
    hashes = [(await anybody.push(f"notes/{name}", {"n": 1})).json["hash"] for name in ("kept", "free")]
    guarded = Browser(await start({"collections": [LISTED]}, store, plugins=[plugin]), session)
    assert (await delete(guarded, "notes/kept", hashes[0])).status == 403
    assert (await delete(guarded, "notes/free", hashes[1])).status == 200
    if isinstance(plugin, Guard):
        assert plugin.sees == ["push notes/kept", "push notes/free"]


async def test_a_plugin_that_knows_pushes_and_not_deletes_has_them_rejected(
    start: Start, session: aiohttp.ClientSession
) -> None:
    anybody = Browser(await start({"collections": [LISTED]}, plugins=[Guard()]), session)
    hash_ = (await anybody.push("notes/a", {"n": 1})).json["hash"]
    assert (await delete(anybody, "notes/a", hash_)).status == 403


class Index:
    """Sees what is written and deleted."""

    name = "index"

    def __init__(self) -> None:
        self.sees: list[WriteEvent] = []

    async def after_write(self, event: WriteEvent) -> None:
        self.sees.append(event)

    async def after_delete(self, event: WriteEvent) -> None:
        self.sees.append(event)


async def test_plugin_sees_the_deleted_document(
    start: Start, session: aiohttp.ClientSession, kept: Store
) -> None:
    index = Index()
    secret = {**LISTED, "fieldPermissions": {"secret": {"readRoles": ["owner"]}}}
    members = {"collections": [secret, PICS, LOGS]}
    anybody = Browser(await start(members, kept, plugins=[index]), session)
    await anybody.push("notes/a", {"n": 1})
    version = (await anybody.pull("notes/a")).json["hash"]
    await anybody.request("POST", "/push/pics/a", b"png", PNG)
    await anybody.request("POST", "/push/log/a", {"data": {"n": 1}})
    log = (await anybody.pull("log/a?last=1")).json["hash"]
    written, index.sees = index.sees, []
    assert version != written[0].hash, "the caller gets a version of its own"
    picture = hashlib.sha256(b"png").hexdigest()
    reply = await delete(anybody, "notes/a", version)
    for key, hash_ in (("pics/a", picture), ("log/a", log)):
        assert (await delete(anybody, key, hash_)).status == 200
        assert (await delete(anybody, key, hash_)).status == 409
    assert [(each.collection, each.params, each.hash, each.removed, each.body) for each in index.sees] == [
        ("notes", {"id": "a"}, written[0].hash, True, None),
        ("pics", {"id": "a"}, picture, True, None),
        ("log", {"id": "a"}, log, True, None),
    ]
    assert index.sees[0].timestamp == reply.json["timestamp"]


async def test_repeated_delete_has_the_same_answer(
    start: Start, session: aiohttp.ClientSession, kept: Store
) -> None:
    index = Index()
    anybody = Browser(await start({"collections": [LISTED]}, kept, plugins=[index]), session)
    hash_ = (await anybody.push("notes/a", {"n": 1})).json["hash"]
    for _ in range(2):
        assert (await delete(anybody, "notes/a", hash_, **{"Idempotency-Key": "k"})).status == 200
    assert [(each.hash, each.removed) for each in index.sees[1:]] == [(hash_, True)] * 2


async def test_an_expired_document_is_not_there_to_be_deleted(
    start: Start, session: aiohttp.ClientSession
) -> None:
    now = [1_000_000_000_000]
    members = {"collections": [{**LISTED, "ttlMs": 1000}]}
    anybody = Browser(await start(members, now_ms=lambda: now[0]), session)
    hash_ = (await anybody.push("notes/a", {"n": 1})).json["hash"]
    now[0] += 1001
    assert (await delete(anybody, "notes/a", hash_)).json["currentHash"] == ""


async def test_a_bundle_loses_the_member(start: Start, session: aiohttp.ClientSession) -> None:
    cards = collection("cards", "board/{id}", bundle="board", deletable=True)
    anybody = Browser(await start({"collections": [cards]}), session)
    hash_ = (await anybody.push("board/a/cards", {"n": 1})).json["hash"]
    assert (await delete(anybody, "board/a/cards", hash_)).status == 200
    assert (await anybody.pull("board/a")).json["collections"]["cards"] == {"data": {}, "hash": ""}
