"""Where the microseconds of a request go: by stage, and by the library that is at work.

    python -m benches.request_profile [--quick] [--workload NAME]... [--seconds S] [--functions N]

The server stays on one core, the load generator on another, with 32 connections. *By stage* is the CPU time
of the event loop's thread, shared out by samples of what it was at (`sampler.py`), and that of the other
threads. *By library* is what Linux's `perf` sees of the whole process, in another run, and of a bare aiohttp
server; it is left out where there is no `perf`. The release build is measured, nothing in it is changed.
`--functions` lists the functions that most samples fell on. Prints Markdown.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from benches import servers
from benches.compare import LOAD_CORE, SERVER_CORE, machine
from benches.sampler import Samples
from benches.servers import Running
from benches.workloads import WORKLOADS, Author
from pysync.cli.load_generator import CONNECTIONS, cpu_s, drive

BARE: Final = ("bare-get", "bare-post")
DEFAULT: Final = ("pull", "signed-pull", "push", "signed-push", "batch-100", "push-512k")
WARM_S: Final = 0.5
WRITTEN_S: Final = 10.0
PERF_HZ: Final = 1_999
MAX_PER_SECOND: Final = 40_000
"""Requests are made for that many a second of CPU."""

STAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "event loop": ("pysync/server/process/serve",),
    "HTTP: read, parse, write": ("pysync/server/http/connection", "pysync/server/http/streaming", "aiohttp/"),
    "admit, route, count": (
        "pysync/server/http/load", "pysync/server/http/middleware", "pysync/server/http/router",
        "pysync/server/process/metrics",
    ),
    "body: read, decode, hash": ("pysync/server/http/request_body",),
    "authenticate, authorise": ("pysync/server/authorization", "pysync/auth/", "pysync/coordinator/"),
    "handle, make the response": ("pysync/server/",),
    "engine": ("pysync/engine/", "pysync/cache", "pysync/clock", "pysync/concurrency"),
    "store": ("pysync/store/", "pysync/sqlite/"),
}  # fmt: skip
"""The modules of each stage: a sample is of the first stage that one of its prefixes fits."""
OTHER: Final = "other"

LIBRARIES: Final[Mapping[str, str]] = {
    "kernel": r"^\[",
    "Python": r"^(lib)?python\d",
    "Rust core": r"^_core\.",
    "uvloop": r"^loop\.",
    "aiohttp": r"^(_http_|_websocket|mask\.|reader_c\.)",
    "SQLite": r"sqlite",
    "C library": r"^(libc|libm|libpthread|ld-)",
}
"""The shared objects of each library, as a pattern."""


@dataclass(frozen=True, slots=True)
class Profile:
    """CPU microseconds of a request: in all, in threads beside the loop's, by stage, and by function."""

    all_us: float
    threads_us: float
    stages_us: dict[str, float]
    functions_us: dict[str, float]


def profile(workload: str, seconds: float) -> Profile:
    """Profile a workload, on servers of its own."""
    with TemporaryDirectory() as folder:
        samples, answers = sample(workload, seconds, Path(folder) / "samples.json")
    scale = samples.main_s / answers / max(1, sum(samples.functions.values())) * 1e6
    functions = {name: count * scale for name, count in samples.functions.items()}
    stages = dict.fromkeys([*STAGES, OTHER], 0.0)
    for name, us in functions.items():
        stages[stage_of(name)] += us
    return Profile(
        all_us=samples.all_s / answers * 1e6,
        threads_us=(samples.all_s - samples.main_s) / answers * 1e6,
        stages_us=stages,
        functions_us=dict(sorted(functions.items(), key=lambda each: -each[1])),
    )


def sample(workload: str, seconds: float, path: Path) -> tuple[Samples, int]:
    """The samples of a run, which `path` is for, and the number of its answers."""
    program = ("-m", "benches.sampler", str(path), "pysync")
    with servers.fresh_folder() as folder, servers.serving(folder, SERVER_CORE, program=program) as server:
        requests = warmed(server, workload, seconds)
        os.kill(server.pid, signal.SIGUSR1)
        answers = sent(server, requests, workload, seconds)
        os.kill(server.pid, signal.SIGUSR1)
        deadline = time.perf_counter() + WRITTEN_S
        while not path.exists():
            if time.perf_counter() > deadline:
                raise RuntimeError("the server writes no samples")
            time.sleep(0.01)
        return Samples(**json.loads(path.read_bytes())), answers


def libraries(workload: str, seconds: float) -> dict[str, float]:
    """The CPU microseconds of a request by library, as `perf` samples them."""
    serving = servers.bare if workload in BARE else servers.pysync
    with serving(SERVER_CORE) as server, TemporaryDirectory() as recorded:
        requests = warmed(server, workload, seconds)
        data = f"{recorded}/perf.data"
        command = ["perf", "record", "-q", "-e", "cpu-clock", "-F", str(PERF_HZ), "-o", data]
        perf = subprocess.Popen([*command, "-p", str(server.pid)], stderr=subprocess.DEVNULL)
        try:
            before = cpu_s(server.pid)
            answers = sent(server, requests, workload, seconds)
            all_us = (cpu_s(server.pid) - before) / answers * 1e6
        finally:
            perf.send_signal(signal.SIGINT)
            perf.wait()
        report = ["perf", "report", "-i", data, "--stdio", "-q", "--sort", "dso", "-F", "overhead,dso"]
        told = subprocess.run(report, capture_output=True, text=True, check=True).stdout
    found = dict.fromkeys([*LIBRARIES, OTHER], 0.0)
    for percent, name in re.findall(r"^\s*([\d.]+)%\s+(\S.*?)\s*$", told, re.M):
        found[library_of(name)] += float(percent) / 100 * all_us
    return found


