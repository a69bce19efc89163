"""The roles that plugins give, on every route (docs/reference/protocol.md#roles)."""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import aiohttp
import pytest
from support.clients import ISSUER, STRANGER, SUBJECT, Signed, Start, minted_at, root_device
from support.loop_time import loop_time
from support.plugin_samples import NotifiedPlugin, Roles, batch, people
from support.sse_client import listen

from pysync import _core
from pysync.auth import issuing
from pysync.errors import Forbidden, NotFound
from pysync.plugins import PluginRequest
from pysync.store.memory import MemoryStore

EDITED = {"readRoles": ["editor"], "writeRoles": ["editor"]}
NOTES = {
    "name": "notes",
    "storagePath": "notes/{id}",
    "listable": True,
    **EDITED,
    "fieldPermissions": {"price": {"readRoles": ["seller"], "writeRoles": ["seller"]}},
}
LOG = {
    "name": "log",
    "storagePath": "log/{id}",
    **EDITED,
    "appendOnly": {"requireAuthorSignature": False},
}
CARDS = {"name": "cards", "storagePath": "boards/{id}", "bundle": "board", **EDITED}
TITLE = {**CARDS, "name": "title"}
RINGS = {"name": "rings", "storagePath": "notes/{id}/_keyring", **EDITED}
MINE = {"name": "mine", "storagePath": "u/{identity}/{id}", "readRoles": ["self", "editor"]}
OPEN = {"name": "open", "storagePath": "open/{id}", "readRoles": ["public"], "writeRoles": ["public"]}
EVERYTHING = [NOTES, LOG, CARDS, TITLE, RINGS, MINE, OPEN]


async def test_roles_of_plugins_open_every_route(start: Start, session: aiohttp.ClientSession) -> None:
    roles = Roles({ISSUER.user_id: ["editor"]})
    editor, other, anyone = people(await start({"collections": EVERYTHING}, plugins=[roles]), session)
    keys = ("notes/a", "boards/b/cards", "notes/a/_keyring")
    for key in keys:
        assert (await editor.push(key, {"at": key})).status == 200
    assert (await editor.request("POST", "/push/log/l", {"data": {"n": 1}})).status == 200
    gets = ("/pull/notes/a", "/list/notes", "/pull/log/l?last=1", "/pull/notes/a/_keyring")
    for target in gets:
        assert (await editor.request("GET", target)).status == 200, target
        assert (await other.request("GET", target)).error == (403, "Forbidden")
        assert (await anyone.request("GET", target)).error == (401, "Unauthorized")
    for key in (*keys, "log/l"):
        assert (await other.push(key, {})).error == (403, "Forbidden")
        assert (await anyone.push(key, {})).error == (401, "Unauthorized")
    assert (await editor.pull("boards/b")).json["collections"].keys() == {"cards", "title"}
    assert (await other.pull("boards/b")).json["collections"] == {}
    assert (await editor.pull("notes/a?withKeyring=1")).json["keyring"]["data"] == {"at": keys[2]}
    wanted = {"notes": [{"id": "a"}, {"id": "b"}], "log": [{"id": "l"}]}
    found = await batch(editor, **wanted)
    assert [entry["data"] for entry in found["notes"]] == [{"at": "notes/a"}, {}]
    assert found["log"][0]["data"]["items"][0]["data"] == {"n": 1}
    for stranger in (other, anyone):
        rejected = await batch(stranger, **wanted)
        assert {entry["error"] for entries in rejected.values() for entry in entries} == {"Forbidden"}


