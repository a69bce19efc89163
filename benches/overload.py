"""A server that more is asked of than it can answer: what good clients notice, and how soon it is over.

    python benches/overload.py [--rows NAME...] [--seconds 8] [--checkout DIR] [--json FILE]

The server has one worker, on one core, and every row a server of its own; the generator is on another core.
S is what it answers at most: signed pulls a second, 32 connections, each with one request under way. Then
good clients send 0.5 S signed pulls a second, an attack comes beside them for some seconds, and they go on
when it is over. Nobody waits for answers: a request is sent when it is due, its time is counted from then,
and after 2 s its client hangs up. Good clients, a crowd of them and attackers have different addresses
(`attacks.py`). `/health` is asked on a fresh connection ten times a second. Prints Markdown.

Each row has a short form without timing in `tests/server/test_attacks.py`.
"""

import argparse
import asyncio
import dataclasses
import json
import math
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from benches import attacks, rejections, servers, streams
from benches.attacks import HEALTH_LIMIT_S, LIMIT_S, Identity, Plan, Report
from benches.compare import load, machine
from benches.open_loop import Address, Sent
from benches.servers import CHECKOUT, Running

OPEN: Final = {"readRoles": ["public"], "writeRoles": ["public"]}
OWN: Final = {"readRoles": ["self"], "writeRoles": ["self"]}
COLLECTIONS: Final = (
    {"name": "notes", "storagePath": "notes/{id}", **OPEN, "maxBodyBytes": 65_536},
    {"name": "private", "storagePath": "users/{identity}/{id}", **OWN, "maxBodyBytes": 65_536},
    {"name": "big", "storagePath": "big/{id}", **OPEN, "maxBodyBytes": 5_000_000},
)
CHANGES: Final = 90_000
GOOD_S: Final = 1.0
"""A good request counts when it is answered within this."""
CALM_S: Final = 1.0
AGAIN_S: Final = 0.1
"""The good are served again when they are answered within this for RECOVERED_S."""
BUCKET_S, RECOVERED_S = 0.1, 0.5
SIGNED: Final = 200
"""Requests that are made to see how long it takes to make all."""
SPAWN_S: Final = 2.0
ATTEMPTS: Final = 3
LAG_MS: Final = 20.0
BUSY: Final = 0.95
"""A generator that is later than this, or busier, is the one that was measured."""


@dataclass(frozen=True, slots=True)
class Row:
    """An attack: the part of `attacks.py`, how much of it (times S, or connections), and the targets: the
    share of good requests or of S, and what else there is to reach."""

    name: str
    part: str
    amount: float
    share: float
    also: str
    lead_s: float = 0.0

    @property
    def is_rate(self) -> bool:
        """True if `amount` is times S."""
        return self.part in ("crowd", "junk", "forged", "proxied")


