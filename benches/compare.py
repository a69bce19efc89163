"""pysync beside a bare aiohttp application: same core, same loop, in turns.

    python -m benches.compare [--quick] [--rounds N] [--workload NAME]...

The servers stay on one core, the load generator on another; only one server is loaded at a time. Every round
runs all workloads once, each right after the bare workload that it is measured against; its share is the
median over the rounds of its rate beside that bare rate. Its floor is the least time that such a request
takes (`floors.py`), beside the time that it has. Then some workloads are sent at half the rate that they
reached, and at the rate at which our server is half busy, to see what a request waits (`half_load.py`).
Prints Markdown.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benches import floors, servers
from benches.floors import NO_WORK, Prices, Work
from benches.half_load import Waits, half_busy_rate
from benches.servers import CHECKOUT, Running
from benches.workloads import (
    BATCH,
    BIG_BYTES,
    DOCUMENT_BYTES,
    ELEMENT_BYTES,
    ELEMENT_DATA_BYTES,
    LISTED,
    LOGGED,
    PAGE_BYTES,
    TAIL,
)  # fmt: skip
from pysync.cli.load_generator import CONNECTIONS, Measurement

SERVER_CORE, LOAD_CORE = 0, 1


@dataclass(frozen=True, slots=True)
class Goal:
    """What a workload must reach: a `share` of the rate of the bare workload `of`, or `mb_per_second`.
    Neither: its share is shown for information. `work` is what each of its requests cannot leave out."""

    workload: str
    of: str
    work: Work = NO_WORK
    share: float | None = None
    mb_per_second: float | None = None


BATCH_BYTES = BATCH * DOCUMENT_BYTES
ELEMENT = Work(hashed=ELEMENT_DATA_BYTES, flushed=ELEMENT_DATA_BYTES)
TAIL_READ = Work(checked=TAIL * ELEMENT_BYTES, copied=TAIL * ELEMENT_BYTES)
# The signature of a request covers the hash of its body, beside the hash that a document has.
GOALS = (
    Goal("pull", "bare-get", Work(checked=DOCUMENT_BYTES), share=0.70),
    Goal("pull-304", "bare-get", share=0.70),
    Goal("signed-pull", "bare-get", Work(signatures=1, checked=DOCUMENT_BYTES), share=0.40),
    Goal("push", "bare-post", Work(hashed=DOCUMENT_BYTES, flushed=DOCUMENT_BYTES), share=0.45),
    Goal(
        "signed-push",
        "bare-post",
        Work(signatures=1, hashed=2 * DOCUMENT_BYTES, flushed=DOCUMENT_BYTES),
        share=0.30,
    ),
    Goal(
        "push-512k",
        "bare-post",
        Work(copied=BIG_BYTES, hashed=BIG_BYTES, flushed=BIG_BYTES),
        mb_per_second=100,
    ),
    Goal("batch-100", "bare-get", Work(checked=BATCH_BYTES, copied=BATCH_BYTES), share=0.06),
    Goal(
        "batch-100-signed",
        "bare-get",
        Work(signatures=1, checked=BATCH_BYTES, copied=BATCH_BYTES),
        share=0.055,
    ),
    Goal("batch-100-304", "bare-get", share=0.10),
    Goal("list-first", "bare-get", Work(copied=PAGE_BYTES), share=0.05),
    Goal("list-last", "bare-get", Work(copied=PAGE_BYTES), share=0.05),
    Goal("config", "bare-get", share=0.5),
    Goal("append", "bare-post", ELEMENT, share=0.25),
    Goal("append-1000", "bare-post", ELEMENT, share=0.25),
    Goal("signed-append", "bare-post", replace(ELEMENT, signatures=2, hashed=2 * ELEMENT_DATA_BYTES)),
    Goal("log-last", "bare-get", TAIL_READ, share=0.40),
    Goal("log-checkpoint", "bare-get", TAIL_READ, share=0.35),
)
HALF_LOADED = ("pull", "push", "append")

# With as many appends under way, the server commits more of them at once.
FILL_CONNECTIONS = 256
FILL_LIMIT_S = 900
# With `--quick` a bench shows that it works: few requests of few kinds, for a moment.
QUICK = ("pull", "signed-push", "log-last")
QUICK_S = 0.2
QUICK_COUNT = 2_000
QUICK_LOGGED = 2_000


@dataclass(frozen=True, slots=True)
class Turn:
    """A workload, and the bare one right before it."""

    bare: Measurement
    ours: Measurement


Turns = dict[str, list[Turn]]


def rounds(
    bare: Running, ours: Running, goals: Sequence[Goal], count: int, seconds: float, most: int | None = None
) -> Turns:
    """`count` turns of the workload of each goal, by its name, with `most` requests each at most."""
    found: Turns = {goal.workload: [] for goal in goals}
    for number in range(count):
        print(f"round {number + 1} of {count}", file=sys.stderr)
        for goal in goals:
            beside = load(bare, goal.of, seconds, most)
            found[goal.workload].append(Turn(beside, load(ours, goal.workload, seconds, most)))
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
    options = ["--json", "--server-pid", str(server.pid), "--connections", str(connections)]
    options += ["--count", str(count)] if count else []
    return Measurement(**_generate("benches.load", server, workload, seconds, options))


def half_load(bare: Running, ours: Running, found: Turns, count: int, seconds: float) -> list[list[Waits]]:
    """`count` runs of each of HALF_LOADED at two rates: half of what it had in `found`, and the one at which
    our server is half busy. Those of the bare server at the same rate come before each, and at last those at
    the rate at which the bare server is half busy itself."""
    rows: list[tuple[Running, str, float]] = []
    for goal in GOALS:
        name = goal.workload
        if name in HALF_LOADED and name in found:
            half = statistics.median(turn.ours.per_second for turn in found[name]) / 2
            for rate in (half, half_busy_rate(partial(busy, ours, name, seconds), half)):
                rows += [(bare, goal.of, rate), (ours, name, rate)]
            rows.append((bare, goal.of, half_busy_rate(partial(busy, bare, goal.of, seconds), half)))
    rounds = [[wait(*row, seconds) for row in rows] for _ in range(count)]
    return [list(runs) for runs in zip(*rounds, strict=True)]


def wait(server: Running, workload: str, rate: float, seconds: float) -> Waits:
    """One run of the generator of an even load, in its own process. Raises RuntimeError when it fails."""
    options = ["--rate", str(rate), "--server-pid", str(server.pid)]
    return Waits(**_generate("benches.half_load", server, workload, seconds, options))


def busy(server: Running, workload: str, seconds: float, rate: float) -> float:
    """How busy a server is at a rate."""
    share = wait(server, workload, rate, seconds).busy
    assert share is not None
    return share


def _generate(
    module: str, server: Running, workload: str, seconds: float, options: Sequence[str]
) -> dict[str, Any]:
    """What a generator tells of a run, as JSON."""
    command = [sys.executable, "-m", module, "--url", server.url, "--workload", workload]
    command += ["--seconds", str(seconds), "--core", str(LOAD_CORE), *options]
    done = subprocess.run(command, cwd=CHECKOUT, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise RuntimeError(f"{workload} failed: {done.stdout.decode()}")
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def fill(server: Running, workload: str, count: int, connections: int = CONNECTIONS) -> Measurement:
    """Store what other workloads read, once per server, and tell how that went. Raises RuntimeError where it
    is not done in FILL_LIMIT_S."""
    print(f"{workload}: {count:,} requests", file=sys.stderr)
    filled = load(server, workload, FILL_LIMIT_S, count, connections)
    if filled.answers < count:
        raise RuntimeError(f"{workload} stored {filled.answers:,} of {count:,} in {FILL_LIMIT_S} s")
    return filled


def table(found: Turns, goals: Sequence[Goal] = GOALS, prices: Prices | None = None) -> str:
    """The Markdown table of all rounds: medians, and in brackets the lowest and highest share; with `prices`
    the floor of each row, and how many times that its requests take."""
    columns = ["workload", "per s", "share of bare", "goal", "CPU µs", "CPU share", "p50 ms", "p99 ms"]
    columns += ["generator"] if prices is None else ["generator", "floor µs", "times floor"]
    lines = [f"| {' | '.join(columns)} |", f"|---|{'---:|' * (len(columns) - 1)}"]
    goals = [goal for goal in goals if goal.workload in found]
    for name in dict.fromkeys(goal.of for goal in goals):
        runs = [turn.bare for goal in goals if goal.of == name for turn in found[goal.workload]]
        lines.append(_line(runs, "", "", "", [] if prices is None else ["", ""]))
    for goal in goals:
        turns = found[goal.workload]
        runs = [turn.ours for turn in turns]
        least = [] if prices is None else floor_columns(turns, prices.cost_us(goal.work))
        if goal.mb_per_second is None:
            share = spread([turn.ours.per_second / turn.bare.per_second for turn in turns], ".3f")
            cpu = statistics.median(_cpu_us(turn.bare) / _cpu_us(turn.ours) for turn in turns)
            must = "" if goal.share is None else f"{goal.share:.3g}"
            lines.append(_line(runs, share, must, f"{cpu:.3f}", least))
        else:
            speed = spread([run.mb_per_second for run in runs], ".0f")
            lines.append(_line(runs, f"{speed} MB/s", f"{goal.mb_per_second:.0f} MB/s", "", least))
    return "\n".join(lines)


def floor_columns(turns: Sequence[Turn], work_us: float) -> list[str]:
    """The least time of a request, and how many times that it takes: medians over the rounds."""
    least = [1e6 / turn.bare.per_second + work_us for turn in turns]
    times = [1e6 / turn.ours.per_second / us for turn, us in zip(turns, least, strict=True)]
    return [f"{statistics.median(least):.1f}", f"{statistics.median(times):.2f}"]


def waits_table(waits: Sequence[Sequence[Waits]]) -> str:
    """The Markdown table of what requests wait: medians of the rounds, and the least and highest p99."""
    lines = [
        "| sent evenly | per s | busy | p50 ms | p99 ms | p99.9 ms | failed | generator late, p99 ms |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for runs in waits:
        busy, p50, p999, late = (
            statistics.median(getattr(run, column) for run in runs)
            for column in ("busy", "p50_ms", "p999_ms", "late_ms")
        )
        p99, failed = spread([run.p99_ms for run in runs], ".2f"), sum(run.failed for run in runs)
        lines.append(
            f"| {runs[0].workload} | {runs[0].rate:,.0f} | {busy:.0%} | {p50:.2f} | {p99} | {p999:.2f} "
            f"| {failed} | {late:.2f} |"
        )
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


def _line(runs: Sequence[Measurement], share: str, goal: str, cpu_share: str, least: Sequence[str]) -> str:
    rate = statistics.median(run.per_second for run in runs)
    cpu = statistics.median(_cpu_us(run) for run in runs)
    p50 = statistics.median(run.p50_ms for run in runs)
    p99 = statistics.median(run.p99_ms for run in runs)
    busy = max(run.generator_busy for run in runs)
    columns = [runs[0].workload, f"{rate:,.0f}", share, goal, f"{cpu:.1f}", cpu_share, f"{p50:.2f}"]
    return f"| {' | '.join([*columns, f'{p99:.2f}', f'{busy:.0%}', *least])} |"


def _cpu_us(run: Measurement) -> float:
    assert run.server_cpu_us is not None, "every run here knows its server's process"
    return run.server_cpu_us


INSTRUCTION_SETS = {"sha_ni": "SHA", "avx2": "AVX2", "avx512ifma": "AVX-512 IFMA"}
"""Those of which speed depends, by their flags in /proc/cpuinfo."""


def machine() -> str:
    """What the figures were taken on, in a line."""
    facts: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, fact = line.partition(":")
        facts.setdefault(name.strip(), fact.strip())
    flags = facts.get("flags", "").split()
    sets = ", ".join(name for flag, name in INSTRUCTION_SETS.items() if flag in flags)
    sets = sets or f"none of {', '.join(INSTRUCTION_SETS.values())}"
    return (
        f"{os.cpu_count()} cores of {facts.get('model name', 'unknown')} ({sets}), "
        f"Linux {platform.release().partition('-')[0]}, Python {platform.python_version()}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benches.compare", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="few requests: to see that it works")
    parser.add_argument(
        "--workload",
        action="append",
        choices=[goal.workload for goal in GOALS],
        help="only this one; may be repeated",
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    count, seconds, most = (1, QUICK_S, QUICK_COUNT) if options.quick else (options.rounds, 3.0, None)
    names = options.workload or (QUICK if options.quick else [goal.workload for goal in GOALS])
    goals = [goal for goal in GOALS if goal.workload in names]
    with servers.bare(SERVER_CORE) as bare, servers.pysync(SERVER_CORE) as ours:
        if any(goal.workload.startswith("list-") for goal in goals):
            fill(ours, "fill-list", LISTED)
        filled = None
        if any(goal.workload.startswith("log-") for goal in goals):
            filled = fill(ours, "fill-log", QUICK_LOGGED if options.quick else LOGGED, FILL_CONNECTIONS)
        prices = floors.measure({goal.work.flushed for goal in goals if goal.work.flushed}, SERVER_CORE)
        found = rounds(bare, ours, goals, count, seconds, most)
        if options.quick:
            waits = [[wait(ours, QUICK[0], QUICK_COUNT, seconds)]]
        else:
            waits = half_load(bare, ours, found, count, seconds)
    parts = [f"{machine()}; {count} rounds of {seconds:g} s.", table(found, prices=prices)]
    parts.append(floors.table(prices))
    if waits:
        parts.append(waits_table(waits))
    if {"list-first", "list-last"} <= found.keys():
        parts.append(last_page_beside_first(found))
    if filled is not None:
        parts.append(how_filled(filled))
    print(*parts, sep="\n\n")


if __name__ == "__main__":
    main()
