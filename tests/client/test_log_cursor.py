"""Logs through the client, against the service: a cursor gives each element once and leaves none out."""

import asyncio
import random
from typing import Any

import aiohttp
import pytest
from support.clients import ISSUER, STRANGER, SUBJECT, Browser, Start, root_device
from support.collections import PUBLIC
from support.fake_server import Answer, Waits, client, serving
from support.s3_fault_proxy import FaultProxy

from pysync.client import (
    BadAuthorProof,
    Client,
    LogCursor,
    LogElement,
    LogRange,
    RetryPolicy,
    Unreachable,
)
from pysync.errors import (
    CheckpointTooOld,
    Forbidden,
    FullNotAllowed,
    InvalidPathParameter,
    PullBoundRequired,
    RateLimited,
    Unavailable,
)
from pysync.testing import FakeClock


def log(name: str, requires_proof: bool = False, **settings: Any) -> dict[str, Any]:
    """A collection of logs at `name/{id}`, for everybody."""
    settings["requireAuthorSignature"] = requires_proof
    return {"name": name, "storagePath": f"{name}/{{id}}", "appendOnly": settings, **PUBLIC}


SERVICE: dict[str, Any] = {
    "collections": [
        log("log"),
        log("entries", field="entries"),
        log("signed", requires_proof=True),
        log("small", maxPullLimit=5),
        log("shut", maxPullLimit=5, allowFull=False),
        log("aged", maxCheckpointAgeMs=60_000, maxPullLimit=5),
        log("shut-aged", maxCheckpointAgeMs=60_000, maxPullLimit=5, allowFull=False),
        {**log("fading"), "ttlMs": 60_000},
        {**log("whole"), "forceFullFetch": True},
        {**log("whole-small", maxPullLimit=5), "forceFullFetch": True},
        {**log("whole-shut", maxPullLimit=5, allowFull=False), "forceFullFetch": True},
        {**log("shut-fading", maxCheckpointAgeMs=60_000, allowFull=False), "ttlMs": 60_000},
    ]
}


def signer(base: str, keys: Any) -> Client:
    return Client(base, keys=keys, certificate=root_device(keys))


async def appended(client: Client, key: str, *times: int) -> list[int]:
    for ts_ms in times:
        await client.append(key, {"n": ts_ms}, ts_ms=ts_ms)
    return list(times)


def times(elements: list[LogElement]) -> list[int]:
    return [element.ts_ms for element in elements]


async def all_new(cursor: LogCursor) -> list[int]:
    """The times of what a cursor gives until a pull gives nothing."""
    found: list[int] = []
    while elements := await cursor.pull():
        found += times(elements)
    return found


async def test_an_append_that_is_repeated_under_its_key_is_one_element(start: Start) -> None:
    base = await start(SERVICE)
    async with signer(base, ISSUER) as mine, Client(base) as anyone:
        for append, key in ((mine.append, "a"), (anyone.append, "b"), (mine.append_anonymous, "c")):
            first = await append("log/a", {"n": 1}, idempotency_key=key)
            assert await append("log/a", {"n": 1}, idempotency_key=key) == first
        assert await mine.append("log/a", {"n": 1}) != await mine.append("log/a", {"n": 1})
        assert len((await anyone.pull("log/a", full=True)).elements()) == 5


async def test_parts_of_many_logs_come_in_one_batch(start: Start) -> None:
    async with Client(await start(SERVICE)) as anyone:
        await appended(anyone, "small/a", *range(1, 9))
        await appended(anyone, "small/b", 4)
        newest, oldest, none, wrong = await anyone.batch_pull_many_append(
            "small",
            [
                LogRange({"id": "a"}, last=2),
                LogRange({"id": "a"}, since=1),
                LogRange({"id": "b"}, since=4),
                LogRange({"id": "no such id"}, last=2),
            ],
        )
        assert isinstance(newest, list)
        assert isinstance(oldest, list)
        assert (times(newest), times(oldest), none) == ([7, 8], [2, 3, 4, 5, 6], [])
        assert isinstance(wrong, InvalidPathParameter)
        (bare,) = (await anyone.batch_pull(["small"], {"small": [{"id": "a"}]}))["small"]
        assert isinstance(bare, PullBoundRequired)


