"""What the load generator cannot say of logs: what an append to a long one costs beside one to a short one,
and what reading all of a log costs.

    python -m benches.append_log [--quick]

One client, and one request under way. Server and client each have a core. Prints Markdown.
"""

import argparse
import gc
import http.client
import os
import socket
import statistics
import struct
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import orjson

from benches import servers
from benches.compare import (
    FILL_CONNECTIONS,
    LOAD_CORE,
    QUICK_LOGGED,
    SERVER_CORE,
    fill,
    how_filled,
    machine,
    spread,
)
from benches.servers import Running
from benches.workloads import FULL, LOGGED, Author, append_body, element_data
from pysync.cli.load_generator import cpu_s, read_head

GOAL_RATIO = 1.3
GOAL_MB_PER_SECOND = 200
GOAL_GROWTH = 2
# A short log has 5 elements when it is first measured and 15 at last, so about 10; then comes the next one.
SHORT_BEGINS = 5
SHORT_GROWS = 10
READ_BYTES = 1024 * 1024

# What SQLite documents of the head of its index of the write-ahead log, in the order of bytes of the machine.
_WAL_INDEX: Final = struct.Struct("=12xBBHI12xQ")
_WAL_FRAME_HEAD_BYTES: Final = 24


@dataclass(frozen=True, slots=True)
class Cost:
    """One append: the time until its answer was read, the server's CPU time, and what the server wrote.
    `wal_bytes` went into the database's write-ahead log, `written_bytes` is what the kernel counts."""

    ms: float
    cpu_us: float
    wal_bytes: int
    written_bytes: int


@dataclass(frozen=True, slots=True)
class Round:
    """Appends to short logs and to the long one, in turns."""

    short: list[Cost]
    long: list[Cost]


@dataclass(frozen=True, slots=True)
class Reading:
    """A whole log, read again and again. `grown_mb` is how far the server's memory was at its highest above
    what it held before, after the first time and after all."""

    answer_bytes: int
    seconds: list[float]
    first_grown_mb: float
    grown_mb: float


class Caller:
    """One keep-alive connection. It polls instead of sleeping, as the load generator does."""

    def __init__(self, base_url: str) -> None:
        url = urlsplit(base_url)
        self._socket = socket.create_connection((str(url.hostname), url.port or 80))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setblocking(False)

    def close(self) -> None:
        self._socket.close()

    def call(self, request: bytes) -> float:
        """Seconds until the answer was read. Raises RuntimeError where it is not 200."""
        started = time.perf_counter()
        self._socket.sendall(request)
        answer = b""
        while (end := answer.find(b"\r\n\r\n")) < 0:
            answer += self._receive()
        status, length = read_head(answer[: end + 2])
        while len(answer) < end + 4 + length:
            answer += self._receive()
        took = time.perf_counter() - started
        if status != 200:
            raise RuntimeError(f"an append is answered {answer!r}")
        return took

    def _receive(self) -> bytes:
        while True:
            try:
                data = self._socket.recv(65_536)
            except BlockingIOError:
                continue
            if not data:
                raise RuntimeError("the server closed the connection")
            return data


class WriteAheadLog:
    """Counts what goes into the write-ahead log of a SQLite database, from the head of the log's index. To be
    asked while nobody writes, and before the log has begun anew twice."""

    def __init__(self, database: Path) -> None:
        self._index = database.with_name(database.name + "-shm")
        self._frames, self._salt, _ = self._head()

    def grown_bytes(self) -> int:
        """Bytes since the last call, or since this was made."""
        frames, salt, frame_bytes = self._head()
        # A log that began anew has another salt, and its frames count from 0.
        new = frames - self._frames if salt == self._salt else frames
        self._frames, self._salt = frames, salt
        return new * frame_bytes

    def _head(self) -> tuple[int, int, int]:
        """Frames in the log, its salt, and the bytes of a frame."""
        with self._index.open("rb") as index:
            is_valid, _, page_bytes, frames, salt = _WAL_INDEX.unpack(index.read(_WAL_INDEX.size))
        if not is_valid:
            raise RuntimeError(f"{self._index} is not set up")
        # 1 stands for 65536, which 16 bits cannot hold.
        return frames, salt, (65_536 if page_bytes == 1 else page_bytes) + _WAL_FRAME_HEAD_BYTES


