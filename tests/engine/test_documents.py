"""Documents over time: what a repetition is answered, and what a keyring's age does."""

import asyncio
import hashlib

import aiohttp
import orjson
import pytest
from support.clients import Browser, Start
from support.collections import PUBLIC
from support.faulty_store import FaultyStore

from pysync._core import decode_push
from pysync.clock import wall_clock_ms
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.documents import Documents
from pysync.engine.idempotency import IdempotentRequest
from pysync.errors import Conflict, IdempotencyKeyReused, OutcomeUnknown, StoreUnavailable
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock


async def test_equal_data_of_a_later_write_is_not_taken_for_the_repeated_one(
    start: Start, session: aiohttp.ClientSession
) -> None:
    clock = FakeClock(wall_clock_ms())
    notes = {"name": "notes", "storagePath": "notes/{id}", **PUBLIC}
    browser = Browser(await start({"collections": [notes]}, now_ms=clock), session)
    once = {"Idempotency-Key": "k1"}
    first = await browser.push("notes/a", {"n": 1}, None, once)
    assert (await browser.push("notes/a", {"n": 1}, None, once)).json == first.json
    clock.now_ms += 1
    second = await browser.push("notes/a", {"n": 2}, first.json["hash"])
    third = await browser.push("notes/a", {"n": 1}, second.json["hash"])
    assert third.json["hash"] == first.json["hash"]
    assert (await browser.push("notes/a", {"n": 1}, None, once)).json == first.json


async def test_a_folded_keyring_expires_as_its_own_collection_says(
    start: Start, session: aiohttp.ClientSession
) -> None:
    clock = FakeClock(wall_clock_ms())
    rooms = {"name": "rooms", "storagePath": "rooms/{room}", **PUBLIC}
    keyrings = {"name": "keyrings", "storagePath": "rooms/{room}/_keyring", "ttlMs": 1000, **PUBLIC}
    browser = Browser(await start({"collections": [rooms, keyrings]}, now_ms=clock), session)
    await browser.push("rooms/a", {"n": 1})
    await browser.push("rooms/a/_keyring", {"k": 1})
    clock.now_ms += 1000
    assert (await browser.pull("rooms/a?withKeyring=1")).json["keyring"]["data"] == {"k": 1}
    clock.now_ms += 1
    folded = await browser.pull("rooms/a?withKeyring=1")
    assert (folded.json["data"], folded.json["keyring"]) == ({"n": 1}, None)


async def test_a_push_on_what_was_written_here_reads_nothing_first() -> None:
    store = FaultyStore(MemoryStore())
    documents = Documents(store, MemoryCoordinator(), lambda: 1)
    first = await documents.push("a", decode_push(b'{"data":{"n":1}}'))
    second = b'{"data":{"n":2},"baseHash":"%b"}'
    await documents.push("a", decode_push(second % first.hash.encode()))
    assert (store.calls["get"], store.calls["put"]) == (0, 2)
    with pytest.raises(Conflict):
        await documents.push("a", decode_push(second % first.hash.encode()))


async def test_a_push_on_what_was_read_here_reads_nothing_more() -> None:
    store = FaultyStore(MemoryStore())
    here, there = (Documents(store, MemoryCoordinator(), lambda: 1) for _ in range(2))
    first = await there.push("a", decode_push(b'{"data":{"n":1}}'))
    await here.pull("a")
    store.calls.clear()
    await here.push("a", decode_push(b'{"data":{"n":2},"baseHash":"%b"}' % first.hash.encode()))
    assert (store.calls["get"], store.calls["put"]) == (0, 1)


async def test_write_of_another_process_is_noticed() -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    here, there = (Documents(store, coordinator, lambda: 1) for _ in range(2))
    first = (await here.push("a", decode_push(b'{"data":{"n":1}}'))).hash.encode()
    second = (await there.push("a", decode_push(b'{"data":{"n":2},"baseHash":"%b"}' % first))).hash
    with pytest.raises(Conflict) as rejected:
        await here.push("a", decode_push(b'{"data":{"n":3},"baseHash":"%b"}' % first))
    assert rejected.value.current_hash == second
    await there.push("a", decode_push(b'{"data":{"n":1},"baseHash":"%b"}' % second.encode()))
    again = await here.push("a", decode_push(b'{"data":{"n":4},"baseHash":"%b"}' % first))
    assert (await there.pull("a")).hash == again.hash  # type: ignore[union-attr]


