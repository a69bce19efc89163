"""The store in a bucket: the contract on two servers, what each verb costs, and what lies in the bucket."""

import asyncio
import hashlib
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from components import S3Server
from contracts.files import chunks_of, read_file
from contracts.stores import StoreContract
from support.injected_faults import s3_error
from support.s3_stores import Proxied, another_program, new_prefix, opened, proxied

from pysync.config import StoreConfig
from pysync.errors import StoreUnavailable
from pysync.store import ABSENT, NOT_MODIFIED, Etag, EtagMismatch, Store, StoredObject, open_store
from pysync.store.s3 import S3Store
from pysync.store.s3.versions import VersionCache

MB = 1024 * 1024


class TestOnRadosgw(StoreContract):
    @pytest.fixture
    async def store(self, radosgw: S3Server) -> AsyncIterator[Store]:
        async with opened(radosgw, new_prefix()) as store:
            yield store


class TestOnMoto(StoreContract):
    @pytest.fixture
    async def store(self, moto: S3Server) -> AsyncIterator[Store]:
        async with opened(moto, new_prefix()) as store:
            yield store


@pytest.fixture
async def bucket(radosgw: S3Server) -> AsyncIterator[Proxied]:
    async with proxied(radosgw) as found:
        yield found


@pytest.fixture
def prefix() -> str:
    return new_prefix()


@pytest.fixture
async def store(radosgw: S3Server, prefix: str) -> AsyncIterator[S3Store]:
    async with opened(radosgw, prefix) as store:
        yield store


@pytest.fixture
async def client(radosgw: S3Server) -> AsyncIterator[Any]:
    """Another program with access to the bucket."""
    async with another_program(radosgw) as client:
        yield client


async def test_url_names_its_bucket_and_its_options(radosgw: S3Server, prefix: str) -> None:
    url = f"s3://{radosgw.bucket}/{prefix}/?endpoint={radosgw.endpoint}&region=us-east-1&path_style=true"
    config = StoreConfig(url=url, access_key_id="testing", secret_access_key="testingsecret")
    first = await open_store(config, shared=True)
    etag = await first.put("a", b"one")
    await first.close()
    async with opened(radosgw, prefix) as second:
        found = await second.get("a")
    assert isinstance(found, StoredObject)
    assert (found.body, found.etag) == (b"one", etag)


async def test_two_prefixes_are_two_stores(radosgw: S3Server, prefix: str) -> None:
    async with opened(radosgw, prefix) as store, opened(radosgw, f"{prefix}/deeper") as deeper:
        await deeper.put("a", b"one")
        assert await store.get("a") is None
        assert await store.list("deeper", None, 10) == ["a"]
        assert [listed.key async for listed in deeper.walk("")] == ["a"]


class TestCost:
    """Requests to S3."""

    async def test_cached_object_is_revalidated_and_not_sent_again(self, bucket: Proxied) -> None:
        etag = await bucket.other.put("a", b"one")
        first = await bucket.store.get("a")
        assert isinstance(first, StoredObject)
        for known in (None, "another"):
            assert await bucket.store.get("a", known) == first
        assert await bucket.store.get("a", etag) is NOT_MODIFIED
        assert bucket.proxy.statuses == {200: 1, 304: 3}
        await bucket.other.put("a", b"two")
        found = await bucket.store.get("a")
        assert isinstance(found, StoredObject)
        assert found.body == b"two"

    async def test_written_object_is_cached(self, bucket: Proxied) -> None:
        etag = await bucket.store.put("a", b"one")
        found = await bucket.store.get("a")
        assert isinstance(found, StoredObject)
        assert (found.body, found.etag) == (b"one", etag)
        assert bucket.proxy.statuses == {200: 1, 304: 1}
        await bucket.store.put("a", b"two", expect=Etag(found.etag))
        assert bucket.proxy.calls == {"PUT": 2, "GET": 1}

    async def test_a_page_of_a_list_is_one_request(self, bucket: Proxied) -> None:
        for n in range(30):
            await bucket.other.put(f"p/{n:02}", b"1")
            await bucket.other.put(f"p/{n:02}/_keyring", b"1")
        assert await bucket.store.list("p", "04", 10) == [f"{n:02}" for n in range(5, 15)]
        assert bucket.proxy.calls == {"LIST": 1}

    async def test_many_are_requested_at_once(self, bucket: Proxied) -> None:
        await asyncio.gather(*(bucket.other.put(f"n/{n}", b"1") for n in range(100)))
        found = await bucket.store.get_many([f"n/{n}" for n in range(100)])
        assert None not in found
        assert bucket.proxy.calls == {"GET": 100}
        assert bucket.proxy.max_concurrent > 10

    async def test_a_range_is_one_request_for_no_more(self, bucket: Proxied) -> None:
        await bucket.other.write("a", chunks_of(bytes(MB)), "text/plain")
        file, content = await read_file(bucket.store, "a", 1_000, 2_000)
        assert (file.size, len(content)) == (MB, 1_000)
        assert (bucket.proxy.calls, bucket.proxy.statuses) == ({"GET": 1}, {206: 1})

    async def test_cache_is_bounded(self) -> None:
        recent = VersionCache(max_versions=3, max_bytes=2_000, max_object_bytes=500)
        for n in range(5):
            recent.put(f"k{n}", StoredObject(bytes(100), f"e{n}", "t", n), (f"i{n}", "0"))
        assert [n for n in range(5) if recent.get(f"k{n}")] == [2, 3, 4]
        assert [n for n in range(5) if recent.expected_version(f"k{n}", f"e{n}").ids] == [2, 3, 4]
        recent.put("k4", StoredObject(bytes(501), "e5", "t", 5), ("i5",))
        assert recent.get("k4") is None
        assert recent.expected_version("k4", "e5").ids == ("i5",)
        assert recent.expected_version("k4", "e4").ids == ()
        for n in range(5):
            recent.evict(f"k{n}")
        assert recent.bytes == 0


