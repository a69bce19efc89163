"""What history costs a push, and what a delete costs: rates, CPU per operation, medians of several rounds.

    python -m benches.history [--rounds N] [--dir DIR] [--bytes N]

Documents are pushed and deleted by the engine, without HTTP, by 32 writers at once, over the folder store.
The rounds of all kinds alternate. DIR should lie on the disk that will hold the data. The last lines count
the requests that each kind makes to a store without a change log.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import orjson
import uvloop

from pysync import _core
from pysync.config import HistoryConfig
from pysync.coordinator.local import LocalCoordinator
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.changes import DocumentRef
from pysync.engine.documents import Documents
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from support.faulty_store import FaultyStore

WRITERS = 32
PUSHES = 40
HISTORY = HistoryConfig()
Operation = Callable[[Documents, str, _core.PushBody, DocumentRef], Awaitable[object]]


async def push(documents: Documents, key: str, body: _core.PushBody, ref: DocumentRef) -> object:
    """Replace a document of a collection without history."""
    return await documents.push(key, body, ref=ref)


async def push_with_history(documents: Documents, key: str, body: _core.PushBody, ref: DocumentRef) -> object:
    """Replace a document, and keep the version that is replaced."""
    return await documents.push(key, body, ref=ref, history=HISTORY)


async def delete(documents: Documents, key: str, body: _core.PushBody, ref: DocumentRef) -> object:
    """Delete a document. The next one creates it again."""
    if body.base_hash is None:
        return await documents.push(key, body, ref=ref)
    return await documents.delete(key, body.base_hash, ref=ref)


async def delete_with_history(
    documents: Documents, key: str, body: _core.PushBody, ref: DocumentRef
) -> object:
    """Delete a document, and keep it. The next one creates it again."""
    if body.base_hash is None:
        return await documents.push(key, body, ref=ref, history=HISTORY)
    return await documents.delete(key, body.base_hash, ref=ref, history=HISTORY)


KINDS: Sequence[tuple[str, Operation]] = (
    ("push", push),
    ("push, with history", push_with_history),
    ("create and delete in turn", delete),
    ("create and delete in turn, with history", delete_with_history),
)


async def write_all(documents: Documents, operation: Operation, folder: str, text: str) -> int:
    """Make `PUSHES` writes of one document for each writer. Returns their number."""
    deletes = operation in (delete, delete_with_history)

    async def writer(lane: int) -> None:
        key, base = f"{folder}/{lane}", ""
        ref = DocumentRef("notes", {"id": str(lane)}, None, "somebody", key)
        for n in range(PUSHES):
            members = {"data": {"text": text, "n": n}, "baseHash": base or None}
            body = _core.decode_push(orjson.dumps(members))
            await operation(documents, key, body, ref)
            base = "" if deletes and base else body.hash

    await asyncio.gather(*(writer(lane) for lane in range(WRITERS)))
    return WRITERS * PUSHES


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", default=".")
    parser.add_argument("--bytes", type=int, default=1024)
    options = parser.parse_args()
    text = os.urandom(options.bytes // 2).hex()
    cpus: dict[str, list[float]] = {name: [] for name, _ in KINDS}
    rates: dict[str, list[float]] = {name: [] for name, _ in KINDS}
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        store = await LocalStore.open_folder(Path(folder) / "data")
        coordinator = await LocalCoordinator.open_folder(folder)
        documents = Documents(store, coordinator, lambda: time.time_ns() // 1_000_000)
        for turn in range(options.rounds):
            for name, operation in KINDS:
                cpu, wall = time.process_time(), time.perf_counter()
                done = await write_all(documents, operation, f"{name}/{turn}", text)
                cpus[name].append((time.process_time() - cpu) / done * 1e6)
                rates[name].append(done / (time.perf_counter() - wall))
        await coordinator.close()
        await store.close()
    first = statistics.median(cpus[KINDS[0][0]])
    for name, _ in KINDS:
        cpu, rate = statistics.median(cpus[name]), statistics.median(rates[name])
        spread = f"{min(cpus[name]):.0f} to {max(cpus[name]):.0f}"
        print(f"{name:42} {rate:8.0f} /s  {cpu:7.1f} us CPU ({spread})  {cpu / first:5.2f} times a push")
    for name, operation in KINDS:
        remote = FaultyStore(MemoryStore())
        documents = Documents(remote, MemoryCoordinator(), lambda: time.time_ns() // 1_000_000)
        done = await write_all(documents, operation, "s3", text)
        each = ", ".join(f"{count / done:.2f} {verb}" for verb, count in Counter(remote.calls).most_common())
        print(f"{name:42} requests each: {each}")


if __name__ == "__main__":
    uvloop.run(main())
