"""pysync beside a bare aiohttp application: same core, same loop, in turns.

    python -m benches.compare [--quick] [--workload NAME]... [--json FILE]

The servers stay on one core, the load generator on another; only one server is loaded at a time. Every round
runs all workloads once, each right after the bare workload that it is measured against; its share is the
median over the rounds of its rate beside that bare rate. Prints Markdown.
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benches import servers
from benches.servers import CHECKOUT, Memory, Running
from benches.workloads import LISTED, LOGGED
from pysync.cli.load_generator import CONNECTIONS, Measurement

SERVER_CORE, LOAD_CORE = 0, 1


@dataclass(frozen=True, slots=True)
class Goal:
    """What a workload must reach: a `share` of the rate of the bare workload `of`, or `mb_per_second`.
    Neither: its share is shown for information."""

    workload: str
    of: str
    share: float | None = None
    mb_per_second: float | None = None


GOALS = (
    Goal("pull", "bare-get", share=0.70),
    Goal("pull-304", "bare-get", share=0.70),
    Goal("signed-pull", "bare-get", share=0.40),
    Goal("push", "bare-post", share=0.45),
    Goal("signed-push", "bare-post", share=0.30),
    Goal("push-512k", "bare-post", mb_per_second=100),
    Goal("batch-100", "bare-get", share=0.06),
    Goal("batch-100-signed", "bare-get", share=0.055),
    Goal("batch-100-304", "bare-get", share=0.10),
    Goal("list-first", "bare-get", share=0.05),
    Goal("list-last", "bare-get", share=0.05),
    Goal("config", "bare-get", share=0.5),
    Goal("append", "bare-post", share=0.25),
    Goal("append-1000", "bare-post", share=0.25),
    Goal("signed-append", "bare-post"),
    Goal("log-last", "bare-get", share=0.40),
    Goal("log-checkpoint", "bare-get", share=0.35),
)

# With as many appends under way, the server commits more of them at once.
FILL_CONNECTIONS = 256
FILL_LIMIT_S = 900
QUICK_LOGGED = 50_000


@dataclass(frozen=True, slots=True)
class Turn:
    """A workload, and the bare one right before it."""

    bare: Measurement
    ours: Measurement


Turns = dict[str, list[Turn]]


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the server takes beside time per request: `idle` after its start, `warm` after a tenth of
    `requests`, `worn` after all of them."""

    start_s: float
    idle: Memory
    warm: Memory
    worn: Memory
    requests: int


def rounds(bare: Running, ours: Running, goals: Sequence[Goal], count: int, seconds: float) -> Turns:
    """`count` turns of the workload of each goal, by its name."""
    found: Turns = {goal.workload: [] for goal in goals}
    for number in range(count):
        print(f"round {number + 1} of {count}", file=sys.stderr)
        for goal in goals:
            beside = load(bare, goal.of, seconds)
            found[goal.workload].append(Turn(beside, load(ours, goal.workload, seconds)))
    return found


