"""A store that is counted in the coordinator: limits hold, and a count corrects what a crash left."""

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
from support.faulty_store import FaultyStore
from support.s3_stores import new_prefix, opened

from pysync import config
from pysync.clock import wall_clock_ms
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.accounts import Accounts
from pysync.engine.counted_store import CountedStore
from pysync.engine.outbox import Outbox
from pysync.engine.recount import RECOUNT_MS, Recount
from pysync.errors import CoordinatorUnavailable, QuotaExceeded, StoreUnavailable, Unavailable
from pysync.model import Usage
from pysync.store import ABSENT, ANY, Charge, Etag, EtagMismatch, MergeRejected, Precondition, Store, Subject
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


class Mortal:
    """What a process sees of a coordinator, or of its totals: nothing, once `store` has crashed."""

    def __init__(self, inner: Any, store: FaultyStore) -> None:
        self._inner = inner
        self._store = store

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name == "usage":
            return Mortal(found, self._store)

        async def call(*args: object) -> Any:
            if self._store.has_crashed:
                raise CoordinatorUnavailable
            return await found(*args)

        return call


class Counted:
    """A counted store, whose process crashes as `faulty` says, and its coordinator, which stays."""

    def __init__(self, inner: Store, clock: FakeClock, **quotas: Any) -> None:
        parsed = config.parse({**CONFIG, "quotas": quotas or CONFIG["quotas"]})
        assert parsed.quotas is not None
        self.inner = inner
        self.coordinator = MemoryCoordinator(clock)
        self._limits, self._clock = parsed.quotas.limits(), clock
        self._accounts = Accounts(parsed, {})
        self.recount = self.counter(inner)
        self.faulty, self.store, self.outbox = self.process()

    def counter(self, store: Store) -> Recount:
        kinds = {"photos": True, "either": None}
        return Recount(
            store, self.coordinator, self._accounts, self._clock, lambda found: kinds.get(found.name, False)
        )

    def process(self) -> tuple[FaultyStore, CountedStore, Outbox]:
        faulty = FaultyStore(self.inner)
        faulty.added_bytes = self.inner.added_bytes  # type: ignore[misc]
        coordinator: Any = Mortal(self.coordinator, faulty)
        store = CountedStore(faulty, coordinator.usage, self._limits, self._accounts, self._clock)
        return faulty, store, Outbox(store, coordinator)

    async def used(self, subject: Subject = ANNA) -> Usage:
        return (await self.store.ledger.used([subject]))[subject]

    async def stored(self) -> dict[str, Usage]:
        """What is stored, by a look at every object."""
        found: dict[str, Usage] = {}
        async for listed in self.inner.walk(""):
            name, identity, *_ = listed.key.split("/")
            if name in ("notes", "photos", "either"):
                assert listed.size is not None
                is_file = await self.inner.stat(listed.key) is not None
                one = Usage(listed.size, files=1) if is_file else Usage(listed.size, documents=1)
                for subject in (f"identity:{identity}", f"collection:{name}", "namespace:"):
                    found[subject] = found.get(subject, Usage()).plus(one)
        return found

    async def totals(self) -> dict[str, Usage]:
        return await self.coordinator.usage.read()


@pytest.fixture
def counted(clock: FakeClock) -> Counted:
    return Counted(MemoryStore(clock), clock)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


class TestCountedMemoryStore(StoreContract):
    @pytest.fixture
    async def store(self, clock: FakeClock) -> AsyncIterator[Store]:
        collection = {"name": "all", "storagePath": "{identity}/{id}", **OWN}
        parsed = config.parse({**CONFIG, "quotas": {}, "collections": [collection]})
        inner, usage = MemoryStore(), MemoryCoordinator(clock).usage
        yield CountedStore(inner, usage, {}, Accounts(parsed, {}), wall_clock_ms)
        await inner.close()


async def test_of_writers_at_once_no_more_fit_than_the_quota_allows(counted: Counted) -> None:
    results = await asyncio.gather(
        *(counted.store.put(f"notes/anna/{n}", b"{}", charge=CHECKED) for n in range(20)),
        return_exceptions=True,
    )
    assert sum(isinstance(found, QuotaExceeded) for found in results) >= 12
    assert await counted.used() == (await counted.stored()).get("identity:anna", Usage())
    while (await counted.used()).documents < 8:
        await counted.store.put(f"notes/anna/{random.random()}", b"{}", charge=CHECKED)
    with pytest.raises(QuotaExceeded) as refused:
        await counted.store.put("notes/anna/more", b"{}", charge=CHECKED)
    assert refused.value.extras == {"quota": "identity.documents", "used": 8, "allowed": 8}


