"""What coming back after a long time costs: by the feed of changes, after a reset, and without a feed.

    python -m benches.returning [--quick] [--documents N...] [--changed N...] [--others N] [--rounds N]

A client holds all documents of a collection, 1 KB each, and some have changed since. It comes back in four
ways, one request after another on one connection:

- feed: the changes since its cursor, and batches of the documents that these name;
- hashes: after a reset, lists with hashes, and batches of the documents that differ;
- known: after a reset without such lists, batches of all documents that leave out those it has;
- everything: all names and all documents, as without a feed.

Then clients begin with nothing, a replica is opened, and a caller with 1,000 documents of its own catches up
after others have written. The server stays on one core. Bytes include headers. Prints Markdown.
"""

import argparse
import asyncio
import os
import random
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple, Self
from urllib.parse import urlencode, urlsplit

import orjson

from benches import servers
from benches.compare import LOAD_CORE, SERVER_CORE, machine, spread
from benches.servers import Running
from benches.workloads import Author, note
from pysync._core import decode_push
from pysync.cli.load_generator import cpu_s
from pysync.client import Client, Replica
from pysync.clock import wall_clock_ms
from pysync.engine.changes import DocumentRef
from pysync.store import Write
from pysync.store.local.store import LocalStore

DOCUMENTS: Final = (1_000, 10_000, 100_000)
CHANGED: Final = (0, 100, 10_000)
OTHERS: Final = 1_000_000
OWN: Final = 1_000
AUTHORS: Final = 1_000
"""The others who write, each below a prefix of its own."""
GOAL_OWN_MS: Final = 20
GOAL_READ_MS: Final = 300
BATCH: Final = 100
NAMES: Final = 1_000
"""Of a page without hashes."""
HASHED_NAMES: Final = 5_000
"""Of a page with hashes."""
DIGITS: Final = 16
"""Of a hash in such a page, and of a known one."""
FIRST: Final = "feed from the oldest"
AT_ONCE: Final = 1_000
"""Writes that are committed together."""


class Traffic(NamedTuple):
    """Requests, and the bytes of both directions."""

    requests: int = 0
    sent: int = 0
    received: int = 0


class Connection:
    """One connection to a server, for one request after another."""

    def __init__(self, url: str) -> None:
        self.author = Author(url)
        self.traffic = Traffic()
        address = urlsplit(url)
        self._socket = socket.create_connection((str(address.hostname), address.port))
        self._file = self._socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self._socket.close()

    def get(self, path: str, query: Mapping[str, object], *, signed: bool = False) -> Any:
        """The JSON of an answer. Raises RuntimeError for any status but 200."""
        target = f"{path}?{urlencode(query)}"
        request = self.author.signed(target) if signed else self.author.request(target)
        self._socket.sendall(request)
        head = b"".join(iter(self._file.readline, b"\r\n"))
        status, length = parse_head(head)
        body = self._file.read(length)
        requests, sent, received = self.traffic
        self.traffic = Traffic(requests + 1, sent + len(request), received + len(head) + 2 + length)
        if status != 200:
            raise RuntimeError(f"{target[:80]} is answered {status}: {body[:200]!r}")
        return orjson.loads(body)


def parse_head(head: bytes) -> tuple[int, int]:
    """The status of an answer and the length of its body. Raises ValueError where it has no length."""
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines if line)
    if "content-length" not in headers:
        raise ValueError(f"an answer without its length: {first}")
    return int(first.split(" ")[1]), int(headers["content-length"])


def chunks(names: Sequence[str], size: int) -> Iterable[Sequence[str]]:
    return (names[start : start + size] for start in range(0, len(names), size))


def changes(connection: Connection, since: str, query: Mapping[str, object], *, signed: bool = False) -> int:
    """Read the feed to its end, and pull what it names; the number of those."""
    pulled = 0
    while True:
        cursor = {"since": since} if since else {}
        page = connection.get("/changes", {**query, **cursor}, signed=signed)
        names = [change["params"]["id"] for change in page["changes"]]
        pulled += pull(connection, names, str(query["collections"]), signed=signed)
        since = page["cursor"]
        if not page.get("hasMore"):
            return pulled


