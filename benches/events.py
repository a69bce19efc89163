"""Event batches: how many are taken a second, each a Parquet file on disk, and how long the loop is away.

    python -m benches.events [--quick] [--rounds N] [--seconds S] [--connections N]

The server (`events.json`) stays on one core, the load generator on another. Every batch is one of 100 events,
of 34 KB, and none has the events of another. Every batch that was acknowledged is looked for on disk
afterwards. What the event loop does is noted inside the server (`lag.py`), for the time of each round: how
long it was from one turn to a next one that was due a millisecond later. Prints Markdown.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import duckdb

from benches import servers
from benches.batches import EVENTS
from benches.compare import SERVER_CORE, load, machine, spread
from benches.servers import Gaps, Running
from pysync.cli.load_generator import CONNECTIONS, Measurement

GOAL: Final = 600
STALL_GOAL_MS: Final = 20.0
WARM_UP: Final = 200
"""Batches before the first round: the first of all finds nothing loaded."""


@dataclass(frozen=True, slots=True)
class Round:
    """One run, and the gaps between turns of the server's loop meanwhile."""

    load: Measurement
    gaps: Gaps


@dataclass(frozen=True, slots=True)
class Stored:
    """The files of some batches: how many, and their bytes."""

    files: int
    bytes: int


def measure(server: Running, seconds: float, connections: int, count: int | None = None) -> Round:
    """One run. Raises RuntimeError where a batch is refused."""
    server.gaps()
    run = load(server, "events", seconds, count, connections)
    return Round(run, server.gaps())


def stored(folder: Path, batches: int) -> Stored:
    """What lies in a store that was sent so many batches. Raises RuntimeError where files are missing or too
    many, or events are missing or there twice."""
    files = list((folder / "files").glob("**/*.parquet"))
    with duckdb.connect() as engine:
        counts = "count(*), count(DISTINCT message_id) FROM read_parquet(?)"
        found = engine.execute(f"SELECT {counts}", [str(folder / "files/**/*.parquet")]).fetchone()
    if len(files) != batches or found != (batches * EVENTS, batches * EVENTS):
        raise RuntimeError(f"{len(files):,} files hold {found} events, of {batches:,} batches")
    return Stored(len(files), sum(file.stat().st_size for file in files))


def table(found: Sequence[Round], files: Stored) -> str:
    """Medians of the rounds, and in brackets the lowest and highest."""
    runs = [each.load for each in found]
    cpu = statistics.median(run.server_cpu_us or 0.0 for run in runs)
    busy = max(run.generator_busy for run in runs)

    def line(what: str, measured: str, goal: str = "") -> str:
        return f"| {what} | {measured} | {goal} |"

    lines = [
        f"| batches of {EVENTS} events | measured | goal |",
        "|---|---:|---:|",
        line("batches/s", spread([run.per_second for run in runs], ",.0f"), f"{GOAL}"),
        line("answered within, ms, p50", spread([run.p50_ms for run in runs], ".1f")),
        line("p99", spread([run.p99_ms for run in runs], ".1f")),
        line("server's CPU, µs a batch", f"{cpu:,.0f}"),
        line("bytes of a file", f"{files.bytes / files.files:,.0f}"),
    ]
    for share in (0.5, 0.99, 0.999):
        lines.append(
            line(f"loop away, ms, p{share * 100:g}", spread([each.gaps.wall(share) for each in found], ".1f"))
        )
    most = spread([each.gaps.wall_ms[-1] for each in found], ".1f")
    lines.append(line("the longest of each round", most, f"never over {STALL_GOAL_MS:g}"))
    busy_ms = spread([each.gaps.cpu_ms[-1] for each in found], ".1f")
    lines.append(line("the most that the loop computed in one", busy_ms))
    lines += ["", f"The generator was busy for {busy:.0%} at most."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benches.events", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one short round: to see that it works")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--connections", type=int, default=CONNECTIONS)
    options = parser.parse_args()
    rounds, seconds = (1, 0.5) if options.quick else (options.rounds, options.seconds)
    with servers.fresh_folder() as folder:
        with servers.serving(folder, SERVER_CORE, config=servers.EVENTS) as server:
            warm = measure(server, seconds, options.connections, WARM_UP)
            found = [measure(server, seconds, options.connections) for _ in range(rounds)]
        files = stored(folder, sum(each.load.answers for each in [warm, *found]))
    print(f"{machine()}; {rounds} rounds of {seconds:g} s, {options.connections} connections.")
    print("", table(found, files), sep="\n")


if __name__ == "__main__":
    main()
