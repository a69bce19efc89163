"""Damage: a stored object is served as it was written, or not at all, and is named."""

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from support import reference
from support import reference_append_log as twin
from support.bit_rot import damages
from support.clients import ISSUER, Browser, Signed, Start, root_device
from support.collections import PUBLIC
from support.sse_client import Listen
from support.store_samples import LOG, copy, log_objects

from pysync import _core
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.append_log import AppendLogs, LogRange, LogSettings
from pysync.engine.documents import Documents
from pysync.errors import DocumentCorrupt
from pysync.migrate import Damage
from pysync.migrate.verify import VerificationError, check_document
from pysync.store import StoredObject
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore
from pysync.write_ids import as_whitespace, new_write_id

TS_MS = 1_763_740_000_000
DATA = {"amount": 101, "text": "größe", "list": [1.5, None]}
PLAIN = b'{"data":{"amount":101}}'
BODY = (
    b'{"data":{"amount":101,"text":"gr\xc3\xb6\xc3\x9fe","big":9007199254740993},'
    b'"authorPubkey":"p\\"q","authorSignature":"s"}'
)
NOTES = {"name": "notes", "storagePath": "notes/{id}", **PUBLIC}
KEYRINGS = {"name": "keyrings", "storagePath": "notes/{id}/_keyring", **PUBLIC}
LOGS = {
    "name": "logs",
    "storagePath": "logs/{id}",
    "appendOnly": {"type": "by_timestamp", "requireAuthorSignature": False},
    **PUBLIC,
}
BOARD = {"name": "cards", "storagePath": "boards/{id}", "bundle": "board", **PUBLIC}
CORRUPT = (500, "document_corrupt")


def flips(stored: bytes) -> list[bytes]:
    """The bytes with each single bit changed in turn, and with all bits of each byte, and with blanks
    changed to other blanks."""
    changes = [1 << bit for bit in range(8)] + [0xFF, 0x29]
    return [
        stored[:at] + bytes([stored[at] ^ change]) + stored[at + 1 :]
        for at in range(len(stored))
        for change in changes
    ]


def served(stored: bytes) -> Any:
    """All that is served of a stored document; None where it is found to be damaged."""
    try:
        document = _core.read_document(stored)
    except DocumentCorrupt:
        return None
    return document.answer(5), document.hash, document.ts_ms


@pytest.mark.parametrize("write_id", [b"", as_whitespace(new_write_id())], ids=["plain", "marked"])
@pytest.mark.parametrize("body", [b'{"data":{}}', PLAIN, BODY], ids=["empty", "plain", "escapes"])
def test_no_byte_of_a_document_changes_unnoticed(body: bytes, write_id: bytes) -> None:
    stored = _core.decode_push(body).stored(TS_MS, write_id)
    assert served(stored) is not None
    for damaged in flips(stored):
        assert served(damaged) is None, damaged
        assert _core.is_document(damaged), "so that nobody takes it for what others wrote"
        with pytest.raises(DocumentCorrupt):
            _core.LogHead.read(damaged, "items")
    assert _core.LogHead.read(stored, "items").count == 0, "a document whose collection has logs now"
    for length in range(len(stored)):
        assert served(stored[:length]) is None
    for more in (b"}", b"\0", b"\n", stored):
        assert served(stored + more) is None


@pytest.mark.parametrize("body", [b'{"data":{}}', PLAIN, BODY], ids=["empty", "plain", "escapes"])
def test_without_checksum_only_time_and_author_can_change_undetected(body: bytes) -> None:
    """As versions before the checksum wrote it: the hash covers `data` alone, and of integers that are no
    doubles the digits that doubles have."""
    push = _core.decode_push(body)
    proof = push.author_pubkey, push.author_signature
    stored = reference.stored(push.data, push.hash, TS_MS, *proof)
    _, hash_, ts_ms = served(stored)
    assert (hash_, ts_ms) == (push.hash, TS_MS)
    for damaged in flips(stored):
        found = served(damaged)
        if found is None:
            continue
        document = _core.read_document(damaged)
        assert (_core.canonicalize(document.data), document.hash) == (push.canonical, push.hash)
        changed = [at for at in range(len(stored)) if stored[at] != damaged[at]]
        kept = [b'{"v":1,"ts":', b',"hash":"%b"' % push.hash.encode(), b',"data":{']
        for part in kept:
            start = stored.index(part)
            assert not start <= changed[0] < start + len(part), damaged


