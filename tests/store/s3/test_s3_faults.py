"""A bucket behind a network that fails: what became of a write is found out, and never guessed."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from components import S3Server
from contracts.files import chunks_of
from support.injected_faults import s3_error
from support.s3_stores import Proxied, proxied

from pysync.errors import StoreUnavailable
from pysync.store import ABSENT, Etag, EtagMismatch, Store, StoredObject
from pysync.store.s3 import S3Store

XML = {"Content-Type": "application/xml"}


@pytest.fixture
async def bucket(radosgw: S3Server) -> AsyncIterator[Proxied]:
    async with proxied(radosgw) as found:
        yield found


async def body_of(store: Store, key: str) -> bytes | None:
    found = await store.get(key)
    return found.body if isinstance(found, StoredObject) else None


@asynccontextmanager
async def put_not_looked_up(bucket: Proxied, etag: str) -> AsyncIterator[asyncio.Future[str]]:
    """A put of `two` at `a`, over `etag`, without an answer: at the end it looks up what became of it."""
    end = asyncio.Event()
    lookup = bucket.proxy.delay("HEAD", until=end)
    putting = asyncio.ensure_future(bucket.store.put("a", b"two", expect=Etag(etag)))
    await lookup.wait()
    yield putting
    end.set()


class TestPutWithALostReply:
    async def test_is_found_where_it_was_stored(self, bucket: Proxied) -> None:
        bucket.proxy.lose_reply("PUT")
        etag = await bucket.store.put("a", b"one", expect=ABSENT)
        assert bucket.proxy.calls == {"PUT": 1, "HEAD": 1}
        bucket.proxy.lose_reply("PUT")
        etag = await bucket.store.put("a", b"two", expect=Etag(etag))
        found = await bucket.other.get("a")
        assert isinstance(found, StoredObject)
        assert (found.body, found.etag) == (b"two", etag)

    async def test_is_sent_again_where_it_was_not(self, bucket: Proxied) -> None:
        bucket.proxy.abort("PUT")
        etag = await bucket.store.put("a", b"one", expect=ABSENT)
        assert bucket.proxy.calls == {"PUT": 2, "HEAD": 1}
        bucket.proxy.abort("PUT")
        await bucket.store.put("a", b"two", expect=Etag(etag))
        assert await body_of(bucket.other, "a") == b"two"

    @pytest.mark.parametrize(
        ("status", "body"),
        [
            (500, b""),
            (500, s3_error("InternalError")),
            (502, b""),
            (503, b""),
            (503, s3_error("ServiceUnavailable")),
            (504, b""),
        ],
    )
    @pytest.mark.parametrize("forwarded", [True, False])
    async def test_an_error_of_the_server_proves_as_little(
        self, bucket: Proxied, status: int, body: bytes, forwarded: bool
    ) -> None:
        etag = await bucket.store.put("a", b"one")
        bucket.proxy.respond("PUT", status=status, body=body, forwarded=forwarded)
        etag = await bucket.store.put("a", b"two", expect=Etag(etag))
        found = await bucket.other.get("a")
        assert isinstance(found, StoredObject)
        assert (found.body, found.etag) == (b"two", etag)

    async def test_was_stored_also_where_it_has_been_replaced(self, bucket: Proxied) -> None:
        etag = await bucket.store.put("a", b"one")
        bucket.proxy.lose_reply("PUT")
        async with put_not_looked_up(bucket, etag) as putting:
            for body in (b"three", b"four"):
                found = await bucket.other.get("a")
                assert isinstance(found, StoredObject)
                last = await bucket.other.put("a", body, expect=Etag(found.etag))
        assert await putting not in (etag, last)
        assert await body_of(bucket.store, "a") == b"four"

    async def test_was_not_stored_where_another_took_its_place(self, bucket: Proxied) -> None:
        etag = await bucket.store.put("a", b"one")
        bucket.proxy.abort("PUT")
        async with put_not_looked_up(bucket, etag) as putting:
            found = await bucket.other.get("a")
            assert isinstance(found, StoredObject)
            await bucket.other.put("a", b"three", expect=Etag(found.etag))
        with pytest.raises(EtagMismatch):
            await putting
        assert await body_of(bucket.store, "a") == b"three"

    async def test_outcome_is_unknown_once_the_object_is_gone(self, bucket: Proxied) -> None:
        etag = await bucket.store.put("a", b"one")
        bucket.proxy.lose_reply("PUT")
        async with put_not_looked_up(bucket, etag) as putting:
            await bucket.other.delete("a")
        with pytest.raises(StoreUnavailable):
            await putting

    async def test_outcome_is_unknown_where_no_lineage_leads_back(self, bucket: Proxied) -> None:
        etag = await bucket.other.put("a", b"one")
        bucket.proxy.abort("PUT")
        async with put_not_looked_up(bucket, etag) as putting:
            await bucket.other.put("a", b"three")
        with pytest.raises(StoreUnavailable):
            await putting

    async def test_is_given_up_when_all_are(self, bucket: Proxied) -> None:
        etag = await bucket.store.put("a", b"one")
        bucket.proxy.reset_counts()
        bucket.proxy.abort("PUT", times=None)
        with pytest.raises(StoreUnavailable):
            await bucket.store.put("a", b"two", expect=Etag(etag))
        assert bucket.proxy.calls["PUT"] == 5
        bucket.proxy.reset()
        await bucket.store.put("a", b"two", expect=Etag(etag))

    @pytest.mark.slow
    async def test_is_found_where_it_was_stored_just_before_its_repetition(self, bucket: Proxied) -> None:
        store = await bucket.open(timeout_ms=2_000)
        etag = await store.put("a", b"one")
        first, second = asyncio.Event(), asyncio.Event()
        bucket.proxy.delay("PUT", until=first)
        repeats = bucket.proxy.delay("PUT", until=second)
        bucket.proxy.reset_counts()
        putting = asyncio.ensure_future(store.put("a", b"two", expect=Etag(etag)))
        await repeats.wait()
        first.set()
        while bucket.proxy.statuses[200] < 2:  # what the client asked in between, and the first put
            await asyncio.sleep(0)
        second.set()
        etag = await putting
        found = await bucket.other.get("a")
        assert isinstance(found, StoredObject)
        assert (found.body, found.etag) == (b"two", etag)
        assert bucket.proxy.statuses[412] == 1

    async def test_cannot_be_stored_later_over_what_came_after_it(self, bucket: Proxied) -> None:
        store = await bucket.open(timeout_ms=500)
        etag = await store.put("a", b"one")
        arrives = asyncio.Event()
        bucket.proxy.reset_counts()
        bucket.proxy.delay("PUT", until=arrives)
        etag = await store.put("a", b"two", expect=Etag(etag))
        await bucket.other.put("a", b"three", expect=Etag(etag))
        rejected_count = bucket.proxy.statuses[412]
        arrives.set()
        while bucket.proxy.statuses[412] == rejected_count:
            await asyncio.sleep(0)
        assert await body_of(bucket.other, "a") == b"three"


class TestALoserOfARace:
    async def test_is_reported_if_the_server_answers_500(self, bucket: Proxied) -> None:
        etag = await bucket.store.put("a", b"one")
        await bucket.other.get("a")
        await bucket.other.put("a", b"two", expect=Etag(etag))
        bucket.proxy.respond("PUT", status=500, instead_of=412)
        with pytest.raises(EtagMismatch):
            await bucket.store.put("a", b"three", expect=Etag(etag))
        assert bucket.proxy.met == {"answer": 1}

    async def test_is_reported_if_nothing_was_expected(self, bucket: Proxied) -> None:
        await bucket.other.put("a", b"one", expect=ABSENT)
        bucket.proxy.respond("PUT", status=500, instead_of=412)
        with pytest.raises(EtagMismatch):
            await bucket.store.put("a", b"two", expect=ABSENT)

    async def test_is_reported_if_a_missing_object_is_404(self, bucket: Proxied) -> None:
        etag = await bucket.store.put("a", b"one")
        await bucket.other.delete("a")
        bucket.proxy.respond("PUT", status=404, body=s3_error("NoSuchKey"), headers=XML, instead_of=412)
        with pytest.raises(EtagMismatch):
            await bucket.store.put("a", b"two", expect=Etag(etag))
        assert bucket.proxy.met == {"answer": 1}

    async def test_causes_no_more_requests_if_nothing_was_lost(self, bucket: Proxied) -> None:
        etag = await bucket.other.put("a", b"one")
        await bucket.other.put("a", b"two", expect=Etag(etag))
        with pytest.raises(EtagMismatch):
            await bucket.store.put("a", b"three", expect=Etag(etag))
        assert bucket.proxy.calls == {"PUT": 1}


class TestARefusalThatPasses:
    @pytest.mark.parametrize(
        ("status", "code"),
        [
            (503, "SlowDown"),
            (409, "ConditionalRequestConflict"),
            (409, "OperationAborted"),
            (400, "RequestTimeout"),
        ],
    )
    async def test_is_waited_for(self, bucket: Proxied, status: int, code: str) -> None:
        etag = await bucket.store.put("a", b"one")
        bucket.proxy.reset_counts()
        bucket.proxy.respond("PUT", status=status, body=s3_error(code), headers=XML, times=3)
        await bucket.store.put("a", b"two", expect=Etag(etag))
        assert bucket.proxy.calls == {"PUT": 4}
        assert await body_of(bucket.other, "a") == b"two"

    @pytest.mark.parametrize("kind", ["GET", "PUT", "DELETE", "LIST"])
    async def test_is_waited_for_by_every_verb(self, bucket: Proxied, kind: str) -> None:
        await bucket.store.put("p/a", b"one")
        for fault in (bucket.proxy.throttle, bucket.proxy.abort, bucket.proxy.lose_reply):
            fault(kind)
            assert await body_of(bucket.store, "p/a") == b"one"
            assert await bucket.store.list("p", None, 10) == ["a"]
            assert [listed.key async for listed in bucket.store.walk("p")] == ["p/a"]
            await bucket.store.delete("p/a")
            await bucket.store.put("p/a", b"one")
            await bucket.store.probe()
        assert bucket.proxy.met == {"throttle": 1, "abort": 1, "lose_reply": 1}

    async def test_is_not_waited_for_without_end(self, bucket: Proxied) -> None:
        bucket.proxy.throttle(times=None)
        for call in (
            bucket.store.get("a"),
            bucket.store.put("a", b"1"),
            bucket.store.put("a", b"1", expect=ABSENT),
            bucket.store.delete("a"),
            bucket.store.probe(),
            bucket.store.open("a"),
            bucket.store.write("a", chunks_of(b"1"), "text/plain"),
        ):
            with pytest.raises(StoreUnavailable):
                await call


class TestARead:
    async def test_that_breaks_off_is_retried(self, bucket: Proxied) -> None:
        await bucket.other.put("a", bytes(100_000))
        bucket.proxy.truncate("GET", to_bytes=5_000, times=2)
        assert await body_of(bucket.store, "a") == bytes(100_000)
        assert bucket.proxy.calls == {"GET": 3}

    async def test_believes_only_s3_that_nothing_is_there(self, bucket: Proxied) -> None:
        await bucket.other.put("a", b"one")
        for body in (b"", b"<html>not here</html>", s3_error("NoSuchBucket")):
            bucket.proxy.respond("GET", status=404, body=body)
            with pytest.raises(StoreUnavailable):
                await bucket.store.get("a")
            bucket.proxy.respond("GET", status=404, body=body)
            with pytest.raises(StoreUnavailable):
                await bucket.store.open("a")
        bucket.proxy.respond("GET", status=403, body=s3_error("AccessDenied"))
        with pytest.raises(StoreUnavailable):
            await bucket.store.get("a")

    async def test_of_a_file_goes_on_after_a_break(self, bucket: Proxied) -> None:
        body = random.Random(1).randbytes(1_000_000)
        await bucket.other.write("a", chunks_of(body), "text/plain")
        bucket.proxy.truncate("GET", to_bytes=300_000, times=3)
        file = await bucket.store.open("a", 10)
        assert file is not None
        assert b"".join([chunk async for chunk in file.chunks]) == body[10:]
        assert bucket.proxy.calls == {"GET": 4}

    async def test_of_a_file_never_mixes_two(self, bucket: Proxied) -> None:
        await bucket.other.write("a", chunks_of(bytes(1_000_000)), "text/plain")
        bucket.proxy.truncate("GET", to_bytes=300_000)
        file = await bucket.store.open("a")
        assert file is not None
        await bucket.other.write("a", chunks_of(b"1" * 1_000_000), "text/plain")
        with pytest.raises(StoreUnavailable):
            [chunk async for chunk in file.chunks]


@pytest.mark.slow
async def test_increments_of_many_writers_are_as_many_as_their_successes(bucket: Proxied) -> None:
    await bucket.other.put("counter", b"0")
    stores = [bucket.store, await bucket.open()]
    bucket.proxy.chaos(random.Random(5), abort=0.1, lose_reply=0.15, throttle=0.05)
    outcomes: Counter[str] = Counter()

    async def increment(store: S3Store) -> None:
        for _ in range(12):
            try:
                found = await store.get("counter")
                assert isinstance(found, StoredObject)
                await store.put("counter", b"%d" % (int(found.body) + 1), expect=Etag(found.etag))
            except EtagMismatch:
                outcomes["refused"] += 1
            except StoreUnavailable:
                outcomes["unknown"] += 1
            else:
                outcomes["stored"] += 1

    await asyncio.gather(*(increment(stores[n % 2]) for n in range(16)))
    counted = int(await body_of(bucket.other, "counter") or b"0")
    assert outcomes["stored"] <= counted <= outcomes["stored"] + outcomes["unknown"]
    assert outcomes["stored"] > 10
    assert outcomes["refused"] > 10