def pull(
    connection: Connection,
    names: Sequence[str],
    collection: str,
    known: Mapping[str, str] | None = None,
    *,
    signed: bool = False,
) -> int:
    """Pull these documents in batches, and leave out those that are `known`; the number of the others."""
    pulled = 0
    for some in chunks(names, BATCH):
        sets = orjson.dumps({collection: [{"id": name} for name in some]}).decode()
        query = {"collections": collection, "params": sets}
        if known is not None:
            query["known"] = orjson.dumps({collection: [known[name] for name in some]}).decode()
        entries = connection.get("/batch/pull", query, signed=signed)["collections"][collection]
        pulled += sum("data" in entry for entry in entries)
    return pulled


def by_hashes(connection: Connection, known: Mapping[str, str]) -> int:
    """Compare lists with hashes, and pull what differs."""
    after, differing = dict[str, str](), list[str]()
    while True:
        query = {"hashes": "true", "limit": HASHED_NAMES, **after}
        page = connection.get("/list/listed", query)
        listed = zip(page["items"], page["hashes"], strict=True)
        differing += [name for name, hash_ in listed if known[name] != hash_]
        if not page["hasMore"]:
            return pull(connection, differing, "listed")
        after = {"after": page["items"][-1]}


def everything(connection: Connection) -> int:
    """List all names, and pull all documents."""
    after, pulled = dict[str, str](), 0
    while True:
        page = connection.get("/list/listed", {"limit": NAMES, **after})
        pulled += pull(connection, page["items"], "listed")
        if not page["hasMore"]:
            return pulled
        after = {"after": page["items"][-1]}


class Run(NamedTuple):
    """One way back, once."""

    traffic: Traffic
    cpu_ms: float
    wall_s: float


def run(server: Running, way: Callable[[Connection], int], pulled: int) -> Run:
    """Raises RuntimeError where it does not pull as many documents."""
    with Connection(server.url) as connection:
        before, began = cpu_s(server.pid), time.perf_counter()
        found = way(connection)
        wall_s = time.perf_counter() - began
        if found != pulled:
            raise RuntimeError(f"{found} documents are pulled in place of {pulled}")
        return Run(connection.traffic, (cpu_s(server.pid) - before) * 1e3, wall_s)


async def write(folder: Path, refs: Iterable[DocumentRef], revision: int) -> dict[str, str]:
    """Write documents into the store in a folder as pushes would; their hashes by the id."""
    store = await LocalStore.open_folder(folder)
    hashes: dict[str, str] = {}
    try:
        rest = iter(refs)
        while some := list(islice(rest, AT_ONCE)):
            writes = []
            for ref in some:
                body = decode_push(b'{"data":%b}' % note(ref.params["id"], revision))
                now_ms = wall_clock_ms()
                change = ref.change(body.hash, now_ms)
                version = body.hash, now_ms
                written = Write(ref.key, body.stored(now_ms), changes=[change], version=version)
                writes.append(store.commit(written))
                hashes[ref.params["id"]] = body.hash[:DIGITS]
            await asyncio.gather(*writes)
    finally:
        await store.close()
    return hashes


def listed(names: Iterable[str]) -> list[DocumentRef]:
    return [DocumentRef("listed", {"id": name}, key=f"listed/{name}") for name in names]


def private(identity: str, names: Iterable[str]) -> list[DocumentRef]:
    return [
        DocumentRef("private", {"identity": identity, "id": name}, key=f"users/{identity}/{name}")
        for name in names
    ]


Ways = dict[str, Callable[[Connection], int]]
Runs = dict[tuple[int, int | None, str], list[Run]]
"""By the number of documents, of changed ones, and the way."""


