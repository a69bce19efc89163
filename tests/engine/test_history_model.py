"""History against a model: whatever crashes, exactly what was stored is listed, with who wrote it."""

import asyncio
import json
import sqlite3
import sys
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from components import S3Server
from hypothesis import given, settings
from hypothesis import strategies as st
from support.depth import depth
from support.faulty_store import FaultyStore
from support.s3_stores import new_prefix

from pysync import _core
from pysync.config import HistoryConfig, StoreConfig
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.changes import DocumentRef, WriteContext
from pysync.engine.documents import Documents
from pysync.engine.history import entries_of, new_entry
from pysync.engine.idempotency import IdempotentRequest
from pysync.errors import Conflict, StoreUnavailable
from pysync.store import ANY, Precondition, Store, open_store
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

KEY = "notes/a"
ALL = HistoryConfig(versions=1000)


class Listed(NamedTuple):
    """A version: its hash, and who wrote it."""

    hash: str
    identity: str


def body(data: object, base: str | None) -> _core.PushBody:
    return _core.decode_push(json.dumps({"data": {"n": data}, "baseHash": base}).encode())


def ref_of(identity: str) -> WriteContext:
    return WriteContext(DocumentRef("notes", {"id": "a"}, None, KEY), identity)


async def listed(documents: Documents, limits: HistoryConfig = ALL) -> list[Listed]:
    """The earlier versions, the newest first."""
    current = await documents.pull(KEY)
    known = set() if current is None else {(current.hash, current.ts_ms)}
    writers: dict[tuple[str, int], str] = {}
    found = []
    async for entry in documents.history.entries(KEY, limits):
        writers[entry.hash, entry.at_ms] = entry.identity
        if entry.replaced is not None:
            version = entry.replaced.hash, entry.replaced.ts_ms
            if version not in known:
                known.add(version)
                found.append(version)
    return [Listed(version[0], writers.get(version, "")) for version in found]