@pytest.mark.parametrize("style", [{}, {"separators": (",", ":")}, {"indent": 1}])
def test_of_starfishs_documents_no_byte_of_data_or_hash_changes_unnoticed(style: dict[str, Any]) -> None:
    hash_ = reference.content_hash(json.dumps(DATA).encode())
    stored = json.dumps({"v": 1, "data": DATA, "ts": TS_MS, "hash": hash_}, **style).encode()
    assert served(stored) is not None
    for damaged in flips(stored):
        if served(damaged) is not None:
            document = _core.read_document(damaged)
            assert document.hash == hash_, damaged
            assert reference.content_hash(document.data) == hash_, damaged


def test_of_a_log_that_starfish_wrote_the_hash_is_that_of_its_newest_element() -> None:
    log = twin.Log(tuple(twin.Element(TS_MS + n, {"n": n}) for n in range(3)))
    stored = json.dumps(twin.starfish_document(log)).encode()
    assert _core.LogHead.read(stored, "items").hash == _core.read_document(stored).hash == log.hash
    for old, new in ((b'"n": 2', b'"n": 3'), (b'"items"', b'"jtems"'), (log.hash[:4].encode(), b"0000")):
        damaged = stored.replace(old, new)
        assert damaged != stored
        with pytest.raises(DocumentCorrupt):
            _core.LogHead.read(damaged, "items")
    chunks = {key: json.dumps(value).encode() for key, value in twin.starfish_chunks(log, "a", 2).items()}
    head = _core.LogHead.read(chunks.pop("a"), "items")
    newest = chunks[max(chunks)]
    assert head.gather([newest]).hash == log.hash
    with pytest.raises(DocumentCorrupt):
        head.gather([newest.replace(b'"n": 2', b'"n": 3')])


def edited(stored: bytes) -> bytes:
    """A stored document as an administrator's slip, or a bad disk, leaves it: JSON all the same."""
    assert b'"amount":101' in stored
    return stored.replace(b'"amount":101', b'"amount":901')


async def damage(store: MemoryStore, key: str, edit: Callable[[bytes], bytes] = edited) -> None:
    found = await store.get(key)
    assert isinstance(found, StoredObject)
    await store.put(key, edit(found.body))


class Scene:
    """A service with a document, a keyring, a bundle and a log, and where its store is."""

    def __init__(self, browser: Browser, store: MemoryStore) -> None:
        self.browser = browser
        self.store = store
        self.hash = ""

    async def corrupt(self, kind: str = "document") -> int:
        """Return the number of corrupt objects of a kind that were met."""
        page = (await self.browser.request("GET", "/metrics")).body.decode()
        label = f'pysync_corrupt_objects_total{{found_by="request",kind="{kind}"}} '
        return next((int(float(line.split()[-1])) for line in page.splitlines() if line.startswith(label)), 0)


@pytest_asyncio.fixture
async def scene(start: Start, session: aiohttp.ClientSession) -> AsyncIterator[Scene]:
    store = MemoryStore()
    browser = Browser(await start({"collections": [NOTES, KEYRINGS, LOGS, BOARD]}, store=store), session)
    made = Scene(browser, store)
    made.hash = (await browser.push("notes/a", {"amount": 101})).json["hash"]
    for key in ("notes/a/_keyring", "notes/b", "boards/a/cards"):
        assert (await browser.push(key, {"amount": 101})).status == 200
    assert (await browser.request("POST", "/push/logs/a", {"data": {"amount": 101}})).status == 200
    yield made