async def test_plugin_receives_the_operation_in_advance(start: Start, session: aiohttp.ClientSession) -> None:
    roles = Roles({ISSUER.user_id: ["editor"]})
    members = {"collections": EVERYTHING, "namespaces": {"acme": {"collections": [NOTES]}}}
    editor, *_ = people(await start(members, plugins=[roles]), session)
    for method, target, action, collection, params, key in (
        ("GET", "/pull/notes/a", "pull", "notes", {"id": "a"}, "notes/a"),
        ("POST", "/push/notes/a", "push", "notes", {"id": "a"}, "notes/a"),
        ("GET", "/list/notes", "list", "notes", {}, "notes"),
        ("POST", "/push/log/l", "push", "log", {"id": "l"}, "log/l"),
        ("GET", "/pull/log/l?last=1", "pull", "log", {"id": "l"}, "log/l"),
        ("POST", "/push/boards/b/cards", "push", "cards", {"id": "b"}, "boards/b/cards"),
        ("GET", f"/pull/u/{ISSUER.user_id}/x", "pull", "mine", {"identity": ISSUER.user_id, "id": "x"},
         f"u/{ISSUER.user_id}/x"),
    ):  # fmt: skip
        body: dict[str, Any] | None = {"data": {}} if method == "POST" else None
        assert (await editor.request(method, target, body)).status == 200
        request = roles.queries.pop()
        assert (request.action, request.collection, request.params) == (action, collection, params)
        assert (request.key, request.namespace) == (key, None)
        assert request.caller.identity == ISSUER.user_id
        assert "editor" not in request.caller.roles
    await editor.request("GET", "/acme/pull/notes/a")
    assert roles.queries.pop().namespace == "acme"
    assert roles.queries == []
    await editor.pull("boards/b")
    assert [(request.collection, request.key) for request in roles.queries] == [
        ("cards", "boards/b/cards"),
        ("title", "boards/b/title"),
    ]


async def test_batch_authorizes_each_document_once(start: Start, session: aiohttp.ClientSession) -> None:
    roles = Roles({ISSUER.user_id: ["editor"]})
    editor, *_ = people(await start({"collections": EVERYTHING}, plugins=[roles]), session)
    found = await batch(editor, notes=[{"id": "a"}, {"id": "b"}, {"id": "a"}], open=[{"id": "a"}])
    assert len(found["notes"]) == 3
    assert sorted((request.params["id"], request.key) for request in roles.queries) == [
        ("a", "notes/a"),
        ("a", "open/a"),
        ("b", "notes/b"),
    ]
    roles.queries.clear()
    assert (await batch(editor, mine=[{"id": "x"}]))["mine"][0]["hash"] == ""
    assert roles.queries[0].params == {"identity": ISSUER.user_id, "id": "x"}


async def test_roles_of_plugins_admit_to_what_is_anothers(
    start: Start, session: aiohttp.ClientSession
) -> None:
    held = {ISSUER.user_id: ["editor"], SUBJECT.user_id: ["self", "cap:read:mine"]}
    mine = {**MINE, "readRoles": ["self", "editor", "cap:read:mine"]}
    base = await start({"collections": [mine]}, plugins=[Roles(held)])
    editor, other, _ = people(base, session)
    assert (await editor.pull(f"u/{STRANGER.user_id}/x")).status == 200
    assert (await other.pull(f"u/{ISSUER.user_id}/x")).error == (403, "Forbidden")
    third = Signed(base, session, SUBJECT, root_device(SUBJECT))
    assert (await third.pull(f"u/{ISSUER.user_id}/x")).error == (403, "Forbidden")


async def test_roles_of_plugins_see_and_write_fields(start: Start, session: aiohttp.ClientSession) -> None:
    held = {ISSUER.user_id: ["editor", "seller"], STRANGER.user_id: ["editor"]}
    seller, other, _ = people(await start({"collections": EVERYTHING}, plugins=[Roles(held)]), session)
    await seller.push("notes/a", {"n": 1, "price": 2})
    assert (await seller.pull("notes/a")).json["data"] == {"n": 1, "price": 2}
    assert (await other.pull("notes/a")).json["data"] == {"n": 1}
    assert (await batch(other, notes=[{"id": "a"}]))["notes"][0]["data"] == {"n": 1}
    base_hash = (await other.pull("notes/a")).json["hash"]
    rejected = await other.push("notes/a", {"n": 1, "price": 3}, base_hash)
    assert rejected.error == (403, 'Forbidden: field "price" requires roles: seller')


async def test_with_a_plugin_that_authorizes_credentials_are_examined_everywhere(
    start: Start, session: aiohttp.ClientSession
) -> None:
    for plugins, status in (([], 200), ([NotifiedPlugin()], 200), ([Roles({})], 401)):
        base = await start({"collections": [OPEN]}, plugins=plugins)
        editor, _, anyone = people(base, session)
        assert (await anyone.push("open/a", {})).status == 200
        assert (await anyone.pull("open/a")).status == 200
        assert (await editor.pull("open/a")).status == 200
        editor.tamper = lambda headers: headers.update({"X-Starfish-Sig": "A" * 86 + "=="})
        assert (await editor.pull("open/a")).status == status
        assert (await batch(editor, open=[{"id": "a"}]))["open"][0]["data"] == {}
        read = await anyone.pull("open/a")
        assert read.headers["Cache-Control"] == ("private, no-cache" if status == 401 else "no-cache")


