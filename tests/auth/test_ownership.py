"""A key belongs to one collection: no way of reading leads around that collection's roles."""

import json
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clients import SUBJECT, Browser, Signed, Start, root_device

from pysync import _core
from pysync.config.key_templates import KeyTemplate
from pysync.store.memory import MemoryStore

OPEN = {"readRoles": ["public"]}
CLOSED = {"readRoles": ["admin"]}
ADMIN = {"Authorization": "Bearer token-of-the-tests"}


def stored(data: dict[str, Any]) -> bytes:
    return _core.decode_push(json.dumps({"data": data}).encode()).stored(1)


async def service(
    start: Start, session: aiohttp.ClientSession, store: MemoryStore, *collections: dict[str, Any]
) -> Browser:
    members = {"auth": {"adminToken": "token-of-the-tests"}, "collections": list(collections)}
    return Browser(await start(members, store=store), session)


@pytest.mark.parametrize(
    ("wide", "narrow", "params", "key"),
    [
        ("docs/{id}", "docs/secret", {"id": "secret"}, "docs/secret"),
        ("s/{space}/{doc}", "s/{space}/_access", {"space": "a", "doc": "_access"}, "s/a/_access"),
        ("vault/{a}/{b}", "vault/{id}/_x", {"a": "1", "b": "_x"}, "vault/1/_x"),
        ("{a}/{b}", "pay/{id}", {"a": "pay", "b": "x"}, "pay/x"),
    ],
)
async def test_a_batch_reads_no_key_of_another_collection(
    start: Start, session: aiohttp.ClientSession, wide: str, narrow: str, params: dict[str, str], key: str
) -> None:
    store = MemoryStore()
    await store.put(key, stored({"secret": 1}))
    browser = await service(
        start,
        session,
        store,
        {"name": "wide", "storagePath": wide, **OPEN},
        {"name": "narrow", "storagePath": narrow, **CLOSED},
    )
    assert (await browser.pull(key)).status == 401
    query = f"collections=wide&params={json.dumps({'wide': [params]}, separators=(',', ':'))}"
    answer = await browser.request("GET", f"/batch/pull?{query}")
    assert answer.json == {"collections": {"wide": [{"error": "Forbidden"}]}}
    assert (await browser.pull(key, ADMIN)).json["data"] == {"secret": 1}


async def test_a_list_names_no_key_of_another_collection(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = MemoryStore()
    for key in ("pay/alice", "team/bob", "team/carol"):
        await store.put(key, stored({}))
    browser = await service(
        start,
        session,
        store,
        {"name": "any", "storagePath": "{space}/{doc}", "listable": True, **OPEN},
        {"name": "pay", "storagePath": "pay/{id}", **CLOSED},
        {"name": "bob", "storagePath": "team/bob", **CLOSED},
    )
    assert (await browser.request("GET", "/list/pay")).json == {"items": [], "hasMore": False}
    assert (await browser.request("GET", "/list/team")).json == {"items": ["carol"], "hasMore": False}


async def test_a_bundle_holds_no_key_of_another_collection(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = MemoryStore()
    for key in ("b/secret/mem", "b/plain/mem"):
        await store.put(key, stored({"n": 1}))
    browser = await service(
        start,
        session,
        store,
        {"name": "mem", "storagePath": "b/{x}", "bundle": "b", **OPEN},
        {"name": "lit", "storagePath": "b/secret/mem", **CLOSED},
    )
    assert (await browser.pull("b/secret")).json["collections"] == {}
    assert (await browser.pull("b/plain")).json["collections"]["mem"]["data"] == {"n": 1}


@pytest.mark.parametrize(
    "more",
    [{"fieldPermissions": {"pay": {"readRoles": ["admin"]}}}, {"requireAuth": True}],
)
async def test_a_batch_that_depends_on_the_caller_is_not_cached_for_all(
    start: Start, session: aiohttp.ClientSession, more: dict[str, Any]
) -> None:
    notes = {"name": "notes", "storagePath": "notes/{id}", "cacheDurationMs": 60_000, **OPEN, **more}
    browser = await service(start, session, MemoryStore(), notes)
    query = 'collections=notes&params={"notes":[{"id":"a"}]}'
    answer = await browser.request("GET", f"/batch/pull?{query}", headers=ADMIN)
    assert answer.headers["Cache-Control"] == "private, max-age=60"


async def test_a_batch_filled_in_with_the_caller_is_not_cached_for_all(
    start: Start, session: aiohttp.ClientSession
) -> None:
    own = {"name": "own", "storagePath": "own/{identity}", "cacheDurationMs": 60_000, **OPEN}
    store = MemoryStore()
    await store.put(f"own/{SUBJECT.user_id}", stored({}))
    base = (await service(start, session, store, own)).base
    caller = Signed(base, session, SUBJECT, root_device(SUBJECT))
    answer = await caller.request("GET", "/batch/pull?collections=own")
    assert answer.json["collections"]["own"][0]["data"] == {}
    assert answer.headers["Cache-Control"] == "private, max-age=60"


async def test_document_unreadable_without_its_hidden_members_is_corrupt(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = MemoryStore()
    await store.put("notes/a", b'{"v":1,"ts":1,"hash":"' + b"ab" * 32 + b'","data":{"a":"\\ud800"}}')
    hidden = {"fieldPermissions": {"pay": {"readRoles": ["admin"]}}}
    browser = await service(
        start, session, store, {"name": "notes", "storagePath": "notes/{id}", **OPEN, **hidden}
    )
    assert (await browser.pull("notes/a")).error == (500, "document_corrupt")
    query = 'collections=notes&params={"notes":[{"id":"a"},{"id":"b"}]}'
    entries = (await browser.request("GET", f"/batch/pull?{query}")).json["collections"]["notes"]
    assert entries[0] == {"error": "document_corrupt"}
    assert entries[1]["hash"] == ""


async def test_a_certificate_of_many_denies_is_rejected(start: Start, session: aiohttp.ClientSession) -> None:
    from pysync.auth import issuing

    mine = {"name": "mine", "storagePath": "u/{identity}", "readRoles": ["self"]}
    base = (await service(start, session, MemoryStore(), mine)).base
    for count, status in ((64, 200), (65, 401)):
        grant = issuing.Grant(("read",), ("**", *["!*~"] * count))
        caller = Signed(base, session, SUBJECT, root_device(SUBJECT, grant=grant))
        assert (await caller.pull(f"u/{SUBJECT.user_id}")).status == status


segments = st.sampled_from(["a", "b", "{x}", "{y}"])
templates = st.lists(segments, min_size=1, max_size=4).map("/".join)


@given(templates, templates)
def test_of_two_templates_at_most_one_wins_over_the_other(one: str, other: str) -> None:
    assert not (KeyTemplate(one).shadows(KeyTemplate(other)) and KeyTemplate(other).shadows(KeyTemplate(one)))
    if KeyTemplate(one).shadows(KeyTemplate(other)):
        key = "/".join(
            part if not part.startswith("{") else theirs if not theirs.startswith("{") else "v"
            for part, theirs in zip(one.split("/"), other.split("/"), strict=True)
        )
        assert KeyTemplate(one).matches(key)
        assert KeyTemplate(other).matches(key)
