"""A push to a store that is counted in the coordinator: it is prepared and counted in one request."""

import asyncio
from typing import Any

import pytest
from contracts.change_logs import change
from support.faulty_coordinator import FaultyCoordinator
from support.faulty_store import FaultyStore

from pysync import config
from pysync.engine.accounts import Accounts
from pysync.engine.counted_store import CountedStore
from pysync.engine.history import new_entry
from pysync.engine.outbox import INTENT_TIMEOUT_MS, Outbox
from pysync.errors import CoordinatorUnavailable, QuotaExceeded, StoreUnavailable
from pysync.model import Usage
from pysync.store import ABSENT, Account, Charge, Etag, EtagMismatch, StoredObject
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

CONFIG = config.parse(
    {
        "version": 1,
        "store": "memory:",
        "quotas": {"identity": {"bytes": 100, "documents": 2}},
        "collections": [
            {
                "name": "notes",
                "storagePath": "notes/{identity}/{id}",
                "readRoles": ["self"],
                "writeRoles": ["self"],
            }
        ],
    }
)
CHECKED = Charge()


class Scene:
    """An outbox on a counted store, both with the coordinator that counts."""

    def __init__(self) -> None:
        assert CONFIG.quotas is not None
        self.clock = FakeClock()
        self.kept = MemoryStore(self.clock)
        self.store = FaultyStore(self.kept)
        self.coordinator = FaultyCoordinator(self.clock)
        usage, accounts = self.coordinator.usage, Accounts(CONFIG, {})
        self.counted = CountedStore(self.store, usage, CONFIG.quotas.limits(), accounts, self.clock)
        self.outbox = Outbox(self.counted, self.coordinator)

    async def push(self, id_: str, size: int, expect: Any = ABSENT) -> str:
        return await self.outbox.put(f"notes/anna/{id_}", b"x" * size, expect, [change(id_)], charge=CHECKED)

    async def used(self) -> Usage:
        return (await self.coordinator.usage.read()).get("identity:anna", Usage())

    async def told(self) -> int:
        found = await self.coordinator.read("", 100)
        assert found is not None
        return len(found)


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_a_push_is_counted_without_a_request_of_its_own(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def counting(name: str) -> Any:
        method = getattr(scene.coordinator, name)

        async def call(*args: Any) -> Any:
            asked.append(name)
            return await method(*args)

        return call

    for name in ("prepare", "prepare_counted", "append", "abort", "prepared"):
        monkeypatch.setattr(scene.coordinator, name, counting(name))
    monkeypatch.delattr(type(scene.coordinator.usage), "add")
    etag = await scene.push("1", 50)
    etag = await scene.push("1", 60, Etag(etag))
    await scene.push("1", 60, Etag(etag))
    assert asked == ["prepare_counted", "append"] * 2 + ["prepare", "append"]
    assert await scene.used() == Usage(60, 1)


async def test_a_push_that_exceeds_a_quota_leaves_nothing(scene: Scene) -> None:
    await scene.push("1", 50)
    scene.coordinator.fail("withdraw")  # which it does not need
    with pytest.raises(QuotaExceeded) as refused:
        await scene.push("2", 51)
    assert refused.value.extras == {"quota": "identity.bytes", "used": 50, "allowed": 100}
    assert await scene.kept.get("notes/anna/2") is None
    assert await scene.coordinator.prepared(10) == []
    assert await scene.used() == Usage(50, 1)
    assert await scene.told() == 1


async def test_of_pushes_at_once_as_many_fit_as_the_quota_allows(scene: Scene) -> None:
    pushes = (scene.push(f"{n}", 40) for n in range(9))
    ended = await asyncio.gather(*pushes, return_exceptions=True)
    assert sum(isinstance(error, QuotaExceeded) for error in ended) == 7
    assert await scene.used() == Usage(80, 2)
    assert await scene.coordinator.prepared(10) == []
    assert await scene.told() == 2


async def test_a_conflict_is_told_before_the_quota_and_leaves_nothing(scene: Scene) -> None:
    await scene.push("1", 50)
    with pytest.raises(EtagMismatch):
        await scene.push("1", 101)
    assert await scene.used() == Usage(50, 1)
    assert await scene.coordinator.prepared(10) == []


@pytest.mark.parametrize("done", [None, False, True])
async def test_a_conflict_is_taken_back_once_even_if_that_fails_at_first(
    scene: Scene, done: bool | None
) -> None:
    await scene.kept.put("notes/anna/1", b"{}")
    if done is not None:
        scene.coordinator.fail("withdraw", done=done)
    with pytest.raises(EtagMismatch):
        await scene.push("1", 50)
    await scene.outbox.flush_outcomes()
    assert await scene.used() == Usage()
    assert await scene.coordinator.prepared(10) == []
    assert await scene.told() == 0


async def test_a_push_that_cannot_be_prepared_is_not_written(scene: Scene) -> None:
    scene.coordinator.fail("intend")
    with pytest.raises(CoordinatorUnavailable):
        await scene.push("1", 50)
    assert await scene.kept.get("notes/anna/1") is None
    assert await scene.used() == Usage()


async def test_a_push_that_fails_is_not_counted_and_its_intent_stays(scene: Scene) -> None:
    scene.store.fail("put")
    with pytest.raises(StoreUnavailable):
        await scene.push("1", 50)
    assert await scene.used() == Usage()
    assert len(await scene.coordinator.prepared(10)) == 1
    scene.clock.now_ms += INTENT_TIMEOUT_MS
    assert await scene.outbox.recover() == 1


async def test_a_push_whose_process_ends_is_counted_and_announced(scene: Scene) -> None:
    scene.coordinator.fail("announce")
    await scene.push("1", 50)
    scene.clock.now_ms += INTENT_TIMEOUT_MS
    await Outbox(scene.counted, scene.coordinator).recover()
    assert isinstance(await scene.kept.get("notes/anna/1"), StoredObject)
    assert await scene.used() == Usage(50, 1)
    assert await scene.told() == 1


async def test_a_version_that_is_kept_counts_as_bytes_alone(scene: Scene) -> None:
    charge = Charge(Account("", "notes", "anna"), checked=False, by_key=True)
    entry = new_entry("notes/anna/1", None, "", 1, "anna")
    await scene.outbox.put("notes/anna/1", b"x" * 10, ABSENT, [change("1")], charge=charge, also=[entry])
    stored = [listed.size or 0 async for listed in scene.kept.walk("")]
    assert len(stored) == 2
    assert await scene.used() == Usage(sum(stored), 1)