class Traced(MemoryStore):
    """Remembers the hashes of the versions of one document, in the order in which they were stored."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.stored: list[str] = []

    async def put(self, key: str, body: bytes, content_type: str = "", expect: Precondition = ANY) -> str:
        etag = await super().put(key, body, content_type, expect)
        if key == KEY:
            self.stored.append(_core.read_document(body).hash)
        return etag


@settings(max_examples=depth(30, 400), deadline=None)
@given(seed=st.integers(0, 2**32))
async def test_every_version_that_was_stored_is_listed_whatever_crashes(seed: int) -> None:
    """Nodes of one store without a log of changes: each may end at any write."""
    chosen, clock = Random(seed), FakeClock()
    kept, coordinator = Traced(clock), MemoryCoordinator(clock)
    writers: dict[str, str] = {}

    def new_node() -> tuple[FaultyStore, Documents]:
        store = FaultyStore(kept)
        return store, Documents(store, coordinator, clock)

    nodes = [new_node(), new_node()]
    for n in range(chosen.randrange(1, 40)):
        clock.now_ms += 1
        clock.step(chosen.choice([0, 0, 0, -5_000, 3_000]))
        at = chosen.randrange(2)
        store, documents = nodes[at]
        if chosen.random() < 0.3:
            store.crash(chosen.randrange(4), done=chosen.random() < 0.5)
        current = await Documents(kept, coordinator, clock).pull(KEY)
        base = None if current is None else current.hash
        if chosen.random() < 0.2:
            base = chosen.choice([None, "stale"])
        pushed = body(n, base)
        writers[pushed.hash] = f"user {n}"
        try:
            if base is not None and chosen.random() < 0.3:
                await documents.delete(KEY, base, context=ref_of(f"user {n}"), history=ALL)
            elif chosen.random() < 0.3:
                once = IdempotentRequest(f"{n}", pushed.hash)
                await documents.push(KEY, pushed, None, ref_of(f"user {n}"), ALL, once)
            else:
                await documents.push(KEY, pushed, context=ref_of(f"user {n}"), history=ALL)
        except Conflict:
            pass
        except StoreUnavailable:
            nodes[at] = new_node()
        if store.is_to_crash:
            nodes[at] = new_node()
    reader = Documents(kept, coordinator, clock)
    current = await reader.pull(KEY)
    earlier = kept.stored[::-1]
    if current is not None:
        assert earlier.pop(0) == current.hash
    assert await listed(reader) == [Listed(hash_, writers[hash_]) for hash_ in earlier]


async def test_pruning_keeps_the_author_of_the_oldest_version_despite_entries_of_failed_writes(
    clock: FakeClock,
) -> None:
    """A writer that lost, or that was killed, may leave an entry that is newer than that of the winner."""
    store = MemoryStore(clock)
    coordinator = MemoryCoordinator(clock)
    documents = Documents(store, coordinator, clock)
    written: list[Listed] = []
    for n in range(4):
        expected = written[::-1]
        clock.now_ms += 1
        new = body(n, written[-1].hash if written else None)
        await documents.push(KEY, new, context=ref_of(f"winner {n}"), history=ALL)
        written.append(Listed(new.hash, f"winner {n}"))
        clock.now_ms += 1
        left = new_entry(KEY, None, "ab" * 32, clock.now_ms, "loser")
        assert isinstance(left.body, bytes)
        await store.put(left.key(await coordinator.next_timestamp()), left.body)
        await documents.history.prune(KEY, ALL)
        assert await listed(documents) == expected
    await documents.history.prune(KEY, HistoryConfig(versions=1))
    assert await listed(documents) == expected[:1]
    clock.now_ms += 10
    await documents.history.prune(KEY, HistoryConfig(for_ms=1))
    assert await listed(documents) == []
    await documents.push(KEY, body(n + 1, written[-1].hash), context=ref_of("last"), history=ALL)
    assert await listed(documents) == written[-1:]


@settings(max_examples=depth(20, 200), deadline=None)
@given(seed=st.integers(0, 2**32))
async def test_pruned_versions_are_those_not_listed(seed: int, tmp_path_factory: Any) -> None:
    """Of a store with a log of changes, where an entry is written with its version or not at all."""
    chosen, clock = Random(seed), FakeClock()
    store = await LocalStore.open_folder(tmp_path_factory.mktemp("pruned"), clock)
    limits = HistoryConfig(versions=chosen.randrange(1, 5), for_ms=chosen.choice([None, 20]))
    documents = Documents(store, MemoryCoordinator(clock), clock)
    stored: list[tuple[Listed, int | None]] = []
    hash_: str | None = None
    for n in range(chosen.randrange(1, 30)):
        clock.now_ms += chosen.choice([1, 1, 1, 15])
        if limits.for_ms is None:
            clock.step(chosen.choice([0, 0, -5_000, 3_000]))
        ref = ref_of(f"user {n}")
        if hash_ is not None:
            stored[-1] = stored[-1][0], clock.now_ms
        if hash_ is not None and chosen.random() < 0.2:
            await documents.delete(KEY, hash_, context=ref, history=limits)
            hash_ = None
        else:
            hash_ = (await documents.push(KEY, body(n, hash_), context=ref, history=limits)).hash
            stored.append((Listed(hash_, ref.identity), None))
        if chosen.random() < 0.2:
            await documents.history.prune(KEY, limits)
    expected = [
        version
        for version, replaced_ms in reversed(stored)
        if replaced_ms is not None and (limits.for_ms is None or replaced_ms + limits.for_ms >= clock.now_ms)
    ][: limits.versions]
    assert await listed(documents, limits) == expected
    await documents.history.prune(KEY, limits)
    assert await listed(documents, limits) == expected
    assert len(await entries_of(store, KEY)) <= len(expected) + 2 * (limits.versions + 1)
    await store.close()


WRITE = """
import asyncio, json, os, random, sys
from pysync import _core
from pysync.config import HistoryConfig, StoreConfig
from pysync.coordinator.local import LocalCoordinator
from pysync.engine.documents import Documents
from pysync.engine.changes import DocumentRef, WriteContext
from pysync.clock import wall_clock_ms
from pysync.errors import Conflict, PysyncError
from pysync.store import open_store