async def test_the_first_pull_takes_all_and_later_ones_what_is_new(start: Start) -> None:
    async with Client(await start(SERVICE)) as anyone:
        cursor = LogCursor(anyone, "log/a")
        assert (await cursor.pull(), cursor.checkpoint_ms) == ([], None)
        wanted = await appended(anyone, "log/a", 3, 4, 9)
        assert await cursor.pull() == [LogElement(ts_ms, {"n": ts_ms}) for ts_ms in wanted]
        assert (await cursor.pull(), cursor.checkpoint_ms) == ([], 9)
        await appended(anyone, "log/a", 10, 12)
        assert times(await cursor.pull()) == [10, 12]
        assert times(await LogCursor(anyone, "/pull/log/a").pull()) == [3, 4, 9, 10, 12]


async def test_a_cursor_knows_whether_there_is_more(start: Start) -> None:
    async with Client(await start(SERVICE)) as anyone:
        wanted = await appended(anyone, "small/a", *range(1, 13))
        cursor = LogCursor(anyone, "small/a", since=0)
        found = []
        for has_more in (True, True, False):
            found += times(await cursor.pull())
            assert cursor.has_more is has_more
        assert found == wanted
        # Exactly as many as fit are not taken for a part.
        last = LogCursor(anyone, "small/a", since=7)
        assert (times(await last.pull()), last.has_more) == ([8, 9, 10, 11, 12], False)


@pytest.mark.parametrize("name", ["whole", "whole-small"])
async def test_a_log_that_is_always_sent_whole_gives_each_element_once(start: Start, name: str) -> None:
    async with Client(await start(SERVICE)) as anyone:
        key = f"{name}/a"
        cursor = LogCursor(anyone, key, since=0)
        found, count = [], 0
        for new in ([1, 2, 3], [4, 5], [6, 7, 8], [], [9]):
            await appended(anyone, key, *new)
            count += len(new)
            has_more = True
            for _ in range(3):
                if has_more:
                    found += times(await cursor.pull())
                    has_more = cursor.has_more
            assert not has_more
            assert found == [*range(1, count + 1)]


async def test_a_log_that_can_neither_be_gone_on_with_nor_had_whole_is_rejected(start: Start) -> None:
    async with Client(await start(SERVICE)) as anyone:
        cursor = LogCursor(anyone, "whole-shut/a", since=0)
        await appended(anyone, "whole-shut/a", 1, 2, 3, 4, 5)
        assert times(await cursor.pull()) == [1, 2, 3, 4, 5]
        assert await cursor.pull() == []
        await appended(anyone, "whole-shut/a", 6)
        with pytest.raises(FullNotAllowed):
            await cursor.pull()
        assert cursor.checkpoint_ms == 5


async def test_a_log_may_call_its_elements_otherwise(start: Start) -> None:
    async with Client(await start(SERVICE)) as anyone:
        await appended(anyone, "entries/a", 1, 2)
        assert times(await LogCursor(anyone, "entries/a", field="entries").pull()) == [1, 2]
        with pytest.raises(ValueError, match="'items'"):
            await LogCursor(anyone, "entries/a").pull()


async def test_pulls_of_several_tasks_give_each_element_to_one_of_them(start: Start) -> None:
    async with Client(await start(SERVICE)) as anyone:
        cursor = LogCursor(anyone, "log/a")
        await appended(anyone, "log/a", 1, 2, 3)
        found = await asyncio.gather(*(cursor.pull() for _ in range(5)))
    assert [times(part) for part in found] == [[1, 2, 3], [], [], [], []]


@pytest.mark.parametrize(("first", "wanted"), [(0, []), (2, [8, 9]), (9, [7, 8, 9])])
async def test_a_first_pull_may_be_bounded_and_the_next_lacks_nothing(
    start: Start, first: int, wanted: list[int]
) -> None:
    async with Client(await start(SERVICE)) as anyone:
        await appended(anyone, "shut/a", 7, 8, 9)
        cursor = LogCursor(anyone, "shut/a", first=first)
        assert (times(await cursor.pull()), cursor.checkpoint_ms) == (wanted, 9)
        await appended(anyone, "shut/a", 10, 11, 12)
        assert times(await cursor.pull()) == [10, 11, 12]


@pytest.mark.parametrize("first", [0, 2])
async def test_elements_after_a_first_pull_of_an_empty_log_are_all_new(start: Start, first: int) -> None:
    async with Client(await start(SERVICE)) as anyone:
        for key in ("small/a", "log/a"):
            cursor = LogCursor(anyone, key, first=first)
            assert await cursor.pull() == []
            wanted = await appended(anyone, key, *range(8))  # one of them at time 0
            assert times(await cursor.pull()) == wanted


