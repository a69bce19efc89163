"""Measure the cost of batches that ask for far too much: `python -m benches.batch_ceiling [--checkout DIR]`.

One anonymous request each, as an attacker would send it: ten tails of one log with bounds that differ by one,
one document named a hundred times, both as HEAD too; and a batch within the ceiling. Told are the answer, the
CPU of the server, the most memory that it held, and how long a request of others had to wait meanwhile.
`--checkout` measures another version.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlencode

import aiohttp

from benches.servers import CHECKOUT, Running, free_port

ELEMENTS, ELEMENT_BYTES = 100, 900_000
DOCUMENT_BYTES = 4_900_000
OPEN = {"readRoles": ["public"], "writeRoles": ["public"], "maxBodyBytes": 5_000_000}
SERVICE = {
    "version": 1,
    "collections": [
        {"name": "notes", "storagePath": "notes/{id}", **OPEN},
        {
            "name": "log",
            "storagePath": "log/{id}",
            "appendOnly": {"type": "by_timestamp", "requireAuthorSignature": False},
            **OPEN,
        },
    ],
}
TICKS = os.sysconf("SC_CLK_TCK")


def target(collection: str, times: int, bounds: list[dict[str, int]] | None = None) -> str:
    query = {"collections": collection, "params": json.dumps({collection: [{"id": "a"}] * times})}
    if bounds is not None:
        query["appendParams"] = json.dumps({collection: bounds})
    return "/batch/pull?" + urlencode(query)


REQUESTS = {
    "tails of one log": target("log", 10, [{"last": ELEMENTS - n} for n in range(10)]),
    "one document, 100 times": target("notes", 100),
    "5 documents, within the ceiling": target("notes", 5),
}


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def fill(session: aiohttp.ClientSession, url: str) -> None:
    document = {"data": {"text": "x" * DOCUMENT_BYTES}, "baseHash": None}
    async with session.post(f"{url}/push/notes/a", json=document) as answer:
        assert answer.status == 200, await answer.text()
    for n in range(ELEMENTS):
        element = {"data": {"n": n, "text": "x" * ELEMENT_BYTES}}
        async with session.post(f"{url}/push/log/a", json=element) as answer:
            assert answer.status == 200, await answer.text()


async def others_wait(session: aiohttp.ClientSession, url: str, done: asyncio.Event) -> float:
    """The longest that one of many requests of somebody else took."""
    longest = 0.0
    while not done.is_set():
        began = time.perf_counter()
        async with session.get(f"{url}/health") as answer:
            await answer.read()
        longest = max(longest, time.perf_counter() - began)
        await asyncio.sleep(0.005)
    return longest


async def measure(session: aiohttp.ClientSession, server: Running, method: str, path: str) -> str:
    server.forget_peak()
    used, done, size = cpu_s(server.pid), asyncio.Event(), 0
    waiting = asyncio.create_task(others_wait(session, server.url, done))
    began = time.perf_counter()
    async with session.request(method, server.url + path) as answer:
        while chunk := await answer.content.read(1 << 20):
            size += len(chunk)
        status = answer.status
    took = time.perf_counter() - began
    done.set()
    longest = await waiting
    used = cpu_s(server.pid) - used
    return (
        f"{status} | {size / 1e6:.1f} MB | {used:.2f} s | {server.memory().peak_mb:.0f} MB "
        f"| {took:.2f} s | {longest * 1000:.0f} ms"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, default=CHECKOUT, help="the version that serves")
    checkout = parser.parse_args().checkout.resolve()
    with TemporaryDirectory() as folder:
        config, port = Path(folder) / "c.json", free_port()
        store = {"store": f"file:{folder}/data", "server": {"port": port}}
        config.write_text(json.dumps(SERVICE | store))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pysync", "serve", "--config", str(config),
            cwd=checkout, env=os.environ | {"PYTHONPATH": str(checkout)}, stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            server = Running(f"http://127.0.0.1:{port}", process.pid, 0.0)
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as session:
                for _ in range(200):
                    try:
                        async with session.get(f"{server.url}/health"):
                            break
                    except aiohttp.ClientError:
                        await asyncio.sleep(0.1)
                await fill(session, server.url)
                print("| request | status | answer | CPU | peak | took | others waited |")
                print("|---|---|---|---|---|---|---|")
                for name, path in REQUESTS.items():
                    for method in ("GET", "HEAD"):
                        told = await measure(session, server, method, path)
                        print(f"| {method}: {name} ({len(path)} bytes) | {told} |", flush=True)
        finally:
            process.terminate()
            await process.wait()


if __name__ == "__main__":
    asyncio.run(main())