async def test_a_damaged_document_is_500_on_every_way_of_reading_it(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    for key in ("notes/a", "boards/a/cards"):
        await damage(scene.store, key)
    browser = scene.browser
    known = {"If-None-Match": f'"{scene.hash}"'}
    assert (await browser.pull("notes/a")).error == CORRUPT
    assert (await browser.pull("notes/a", known)).error == CORRUPT
    assert (await browser.request("HEAD", "/pull/notes/a", headers=known)).status == 500
    assert (await browser.pull("boards/a")).error == CORRUPT
    params = '{"notes":[{"id":"a"},{"id":"b"}]}'
    batch = await browser.request("GET", f"/batch/pull?collections=notes&params={params}")
    first, second = batch.json["collections"]["notes"]
    assert (first, second["data"]) == ({"error": "document_corrupt"}, {"amount": 101})
    assert await scene.corrupt() == 5
    for key, collection in (("notes/a", "notes"), ("boards/a/cards", "cards")):
        assert f"the document at '{key}' ({collection}) is corrupt" in caplog.text


async def test_a_damaged_keyring_is_not_folded_into_a_pull(scene: Scene) -> None:
    await damage(scene.store, "notes/a/_keyring")
    assert (await scene.browser.pull("notes/a?withKeyring=1")).error == CORRUPT
    assert (await scene.browser.pull("notes/a")).status == 200
    assert await scene.corrupt() == 1


async def test_push_repairs_a_damaged_document_only_on_request(scene: Scene) -> None:
    """A push on a version that this process has written itself needs nothing of what is there."""
    await damage(scene.store, "notes/a")
    for base in (None, "ab" * 32, scene.hash):
        rejected = await scene.browser.push("notes/a", {"amount": 7}, base)
        assert (rejected.status, rejected.json["currentHash"]) == (409, "")
    assert await scene.corrupt() == 3
    assert (await scene.browser.push("notes/a", {"amount": 7}, "")).status == 200
    assert (await scene.browser.pull("notes/a")).json["data"] == {"amount": 7}


async def test_a_repetition_leaves_a_write_that_was_damaged_since(scene: Scene) -> None:
    once = {"Idempotency-Key": "k"}
    first = await scene.browser.push("notes/c", {"amount": 101}, None, once)
    await damage(scene.store, "notes/c")
    assert (await scene.browser.push("notes/c", {"amount": 101}, None, once)).body == first.body
    assert (await scene.browser.pull("notes/c")).error == CORRUPT


async def test_damaged_write_id_is_damage(scene: Scene) -> None:
    await scene.browser.push("notes/c", {"amount": 101}, None, {"Idempotency-Key": "k"})
    blanks = bytes.maketrans(b" \t", b"\t ")
    await damage(scene.store, "notes/c", lambda stored: stored[:-1] + stored[-1:].translate(blanks))
    assert (await scene.browser.pull("notes/c")).error == CORRUPT


async def test_a_damaged_log_is_500_on_every_way_of_reading_it_and_counted(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    browser = scene.browser
    await damage(scene.store, "logs/a")
    assert (await browser.pull("logs/a?last=1")).error == CORRUPT
    appended = await browser.request("POST", "/push/logs/a", {"data": {"amount": 1}})
    assert appended.error == CORRUPT
    query = 'collections=logs&params={"logs":[{"id":"a"}]}&appendParams={"logs":[{"last":1}]}'
    batch = await browser.request("GET", f"/batch/pull?{query}")
    assert batch.json["collections"]["logs"] == [{"error": "document_corrupt"}]
    assert await scene.corrupt("log") == 3
    assert "the log at 'logs/a' (logs) is corrupt" in caplog.text


async def test_nobody_gets_a_role_by_a_damaged_access_document(
    start: Start, session: aiohttp.ClientSession
) -> None:
    """By one that others put there without a hash people do, as ever: nothing says that it is damaged."""
    spaces = {"name": "plans", "storagePath": "spaces/{spaceId}/{id}", "readRoles": ["space:member"]}
    store = MemoryStore()
    base = await start({"auth": {"spaces": {}}, "collections": [spaces]}, store=store)
    member = Signed(base, session, ISSUER, root_device(ISSUER))
    access = json.dumps({"data": {"owner": ISSUER.user_id, "members": []}}).encode()
    stored = _core.decode_push(access).stored(1)
    own = ISSUER.user_id.encode()
    other = own[:-1] + (b"0" if own[-1:] != b"0" else b"1")
    batch = '/batch/pull?collections=plans&params={"plans":[{"spaceId":"s","id":"a"}]}'
    for held, status, entry in (
        (stored, 200, ""),
        (stored.replace(own, other), 500, "Authorization error"),
        (stored.replace(b'"v":1', b'"w":1'), 500, "Authorization error"),
        (access, 200, ""),
        (access[:-1] + b',"hash":"%b"}' % (b"ab" * 32), 500, "Authorization error"),
    ):
        await store.put("spaces/s/_access", held)
        assert (await member.pull("spaces/s/a")).status == status, held
        (found,) = (await member.request("GET", batch)).json["collections"]["plans"]
        assert found.get("error", "") == entry


async def test_a_stream_is_aborted_where_a_damaged_access_document_decides(
    start: Start, session: aiohttp.ClientSession, subscribe: Listen
) -> None:
    """So nobody hears of what may not be theirs."""
    plans = {"name": "plans", "storagePath": "spaces/{spaceId}/{id}", "readRoles": ["space:member"]}
    plans["writeRoles"] = ["public"]
    store = MemoryStore()
    base = await start({"auth": {"spaces": {}}, "collections": [plans]}, store=store)
    access = json.dumps({"data": {"owner": ISSUER.user_id, "amount": 101}}).encode()
    await store.put("spaces/s/_access", _core.decode_push(access).stored(1))
    member = Signed(base, session, ISSUER, root_device(ISSUER))
    stream = await subscribe(member, collections="plans")
    await Browser(base, session).push("spaces/s/a", {"n": 1})
    assert [event["params"]["id"] for event in await stream.events(1)] == ["a"]
    await damage(store, "spaces/s/_access")
    await Browser(base, session).push("spaces/s/b", {"n": 1})
    with pytest.raises((ConnectionError, EOFError)):
        await stream.events(1)


async def test_no_byte_of_a_row_in_sqlite_changes_unnoticed(tmp_path: Path) -> None:
    """Of documents, of a log's head, its segments and the blocks of its index."""
    store = await LocalStore.open_folder(tmp_path)
    documents, logs = Documents(store, MemoryCoordinator(), lambda: TS_MS), log_objects(200)
    await documents.push("notes/a", _core.decode_push(BODY))
    parts = [max(key for key in logs if f"/{name}" in key) for name in ("index1-", "180-")] + [LOG]
    for key, body in logs.items():
        await store.put(key, body)
    direct = sqlite3.connect(tmp_path / "pysync.db", isolation_level=None)
    direct.execute("pragma synchronous = off")

    async def read(key: str) -> object:
        await asyncio.sleep(0)  # what is read in one turn of the event loop is of one moment
        if key == "notes/a":
            found = await documents.pull(key)
            return found and found.answer(1)
        # A process that knows a head goes by that.
        node = AppendLogs(store, MemoryCoordinator(), lambda: TS_MS)
        return await (await node.read(LOG, LogRange(newest=200), LogSettings())).text()

    for key in ("notes/a", *parts):
        parent, name = key.rsplit("/", 1)
        row_filter = "where parent = ? and name = ?"
        ((body,),) = direct.execute(f"select body from object {row_filter}", (parent, name))
        right = await read(key)
        for at in range(len(body)):
            damaged = body[:at] + bytes([body[at] ^ (1 << at % 8)]) + body[at + 1 :]
            direct.execute(f"update object set body = ? {row_filter}", (damaged, parent, name))
            with pytest.raises(DocumentCorrupt):
                await read(key)
        direct.execute(f"update object set body = ? {row_filter}", (body, parent, name))
        assert await read(key) == right
    direct.close()
    await store.close()


def test_copy_verifies_the_hash_and_the_checksum() -> None:
    """A checksum that was made of the wrong bytes vouches for them; the hash does not."""
    push = _core.decode_push(PLAIN)
    assert check_document(push.stored(1)) is None
    wrong = _core.read_document(push.stored(1)).redacted(b'{"amount":901}', push.hash)
    assert not _core.read_document(wrong).verify()
    with pytest.raises(VerificationError, match="its hash does not match its data"):
        check_document(wrong)


async def test_verify_and_copy_compare_the_hash_and_the_checksum_of_a_log() -> None:
    """Starfish may give the hash of all elements to what becomes a log."""
    document = twin.starfish_document(twin.Log(tuple(twin.Element(TS_MS + n, {"n": n}) for n in range(3))))
    wrong = reference.content_hash(json.dumps(document["data"]).encode())
    store, target = MemoryStore(), MemoryStore()
    for name, hash_ in (("sound", document["hash"]), ("wrong", wrong)):
        found = _core.LogHead.read(json.dumps({**document, "hash": hash_}).encode(), "items")
        await store.put(f"logs/{name}", found.adopted("5e" * 16).stored())
    why = "its hash does not match its newest element"
    assert await damages(store) == [Damage("logs/wrong", "log", why)]
    report, problems = await copy(store, target)
    assert (report.copied, report.corrupt) == (1, 1)
    assert problems == [("logs/wrong", f"corrupt: {why}")]
    assert await target.get("logs/wrong") is None
