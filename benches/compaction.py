"""What merging small files of events is good for: a DuckDB query over them, before and after.

    python -m benches.compaction [--quick] [--batches N]

Batches of 100 events are pushed to a server and then merged by `pysync events compact`. The query is asked of
a new DuckDB each time, in this process; the files are in the page cache before and after. Prints Markdown.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import duckdb

from benches import servers
from benches.batches import EVENTS
from benches.compare import SERVER_CORE, load, machine, spread
from benches.servers import CHECKOUT

GOAL: Final = 20
BATCHES: Final = 10_000
ASKED: Final = 5
PUSH_LIMIT_S: Final = 600.0
QUERY: Final = "SELECT event, count(*) FROM read_parquet(?) GROUP BY event ORDER BY event"


@dataclass(frozen=True, slots=True)
class Asked:
    """A query over files: how long it took each time, and over how many and how large files."""

    seconds: list[float]
    rows: list[tuple[str, int]]
    files: int
    bytes: int


def push(folder: Path, batches: int) -> None:
    """Have a server store so many batches. Raises RuntimeError where they are not all taken."""
    with servers.serving(folder, SERVER_CORE, config=servers.EVENTS) as server:
        run = load(server, "events", PUSH_LIMIT_S, batches)
    if run.answers != batches:
        raise RuntimeError(f"{run.answers:,} of {batches:,} batches were taken in {PUSH_LIMIT_S} s")


def compact(folder: Path) -> float:
    """Merge what lies in `folder`, as an operator does; seconds. Raises CalledProcessError."""
    command = [sys.executable, "-m", "pysync", "events", "compact", "--config", str(servers.EVENTS)]
    started = time.perf_counter()
    subprocess.run([*command, "--store", f"file:{folder}"], cwd=CHECKOUT, stdout=sys.stderr, check=True)
    return time.perf_counter() - started


def ask(folder: Path, times: int) -> Asked:
    """Count the events of each name so many times, after once unmeasured."""
    glob = str(folder / "files" / "events" / "**" / "*.parquet")
    seconds, rows = [], []
    for _ in range(1 + times):
        with duckdb.connect() as engine:
            started = time.perf_counter()
            rows = engine.execute(QUERY, [glob]).fetchall()
            seconds.append(time.perf_counter() - started)
    sizes = [file.stat().st_size for file in (folder / "files").glob("**/*.parquet")]
    return Asked(seconds[1:], rows, len(sizes), sum(sizes))


def check(asked: Asked, batches: int) -> None:
    """Raises RuntimeError where events are missing, or counted twice."""
    counted = sum(count for _, count in asked.rows)
    if counted != batches * EVENTS:
        raise RuntimeError(f"{counted:,} events were counted of {batches * EVENTS:,}")


def table(before: Asked, after: Asked, compaction_s: float) -> str:
    faster = [one / statistics.median(after.seconds) for one in before.seconds]

    def line(what: str, *cells: str) -> str:
        return f"| {' | '.join((what, *cells))} |"

    return "\n".join(
        (
            f"| {sum(count for _, count in before.rows):,} events | before | after |",
            "|---|---:|---:|",
            line("files", f"{before.files:,}", f"{after.files:,}"),
            line("MB", f"{before.bytes / 1e6:.1f}", f"{after.bytes / 1e6:.1f}"),
            line("query, ms", *(spread([s * 1e3 for s in each.seconds], ",.1f") for each in (before, after))),
            "",
            f"The query is {spread(faster, '.0f')} times as fast after; goal: at least {GOAL}. Merging took",
            f"{compaction_s:.1f} s.",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benches.compaction", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="few batches: to see that it works")
    parser.add_argument("--batches", type=int, default=BATCHES)
    options = parser.parse_args()
    batches, times = (500, 3) if options.quick else (options.batches, ASKED)
    with servers.fresh_folder() as folder:
        push(folder, batches)
        before = ask(folder, times)
        check(before, batches)
        took = compact(folder)
        after = ask(folder, times)
        check(after, batches)
    if after.rows != before.rows:
        raise RuntimeError("the query tells something else after merging")
    print(f"{machine()}, DuckDB {duckdb.__version__} with {len(os.sched_getaffinity(0))} threads.")
    print("", table(before, after, took), sep="\n")


if __name__ == "__main__":
    main()
