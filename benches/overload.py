"""A server that more is asked of than it can answer: how much of it good clients still get.

    python -m benches.overload [--rows NAME...] [--seconds 60] [--checkout DIR] [--json FILE]

The server is held to a fifth of a core (by a control group, or else SIGSTOP and SIGCONT, 20 of 100 ms), so
that one generator on another core can ask for ten times what it answers. Every row has a server of its own.
S, the saturation, is the best second of a closed loop in the same run. Requests then arrive evenly. An
arrival takes an idle connection of its pool, the one that was idle longest, or a new one while there are
fewer than the pool may have. One that finds none for 2 s is dropped and not counted. The 2 s of an answer
count from the moment when the request is written; then its client hangs up. Goodput is what is answered 200
in time, as a share of S in rows of valid load, and else of what good clients asked (0.5 S). Prints Markdown.
"""

import argparse
import dataclasses
import gc
import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from benches import attacks, servers
from benches.attacks import ATTACKERS, GOOD, Asked, Identity, holders, request
from benches.compare import machine
from benches.holders import Holders
from benches.open_loop import FOREVER, Actor, Address, Poller, Wire
from benches.servers import CHECKOUT, Running

OPEN: Final = {"readRoles": ["public"], "writeRoles": ["public"]}
OWN: Final = {"readRoles": ["self"], "writeRoles": ["self"]}
COLLECTIONS: Final = (
    {"name": "notes", "storagePath": "notes/{id}", **OPEN, "maxBodyBytes": 65_536},
    {"name": "private", "storagePath": "users/{identity}/{id}", **OWN, "maxBodyBytes": 65_536},
    {"name": "big", "storagePath": "big/{id}", **OPEN, "maxBodyBytes": 5_000_000},
)
PATIENCE_S: Final = 2.0
SATURATE_S: Final = 6.0
SATURATE_CONNECTIONS: Final = 64
ATTACKER_CONNECTIONS: Final = 1_024
AFTER_S: Final = 6.0
"""How long good clients go on after the load, at half of S."""
CONTROL_GROUPS: Final = (
    (Path("/sys/fs/cgroup"), "cpu.max"),
    (Path("/sys/fs/cgroup/cpu"), "cpu.cfs_quota_us"),
)
"""Where a group of processes may be made, in version 2 and 1, and what limits its share of a core."""
HOLD: Final = """
import os, signal, sys, time
pid, share = int(sys.argv[1]), float(sys.argv[2])
try:
    while True:
        os.kill(pid, signal.SIGCONT); time.sleep(0.1 * share)
        os.kill(pid, signal.SIGSTOP); time.sleep(0.1 * (1 - share))
except (ProcessLookupError, KeyboardInterrupt):
    pass
"""


@dataclass(frozen=True, slots=True)
class Row:
    """What is asked: `times` S of valid requests over a pool of `connections`, or an attack of `attacks.py`
    with so many connections (or times S) beside good clients. `floor` is the least share. If it is `proxied`,
    all clients come through nginx, which has time of its own."""

    name: str
    floor: float
    times: float = 0.5
    connections: int = 2_000
    attack: str = ""
    amount: float = 0.0
    proxied: bool = False


ROWS: Final = (
    *(
        Row(f"valid-{times}-{pool}", floor, times, pool)
        for pool in (256, 2_000)
        for times, floor in ((2, 0.85), (5, 0.75), (10, 0.65))
    ),
    Row("junk-5", 0.35, attack="junk", amount=5),
    Row("junk-5-nginx", 0.8, attack="junk", amount=5, proxied=True),
    Row("forged-5", 0.25, attack="forged", amount=5),
    Row("health-5", 0.35, attack="health", amount=5),
    Row("readers-500", 0.85, attack="readers", amount=500),
    Row("bodies-60", 0.85, attack="bodies", amount=60),
    Row("batches-10", 0.85, attack="batches", amount=10),
    Row("slow-2000", 0.85, attack="slow", amount=2_000),
    Row("idle-11000", 0.85, attack="idle", amount=11_000),
)


@dataclass(slots=True)
class Second:
    """What became of the requests that were written in a second, or arrived in it."""

    asked: int = 0
    good: int = 0
    answers: int = 0