class TestDeleting:
    """On a server that ignores conditions of a delete a tombstone takes the object's place."""

    async def test_a_tombstone_is_nothing_to_every_verb(
        self, store: S3Store, client: Any, radosgw: S3Server, prefix: str
    ) -> None:
        etag = await store.put("p/a", b"one")
        await store.put("p/b", b"two")
        await store.delete("p/a", Etag(etag))
        assert not store.bucket.delete_if_match
        stored = await client.head_object(Bucket=radosgw.bucket, Key=f"{prefix}/p/a")
        assert stored["ContentType"] == "application/x-pysync-deleted"
        assert await store.get("p/a") is None
        assert await store.open("p/a") is None
        assert await store.list("p", None, 10) == ["b"]
        assert [listed.key async for listed in store.walk("")] == ["p/b"]
        await store.delete("p/a", ABSENT)
        with pytest.raises(EtagMismatch):
            await store.delete("p/a", Etag(etag))
        with pytest.raises(EtagMismatch):
            await store.put("p/a", b"three", expect=Etag(etag))

    async def test_one_of_many_creates_the_object_anew(self, store: S3Store) -> None:
        for attempt in range(3):
            etag = await store.put("a", b"one", expect=ABSENT)
            await store.delete("a", Etag(etag))
            outcomes = await asyncio.gather(
                *(store.put("a", b"%d" % n, expect=ABSENT) for n in range(8)), return_exceptions=True
            )
            assert sum(isinstance(outcome, str) for outcome in outcomes) == 1, attempt
            await store.delete("a")

    async def test_a_server_that_honours_them_deletes(self, moto: S3Server) -> None:
        async with proxied(moto) as bucket:
            etag = await bucket.store.put("a", b"one")
            newer = await bucket.other.put("a", b"two")
            with pytest.raises(EtagMismatch):
                await bucket.store.delete("a", Etag(etag))
            bucket.proxy.lose_reply("PUT")
            bucket.proxy.lose_reply("DELETE")
            await bucket.store.delete("a", Etag(newer))
            assert bucket.proxy.calls == {"PUT": 3, "HEAD": 2, "DELETE": 2}
            await bucket.store.put("a", b"three", expect=ABSENT)


