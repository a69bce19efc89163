"""This checkout beside another one: the CPU time that each kind of request costs.

    python -m benches.regression CHECKOUT [--quick] [--workload NAME]... [--rounds N] [--seconds S]

CHECKOUT is a clone at the commit to compare with, set up by `make build`. Both servers stay on one core, the
load generator on another; only one server is loaded at a time. In each round every workload runs once on
either server, and the server that goes first alternates. A ratio is the CPU time of an answer of this
checkout beside that of the other in the same round: above 1, this one costs more. Prints Markdown.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from benches import servers
from benches.compare import (
    LOAD_CORE,
    QUICK,
    QUICK_COUNT,
    QUICK_LOGGED,
    QUICK_S,
    SERVER_CORE,
    fill,
    load,
    machine,
    spread,
)
from benches.servers import Running

WORKLOADS = (
    "pull",
    "pull-304",
    "signed-pull",
    "push",
    "signed-push",
    "push-512k",
    "batch-100",
    "batch-100-304",
    "append",
    "log-last",
    "file-pull",
    "file-pull-304",
)
LOGGED = 20_000
"""Elements of the log that `log-last` reads."""

Costs = dict[str, list[tuple[float, float]]]
"""The CPU time of an answer in microseconds, before and now, in each round of a workload."""


def measure(
    before: Running,
    now: Running,
    workloads: Sequence[str],
    count: int,
    seconds: float,
    logged: int = LOGGED,
    most: int | None = None,
) -> Costs:
    """Return `count` rounds of each workload, with `most` requests each at most."""
    if "log-last" in workloads:
        for server in (before, now):
            fill(server, "fill-log", logged, connections=64)
    found: Costs = {name: [] for name in workloads}
    for number in range(count):
        for name in workloads:
            order = (before, now) if number % 2 == 0 else (now, before)
            costs = {server: load(server, name, seconds, most).server_cpu_us or 0.0 for server in order}
            found[name].append((costs[before], costs[now]))
    return found


def table(found: Costs) -> str:
    """Return a Markdown table of the medians, with the lowest and the highest ratio."""
    lines = ["| workload | before, CPU µs | now, CPU µs | ratio |", "|---|---:|---:|---:|"]
    for name, rounds in found.items():
        before, now = (statistics.median(costs) for costs in zip(*rounds, strict=True))
        ratio = spread([ours / theirs for theirs, ours in rounds], ".2f")
        lines.append(f"| {name} | {before:.1f} | {now:.1f} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benches.regression", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="a built clone to compare with")
    parser.add_argument("--quick", action="store_true", help="few requests: to see that it works")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="only this; may be repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="the length of a run")
    options = parser.parse_args()
    count, seconds, logged, most = options.rounds, options.seconds, LOGGED, None
    workloads = options.workload or WORKLOADS
    if options.quick:
        count, seconds, logged, most, workloads = 1, QUICK_S, QUICK_LOGGED, QUICK_COUNT, QUICK
    with (
        servers.fresh_folder() as theirs,
        servers.fresh_folder() as ours,
        servers.serving(theirs, SERVER_CORE, checkout=options.checkout.resolve()) as before,
        servers.serving(ours, SERVER_CORE) as now,
    ):
        found = measure(before, now, workloads, count, seconds, logged, most)
    print(f"{machine()}; generator on core {LOAD_CORE}; {count} rounds of {seconds:g} s.")
    print(table(found))


if __name__ == "__main__":
    main()
