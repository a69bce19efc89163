"""What a continuous backup takes from pushes, and how old its newest snapshot is.

    python -m benches.follower [--quick]

Each round has four runs in turns, with and without a follower: as many pushes as the server answers, and
2,000 a second, sent when they are due. The server and the load generator have a core each. Neither is idle:
the generator of the second kind polls. So the follower, which may use both, takes its processor time from
them, and the steadiest figure is that time per push, beside the server's. Prints Markdown.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benches.backup import fill
from benches.compare import LOAD_CORE, SERVER_CORE, machine, spread
from benches.half_load import LIMIT_S
from pysync.backup.follow import FollowerSettings, FollowStatus
from pysync.config import StoreConfig

GOAL_LAG_S = 6.0
GOAL_SHARE = 0.05
GOAL_CPU_SHARE = 0.1
RATE = 2_000
MAX_PER_SECOND = 40_000
EVERY_MS = 5_000
SAMPLE_S = 0.02
COLLECTION = {
    "name": "notes",
    "storagePath": "notes/{id}",
    "readRoles": ["public"],
    "writeRoles": ["public"],
    "maxBodyBytes": 65_536,
}


class Follower:
    """A follower in a process of its own, and the lag of its newest moment, sampled all the time."""

    def __init__(self, folder: Path, root: Path, every_ms: int) -> None:
        self.rounds = 0
        self._lags_s: list[tuple[float, float]] = []
        self._moment_s = 0.0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pysync.backup.follow"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None
        settings = FollowerSettings(StoreConfig(url=f"file:{folder}"), f"file:{root}", None, every_ms)
        self._process.stdin.write(settings.encode() + b"\n")
        self._process.stdin.flush()
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._read, self._sample)]
        for thread in self._threads:
            thread.start()
        while not self._moment_s:
            time.sleep(0.05)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            status = FollowStatus(*json.loads(line))
            if status.error:
                raise RuntimeError(status.error)
            self.rounds += bool(status.objects)
            self._moment_s = status.moment_ms / 1000

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            if self._moment_s:
                now_s = time.time()
                self._lags_s.append((now_s, now_s - self._moment_s))

    def lags_s(self, start_s: float, end_s: float) -> list[float]:
        """The lags between two times of the wall clock."""
        return [lag_s for at_s, lag_s in self._lags_s if start_s <= at_s <= end_s]

    def cpu_s(self) -> float:
        """The processor time that it has used."""
        return cpu_s(self._process.pid)

    def close(self) -> None:
        self._ended.set()
        self._process.communicate()
        for thread in self._threads:
            thread.join()


class Load(NamedTuple):
    """What the load generator says: pushes answered, those a second, and quantiles of their times. `idle_s`
    is the time that it waits for late answers at the end."""

    answers: int
    per_second: float
    p50_ms: float
    p99_ms: float
    idle_s: float


class Run(NamedTuple):
    """A run: its load, the processor time per push of the server and of the follower, and the lags while
    pushes were sent, with the snapshots made in a second."""

    load: Load
    server_us: float
    follower_us: float
    lags_s: list[float]
    rounds: float


def closed_loop(url: str, seconds: float) -> Load:
    """Push documents as fast as the server answers."""
    command = [sys.executable, "-m", "pysync", "bench", "notes", "--action", "push", "--seconds"]
    found = generate(
        [*command, str(seconds), "--count", str(int(seconds * MAX_PER_SECOND)), "--json", "--server", url]
    )
    return Load(found["answers"], found["per_second"], found["p50_ms"], found["p99_ms"], 0.0)


def open_loop(url: str, seconds: float) -> Load:
    """Push documents when they are due."""
    command = [sys.executable, "-m", "benches.half_load", "--url", url, "--workload", "push"]
    found = generate([*command, "--rate", str(RATE), "--seconds", str(seconds)])
    answers = round(RATE * seconds) - found["failed"]
    return Load(answers, answers / seconds, found["p50_ms"], found["p99_ms"], LIMIT_S)


def generate(command: list[str]) -> dict[str, Any]:
    pinned = ["taskset", "-c", str(LOAD_CORE), *command]
    ran = subprocess.run(pinned, capture_output=True, text=True, check=False)
    if not ran.stdout:  # it also fails, after its report, where a push was not answered in time
        raise RuntimeError(ran.stderr)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, int]]:
    """A server of the store in `folder`: its URL and its process."""
    config = folder.parent / "bench.json"
    members = {"version": 1, "store": f"file:{folder}", "collections": [COLLECTION], "scrub": False}
    config.write_text(json.dumps({**members, "configEndpoint": {"auth": "public"}}))
    serve = ["taskset", "-c", str(SERVER_CORE), sys.executable, "-m", "pysync", "serve"]
    with subprocess.Popen(
        [*serve, "--config", str(config), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split(" at ")[1].strip(), server.pid
        finally:
            server.terminate()
            server.stdout.read()


def push(folder: Path, follower: Follower | None, load: Callable[[str], Load], seconds: float) -> Run:
    with serving(folder) as (url, pid):
        before = cpu_s(pid), 0.0 if follower is None else follower.cpu_s()
        made = 0 if follower is None else follower.rounds
        sent = load(url)
        end_s = time.time() - sent.idle_s
        server_us = (cpu_s(pid) - before[0]) / sent.answers * 1e6
        if follower is None:
            return Run(sent, server_us, 0.0, [], 0.0)
        follower_us = (follower.cpu_s() - before[1]) / sent.answers * 1e6
        lags_s = follower.lags_s(end_s - seconds, end_s)
        return Run(sent, server_us, follower_us, lags_s, (follower.rounds - made) / seconds)


def cpu_s(pid: int) -> float:
    """The processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(
    root: Path, rounds: int, load: Callable[[str], Load], seconds: float
) -> tuple[list[Run], list[Run]]:
    """The runs without and with a follower, in turns."""
    found: tuple[list[Run], list[Run]] = ([], [])
    for n in range(rounds):
        for is_followed in (False, True) if n % 2 else (True, False):
            with TemporaryDirectory(dir=root) as place:
                folder = Path(place) / "data"
                asyncio.run(fill(folder, 500, 0))
                if not is_followed:
                    found[0].append(push(folder, None, load, seconds))
                    continue
                with closing(Follower(folder, Path(place) / "backup", EVERY_MS)) as follower:
                    found[1].append(push(folder, follower, load, seconds))
    return found


