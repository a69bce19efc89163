"""What the service asks of S3: the requests that each of its own costs, and what such a request costs.

    python -m benches.s3 [--quick] [--server radosgw|moto]

Round trips: a node is asked one thing after the other, and a proxy between it and a real S3 server counts.
What "another node" does goes past the proxy. CPU: `s3_cost.py`, in a process of its own. Prints Markdown.
"""

import argparse
import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import aiohttp
import orjson
import uvloop
from yarl import URL

from benches.servers import CHECKOUT
from benches.workloads import BATCH, Author, append_body, element_data, note, push_body
from pysync import config
from pysync.server.app import create_app
from pysync.server.process.serve import serve_on
from pysync.store import open_store

sys.path.append(str(CHECKOUT / "tests"))  # where the real servers are that tests run against too
from components import Missing, S3Server, moto, radosgw
from support.configurations import patient
from support.s3_fault_proxy import FaultProxy

SERVERS: Final = {"radosgw": radosgw, "moto": moto}
PAGE: Final = 100
GROUP: Final = 100
SLOW_S: Final = 0.2
"""Long enough for whatever was asked for together to have come."""
PUBLIC: Final = {"readRoles": ["public"], "writeRoles": ["public"]}
COLLECTIONS: Final = [
    {"name": "notes", "storagePath": "notes/{id}", "listable": True, **PUBLIC},
    {"name": "own", "storagePath": "own/{identity}/{id}", "readRoles": ["self"], "writeRoles": ["self"]},
    {"name": "logs", "storagePath": "logs/{id}", "appendOnly": {"requireAuthorSignature": False}, **PUBLIC},
]


class Trips(NamedTuple):
    """What one thing that a node was asked for cost: its requests to S3 by kind, their answers by status, and
    how many were under way together. `goal`: how many there may be, where that was asked for."""

    asked: str
    calls: Counter[str]
    statuses: Counter[int]
    at_once: int
    goal: int | None