def coming_back(server: Running, folder: Path, documents: int, changed: Sequence[int], rounds: int) -> Runs:
    """Every way back, so many times. The folder has no documents yet."""
    names = [f"{n:07}" for n in range(documents)]
    known = asyncio.run(write(folder, listed(names), 0))
    found: Runs = {}
    for revision, count in enumerate(changed, start=1):
        if count > documents:
            continue
        with Connection(server.url) as connection:
            since = connection.get("/changes", {"collections": "listed", "since": "now"})["cursor"]
        newer = asyncio.run(write(folder, listed(random.Random(revision).sample(names, count)), revision))
        ways: Ways = {
            "feed": partial(changes, since=since, query={"collections": "listed"}),
            "hashes": partial(by_hashes, known=known),
            "known": partial(pull, names=names, collection="listed", known=known),
        }
        for _ in range(rounds):
            for way, back in ways.items():
                found.setdefault((documents, count, way), []).append(run(server, back, count))
        known |= newer
    whole: Ways = {
        "everything": everything,
        FIRST: partial(changes, since="", query={"collections": "listed"}),
    }
    for _ in range(rounds):
        for way, back in whole.items():
            found.setdefault((documents, None, way), []).append(run(server, back, documents))
    return found


class Synced(NamedTuple):
    """The first sync of a replica, and its first read when it is opened again."""

    documents: int
    wall_s: float
    cpu_ms: float
    read_ms: float


async def replicate(server: Running, documents: int) -> Synced:
    """Raises RuntimeError where the replica does not hold them all."""
    with TemporaryDirectory() as place:
        path = Path(place, "replica.db")
        before, began = cpu_s(server.pid), time.perf_counter()
        async with Client(server.url) as client, Replica(path, client, {"listed": {}}) as replica:
            await replica.synced()
            wall_s = time.perf_counter() - began
            held = len(replica.keys("listed/"))
        if held != documents:
            raise RuntimeError(f"the replica has {held} documents in place of {documents}")
        cpu_ms = (cpu_s(server.pid) - before) * 1e3
        opened = time.perf_counter()
        async with Client(server.url) as client, Replica(path, client, {"listed": {}}) as replica:
            read = replica.get(f"listed/{documents // 2:07}")
            read_ms = (time.perf_counter() - opened) * 1e3
        if read is None:
            raise RuntimeError("the replica does not have a document that it had")
    return Synced(documents, wall_s, cpu_ms, read_ms)


def after_others(others: int, own: int, changed: Sequence[int], rounds: int) -> dict[int, list[Run]]:
    """What catching up costs a caller after so many changes by others, by the number of its own that have
    changed on another device."""
    found: dict[int, list[Run]] = {}
    with (
        servers.fresh_folder() as folder,
        servers.serving(folder, SERVER_CORE) as server,
        Connection(server.url) as connection,
    ):
        identity = connection.author.identity
        query = {
            "collections": "private",
            "params": orjson.dumps({"private": {"identity": identity}}).decode(),
        }
        names = [f"{n:04}" for n in range(own)]
        asyncio.run(write(folder, private(identity, names), 0))
        since = connection.get("/changes", {**query, "since": "now"}, signed=True)["cursor"]
        chance = random.Random(1)
        authors = [chance.randbytes(32).hex() for _ in range(AUTHORS)]
        theirs = (private(authors[n % AUTHORS], [str(n)]) for n in range(others))
        asyncio.run(write(folder, chain.from_iterable(theirs), 0))
        for revision, count in enumerate(changed, start=1):
            asyncio.run(write(folder, private(identity, names[:count]), revision))
            for _ in range(rounds):
                before, began, traffic = cpu_s(server.pid), time.perf_counter(), connection.traffic
                if changes(connection, since, query, signed=True) != count:
                    raise RuntimeError("the feed does not have what has changed")
                wall_s, cpu_ms = time.perf_counter() - began, (cpu_s(server.pid) - before) * 1e3
                used = (now - then for now, then in zip(connection.traffic, traffic, strict=True))
                found.setdefault(count, []).append(Run(Traffic(*used), cpu_ms, wall_s))
    return found


