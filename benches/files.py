"""Files: pulls beside bare aiohttp, durable pushes beside plain Python, and the memory that long ones take.

    python -m benches.files [--quick]

Pulls are measured as in `compare`, of 16 files of 1 MiB in turn; the bare application sends 1 MiB from
memory.

Durable pushes: plain Python opens a file, writes 1 MiB, flushes it (`os.fsync`) and closes it, and so on, in
the folder that the store is in; it hashes nothing, renames nothing, and does not flush the folder. With
several clients as many threads of it write at once, too. Then so many clients push as many files, each on a
connection of its own, and sleep while they wait. Nothing is pinned: server and clients share the machine, and
plain Python has all of it. Each run begins with an empty folder. Prints Markdown.
"""

import argparse
import hashlib
import http.client
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

import orjson

from benches import servers
from benches.compare import LOAD_CORE, SERVER_CORE, Goal, machine, rounds, spread, table
from benches.servers import Running
from benches.workers import Connection
from benches.workloads import FILE_BYTES, FILE_TYPE, Author, file_body
from pysync.cli.load_generator import cpu_s

GOALS: Final = (
    Goal("file-pull", "bare-mebibyte", share=0.8),
    Goal("file-pull-304", "bare-get", share=0.6),
)
CLIENTS: Final = (1, 8)
PUSH_GOAL: Final = 0.6
PUSHED: Final = 1_000
LONG_MIB: Final = 256
GROWTH_GOAL_MIB: Final = 32
MIB: Final = 1 << 20
BLOCKS: Final = 16
"""Different ones that a long file is made of."""


@dataclass(frozen=True, slots=True)
class Pushes:
    """So many files, written plainly, by one thread and by as many as there are clients, and then pushed."""

    alone_mb_per_second: float
    plain_mb_per_second: float
    mb_per_second: float
    server_cpu_us: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Long:
    """A long file, sent or read. `grown_mib`: how far the server's memory was at its highest above what it
    held before."""

    way: str
    seconds: float
    grown_mib: float


def written_plainly(folder: Path, writers: int, files: int) -> float:
    """MB/s of plain Python that writes and flushes so many files, shared out to so many threads."""
    folder.mkdir()
    body = file_body(0)

    def write(paths: Sequence[Path]) -> None:
        for path in paths:
            with path.open("wb") as file:
                file.write(body)
                file.flush()
                os.fsync(file.fileno())

    paths = [folder / f"{n}" for n in range(files)]
    with ThreadPoolExecutor(writers) as threads:
        started = time.perf_counter()
        list(threads.map(write, [paths[start::writers] for start in range(writers)]))
        took = time.perf_counter() - started
    return files * FILE_BYTES / took / 1e6


def push_each(server: Running, author: Author, names: Sequence[str]) -> list[float]:
    """Push a file of each name, one after the other; seconds of each. Raises RuntimeError where one is
    refused."""
    address, body, times = urlsplit(server.url), file_body(0), []
    connection = Connection(str(address.hostname), address.port or 80)
    with connection.sock:
        for name in names:
            request = author.request(f"/push/files/{name}", body, content_type=FILE_TYPE)
            started = time.perf_counter()
            connection.sock.sendall(request)
            while (head := connection.receive()) is None:
                pass
            times.append(time.perf_counter() - started)
            if not head.startswith(b"HTTP/1.1 200 "):
                raise RuntimeError(f"a file is refused: {head!r}")
    return times


def pushes(clients: int, files: int) -> Pushes:
    """One run. Raises RuntimeError where a push is refused."""
    with servers.fresh_folder() as folder:
        alone = plain = written_plainly(folder.with_name("alone"), 1, files)
        if clients > 1:
            plain = written_plainly(folder.with_name("plain"), clients, files)
        with servers.serving(folder) as server, ThreadPoolExecutor(clients) as threads:
            author = Author(server.url)
            push_each(server, author, [f"early-{n}" for n in range(clients)])
            names = [f"{n}" for n in range(files)]
            shares = [names[start::clients] for start in range(clients)]
            used, started = cpu_s(server.pid), time.perf_counter()
            found = threads.map(partial(push_each, server, author), shares)
            times = sorted(chain.from_iterable(found))
            took = time.perf_counter() - started
            cpu_us = (cpu_s(server.pid) - used) / files * 1e6
    p50_ms, p99_ms = (times[int(files * share)] * 1e3 for share in (0.5, 0.99))
    return Pushes(alone, plain, files * FILE_BYTES / took / 1e6, cpu_us, p50_ms, p99_ms)


class Watched:
    """The time that its block takes, and what it makes of the server's memory."""

    def __init__(self, server: Running) -> None:
        self._server = server

    def __enter__(self) -> Self:
        self._server.forget_peak()
        self._before_mb = self._server.memory().rss_mb
        self._started = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self._started
        self.grown_mib = (self._server.memory().peak_mb - self._before_mb) * 1e6 / MIB