async def test_the_newest_of_what_is_after_a_checkpoint_can_be_first(start: Start) -> None:
    async with Client(await start(SERVICE)) as anyone:
        await appended(anyone, "log/a", *range(1, 10))
        cursor = LogCursor(anyone, "log/a", since=3, first=2)
        assert times(await cursor.pull()) == [8, 9]
        late = LogCursor(anyone, "log/a", since=9, first=0)
        assert (await late.pull(), late.checkpoint_ms) == ([], 9)
        await appended(anyone, "log/a", 10)
        assert times(await late.pull()) == times(await cursor.pull()) == [10]


@pytest.mark.parametrize("key", ["log/a", "small/a"])
@pytest.mark.parametrize("since", [0, 3, 9, 10, 11, 14, 1000])
async def test_a_cursor_goes_on_after_any_time(start: Start, key: str, since: int) -> None:
    async with Client(await start(SERVICE)) as anyone:
        stored = await appended(anyone, key, *range(1, 30, 2))
        cursor = LogCursor(anyone, key, since=since)
        assert await all_new(cursor) == [ts_ms for ts_ms in stored if ts_ms > since]
        await appended(anyone, key, 2000)
        assert times(await cursor.pull()) == [2000]


async def test_a_cursor_begins_after_the_elements_that_are_known(start: Start) -> None:
    known = [LogElement(5, {}), LogElement(7, {})]
    async with Client(await start(SERVICE)) as anyone:
        await appended(anyone, "log/a", 5, 7, 8)
        for cursor in (
            LogCursor(anyone, "log/a", seen=known),
            LogCursor(anyone, "log/a", seen=known, since=7),
        ):
            assert (times(await cursor.pull()), cursor.checkpoint_ms) == ([8], 8)
        for bounds in ({"since": 6, "seen": known}, {"since": -1}, {"first": -1}):
            with pytest.raises(ValueError, match=r"since|first"):
                LogCursor(anyone, "log/a", **bounds)


@pytest.mark.parametrize("key", ["small/a", "shut/a"])
async def test_a_log_that_comes_in_parts_is_read_from_the_oldest_on(start: Start, key: str) -> None:
    async with Client(await start(SERVICE)) as anyone:
        await appended(anyone, key, *range(1, 13))
        cursor = LogCursor(anyone, key, since=0)
        found = [times(await cursor.pull()) for _ in range(4)]
        assert found == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12], []]
        behind = LogCursor(anyone, key, first=1)
        assert times(await behind.pull()) == [12]
        wanted = await appended(anyone, key, *range(13, 25))
        assert await all_new(behind) == await all_new(cursor) == wanted


async def test_a_log_that_rejects_to_be_read_as_a_whole_is_followed_from_its_beginning(start: Start) -> None:
    async with Client(await start(SERVICE)) as anyone:
        cursor = LogCursor(anyone, "shut/a", first=2)
        assert await cursor.pull() == await cursor.pull() == []
        wanted = await appended(anyone, "shut/a", *range(1, 13))
        assert await all_new(cursor) == wanted
        with pytest.raises(FullNotAllowed):
            await LogCursor(anyone, "shut/a").pull()


@pytest.mark.parametrize("collection", ["aged", "shut-aged"])
async def test_a_log_that_is_quiet_for_longer_than_a_checkpoint_may_be_old_is_followed(
    start: Start, collection: str
) -> None:
    clock, key = FakeClock(), f"{collection}/a"
    async with Client(await start(SERVICE, now_ms=clock)) as anyone:
        await anyone.append(key, {"n": 1})
        cursor = LogCursor(anyone, key, first=3)
        assert len(await cursor.pull()) == 1
        clock.now_ms += 61_000
        with pytest.raises(CheckpointTooOld):
            await anyone.pull(key, since=cursor.checkpoint_ms)
        assert await cursor.pull() == []
        for n in range(2, 6):  # with the one that is known as many as a pull gives
            await anyone.append(key, {"n": n})
        assert [element.data["n"] for element in await cursor.pull()] == [2, 3, 4, 5]
        assert await cursor.pull() == []


async def test_more_than_the_newest_after_a_quiet_time_is_found_in_the_whole_log(start: Start) -> None:
    clock = FakeClock()
    async with Client(await start(SERVICE, now_ms=clock)) as anyone:
        await anyone.append("aged/a", {"n": 1})
        cursor = LogCursor(anyone, "aged/a")
        assert len(await cursor.pull()) == 1
        clock.now_ms += 61_000
        for n in range(2, 14):
            await anyone.append("aged/a", {"n": n})
        assert [element.data["n"] for element in await cursor.pull()] == [*range(2, 14)]
        assert await cursor.pull() == []


