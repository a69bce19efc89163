"""Change streams: what idle ones cost, and how soon a write is delivered.

    python -m benches.streams [--quick] [--streams N] [--seconds S]

The server has one worker, on core 0; this process listens and writes on core 1. Idle streams receive nothing
but a comment every 4 s. Each is signed with a key and a certificate of its own, or of nobody. The time of a
write runs from the moment that its request is sent to the moment that a listener has read its event. It
creates a document of 1 KB, 200 times a second, evenly, and every listener receives all of them. Documents lie
in a folder on disk, and each write is flushed.
"""

import argparse
import asyncio
import os
import re
import resource
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, cast
from urllib.parse import urlsplit

import uvloop

from benches import servers
from benches.compare import machine
from benches.servers import Running
from benches.workloads import DOCUMENT_BYTES, Author, note, push_body
from pysync.changelog import change_id, split_id
from pysync.cli.load_generator import cpu_s
from pysync.engine.changes import DocumentRef
from pysync.store.local.store import LocalStore

STREAMS: Final = 2_000
SECONDS: Final = 20.0
PER_SECOND: Final = 200
LISTENERS: Final = (1, 100)
WRITERS: Final = 8
GOAL_KB, GOAL_CPU, GOAL_P99_MS = 20.0, 0.05, 25.0
SETTLE_S: Final = 2.0
"""How long a server has to finish what opening and closing streams leave to do; with `--quick` nothing."""
LATEST_S: Final = 10.0
"""When a write that was not heard never will be."""


@dataclass(frozen=True, slots=True)
class Idle:
    """What open streams cost the server: memory of each, and a share of a core for all."""

    kind: str
    streams: int
    kb_each: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Heard:
    """How long writes took to be heard, of all listeners. `cpu` is the server's share of a core."""

    listeners: int
    p50_ms: float
    p99_ms: float
    most_ms: float
    cpu: float


class Deliveries:
    """The milliseconds that each write of a run took to each listener. Write `n`, of the document `name` and
    its number, is sent at `sent_at[n]`."""

    def __init__(self, name: str = "", writes: int = 0) -> None:
        self.sent_at = array("d", bytes(8 * writes))
        self.times_ms = array("d")
        self._number = re.compile(rb'"params":\{"id":"%b([0-9]+)"\}' % name.encode())

    def read(self, block: bytes, now: float) -> None:
        """Take a block of a stream that has come now."""
        found = self._number.search(block)
        if found is not None:
            self.times_ms.append((now - self.sent_at[int(found[1])]) * 1e3)


class Listener(asyncio.Protocol):
    """A stream. `begun` is done when its first bytes are here."""

    def __init__(self, request: bytes, deliveries: Deliveries) -> None:
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._deliveries = deliveries
        self._come = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self.begun.done():
            if not data.startswith(b"HTTP/1.1 200 "):
                self.begun.set_exception(RuntimeError(f"refused: {data[:200]!r}"))
                self.transport.abort()
                return
            self.begun.set_result(None)
        *blocks, self._come = (self._come + data).split(b"\n\n")
        for block in blocks:
            self._deliveries.read(block, now)


class Writer(asyncio.Protocol):
    """A connection for pushes, sent one after the other. `refused` is the first answer that is no 200."""

    refused: bytes | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200 ") and self.refused is None:
            self.refused = data[:200]


async def listen(url: str, requests: Iterable[bytes], deliveries: Deliveries) -> list[Listener]:
    """Open a stream with each of the requests, one after the other."""
    address, loop, opened = urlsplit(url), asyncio.get_running_loop(), []
    for request in requests:
        _, listener = await loop.create_connection(
            partial(Listener, request, deliveries), str(address.hostname), address.port or 80
        )
        await listener.begun
        opened.append(listener)
    return opened


async def hang_up(listeners: Iterable[Listener | Writer], settle_s: float) -> None:
    for listener in listeners:
        listener.transport.abort()
    await asyncio.sleep(settle_s)


async def idle(server: Running, count: int, seconds: float, settle_s: float, *, signed: bool) -> Idle:
    """Open so many streams and let them be."""
    authors = [Author(server.url) for _ in range(count + 1 if signed else 1)]

    def request(number: int) -> bytes:
        if signed:
            return authors[number].signed("/events?collections=private")
        return authors[0].request("/events?collections=notes")

    # What the first stream costs the others do not.
    await hang_up(await listen(server.url, [request(count if signed else 0)], Deliveries()), settle_s)
    before_mb = server.memory().rss_mb
    opened = await listen(server.url, map(request, range(count)), Deliveries())
    await asyncio.sleep(settle_s)
    kb_each = (server.memory().rss_mb - before_mb) * 1e3 / count
    used, started = cpu_s(server.pid), time.perf_counter()
    await asyncio.sleep(seconds)
    cpu = (cpu_s(server.pid) - used) / (time.perf_counter() - started)
    await hang_up(opened, settle_s)
    return Idle("signed" if signed else "open", count, kb_each, cpu)