def load(
    server: Running,
    workload: str,
    seconds: float,
    count: int | None = None,
    connections: int = CONNECTIONS,
) -> Measurement:
    """One run of the generator in its own process. Raises RuntimeError when it fails, or an answer was wrong:
    a figure over refused requests would mean nothing."""
    command = [sys.executable, "-m", "benches.load", "--json", "--url", server.url, "--workload", workload]
    command += ["--seconds", str(seconds), "--core", str(LOAD_CORE), "--server-pid", str(server.pid)]
    command += ["--connections", str(connections)]
    command += ["--count", str(count)] if count else []
    done = subprocess.run(command, cwd=CHECKOUT, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise RuntimeError(f"{workload} failed: {done.stdout.decode()}")
    return Measurement(**json.loads(done.stdout))


def fill(server: Running, workload: str, count: int, connections: int = CONNECTIONS) -> Measurement:
    """Store what other workloads read, once per server, and tell how that went. Raises RuntimeError where it
    is not done in FILL_LIMIT_S."""
    print(f"{workload}: {count:,} requests", file=sys.stderr)
    filled = load(server, workload, FILL_LIMIT_S, count, connections)
    if filled.answers < count:
        raise RuntimeError(f"{workload} stored {filled.answers:,} of {count:,} in {FILL_LIMIT_S} s")
    return filled


def footprint(starts: int, requests: int) -> Footprint:
    """Start our server several times, then load the last one, half pulls and half pushes."""
    times = []
    for _ in range(starts - 1):
        with servers.pysync(SERVER_CORE) as server:
            times.append(server.start_s)
    with servers.pysync(SERVER_CORE) as server:
        times.append(server.start_s)
        idle = server.memory()
        _half_and_half(server, requests // 10)
        warm = server.memory()
        _half_and_half(server, requests)
        return Footprint(statistics.median(times), idle, warm, server.memory(), requests)


def _half_and_half(server: Running, requests: int) -> None:
    slice_size = min(requests // 2, 25_000)
    for _ in range(requests // 2 // slice_size):
        for workload in ("pull", "push"):
            load(server, workload, seconds=600, count=slice_size)


def table(found: Turns, goals: Sequence[Goal] = GOALS) -> str:
    """The Markdown table of all rounds: medians, and in brackets the lowest and highest share."""
    lines = [
        "| workload | per s | share of bare | goal | CPU µs | CPU share | p50 ms | p99 ms | generator |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    goals = [goal for goal in goals if goal.workload in found]
    for name in dict.fromkeys(goal.of for goal in goals):
        runs = [turn.bare for goal in goals if goal.of == name for turn in found[goal.workload]]
        lines.append(_line(runs, "", "", ""))
    for goal in goals:
        turns = found[goal.workload]
        runs = [turn.ours for turn in turns]
        if goal.mb_per_second is None:
            share = spread([turn.ours.per_second / turn.bare.per_second for turn in turns], ".3f")
            cpu = statistics.median(_cpu_us(turn.bare) / _cpu_us(turn.ours) for turn in turns)
            must = "" if goal.share is None else f"{goal.share:.3g}"
            lines.append(_line(runs, share, must, f"{cpu:.3f}"))
        else:
            speed = spread([run.mb_per_second for run in runs], ".0f")
            lines.append(_line(runs, f"{speed} MB/s", f"{goal.mb_per_second:.0f} MB/s", ""))
    return "\n".join(lines)


def last_page_beside_first(found: Turns) -> str:
    """How much longer the last page of a list takes than the first, and how much longer it may."""
    pages = zip(found["list-last"], found["list-first"], strict=True)
    times = [first.ours.per_second / last.ours.per_second for last, first in pages]
    return f"The last page takes {spread(times, '.2f')} times the first page's time; goal: at most 1.2."


def how_filled(filled: Measurement) -> str:
    """How long it took to make the log that tails are read of."""
    return (
        f"The log of {filled.answers:,} elements took {filled.seconds:.0f} s to append"
        f" ({filled.per_second:,.0f}/s, {FILL_CONNECTIONS} connections)."
    )


def spread(values: Sequence[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def _line(runs: Sequence[Measurement], share: str, goal: str, cpu_share: str) -> str:
    rate = statistics.median(run.per_second for run in runs)
    cpu = statistics.median(_cpu_us(run) for run in runs)
    p50 = statistics.median(run.p50_ms for run in runs)
    p99 = statistics.median(run.p99_ms for run in runs)
    busy = max(run.generator_busy for run in runs)
    return (
        f"| {runs[0].workload} | {rate:,.0f} | {share} | {goal} | {cpu:.1f} | {cpu_share} | {p50:.2f}"
        f" | {p99:.2f} | {busy:.0%} |"
    )


def _cpu_us(run: Measurement) -> float:
    assert run.server_cpu_us is not None, "every run here knows its server's process"
    return run.server_cpu_us


def footprint_table(measured: Footprint) -> str:
    warm, worn = measured.warm, measured.worn
    growth, own_growth = worn.rss_mb / warm.rss_mb - 1, worn.own_mb / warm.own_mb - 1
    return "\n".join(
        (
            "| | measured | goal |",
            "|---|---:|---:|",
            f"| start to first answer | {measured.start_s:.2f} s | < 0.50 s |",
            f"| idle RSS | {measured.idle.rss_mb:.1f} MB | < 60 MB |",
            f"| RSS after {measured.requests // 10:,} requests | {warm.rss_mb:.1f} MB | |",
            f"| its growth over {measured.requests:,} more | {growth:+.1%} | within 5 % |",
            f"| the same without mapped files | {own_growth:+.1%} | within 5 % |",
        )
    )


def machine() -> str:
    """What the figures were taken on, in a line."""
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in cpus if line.startswith("model name")), "unknown")
    return (
        f"{os.cpu_count()} cores of {model}, Linux {platform.release()}, Python {platform.python_version()}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benches.compare", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="two short rounds: to see that it works")
    parser.add_argument(
        "--workload",
        action="append",
        choices=[goal.workload for goal in GOALS],
        help="only this one, without the footprint; may be repeated",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run there")
    options = parser.parse_args()
    count, seconds, starts, requests = (2, 1.0, 2, 20_000) if options.quick else (5, 3.0, 5, 200_000)
    goals = [goal for goal in GOALS if not options.workload or goal.workload in options.workload]
    with servers.bare(SERVER_CORE) as bare, servers.pysync(SERVER_CORE) as ours:
        if any(goal.workload.startswith("list-") for goal in goals):
            fill(ours, "fill-list", LISTED)
        filled = None
        if any(goal.workload.startswith("log-") for goal in goals):
            filled = fill(ours, "fill-log", QUICK_LOGGED if options.quick else LOGGED, FILL_CONNECTIONS)
        found = rounds(bare, ours, goals, count, seconds)
    parts = [f"{machine()}; {count} rounds of {seconds:g} s.", table(found)]
    if {"list-first", "list-last"} <= found.keys():
        parts.append(last_page_beside_first(found))
    if filled is not None:
        parts.append(how_filled(filled))
    measured = None if options.workload else footprint(starts, requests)
    if measured is not None:
        parts.append(footprint_table(measured))
    print(*parts, sep="\n\n")
    if options.json:
        turns = {name: [dataclasses.asdict(turn) for turn in taken] for name, taken in found.items()}
        report: dict[str, object] = {"machine": machine(), "turns": turns}
        if filled is not None:
            report["filled"] = dataclasses.asdict(filled)
        if measured is not None:
            report["footprint"] = dataclasses.asdict(measured)
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
