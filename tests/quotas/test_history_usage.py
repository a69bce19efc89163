"""What history keeps counts as bytes, for whom the documents count: always exactly, and never too much."""

import json
from collections.abc import AsyncIterator
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pysync import _core, config
from pysync.clock import wall_clock_ms
from pysync.config import HistoryConfig
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.changes import DocumentRef, WriteContext
from pysync.engine.documents import Documents
from pysync.engine.history import entries_of
from pysync.errors import QuotaExceeded
from pysync.model import Usage
from pysync.quotas.accounts import Accounts
from pysync.quotas.bucket import BucketLedger, CountedStore
from pysync.quotas.recount import BucketCount, FolderCount
from pysync.store import Account, Charge, Store, Subject, ledger_of
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

KEPT = HistoryConfig(versions=4)
ALLOWED = 4_000
LIMITS = {"identity": (ALLOWED, inf, inf, inf)}
NOTES = {
    "name": "notes",
    "storagePath": "notes/{identity}/{id}",
    "readRoles": ["self"],
    "writeRoles": ["self"],
}
ACCOUNTS = Accounts(
    config.parse({"version": 1, "store": "memory:", "quotas": {}, "collections": [NOTES]}), {}
)
ANNA = Subject("identity", "anna")


class Site:
    """A store that counts, and one of a process that does not know whom it counts for."""

    def __init__(self, store: Store, other: Store, coordinator: MemoryCoordinator, clock: FakeClock) -> None:
        self.store, self.other = store, other
        self.documents = Documents(store, coordinator, clock)
        self.unknowing = Documents(other, coordinator, clock)
        self.coordinator = coordinator
        self.clock = clock

    async def used(self) -> Usage:
        ledger = ledger_of(self.store)
        assert ledger is not None
        return (await ledger.used([ANNA]))[ANNA]

    async def stored(self) -> Usage:
        used = Usage()
        async for listed in self.store.walk(""):
            size = listed.size or 0
            if listed.key.startswith("notes/"):
                used = used.plus(Usage(size, 1))
            elif listed.key.startswith("_pysync/history/"):
                used = used.plus(Usage(size))
        return used


class Watched(MemoryStore):
    """Counts how often it is listed."""

    lists = 0

    async def list(self, prefix: str, after: str | None, limit: int) -> list[str]:
        self.lists += 1
        return await super().list(prefix, after, limit)


@pytest.fixture(params=["local", "counted"])
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    clock = FakeClock()
    coordinator = MemoryCoordinator(clock)
    if request.param == "local":
        store = await LocalStore.open_folder(tmp_path, clock)
        await store.track_usage(LIMITS, ACCOUNTS.charge_of)
        other = await LocalStore.open_folder(tmp_path, clock)
        yield Site(store, other, coordinator, clock)
        await other.close()
        await store.close()
    else:
        inner = Watched(clock)
        counted = CountedStore(inner, BucketLedger(inner, LIMITS), ACCOUNTS, wall_clock_ms)
        yield Site(counted, inner, coordinator, clock)


def ref_of(id_: str) -> WriteContext:
    charge = Charge(Account("", "notes", "anna"))
    return WriteContext(DocumentRef("notes", {"id": id_}, None, f"notes/anna/{id_}"), "anna", charge)


def body(size: int, base: str | None) -> _core.PushBody:
    return _core.decode_push(json.dumps({"data": {"text": "x" * size}, "baseHash": base}).encode())


async def test_history_counts_and_never_blocks_a_push(site: Site) -> None:
    """A push that a quota leaves room for is made, at the least without the version that it replaces."""
    base, key, ref = None, "notes/anna/a", ref_of("a")
    for n in range(20):
        written = await site.documents.push(key, body(500 + n, base), context=ref, history=KEPT)
        base = written.hash
        assert await site.used() == await site.stored()
        assert (await site.used()).bytes <= ALLOWED
    assert (await site.used()).bytes > ALLOWED - 2_000
    entries = await entries_of(site.store, key)
    assert 3 <= len(entries) <= 7
    with pytest.raises(QuotaExceeded):
        await site.documents.push(key, body(ALLOWED, base), context=ref, history=KEPT)
    assert await entries_of(site.store, key) == entries, "the rejected push left none"
    base = (await site.documents.push(key, body(1, base), context=ref, history=KEPT)).hash
    assert await site.used() == await site.stored()
    # Now there is room again.
    base = (await site.documents.push(key, body(2, base), context=ref, history=KEPT)).hash
    assert len(await entries_of(site.store, key)) == len(entries) + 1
    await site.documents.delete("notes/anna/a", base, context=ref_of("a"), history=KEPT)
    assert await site.used() == await site.stored()
    assert (await site.used()).documents == 0


async def test_versions_beyond_those_that_are_kept_leave_before_a_push_is_rejected(site: Site) -> None:
    base = None
    for n in range(30):
        site.clock.now_ms += 1
        written = await site.documents.push(
            "notes/anna/a", body(800 + n, base), context=ref_of("a"), history=HistoryConfig(versions=1)
        )
        base = written.hash
    assert await site.used() == await site.stored()


@pytest.mark.parametrize("seed", range(8))
async def test_the_count_is_exact_whatever_is_written(site: Site, seed: int) -> None:
    chosen, hashes = Random(seed), dict[str, str | None]()
    for _ in range(80):
        id_ = chosen.choice("abc")
        key, ref, base = f"notes/anna/{id_}", ref_of(id_), hashes.get(id_)
        documents = chosen.choice((site.documents, site.documents, site.unknowing))
        try:
            if base is not None and chosen.random() < 0.3:
                await documents.delete(key, base, context=ref, history=KEPT)
                hashes[id_] = None
            else:
                pushed = body(chosen.randrange(400), base)
                hashes[id_] = (await documents.push(key, pushed, context=ref, history=KEPT)).hash
        except QuotaExceeded:
            await site.documents.history.prune(key, KEPT)
        if isinstance(site.store, LocalStore) and documents is site.documents and chosen.random() < 0.5:
            ledger: Any = site.store.ledger
            await FolderCount(site.store, ledger, ACCOUNTS).run_if_needed()
            assert await site.used() == await site.stored()
    if isinstance(site.store, LocalStore):
        await FolderCount(site.store, ledger, ACCOUNTS).run_if_needed()
    else:
        ledger = ledger_of(site.store)
        recount = BucketCount(site.other, ledger, site.coordinator, ACCOUNTS, wall_clock_ms, lambda _: False)
        await recount.run()
    assert await site.used() == await site.stored()


@pytest.mark.parametrize("site", ["counted"], indirect=True)
async def test_pushes_beyond_a_quota_list_a_history_once(site: Site) -> None:
    key, ref = "notes/anna/a", ref_of("a")
    base = (await site.documents.push(key, body(900, None), context=ref, history=KEPT)).hash
    assert isinstance(site.other, Watched)
    listed: list[int] = []
    for _ in range(3):
        site.other.lists = 0
        with pytest.raises(QuotaExceeded):
            await site.documents.push(key, body(ALLOWED, base), context=ref, history=KEPT)
        listed.append(site.other.lists)
    assert listed[0] > 0
    assert listed[1:] == [0, 0]
