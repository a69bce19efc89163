"""An erasure leaves nothing of what belongs to a key, a prefix or an identity, and touches nothing else."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.clients import Browser, Signed, Start
from support.erasure import (
    ANNE,
    ANNES,
    BERT,
    SECRET,
    Served,
    keys_with,
    members,
    serve,
    served_at,
    stored_keys,
)
from support.folder_search import files_with
from support.sse_client import Listen

from pysync.auth.identity_keys import IdentityKeys
from pysync.auth.rate_limits import identity_name
from pysync.changelog import Change
from pysync.client.sealed.keyring import Keyring
from pysync.coordinator import Coordinator
from pysync.coordinator.memory import MemoryCoordinator
from pysync.erase import Eraser, EraseRequest
from pysync.erase.record import ErasureRecord
from pysync.plugins.projection import projections_in, projections_of

pytestmark = pytest.mark.usefixtures("hasty_erasures")


@pytest.fixture
async def served(start: Start, session: aiohttp.ClientSession, filled_folder: Path) -> Served:
    base = await start(members(store=f"file:{filled_folder}", quotas={}))
    return served_at(start, base, session)


async def test_nothing_of_an_erased_person_is_in_any_file(served: Served, folder: Path) -> None:
    assert files_with(folder, SECRET, ANNE.user_id)
    report = await served.eraser.run(ANNES)
    assert await keys_with(served.store, ANNE.user_id) == set()
    left = await keys_with(served.store, SECRET)
    assert left - {"board/lobby"} == {key for key in left if key.startswith("_pysync/logs/")}
    # Elements in the log of all are not rewritten. Without that log nothing is left.
    board = await served.eraser.run(EraseRequest("key", "board/lobby"))
    assert files_with(folder, SECRET, ANNE.user_id) == set()
    assert dict(report.erased) | {"changes": 0, "entries": 0} == {
        "documents": 5 + 1,
        "versions": 9,
        "files": 3,
        "logs": 1,
        "elements": 18,
        "segments": report.erased["segments"],
        "entries": 0,
        "idempotencyRecords": 3,
        "rateCounters": 1,
        "changes": 0,
        "keyringEntries": 0,
    }
    assert report.erased["segments"] > 2
    assert board.erased["elements"] == 36


async def test_counts_that_are_shared_after_an_erasure_name_nobody(served: Served, folder: Path) -> None:
    await served.eraser.run(ANNES)
    await served.eraser.run(EraseRequest("key", "board/lobby"))
    rejected = await served.anne.push(f"users/{ANNE.user_id}/notes/a", {}, "0" * 64)
    assert rejected.status == 409
    await served.app.close()
    assert files_with(folder, ANNE.user_id) == set()


async def test_data_of_others_is_not_touched(served: Served) -> None:
    me = BERT.user_id
    keys = [key for key in await stored_keys(served.store) if me in key]
    before = {key: await served.store.get(key) for key in keys}
    await served.eraser.run(ANNES)
    for key in keys:
        assert await served.store.get(key) == before[key]
    for n in range(3):
        assert (await served.bert.pull(f"users/{me}/photos/{n}")).body == b"public-of-bert" * 500
    tail = await served.bert.pull(f"users/{me}/diary?last=100")
    assert len(tail.json["data"]["items"]) == 18
    assert (await served.anne.push(f"users/{ANNE.user_id}/notes/a", {"title": "again"})).status == 200


async def test_lists_lose_the_entries_of_erased_documents(served: Served) -> None:
    assert len((await served.bert.pull("lists/titles")).json["data"]["items"]) == 6
    report = await served.eraser.run(ANNES)
    items = (await served.bert.pull("lists/titles")).json["data"]["items"]
    assert {item["id"] for item in items} == {f"public-of-bert-{n}" for n in range(3)}
    assert report.erased["entries"] == 6
    assert (await served.anne.pull(f"users/{ANNE.user_id}/index")).json["data"] == {}


@pytest.mark.parametrize(
    ("request_", "gone"),
    [
        (EraseRequest("key", f"users/{ANNE.user_id}/diary"), "/diary"),
        (EraseRequest("key", f"users/{ANNE.user_id}/photos/1"), "/photos/1"),
        (EraseRequest("prefix", f"users/{ANNE.user_id}/sealed"), "/sealed/"),
        (EraseRequest("prefix", f"users/{ANNE.user_id}/sealed/a"), "/sealed/a"),
        (EraseRequest("key", f"users/{ANNE.user_id}"), None),
    ],
    ids=["log", "file", "prefix", "prefix that is a key", "key of nothing"],
)
async def test_a_key_or_a_prefix_goes_and_no_other_key(
    served: Served, request_: EraseRequest, gone: str | None
) -> None:
    before = {key for key in await stored_keys(served.store) if not key.startswith("_pysync/")}
    await served.eraser.run(request_)
    after = {key for key in await stored_keys(served.store) if not key.startswith("_pysync/")}
    expected = {key for key in before if gone is not None and ANNE.user_id in key and gone in key}
    assert before - after == expected


async def test_a_dry_run_reports_the_same_and_changes_nothing(served: Served) -> None:
    async def objects() -> dict[str, Any]:
        """What is stored, but for how far projections have come."""
        keys = [key for key in await stored_keys(served.store) if not key.startswith("_pysync/projections/")]
        return {key: await served.store.get(key) for key in keys}

    before = await objects()
    last = await served.log.last_id()
    dry = await served.eraser.dry_run(ANNES)
    assert await objects() == before
    assert await served.log.last_id() == last
    wet = await served.eraser.run(ANNES)
    kinds = ("documents", "versions", "files", "logs", "elements", "segments", "entries", "keyringEntries")
    assert {kind: dry.erased[kind] for kind in kinds} == {kind: wet.erased[kind] for kind in kinds}
    assert dry.bytes == wet.bytes > 10_000


@pytest.mark.parametrize(
    ("request_", "collections", "is_reset"),
    [
        (ANNES, "notes", True),
        (ANNES, "diary", True),
        (ANNES, "notes,board", True),
        (ANNES, "board", False),
        (EraseRequest("prefix", f"users/{ANNE.user_id}/notes"), "notes", True),
        (EraseRequest("prefix", f"users/{ANNE.user_id}/notes"), "diary,board", False),
        (EraseRequest("key", "board/lobby"), "board", True),
        (EraseRequest("key", "board/lobby"), "notes", False),
    ],
)
async def test_only_a_stream_that_follows_what_was_erased_resumes_with_a_reset(
    served: Served, subscribe: Listen, request_: EraseRequest, collections: str, is_reset: bool
) -> None:
    """Of all others nobody misses a change, also not one that the erased person made."""
    before = await served.log.last_id()
    assert (await served.anne.request("POST", "/push/board/hall", {"data": {}})).status == 200
    pushed = [(await served.bert.push(f"users/{BERT.user_id}/notes/{n}", {})).json["hash"] for n in range(3)]
    await served.eraser.run(request_)
    stream = await subscribe(served.bert, headers={"Last-Event-ID": before}, collections=collections)
    first = await stream.event()
    if is_reset:
        assert first.data == {"reset": True}
        assert first.id == await served.log.last_id()
    elif "board" in collections:
        assert first.data["params"] == {"room": "hall"}
    else:
        others = await stream.events(2)
        assert [first.data["hash"], *(event["hash"] for event in others)] == pushed


async def test_a_live_stream_that_is_too_late_for_a_removal_gets_a_reset(
    served: Served, subscribe: Listen
) -> None:
    notes, diary = [await subscribe(served.bert, collections=name) for name in ("notes", "diary")]
    removal = Change(
        b'{"collection":"notes","params":{},"hash":"","timestamp":1,"removed":true}', "", "/notes"
    )
    await served.log.append([removal.erased([(None, "notes")])])
    assert (await notes.event()).data == {"reset": True}
    said = await served.bert.request("POST", f"/push/users/{BERT.user_id}/diary", {"data": {}})
    assert said.status == 200
    assert (await diary.event()).data["collection"] == "diary"


async def test_the_record_has_the_collections_that_changes_were_erased_from(served: Served) -> None:
    before = await served.log.last_id()
    assert not (await ErasureRecord.load(served.store)).covers(before, [(None, "notes")])
    await served.eraser.run(EraseRequest("prefix", f"users/{ANNE.user_id}/notes"))
    after, record = await served.log.last_id(), await ErasureRecord.load(served.store)
    assert record.covers(before, [(None, "notes")])
    assert record.covers(before, [(None, "diary"), (None, "notes")])
    assert not record.covers(before, [(None, "diary"), ("other", "notes")])
    assert not record.covers(after, [(None, "notes")])
    await served.eraser.run(EraseRequest("key", f"users/{ANNE.user_id}/diary"))
    record = await ErasureRecord.load(served.store)
    assert record.covers(before, [(None, "notes")])
    assert record.covers(after, [(None, "diary")])
    assert not record.covers(after, [(None, "notes")])


async def test_a_change_to_others_data_stays_without_its_writer(served: Served) -> None:
    before = await served.log.last_id()
    assert (await served.anne.request("POST", "/push/board/hall", {"data": {}})).status == 200
    await served.eraser.run(ANNES)
    found = await served.log.read(before, 100)
    assert found is not None
    (kept,) = [change for _, change in found if b"hall" in change.text]
    assert (kept.identity, kept.erased_from) == ("", set())


async def test_followers_receive_the_removals_and_later_ones_a_reset(
    served: Served, subscribe: Listen
) -> None:
    before = await served.log.last_id()
    mine, others = [await subscribe(who, collections="notes") for who in (served.anne, served.bert)]
    received, paused_s = asyncio.Event(), list[float]()

    async def until_received(seconds: float) -> None:
        paused_s.append(seconds)
        await received.wait()

    engine = served.app.engine
    eraser = Eraser(engine, projections_in(projections_of(engine.config)), {}, sleep=until_received)
    erasing = asyncio.ensure_future(eraser.run(EraseRequest("prefix", f"users/{ANNE.user_id}/notes")))
    events = await mine.events(3)
    assert {(event["params"]["id"], event["hash"], event["removed"]) for event in events} == {
        (f"{SECRET}-{n}", "", True) for n in range(3)
    }
    received.set()
    await erasing
    assert paused_s, "followers had time to read the removals"
    # Live streams go on without a reset, and whoever could not pull has heard of nothing.
    for who, stream in ((served.anne, mine), (served.bert, others)):
        written = await who.push(f"users/{who.keys.user_id}/notes/after", {"title": "after"})
        assert (await stream.event()).data["hash"] == written.json["hash"]
    late = await subscribe(served.anne, headers={"Last-Event-ID": before}, collections="notes")
    assert (await late.event()).data == {"reset": True}


async def test_entries_of_a_keyring_are_removed_by_their_key(served: Served) -> None:
    ring = Keyring.new(BERT, [ANNE.kem_pub], now_s=1)
    assert (await served.bert.push("rooms/a/_keyring", ring.data)).status == 200
    await served.eraser.run(ANNES)
    assert Keyring((await served.bert.pull("rooms/a/_keyring")).json["data"]).recipients == ring.recipients
    report = await served.eraser.run(EraseRequest("identity", ANNE.user_id, (ANNE.kem_pub,)))
    assert report.erased["keyringEntries"] == 1
    left = Keyring((await served.bert.pull("rooms/a/_keyring")).json["data"])
    assert left.recipients == (BERT.kem_pub,)
    assert left.open(BERT, [BERT.ed_pub]).epoch == 1


async def test_the_report_names_remains_of_a_person_in_keyrings(served: Served) -> None:
    """An entry names its recipient by an X25519 key alone, and by a signing key who added it."""
    ring = Keyring.new(BERT, [ANNE.kem_pub], now_s=1)
    assert (await served.bert.push("rooms/a/_keyring", ring.data)).status == 200
    added = Keyring.new(BERT, [ANNE.kem_pub], now_s=1).add("09" * 32, ANNE, [BERT.ed_pub], now_s=2)
    assert (await served.bert.push("rooms/b/_keyring", added.data)).status == 200
    for report in (await served.eraser.dry_run(ANNES), await served.eraser.run(ANNES)):
        kept = report.describe(ANNES, is_dry_run=False)["notTouched"]
        # Bert's own keyring holds nothing of the form of a keyring.
        assert kept["keyrings"].startswith("2 keyrings of others may have entries")
        assert "kemPub" in kept["keyrings"]
        assert kept["keyringSignatures"].endswith("in 1 keyrings: rooms/b/_keyring")
    named = EraseRequest("identity", ANNE.user_id, (ANNE.kem_pub,))
    report = await served.eraser.run(named)
    kept = report.describe(named, is_dry_run=False)["notTouched"]
    assert "keyrings" not in kept
    assert kept["keyringSignatures"].endswith("rooms/b/_keyring")
    assert report.erased["keyringEntries"] == 2
    left = Keyring((await served.bert.pull("rooms/b/_keyring")).json["data"])
    assert left.recipients == (BERT.kem_pub, "09" * 32)


async def test_pushes_that_go_on_meanwhile_are_kept_or_erased_whole(served: Served, folder: Path) -> None:
    """Bert's all stay; Anne's go, as long as they come before the end."""
    done = asyncio.Event()
    written = list[str]()

    async def write(client: Signed) -> None:
        n = 0
        while not done.is_set() or n < 20:
            key = f"users/{client.keys.user_id}/notes/more-{n}"
            reply = await client.push(key, {"title": f"{n}"})
            assert reply.status in (200, 429), reply.body
            if reply.status == 200 and client is served.bert:
                written.append(key)
            n += 1

    async def write_some(client: Signed) -> None:
        for n in range(20):
            await client.push(f"users/{client.keys.user_id}/notes/more-{n}", {"title": SECRET})

    writing = asyncio.ensure_future(write(served.bert))
    racing = asyncio.ensure_future(write_some(served.anne))
    await served.eraser.run(ANNES)
    await racing
    await served.eraser.run(ANNES)
    done.set()
    await writing
    await served.eraser.run(EraseRequest("key", "board/lobby"))
    assert files_with(folder, SECRET, ANNE.user_id) == set()
    for key in written:
        assert (await served.bert.pull(key)).json["hash"]


async def test_the_history_of_a_deleted_document_goes_too(served: Served) -> None:
    key = f"users/{ANNE.user_id}/notes/{SECRET}-0"
    await served.store.delete(key)
    assert any(key in stored for stored in await stored_keys(served.store))
    report = await served.eraser.run(EraseRequest("key", key))
    assert (report.erased["documents"], report.erased["versions"]) == (0, 3)
    assert not any(key in stored for stored in await stored_keys(served.store))
    await served.store.delete(f"users/{ANNE.user_id}/notes/{SECRET}-1")
    report = await served.eraser.run(EraseRequest("prefix", f"users/{ANNE.user_id}/notes"))
    assert (report.erased["documents"], report.erased["versions"]) == (1, 6)
    assert not any(f"{ANNE.user_id}/notes/" in stored for stored in await stored_keys(served.store))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "name one of key, prefix and identity"),
        ({"key": "a", "prefix": "b"}, "name one of"),
        ({"key": "a", "more": 1}, "unknown member 'more'"),
        ({"key": 1}, "key is not a string"),
        ({"key": "a//b"}, "key"),
        ({"prefix": ""}, "key"),
        ({"prefix": "/"}, "key"),
        ({"prefix": "_pysync"}, "the server's own"),
        ({"key": "_pysync/logs/a"}, "the server's own"),
        ({"identity": "a/b"}, "is not an identity"),
        ({"identity": ".."}, "is not an identity"),
        ({"identity": "anne"}, "is not an identity"),
        ({"identity": "5D" * 16}, "is not an identity"),
        ({"identity": "5d" * 15 + "5"}, "is not an identity"),
        ({"identity": "5d" * 32}, "is not an identity"),
        ({"identity": "5d" * 16 + "\n"}, "is not an identity"),
        ({"identity": ANNE.user_id, "kemKeys": ["x"]}, "X25519"),
        ({"identity": ANNE.user_id, "kemKeys": "x"}, "X25519"),
        ({"key": "a", "kemKeys": ["0" * 64]}, "belong to an identity"),
    ],
)
def test_a_request_that_names_nothing_that_can_be_erased_is_rejected(given: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        EraseRequest.parse(given)


async def test_an_erasure_of_nothing_succeeds(served: Served) -> None:
    last = await served.log.last_id()
    stranger = IdentityKeys.from_private(b"\x53" * 32, b"\x63" * 32)
    report = await served.eraser.run(EraseRequest("identity", stranger.user_id))
    assert not +report.erased
    assert await served.log.read(last, 10) == []
    assert report.describe(ANNES, is_dry_run=False)["found"] is False


async def memory_of(coordinator: Coordinator) -> tuple[list[str], list[bytes]]:
    """The buckets that are counted and the values that are claimed: what an erasure could select of them."""
    buckets, values = list[str](), list[bytes]()

    def keep_bucket(name: str) -> bool:
        buckets.append(name)
        return False

    def keep_value(value: bytes) -> bool:
        values.append(value)
        return False

    await coordinator.forget(keep_bucket, keep_value)
    return buckets, values


async def test_a_coordinator_holds_nothing_of_an_erased_person(
    start: Start, session: aiohttp.ClientSession
) -> None:
    coordinator = MemoryCoordinator()
    served = await serve(start, session, coordinator=coordinator, quotas={})
    key, headers = f"users/{ANNE.user_id}/notes/last", {"Idempotency-Key": "last"}
    assert (await served.anne.push(key, {"title": SECRET}, headers=headers)).status == 200
    # A push of which the change log knows nothing.
    await served.log.begin_epoch()
    _, claims = await memory_of(coordinator)
    await served.eraser.run(ANNES)
    buckets, left = await memory_of(coordinator)
    changes = await coordinator.read("", 1000)
    assert identity_name(BERT.user_id) in repr(buckets)
    assert identity_name(ANNE.user_id) not in repr(buckets)
    assert ANNE.user_id not in repr([buckets, left, changes, await coordinator.prepared(1000)])
    assert len(left) == len(claims) - 1


async def test_totals_of_usage_hold_nothing_of_an_erased_person(
    start: Start, session: aiohttp.ClientSession
) -> None:
    served = await serve(start, session, store="memory:", quotas={})
    bert = (await served.bert.request("GET", "/usage")).json["used"]
    counter: Any = served.app.usage_count
    await counter.run()
    assert await keys_with(served.store, ANNE.user_id) >= {"_pysync/usage"}
    await served.eraser.run(ANNES)
    assert await keys_with(served.store, ANNE.user_id) == set()
    assert (await served.bert.request("GET", "/usage")).json["used"] == bert


async def test_a_service_in_memory_erases_too(start: Start, session: aiohttp.ClientSession) -> None:
    served = await serve(start, session)
    await served.eraser.run(ANNES)
    await served.eraser.run(EraseRequest("key", "board/lobby"))
    assert await keys_with(served.store, SECRET, ANNE.user_id) == set()
    assert (await Browser(served.anne.base, session).pull("board/lobby?last=10")).json["data"]["items"] == []


async def test_an_erasure_ends_while_it_reloads(served: Served, folder: Path) -> None:
    app = served.app
    erasing = asyncio.create_task(served.eraser.run(ANNES))
    while not erasing.done():
        await app.apply(app.prepare(app.current.config))
        await asyncio.sleep(0)
    assert (await erasing).is_found
    await served.eraser.run(EraseRequest("key", "board/lobby"))
    assert files_with(folder, SECRET, ANNE.user_id) == set()