def warmed(server: Running, workload: str, seconds: float) -> Iterator[bytes]:
    """Requests for so many seconds of the server's, after it has stored what they read and answered some."""
    author, row = Author(server.url), WORKLOADS[workload]
    stored = row.prepare(author)
    prepared, _ = asyncio.run(drive(server.url, stored, 200, connections=CONNECTIONS, seconds=60))
    if prepared.errors:
        raise RuntimeError(f"{workload} cannot be prepared: {dict(prepared.errors)}")
    requests = iter(row.requests(author, min(row.count, int((WARM_S + seconds) * MAX_PER_SECOND))))
    sent(server, requests, workload, WARM_S)
    return requests


def sent(server: Running, requests: Iterator[bytes], workload: str, seconds: float) -> int:
    """Send requests until the server has used so many seconds of CPU, or there are no more; the number of
    answers. Raises RuntimeError where one is wrong."""
    answers, ends = 0, cpu_s(server.pid) + seconds
    while (left := ends - cpu_s(server.pid)) > 0.0:
        expect = WORKLOADS[workload].expect
        run, _ = asyncio.run(drive(server.url, requests, expect, connections=CONNECTIONS, seconds=left))
        if run.errors:
            raise RuntimeError(f"{workload}: {dict(run.errors)}")
        if not run.latencies:
            break
        answers += len(run.latencies)
    return answers


def stage_of(function: str) -> str:
    """The stage of a function, as the sampler names it."""
    fits = (name for name, prefixes in STAGES.items() if function.startswith(prefixes))
    return next(fits, OTHER)


def library_of(shared_object: str) -> str:
    fits = (name for name, pattern in LIBRARIES.items() if re.search(pattern, shared_object))
    return next(fits, OTHER)


def table(profiles: Mapping[str, Profile], by_library: Mapping[str, Mapping[str, float]]) -> str:
    """The Markdown tables, with a column for each workload. `by_library` may be empty."""
    parts = [_table("CPU µs by stage", profiles, _stage_rows(profiles))]
    if by_library:
        rows = {
            library: [found.get(library, 0.0) for found in by_library.values()]
            for library in (*LIBRARIES, OTHER)
        }
        rows["all of it"] = [sum(found.values()) for found in by_library.values()]
        parts.append(_table("CPU µs by library", by_library, rows))
    return "\n\n".join(parts)


def _stage_rows(profiles: Mapping[str, Profile]) -> dict[str, list[float]]:
    found = profiles.values()
    rows = {stage: [one.stages_us.get(stage, 0.0) for one in found] for stage in (*STAGES, OTHER)}
    rows["other threads: commit, flush"] = [one.threads_us for one in found]
    rows["all of it"] = [one.all_us for one in found]
    return rows


def _table(title: str, columns: Iterable[str], rows: Mapping[str, Sequence[float]]) -> str:
    names = list(columns)
    lines = [f"| {title} | {' | '.join(names)} |", f"|---|{'---:|' * len(names)}"]
    lines += [f"| {row} | {' | '.join(f'{us:,.1f}' for us in found)} |" for row, found in rows.items()]
    return "\n".join(lines)


def functions_table(name: str, found: Profile, count: int) -> str:
    """The Markdown table of the functions that take most of a workload."""
    most = list(found.functions_us.items())[:count]
    lines = [f"| {name}: function | µs |", "|---|---:|"]
    return "\n".join([*lines, *(f"| `{function or '(none)'}` | {us:.1f} |" for function, us in most)])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benches.request_profile", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="pulls for a moment: to see that it works")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="only this; may be repeated")
    parser.add_argument("--seconds", type=float, default=3.0, help="CPU time to sample (default: 3)")
    parser.add_argument("--functions", type=int, default=0, metavar="N", help="list the N costliest")
    options = parser.parse_args()
    with servers.pinned(LOAD_CORE):
        names, seconds = options.workload or DEFAULT, options.seconds
        if options.quick:
            names, seconds = ("pull",), 0.1
        found = {name: profile(name, seconds) for name in names}
        by_library = {}
        if shutil.which("perf") and not options.quick:
            by_library = {
                name: libraries(name, seconds) for name in (*(() if options.quick else BARE), *found)
            }
    print(f"{machine()}; {seconds:g} s of CPU each.\n\n{table(found, by_library)}")
    if options.functions:
        for name, one in found.items():
            print(f"\n{functions_table(name, one, options.functions)}")


if __name__ == "__main__":
    main()