class LongFile:
    """A file of so many MiB, made of few blocks: they are sent and compared without being hashed again."""

    def __init__(self, mebibytes: int) -> None:
        blocks = [file_body(seed) for seed in range(min(mebibytes, BLOCKS))]
        self._blocks = [blocks[n % BLOCKS] for n in range(mebibytes)]
        digest = hashlib.sha256()
        for block in self._blocks:
            digest.update(block)
        self._sha256 = digest.hexdigest()

    def push(self, server: Running, path: str) -> None:
        """Raises RuntimeError where the answer is not that it is stored."""
        headers = {"Content-Type": FILE_TYPE, "Content-Length": str(len(self._blocks) * MIB)}
        with connected(server) as connection:
            connection.request("POST", f"/push/{path}", iter(self._blocks), headers)
            answer = connection.getresponse()
            body = answer.read()
        if answer.status != 200 or orjson.loads(body)["hash"] != self._sha256:
            raise RuntimeError(f"a long file is answered {answer.status}: {body[:200]!r}")

    def pull(self, server: Running, path: str) -> None:
        """Raises RuntimeError where anything else comes back than was pushed."""
        with connected(server) as connection:
            connection.request("GET", f"/pull/{path}")
            answer = connection.getresponse()
            if answer.status != 200 or answer.length != len(self._blocks) * MIB:
                raise RuntimeError(f"a long file is answered {answer.status}, {answer.length} bytes")
            for block in self._blocks:
                if answer.read(MIB) != block:
                    raise RuntimeError("a long file comes back as another")


@contextmanager
def connected(server: Running) -> Iterator[http.client.HTTPConnection]:
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
    try:
        yield connection
    finally:
        connection.close()


def long_transfers(mebibytes: int, times: int) -> list[Long]:
    """A file, pushed and pulled `times` times, by a server that has taken and sent a small one before."""
    small, long, found = LongFile(1), LongFile(mebibytes), []
    with (
        servers.fresh_folder() as folder,
        servers.serving(folder, SERVER_CORE) as server,
        servers.pinned(LOAD_CORE),
    ):
        small.push(server, "files/small")
        small.pull(server, "files/small")
        for n in range(times):
            with Watched(server) as up:
                long.push(server, f"files/long-{n}")
            with Watched(server) as down:
                long.pull(server, f"files/long-{n}")
            found += [Long("up", up.seconds, up.grown_mib), Long("down", down.seconds, down.grown_mib)]
    return found


def push_table(found: Mapping[int, Sequence[Pushes]]) -> str:
    """Medians, and in brackets the lowest and highest share."""
    lines = [
        "| clients | plain Python, MB/s | as many threads of it | pushes, MB/s | share of the one | goal |"
        " of as many | CPU µs | p50 ms | p99 ms |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for clients, runs in found.items():
        alone, plain, ours, cpu, p50, p99 = (
            statistics.median(getattr(run, name) for run in runs)
            for name in (
                "alone_mb_per_second",
                "plain_mb_per_second",
                "mb_per_second",
                "server_cpu_us",
                "p50_ms",
                "p99_ms",
            )
        )
        share = spread([run.mb_per_second / run.alone_mb_per_second for run in runs], ".2f")
        share_of_all = spread([run.mb_per_second / run.plain_mb_per_second for run in runs], ".2f")
        lines.append(
            f"| {clients} | {alone:.0f} | {plain:.0f} | {ours:.0f} | {share} | {PUSH_GOAL} | {share_of_all}"
            f" | {cpu:.0f} | {p50:.2f} | {p99:.2f} |"
        )
    return "\n".join(lines)


def long_table(found: Sequence[Long], mebibytes: int) -> str:
    lines = [
        f"| {mebibytes} MiB | MB/s | RSS grows by, MiB (goal < {GROWTH_GOAL_MIB}) |",
        "|---|---:|---:|",
    ]
    for way in ("up", "down"):
        runs = [run for run in found if run.way == way]
        rate = spread([mebibytes * MIB / run.seconds / 1e6 for run in runs], ".0f")
        lines.append(f"| {way} | {rate} | {spread([run.grown_mib for run in runs], '.1f')} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benches.files", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="few short rounds: to see that it works")
    quick = parser.parse_args().quick
    count, seconds, files, mib = (1, 0.2, 16, 4) if quick else (5, 3.0, PUSHED, LONG_MIB)
    with servers.bare(SERVER_CORE) as bare, servers.pysync(SERVER_CORE) as ours:
        pulls = rounds(bare, ours, GOALS, count, seconds)
    pushed = {clients: [pushes(clients, files) for _ in range(count)] for clients in CLIENTS}
    long = long_transfers(mib, count)
    print(f"{machine()}; {count} rounds of {seconds:g} s, and of {files:,} pushes.")
    print("", table(pulls, GOALS), push_table(pushed), long_table(long, mib), sep="\n\n")


if __name__ == "__main__":
    main()