async def test_what_a_failed_write_reserved_is_given_back(counted: Counted) -> None:
    store, faulty = counted.store, counted.faulty
    etag = await store.put("notes/anna/1", b"{}", charge=CHECKED)
    with pytest.raises(EtagMismatch):
        await store.put("notes/anna/1", b"x" * 500, expect=ABSENT, charge=CHECKED)
    with pytest.raises(EtagMismatch):
        await store.put("notes/anna/2", b"x" * 500, expect=Etag(etag), charge=CHECKED)
    faulty.fail("put", "write")
    with pytest.raises(StoreUnavailable):
        await store.put("notes/anna/2", b"{}", charge=CHECKED)
    with pytest.raises(StoreUnavailable):
        await store.write("photos/anna/1", chunks_of(b"x"), TYPE, charge=CHECKED)
    assert await counted.used() == Usage(2, 1)


async def test_a_rejected_file_leaves_nothing(counted: Counted) -> None:
    with pytest.raises(QuotaExceeded):
        await counted.store.write("photos/anna/1", chunks_of(b"x" * 9_001), TYPE, charge=CHECKED)
    assert await counted.store.stat("photos/anna/1") is None
    assert await counted.used() == Usage()


async def test_a_conflict_is_told_before_the_quota(counted: Counted) -> None:
    for n in range(8):
        await counted.store.put(f"notes/anna/{n}", b"{}", charge=CHECKED)
    with pytest.raises(EtagMismatch):
        await counted.store.put("notes/anna/1", b"{}", expect=ABSENT, charge=CHECKED)


async def test_a_smaller_object_fits_and_a_write_of_the_server_too(counted: Counted) -> None:
    etag = await counted.store.put("notes/anna/1", b"x" * 20_000)
    with pytest.raises(QuotaExceeded):
        await counted.store.put("notes/anna/1", b"x" * 20_001, expect=Etag(etag), charge=CHECKED)
    await counted.store.put("notes/anna/1", b"x" * 19_999, expect=Etag(etag), charge=CHECKED)
    assert await counted.used() == Usage(19_999, 1)
    counted = Counted(MemoryStore(), FakeClock(), identity={"files": 1})
    await counted.store.write("either/anna/0", chunks_of(b"x"), TYPE, charge=CHECKED)
    await counted.store.put("either/anna/1", b"x" * 100, charge=CHECKED)
    with pytest.raises(QuotaExceeded):  # smaller, and one file more
        await counted.store.write("either/anna/1", chunks_of(b"x"), TYPE, charge=CHECKED)


async def test_a_count_corrects_what_others_wrote_and_is_not_due_again(
    counted: Counted, clock: FakeClock
) -> None:
    await counted.inner.put("notes/anna/1", b"{}")
    await counted.store.delete("notes/anna/1")
    await counted.inner.put("notes/anna/2", b"{}")
    assert await counted.used() == Usage()
    assert not await counted.store.ledger.is_complete()
    await counted.recount.run_if_needed()
    assert await counted.store.ledger.is_complete()
    assert await counted.used() == Usage(2, 1)
    await counted.inner.delete("notes/anna/2")
    await counted.recount.run_if_needed()
    assert await counted.used() == Usage(2, 1)
    clock.step(RECOUNT_MS)
    await counted.recount.run_if_needed()
    assert await counted.used() == Usage()


async def test_a_coordinator_that_lost_its_memory_counts_anew(counted: Counted) -> None:
    for n in range(8):
        await counted.store.put(f"notes/anna/{n}", b"{}", charge=CHECKED)
    await counted.recount.run()
    await counted.coordinator.usage.clear()
    await counted.recount.run_if_needed()
    with pytest.raises(QuotaExceeded):
        await counted.store.put("notes/anna/more", b"{}", charge=CHECKED)