class TestObjectsOfOthers:
    async def test_json_is_a_document_and_anything_else_a_file(
        self, store: S3Store, client: Any, radosgw: S3Server, prefix: str
    ) -> None:
        body = json.dumps({"v": 1}).encode()
        for name, type_ in (
            ("a", "application/json"),
            ("b", "application/json; charset=utf-8"),
            ("c", "image/png"),
        ):
            await client.put_object(
                Bucket=radosgw.bucket, Key=f"{prefix}/{name}", Body=body, ContentType=type_
            )
        await client.put_object(Bucket=radosgw.bucket, Key=f"{prefix}/folder/", Body=b"")
        found = await store.get("a")
        assert isinstance(found, StoredObject)
        assert (found.body, found.content_type) == (body, "application/json")
        assert found.modified_ms > 1_700_000_000_000
        assert isinstance(await store.get("b"), StoredObject)
        assert await store.get("c") is None
        assert await store.open("a") is None
        file, content = await read_file(store, "c", 2, 4)
        assert (file.sha256, content) == (hashlib.sha256(body).hexdigest(), body[2:4])
        assert await store.list("", None, 10) == ["a", "b", "c"]
        assert {listed.key async for listed in store.walk("")} == {"a", "b", "c"}
        await store.put("a", b"ours", expect=Etag(found.etag))
        await store.delete("b")
        assert await store.list("", None, 10) == ["a", "c"]

    async def test_they_read_a_document_as_json(
        self, store: S3Store, client: Any, radosgw: S3Server, prefix: str
    ) -> None:
        await store.put("a", b'{"v":1}')
        stored = await client.get_object(Bucket=radosgw.bucket, Key=f"{prefix}/a")
        body = await stored["Body"].read()
        assert body != b'{"v":1}'
        assert json.loads(body) == {"v": 1}

    async def test_a_copy_without_metadata_is_the_document(
        self, store: S3Store, client: Any, radosgw: S3Server, prefix: str
    ) -> None:
        await store.put("a", b'{"v":1}')
        stored = await client.get_object(Bucket=radosgw.bucket, Key=f"{prefix}/a")
        body = await stored["Body"].read()
        await client.put_object(
            Bucket=radosgw.bucket, Key=f"{prefix}/b", Body=body, ContentType="application/json"
        )
        found = await store.get("b")
        assert isinstance(found, StoredObject)
        assert found.body == b'{"v":1}'


class TestBigFiles:
    """Files that go in parts."""

    async def test_one_comes_back_whole(self, bucket: Proxied) -> None:
        body = random.Random(1).randbytes(17 * MB + 5)
        sha256 = await bucket.store.write("a", chunks_of(body[:9_999], body[9_999:]), "application/x-test")
        assert bucket.proxy.calls == {"HEAD": 1, "POST uploads": 1, "PUT partNumber": 3, "POST uploadId": 1}
        assert bucket.proxy.max_concurrent == 2
        file, content = await read_file(bucket.other, "a")
        assert content == body
        assert (file.sha256, file.content_type) == (sha256, "application/x-test")
        assert sha256 == hashlib.sha256(body).hexdigest()

    @pytest.mark.slow
    async def test_request_lost_by_the_network_is_sent_again(self, bucket: Proxied) -> None:
        for fault in (bucket.proxy.abort, bucket.proxy.lose_reply, bucket.proxy.throttle):
            for kind in ("POST uploads", "PUT partNumber", "POST uploadId"):
                fault(kind)
            await bucket.store.write("a", chunks_of(bytes(17 * MB)), "text/plain")
            await bucket.store.delete("a")
        assert bucket.proxy.met == {"abort": 3, "lose_reply": 3, "throttle": 3}

    async def test_one_whose_last_answer_is_lost_is_found(self, moto: S3Server) -> None:
        # Unlike Ceph's gateway, moto and AWS' peers may know no upload any more that is completed again.
        async with proxied(moto) as bucket:
            bucket.proxy.respond("POST uploadId", status=404, body=s3_error("NoSuchUpload"), forwarded=True)
            await bucket.store.write("a", chunks_of(bytes(17 * MB)), "text/plain")
            assert (await read_file(bucket.other, "a"))[1] == bytes(17 * MB)

    async def test_one_that_fails_leaves_the_old_file_and_no_parts(
        self, bucket: Proxied, client: Any, radosgw: S3Server
    ) -> None:
        await bucket.store.write("a", chunks_of(b"old"), "text/plain")
        root = f"{bucket.prefix}/"
        bucket.proxy.respond("PUT partNumber", status=403, times=None)
        with pytest.raises(StoreUnavailable):
            await bucket.store.write("a", chunks_of(bytes(17 * MB)), "text/plain")
        bucket.proxy.reset()
        assert (await read_file(bucket.store, "a"))[1] == b"old"
        assert "Uploads" not in await client.list_multipart_uploads(Bucket=radosgw.bucket, Prefix=root)


async def test_a_closed_store_has_finished_its_writes_and_rejects_more(bucket: Proxied) -> None:
    store = await bucket.open()
    written = asyncio.Event()
    arrived = bucket.proxy.delay("PUT", until=written)
    putting = asyncio.ensure_future(store.put("a", b"one"))
    await arrived.wait()
    closing = asyncio.ensure_future(store.close())
    await asyncio.sleep(0)
    for call in (store.get("a"), store.put("a", b"two"), store.list("", None, 1), store.delete("a")):
        with pytest.raises(StoreUnavailable):
            await call
    written.set()
    await closing
    assert isinstance(await putting, str)
    assert isinstance(await bucket.other.get("a"), StoredObject)