class Node:
    """A node that is asked over HTTP. Each method raises RuntimeError for another answer than it expects."""

    def __init__(self, base: str, session: aiohttp.ClientSession) -> None:
        self._url = base
        self._session = session
        self.author = Author(base)

    async def ask(
        self,
        target: str,
        body: bytes | None = None,
        expect: int = 200,
        *,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The members of the answer, and its `etag`. `method`: POST with a body, else GET."""
        sent = {**(headers or {}), **({} if body is None else {"Content-Type": "application/json"})}
        url = URL(self._url + target, encoded=True)
        method = method or ("GET" if body is None else "POST")
        async with self._session.request(method, url, data=body, headers=sent) as answer:
            text = await answer.read()
            if answer.status != expect:
                raise RuntimeError(f"{target[:60]} is answered {answer.status}: {text[:200]!r}")
            return {**(orjson.loads(text) if text else {}), "etag": answer.headers.get("ETag", "")}

    async def push(self, name: str, base: str | None = None, expect: int = 200) -> str:
        """Store another version of the document over `base`; its hash."""
        revision = int.from_bytes(name.encode()[-2:]) if base is None else int(base[:8], 16)
        answer = await self.ask(f"/push/notes/{name}", push_body(note(name, revision), base), expect)
        return str(answer.get("hash"))

    async def pull(self, name: str) -> Any:
        return await self.ask(f"/pull/notes/{name}")

    async def append(self, log: str, count: int = 1) -> None:
        """Append so many elements at once."""
        bodies = [append_body(element_data(number)) for number in range(count)]
        await asyncio.gather(*(self.ask(f"/push/logs/{log}", body) for body in bodies))

    async def tail(self, log: str) -> None:
        answer = await self.ask(f"/pull/logs/{log}?last=20")
        if not answer["data"]["items"]:
            raise RuntimeError("the tail is empty")

    async def batch(self, count: int) -> None:
        """The documents `batch-0` and so on, in one request."""
        params = quote(orjson.dumps({"notes": [{"id": f"batch-{n}"} for n in range(count)]}), safe="")
        answer = await self.ask(f"/batch/pull?collections=notes&params={params}")
        if not all(entry.get("hash") for entry in answer["collections"]["notes"]):
            raise RuntimeError("the batch lacks documents")

    async def pull_own(self) -> None:
        """A signed pull of a document of the caller's."""
        target = f"/pull/own/{self.author.identity}/a"
        lines = self.author.signed(target).decode().split("\r\n")[2:-2]
        await self.ask(target, headers=dict(line.split(": ", 1) for line in lines))


class Count:
    """Counts what a node that is behind `proxy` asks of S3."""

    def __init__(self, proxy: FaultProxy) -> None:
        self._proxy = proxy
        self.rows: list[Trips] = []

    async def __call__(
        self, asked: str, work: Awaitable[Any], goal: int | None = None, *, delay_s: float = 0.0
    ) -> Any:
        """What `work` comes to; a row is kept of what it cost. S3 takes `delay_s` longer for each request."""
        proxy = self._proxy
        proxy.reset_counts()
        if delay_s:
            proxy.delay(until=delay_s, times=None)
        result = await work
        proxy.reset()
        self.rows.append(
            Trips(asked, Counter(proxy.calls), Counter(proxy.statuses), proxy.max_concurrent, goal)
        )
        return result


async def trips(server: S3Server) -> list[Trips]:
    """A row for each thing that a node is asked for."""
    async with FaultProxy(server.endpoint) as proxy, aiohttp.ClientSession() as session:
        count = Count(proxy)
        for of in (of_documents, of_logs, of_many):
            async with node(server, session) as other, node(server, session, proxy.url) as here:
                await of(count, here, other)
    return count.rows


@asynccontextmanager
async def node(
    server: S3Server, session: aiohttp.ClientSession, endpoint: str | None = None
) -> AsyncIterator[Node]:
    """A node that has just started, its S3 asked at `endpoint`, else directly."""
    settings = config.parse(patient({"version": 1, "coordinator": "memory:", "collections": COLLECTIONS}))
    store = await open_store(server.store("bench", endpoint))
    async with await create_app(settings, store) as app, serve_on(app) as port:
        await app.jobs.erasure.wait()  # a service that starts looks for unfinished erasures
        connector = aiohttp.TCPConnector(limit=GROUP)
        async with aiohttp.ClientSession(connector=connector) as own:
            yield Node(f"http://127.0.0.1:{port}", own)


async def of_documents(count: Count, here: Node, other: Node) -> None:
    """Single documents."""
    await count("pull, nothing there", here.pull("absent"), 1)
    hash_ = await count("push, the first", here.push("a"), 2)
    hash_ = await count("push, over what this node wrote", here.push("a", hash_), 1)
    pulled = await count("pull of what it wrote", here.pull("a"), 1)
    known = {"If-None-Match": pulled["etag"]}
    await count("pull with `If-None-Match`: 304", here.ask("/pull/notes/a", expect=304, headers=known), 1)
    await count("HEAD", here.ask("/pull/notes/a", method="HEAD"), 1)
    hash_ = await other.push("b")
    await count("pull of what another node wrote, the first", here.pull("b"), 1)
    await count("pull of it again", here.pull("b"), 1)
    await count("push over what it pulled", here.push("b", hash_), 1)
    hash_ = await other.push("c")
    await count("push over what it never met", here.push("c", hash_), 2)
    hash_ = await other.push("d")
    await here.pull("d")
    newer = await other.push("d", hash_)
    await count("push over what another node has replaced: 409", here.push("d", hash_, 409))
    await count("push over that, on the right base", here.push("d", newer), 2)
    await count("signed pull, the first of an issuer", here.pull_own())
    await count("signed pull, within 5 s of it", here.pull_own(), 1)


async def of_logs(count: Count, here: Node, other: Node) -> None:
    """Logs."""
    await count("append, the first", here.append("a"), 2)
    await count("append", here.append("a"), 1)
    await count(f"{GROUP} appends at once", here.append("a", GROUP), 2, delay_s=SLOW_S)
    await count("tail of 20", here.tail("a"), 1)
    await other.append("a")
    await count("append after another node's", here.append("a"))
    await other.append("b")
    await count("append to a log it never met", here.append("b"), 2)
    await other.append("c", GROUP)
    await count("tail of 20 of a log it never met", here.tail("c"))


async def of_many(count: Count, here: Node, other: Node) -> None:
    """Many documents at once."""
    await asyncio.gather(*(other.push(f"batch-{n}") for n in range(BATCH)))
    await count(f"batch of {BATCH}, the first", here.batch(BATCH), BATCH, delay_s=SLOW_S)
    await count(f"batch of {BATCH}, again", here.batch(BATCH), BATCH, delay_s=SLOW_S)
    await count(f"list, a page of {PAGE}", here.ask(f"/list/notes?limit={PAGE}"), 1)


def table(rows: list[Trips]) -> str:
    lines = ["| a node is asked for | requests to S3 | goal | which | at once |", "|---|---:|---:|---|---:|"]
    for row in rows:
        goal = "" if row.goal is None else f"{row.goal}"
        kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(row.calls.items()))
        statuses = ", ".join(f"{number} x {status}" for status, number in sorted(row.statuses.items()))
        asked = row.calls.total()
        lines.append(f"| {row.asked} | {asked} | {goal} | {kinds}: {statuses} | {row.at_once} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benches.s3", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="with moto, few requests: to see that it works")
    parser.add_argument("--server", choices=SERVERS, default="radosgw", help="default: radosgw")
    options = parser.parse_args()
    name = "moto" if options.quick else options.server
    try:
        with TemporaryDirectory() as folder, SERVERS[name](Path(folder)) as server:
            rows = uvloop.run(trips(server))
        print(f"{name}:\n\n{table(rows)}\n", flush=True)
        if any(row.goal is not None and row.calls.total() > row.goal for row in rows):
            print("more requests than the goal", file=sys.stderr)
            return 1
    except Missing as missing:
        print(f"round trips: not counted, {missing}\n", flush=True)
    cost = [sys.executable, "-m", "benches.s3_cost", *(["--quick"] if options.quick else [])]
    return subprocess.run(cost, cwd=CHECKOUT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
