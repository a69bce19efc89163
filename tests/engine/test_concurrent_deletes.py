"""Deletes beside deletes and pushes of one version: exactly one of them is acknowledged."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import pytest
from components import S3Server
from hypothesis import given, settings
from hypothesis import strategies as st
from support.depth import depth
from support.faulty_store import FaultyStore, Verb
from support.s3_stores import new_prefix, opened, proxied

from pysync import _core
from pysync.config import HistoryConfig, StoreConfig
from pysync.coordinator import Coordinator
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.changes import DocumentRef, WriteContext
from pysync.engine.documents import Documents
from pysync.engine.history import entries_of
from pysync.errors import Conflict, StoreUnavailable
from pysync.model import WriteResult
from pysync.protocol import JSON_TYPE
from pysync.store import ANY, NotModified, Precondition, Store, StoredObject
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

ALL = HistoryConfig(versions=1000)


def body(n: int, base: str | None) -> _core.PushBody:
    return _core.decode_push(json.dumps({"data": {"n": n}, "baseHash": base}).encode())


class Interleaved(MemoryStore):
    """Lets others run before each call, as a store on another machine does."""

    async def get(self, key: str, if_none_match: str | None = None) -> StoredObject | NotModified | None:
        await asyncio.sleep(0)
        return await super().get(key, if_none_match)

    async def put(
        self, key: str, body: bytes, content_type: str = JSON_TYPE, expect: Precondition = ANY
    ) -> str:
        await asyncio.sleep(0)
        return await super().put(key, body, content_type, expect)

    async def delete(self, key: str, expect: Precondition = ANY) -> None:
        await asyncio.sleep(0)
        await super().delete(key, expect)


class Race:
    """Writes of one version of a document by several nodes of `stores`."""

    def __init__(self, stores: Sequence[Store], coordinator: Coordinator, clock: FakeClock) -> None:
        self.nodes = [Documents(store, coordinator, clock) for store in stores]
        self.clock = clock

    async def run(self, key: str, chosen: Random, *, is_faulty: bool = False) -> None:
        """Make the writes at once, and judge their outcomes."""
        ref = WriteContext(DocumentRef("notes", {"id": key}, None, key))
        history = chosen.choice([None, ALL])
        base = (await self.nodes[0].push(key, body(-1, None), context=ref)).hash

        async def write(n: int, node: Documents, is_delete: bool) -> str:
            if is_delete:
                await node.delete(key, base, context=ref, history=history)
                return ""
            return (await node.push(key, body(n, base), context=ref, history=history)).hash

        kinds = [True, *(chosen.random() < 0.7 for _ in range(chosen.randrange(1, 4)))]
        chosen.shuffle(kinds)
        outcomes = await asyncio.gather(
            *(write(n, chosen.choice(self.nodes), is_delete) for n, is_delete in enumerate(kinds)),
            return_exceptions=True,
        )
        won = [outcome for outcome in outcomes if isinstance(outcome, str)]
        unknown = [outcome for outcome in outcomes if isinstance(outcome, StoreUnavailable)]
        assert len(won) + len(unknown) + sum(isinstance(one, Conflict) for one in outcomes) == len(kinds)
        assert not unknown or is_faulty
        assert len(won) <= 1
        assert len(won) == 1 or unknown
        stored = await self.nodes[0].pull(key)
        if won:
            assert (stored.hash if stored else "") == won[0]
        if history is not None and not unknown:
            versions = [entry.replaced async for entry in self.nodes[0].history.entries(key, history)]
            assert {version.hash for version in versions if version is not None} == {base}


@settings(max_examples=depth(50, 500), deadline=None)
@given(seed=st.integers(0, 2**32))
async def test_of_writes_of_one_version_one_wins_whatever_fails(seed: int) -> None:
    chosen, clock = Random(seed), FakeClock()
    kept, coordinator = Interleaved(clock), MemoryCoordinator(clock)
    stores = [FaultyStore(kept), FaultyStore(kept)]
    race = Race([kept, *stores], coordinator, clock)
    for n in range(3):
        verb: Verb = chosen.choice(["put", "delete", "get"])
        faulty = chosen.choice(stores)
        after = chosen.randrange(3)
        if chosen.random() < 0.5:
            faulty.lose_reply(verb, after=after)
        else:
            faulty.fail(verb, after=after)
        await race.run(f"notes/{n}", chosen, is_faulty=True)
        for store in stores:
            store.reset()


@settings(max_examples=depth(20, 200), deadline=None)
@given(seed=st.integers(0, 2**32))
async def test_of_writes_of_one_version_one_wins_in_a_folder(seed: int, tmp_path_factory: Any) -> None:
    chosen, clock, folder = Random(seed), FakeClock(), tmp_path_factory.mktemp("race")
    stores = [await LocalStore.open_folder(folder, clock) for _ in range(2)]
    race = Race(stores, MemoryCoordinator(clock), clock)
    for n in range(3):
        await race.run(f"notes/{n}", chosen)
    for store in stores:
        await store.close()


@asynccontextmanager
async def two_stores(server: S3Server) -> AsyncIterator[list[Store]]:
    prefix = new_prefix()
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(opened(server, prefix)) for _ in range(2)]


async def test_of_writes_of_one_version_one_wins_in_a_bucket(moto: S3Server) -> None:
    clock = FakeClock()
    async with two_stores(moto) as stores:
        race = Race(stores, MemoryCoordinator(clock), clock)
        for seed in range(depth(10, 100)):
            await race.run(f"notes/{seed}", Random(seed))


async def test_of_deletes_whose_answers_are_lost_one_wins(radosgw: S3Server) -> None:
    clock = FakeClock()
    async with proxied(radosgw) as bucket:
        race = Race([bucket.other, bucket.store], MemoryCoordinator(clock), clock)
        for seed in range(depth(10, 100)):
            bucket.proxy.lose_reply(Random(seed).choice(["PUT", "DELETE"]))
            await race.run(f"notes/{seed}", Random(seed), is_faulty=True)
            bucket.proxy.reset()


DELETE_ALL = """
import asyncio, json, sys
from pysync.clock import wall_clock_ms
from pysync.config import StoreConfig
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.documents import Documents
from pysync.errors import Conflict
from pysync.store import open_store

async def main(settings, hashes):
    store = await open_store(StoreConfig(**json.loads(settings)))
    documents = Documents(store, MemoryCoordinator(), wall_clock_ms)
    print("ready", flush=True)
    sys.stdin.readline()
    for n, hash_ in enumerate(json.loads(hashes)):
        try:
            await documents.delete(f"notes/{n}", hash_)
            print(n)
        except Conflict:
            pass
    await store.close()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.process
async def test_of_deletes_by_two_processes_one_wins(tmp_path: Path) -> None:
    config = StoreConfig(url=f"file:{tmp_path / 'data'}")
    store = await LocalStore.open_folder(tmp_path / "data")
    documents = Documents(store, MemoryCoordinator(), lambda: 1)
    pushed: list[WriteResult] = [await documents.push(f"notes/{n}", body(n, None)) for n in range(200)]
    hashes = json.dumps([written.hash for written in pushed])
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", DELETE_ALL, json.dumps(asdict(config)), hashes,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )
        for _ in range(2)
    ]  # fmt: skip
    for process in processes:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
    outputs = await asyncio.gather(*(process.communicate(b"\n") for process in processes))
    deleted = [int(line) for output, _ in outputs for line in output.splitlines()]
    assert sorted(deleted) == [*range(200)]
    assert await entries_of(store, "notes/0") == []
    await store.close()
