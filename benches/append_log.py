"""What an append to a long log costs beside one to a short log.

    python -m benches.append_log [--quick]

One client, and one request under way. Server and client each have a core. Prints Markdown.
"""

import argparse
import gc
import os
import socket
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from urllib.parse import urlsplit

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
from benches.workloads import LOGGED, Author, append_body, element_data
from pysync.cli.load_generator import cpu_s, read_head

GOAL_RATIO = 1.3
# A short log has 5 elements when it is first measured and 15 at last, so about 10; then comes the next one.
SHORT_BEGINS = 5
SHORT_GROWS = 10


@dataclass(frozen=True, slots=True)
class Cost:
    """One append: the time until its answer was read, the server's CPU time, and what the server wrote."""

    ms: float
    cpu_us: float
    written_bytes: int


@dataclass(frozen=True, slots=True)
class Round:
    """Appends to short logs and to the long one, in turns."""

    short: list[Cost]
    long: list[Cost]


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


class Appends:
    """One client that appends to the logs of one server, and what each append costs."""

    def __init__(self, server: Running) -> None:
        self._server = server
        self._author = Author(server.url)
        self._caller = Caller(server.url)
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
        written, cpu = self._server.written_bytes(), cpu_s(self._server.pid)
        took = self._caller.call(request)
        return Cost(
            took * 1e3,
            (cpu_s(self._server.pid) - cpu) * 1e6,
            self._server.written_bytes() - written,
        )


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
        "written as the kernel counts, bytes",
        lambda costs: statistics.mean(cost.written_bytes for cost in costs),
        ",.0f",
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benches.append_log", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="shorter logs, fewer rounds")
    quick = parser.parse_args().quick
    logged, rounds, pairs = (QUICK_LOGGED, 2, 100) if quick else (LOGGED, 5, 1_000)
    gc.disable()  # a pause would be taken for the server's
    with servers.fresh_folder() as folder:
        with servers.serving(folder, SERVER_CORE) as server:
            filled = fill(server, "fill-log", logged, FILL_CONNECTIONS)
        os.sched_setaffinity(0, {LOAD_CORE})
        with servers.serving(folder, SERVER_CORE) as server, closing(Appends(server)) as appends:
            found = [appends.round(pairs) for _ in range(rounds)]
    head = f"{machine()}; {rounds} rounds of {pairs:,} appends to each."
    print(head, how_filled(filled), append_table(found, logged), sep="\n\n")


if __name__ == "__main__":
    main()
