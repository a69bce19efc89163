"""Readers of a part of a document get a version from which the rest cannot be computed."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from support.clients import ISSUER, SUBJECT, Browser, Signed, Start, root_device
from support.collections import PUBLIC, UNSIGNED, collection
from support.plugin_samples import NotifiedPlugin
from support.sse_client import Listen
from support.store_samples import copy

from pysync import _core
from pysync.auth import signing
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine import documents
from pysync.errors import DocumentCorrupt, StoreUnavailable
from pysync.migrate import Damage, Verifier
from pysync.store import NotModified, StoredObject
from pysync.store.memory import MemoryStore

ADMIN = {"Authorization": "Bearer " + "t" * 32}
PAY = {"fieldPermissions": {"pay": {"readRoles": ["admin"], "writeRoles": ["admin"]}}}
STAFF = collection("staff", **PAY)
KEYRING = collection("keyrings", "staff/{id}/_keyring", **PAY)
CARDS = collection("cards", "boards/{id}", bundle="board", **PAY)
LOGS = collection("logs", appendOnly=UNSIGNED, **PAY)
SERVICE = {"auth": {"adminToken": "t" * 32}, "collections": [STAFF, KEYRING, CARDS, LOGS]}
BOB = {"name": "bob", "pay": 48211}


def true_hash(data: object) -> str:
    return _core.content_hash(json.dumps(data).encode())


@pytest.fixture
async def browser(start: Start, session: aiohttp.ClientSession) -> Browser:
    return Browser(await start(SERVICE), session)


async def test_no_answer_to_a_reader_who_misses_members_has_the_hash_of_the_document(
    browser: Browser,
) -> None:
    keys = ("staff/a", "staff/a/_keyring", "boards/a/cards")
    for key in keys:
        assert (await browser.push(key, BOB, None, ADMIN)).json["hash"] == true_hash(BOB)
    element = {"data": BOB}
    logged = (await browser.request("POST", "/push/logs/a", element, ADMIN)).json["hash"]
    assert logged == true_hash({"n": 1, "last": BOB})
    batch = "/batch/pull?collections=staff,logs&params=" + json.dumps(
        {"staff": [{"id": "a"}], "logs": [{"id": "a"}]}, separators=(",", ":")
    )
    batch += '&appendParams={"logs":[{"last":1}]}'
    for target in (
        "/pull/staff/a",
        "/pull/staff/a?withKeyring=1",
        "/pull/boards/a",
        "/pull/logs/a?last=1",
        batch,
    ):
        answer = await browser.request("GET", target)
        text = answer.body.decode() + str(answer.headers)
        assert "bob" in text, target
        assert true_hash(BOB) not in text, target
        assert logged not in text, target
        whole = await browser.request("GET", target, headers=ADMIN)
        assert true_hash(BOB) in whole.body.decode() or logged in whole.body.decode(), target
    rejected = await browser.push("staff/a", {"name": "eve"}, None)
    assert (rejected.status, rejected.json["currentHash"]) == (409, await version(browser, "staff/a"))


async def version(browser: Browser, key: str) -> str:
    """Return the version in the body of a pull and, except for logs, in its ETag."""
    answer = await browser.pull(key)
    version_of: str = answer.json["hash"]
    assert answer.headers["ETag"] == f'"{version_of}"'
    assert len(version_of) == 64
    assert set(version_of) <= set("0123456789abcdef")
    head = await browser.request("HEAD", f"/pull/{key}")
    assert head.headers["ETag"] == f'"{version_of}"'
    unchanged = await browser.pull(key, {"If-None-Match": f'"{version_of}"'})
    assert unchanged.status == 304
    return version_of


async def test_the_version_is_the_same_wherever_it_is_reported(browser: Browser, subscribe: Listen) -> None:
    stream = await subscribe(browser, collections="staff,cards,logs")
    await browser.push("staff/a", BOB, None, ADMIN)
    await browser.push("boards/a/cards", BOB, None, ADMIN)
    await browser.request("POST", "/push/logs/a", {"data": BOB}, ADMIN)
    hashes = [event["hash"] for event in await stream.events(3)]
    bundle = (await browser.pull("boards/a")).json["collections"]["cards"]["hash"]
    batch = "/batch/pull?collections=staff,logs&params=" + json.dumps(
        {"staff": [{"id": "a"}], "logs": [{"id": "a"}]}, separators=(",", ":")
    )
    found = (await browser.request("GET", batch + '&appendParams={"logs":[{"last":1}]}')).json["collections"]
    log = (await browser.pull("logs/a?last=1")).json["hash"]
    assert hashes == [await version(browser, "staff/a"), bundle, log]
    assert [found["staff"][0]["hash"], found["logs"][0]["hash"]] == [hashes[0], log]


async def test_reader_of_all_members_receives_the_true_hash(browser: Browser, subscribe: Listen) -> None:
    class Admin(Browser):
        def headers(self, method: str, target: str, body: bytes) -> dict[str, str]:
            return ADMIN

    admin = Admin(browser.base, browser.session)
    stream = await subscribe(admin, collections="staff")
    await browser.push("staff/a", BOB, None, ADMIN)
    assert [event["hash"] for event in await stream.events(1)] == [true_hash(BOB)]


async def test_a_push_names_the_version_as_its_base_and_is_answered_the_next(browser: Browser) -> None:
    await browser.push("staff/a", BOB, None, ADMIN)
    base = await version(browser, "staff/a")
    pushed = await browser.push("staff/a", {"name": "rob"}, base)
    assert pushed.status == 200
    assert pushed.json["hash"] == await version(browser, "staff/a") != base
    stale = await browser.push("staff/a", {"name": "eve"}, base)
    assert (stale.status, stale.json["currentHash"]) == (409, pushed.json["hash"])
    whole = await browser.pull("staff/a", ADMIN)
    assert whole.json["data"] == {"name": "rob", "pay": 48211}
    assert (await browser.push("staff/a", {"name": "ann"}, pushed.json["hash"])).status == 200


async def test_push_with_plugin_hooks_is_answered_with_the_version_too(
    start: Start, session: aiohttp.ClientSession
) -> None:
    browser = Browser(await start(SERVICE, plugins=[NotifiedPlugin()]), session)
    pushed = await browser.push("staff/a", {"name": "ann"}, None)
    assert pushed.json["hash"] == await version(browser, "staff/a")


async def test_append_is_answered_with_the_version_that_pulls_report(browser: Browser) -> None:
    appended = await browser.request("POST", "/push/logs/a", {"data": {"name": "ann"}})
    assert appended.status == 200
    assert appended.json["hash"] == (await browser.pull("logs/a?last=1")).json["hash"]
    assert appended.json["hash"] != true_hash({"n": 1, "last": {"name": "ann"}})


async def test_head_of_batches_and_bundles_has_the_readers_etag(
    browser: Browser,
) -> None:
    """Their ETags are made of versions: of hashes, they would verify guesses of what is hidden."""
    await browser.push("staff/a", BOB, None, ADMIN)
    target = '/batch/pull?collections=staff&params={"staff":[{"id":"a"}]}'
    head, whole = [await browser.request(method, target) for method in ("HEAD", "GET")]
    assert head.headers["ETag"] == whole.headers["ETag"]
    unchanged = await browser.request("GET", target, headers={"If-None-Match": whole.headers["ETag"]})
    assert unchanged.status == 304
    await browser.push("boards/a/cards", BOB, None, ADMIN)
    head, whole = [await browser.request(method, "/pull/boards/a") for method in ("HEAD", "GET")]
    assert head.headers["ETag"] == whole.headers["ETag"]
    seen = await browser.request("HEAD", "/pull/staff/a", headers=ADMIN)
    assert seen.headers["ETag"] == f'"{true_hash(BOB)}"'


async def test_a_guess_of_the_hash_is_no_base(browser: Browser) -> None:
    """Else each push would tell whether the guess is right."""
    await browser.push("staff/a", BOB, None, ADMIN)
    rejected = await browser.push("staff/a", {"name": "eve"}, true_hash(BOB))
    assert (rejected.status, rejected.json["currentHash"]) == (409, await version(browser, "staff/a"))
    assert (await browser.pull("staff/a", {"If-None-Match": f'"{true_hash(BOB)}"'})).status == 200


async def test_the_version_differs_between_documents_and_changes_with_hidden_members(
    browser: Browser,
) -> None:
    """A caller who may write a hidden member could try values there and compare."""
    for key in ("staff/a", "staff/b"):
        await browser.push(key, BOB, None, ADMIN)
    first = await version(browser, "staff/a")
    assert first != await version(browser, "staff/b")
    await browser.push("staff/a", {**BOB, "pay": 1}, true_hash(BOB), ADMIN)
    assert await version(browser, "staff/a") != first


async def test_nodes_and_restarts_report_the_same_version_and_stores_another(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    nodes = [Browser(await start(SERVICE, store=store, coordinator=coordinator), session) for _ in range(2)]
    await nodes[0].push("staff/a", BOB, None, ADMIN)
    first, second = [await version(node, "staff/a") for node in nodes]
    later = Browser(await start(SERVICE, store=store, coordinator=coordinator), session)
    assert first == second == await version(later, "staff/a")
    elsewhere = Browser(await start(SERVICE), session)
    await elsewhere.push("staff/a", BOB, None, ADMIN)
    assert await version(elsewhere, "staff/a") != first


async def test_a_copy_takes_the_secret_along_unless_there_is_one() -> None:
    source, target, other = MemoryStore(), MemoryStore(), MemoryStore()
    for store in (source, other):
        await documents.KeyedVersions(store, lambda: 1).load()
    kept = await other.get(documents.SECRET_DOCUMENT_KEY)
    outcomes, answered = await copy(source, target)
    assert (outcomes.copied, answered) == (1, [])
    outcomes, answered = await copy(source, other, overwrite=True)
    assert (outcomes.already_there, outcomes.is_complete, answered) == (1, True, [])
    assert await other.get(documents.SECRET_DOCUMENT_KEY) == kept
    found, copied = (
        await source.get(documents.SECRET_DOCUMENT_KEY),
        await target.get(documents.SECRET_DOCUMENT_KEY),
    )
    assert isinstance(found, StoredObject)
    assert isinstance(copied, StoredObject)
    assert found.body == copied.body


class YieldingStore(MemoryStore):
    """Lets others go on before it returns what it found."""

    async def get(self, key: str, if_none_match: str | None = None) -> StoredObject | NotModified | None:
        found = await super().get(key, if_none_match)
        await asyncio.sleep(0)
        return found


async def test_nodes_that_create_the_secret_at_once_agree_on_it() -> None:
    store = YieldingStore()
    nodes = [documents.KeyedVersions(store, lambda: 0) for _ in range(2)]
    hidden = frozenset({"pay"})
    first, second = await asyncio.gather(
        *(node.load_and_compute("staff/a", "hash", 1, hidden) for node in nodes)
    )
    assert first == second != "hash"


async def test_a_store_that_loses_the_secret_at_once_cannot_be_used() -> None:
    class ForgetfulStore(MemoryStore):
        async def get(self, key: str, if_none_match: str | None = None) -> None:
            """See `Store.get`."""

    with pytest.raises(StoreUnavailable):
        await documents.KeyedVersions(ForgetfulStore(), lambda: 0).load()


async def test_a_secret_that_is_too_short_is_corrupt() -> None:
    store = MemoryStore()
    body = _core.decode_push(b'{"data":{"secret":"short"}}').stored(0)
    await store.put(documents.SECRET_DOCUMENT_KEY, body)
    with pytest.raises(DocumentCorrupt):
        await documents.KeyedVersions(store, lambda: 0).load()


async def test_a_damaged_secret_is_an_error_for_those_who_need_it(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = MemoryStore()
    first = Browser(await start(SERVICE, store=store), session)
    await first.push("staff/a", BOB, None, ADMIN)
    await version(first, "staff/a")
    found = await store.get(documents.SECRET_DOCUMENT_KEY)
    assert isinstance(found, StoredObject)
    await store.put(
        documents.SECRET_DOCUMENT_KEY, found.body[:-20] + bytes([found.body[-20] ^ 1]) + found.body[-19:]
    )
    later = Browser(await start(SERVICE, store=store), session)
    assert (await later.pull("staff/a")).error == (500, "document_corrupt")
    damages: list[Damage] = []
    await Verifier(store, damages.append).run()
    assert [damage.key for damage in damages] == [documents.SECRET_DOCUMENT_KEY]
    assert (await later.pull("staff/a", ADMIN)).status == 200


async def test_no_proof_of_an_author_betrays_what_is_hidden(
    start: Start, session: aiohttp.ClientSession
) -> None:
    """A signature can be verified with a guess of the data."""
    other: dict[str, Any] = {**PUBLIC, "fieldPermissions": {"pay": {"readRoles": ["admin"]}}}
    collections = [
        {"name": "staff", "storagePath": "staff/{id}", **other},
        {**LOGS, **other},
    ]
    base = await start({**SERVICE, "collections": collections})
    signer = Signed(base, session, SUBJECT, root_device(SUBJECT))
    for key, tag in (("staff/a", "starfish-doc-author-v1"), ("logs/a", "starfish-append-author-v1")):
        for data in (BOB, {"name": "ann"}):
            proof = signing.sign_author(SUBJECT, tag, key, json.dumps(data).encode())
            await signer.request("POST", f"/push/{key}", {"data": data, **proof})
    reader = Signed(base, session, ISSUER, root_device(ISSUER))
    assert "authorSignature" not in (await reader.pull("staff/a")).json
    elements = (await reader.pull("logs/a?last=2")).json["data"]["items"]
    assert ["authorSignature" in element for element in elements] == [False, True]
    whole = await signer.pull("logs/a?last=2", ADMIN)
    assert whole.body.count(b"authorSignature") in (1, 2)


async def test_writer_without_read_access_cannot_guess_values(
    start: Start, session: aiohttp.ClientSession
) -> None:
    """The answer to a push of the right guess must not be the version of before."""
    pay = {"fieldPermissions": {"pay": {"readRoles": ["admin"]}}}
    browser = Browser(await start({**SERVICE, "collections": [{**STAFF, **pay}]}), session)
    await browser.push("staff/a", BOB, None, ADMIN)
    first = await version(browser, "staff/a")
    wrong = (await browser.push("staff/a", {**BOB, "pay": 1}, first)).json["hash"]
    right = (await browser.push("staff/a", BOB, wrong)).json["hash"]
    assert right == await version(browser, "staff/a")
    assert len({first, wrong, right}) == 3


async def test_repeated_push_by_a_reader_with_hidden_members_is_answered_again(browser: Browser) -> None:
    await browser.push("staff/a", BOB, None, ADMIN)
    base, once = await version(browser, "staff/a"), {"Idempotency-Key": "once"}
    first = await browser.push("staff/a", {"name": "rob"}, base, once)
    again = await browser.push("staff/a", {"name": "rob"}, base, once)
    assert (first.status, again.status) == (200, 200)
    assert first.json == again.json
    await browser.push(
        "staff/a", {"name": "ann", "pay": 7}, (await browser.pull("staff/a", ADMIN)).json["hash"], ADMIN
    )
    assert (await browser.push("staff/a", {"name": "rob"}, base, once)).json == first.json
    late = await browser.push("staff/a", {"name": "eve"}, base, once)
    assert late.json["code"] == "idempotency_key_reused"
    assert (await browser.pull("staff/a", ADMIN)).json["data"] == {"name": "ann", "pay": 7}


async def test_a_guess_of_the_hash_is_no_base_of_a_repetition(browser: Browser) -> None:
    await browser.push("staff/a", BOB, None, ADMIN)
    rejected = await browser.push("staff/a", {"name": "eve"}, true_hash(BOB), {"Idempotency-Key": "once"})
    assert (rejected.status, rejected.json["currentHash"]) == (409, await version(browser, "staff/a"))