class Appends:
    """One client that appends to the logs of one server, and what each append costs."""

    def __init__(self, server: Running, folder: Path) -> None:
        self._server = server
        self._author = Author(server.url)
        self._caller = Caller(server.url)
        self._wal = WriteAheadLog(folder / "pysync.db")
        self._numbers = count()

    def close(self) -> None:
        self._caller.close()

    def round(self, pairs: int) -> Round:
        """`pairs` appends to short logs and as many to `long`, in turns: which comes first alternates."""
        found = Round([], [])
        for start in range(0, pairs, SHORT_GROWS):
            short = f"{self._author.tag}-{next(self._numbers)}"
            for _ in range(SHORT_BEGINS):
                self._append(short)
            for pair in range(min(SHORT_GROWS, pairs - start)):
                turns = [(short, found.short), ("long", found.long)]
                for name, costs in turns if pair % 2 else reversed(turns):
                    costs.append(self._append(name))
        return found

    def _append(self, log: str) -> Cost:
        body = append_body(element_data(next(self._numbers)))
        request = self._author.request(f"/push/logs/{log}", body)
        self._wal.grown_bytes()
        written, cpu = self._server.written_bytes(), cpu_s(self._server.pid)
        took = self._caller.call(request)
        return Cost(
            took * 1e3,
            (cpu_s(self._server.pid) - cpu) * 1e6,
            self._wal.grown_bytes(),
            self._server.written_bytes() - written,
        )


def check_full(base_url: str, name: str, elements: int) -> int:
    """Bytes of the answer that is all of a log. Raises RuntimeError where it does not hold every element that
    was appended once, in the order of time."""
    url = urlsplit(base_url)
    connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=60)
    try:
        connection.request("GET", f"/pull/logs/{name}?full=true")
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise RuntimeError(f"all of {name} is answered {answer.status}: {body[:200]!r}")
    items = orjson.loads(body)["data"]["items"]
    times = [item["ts"] for item in items]
    if sorted(item["data"]["n"] for item in items) != list(range(elements)):
        raise RuntimeError(f"{name} does not hold what was appended")
    if any(later <= earlier for earlier, later in pairwise(times)):
        raise RuntimeError(f"{name} is not in the order of time")
    return len(body)


def read_all(base_url: str, request: bytes, at_least: int) -> float:
    """Seconds from sending a request to the end of its answer, which ends the connection; nothing but reading
    is done meanwhile. Raises RuntimeError where it is shorter than `at_least`."""
    url = urlsplit(base_url)
    room = bytearray(READ_BYTES)
    received = 0
    with socket.create_connection((str(url.hostname), url.port or 80)) as connection:
        started = time.perf_counter()
        connection.sendall(request)
        while size := connection.recv_into(room):
            received += size
        took = time.perf_counter() - started
    if received < at_least:
        raise RuntimeError(f"the answer has {received:,} bytes of at least {at_least:,}")
    return took


def read_full(server: Running, name: str, answer_bytes: int, times: int) -> Reading:
    """All of a log, read `times` times from a server that has read nothing of it before."""
    author = Author(server.url)
    read_all(server.url, author.request(f"/pull/logs/{name}?last=1", headers="Connection: close\r\n"), 1)
    request = author.request(f"/pull/logs/{name}?full=true", headers="Connection: close\r\n")
    server.forget_peak()
    before = server.memory().rss_mb
    seconds = [read_all(server.url, request, answer_bytes)]
    first = server.memory().peak_mb
    seconds += [read_all(server.url, request, answer_bytes) for _ in range(times - 1)]
    return Reading(answer_bytes, seconds, first - before, server.memory().peak_mb - before)