@pytest.mark.parametrize(("before", "after"), [(1, 5), (0, 1)])
async def test_unreachable_server_is_reported_and_nothing_taken_in(
    start: Start, before: int, after: int
) -> None:
    clock = FakeClock()
    async with Client(await start(SERVICE, now_ms=clock)) as anyone:
        for _ in range(before):
            await anyone.append("shut-aged/a", {})
        cursor = LogCursor(anyone, "shut-aged/a", first=3)
        assert len(await cursor.pull()) == before
        checkpoint_ms = cursor.checkpoint_ms
        clock.now_ms += 61_000
        assert await cursor.pull() == []
        for _ in range(after):
            await anyone.append("shut-aged/a", {})
        for _ in range(2):
            with pytest.raises(CheckpointTooOld):
                await cursor.pull()
            assert cursor.checkpoint_ms == checkpoint_ms


async def test_a_log_that_expired_and_began_anew_goes_on(start: Start) -> None:
    clock = FakeClock()
    async with Client(await start(SERVICE, now_ms=clock)) as anyone:
        cursor = LogCursor(anyone, "fading/a")
        await anyone.append("fading/a", {"n": 1})
        assert len(await cursor.pull()) == 1
        clock.now_ms += 61_000
        assert await cursor.pull() == []
        await anyone.append("fading/a", {"n": 2})
        assert [element.data for element in await cursor.pull()] == [{"n": 2}]
        assert await cursor.pull() == []


async def test_a_log_that_expired_has_nothing_new_however_old_the_checkpoint(start: Start) -> None:
    clock = FakeClock()
    async with Client(await start(SERVICE, now_ms=clock)) as anyone:
        await anyone.append("shut-fading/a", {})
        cursor = LogCursor(anyone, "shut-fading/a", first=1)
        assert len(await cursor.pull()) == 1
        clock.now_ms += 61_000
        assert await cursor.pull() == []


@pytest.mark.parametrize("collection", ["log", "small", "shut"])
@pytest.mark.parametrize("seed", range(3))
async def test_bursts_of_any_length_come_whole(start: Start, collection: str, seed: int) -> None:
    rng = random.Random(seed)
    key, wanted, found = f"{collection}/a", [], []
    async with Client(await start(SERVICE)) as anyone:
        wanted += await appended(anyone, key, 1)
        cursor = LogCursor(anyone, key, first=1)
        for _ in range(12):
            found += times(await cursor.pull())
            last = wanted[-1]
            for _ in range(rng.choice((0, 1, 4, 5, 6, 17))):
                last += rng.randint(1, 3)
                wanted += await appended(anyone, key, last)
            if rng.random() < 0.3:
                cursor = LogCursor(anyone, key, since=cursor.checkpoint_ms)
        found += await all_new(cursor)
    assert found == wanted


async def test_proofs_of_expected_authors_pass(start: Start) -> None:
    base = await start(SERVICE)
    async with signer(base, ISSUER) as mine, Client(base) as anyone:
        await mine.append("signed/a", {"é": 1.0, "big": 2**60, "__proto__": 1})
        await mine.append_anonymous("signed/a", {"n": 2}, SUBJECT)
        found = await LogCursor(anyone, "signed/a", verify=True).pull()
        assert [element.author_pubkey for element in found] == [ISSUER.ed_pub, SUBJECT.ed_pub]
        both = [ISSUER.ed_pub.upper(), SUBJECT.ed_pub]
        assert await LogCursor(anyone, "signed/a", authors=both).pull() == found
        with pytest.raises(BadAuthorProof) as caught:
            await LogCursor(anyone, "signed/a", authors=[ISSUER.ed_pub]).pull()
        assert caught.value.element == found[1]
        only = LogCursor(anyone, "signed/a", authors=[ISSUER.ed_pub], skip_bad_proofs=True)
        assert await only.pull() == found[:1]