async def test_a_restored_store_is_counted_anew(counted: Counted) -> None:
    for n in range(8):
        await counted.store.put(f"notes/anna/{n}", b"{}", charge=CHECKED)
    await counted.recount.run()
    for n in range(1, 8):
        await counted.inner.delete(f"notes/anna/{n}")  # the store is now what it was once
    await counted.coordinator.begin_epoch()
    await counted.store.put("notes/anna/meanwhile", b"{}", charge=CHECKED)
    await counted.recount.run_if_needed()
    assert await counted.totals() == await counted.stored()
    assert await counted.used() == Usage(4, 2)
    for n in range(1, 7):
        await counted.store.put(f"notes/anna/{n}", b"{}", charge=CHECKED)
    with pytest.raises(QuotaExceeded):
        await counted.store.put("notes/anna/more", b"{}", charge=CHECKED)


async def test_writes_during_a_count_are_counted_once(counted: Counted) -> None:
    for n in range(300):
        await counted.store.put(f"notes/ben/{n:03}", b"{}")
    pages = 0
    count = counted.coordinator.usage.count

    async def count_and_write(token: str, passed: str, more: Any) -> bool:
        nonlocal pages
        pages += 1
        is_counted = await count(token, passed, more)
        await counted.store.put(f"notes/anna/{pages}", b"{}")
        await counted.store.put("notes/ben/000", b"x" * pages)
        await counted.store.delete(f"notes/ben/{100 + pages}")
        with pytest.raises(EtagMismatch):
            await counted.store.put("notes/ben/001", b"{}", expect=ABSENT)
        return is_counted

    counted.coordinator.usage.count = count_and_write  # type: ignore[method-assign]
    await counted.recount.run()
    assert pages == 2
    assert await counted.totals() == await counted.stored()


class Operations:
    """Random operations on a counted store: conditional ones at once, and others one after the other."""

    def __init__(self, counted: Counted, seed: int) -> None:
        self._counted = counted
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
            if self._counted.faulty.has_crashed:  # in a write that was rejected
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
                outbox, changes = self._counted.outbox, [change(key)]
                self._etags[key] = await outbox.put(key, body, expect, changes, charge=charge)
            else:
                self._etags[key] = await self._counted.store.put(key, body, expect=expect, charge=charge)
        except EtagMismatch:
            self._etags.pop(key, None)
        except QuotaExceeded:
            pass

    async def _other(self) -> None:
        choose, store = self._random, self._counted.store
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
                await self._counted.counter(self._counted.faulty).run()
            else:
                keys = [f"{folder}/{name}" for name in await store.list(folder, None, 100)]
                found = {each: await store.stat(each) for each in keys}
                merged = {each: stat.sha256 for each, stat in found.items() if stat is not None}
                if merged:
                    self.in_flight = 1 + len(merged)
                    await store.merge(f"{folder}/m{choose.random()}", chunks_of(body), TYPE, merged)
        except (EtagMismatch, QuotaExceeded, MergeRejected):
            pass


async def operate(counted: Counted, seed: int, rounds: int) -> None:
    """Run operations, of which crashes interrupt some, and compare the totals with what is stored."""
    choose = random.Random(seed)
    for process in range(4):
        operations = Operations(counted, seed * 10 + process)
        await operations.run(rounds)
        assert await counted.totals() == await counted.stored(), "without a crash it is exact"
        counted.faulty.crash(choose.randrange(20), done=choose.random() < 0.5)
        with pytest.raises(Unavailable):
            await operations.run(1_000)
        totals, stored = await counted.totals(), await counted.stored()
        for subject in totals.keys() | stored.keys():
            off = totals.get(subject, Usage()).minus(stored.get(subject, Usage()))
            assert abs(off.bytes) <= operations.in_flight * MAX_BYTES
            assert max(map(abs, off[1:])) <= operations.in_flight
        counted.faulty, counted.store, counted.outbox = counted.process()
        await counted.recount.run()
        assert await counted.totals() == await counted.stored(), "after a count it is exact"


@pytest.mark.parametrize("seed", range(depth(10, 200)))
async def test_usage_is_exact_but_for_what_a_crash_left_until_the_next_count(
    counted: Counted, seed: int
) -> None:
    await operate(counted, seed, 20)


async def test_usage_of_a_bucket_is_what_it_lists(moto: S3Server, clock: FakeClock) -> None:
    async with opened(moto, new_prefix()) as store:
        await operate(Counted(store, clock), 1, 3)