async def heard(server: Running, listeners: int, seconds: float, settle_s: float) -> Heard:
    """Write for so long, and listen. Raises RuntimeError where a write is refused or not heard."""
    author, address = Author(server.url), urlsplit(server.url)
    names = [f"{author.tag}-{n}" for n in range(int(seconds * PER_SECOND))]
    pushes = [author.request(f"/push/notes/{name}", push_body(note(name))) for name in names]
    deliveries = Deliveries(f"{author.tag}-", len(pushes))
    opened = await listen(server.url, [author.request("/events?collections=notes")] * listeners, deliveries)
    connect = partial(
        asyncio.get_running_loop().create_connection, Writer, str(address.hostname), address.port or 80
    )
    writers = [(await connect())[1] for _ in range(WRITERS)]
    used, started = cpu_s(server.pid), time.perf_counter()
    for n, push in enumerate(pushes):
        await asyncio.sleep(max(0.0, started + n / PER_SECOND - time.perf_counter()))
        deliveries.sent_at[n] = time.perf_counter()
        writers[n % WRITERS].transport.write(push)
    wanted, ends = len(pushes) * listeners, time.perf_counter() + LATEST_S
    while len(deliveries.times_ms) < wanted and time.perf_counter() < ends:
        await asyncio.sleep(0.01)
    cpu = (cpu_s(server.pid) - used) / (time.perf_counter() - started)
    await hang_up([*opened, *writers], settle_s)
    refused = next((writer.refused for writer in writers if writer.refused is not None), None)
    times_ms = sorted(deliveries.times_ms)
    if refused is not None or len(times_ms) != wanted:
        raise RuntimeError(f"{len(times_ms)} of {wanted} events were heard; refused: {refused!r}")
    return Heard(listeners, times_ms[wanted // 2], times_ms[int(wanted * 0.99)], times_ms[-1], cpu)


async def filled(folder: Path, changes: int) -> list[str]:
    """Fill a log with the changes of as many notes: the places before the first and after each."""
    store = await LocalStore.open_folder(folder)
    places = [await store.change_log.last_id()]
    for start in range(0, changes, 500):
        notes = [DocumentRef("notes", {"id": f"n{n}"}, key=f"notes/n{n}") for n in range(start, start + 500)]
        last, epoch = split_id(await store.change_log.append([note.change("f" * 64, 1) for note in notes]))
        places += [change_id(last - 499 + n, epoch) for n in range(500)]
    await store.close()
    return places


def idle_table(found: Iterable[Idle]) -> str:
    lines = [
        f"| idle streams | number | KB each (goal < {GOAL_KB:g}) | CPU of a core (goal < {GOAL_CPU:.0%}) |",
        "|---|---:|---:|---:|",
    ]
    lines += [f"| {run.kind} | {run.streams:,} | {run.kb_each:.1f} | {run.cpu:.1%} |" for run in found]
    return "\n".join(lines)


def heard_table(found: Iterable[Heard]) -> str:
    lines = [
        f"| listeners | p50 ms | p99 ms (goal < {GOAL_P99_MS:g}) | most | CPU of a core |",
        "|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {run.listeners} | {run.p50_ms:.1f} | {run.p99_ms:.1f} | {run.most_ms:.1f} | {run.cpu:.0%} |"
        for run in found
    ]
    return "\n".join(lines)


async def measure(server: Running, streams: int, seconds: float, settle_s: float) -> str:
    idles = [await idle(server, streams, seconds, settle_s, signed=signed) for signed in (False, True)]
    heards = [await heard(server, listeners, seconds, settle_s) for listeners in LISTENERS]
    return f"{idle_table(idles)}\n\n{heard_table(heards)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benches.streams", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="few streams, a short time: to see that it works"
    )
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    options = parser.parse_args()
    streams, seconds = (20, 0.5) if options.quick else (options.streams, options.seconds)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the server inherits it
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    with servers.fresh_folder() as folder, servers.serving(folder, cores[0]) as server:
        found = uvloop.run(measure(server, streams, seconds, 0.0 if options.quick else SETTLE_S))
    print(f"{machine()}; file: store, {seconds:g} s each; {PER_SECOND} writes a second of documents")
    print(f"of {DOCUMENT_BYTES} bytes.\n\n{found}")


if __name__ == "__main__":
    main()
