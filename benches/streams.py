"""Change streams: what idle ones cost, how soon a write is heard, and what those cost that begin in the past.

    python -m benches.streams [--quick] [--streams N] [--seconds S] [--memory]
    python -m benches.streams --resume [--quick] [--rounds N]

The server has one worker, on core 0; whoever listens and writes is this process, on core 1. Idle streams say
nothing but a comment every 4 s; each is of somebody else, signed with a key and certificate of their own, or
of nobody. A write takes from the moment that its request is sent to the moment that a listener has read its
event; it creates a document of 1 KB, 200 times a second, evenly, and all who listen are told of all of them.
Documents lie in a folder on disk, and each write is flushed; with --memory nothing is.

With --resume the log of changes is filled first, before the server starts; then streams begin in the past,
all at once, while another client pulls one document after the other. What the event loop does meanwhile is
noted inside the server (`lag.py`).
"""

import argparse
import asyncio
import json
import os
import re
import resource
import time
from array import array
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, cast
from urllib.parse import quote, urlsplit

import uvloop

from benches import servers
from benches.compare import machine, spread
from benches.servers import Running
from benches.workloads import DOCUMENT_BYTES, Author, note, push_body
from pysync.changelog import MAX_RESUMED
from pysync.cli.load_generator import cpu_s
from pysync.engine.changes import DocumentRef
from pysync.sqlite.changelog import change_id
from pysync.store.local.store import LocalStore

STREAMS: Final = 2_000
SECONDS: Final = 20.0
PER_SECOND: Final = 200
LISTENERS: Final = (1, 100)
WRITERS: Final = 8
GOAL_KB, GOAL_CPU, GOAL_P99_MS = 20.0, 0.05, 25.0
CHANGES: Final = 90_000
CALM_S: Final = 0.3
"""A server that uses next to nothing for so long has nothing left to do."""
SETTLE_S: Final = 2.0
"""How long a server has to finish what opening and closing streams leave to do."""
LATEST_S: Final = 10.0
"""When a write that was not heard never will be."""


RESUMES: Final = (
    (MAX_RESUMED, "a filter that matches nothing, from the oldest", 100, CHANGES, "nobody"),
    (MAX_RESUMED, "a filter that matches nothing, from 15,000 back", 100, 15_000, "nobody"),
    (MAX_RESUMED, "all of it, from the oldest", 20, CHANGES, None),
    (MAX_RESUMED, "all of it, from 15,000 back", 20, 15_000, None),
    (CHANGES + 1, "all of it, from the oldest, none reset", 20, CHANGES, None),
)
"""Streams that begin in the past: how many changes they may miss, how many streams, how far back, and of
which document."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The cost of serving streams that begin in the past: seconds of CPU, the time until nothing is left to
    do, what came back, how long another client's pulls took meanwhile, and how long the loop was away at
    most, and computed at most."""

    kind: str
    streams: int
    cpu_s: float
    took_s: float
    mb: float
    p50_ms: float
    most_ms: float
    away_ms: float
    computed_ms: float


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


async def hang_up(listeners: Iterable[Listener | Writer]) -> None:
    for listener in listeners:
        listener.transport.abort()
    await asyncio.sleep(SETTLE_S)


async def idle(server: Running, count: int, seconds: float, *, signed: bool) -> Idle:
    """Open so many streams and let them be."""
    authors = [Author(server.url) for _ in range(count + 1 if signed else 1)]

    def request(number: int) -> bytes:
        if signed:
            return authors[number].signed("/events?collections=private")
        return authors[0].request("/events?collections=notes")

    # What the first stream costs the others do not.
    await hang_up(await listen(server.url, [request(count if signed else 0)], Deliveries()))
    before_mb = server.memory().rss_mb
    opened = await listen(server.url, map(request, range(count)), Deliveries())
    await asyncio.sleep(SETTLE_S)
    kb_each = (server.memory().rss_mb - before_mb) * 1e3 / count
    used, started = cpu_s(server.pid), time.perf_counter()
    await asyncio.sleep(seconds)
    cpu = (cpu_s(server.pid) - used) / (time.perf_counter() - started)
    await hang_up(opened)
    return Idle("signed" if signed else "open", count, kb_each, cpu)


async def heard(server: Running, listeners: int, seconds: float) -> Heard:
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
    await hang_up([*opened, *writers])
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
        last = int(await store.change_log.append([note.change("f" * 64, 1) for note in notes]))
        places += [change_id(last - 499 + n) for n in range(500)]
    await store.close()
    return places