def report(title: str, alone: Sequence[Run], followed: Sequence[Run]) -> None:
    print(f"\n**{title}**\n")
    print("| | pushes/s | p50 | p99 | server CPU per push |\n|---|---:|---:|---:|---:|")
    for name, runs in (("alone", alone), ("with a follower", followed)):
        cells = [
            spread([run.load.per_second for run in runs], ",.0f"),
            f"{spread([run.load.p50_ms for run in runs], '.1f')} ms",
            f"{spread([run.load.p99_ms for run in runs], '.1f')} ms",
            f"{spread([run.server_us for run in runs], '.0f')} us",
        ]
        print(f"| {name} | {' | '.join(cells)} |")
    rates = [statistics.median(run.load.per_second for run in runs) for runs in (alone, followed)]
    print(f"\nShare of pushes lost: {1 - rates[1] / rates[0]:.1%} (goal: {GOAL_SHARE:.0%}).")
    shares = [run.follower_us / run.server_us for run in followed]
    used = spread([run.follower_us for run in followed], ".1f")
    print(f"Follower: {used} us of CPU per push, {spread(shares, '.0%')} of the server's", end=" ")
    print(
        f"(goal: {GOAL_CPU_SHARE:.0%}); {spread([run.rounds for run in followed], '.1f')} snapshots a second."
    )
    lags_s = [lag_s for run in followed for lag_s in run.lags_s]
    low, high = percentile(lags_s, 0.5), percentile(lags_s, 0.99)
    print(f"Lag: p50 {low:.2f} s, p99 {high:.2f} s, at most {max(lags_s):.2f} s (goal: {GOAL_LAG_S} s).")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("closed", "open"))
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    seconds = 0.5 if options.quick else 15.0
    rounds = options.rounds or (1 if options.quick else 5)
    print(machine())
    with TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as place:
        if options.only != "closed" and not options.quick:
            title = f"{RATE:,} pushes a second, sent when they are due"
            report(title, *measure(Path(place), rounds, lambda url: open_loop(url, seconds), seconds))
        if options.only != "open":
            title = "As many pushes as the server answers"
            report(title, *measure(Path(place), rounds, lambda url: closed_loop(url, seconds), seconds))


if __name__ == "__main__":
    main()