@dataclass(slots=True)
class Pool:
    """Clients that share connections. `rate` requests arrive each second between `start` and `end`; with an
    infinite rate, as many as there are connections. `request` makes one."""

    poller: Poller
    server: Address
    sources: Sequence[str]
    request: Callable[[], bytes]
    rate: float
    most: int
    start: float
    end: float
    seconds: list[Second] = field(default_factory=list)
    tally: Counter[str] = field(default_factory=Counter)
    took_s: list[float] = field(default_factory=list)
    lag_s: float = 0.0
    _arrived: int = 0
    _open: int = 0
    _waiting: deque[float] = field(default_factory=deque)
    _idle: deque[Wire] = field(default_factory=deque)
    _written: deque[tuple[float, int, Wire]] = field(default_factory=deque)
    _since: dict[Wire, tuple[float, int]] = field(default_factory=dict)
    _count: int = 0

    def act(self, now: float) -> float:
        """See `Actor.act`."""
        if now < self.start:
            return self.start
        while self._written and now > self._written[0][0] + PATIENCE_S:
            since, count, wire = self._written.popleft()
            if wire.is_open and self._since.get(wire) == (since, count):
                self.tally["none"] += 1
                del self._since[wire]
                wire.close()
                self._open -= 1
        if now < self.end:
            if math.isinf(self.rate):
                while len(self._waiting) + len(self._since) < self.most:
                    self._waiting.append(now)
            else:
                due = int((now - self.start) * self.rate)
                for n in range(self._arrived, due):
                    self._waiting.append(self.start + n / self.rate)
                    self._at(self.start + n / self.rate).asked += 1
                self._arrived = max(due, self._arrived)
        while self._waiting and self._waiting[0] < now - PATIENCE_S:
            self._waiting.popleft()
            self.tally["dropped"] += 1
        while self._waiting and self._send():
            self._waiting.popleft()
        return now + 0.002 if now < self.end else FOREVER

    def answered(self, wire: Wire, status: int, now: float) -> None:
        """See `Owner.answered`."""
        found = self._since.pop(wire, None)
        if found is None:
            return
        since, _ = found
        self.tally[str(status)] += 1
        self._at(now).answers += 1
        if status == 200:
            self._at(now).good += 1
            self.took_s.append(now - since)
        self._idle.append(wire)
        if self._waiting and now < self.end and self._send():
            self._waiting.popleft()

    def lost(self, wire: Wire) -> None:
        """See `Owner.lost`."""
        self._open -= 1
        if self._since.pop(wire, None) is not None:
            self.tally["lost"] += 1

    def _at(self, now: float) -> Second:
        number = int(now - self.start)
        while len(self.seconds) <= number:
            self.seconds.append(Second())
        return self.seconds[number]

    def _send(self) -> bool:
        wire = None
        while self._idle and wire is None:
            idle = self._idle.popleft()
            wire = idle if idle.is_open else None
        self._count += 1
        if wire is None:
            if self._open >= self.most:
                return False
            try:
                wire = Wire(self.poller, self, self.server, self.sources[self._count % len(self.sources)])
            except OSError:
                self.tally["not opened"] += 1
                return False
            self._open += 1
        now = time.perf_counter()
        self._since[wire] = now, self._count
        self._written.append((now, self._count, wire))
        wire.send(self.request())
        return True


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a row showed. `share` is the goodput, `least` that of its worst second, `after` what good clients
    got from two seconds after the load on. `health_ms` is the slowest `/health` of the operators."""

    row: str
    saturation: int
    share: float
    least: float
    silent_seconds: int
    after: float
    p50_ms: float
    p99_ms: float
    health_ms: float
    peak_mb: float
    tally: dict[str, int]
    attackers: dict[str, int]
    by_second: list[int]


def measure(row: Row, seconds: float, checkout: Path = CHECKOUT, share: float = 0.2) -> Outcome:
    """Measure a row on a server of its own."""
    cores = sorted(os.sched_getaffinity(0))
    with servers.fresh_folder() as folder:
        config, admin = _configuration(folder.parent, checkout, row.proxied)
        with ExitStack() as stack:
            serving = servers.serving(folder, cores[0], config=config, checkout=checkout)
            server = stack.enter_context(serving)
            proxy = stack.enter_context(servers.nginx(server, cores[-1])) if row.proxied else None
            address = _address(proxy or server.url)
            who = [Identity() for _ in GOOD]
            with socket.create_connection(address) as sock:
                for push in attacks.stored(who, address):
                    sock.sendall(push)
                    if (answer := sock.recv(65_536))[9:12] != b"200":
                        raise RuntimeError(f"{push[:60]!r} is answered {answer!r}")
            with _held(server.pid, share), servers.pinned(cores[-1]):
                return _run(row, who, address, admin, seconds, server)


def _run(
    row: Row,
    who: Sequence[Identity],
    address: Address,
    admin: Address | None,
    seconds: float,
    server: Running,
) -> Outcome:
    number = 0

    def pull() -> bytes:
        nonlocal number
        number += 1
        return who[number % len(who)].pull(address, time.time())

    def pool(rate: float, most: int, start: float, last_s: float) -> tuple[Pool, float]:
        return Pool(poller, address, GOOD, pull, rate, most, start, start + last_s), start + last_s

    poller = Poller()
    first, ends = pool(math.inf, SATURATE_CONNECTIONS, time.perf_counter() + 0.1, SATURATE_S)
    poller.run([first], ends)
    saturation = max(second.good for second in first.seconds[1 : int(SATURATE_S)])
    server.forget_peak()
    poller = Poller()
    start = time.perf_counter() + 0.2
    rate = row.times * saturation
    good, ends = pool(rate, row.connections, start, seconds)
    actors: list[Actor] = [good]
    beside: Pool | Holders | None = None
    if row.attack in ("junk", "forged", "health"):
        made = getattr(Asked(address), row.attack)
        attack_rate = row.amount * saturation
        beside = Pool(poller, address, ATTACKERS, made, attack_rate, ATTACKER_CONNECTIONS, start, ends)
    elif row.attack:
        beside = holders(row.attack, int(row.amount), address, poller, start, seconds)
    if beside is not None:
        actors.append(beside)
    health = None
    if admin is not None:
        probe = request("GET", "/health", admin)
        health = Pool(poller, admin, ("127.0.0.1",), lambda: probe, 10.0, 64, start, ends)
    if health is not None:
        actors.append(health)
    poller.run(actors, ends)
    peak_mb = server.memory().peak_mb
    poller = Poller()
    again, ends = pool(saturation / 2, row.connections, time.perf_counter() + 2.0, AFTER_S)
    poller.run([again], ends)
    reference = saturation if not row.attack else rate
    by_second = [second.good for second in good.seconds[: int(seconds)]]
    took = sorted(good.took_s)
    return Outcome(
        row=row.name,
        saturation=saturation,
        share=sum(by_second) / seconds / reference,
        least=min(by_second) / reference,
        silent_seconds=sum(second.answers == 0 for second in good.seconds[: int(seconds)]),
        after=sum(second.good for second in again.seconds) / max(1, sum(s.asked for s in again.seconds)),
        p50_ms=_quantile(took, 0.5) * 1e3,
        p99_ms=_quantile(took, 0.99) * 1e3,
        health_ms=max(health.took_s, default=math.inf) * 1e3 if health else math.nan,
        peak_mb=peak_mb,
        tally=dict(good.tally),
        attackers=dict(beside.tally) if beside is not None else {},
        by_second=by_second,
    )


@contextmanager
def _held(pid: int, share: float) -> Iterator[None]:
    """Let a process run for a share of each 100 ms."""
    for folder, limit in CONTROL_GROUPS:
        group = folder / f"pysync-bench-{os.getpid()}"
        if not (folder / "cgroup.procs").exists():
            continue
        with suppress(OSError):
            group.mkdir()
            try:
                (group / limit).write_text(f"{int(share * 100_000)}")  # of the default period of 100 ms
                (group / "cgroup.procs").write_text(str(pid))
                yield
                return
            finally:
                (folder / "cgroup.procs").write_text(str(pid))
                group.rmdir()
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(pid), str(share)])
    try:
        yield
    finally:
        holder.kill()
        holder.wait()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def _configuration(folder: Path, checkout: Path, proxied: bool) -> tuple[Path, Address | None]:
    """Write the configuration; the address of the operators' listener if that version has one."""
    server: dict[str, Any] = {"trustedProxyHops": 1} if proxied else {}
    admin = None
    if (checkout / "pysync/config/pysync.schema.json").exists():  # version 0.1.0 has neither
        admin = ("127.0.0.1", servers.free_port())
        server["admin"] = {"host": admin[0], "port": admin[1]}
    path = folder / "overload.json"
    path.write_text(json.dumps({"version": 1, "collections": COLLECTIONS, "server": server}))
    return path, admin


