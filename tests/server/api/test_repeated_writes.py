"""Repeated writes: a request with a known Idempotency-Key is answered as the first time, and acts no more."""

import asyncio
import hashlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from components import S3Server
from support.clients import Browser, Reply, Start
from support.collections import LOG, NOTES, collection
from support.faulty_store import FaultyStore
from support.s3_stores import new_prefix, opened, proxied
from support.server_process import serving

from pysync.store import Store
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore
from pysync.store.s3.transfers import SINGLE_PUT_BYTES
from pysync.testing import FakeClock

PICS = collection("pics", allowedMimeTypes=["image/png"], deletable=True)
SHORT = collection("short", maxBodyBytes=64, allowedMimeTypes=["image/png"])
MEMBERS: dict[str, Any] = {
    "collections": [
        {**NOTES, "deletable": True},
        PICS,
        SHORT,
        collection("long", maxBodyBytes=2 * SINGLE_PUT_BYTES, allowedMimeTypes=["image/png"]),
        {**LOG, "deletable": True},
        {
            **LOG,
            "name": "live",
            "storagePath": "live/{id}",
            "appendOnly": {**LOG["appendOnly"], "persist": False},
        },
        collection("hiding", deletable=True, fieldPermissions={"secret": {"writeRoles": ["admin"]}}),
    ]
}
MONTH_MS = 30 * 86_400_000
TEN_MINUTES_MS = 600_000


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=["local", "memory", "moto"])
async def kept(request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> AsyncIterator[Store]:
    store: Store
    if request.param == "local":
        store = await LocalStore.open_folder(tmp_path / "data", clock)
    elif request.param == "memory":
        store = MemoryStore(clock)
    else:
        async with opened(request.getfixturevalue("moto"), new_prefix()) as store:
            yield store
        return
    yield store
    await store.close()


@pytest.fixture
async def anybody(start: Start, session: aiohttp.ClientSession, kept: Store, clock: FakeClock) -> Browser:
    return Browser(await start(MEMBERS, kept, now_ms=clock), session)


async def push(browser: Browser, key: str, data: object, base: str | None, once: str) -> Reply:
    return await browser.push(key, data, base, {"Idempotency-Key": once})


async def append(browser: Browser, key: str, data: object, once: str) -> Reply:
    return await browser.request("POST", f"/push/{key}", {"data": data}, {"Idempotency-Key": once})


async def upload(browser: Browser, key: str, body: bytes | BytesIO, once: str) -> Reply:
    headers = {"Content-Type": "image/png", "Idempotency-Key": once}
    return await browser.request("POST", f"/push/{key}", body, headers)


async def delete(browser: Browser, key: str, base: str, once: str | None = None) -> Reply:
    headers = {} if once is None else {"Idempotency-Key": once}
    return await browser.request("DELETE", f"/push/{key}?baseHash={base}", headers=headers)


async def hash_of(browser: Browser, key: str) -> Any:
    return (await browser.pull(key)).json["hash"]


async def test_repeated_push_does_not_make_a_deleted_document_again(
    anybody: Browser, clock: FakeClock
) -> None:
    first = await push(anybody, "notes/a", {"n": 1}, None, "k")
    assert (await delete(anybody, "notes/a", first.json["hash"])).status == 200
    clock.now_ms += 5
    assert (await push(anybody, "notes/a", {"n": 1}, None, "k")).body == first.body
    assert await hash_of(anybody, "notes/a") == ""


async def test_repeated_push_is_answered_although_others_replaced_it(anybody: Browser) -> None:
    base = (await anybody.push("notes/a", {"n": 0})).json["hash"]
    first = await push(anybody, "notes/a", {"n": 1}, base, "k")
    latest = (await anybody.push("notes/a", {"n": 2}, first.json["hash"])).json["hash"]
    assert (await push(anybody, "notes/a", {"n": 1}, base, "k")).body == first.body
    assert await hash_of(anybody, "notes/a") == latest


async def test_repeated_push_does_not_write_where_its_base_is_stored_again(anybody: Browser) -> None:
    base = (await anybody.push("notes/a", {"n": 0})).json["hash"]
    first = await push(anybody, "notes/a", {"n": 1}, base, "k")
    assert (await anybody.push("notes/a", {"n": 0}, first.json["hash"])).json["hash"] == base
    assert (await push(anybody, "notes/a", {"n": 1}, base, "k")).body == first.body
    assert await hash_of(anybody, "notes/a") == base


async def test_repeated_delete_does_not_remove_what_was_stored_after_it(
    anybody: Browser, clock: FakeClock
) -> None:
    hash_ = (await anybody.push("notes/a", {"n": 1})).json["hash"]
    first = await delete(anybody, "notes/a", hash_, "k")
    clock.now_ms += 5
    assert (await anybody.push("notes/a", {"n": 1})).json["hash"] == hash_
    again = await delete(anybody, "notes/a", hash_, "k")
    assert (again.status, again.body) == (200, first.body)
    assert await hash_of(anybody, "notes/a") == hash_


async def test_repeated_delete_of_a_file_or_log_does_not_remove_a_later_one(anybody: Browser) -> None:
    png = hashlib.sha256(b"png").hexdigest()
    await upload(anybody, "pics/a", b"png", "1")
    first = await delete(anybody, "pics/a", png, "k")
    await upload(anybody, "pics/a", b"png", "2")
    assert (await delete(anybody, "pics/a", png, "k")).body == first.body
    assert (await anybody.pull("pics/a")).body == b"png"
    await append(anybody, "log/a", {"n": 1}, "3")
    log = (await anybody.pull("log/a?last=1")).json["hash"]
    first = await delete(anybody, "log/a", log, "k")
    await append(anybody, "log/a", {"n": 1}, "4")
    assert (await delete(anybody, "log/a", log, "k")).body == first.body
    assert (await anybody.pull("log/a?last=1")).json["hash"] == log


async def test_repeated_upload_does_not_replace_a_later_one(anybody: Browser, clock: FakeClock) -> None:
    first = await upload(anybody, "pics/b", b"one", "k3")
    clock.now_ms += 5
    await upload(anybody, "pics/b", b"two", "k4")
    assert (await upload(anybody, "pics/b", b"one", "k3")).body == first.body
    assert (await anybody.pull("pics/b")).body == b"two"


async def test_repeated_upload_does_not_undo_a_delete(anybody: Browser) -> None:
    first = await upload(anybody, "pics/a", b"one", "k")
    assert (await delete(anybody, "pics/a", first.json["hash"])).status == 200
    assert (await upload(anybody, "pics/a", b"one", "k")).body == first.body
    assert await hash_of(anybody, "pics/a") == ""


async def test_repeated_append_does_not_begin_a_deleted_log_anew(anybody: Browser) -> None:
    first = await append(anybody, "log/a", {"n": 1}, "k")
    assert (await delete(anybody, "log/a", first.json["hash"])).status == 200
    assert (await append(anybody, "log/a", {"n": 1}, "k")).body == first.body
    assert await hash_of(anybody, "log/a?last=1") == ""


async def test_repeated_append_is_answered_as_the_first(anybody: Browser) -> None:
    firsts = [await append(anybody, "log/a", {"n": n}, f"{n}") for n in range(3)]
    agains = await asyncio.gather(*(append(anybody, "log/a", {"n": n}, f"{n}") for n in range(4)))
    assert [again.body for again in agains[:3]] == [first.body for first in firsts]
    assert [each["data"]["n"] for each in (await anybody.pull("log/a?last=9")).json["data"]["items"]] == [
        0, 1, 2, 3,
    ]  # fmt: skip


async def test_other_data_under_a_known_key_is_rejected(anybody: Browser) -> None:
    reused = (422, "Idempotency-Key was used for other data")
    await push(anybody, "notes/a", {"n": 1}, None, "k")
    assert (await push(anybody, "notes/a", {"n": 2}, None, "k")).error == reused
    await upload(anybody, "pics/a", b"one", "k")
    assert (await upload(anybody, "pics/a", b"two", "k")).error == reused
    assert (await anybody.pull("pics/a")).body == b"one"
    await append(anybody, "log/a", {"n": 1}, "k")
    assert (await append(anybody, "log/a", {"n": 2}, "k")).error == reused
    assert len((await anybody.pull("log/a?last=9")).json["data"]["items"]) == 1
    hash_ = await hash_of(anybody, "notes/a")
    assert (await delete(anybody, "notes/a", hash_, "d")).status == 200
    assert (await delete(anybody, "notes/a", "0" * 64, "d")).error == reused


async def test_rejected_write_leaves_its_key_free(anybody: Browser) -> None:
    base = (await anybody.push("notes/a", {"n": 0})).json["hash"]
    assert (await push(anybody, "notes/a", {"n": 1}, None, "k")).status == 409
    assert (await push(anybody, "notes/a", {"n": 2}, base, "k")).status == 200
    assert (await delete(anybody, "notes/a", base, "d")).status == 409
    assert (await delete(anybody, "notes/a", await hash_of(anybody, "notes/a"), "d")).status == 200
    assert (await upload(anybody, "short/a", b"x" * 65, "k")).status == 413
    assert (await upload(anybody, "short/a", b"x", "k")).status == 200


async def test_key_belongs_to_one_document(anybody: Browser) -> None:
    assert (await upload(anybody, "pics/a", b"one", "k")).status == 200
    assert (await upload(anybody, "pics/b", b"two", "k")).status == 200
    assert [(await anybody.pull(f"pics/{id_}")).body for id_ in "ab"] == [b"one", b"two"]


async def test_key_is_free_again_after_ten_minutes(anybody: Browser, clock: FakeClock) -> None:
    await upload(anybody, "pics/a", b"one", "k")
    clock.now_ms += TEN_MINUTES_MS - 1
    assert (await upload(anybody, "pics/a", b"two", "k")).status == 422
    clock.now_ms += 1
    assert (await upload(anybody, "pics/a", b"two", "k")).status == 200
    assert (await anybody.pull("pics/a")).body == b"two"


async def answered(write: Callable[[], Awaitable[Reply]]) -> Reply:
    """The answer to a write, which is repeated while a bucket says that another attempt may be under way."""
    while (reply := await write()).status == 503:
        assert reply.json["code"] == "store_unavailable"
    return reply


async def test_of_concurrent_repetitions_one_acts_and_all_get_its_answer(anybody: Browser) -> None:
    for n in range(5):
        for one in (
            partial(push, anybody, f"notes/{n}", {"n": 1}, None, "p"),
            partial(upload, anybody, f"pics/{n}", b"one", "u"),
            partial(append, anybody, f"log/{n}", {"n": 1}, "a"),
            partial(delete, anybody, f"pics/{n}", hashlib.sha256(b"one").hexdigest(), "d"),
        ):
            replies = await asyncio.gather(*(answered(one) for _ in range(4)))
            assert {(reply.status, reply.body) for reply in replies} == {(200, replies[0].body)}
        assert len((await anybody.pull(f"log/{n}?last=9")).json["data"]["items"]) == 1


async def test_repetition_reaches_another_process_on_a_folder(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path, clock: FakeClock
) -> None:
    kept = await LocalStore.open_folder(tmp_path / "data", clock)
    anybody = Browser(await start(MEMBERS, kept, now_ms=clock), session)
    store = await LocalStore.open_folder(tmp_path / "data", clock)
    other = Browser(await start(MEMBERS, store, now_ms=clock), session)
    first = await upload(anybody, "pics/a", b"one", "k")
    await upload(anybody, "pics/a", b"two", "l")
    assert (await upload(other, "pics/a", b"one", "k")).body == first.body
    assert (await other.pull("pics/a")).body == b"two"
    for n in range(5):
        replies = await asyncio.gather(
            *(push(each, f"notes/{n}", {"n": 1}, None, "p") for each in (anybody, other) * 3)
        )
        assert {(reply.status, reply.body) for reply in replies} == {(200, replies[0].body)}
    await store.close()
    await kept.close()


async def test_repetition_is_answered_where_the_caller_may_not_write_all_members(anybody: Browser) -> None:
    base = (await anybody.push("hiding/a", {"n": 0})).json["hash"]
    first = await push(anybody, "hiding/a", {"n": 1}, base, "k")
    assert (await push(anybody, "hiding/a", {"n": 1}, base, "k")).body == first.body
    assert (await delete(anybody, "hiding/a", first.json["hash"])).status == 403
    assert (await push(anybody, "hiding/a", {"n": 2}, base, "k")).status == 422


class Lossy(NamedTuple):
    """A service on a bucket that loses requests and answers on demand."""

    anybody: Browser
    store: FaultyStore


@pytest.fixture
async def lossy(start: Start, session: aiohttp.ClientSession, clock: FakeClock) -> Lossy:
    store = FaultyStore(MemoryStore(clock), clock)
    return Lossy(Browser(await start(MEMBERS, store, now_ms=clock), session), store)


UNKNOWN = (409, "outcome_unknown")


def code_of(reply: Reply) -> tuple[int, str]:
    return reply.status, reply.json["code"]


async def test_lost_answer_of_a_push_to_a_bucket_is_found(lossy: Lossy, clock: FakeClock) -> None:
    anybody, store = lossy
    store.lose_reply("put")
    assert (await push(anybody, "notes/a", {"n": 1}, None, "k")).status == 503
    clock.now_ms += 5
    first = await push(anybody, "notes/a", {"n": 1}, None, "k")
    assert (first.status, first.json["timestamp"]) == (200, clock.now_ms - 5)
    latest = (await anybody.push("notes/a", {"n": 2}, first.json["hash"])).json["hash"]
    assert (await push(anybody, "notes/a", {"n": 1}, None, "k")).body == first.body
    assert await hash_of(anybody, "notes/a") == latest


async def test_lost_push_over_a_version_that_is_still_there_is_made(lossy: Lossy) -> None:
    anybody, store = lossy
    base = (await anybody.push("notes/a", {"n": 0})).json["hash"]
    store.fail("put")
    assert (await push(anybody, "notes/a", {"n": 1}, base, "k")).status == 503
    assert (await push(anybody, "notes/a", {"n": 1}, base, "k")).status == 200
    assert (await anybody.pull("notes/a")).json["data"] == {"n": 1}


async def test_push_whose_object_is_gone_or_another_has_an_unknown_outcome(
    lossy: Lossy, clock: FakeClock
) -> None:
    anybody, store = lossy
    base = (await anybody.push("notes/b", {"n": 0})).json["hash"]
    store.lose_reply("put", times=2)
    assert (await push(anybody, "notes/a", {"n": 1}, None, "k")).status == 503
    assert (await push(anybody, "notes/b", {"n": 1}, base, "k")).status == 503
    assert (await delete(anybody, "notes/a", await hash_of(anybody, "notes/a"))).status == 200
    latest = await anybody.push("notes/b", {"n": 2}, await hash_of(anybody, "notes/b"))
    assert (await push(anybody, "notes/a", {"n": 1}, None, "k")).status == 503, "it may still be under way"
    clock.now_ms += 30_000
    assert code_of(await push(anybody, "notes/a", {"n": 1}, None, "k")) == UNKNOWN
    assert code_of(await push(anybody, "notes/b", {"n": 1}, base, "k")) == UNKNOWN
    assert await hash_of(anybody, "notes/a") == ""
    assert await hash_of(anybody, "notes/b") == latest.json["hash"]
    clock.now_ms += TEN_MINUTES_MS
    assert (await push(anybody, "notes/a", {"n": 1}, None, "k")).status == 200


async def test_lost_answer_of_an_upload_to_a_bucket_is_found(lossy: Lossy, clock: FakeClock) -> None:
    anybody, store = lossy
    store.lose_reply("write", times=2)
    assert (await upload(anybody, "pics/a", b"one", "k")).status == 503
    assert (await upload(anybody, "pics/b", b"one", "k")).status == 503
    clock.now_ms += 5
    first = await upload(anybody, "pics/a", b"one", "k")
    assert (first.status, first.json["timestamp"]) == (200, clock.now_ms - 5)
    await upload(anybody, "pics/a", b"two", "l")
    assert (await upload(anybody, "pics/a", b"one", "k")).body == first.body
    await upload(anybody, "pics/b", b"two", "l")
    clock.now_ms += 30_000
    assert code_of(await upload(anybody, "pics/b", b"one", "k")) == UNKNOWN
    assert [(await anybody.pull(f"pics/{id_}")).body for id_ in "ab"] == [b"two", b"two"]


async def test_lost_delete_in_a_bucket_is_made_only_over_its_version(lossy: Lossy, clock: FakeClock) -> None:
    anybody, store = lossy
    hash_ = (await anybody.push("notes/a", {"n": 1})).json["hash"]
    await anybody.push("notes/b", {"n": 1})
    store.fail("delete")
    assert (await delete(anybody, "notes/a", hash_, "k")).status == 503
    assert (await delete(anybody, "notes/a", hash_, "k")).status == 200
    assert await hash_of(anybody, "notes/a") == ""
    store.lose_reply("delete")
    assert (await delete(anybody, "notes/b", hash_, "k")).status == 503
    await anybody.push("notes/b", {"n": 1})
    clock.now_ms += 30_000
    assert code_of(await delete(anybody, "notes/b", hash_, "k")) == UNKNOWN
    assert await hash_of(anybody, "notes/b") == hash_


async def test_lost_append_to_a_log_that_is_gone_has_an_unknown_outcome(lossy: Lossy) -> None:
    anybody, store = lossy
    await append(anybody, "log/a", {"n": 0}, "0")
    store.lose_reply("put")
    assert (await append(anybody, "log/a", {"n": 1}, "k")).status == 503
    assert (await delete(anybody, "log/a", await hash_of(anybody, "log/a?last=1"))).status == 200
    assert code_of(await append(anybody, "log/a", {"n": 1}, "k")) == UNKNOWN
    assert await hash_of(anybody, "log/a?last=1") == ""
    await append(anybody, "log/a", {"n": 2}, "2")
    assert code_of(await append(anybody, "log/a", {"n": 1}, "k")) == UNKNOWN
    assert [each["data"]["n"] for each in (await anybody.pull("log/a?last=9")).json["data"]["items"]] == [2]


async def test_slow_delete_in_a_bucket_that_its_repetition_made_is_answered(lossy: Lossy) -> None:
    anybody, store = lossy
    hash_ = (await anybody.push("notes/a", {"n": 1})).json["hash"]
    release = asyncio.Event()
    arrived = store.delay("delete", release)
    slow = asyncio.ensure_future(delete(anybody, "notes/a", hash_, "k"))
    await arrived.wait()
    made = await delete(anybody, "notes/a", hash_, "k")
    assert made.status == 200
    await anybody.push("notes/a", {"n": 1})
    await anybody.push("notes/a", {"n": 2}, hash_)
    release.set()
    assert (await slow).body == made.body
    assert (await anybody.pull("notes/a")).json["data"] == {"n": 2}


async def test_slow_delete_in_a_bucket_is_not_rejected_while_its_repetition_makes_it(lossy: Lossy) -> None:
    anybody, store = lossy
    hash_ = (await anybody.push("notes/a", {"n": 1})).json["hash"]
    release, reply = asyncio.Event(), asyncio.Event()
    arrived = store.delay("delete", release)
    slow = asyncio.ensure_future(delete(anybody, "notes/a", hash_, "k"))
    await arrived.wait()
    deleted = store.delay("delete", reply, of_reply=True)
    repeated = asyncio.ensure_future(delete(anybody, "notes/a", hash_, "k"))
    await deleted.wait()
    release.set()
    assert code_of(await slow) == (503, "store_unavailable")
    reply.set()
    made = await repeated
    assert made.status == 200
    assert (await delete(anybody, "notes/a", hash_, "k")).body == made.body


async def test_lost_append_is_found_or_made_in_the_log_that_it_was_for(lossy: Lossy) -> None:
    anybody, store = lossy
    await append(anybody, "log/a", {"n": 0}, "j")
    store.lose_reply("put")
    assert (await append(anybody, "log/a", {"n": 1}, "k")).status == 503
    store.fail("put")
    assert (await append(anybody, "log/a", {"n": 2}, "l")).status == 503
    for n, once in ((1, "k"), (2, "l"), (2, "l")):
        assert (await append(anybody, "log/a", {"n": n}, once)).status == 200
    items = (await anybody.pull("log/a?last=9")).json["data"]["items"]
    assert [each["data"]["n"] for each in items] == [0, 1, 2]


async def test_repeated_append_to_a_log_that_is_not_stored_is_announced_once(
    anybody: Browser, start: Start, clock: FakeClock
) -> None:
    (app,) = start.apps  # type: ignore[attr-defined]
    first = await append(anybody, "live/a", {"n": 1}, "k")
    clock.now_ms += 5
    assert (await append(anybody, "live/a", {"n": 1}, "k")).body == first.body
    assert (await append(anybody, "live/a", {"n": 2}, "k")).status == 422
    assert len(await app.engine.outbox.log.read("", 10)) == 1


async def test_full_claims_reject_only_writes_that_need_one(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path, clock: FakeClock
) -> None:
    store = await LocalStore.open_folder(tmp_path / "few", clock, max_claims=8)
    anybody = Browser(await start(MEMBERS, store, now_ms=clock), session)
    first = await push(anybody, "notes/0", {"n": 1}, None, "k")
    for n in range(1, 6):  # callers without credentials leave two
        assert (await push(anybody, f"notes/{n}", {"n": 1}, None, "k")).status == 200
    for reply in (
        await push(anybody, "notes/7", {"n": 1}, None, "k"),
        await upload(anybody, "pics/7", b"one", "k"),
        await append(anybody, "log/7", {"n": 1}, "k"),
    ):
        assert (reply.status, "Retry-After" in reply.headers) == (503, True)
    assert (await anybody.push("notes/7", {"n": 1})).status == 200
    without = anybody.request("POST", "/push/log/8", {"data": {"n": 1}})
    together = await asyncio.gather(append(anybody, "log/8", {"n": 2}, "k"), without)
    assert [reply.status for reply in together] == [503, 200]
    assert (await push(anybody, "notes/0", {"n": 1}, None, "k")).body == first.body
    clock.now_ms += TEN_MINUTES_MS
    assert (await upload(anybody, "pics/7", b"one", "k")).status == 200
    await store.close()


async def test_claims_of_a_clock_that_was_ahead_do_not_fill_the_table(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path, clock: FakeClock
) -> None:
    store = await LocalStore.open_folder(tmp_path / "few", clock, max_claims=8)
    anybody = Browser(await start(MEMBERS, store, now_ms=clock), session)
    clock.now_ms += MONTH_MS
    first = await push(anybody, "notes/0", {"n": 1}, None, "k")
    clock.now_ms -= MONTH_MS
    assert (await push(anybody, "notes/0", {"n": 1}, None, "k")).body == first.body
    for n in range(1, 20):
        clock.now_ms += TEN_MINUTES_MS // 2
        assert (await push(anybody, f"notes/{n}", {"n": 1}, None, "k")).status == 200
    await store.close()


@pytest.mark.process
async def test_acknowledged_write_is_not_repeated_after_the_server_was_killed(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with serving(tmp_path, **MEMBERS) as process:
        anybody = Browser(process.base, session)
        firsts = [
            await push(anybody, "notes/a", {"n": 1}, None, "k"),
            await upload(anybody, "pics/a", b"one", "k"),
            await append(anybody, "log/a", {"n": 1}, "k"),
        ]
        hash_ = firsts[0].json["hash"]
        firsts.append(await delete(anybody, "notes/a", hash_, "d"))
        process.signal(signal.SIGKILL)
        await process.ended()
    async with serving(tmp_path, server={"workers": 2}, **MEMBERS) as process:
        anybody = Browser(process.base, session)
        await upload(anybody, "pics/a", b"two", "l")
        for _ in range(2):
            agains = [
                await push(anybody, "notes/a", {"n": 1}, None, "k"),
                await upload(anybody, "pics/a", b"one", "k"),
                await append(anybody, "log/a", {"n": 1}, "k"),
                await delete(anybody, "notes/a", hash_, "d"),
            ]
            assert [again.body for again in agains] == [first.body for first in firsts]
        assert await hash_of(anybody, "notes/a") == ""
        assert (await anybody.pull("pics/a")).body == b"two"
        assert len((await anybody.pull("log/a?last=9")).json["data"]["items"]) == 1


@pytest.mark.parametrize("kind", ["HEAD", "PUT", "POST uploads", "PUT partNumber"])
async def test_upload_that_did_not_reach_the_bucket_is_free_to_repeat(
    kind: str, start: Start, session: aiohttp.ClientSession, moto: S3Server, clock: FakeClock
) -> None:
    body = b"one" if kind in ("HEAD", "PUT") else bytes(SINGLE_PUT_BYTES + 1)
    async with proxied(moto) as bucket:
        anybody = Browser(await start(MEMBERS, bucket.store, now_ms=clock), session)
        bucket.proxy.throttle(kind, times=None)
        assert (await upload(anybody, "long/a", BytesIO(body), "k")).status == 503
        assert bucket.proxy.met
        bucket.proxy.reset()
        assert (await upload(anybody, "long/a", BytesIO(body), "k")).status == 200
        assert (await anybody.pull("long/a")).body == body