async def resumed(server: Running, kind: str, streams: int, place: str, only: str | None) -> Resumed:
    """Begin so many streams at `place`, all at once."""
    author, address = Author(server.url), urlsplit(server.url)
    target = f"/events?collections=notes&lastEventId={place}"
    if only is not None:
        target += "&params=" + quote(json.dumps({"notes": {"id": only}}))
    connect = partial(asyncio.open_connection, str(address.hostname), address.port or 80)
    times_ms, size = [], 0
    reader, writer = await connect()
    connections = [await connect() for _ in range(streams)]

    async def take(stream: asyncio.StreamReader) -> None:
        nonlocal size
        while block := await stream.read(1 << 20):
            size += len(block)

    async def pull() -> None:
        while True:
            asked = time.perf_counter()
            writer.write(author.request("/pull/notes/n1"))
            head = await reader.readuntil(b"\r\n\r\n")
            found = re.search(rb"Content-Length: ([0-9]+)", head, re.IGNORECASE)
            await reader.readexactly(int(found[1]) if found else 0)
            times_ms.append((time.perf_counter() - asked) * 1e3)
            await asyncio.sleep(0.005)

    pulling = asyncio.create_task(pull())
    await asyncio.sleep(CALM_S)
    used, started = cpu_s(server.pid), time.perf_counter()
    await asyncio.sleep(CALM_S)
    pulls = (cpu_s(server.pid) - used) / (time.perf_counter() - started)
    times_ms.clear()
    server.gaps()
    used, started = cpu_s(server.pid), time.perf_counter()
    for _, stream in connections:
        stream.write(author.request(target))
    taking = [asyncio.create_task(take(each)) for each, _ in connections]
    before, calm = used, 0.0
    while calm < CALM_S:
        await asyncio.sleep(CALM_S / 6)
        now = cpu_s(server.pid)
        calm = calm + CALM_S / 6 if now - before < CALM_S / 6 * (pulls + 0.1) else 0.0
        before = now
    took_s = time.perf_counter() - started
    cpu = before - used - pulls * took_s
    for task in (pulling, *taking):
        task.cancel()
    await asyncio.gather(pulling, *taking, return_exceptions=True)
    for _, each in [(reader, writer), *connections]:
        each.close()
    times_ms.sort()
    gaps = server.gaps()
    return Resumed(
        kind,
        streams,
        cpu,
        took_s - CALM_S,
        size / 1e6,
        times_ms[len(times_ms) // 2],
        times_ms[-1],
        gaps.wall_ms[-1],
        gaps.cpu_ms[-1],
    )


async def measure_resumes(changes: int, rounds: int, core: int) -> str:
    lines = [
        "| streams that begin in the past | number | CPU s (least to most) | s until done | MB told "
        "| others: p50 ms | most | loop away, ms, most | and computed |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    with servers.fresh_folder() as folder:
        places = await filled(folder, changes)
        for max_resumed, kind, streams, back, only in RESUMES:
            settings = {"changes": {"maxResumed": max_resumed}}
            with servers.serving(folder, core, config=servers.STREAMS, settings=settings) as server:
                place = places[max(0, len(places) - 1 - back)]
                runs = [await resumed(server, kind, streams, place, only) for _ in range(rounds)]
            runs.sort(key=lambda run: run.cpu_s)
            run = runs[rounds // 2]
            lines.append(
                f"| {kind} | {streams} | {run.cpu_s:.2f} ({runs[0].cpu_s:.2f} to {runs[-1].cpu_s:.2f}) "
                f"| {run.took_s:.1f} | {run.mb:.1f} | {run.p50_ms:.1f} | {run.most_ms:.1f} "
                f"| {spread([run.away_ms for run in runs], '.1f')} "
                f"| {spread([run.computed_ms for run in runs], '.1f')} |"
            )
    return "\n".join(lines)


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


async def measure(server: Running, streams: int, seconds: float) -> str:
    idles = [await idle(server, streams, seconds, signed=signed) for signed in (False, True)]
    heards = [await heard(server, listeners, seconds) for listeners in LISTENERS]
    return f"{idle_table(idles)}\n\n{heard_table(heards)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benches.streams", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="few streams, a short time: to see that it works"
    )
    parser.add_argument("--memory", action="store_true", help="keep documents in memory")
    parser.add_argument("--resume", action="store_true", help="measure streams that begin in the past")
    parser.add_argument("--rounds", type=int, default=3, help="of each measure, with --resume")
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    options = parser.parse_args()
    streams, seconds = (100, 2.0) if options.quick else (options.streams, options.seconds)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the server inherits it
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    if options.resume:
        changes, rounds = (2_000, 1) if options.quick else (CHANGES, options.rounds)
        print(f"{machine()}; {changes} changes in the log, file: store.\n")
        print(uvloop.run(measure_resumes(changes, rounds, cores[0])))
        return
    with ExitStack() as stack:
        folder = None if options.memory else stack.enter_context(servers.fresh_folder())
        server = stack.enter_context(servers.serving(folder, cores[0]))
        found = uvloop.run(measure(server, streams, seconds))
    store = "memory:" if options.memory else "file:"
    print(f"{machine()}; {store} store, {seconds:g} s each; {PER_SECOND} writes a second of documents")
    print(f"of {DOCUMENT_BYTES} bytes.\n\n{found}")


if __name__ == "__main__":
    main()