def table(found: Runs) -> str:
    """The Markdown table of the ways back."""
    lines = [
        "| documents | changed | by | requests | sent | received | server CPU, ms | seconds |",
        "|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    for (documents, changed, way), runs in found.items():
        traffic = runs[0].traffic
        values = (
            f"{documents:,}",
            "any" if changed is None else f"{changed:,}",
            way,
            f"{traffic.requests:,}",
            size(traffic.sent),
            size(traffic.received),
            spread([one.cpu_ms for one in runs], ",.1f"),
            f"{statistics.median(one.wall_s for one in runs):.2f}",
        )
        lines.append(f"| {' | '.join(values)} |")
    return "\n".join(lines)


def size(count: int) -> str:
    """Bytes for people: 999 B, 1.5 KB, 98 MB."""
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= step:
            return f"{count / step:.2g} {unit}" if count < 10 * step else f"{count / step:.0f} {unit}"
    return f"{count} B"


def synced_table(found: Runs, replicas: Sequence[Synced]) -> str:
    """The Markdown table of clients that begin with nothing."""
    lines = [
        "| documents | by | documents a second | server CPU a document, µs |",
        "|---:|---|---:|---:|",
    ]
    for (documents, _, way), runs in found.items():
        if way == FIRST:
            rate = spread([documents / one.wall_s for one in runs], ",.0f")
            cpu = statistics.median(one.cpu_ms for one in runs) * 1e3 / documents
            lines.append(f"| {documents:,} | feed and batches | {rate} | {cpu:.1f} |")
    for documents in sorted({synced.documents for synced in replicas}):
        own = [synced for synced in replicas if synced.documents == documents]
        rate = spread([documents / synced.wall_s for synced in own], ",.0f")
        cpu = statistics.median(synced.cpu_ms for synced in own) * 1e3 / documents
        lines.append(f"| {documents:,} | Replica | {rate} | {cpu:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--documents", type=int, nargs="+", default=DOCUMENTS)
    parser.add_argument("--changed", type=int, nargs="+", default=CHANGED)
    parser.add_argument("--others", type=int, default=OTHERS, help="changes that others write")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few documents: to see that it works")
    options = parser.parse_args()
    documents, changed, others = options.documents, options.changed, options.others
    rounds = options.rounds
    if options.quick:
        documents, changed, others, rounds = [300], [0, 10], 2_000, 1
    os.sched_setaffinity(0, {LOAD_CORE})
    print(f"{machine()}; {rounds} rounds.")
    found: Runs = {}
    replicas: list[Synced] = []
    for count in documents:
        with servers.fresh_folder() as folder, servers.serving(folder, SERVER_CORE) as server:
            found |= coming_back(server, folder, count, changed, rounds)
            replicas += [asyncio.run(replicate(server, count)) for _ in range(rounds)]
    print(table(found), synced_table(found, replicas), sep="\n\n")
    for synced in (max(replicas, key=lambda one: one.documents),):
        reads = [one.read_ms for one in replicas if one.documents == synced.documents]
        print(
            f"\nA replica of {synced.documents:,} is opened and read after {spread(reads, '.0f')} ms; goal:"
            f" {GOAL_READ_MS}."
        )
    own = OWN if not options.quick else 100
    print(f"\nA caller with {own:,} documents of its own, after {others:,} changes by others:\n")
    print("| own changed | requests | received | server CPU, ms | goal |\n|---:|---:|---:|---:|---:|")
    counts = [count for count in changed if count <= own]
    for count, runs in after_others(others, own, counts, max(rounds, 5)).items():
        cpu = spread([one.cpu_ms for one in runs], ".1f")
        traffic = runs[0].traffic
        print(f"| {count} | {traffic.requests} | {size(traffic.received)} | {cpu} | {GOAL_OWN_MS} |")


if __name__ == "__main__":
    main()