def _address(base: str) -> Address:
    url = urlsplit(base)
    return str(url.hostname), int(url.port or 80)


def table(outcomes: Sequence[Outcome], rows: Sequence[Row] = ROWS) -> str:
    """The Markdown table of rows that were measured, beside their floors."""
    floors = {row.name: row.floor for row in rows}
    lines = [
        "| row | S | goodput (floor) | worst second | seconds without an answer | 2 s after "
        "| p50 / p99 of 200s, ms | operators' /health, ms | peak RSS, MB | good | others |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    for found in outcomes:
        tallies = (
            " ".join(f"{k}: {v}" for k, v in sorted(t.items())) for t in (found.tally, found.attackers)
        )
        lines.append(
            f"| {found.row} | {found.saturation} | {found.share:.2f} ({floors.get(found.row, 0):.2f}) "
            f"| {found.least:.2f} | {found.silent_seconds} | {found.after:.2f} "
            f"| {found.p50_ms:.0f} / {found.p99_ms:.0f} | {found.health_ms:.0f} | {found.peak_mb:.0f} "
            f"| {' | '.join(tallies)} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the rows that are wanted, and print them."""
    parser = argparse.ArgumentParser(
        prog="python -m benches.overload", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rows", nargs="+", choices=[row.name for row in ROWS], metavar="NAME")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--share", type=float, default=0.2, help="share of a core that the server has")
    parser.add_argument("--checkout", type=Path, default=CHECKOUT)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="one short row, to see that it works")
    wanted = parser.parse_args(arguments)
    if wanted.quick:
        wanted.rows, wanted.seconds = ["junk-5"], 1.0
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gc.disable()
    rows = [row for row in ROWS if wanted.rows is None or row.name in wanted.rows]
    found = []
    for row in rows:
        found.append(measure(row, wanted.seconds, wanted.checkout.resolve(), wanted.share))
        print(found[-1], file=sys.stderr, flush=True)
    print(machine())
    print()
    print(table(found))
    if wanted.json is not None:
        wanted.json.write_text(json.dumps([dataclasses.asdict(each) for each in found], indent=1))


if __name__ == "__main__":
    main()
