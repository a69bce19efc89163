"""A batch pull over a store that is far away: how much of the store's latency a client waits for.

    python -m benches.latency [--quick]

The service runs in this process, on a memory store whose every read takes 20 ms. The batch asks for 100
documents; read one after the other they would take 2 s. Prints Markdown.
"""

import argparse
import asyncio
import statistics
import time
from typing import ClassVar
from urllib.parse import quote

import aiohttp
import orjson
import uvloop
from yarl import URL

from benches.workloads import BATCH, note, push_body
from pysync import config
from pysync.server.app import create_app
from pysync.server.serve import serve_on
from pysync.store import NotModified, StoredObject
from pysync.store.memory import MemoryStore

LATENCY_S = 0.020
GOAL_MS = 60
SERVICE = {
    "version": 1,
    "store": "memory:",
    "collections": [
        {"name": "notes", "storagePath": "notes/{id}", "readRoles": ["public"], "writeRoles": ["public"]}
    ],
}


class DistantStore(MemoryStore):
    """A memory store behind a slow network: reads wait, any number of them at once."""

    is_remote: ClassVar[bool] = True
    cheap_put_bytes: ClassVar[int] = 4_096

    async def get(self, key: str, if_none_match: str | None = None) -> StoredObject | NotModified | None:
        await asyncio.sleep(LATENCY_S)
        return await super().get(key, if_none_match)


async def batches(count: int) -> list[float]:
    """Milliseconds from sending a batch pull to having read its answer, `count` times, after one that does
    not count. Raises RuntimeError where an entry is not what was stored."""
    times_ms = []
    settings = config.parse(SERVICE)
    async with (
        await create_app(settings, DistantStore()) as app,
        serve_on(app) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        documents = [note(f"n{n}") for n in range(BATCH)]
        for n, document in enumerate(documents):
            async with session.post(
                f"/push/notes/n{n}", data=push_body(document), headers={"Content-Type": "application/json"}
            ) as pushed:
                pushed.raise_for_status()
        sets = quote(orjson.dumps({"notes": [{"id": f"n{n}"} for n in range(BATCH)]}), safe="")
        path = URL(f"/batch/pull?collections=notes&params={sets}", encoded=True)
        for _ in range(1 + count):
            started = time.perf_counter()
            async with session.get(path) as answer:
                body = await answer.read()
            times_ms.append((time.perf_counter() - started) * 1e3)
            entries = orjson.loads(body)["collections"]["notes"]
            if [entry.get("data") for entry in entries] != list(map(orjson.loads, documents)):
                raise RuntimeError("the batch does not hold what was stored")
    return times_ms[1:]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benches.latency", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    count = 5 if parser.parse_args().quick else 25
    times_ms = uvloop.run(batches(count))
    print("| batch | store latency | median ms | lowest | highest | goal |")
    print("|---|---:|---:|---:|---:|---:|")
    print(
        f"| {BATCH} entries, {count} times | {LATENCY_S * 1e3:.0f} ms | {statistics.median(times_ms):.1f}"
        f" | {min(times_ms):.1f} | {max(times_ms):.1f} | < {GOAL_MS} |"
    )


if __name__ == "__main__":
    main()
