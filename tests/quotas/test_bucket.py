"""Quotas of a bucket, by the totals of the last count and what each process wrote since."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any, Final

import pytest
from components import S3Server
from contracts.change_logs import change
from contracts.files import chunks_of
from contracts.stores import StoreContract
from support.depth import depth
from support.faulty_coordinator import FaultyCoordinator
from support.faulty_store import FaultyStore
from support.s3_stores import new_prefix, opened

from pysync import config
from pysync.engine.history import new_entry
from pysync.engine.idempotency import SETTLED_MS
from pysync.engine.outbox import Outbox, outbox_of
from pysync.errors import CoordinatorUnavailable, QuotaExceeded, StoreUnavailable, Unavailable
from pysync.model import Usage
from pysync.quotas.recount import BucketCount, track_usage
from pysync.store import (
    ABSENT,
    ANY,
    RELIST_MS,
    Charge,
    Etag,
    EtagMismatch,
    MergeRejected,
    Precondition,
    Segment,
    Store,
    Subject,
    Write,
)
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

CHECKED: Final = Charge()
OWN: Final = {"readRoles": ["self"], "writeRoles": ["self"]}
CONFIG: Final = {
    "version": 1,
    "store": "memory:",
    "quotas": {"identity": {"bytes": 9_000, "documents": 8}},
    "collections": [
        {"name": "notes", "storagePath": "notes/{identity}/{id}", **OWN},
        {"name": "photos", "storagePath": "photos/{identity}/{id}", "allowedMimeTypes": ["image/*"], **OWN},
        {
            "name": "either",
            "storagePath": "either/{identity}/{id}",
            "allowedMimeTypes": ["application/json", "image/*"],
            **OWN,
        },
    ],
}
TYPE: Final = "image/png"
MAX_BYTES: Final = 3_000
"""The size of the largest object of `Operations`."""
ANNA: Final = Subject("identity", "anna")


class Node:
    """A process that writes to a bucket that others share. `faulty` is the bucket as it sees it."""

    def __init__(self, faulty: FaultyStore, store: Any, counter: BucketCount, outbox: Outbox) -> None:
        self.faulty, self.store, self.counter, self.outbox = faulty, store, counter, outbox

    async def push(self, id_: str, size: int = 2, expect: Precondition = ABSENT) -> str:
        key = f"notes/anna/{id_}"
        return await self.outbox.commit(Write(key, b"x" * size, expect, [change(id_)], charge=CHECKED))

    async def used(self, account: Subject = ANNA) -> Usage:
        found: dict[Subject, Usage] = await self.store.ledger.used([account])
        return found[account]


class Bucket:
    """A bucket, and the coordinator of its processes."""

    def __init__(self, objects: Store, clock: FakeClock, **quotas: Any) -> None:
        self.objects = objects
        self.coordinator = FaultyCoordinator(clock)
        self._config = config.parse({**CONFIG, "quotas": quotas or CONFIG["quotas"]})
        self._clock = clock

    async def node(self) -> Node:
        faulty = FaultyStore(self.objects)
        faulty.added_bytes = self.objects.added_bytes  # type: ignore[misc]
        tracked = await track_usage(self._config, faulty, self.coordinator, (), self._clock)
        assert isinstance(tracked.counter, BucketCount)
        return Node(faulty, tracked.store, tracked.counter, outbox_of(tracked.store, self.coordinator))

    async def stored(self) -> dict[Subject, Usage]:
        """What is stored for whom, by a look at every object."""
        found: dict[Subject, Usage] = {}
        async for listed in self.objects.walk(""):
            name, identity, *_ = listed.key.split("/")
            if name in ("notes", "photos", "either"):
                assert listed.size is not None
                is_file = await self.objects.stat(listed.key) is not None
                one = Usage(listed.size, files=1) if is_file else Usage(listed.size, documents=1)
                for account in (
                    Subject("identity", identity),
                    Subject("collection", name),
                    Subject("namespace", ""),
                ):
                    found[account] = found.get(account, Usage()).plus(one)
        return found

    async def assert_exact(self, node: Node) -> None:
        stored = await self.stored()
        assert await node.store.ledger.used(stored) == stored
        for kind in ("identity", "collection", "namespace"):
            names = {name for name, used in await node.store.ledger.largest(kind, 10) if used != Usage()}
            assert names == {account.name for account in stored if account.kind == kind}


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def bucket(clock: FakeClock) -> Bucket:
    return Bucket(MemoryStore(clock), clock)


@pytest.fixture
async def node(bucket: Bucket) -> Node:
    return await bucket.node()


class TestCountedMemoryStore(StoreContract):
    @pytest.fixture
    async def store(self, clock: FakeClock) -> AsyncIterator[Store]:
        collection = {"name": "all", "storagePath": "{identity}/{id}", **OWN}
        parsed = config.parse({**CONFIG, "quotas": {}, "collections": [collection]})
        inner = MemoryStore()
        yield (await track_usage(parsed, inner, FaultyCoordinator(clock), (), clock)).store
        await inner.close()


async def test_concurrent_pushes_of_one_node_do_not_exceed_a_quota(bucket: Bucket, node: Node) -> None:
    results = await asyncio.gather(*(node.push(f"{n}") for n in range(20)), return_exceptions=True)
    assert sum(isinstance(found, QuotaExceeded) for found in results) == 12
    await bucket.assert_exact(node)
    assert await bucket.coordinator.prepared(10) == []
    with pytest.raises(QuotaExceeded) as rejected:
        await node.push("more")
    assert rejected.value.extras == {"quota": "identity.documents", "used": 8, "allowed": 8}
    assert await bucket.objects.get("notes/anna/more") is None
    assert await bucket.coordinator.prepared(10) == []


async def test_a_quota_counts_what_an_append_moves_into_segments(bucket: Bucket, node: Node) -> None:
    etag = await node.push("log", 6_000)
    sealed = [Segment("_pysync/logs/1/0-1", b"x" * 5_000)]
    append = Write(
        "notes/anna/log", b"x" * 4_001, Etag(etag), [change("log")], charge=CHECKED, segments=sealed
    )
    with pytest.raises(QuotaExceeded):
        await node.outbox.commit(append)
    assert (await node.used()).bytes == 6_000
    assert await bucket.objects.get(sealed[0].key) is None
    await node.outbox.commit(append._replace(body=b"x" * 4_000))
    assert (await node.used()).bytes == 9_000


async def test_a_quota_holds_across_nodes_after_a_count(bucket: Bucket, node: Node) -> None:
    other = await bucket.node()
    for n in range(8):
        await node.push(f"first-{n}")
    await other.push("second")
    await other.counter.run()
    for each in (node, other):
        await each.counter.run_if_needed()
        assert (await each.used()).documents == 9
        with pytest.raises(QuotaExceeded):
            await each.push("more")
    await node.store.delete("notes/anna/second")
    await node.store.delete("notes/anna/first-1")
    await node.push("more")


async def test_a_new_node_rejects_by_the_last_count(bucket: Bucket, node: Node) -> None:
    for n in range(8):
        await node.push(f"{n}")
    await node.counter.run()
    restarted = await bucket.node()
    assert await restarted.store.ledger.is_complete()
    with pytest.raises(QuotaExceeded):
        await restarted.push("more")


async def test_a_failed_write_is_not_counted(bucket: Bucket, node: Node) -> None:
    etag = await node.push("1")
    with pytest.raises(EtagMismatch):
        await node.push("1", 500)
    with pytest.raises(EtagMismatch):
        await node.push("2", 500, Etag(etag))
    node.faulty.fail("put", "write")
    with pytest.raises(StoreUnavailable):
        await node.push("2")
    with pytest.raises(StoreUnavailable):
        await node.store.write("photos/anna/1", chunks_of(b"x"), TYPE, charge=CHECKED)
    assert await node.used() == Usage(2, 1)


async def test_a_failed_push_leaves_its_intent(bucket: Bucket, node: Node, clock: FakeClock) -> None:
    node.faulty.fail("put")
    with pytest.raises(StoreUnavailable):
        await node.push("1", 50)
    assert len(await bucket.coordinator.prepared(10)) == 1
    clock.now_ms += SETTLED_MS
    assert await node.outbox.recover() == 1


async def test_an_unprepared_push_is_not_counted(bucket: Bucket, node: Node) -> None:
    bucket.coordinator.fail("intend")
    with pytest.raises(CoordinatorUnavailable):
        await node.push("1", 50)
    assert await bucket.objects.get("notes/anna/1") is None
    assert await node.used() == Usage()


@pytest.mark.parametrize("done", [None, False, True])
async def test_a_conflict_leaves_no_intent(bucket: Bucket, node: Node, done: bool | None) -> None:
    await bucket.objects.put("notes/anna/1", b"{}")
    if done is not None:
        bucket.coordinator.fail("withdraw", done=done)
    with pytest.raises(EtagMismatch):
        await node.push("1", 50)
    await node.outbox.flush_outcomes()
    assert await node.used() == Usage()
    assert await bucket.coordinator.prepared(10) == []


async def test_a_rejected_file_leaves_nothing(bucket: Bucket, node: Node) -> None:
    with pytest.raises(QuotaExceeded):
        await node.store.write("photos/anna/1", chunks_of(b"x" * 9_001), TYPE, charge=CHECKED)
    assert await bucket.objects.stat("photos/anna/1") is None
    assert await node.used() == Usage()


async def test_a_conflict_is_reported_before_the_quota(bucket: Bucket, node: Node) -> None:
    for n in range(8):
        await node.push(f"{n}")
    with pytest.raises(EtagMismatch):
        await node.push("1", 10_000)
    assert await bucket.coordinator.prepared(10) == []


async def test_a_smaller_document_fits_into_a_full_quota(clock: FakeClock, node: Node) -> None:
    etag = await node.store.put("notes/anna/1", b"x" * 20_000)
    with pytest.raises(QuotaExceeded):
        await node.push("1", 20_001, Etag(etag))
    await node.push("1", 19_999, Etag(etag))
    assert await node.used() == Usage(19_999, 1)
    node = await Bucket(MemoryStore(), clock, identity={"files": 1}).node()
    await node.store.write("either/anna/0", chunks_of(b"x"), TYPE, charge=CHECKED)
    await node.store.put("either/anna/1", b"x" * 100, charge=CHECKED)
    with pytest.raises(QuotaExceeded):  # smaller, and one file more
        await node.store.write("either/anna/1", chunks_of(b"x"), TYPE, charge=CHECKED)


async def test_an_earlier_version_counts_as_bytes_alone(bucket: Bucket, node: Node) -> None:
    entry = new_entry("notes/anna/1", None, "", 1, "anna")
    await node.outbox.commit(
        Write("notes/anna/1", b"x" * 10, ABSENT, [change("1")], charge=CHECKED, also=[entry])
    )
    stored = [listed.size or 0 async for listed in bucket.objects.walk("")]
    assert len(stored) == 2
    assert await node.used() == Usage(sum(stored), 1)


async def test_a_count_finds_what_other_programs_wrote_and_is_not_due_for_an_hour(
    bucket: Bucket, node: Node, clock: FakeClock
) -> None:
    await bucket.objects.put("notes/anna/1", b"{}")
    await node.store.delete("notes/anna/1")
    await bucket.objects.put("notes/anna/2", b"{}")
    assert await node.used() == Usage()
    assert not await node.store.ledger.is_complete()
    await node.counter.run_if_needed()
    assert await node.store.ledger.is_complete()
    assert await node.used() == Usage(2, 1)
    await bucket.objects.delete("notes/anna/2")
    await node.counter.run_if_needed()
    assert await node.used() == Usage(2, 1)
    clock.step(RELIST_MS)
    await node.counter.run_if_needed()
    assert await node.used() == Usage()


async def test_a_count_without_its_totals_begins_again(bucket: Bucket, node: Node) -> None:
    for n in range(8):
        await node.push(f"{n}")
    await node.counter.run()
    await bucket.objects.delete("_pysync/usage")
    await node.counter.run_if_needed()
    assert await node.store.ledger.is_complete()
    with pytest.raises(QuotaExceeded):
        await node.push("more")


class Operations:
    """Random operations on a counted store: conditional ones at once, and others one after the other."""

    def __init__(self, node: Node, seed: int) -> None:
        self._node = node
        self._random = random.Random(seed)
        self._etags: dict[str, str] = {}
        self.in_flight = 0
        """The number of objects that may be being written."""

    async def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.in_flight = 8
            ended = await asyncio.gather(*(self._put() for _ in range(8)), return_exceptions=True)
            for error in filter(None, ended):
                raise error
            if self._node.faulty.has_crashed:  # in a write that was rejected
                raise StoreUnavailable
            self.in_flight = 1
            await self._other()

    async def _put(self) -> None:
        choose = self._random
        key = f"{choose.choice(('notes', 'either'))}/{choose.choice(('anna', 'ben'))}/{choose.randrange(6)}"
        known = self._etags.get(key)
        expect: Precondition = ABSENT if known is None else Etag(known)
        body = b"x" * choose.choice((1, 100, MAX_BYTES))
        charge = choose.choice((CHECKED, None))
        try:
            if choose.random() < 0.7:
                outbox, changes = self._node.outbox, [change(key)]
                self._etags[key] = await outbox.commit(Write(key, body, expect, changes, charge=charge))
            else:
                self._etags[key] = await self._node.store.put(key, body, expect=expect, charge=charge)
        except EtagMismatch:
            self._etags.pop(key, None)
        except QuotaExceeded:
            pass

    async def _other(self) -> None:
        choose, store = self._random, self._node.store
        folder = f"{choose.choice(('photos', 'either'))}/{choose.choice(('anna', 'ben'))}"
        key, body = f"{folder}/{choose.randrange(6)}", b"x" * choose.choice((1, 100, MAX_BYTES))
        action = choose.randrange(8)
        try:
            if action < 3:
                await store.write(key, chunks_of(body), TYPE, charge=choose.choice((CHECKED, None)))
            elif action < 5:
                await store.delete(key, choose.choice((ANY, Etag(self._etags.get(key, "none")))))
            elif action == 5:
                await store.put(key.replace("photos", "notes"), body)
            elif action == 6:
                await self._node.counter.run()
            else:
                keys = [f"{folder}/{name}" for name in await store.list(folder, None, 100)]
                found = {each: await store.stat(each) for each in keys}
                merged = {each: stat.sha256 for each, stat in found.items() if stat is not None}
                if merged:
                    self.in_flight = 1 + len(merged)
                    await store.merge(f"{folder}/m{choose.random()}", chunks_of(body), TYPE, merged)
        except (EtagMismatch, QuotaExceeded, MergeRejected):
            pass


async def operate(bucket: Bucket, seed: int, rounds: int) -> None:
    """Run operations, of which crashes interrupt some, and compare the totals with what is stored."""
    choose = random.Random(seed)
    for process in range(4):
        node = await bucket.node()
        await node.counter.run()
        await bucket.assert_exact(node)
        operations = Operations(node, seed * 10 + process)
        await operations.run(rounds)
        await bucket.assert_exact(node)
        node.faulty.crash(choose.randrange(20), done=choose.random() < 0.5)
        with pytest.raises(Unavailable):
            await operations.run(1_000)
        stored = await bucket.stored()
        for account, used in (await node.store.ledger.used(stored)).items():
            off = used.minus(stored[account])
            assert abs(off.bytes) <= operations.in_flight * MAX_BYTES
            assert max(map(abs, off[1:])) <= operations.in_flight


@pytest.mark.parametrize("seed", range(depth(10, 200)))
async def test_usage_of_one_node_is_exact_but_for_a_crash_until_the_next_count(
    bucket: Bucket, seed: int
) -> None:
    await operate(bucket, seed, 20)


async def test_usage_of_a_bucket_is_what_it_lists(moto: S3Server, clock: FakeClock) -> None:
    async with opened(moto, new_prefix()) as store:
        await operate(Bucket(store, clock), 1, 3)
