"""How many more signed pulls and public pushes two workers answer than one, on two processors with the load.

    python -m benches.workers [--quick] [--connections N] [--rounds N] [--seconds S]

Two services run, one with a single worker and one with two, and are loaded in turns. Nothing is pinned: the
kernel gives each process what there is. What the generator uses, the second worker lacks; so it is as light
as can be. It has plain sockets and one request under way on each, takes all answers that have come with one
`epoll_wait`, and spends one `recv` and one `send` on each. It sleeps while there is none, and when one comes
it waits for a processor to be free (SCHED_BATCH), as somebody on another machine would not push a worker off
its own. Its share of the CPU is told.
"""

import argparse
import asyncio
import gc
import os
import select
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from benches import servers
from benches.compare import machine, spread
from benches.servers import Running
from benches.workloads import DOCUMENT_BYTES, WORKLOADS, Author
from pysync.cli.load_generator import cpu_s, drive, read_head

GOALS: Final[dict[str, float | None]] = {"signed-pull": 1.6, "push": None}
"""How many times as much two workers must answer; None: shown for information."""
CONNECTIONS = 32
MAX_PER_SECOND = 30_000
"""Requests are made for that many a second. A server that answers more of them ends its run earlier."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. `busy` is how many processors were at work, `generator` the load's share of that."""

    per_second: float
    server_cpu_us: float
    generator_cpu_us: float
    busy: float

    @property
    def generator(self) -> float:
        return self.generator_cpu_us / (self.generator_cpu_us + self.server_cpu_us)


Found = dict[str, dict[int, list[Measured]]]
"""The runs of each workload, by the number of workers."""


class Connection:
    """A socket with one request under way, and what has come of its answer."""

    __slots__ = ("come", "sock")

    def __init__(self, host: str, port: int) -> None:
        self.sock = socket.create_connection((host, port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.come = b""

    def receive(self) -> bytes | None:
        """The head of the answer, once all of it has come. Raises ConnectionError where nothing will, and
        ValueError for an answer of another length than it says."""
        come = self.sock.recv(65_536)
        if not come:
            raise ConnectionError("a connection was closed")
        if self.come:
            come = self.come + come
        end = come.find(b"\r\n\r\n")
        if end >= 0:
            missing = end + 4 + read_head(come[: end + 2])[1] - len(come)
            if missing < 0:
                raise ValueError("an answer is longer than it says")
            if missing == 0:
                self.come = b""
                return come[:end]
        self.come = come
        return None


def load(url: str, requests: Iterable[bytes], connections: int, seconds: float) -> tuple[int, float]:
    """Send requests for so long, or until they run out; how many were answered, and in what time.
    Raises RuntimeError where an answer was refused, ConnectionError where a connection breaks."""
    address = urlsplit(url)
    waiting = iter(requests)
    answers, under_way = 0, connections
    wrong: Counter[bytes] = Counter()
    with ExitStack() as opened, select.epoll() as events:
        by_fd: dict[int, Connection] = {}
        for _ in range(connections):
            connection = Connection(str(address.hostname), address.port or 80)
            opened.enter_context(connection.sock)
            by_fd[connection.sock.fileno()] = connection
            events.register(connection.sock.fileno(), select.EPOLLIN)
        started = now = time.perf_counter()
        ends = started + seconds
        for connection in by_fd.values():
            connection.sock.send(next(waiting))
        while under_way:
            for fd, _ in events.poll():
                connection = by_fd[fd]
                head = connection.receive()
                if head is None:
                    continue
                if head.startswith(b"HTTP/1.1 200 "):
                    answers += 1
                else:
                    wrong[head[9:12]] += 1
                request = next(waiting, None) if now < ends else None
                if request is None:
                    under_way -= 1
                else:
                    connection.sock.send(request)
            now = time.perf_counter()
    if wrong:
        raise RuntimeError(f"refused: {dict(wrong)}")
    return answers, now - started


def measure(server: Running, name: str, connections: int, seconds: float) -> Measured:
    """One run of a workload against a service. Raises RuntimeError where an answer was wrong."""
    author = Author(server.url)
    workload = WORKLOADS[name]
    prepared, _ = asyncio.run(
        drive(server.url, workload.prepare(author), 200, connections=connections, seconds=60)
    )
    if prepared.errors:
        raise RuntimeError(f"the documents cannot be made: {dict(prepared.errors)}")
    requests = list(workload.requests(author, int(seconds * MAX_PER_SECOND)))
    processes = [server.pid, *workers_of(server.pid)]
    server_before, own_before = sum(map(cpu_s, processes)), time.process_time()
    answers, took = load(server.url, requests, connections, seconds)
    own = time.process_time() - own_before
    theirs = sum(map(cpu_s, processes)) - server_before
    return Measured(answers / took, theirs / answers * 1e6, own / answers * 1e6, (own + theirs) / took)


def workers_of(pid: int) -> list[int]:
    """The processes that a service has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextmanager
def services() -> Iterator[dict[int, Running]]:
    """A service with one worker and one with two, each on a folder of its own."""
    with ExitStack() as stack:
        yield {
            count: stack.enter_context(
                servers.serving(stack.enter_context(servers.fresh_folder()), workers=count)
            )
            for count in (1, 2)
        }


def compare(rounds: int, seconds: float, connections: int) -> Found:
    """So many runs of each workload against each service, in turns; which comes first alternates."""
    found: Found = {name: {1: [], 2: []} for name in GOALS}
    with services() as running:
        for number in range(rounds):
            for name, runs in found.items():
                for count in (1, 2) if number % 2 == 0 else (2, 1):
                    runs[count].append(measure(running[count], name, connections, seconds))
    return found


def table(found: Found) -> str:
    """The Markdown table of all rounds: medians, and how much more two workers answered in each."""
    lines = [
        "| workload | workers | per s | times one | server CPU µs | generator CPU µs | generator's share "
        "| processors busy |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, by_count in found.items():
        for count, runs in by_count.items():
            rate, server, generator, share, busy = (
                statistics.median(getattr(run, column) for run in runs)
                for column in ("per_second", "server_cpu_us", "generator_cpu_us", "generator", "busy")
            )
            times = [run.per_second / one.per_second for run, one in zip(runs, by_count[1], strict=True)]
            lines.append(
                f"| {name} | {count} | {rate:,.0f} | {'' if count == 1 else spread(times, '.2f')} "
                f"| {server:.1f} | {generator:.1f} | {share:.0%} | {busy:.2f} |"
            )
    goals = (f"{goal} times as many {name}s" for name, goal in GOALS.items() if goal is not None)
    return "\n".join([*lines, "", f"Goal: two workers answer at least {', '.join(goals)} as one."])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benches.workers", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one short round: to see that it works")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--connections", type=int, default=CONNECTIONS)
    options = parser.parse_args()
    rounds, seconds = (1, 0.2) if options.quick else (options.rounds, options.seconds)
    # What it starts is scheduled as usual.
    os.sched_setscheduler(0, os.SCHED_BATCH | os.SCHED_RESET_ON_FORK, os.sched_param(0))
    gc.disable()  # nothing here makes cycles, and a pause would be taken for the server's
    found = compare(rounds, seconds, options.connections)
    print(f"{machine()}; {rounds} rounds of {seconds:g} s, {options.connections} connections; documents")
    print(f"of {DOCUMENT_BYTES:,} bytes.\n\n{table(found)}")


if __name__ == "__main__":
    main()