BOUNDED: Final = "RSS < 300 MB, < 100 MB after"
ROWS: Final = (
    Row("valid-2", "crowd", 2, 0.95, "p99 < 400 ms"),
    Row("valid-5", "crowd", 5, 0.90, "p99 < 400 ms"),
    Row("valid-10", "crowd", 10, 0.80, "p99 < 400 ms"),
    Row("junk-5", "junk", 5, 0.85, ""),
    Row("junk-5-proxied", "proxied", 5, 0.85, ""),
    Row("forged-1", "forged", 1, 0.80, ""),
    Row("forged-5", "forged", 5, 0.80, ""),
    Row("readers-500", "readers", 500, 0.90, BOUNDED),
    Row("readers-1500", "readers", 1_500, 0.90, BOUNDED),
    Row("bodies-60", "bodies", 60, 0.90, BOUNDED),
    Row("bodies-200", "bodies", 200, 0.90, BOUNDED),
    Row("batches-10", "batches", 10, 0.90, BOUNDED),
    Row("idle-2000", "idle", 2_000, 0.99, "p99 < 200 ms"),
    Row("slow-2000", "slow", 2_000, 0.99, "p99 < 200 ms"),
    Row("streams-5000", "streams", 5_000, 0.99, "p99 < 200 ms", lead_s=8.0),
    Row("resumes-100", "resumes", 100, 0.99, "worst < 100 ms"),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """How long an attack and what follows it last, S, and the share of the connections that are opened."""

    seconds: float = 8.0
    recover_s: float = 10.0
    rate: float = 3_000.0
    scale: float = 1.0
    checkout: Path = CHECKOUT


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a row showed. `share` is of good requests that were answered within a second, in a row of valid
    ones that of S that was answered. `p99_ms` is of the answers, `worst_ms` of all good requests: the time
    after which their clients hang up where there was no answer. `health_ms` and `admin_ms` are the worst
    `/health`, `recovery_s` how long good ones took longer than 100 ms after the attack, None where it was not
    over. `refused` counts good requests that had no 200, `tally` what attackers were answered."""

    row: str
    share: float
    p50_ms: float
    p99_ms: float
    worst_ms: float
    refused: dict[str, int]
    health_ms: float
    admin_ms: float | None
    before_mb: float
    peak_mb: float
    after_mb: float
    recovery_s: float | None
    tally: dict[str, int]
    lag_ms: float
    held: int
    busy: float

    @property
    def is_limited(self) -> bool:
        """True if the generator was late, had no connection left, or no time."""
        return self.lag_ms > LAG_MS or self.busy > BUSY or self.held > 0


class NotReadyError(Exception):
    """The requests were not made when the first of them was due."""


def measure(row: Row, settings: Settings) -> Outcome:
    """Measure a row on a server of its own. Raises RuntimeError where the generator fails, or never is
    ready."""
    for attempt in range(ATTEMPTS):
        with suppress(NotReadyError), servers.fresh_folder() as folder:
            return _attempt(row, settings, folder, 1.5 * 2**attempt)
    raise RuntimeError(f"{row.name}: its requests cannot be made in time")


def _attempt(row: Row, settings: Settings, folder: Path, margin: float) -> Outcome:
    places: list[str] = []
    if row.part == "resumes":
        places = asyncio.run(streams.filled(folder, max(500, int(CHANGES * settings.scale))))
    config, admin = _configuration(row, folder.parent, settings.checkout)
    cores = sorted(os.sched_getaffinity(0))
    with servers.serving(folder, cores[0], config=config, checkout=settings.checkout) as server:
        calm_s = CALM_S + row.lead_s * settings.scale
        plan = Plan(
            server=_address(server),
            admin=admin,
            good=[Identity() for _ in attacks.GOOD],
            crowd=[Identity() for _ in attacks.CROWD] if row.part == "crowd" else [],
            rate=settings.rate,
            amount=row.amount if row.is_rate else max(1, round(row.amount * settings.scale)),
            start=0.0,
            calm_s=calm_s,
            seconds=settings.seconds,
            recover_s=settings.recover_s,
            lead_s=row.lead_s * settings.scale,
            core=cores[-1],
            places=places,
        )
        _store(server, plan)
        made = settings.rate * (row.amount * settings.seconds if row.is_rate else 0.0)
        made = max(made, settings.rate * attacks.GOOD_RATE * plan.all_s)
        took_s = SPAWN_S + made * _sign_s(plan)
        start = time.perf_counter() + margin * took_s
        return _run(row, dataclasses.replace(plan, start=start), server)


def _run(row: Row, plan: Plan, server: Running) -> Outcome:
    parts = ("health", row.part) if row.part == "proxied" else ("good", row.part)
    with _generator(parts, plan) as pipes:
        for pipe in pipes:
            if not pipe.poll(max(0.0, plan.start - time.perf_counter() - 0.05)):
                raise NotReadyError
            pipe.recv()
        before_mb = server.memory().rss_mb
        _sleep_until(plan.attack_at - plan.lead_s)
        server.forget_peak()
        _sleep_until(plan.start + plan.all_s - 0.05)
        # Nothing is left to look at where the server has ended.
        peak_mb = after_mb = math.nan
        with suppress(OSError, ValueError):
            memory = server.memory()
            peak_mb, after_mb = memory.peak_mb, memory.rss_mb
        reports: list[Report] = []
        for pipe in pipes:
            if not pipe.poll(30.0):
                raise RuntimeError(f"{row.name}: the generator does not end")
            reports.append(pipe.recv())
    return _outcome(row, plan, reports, (before_mb, peak_mb, after_mb))


@contextmanager
def _generator(parts: Sequence[str], plan: Plan) -> Iterator[list[Connection]]:
    """A process for each part, and the pipe from it. Ended, whatever happens."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for part in parts:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=attacks.generate, args=(part, plan, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        yield pipes
    except EOFError:
        raise RuntimeError(f"a process of the generator has ended: {parts}") from None
    finally:
        for process in processes:
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        for pipe in pipes:
            pipe.close()


def _outcome(row: Row, plan: Plan, reports: Sequence[Report], mb: tuple[float, float, float]) -> Outcome:
    sent = {name: found for report in reports for name, found in report.sent.items()}
    good = sent["good"]
    ends = plan.calm_s + plan.seconds
    during = [n for n in _of_kind(good, 0) if plan.calm_s <= good.due_s[n] < ends]
    answered = [good.took_s[n] for n in during if good.statuses[n] == 200]
    refused: dict[str, int] = {}
    for n in during:
        if good.statuses[n] != 200:
            name = str(good.statuses[n] or "none")
            refused[name] = refused.get(name, 0) + 1
    worst_s = LIMIT_S if "none" in refused else max(answered, default=LIMIT_S)
    if row.part == "crowd":
        crowd = sent["flood"]
        answered += [took for took, status in zip(crowd.took_s, crowd.statuses, strict=True) if status == 200]
        share = len(answered) / plan.seconds / plan.rate
    else:
        share = sum(took <= GOOD_S for took in answered) / max(1, len(during))
    answered.sort()
    lags = sorted(lag for found in sent.values() for lag in found.lag_s)
    tally: dict[str, int] = {}
    for report in reports:
        for name, count in report.tally.items():
            tally[name] = tally.get(name, 0) + count
    if row.part == "proxied":
        for n in _of_kind(good, 1):
            name = str(good.statuses[n] or "none")
            tally[name] = tally.get(name, 0) + 1
    return Outcome(
        row=row.name,
        share=share,
        p50_ms=_quantile(answered, 0.5) * 1e3,
        p99_ms=_quantile(answered, 0.99) * 1e3,
        worst_ms=worst_s * 1e3,
        refused=refused,
        health_ms=_worst_health(sent["health"], plan) * 1e3,
        admin_ms=_worst_health(sent["admin"], plan) * 1e3 if "admin" in sent else None,
        before_mb=mb[0],
        peak_mb=mb[1],
        after_mb=mb[2],
        recovery_s=_recovery(good, ends, plan.all_s),
        tally=tally,
        lag_ms=_quantile(lags, 0.99) * 1e3,
        held=sum(found.held for name, found in sent.items() if row.part != "proxied" or name != "good"),
        busy=sum(report.busy for report in reports),
    )


def _of_kind(sent: Sent, kind: int) -> list[int]:
    return [n for n, found in enumerate(sent.kinds) if found == kind]


def _worst_health(sent: Sent, plan: Plan) -> float:
    """The longest that a probe took that was due during the attack, in seconds."""
    during = [
        took if status else HEALTH_LIMIT_S
        for due, took, status in zip(sent.due_s, sent.took_s, sent.statuses, strict=True)
        if plan.calm_s <= due < plan.calm_s + plan.seconds
    ]
    return max(during, default=0.0)


def _recovery(good: Sent, ends: float, all_s: float) -> float | None:
    """Seconds from the end of the attack until good requests are answered in time, for a while."""
    buckets = [[0, 0] for _ in range(max(1, round((all_s - ends) / BUCKET_S)))]
    for n in _of_kind(good, 0):
        number = int((good.due_s[n] - ends) / BUCKET_S)
        if good.due_s[n] >= ends and number < len(buckets):
            buckets[number][0] += 1
            buckets[number][1] += good.statuses[n] == 200 and good.took_s[n] <= AGAIN_S
    calm = [right >= 0.99 * due for due, right in buckets]
    while_ = min(len(calm), round(RECOVERED_S / BUCKET_S))
    found = (n for n in range(len(calm) - while_ + 1) if all(calm[n : n + while_]))
    first = next(found, None)
    return None if first is None else first * BUCKET_S


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def _sign_s(plan: Plan) -> float:
    """What it takes to make one request, on a machine that may be busy."""
    began = time.perf_counter()
    for _ in range(SIGNED):
        plan.good[0].pull(plan.server, 0.0)
    return (time.perf_counter() - began) / SIGNED


def _store(server: Running, plan: Plan) -> None:
    with rejections.Connection(server.url) as connection:
        for push in attacks.stored(plan):
            if (status := connection.ask(push)) != 200:
                raise RuntimeError(f"{push[:60]!r} is answered {status}")


def _configuration(row: Row, folder: Path, checkout: Path) -> tuple[Path, Address | None]:
    """Write the configuration; the address of the operators' listener if that version has one."""
    schema = json.loads((checkout / "pysync/config/pysync.schema.json").read_text())
    server: dict[str, Any] = {"trustedProxyHops": 1} if row.part == "proxied" else {}
    admin = None
    if "admin" in schema["definitions"]["Server"]["properties"]:
        admin = ("127.0.0.1", servers.free_port())
        server["admin"] = {"host": admin[0], "port": admin[1]}
    path = folder / "overload.json"
    path.write_text(json.dumps({"version": 1, "collections": COLLECTIONS, "server": server}))
    return path, admin


def _address(server: Running) -> Address:
    url = urlsplit(server.url)
    return str(url.hostname), int(url.port or 80)


def _sleep_until(when: float) -> None:
    time.sleep(max(0.0, when - time.perf_counter()))


def table(outcomes: Mapping[str, Outcome], rows: Sequence[Row] = ROWS) -> str:
    """The Markdown table of rows that were measured, beside their targets."""
    lines = [
        "| row | good (target) | also | p50 / p99 of 200s, worst, ms "
        "| /health, operators' (target 500, 50), ms | RSS before, peak, after, MB "
        "| recovery, s (target 2) | answers to attackers | generator |",
        "|---|---:|---|---:|---:|---:|---:|---|---|",
    ]
    for row in rows:
        if row.name not in outcomes:
            continue
        found = outcomes[row.name]
        admin = "-" if found.admin_ms is None else f"{found.admin_ms:,.0f}"
        recovery = "not over" if found.recovery_s is None else f"{found.recovery_s:.1f}"
        tally = " ".join(f"{name}:{count:,}" for name, count in sorted(found.tally.items()))
        refused = " ".join(f"{name}:{count:,}" for name, count in sorted(found.refused.items()))
        limits = " **it limits**" if found.is_limited else ""
        good = f"{found.share:.0%} ({row.share:.0%}) {refused}".rstrip()
        lines.append(
            f"| {row.name} | {good} | {row.also} "
            f"| {found.p50_ms:,.0f} / {found.p99_ms:,.0f}, {found.worst_ms:,.0f} "
            f"| {found.health_ms:,.0f}, {admin} "
            f"| {found.before_mb:,.0f}, {found.peak_mb:,.0f}, {found.after_mb:,.0f} | {recovery} | {tally} "
            f"| {found.busy:.0%}, late {found.lag_ms:.1f} ms, held {found.held:,}{limits} |"
        )
    return "\n".join(lines)


def saturation(checkout: Path) -> float:
    """Signed pulls that the server answers in a second, as `benches/load.py` asks for them."""
    core = sorted(os.sched_getaffinity(0))[0]
    with servers.fresh_folder() as folder, servers.serving(folder, core, checkout=checkout) as server:
        return load(server, "signed-pull", 4.0).per_second


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python benches/overload.py", description=(__doc__ or "").split("\n")[0]
    )
    names = [row.name for row in ROWS]
    parser.add_argument(
        "--rows", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="how long an attack lasts")
    parser.add_argument("--recover", type=float, default=10.0, help="how long good clients go on after it")
    parser.add_argument("--rate", type=float, help="S, requests a second (default: measured)")
    parser.add_argument("--checkout", type=Path, default=CHECKOUT, help="a built clone that serves")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every outcome there")
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the server inherits it
    checkout = options.checkout.resolve()
    rate = options.rate or saturation(checkout)
    settings = Settings(options.seconds, options.recover, rate, checkout=checkout)
    outcomes: dict[str, Outcome] = {}
    for row in ROWS:
        if row.name in options.rows:
            print(row.name, file=sys.stderr, flush=True)
            try:
                outcomes[row.name] = measure(row, settings)
            except (RuntimeError, OSError) as error:
                print(f"{row.name} is not measured: {error}", file=sys.stderr, flush=True)
            if options.json:
                found = {name: dataclasses.asdict(outcome) for name, outcome in outcomes.items()}
                report = {"machine": machine(), "rate": rate, "seconds": settings.seconds, "rows": found}
                options.json.write_text(json.dumps(report, indent=1))
    print(f"{machine()}; S is {rate:,.0f} signed pulls a second; attacks of {settings.seconds:g} s.\n")
    print(table(outcomes))


if __name__ == "__main__":
    main()