async def test_a_write_of_the_same_bytes_in_the_same_millisecond_is_not_taken_for_ours() -> None:
    store, clock = FaultyStore(MemoryStore()), FakeClock()
    documents = Documents(store, MemoryCoordinator(clock), clock)
    body = decode_push(b'{"data":{"n":1}}')
    once = IdempotentRequest("k", body.hash)
    store.fail("put")
    with pytest.raises(StoreUnavailable):
        await documents.push("a", body, request=once)
    await documents.push("a", body)
    clock.now_ms += 30_000
    with pytest.raises(OutcomeUnknown):
        await documents.push("a", body, request=once)


async def test_stored_version_is_answered_although_another_replaces_it() -> None:
    shared = MemoryStore()
    store = FaultyStore(shared)
    documents, other = [Documents(way, MemoryCoordinator(), lambda: 1) for way in (store, shared)]
    body = decode_push(b'{"data":{"n":1}}')
    once = IdempotentRequest("k", body.hash)
    store.lose_reply("put")
    with pytest.raises(StoreUnavailable):
        await documents.push("a", body, request=once)
    written = await other.pull("a")
    assert written is not None
    release = asyncio.Event()
    store.delay("get", release, after=1)
    again = asyncio.ensure_future(documents.push("a", body, request=once))
    while store.calls["get"] < 1:
        await asyncio.sleep(0)
    await other.push("a", decode_push(b'{"data":{"n":2},"baseHash":"%s"}' % written.hash.encode()))
    release.set()
    assert await again == (written.hash, 1)


async def test_concurrent_attempts_under_one_key_have_the_same_answer() -> None:
    store, coordinator = MemoryStore(), MemoryCoordinator()
    times = iter(range(1, 100))
    nodes = [Documents(store, coordinator, lambda: next(times)) for _ in range(4)]
    body = decode_push(b'{"data":{"n":1}}')
    once = IdempotentRequest("k", body.hash)
    results = await asyncio.gather(*(node.push("a", body, request=once) for node in nodes * 3))
    found = await nodes[0].pull("a")
    assert found is not None
    assert {(written.hash, written.timestamp_ms) for written in results} == {(found.hash, found.ts_ms)}


async def test_claim_of_version_0_1_0_is_that_of_an_earlier_attempt() -> None:
    coordinator, clock = MemoryCoordinator(FakeClock(1)), FakeClock(1)
    documents = Documents(MemoryStore(), coordinator, clock)
    body = decode_push(b'{"data":{"n":1}}')
    name = hashlib.sha256(b"k").hexdigest()
    await coordinator.put_if_absent(name, orjson.dumps(["0" * 16, body.hash, 1]), 600_000)
    with pytest.raises(IdempotencyKeyReused):
        await documents.push("a", body, request=IdempotentRequest("k", "0" * 64))
    with pytest.raises(StoreUnavailable):
        await documents.push("a", body, request=IdempotentRequest("k", body.hash))
    clock.now_ms += 30_000
    with pytest.raises(OutcomeUnknown):
        await documents.push("a", body, request=IdempotentRequest("k", body.hash))


@pytest.mark.parametrize("base", [None, "", "0" * 64])
async def test_no_push_of_a_document_ends_a_log(
    start: Start, session: aiohttp.ClientSession, base: str | None
) -> None:
    store = MemoryStore()
    log = {"name": "notes", "storagePath": "notes/{id}", "appendOnly": {"requireAuthorSignature": False}}
    as_log = Browser(await start({"collections": [{**log, **PUBLIC}]}, store=store), session)
    assert (await as_log.push("notes/a", {"n": 1}, None)).status == 200
    del log["appendOnly"]
    as_document = Browser(await start({"collections": [{**log, **PUBLIC}]}, store=store), session)
    rejected = (await as_document.push("notes/a", {"n": 2}, base)).error
    assert rejected in [(409, "hash_mismatch"), (500, "document_corrupt")]
    kept = await as_log.request("GET", "/pull/notes/a?full=true")
    assert [element["data"] for element in kept.json["data"]["items"]] == [{"n": 1}]