async def test_a_proof_that_does_not_hold_is_raised_and_nothing_taken_in_or_skipped(start: Start) -> None:
    base = await start(SERVICE)
    async with signer(base, STRANGER) as mine, Client(base) as anyone:
        await mine.append("signed/a", {"n": 1})
        (elsewhere,) = (await anyone.pull("signed/a", full=True)).elements()
        good = await mine.append("log/a", {"n": 1})
        raising = LogCursor(anyone, "log/a", verify=True)
        skipping = LogCursor(anyone, "log/a", verify=True, skip_bad_proofs=True)
        assert len(await raising.pull()) == len(await skipping.pull()) == 1
        forged = {"authorPubkey": elsewhere.author_pubkey, "authorSignature": elsewhere.author_signature}
        for bad in (
            {},
            forged,
            {"authorPubkey": "?", "authorSignature": "?"},
            {**forged, "authorSignature": ""},
        ):
            sent = await append_as_it_is(base, "log/a", {"data": {"n": 1}, **bad})
            with pytest.raises(BadAuthorProof):
                await raising.pull()
            assert raising.checkpoint_ms == good.timestamp_ms
            assert (await skipping.pull(), skipping.checkpoint_ms) == ([], sent)
        await mine.append("log/a", {"n": 2})
        assert [element.data for element in await skipping.pull()] == [{"n": 2}]
        assert len(await LogCursor(anyone, "log/a").pull()) == 6


async def append_as_it_is(base: str, key: str, body: dict[str, Any]) -> int:
    """Append what no client of ours would send; the time that it got."""
    async with aiohttp.ClientSession() as session:
        answer = await Browser(base, session).request("POST", f"/push/{key}", body)
    assert answer.status == 200
    return int(answer.json["timestamp"])


async def test_following_without_a_stream_waits_longer_while_nothing_comes(start: Start) -> None:
    async with FaultProxy(await start(SERVICE)) as proxy, Client(proxy.url) as anyone:
        proxy.respond(status=404, when=lambda sent: sent.path == "events")
        waits: list[float] = []

        async def wait(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) in (5, 6, 9):
                await appended(anyone, "log/a", len(waits))

        await appended(anyone, "log/a", 1)
        found: list[list[int]] = []
        async for elements in LogCursor(anyone, "log/a", sleep=wait).follow(initial_s=1.0, max_s=4.0):
            found.append(times(elements))
            if len(found) == 4:
                break
    assert found == [[1], [5], [6], [9]]
    assert waits == [1.0, 2.0, 4.0, 4.0, 4.0, 1.0, 1.0, 2.0, 4.0]


async def test_following_does_not_wait_while_something_comes_nor_for_what_is_skipped(start: Start) -> None:
    async with signer(await start(SERVICE), ISSUER) as mine:
        waits = Waits()
        for ts_ms in range(1, 13):
            await mine.append("small/a", {}, ts_ms=ts_ms, sign_author=ts_ms in (3, 12))
        cursor = LogCursor(mine, "small/a", since=0, verify=True, skip_bad_proofs=True, sleep=waits)
        found: list[int] = []
        async for elements in cursor.follow():
            found += times(elements)
            if found[-1] == 12:
                break
    assert (found, waits.seconds) == ([3, 12], [])


async def test_a_server_that_is_lost_and_comes_back_is_followed_on() -> None:
    def held(*times: int) -> Answer:
        items = [{"ts": ts_ms, "data": {}} for ts_ms in times]
        return 200, {"data": {"items": items}, "hash": "h", "timestamp": 1}

    busy: Answer = (429, {"code": "rate_limited"}, {"Retry-After": "30"})
    answers = [held(1), *[None] * 4, busy, held(1, 2), (503, b""), held(2, 3)]
    waits = Waits()
    errors: list[Exception] = []
    async with serving(*answers) as server, client(server.url, backoff=RetryPolicy(attempts=1)) as anyone:
        found: list[int] = []
        async for elements in LogCursor(anyone, "log/a", sleep=waits).follow(
            initial_s=1.0, max_s=4.0, on_disconnect=errors.append
        ):
            found += times(elements)
            if found == [1, 2, 3]:
                break
    assert [type(error) for error in errors] == [Unreachable, Unavailable]
    assert waits.seconds == [1.0, 2.0, 4.0, 30.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("answers", "kind"),
    [
        ([None, None], Unreachable),
        ([(429, {"code": "rate_limited"})], RateLimited),
        (
            [(200, {"data": {"items": []}, "hash": "", "timestamp": 1}), (403, {"code": "forbidden"})],
            Forbidden,
        ),
    ],
)
async def test_a_failure_of_the_first_pull_and_a_rejection_end_following(
    answers: list[Answer], kind: type[Exception]
) -> None:
    async with serving(*answers) as server, client(server.url, backoff=RetryPolicy(attempts=1)) as anyone:
        with pytest.raises(kind):
            async for _ in LogCursor(anyone, "log/a", sleep=Waits()).follow():
                pass
