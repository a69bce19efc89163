"""What retention costs: a sweep of expired documents, and appends to a log that keeps its newest elements.

    python -m benches.retention [--documents N] [--expired N] [--appends N] [--rounds N]

Runs in a temporary folder below the working directory, without a server. Prints a table for RESULTS.md.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from pysync._core import decode_append, decode_push
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.append_log import AppendLogs, LogSettings
from pysync.engine.changes import DocumentRef
from pysync.engine.documents import Documents
from pysync.store import ListEntry
from pysync.store.local.store import LocalStore

SHAPE = ("notes", None)
TTL_MS = 1_000
BODY = decode_push(b'{"data":{"text":"%b"}}' % (b"x" * 1000)).stored(0)
ELEMENT = decode_append(b'{"data":{"text":"%b"}}' % (b"x" * 200))


class Clock:
    """A clock that only the bench moves."""

    now_ms = 1_000_000

    def __call__(self) -> int:
        """Return the time in milliseconds."""
        return self.now_ms


async def fill(store: LocalStore, prefix: str, count: int) -> None:
    """Put documents, many in one commit."""
    for start in range(0, count, 2_000):
        puts = (store.put(f"notes/{prefix}{n}", BODY) for n in range(start, min(start + 2_000, count)))
        await asyncio.gather(*puts)


async def sweep_times(folder: Path, documents: int, expired: int, rounds: int) -> tuple[float, float]:
    """Return the milliseconds to find expired documents, of a few among many, by the index and by a walk."""
    clock = Clock()
    store = await LocalStore.open_folder(folder, clock)
    await store.time_index.prepare([SHAPE])
    await fill(store, "old", expired)
    clock.now_ms += TTL_MS + 1
    await fill(store, "new", documents)
    before_ms = clock.now_ms - TTL_MS
    by_index, by_walk = list[float](), list[float]()

    async def timed(entries: AsyncIterator[ListEntry], times: list[float]) -> None:
        begun = time.perf_counter()
        found = [listed async for listed in entries if listed.modified_ms < before_ms]
        times.append((time.perf_counter() - begun) * 1000)
        assert len(found) == expired

    for _ in range(rounds):
        await timed(store.time_index.written_before(SHAPE, before_ms), by_index)
        await timed(store.walk("notes"), by_walk)
    await store.close()
    return statistics.median(by_index), statistics.median(by_walk)


async def delete_ms(folder: Path, expired: int) -> float:
    """Return the milliseconds to delete and announce one expired document, found by the index."""
    clock = Clock()
    store = await LocalStore.open_folder(folder, clock)
    await store.time_index.prepare([SHAPE])
    await fill(store, "old", expired)
    clock.now_ms += TTL_MS + 1
    documents = Documents(store, MemoryCoordinator(clock), clock)
    begun = time.perf_counter()
    async for listed in store.time_index.written_before(SHAPE, clock.now_ms - TTL_MS):
        ref = DocumentRef("notes", {"id": listed.key[6:]}, key=listed.key)
        assert await documents.delete_expired(listed, ref, TTL_MS)
    took_s = time.perf_counter() - begun
    await store.close()
    return took_s * 1000 / expired


async def append_costs(folder: Path, appends: int, rounds: int) -> dict[str, tuple[float, float, int]]:
    """Return for each setting the medians of microseconds of CPU and of time per append, one at a time, and
    the number of objects of the log at the end."""
    kinds = {"all stay": LogSettings(), "keepElements: 1000": LogSettings(keep_elements=1_000)}
    stores = {name: await LocalStore.open_folder(folder / str(at)) for at, name in enumerate(kinds)}
    now_ms: Callable[[], int] = lambda: int(time.time() * 1000)  # noqa: E731
    logs = {name: AppendLogs(store, MemoryCoordinator(now_ms), now_ms) for name, store in stores.items()}
    cpu: dict[str, list[float]] = {name: [] for name in kinds}
    took: dict[str, list[float]] = {name: [] for name in kinds}
    for name, settings in kinds.items():
        for _ in range(200):  # in small groups, so that the segments are those of single appends
            await asyncio.gather(*(logs[name].append("log/a", ELEMENT, settings) for _ in range(10)))
    for at in range(rounds):
        for name in [*kinds][:: 1 if at % 2 else -1]:
            begun, cpu_begun = time.perf_counter(), time.process_time()
            for _ in range(appends):
                await logs[name].append("log/a", ELEMENT, kinds[name])
            cpu[name].append((time.process_time() - cpu_begun) / appends * 1e6)
            took[name].append((time.perf_counter() - begun) / appends * 1e6)
    found = {}
    for name, store in stores.items():
        await logs[name].close()
        objects = len([entry async for entry in store.walk("_pysync/logs")])
        found[name] = statistics.median(cpu[name]), statistics.median(took[name]), objects
        await store.close()
    return found


async def main() -> None:
    """Run the bench and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--expired", type=int, default=500)
    parser.add_argument("--appends", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        print("| documents that stay | expired | found by the index, ms | found by a walk, ms |")
        print("|---:|---:|---:|---:|")
        for documents in (options.documents // 100, options.documents // 10, options.documents):
            where = Path(folder) / f"sweep{documents}"
            by_index, by_walk = await sweep_times(where, documents, options.expired, options.rounds)
            print(f"| {documents:,} | {options.expired} | {by_index:.2f} | {by_walk:.2f} |")
        each_ms = await delete_ms(Path(folder) / "delete", options.expired)
        print(f"\nDeleted and announced, each with a flush: {each_ms:.2f} ms a document\n")
        print("| log | CPU µs an append | µs an append | objects at the end |\n|---|---:|---:|---:|")
        for name, (cpu, took, objects) in (
            await append_costs(Path(folder) / "append", options.appends, options.rounds)
        ).items():
            print(f"| {name} | {cpu:.0f} | {took:.0f} | {objects:,} |")


if __name__ == "__main__":
    asyncio.run(main())
