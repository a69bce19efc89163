"""What a request waits for a server that is half busy: an open loop, which leaves out no delay.

    python -m benches.half_load --url http://127.0.0.1:8080 --workload pull --rate 5000 [--server-pid PID]

Requests are sent evenly, whatever became of those before. The time of each counts from when it was due, so a
pause of the server is in the times of all requests that it held up. As `benches/load.py`, the generator makes
all requests before, and polls instead of sleeping.

A server is not half busy at half the rate that it answers at most. A request that comes alone has a tick of
the event loop for itself, and its process is woken up for it; at most load 32 share both. So
`half_busy_rate` looks at the CPU time of the server.
"""

import argparse
import asyncio
import dataclasses
import gc
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from benches.open_loop import OpenLoop, Poller, Timeline
from benches.workloads import WORKLOADS, Author, Workload
from pysync.cli.load_generator import cpu_s, drive

MAX_CONNECTIONS: Final = 256
LIMIT_S: Final = 2.0
"""A request that is not answered within this, or not as expected, counts as one that took so long."""
LEAD_S: Final = 0.1
TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class Waits:
    """How long requests waited that were sent at `rate` a second. `failed` were not answered as expected.
    `late_ms` is how late the generator sent requests, at the 99th percentile; the times include it. `busy` is
    the CPU time of the server's process, all threads, in each second; None if the process is not known."""

    workload: str
    rate: float
    p50_ms: float
    p99_ms: float
    p999_ms: float
    failed: int
    late_ms: float
    busy: float | None = None


class _Polling:
    """Something to do at any time, so that the poller never sleeps."""

    def act(self, now: float) -> float:
        """See `Actor.act`."""
        return now


def measure(
    url: str, workload: Workload, rate: float, seconds: float, server_pid: int | None = None
) -> Waits:
    """Send requests for so long. Raises RuntimeError where the documents that they read cannot be made."""
    author = Author(url)
    prepared, _ = asyncio.run(drive(url, workload.prepare(author), 200, connections=32, seconds=60))
    if prepared.errors:
        raise RuntimeError(f"{workload.name} cannot be prepared: {dict(prepared.errors)}")
    requests = list(workload.requests(author, int(rate * seconds)))
    address = urlsplit(url)
    server = (str(address.hostname), int(address.port or 80))
    start = time.perf_counter() + LEAD_S
    poller = Poller()
    load = OpenLoop(
        poller, server, ["127.0.0.1"], Timeline.evenly(requests, rate), start,
        most=MAX_CONNECTIONS, limit_s=LIMIT_S,
    )  # fmt: skip
    before_s = 0.0 if server_pid is None else cpu_s(server_pid)
    poller.run([load, _Polling()], start + seconds + LIMIT_S)
    busy = None if server_pid is None else (cpu_s(server_pid) - before_s) / seconds
    sent = load.result()
    answered = [
        took for took, status in zip(sent.took_s, sent.statuses, strict=True) if status == workload.expect
    ]
    failed = len(requests) - len(answered)
    took = [*sorted(answered), *[LIMIT_S] * failed]
    return Waits(
        workload=workload.name,
        rate=rate,
        p50_ms=_quantile_ms(took, 0.5),
        p99_ms=_quantile_ms(took, 0.99),
        p999_ms=_quantile_ms(took, 0.999),
        failed=failed,
        late_ms=_quantile_ms(sorted(sent.lag_s), 0.99),
        busy=busy,
    )


def half_busy_rate(busy_at: Callable[[float], float], first: float) -> float:
    """Return the rate at which a server is half busy. `busy_at` measures how busy it is at a rate, beginning
    with the rate `first`."""
    rate = first
    for _ in range(TRIES):
        # A request costs the less the more come: time grows about with the power 0.7 of the rate.
        rate *= (0.5 / busy_at(rate)) ** (1 / 0.7)
    return rate


def _quantile_ms(ordered: Sequence[float], share: float) -> float:
    return ordered[int(len(ordered) * share)] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benches.half_load", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--url", required=True, help="base URL of the server")
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--rate", type=float, required=True, help="requests a second")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long to send (default: 3)")
    parser.add_argument("--core", type=int, help="processor to stay on")
    parser.add_argument("--server-pid", type=int, help="process whose CPU time is reported")
    options = parser.parse_args()
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    gc.disable()  # nothing here makes cycles, and a pause would be taken for the server's
    workload, url = WORKLOADS[options.workload], options.url.rstrip("/")
    waits = measure(url, workload, options.rate, options.seconds, options.server_pid)
    print(json.dumps(dataclasses.asdict(waits)))


if __name__ == "__main__":
    main()