class Refusing:
    name = "refusing"

    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def authorize(self, request: PluginRequest) -> Iterable[str]:
        if request.params.get("id") == "bad":
            raise self.error
        return ["editor"]


async def test_failed_authorization_is_rejected_and_not_remembered(
    start: Start, session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Refusing(RuntimeError("the directory is away"))
    base = await start({"collections": EVERYTHING}, plugins=[failing])
    editor, *_ = people(base, session)
    for target in ("/pull/notes/bad", "/pull/log/bad?last=1", "/pull/boards/bad"):
        answer = await editor.request("GET", target, headers={"X-Request-Id": "the-request"})
        assert answer.error == (500, "Authorization error")
    assert (await editor.push("notes/bad", {})).error == (500, "Authorization error")
    found = await batch(editor, notes=[{"id": "bad"}, {"id": "good"}])
    assert [entry.get("error") for entry in found["notes"]] == ["Authorization error", None]
    logged = [record for record in caplog.records if record.name == "pysync.plugins"]
    assert {record.getMessage() for record in logged} == {"plugin refusing: authorize failed"}
    assert logged[0].__dict__["request_id"] == "the-request"
    assert logged[0].exc_info is not None
    page = (await editor.request("GET", "/metrics")).body.decode()
    assert 'pysync_plugin_failures_total{hook="authorize",plugin="refusing"} 5.0' in page
    failing.error = Forbidden("not on Sundays")
    assert (await editor.pull("notes/bad")).error == (403, "not on Sundays")
    assert (await editor.pull("boards/bad")).json["collections"] == {}
    found = await batch(editor, notes=[{"id": "bad"}])
    assert found["notes"] == [{"error": "not on Sundays"}]
    assert (await editor.pull("notes/good")).status == 200


class Waiting:
    name = "waiting"

    async def authorize(self, request: PluginRequest) -> Iterable[str]:
        await asyncio.Event().wait()
        return ()


async def test_roles_that_take_too_long_are_unavailable(
    start: Start, session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    base = await start({"collections": EVERYTHING}, plugins=[Waiting()], hook_s=0)
    editor, *_ = people(base, session)
    for target in ("/pull/notes/a", "/list/notes", "/pull/boards/b"):
        late = await editor.request("GET", target)
        assert late.error == (503, "Unauthorized")
        assert int(late.headers["Retry-After"]) >= 1
    assert (await batch(editor, notes=[{"id": "a"}]))["notes"] == [{"error": "Authorization error"}]
    assert set(caplog.messages) >= {"plugin waiting: authorize took too long"}


@pytest.mark.parametrize("given", ["editor", None, [7], 7])
async def test_malformed_roles_are_a_failure(
    given: Any, start: Start, session: aiohttp.ClientSession
) -> None:
    roles = Roles({ISSUER.user_id: given})
    editor, *_ = people(await start({"collections": EVERYTHING}, plugins=[roles]), session)
    assert (await editor.pull("notes/a")).error == (500, "Authorization error")


async def test_the_roles_of_all_plugins_count(start: Start, session: aiohttp.ClientSession) -> None:
    one, two = Roles({ISSUER.user_id: ["seller"]}), Roles({ISSUER.user_id: ["editor"]})
    two.name = "two"
    editor, *_ = people(await start({"collections": EVERYTHING}, plugins=[one, two]), session)
    assert (await editor.push("notes/a", {"price": 1})).status == 200


async def test_plugins_see_the_roles_of_a_space(start: Start, session: aiohttp.ClientSession) -> None:
    roles = Roles({})
    plans = {"name": "plans", "storagePath": "spaces/{spaceId}/{id}", "readRoles": ["space:member"]}
    store = MemoryStore()
    access = {"data": {"owner": ISSUER.user_id}}
    await store.put("spaces/one/_access", _core.decode_push(json.dumps(access).encode()).stored(1))
    members = {"collections": [plans], "auth": {"spaces": {}}}
    editor, *_ = people(await start(members, store=store, plugins=[roles]), session)
    assert (await editor.pull("spaces/one/a")).status == 200
    assert "error" not in (await batch(editor, plans=[{"spaceId": "one", "id": "a"}]))["plans"][0]
    assert [request.caller.roles >= {"space:owner", "space:member"} for request in roles.queries] == [
        True
    ] * 2


async def test_a_scope_holds_whatever_roles_plugins_give(
    start: Start, session: aiohttp.ClientSession
) -> None:
    base = await start({"collections": EVERYTHING}, plugins=[Roles({SUBJECT.user_id: ["editor"]})])
    certificate = issuing.issue_member_certificate(
        ISSUER, SUBJECT.ed_pub, SUBJECT.kem_pub, "notes", grant=issuing.writer_grant("notes"), **minted_at()
    )
    member = Signed(base, session, SUBJECT, certificate)
    assert (await member.pull("notes/a")).status == 200
    assert (await member.pull("u/x/y")).error == (403, "Forbidden")
    found = await batch(member, notes=[{"id": "a"}], mine=[{"identity": "x", "id": "y"}])
    assert found["notes"][0]["hash"] == ""
    assert found["mine"] == [{"error": "Forbidden"}]


class Some:
    """Lets the issuer see the documents of one id."""

    name = "some"

    async def authorize(self, request: PluginRequest) -> Iterable[str]:
        if request.params["id"] == "refused":
            raise Forbidden
        is_seen = request.caller.identity == ISSUER.user_id and request.params["id"] == "seen"
        return ["editor"] if is_seen or request.action == "push" else []


async def test_stream_delivers_documents_that_plugins_let_the_caller_pull(
    start: Start, session: aiohttp.ClientSession
) -> None:
    editor, other, anyone = people(await start({"collections": EVERYTHING}, plugins=[Some()]), session)
    stream = await listen(editor, collections="notes,cards,open")
    silent = await listen(other, collections="notes,open")
    assert (stream.status, silent.status) == (200, 200)
    rejected = await listen(anyone, collections="notes")
    assert rejected.status == 401
    for key in ("notes/hidden", "notes/seen", "boards/hidden/cards", "boards/seen/cards", "open/any"):
        assert (await editor.push(key, {})).status == 200
    events = [(event["collection"], event["params"]["id"]) for event in await stream.events(3)]
    assert events == [("notes", "seen"), ("cards", "seen"), ("open", "any")]
    assert [event["collection"] for event in await silent.events(1)] == ["open"]
    for opened in (stream, silent, rejected):
        await opened.close()


class Undecided:
    """Refuses, fails or hangs where a stream asks for roles: `error` None hangs."""

    name = "undecided"

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    async def authorize(self, request: PluginRequest) -> Iterable[str]:
        if request.action == "pull" and request.params["id"] == "bad":
            if self.error is None:
                await asyncio.Event().wait()
            else:
                raise self.error
        return ["editor"]


@pytest.mark.parametrize("error", [RuntimeError("the directory is away"), None])
async def test_a_stream_that_plugins_cannot_decide_on_is_aborted(
    error: Exception | None, start: Start, session: aiohttp.ClientSession
) -> None:
    base = await start({"collections": EVERYTHING}, plugins=[Undecided(error)])
    editor, other, _ = people(base, session)
    streams = [await listen(someone, collections="notes") for someone in (editor, other, editor)]
    assert (await editor.push("notes/good", {})).status == 200
    for stream in streams:
        assert (await stream.event()).data["params"] == {"id": "good"}
    with loop_time() as time:
        assert (await editor.push("notes/bad", {})).status == 200
        for stream in streams:
            with pytest.raises((EOFError, ConnectionError)):
                await time.pass_until(asyncio.ensure_future(stream.event()), 0.1)
            await stream.close()


@pytest.mark.parametrize("error", [Forbidden(), NotFound()])
async def test_stream_omits_documents_that_plugins_reject(
    error: Exception, start: Start, session: aiohttp.ClientSession
) -> None:
    editor, *_ = people(await start({"collections": EVERYTHING}, plugins=[Undecided(error)]), session)
    stream = await listen(editor, collections="notes")
    for key in ("notes/bad", "notes/good"):
        assert (await editor.push(key, {})).status == 200
    assert (await stream.event()).data["params"] == {"id": "good"}
    await stream.close()