def append_table(rounds: list[Round], long: int) -> str:
    """Medians of the times, and means of the bytes: what a group of appends shares, such as a segment that is
    sealed or a checkpoint of the database, falls on one of them. In brackets the lowest and highest round."""
    lines = [
        f"| per append, one client | about 10 elements | {long:,} elements | ratio | goal |",
        "|---|---:|---:|---:|---:|",
    ]

    def line(
        what: str, of: Callable[[list[Cost]], float], form: str, goal: str = f"at most {GOAL_RATIO}"
    ) -> None:
        shorts, longs = [of(each.short) for each in rounds], [of(each.long) for each in rounds]
        ratios = [one / other for one, other in zip(longs, shorts, strict=True)]
        cells = f"{statistics.median(shorts):{form}} | {statistics.median(longs):{form}}"
        lines.append(f"| {what} | {cells} | {spread(ratios, '.2f')} | {goal} |")

    line("p50, ms", lambda costs: statistics.median(cost.ms for cost in costs), ".3f")
    line("server's CPU, µs", lambda costs: statistics.mean(cost.cpu_us for cost in costs), ".0f", goal="")
    line(
        "into the write-ahead log, bytes",
        lambda costs: statistics.mean(cost.wal_bytes for cost in costs),
        ",.0f",
    )
    line(
        "written as the kernel counts, bytes",
        lambda costs: statistics.mean(cost.written_bytes for cost in costs),
        ",.0f",
    )
    return "\n".join(lines)


def full_table(many: Reading, singly: Reading, elements: int) -> str:
    def line(what: str, of: Callable[[Reading], str], goal: str = "") -> str:
        return f"| {what} | {of(many)} | {of(singly)} | {goal} |"

    def rate(reading: Reading) -> str:
        return spread([reading.answer_bytes / took / 1e6 for took in reading.seconds], ".0f")

    def growth(grown_mb: float, reading: Reading) -> str:
        megabytes = reading.answer_bytes / 1e6
        return f"{grown_mb:.1f} MB, {grown_mb / megabytes:.2f} of the answer"

    return "\n".join(
        (
            f"| all of {elements:,} elements, {len(many.seconds)} times"
            f" | appended by {FILL_CONNECTIONS} connections | by one | goal |",
            "|---|---:|---:|---:|",
            line("answer, MB", lambda reading: f"{reading.answer_bytes / 1e6:.1f}"),
            line("MB/s", rate, f"{GOAL_MB_PER_SECOND}"),
            line(
                "growth of RSS at its peak, first time",
                lambda reading: growth(reading.first_grown_mb, reading),
                f"below {GOAL_GROWTH} of the answer",
            ),
            line(
                "the same over all times",
                lambda reading: growth(reading.grown_mb, reading),
                f"below {GOAL_GROWTH} of the answer",
            ),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benches.append_log", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="shorter logs, fewer rounds")
    quick = parser.parse_args().quick
    logged, full, rounds, pairs, times = (
        (QUICK_LOGGED, QUICK_LOGGED // 5, 2, 200, 3) if quick else (LOGGED, FULL, 5, 1_000, 20)
    )
    gc.disable()  # a pause would be taken for the server's
    with servers.fresh_folder() as folder:
        with servers.serving(folder, SERVER_CORE) as server:
            filled = fill(server, "fill-log", logged, FILL_CONNECTIONS)
            fill(server, "fill-full", full, FILL_CONNECTIONS)
            fill(server, "fill-singly", full, connections=1)
            sizes = {name: check_full(server.url, name, full) for name in ("full", "singly")}
        os.sched_setaffinity(0, {LOAD_CORE})
        readings = {}
        for name, answer_bytes in sizes.items():
            # Started anew, for the memory that was taken before is not to hide what reading takes.
            with servers.serving(folder, SERVER_CORE) as server:
                readings[name] = read_full(server, name, answer_bytes, times)
        with servers.serving(folder, SERVER_CORE) as server, closing(Appends(server, folder)) as appends:
            found = [appends.round(pairs) for _ in range(rounds)]
    head = f"{machine()}; {rounds} rounds of {pairs:,} appends to each."
    reading = full_table(readings["full"], readings["singly"], full)
    print(head, how_filled(filled), append_table(found, logged), reading, sep="\n\n")


if __name__ == "__main__":
    main()
