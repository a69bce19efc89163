"""What quotas cost a push: the same load against a service that counts and one that does not.

    python -m benches.quotas [--quick] [--rounds N] [--seconds S] [--connections N] [--rows NAME...]

Two services run on one core, on folders of their own, and are loaded in turns by a generator on another;
which comes first alternates. One has quotas for each identity, namespace and issuer, all of them far away.
The table shows the median of the rounds, and of the ratios of each round. On a bucket a push makes no request
for a quota.
"""

import argparse
import os
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from benches import servers
from benches.compare import machine, spread
from benches.servers import Running
from benches.workers import Measured, measure

ROWS: Final = ("push", "signed-push", "append")
GOAL: Final = 1.12
"""The most that a push may cost with quotas, of its cost without."""
QUOTAS: Final = {
    "identity": {"bytes": 1_000_000_000_000},
    "namespace": {"documents": 1_000_000_000},
    "issuer": {"bytes": 1_000_000_000_000},
}

Found = dict[str, dict[str, list[Measured]]]
"""The runs of each workload, without quotas and with them."""


@contextmanager
def services(core: int | None) -> Iterator[dict[str, Running]]:
    """A service without quotas and one with them, each on a folder of its own."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                servers.serving(stack.enter_context(servers.fresh_folder()), core, settings=settings)
            )
            for name, settings in (("without", {}), ("quotas", {"quotas": QUOTAS}))
        }


def compare(rows: tuple[str, ...], rounds: int, seconds: float, connections: int) -> Found:
    """So many runs of each workload against each service, in turns."""
    found: Found = {name: {"without": [], "quotas": []} for name in rows}
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        if len(cores) > 1:
            stack.enter_context(servers.pinned(cores[1]))
        core = cores[0] if len(cores) > 1 else None
        running = stack.enter_context(services(core))
        for number in range(rounds):
            for name, runs in found.items():
                for kind in ("without", "quotas") if number % 2 == 0 else ("quotas", "without"):
                    runs[kind].append(measure(running[kind], name, connections, seconds))
    return found


def table(found: Found) -> str:
    """The Markdown table of all rounds."""
    lines = [
        "| workload | per s | with quotas | CPU µs | with quotas | times the CPU | times the rate |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, runs in found.items():
        plain, counted = runs["without"], runs["quotas"]
        pairs = list(zip(plain, counted, strict=True))
        cpu = [with_.server_cpu_us / without.server_cpu_us for without, with_ in pairs]
        rate = [with_.per_second / without.per_second for without, with_ in pairs]
        values = (
            f"{statistics.median(run.per_second for run in plain):,.0f}",
            f"{statistics.median(run.per_second for run in counted):,.0f}",
            f"{statistics.median(run.server_cpu_us for run in plain):.1f}",
            f"{statistics.median(run.server_cpu_us for run in counted):.1f}",
            spread(cpu, ".3f"),
            spread(rate, ".3f"),
        )
        lines.append(f"| {name} | {' | '.join(values)} |")
    return "\n".join([*lines, "", f"Goal: a push takes at most {GOAL} times the CPU."])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--quick", action="store_true", help="one short round: to see that it works")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--connections", type=int, default=32)
    options = parser.parse_args()
    print(machine())
    print()
    rounds, seconds = (1, 0.2) if options.quick else (options.rounds, options.seconds)
    print(table(compare(tuple(options.rows), rounds, seconds, options.connections)))


if __name__ == "__main__":
    main()
