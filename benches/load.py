"""The load generator of `pysync bench` with the workloads of the comparisons.

python -m benches.load --url http://127.0.0.1:8080 --workload pull
"""

import argparse
import dataclasses
import gc
import json
import os
import sys

import uvloop

from benches.workloads import WORKLOADS, Author, Workload
from pysync.cli import load_generator
from pysync.cli.load_generator import CONNECTIONS, HEADER, Measurement, row


async def measure(
    base_url: str,
    workload: Workload,
    *,
    count: int,
    seconds: float,
    connections: int = CONNECTIONS,
    server_pid: int | None = None,
) -> Measurement:
    """Run one workload. Raises RuntimeError when the documents it needs cannot be made."""
    author = Author(base_url)
    return await load_generator.measure(
        base_url,
        workload.name,
        lambda: workload.requests(author, count),
        workload.prepare(author),
        seconds=seconds,
        expect=workload.expect,
        at_least=workload.at_least,
        connections=connections,
        server_pid=server_pid,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benches.load", description="Load an HTTP server.")
    parser.add_argument("--url", required=True, help="base URL of the server")
    parser.add_argument(
        "--workload", action="append", choices=WORKLOADS, required=True, help="may be repeated"
    )
    parser.add_argument("--count", type=int, help="requests to make at most (default: the workload's)")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long to send (default: 3)")
    parser.add_argument("--connections", type=int, default=CONNECTIONS)
    parser.add_argument("--core", type=int, help="processor to stay on")
    parser.add_argument("--server-pid", type=int, help="process whose CPU time is reported")
    parser.add_argument("--json", action="store_true", help="a JSON object per workload, one a line")
    return parser.parse_args()


async def main(options: argparse.Namespace) -> int:
    """Exit status 1 where any answer was not the expected one."""
    failed = False
    if not options.json:
        print(HEADER)
    for name in options.workload:
        workload = WORKLOADS[name]
        run = await measure(
            options.url.rstrip("/"),
            workload,
            count=options.count or workload.count,
            seconds=options.seconds,
            connections=options.connections,
            server_pid=options.server_pid,
        )
        print(json.dumps(dataclasses.asdict(run)) if options.json else row(run), flush=True)
        failed = failed or bool(run.errors)
    return int(failed)


if __name__ == "__main__":
    options = arguments()
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    gc.disable()  # nothing here makes cycles, and a pause would be taken for the server's
    sys.exit(uvloop.run(main(options)))