async def main(settings, folder, name):
    store = await open_store(StoreConfig(**json.loads(settings)))
    documents = Documents(store, await LocalCoordinator.open_folder(folder), wall_clock_ms)
    limits = HistoryConfig(versions=1000)
    ref = WriteContext(DocumentRef("notes", {"id": "a"}, None, "notes/a"), name)
    for n in range(10_000):
        try:
            found = await documents.pull("notes/a")
            base = None if found is None else found.hash
            if base and random.random() < 0.2:
                await documents.delete("notes/a", base, context=ref, history=limits)
                continue
            members = {"data": {"by": name, "n": n}, "baseHash": base}
            body = _core.decode_push(json.dumps(members).encode())
            print("try", body.hash, flush=True)
            await documents.push("notes/a", body, context=ref, history=limits)
            print("made", body.hash, flush=True)
        except (Conflict, PysyncError):
            pass

asyncio.run(main(*sys.argv[1:]))
"""


async def _history_of_killed_writers(config: StoreConfig, folder: Path, lines: Iterable[int]) -> None:
    """Two processes write one document. One of them is killed after so many lines, and another one begins."""
    tried: dict[str, str] = {}
    made: set[str] = set()

    def note(name: str, line: str) -> None:
        kind, _, hash_ = line.partition(" ")
        if kind == "try":
            tried[hash_] = name
        elif kind == "made":
            made.add(hash_)

    async def follow(name: str, count: int) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WRITE, json.dumps(asdict(config)), str(folder), name,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            for _ in range(count):
                begun = (await process.stdout.readline()).decode()
                assert begun, "it ended by itself"
                note(name, begun.strip())
        finally:
            process.kill()
            rest = (await process.communicate())[0]
        for line in rest.decode().splitlines():
            note(name, line)

    await asyncio.gather(*(follow(f"writer {at}", count) for at, count in enumerate(lines)))
    store: Store = await open_store(config)
    documents = Documents(store, MemoryCoordinator(), lambda: 2**50)
    current = await documents.pull(KEY)
    found = await listed(documents)
    hashes = {version.hash for version in found} | ({current.hash} if current else set())
    assert made <= hashes, "what was acknowledged is stored, or was"
    assert hashes <= tried.keys()
    assert all(version.identity == tried[version.hash] for version in found)
    await store.close()


@pytest.mark.process
async def test_killed_processes_lose_no_version_in_a_folder(tmp_path: Path) -> None:
    config = StoreConfig(url=f"file:{tmp_path / 'data'}")
    await _history_of_killed_writers(config, tmp_path / "data", depth((60, 25, 100), (400, 150, 600)))


@pytest.mark.process
@pytest.mark.timeout(depth(180, 600))
async def test_killed_processes_lose_no_version_in_a_bucket(moto: S3Server, tmp_path: Path) -> None:
    config = moto.store(new_prefix())
    await _history_of_killed_writers(config, tmp_path / "data", depth((30, 12, 50), (200, 80, 300)))


async def test_a_damaged_document_is_no_version_although_the_process_that_wrote_it_reads_it_no_more(
    tmp_path: Path, clock: FakeClock
) -> None:
    store = await LocalStore.open_folder(tmp_path, clock)
    documents = Documents(store, MemoryCoordinator(clock), clock)
    base = (await documents.push(KEY, body(0, None), context=ref_of("first"), history=ALL)).hash
    with closing(sqlite3.connect(tmp_path / "pysync.db", isolation_level=None)) as database:
        database.execute("UPDATE object SET body = ? WHERE name = 'a'", (b"{",))
    with pytest.raises(Conflict) as conflict:
        await documents.push(KEY, body(1, base), context=ref_of("second"), history=ALL)
    assert conflict.value.current_hash == ""
    assert len(await entries_of(store, KEY)) == 1
    await documents.push(KEY, body(2, ""), context=ref_of("third"), history=ALL)
    assert await listed(documents) == []
    assert len(await entries_of(store, KEY)) == 2
    await store.close()
