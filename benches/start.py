"""From starting a server to its first answer, and what it holds then: ours, the bare application, and that of
another checkout, in turns.

    python -m benches.start [--quick] [--starts N] [CHECKOUT]

CPU is that of all threads until the first answer, which other processes disturb less than time. The bare
application loads aiohttp with its client, and no SQLite.
"""

import argparse
import os
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benches import servers
from benches.servers import Memory, Running

SERVER_CORE = 0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Start(NamedTuple):
    """One start of a server."""

    start_s: float
    cpu_s: float
    idle: Memory


def start(server: Callable[[], AbstractContextManager[Running]]) -> Start:
    """Start `server` once."""
    with server() as running:
        fields = Path(f"/proc/{running.pid}/stat").read_text().rpartition(")")[2].split()
        cpu_s = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
        return Start(running.start_s, cpu_s, running.memory())


def row(name: str, starts: list[Start]) -> str:
    """Return the line of the table: medians, and the fastest start."""
    start_s, cpu_s, idle = zip(*starts, strict=True)
    columns = (
        f"{statistics.median(start_s):.3f}",
        f"{min(start_s):.3f}",
        f"{statistics.median(cpu_s):.2f}",
        f"{statistics.median(memory.rss_mb for memory in idle):.1f}",
        f"{statistics.median(memory.own_mb for memory in idle):.1f}",
    )
    return f"| {name} | {' | '.join(columns)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benches.start", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("checkout", nargs="?", type=Path, metavar="CHECKOUT", help="another one, built")
    parser.add_argument("--quick", action="store_true", help="one start: to see that it works")
    parser.add_argument("--starts", type=int, default=11)
    options = parser.parse_args()
    measured = {"pysync": partial(servers.pysync, SERVER_CORE), "bare": partial(servers.bare, SERVER_CORE)}
    if options.checkout is not None:
        measured["other checkout"] = partial(servers.pysync, SERVER_CORE, options.checkout.resolve())
    found: dict[str, list[Start]] = {name: [] for name in measured}
    for _ in range(1 if options.quick else options.starts):
        for name, server in measured.items():
            found[name].append(start(server))
    print("| | first answer, s | fastest | CPU, s | idle RSS, MB | without mapped files |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, starts in found.items():
        print(row(name, starts))


if __name__ == "__main__":
    main()
