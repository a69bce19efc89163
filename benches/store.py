"""What the local store and coordinator cost: rates, CPU per operation, medians of several rounds.

    python -m benches.store [--rounds N] [--dir DIR]

DIR should lie on the disk that will hold the data. CPU counts all threads of this process.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import uvloop

from pysync.coordinator.local import LocalCoordinator
from pysync.store.local.store import LocalStore

KIB = 1024
WRITERS = 32
Round = Callable[[], Awaitable[int]]


async def measure(name: str, rounds: int, round_: Round, mb_each: float = 0) -> None:
    """Print the medians of `rounds` calls of `round_`, which returns how many operations it did."""
    rates, cpus = [], []
    for _ in range(rounds):
        cpu, wall = time.process_time(), time.perf_counter()
        done = await round_()
        cpus.append((time.process_time() - cpu) / done * 1e6)
        rates.append(done / (time.perf_counter() - wall))
    rate = statistics.median(rates)
    volume = f"{rate * mb_each:8.1f} MB/s" if mb_each else ""
    print(f"{name:44} {rate:10.0f} /s  {statistics.median(cpus):8.2f} us CPU {volume}")


async def store_costs(folder: Path, rounds: int) -> None:
    store = await LocalStore.open_folder(folder)
    body = os.urandom(KIB // 2).hex().encode()
    keys = [f"notes/{n % 97}/{n:06}" for n in range(20_000)]
    turn = 0

    async def put_new() -> int:
        nonlocal turn
        turn += 1

        async def writer(lane: int) -> None:
            for n in range(200):
                await store.put(f"new/{turn}/{lane}/{n}", body)

        await asyncio.gather(*(writer(lane) for lane in range(WRITERS)))
        return WRITERS * 200

    async def put_again() -> int:
        async def writer(lane: int) -> None:
            for n in range(200):
                await store.put(keys[lane * 200 + n], body)

        await asyncio.gather(*(writer(lane) for lane in range(WRITERS)))
        return WRITERS * 200

    async def get() -> int:
        for key in keys:
            await store.get(key)
        return len(keys)

    async def get_unchanged() -> int:
        for key, etag in etags.items():
            await store.get(key, etag)
        return len(etags)

    async def list_page() -> int:
        for _ in range(500):
            await store.list("notes/7", None, 100)
        return 500

    async def put_big() -> int:
        # New keys: SQLite would not write the pages of a body that it finds unchanged.
        nonlocal turn
        turn += 1

        async def writer(lane: int) -> None:
            for n in range(10):
                await store.put(f"big/{turn}/{lane}/{n}", big)

        await asyncio.gather(*(writer(lane) for lane in range(8)))
        return 80

    async def mixed() -> int:
        """Writers beside a loop that is never idle, as under load: what the interpreter's lock costs."""
        running = True

        async def busy() -> None:
            while running:
                for key in keys[:20]:
                    await store.get(key)
                await asyncio.sleep(0)

        reader = asyncio.ensure_future(busy())
        done = await put_again()
        running = False
        await reader
        return done

    async def write_file() -> int:
        async def content() -> AsyncIterator[bytes]:
            yield big

        async def writer(lane: int) -> None:
            for n in range(5):
                await store.write(f"files/{lane}/{n}", content(), "application/octet-stream")

        await asyncio.gather(*(writer(lane) for lane in range(8)))
        return 40

    big = os.urandom(512 * KIB)
    for start in range(0, len(keys), 2_000):
        await asyncio.gather(*(store.put(key, body) for key in keys[start : start + 2_000]))
    etags = {key: await store.put(key, body) for key in keys[:500]}
    await measure(f"put 1 KiB, new key, {WRITERS} writers, durable", rounds, put_new)
    await measure(f"put 1 KiB, known key, {WRITERS} writers, durable", rounds, put_again)
    await measure("the same beside a busy loop of reads", rounds, mixed)
    await measure("get 1 KiB", rounds, get)
    await measure("get, not modified", rounds, get_unchanged)
    await measure("list 100 names", rounds, list_page)
    await measure("put 512 KiB, 8 writers, durable", rounds, put_big, 512 * KIB / 1e6)
    await measure("write 512 KiB file, 8 writers, durable", rounds, write_file, 512 * KIB / 1e6)
    await store.close()


async def coordinator_costs(folder: Path, rounds: int) -> None:
    coordinator = await LocalCoordinator.open_folder(folder)
    presenter = "ab" * 32
    nonces = iter(range(10**9))

    async def consume() -> int:
        for _ in range(20_000):
            await coordinator.consume_nonce(presenter, str(next(nonces)), 0)
        return 20_000

    async def count() -> int:
        async def counter(lane: int) -> None:
            for _ in range(100):
                await coordinator.increment(f"caller-{lane}", 60_000)

        await asyncio.gather(*(counter(lane) for lane in range(WRITERS)))
        return WRITERS * 100

    await measure("consume_nonce", rounds, consume)
    await measure(f"count, {WRITERS} callers", rounds, count)
    before = resident_bytes()
    for _ in range(1_000_000):
        await coordinator.consume_nonce(presenter, str(next(nonces)), 0)
    grown = resident_bytes() - before
    print(f"{'memory of 1,000,000 more nonces':44} {grown / 1e6:10.1f} bytes each")
    await coordinator.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", default=".")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        await store_costs(Path(folder) / "store", options.rounds)
        await coordinator_costs(Path(folder) / "coordinator", options.rounds)


if __name__ == "__main__":
    uvloop.run(main())
