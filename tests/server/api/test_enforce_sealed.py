"""Collections that take sealed data alone: `"enforceSealed": true`.

See docs/reference/protocol.md#sealed-data.
"""

import json
import os
from typing import Any

import aiohttp
import pytest
from support.clients import ISSUER, SUBJECT, Browser, Signed, Start, root_device

from pysync import config
from pysync.client.sealed import Keyring, seal_envelope
from pysync.store.memory import MemoryStore

NOW_S = 1_700_000_000
OPEN: dict[str, Any] = {
    "readRoles": ["public"],
    "writeRoles": ["public"],
    "encryption": "delegated",
    "enforceSealed": True,
}
LOG = {"type": "by_timestamp", "requireAuthorSignature": False}
COLLECTIONS = [
    {"name": "plans", "storagePath": "teams/{team}/plans/{id}", **OPEN},
    {"name": "vault", "storagePath": "vault/{user}/{id}", **OPEN},
    {"name": "chat", "storagePath": "chat/{room}", "appendOnly": LOG, **OPEN},
    {"name": "keyed", "storagePath": "keyed/{team}/{id}", "keyringPath": "vault/keys/{team}", **OPEN},
    {"name": "part", "storagePath": "board/{id}", "bundle": "board", **OPEN},
    {"name": "lax", "storagePath": "lax/{id}", **OPEN, "enforceSealed": False},
]
KEYRING = Keyring.new(ISSUER, [ISSUER.kem_pub, SUBJECT.kem_pub], now_s=NOW_S)
OPENED = KEYRING.open(ISSUER, [ISSUER.ed_pub])
DOCUMENT = OPENED.seal({"secret": "plan", "n": [1, 2]})
ENVELOPE = seal_envelope(b"for one", SUBJECT.kem_pub, ISSUER, now_s=NOW_S)
BOUND = seal_envelope(b"for one", SUBJECT.kem_pub, ISSUER, aad="path", now_s=NOW_S)
NOT_SEALED = (400, "Data is not sealed")
SHORT = "AAAA"


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
async def browser(start: Start, session: aiohttp.ClientSession, store: MemoryStore) -> Browser:
    return Browser(await start({"collections": COLLECTIONS}, store), session)


@pytest.mark.parametrize(
    "sealed",
    [
        DOCUMENT,
        OPENED.seal({}),
        OPENED.seal({"text": "x" * 200_000}),
        ENVELOPE,
        BOUND,
        {**ENVELOPE, "ct": os.urandom(40).hex()},  # as the spaces library writes it
        {"_encrypted": DOCUMENT["_encrypted"]},
    ],
)
async def test_sealed_data_is_stored_as_it_is(browser: Browser, sealed: dict[str, Any]) -> None:
    for key in ("teams/a/plans/b", "vault/u/x", "board/b/part"):
        assert (await browser.push(key, sealed)).status == 200
    assert (await browser.pull("vault/u/x")).json["data"] == sealed
    appended = await browser.request("POST", "/push/chat/a", {"data": sealed})
    assert appended.status == 200


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"title": "plain"},
        {**DOCUMENT, "title": "plain beside"},
        {**ENVELOPE, "title": "plain beside"},
        {"_encrypted": "not base64!", "_epoch": 1},
        {"_encrypted": SHORT, "_epoch": 1},
        {"_encrypted": "plain text, not base64 at all", "_epoch": 1},
        {"_encrypted": {"title": "plain"}, "_epoch": 1},
        {"_encrypted": None},
        {"_epoch": 1},
        {**DOCUMENT, "_epoch": "the title"},
        {**DOCUMENT, "_epoch": True},
        {**DOCUMENT, "_epoch": -1},
        {**DOCUMENT, "_epoch": {"title": "plain"}},
        {"ct": ENVELOPE["ct"]},
        {"entry": ENVELOPE["entry"]},
        {**ENVELOPE, "ct": "plain"},
        {**ENVELOPE, "ct": SHORT},
        {**ENVELOPE, "entry": {}},
        {**ENVELOPE, "entry": "plain"},
        {**ENVELOPE, "entry": {**ENVELOPE["entry"], "title": "plain beside"}},
        {**ENVELOPE, "entry": {**ENVELOPE["entry"], "subKem": "plain"}},
        {**ENVELOPE, "v": {"title": "plain"}},
        {"entry": DOCUMENT, "ct": ENVELOPE["ct"]},
        {"data": DOCUMENT},
    ],
)
async def test_plaintext_is_rejected_and_nothing_is_stored(
    browser: Browser, store: MemoryStore, data: dict[str, Any]
) -> None:
    for key in ("teams/a/plans/b", "vault/u/x", "board/b/part"):
        rejected = await browser.push(key, data)
        assert rejected.error == NOT_SEALED
        assert rejected.json["code"] == "not_sealed"
        assert "plain" not in rejected.body.decode()
    assert (await browser.request("POST", "/push/chat/a", {"data": data})).error == NOT_SEALED
    assert [listed async for listed in store.walk("")] == []
    assert (await browser.push("lax/a", data)).status == 200


async def test_a_sealed_document_is_not_replaced_by_plaintext(browser: Browser) -> None:
    pushed = await browser.push("vault/u/x", DOCUMENT)
    assert (await browser.push("vault/u/x", {"n": 1}, pushed.json["hash"])).error == NOT_SEALED
    assert (await browser.pull("vault/u/x")).json["data"] == DOCUMENT


async def test_keyrings_stay_plaintext(browser: Browser) -> None:
    for key in ("vault/u/_keyring", "vault/keys/team"):
        assert (await browser.push(key, KEYRING.data)).status == 200
        assert (await browser.pull(key)).json["data"] == KEYRING.data
    assert (await browser.push("vault/other/team", KEYRING.data)).error == NOT_SEALED


async def test_forbidden_push_is_rejected_before_its_data_is_checked(
    start: Start, session: aiohttp.ClientSession
) -> None:
    closed = {**COLLECTIONS[1], "writeRoles": ["self"]}
    browser = Signed(await start({"collections": [closed]}), session, SUBJECT, root_device(SUBJECT))
    assert (await browser.push("vault/u/x", {"n": 1})).error == (403, "Forbidden")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"encryption": "none"}, "enforceSealed needs encryption: delegated"),
        ({"allowedMimeTypes": ["application/octet-stream"]}, "enforceSealed is for documents and logs"),
        ({"allowedMimeTypes": ["application/json", "image/*"]}, "enforceSealed is for documents and logs"),
    ],
)
def test_only_documents_that_clients_encrypt_can_be_held_to_it(members: dict[str, Any], message: str) -> None:
    collection = {"name": "a", "storagePath": "a/{id}", **OPEN, **members}
    with pytest.raises(config.ConfigError) as rejected:
        config.parse({"version": 1, "store": "memory:", "collections": [collection]})
    assert message in str(rejected.value)
    assert "enforceSealed" in json.dumps([problem.path for problem in rejected.value.problems])
