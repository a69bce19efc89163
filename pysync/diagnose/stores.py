"""Opens and uses the store and the coordinator."""

import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Final

from pysync.concurrency import closing
from pysync.config import Config, Problem, StoreConfig
from pysync.coordinator import open_coordinator
from pysync.diagnose.report import Report
from pysync.errors import Unavailable
from pysync.sqlite.database_file import quick_check
from pysync.store import open_store

SAMPLES: Final = 10
"""Number of times that each operation is timed."""
BODY: Final = b'{"probe":"%b"}' % (b"x" * 1024)
PROBE_PREFIX: Final = "_pysync/probe"
"""Key prefix of the temporary object that is written."""

Timer = Callable[[], float]


async def probe_stores(config: Config, findings: Report, timer: Timer = time.perf_counter) -> None:
    """Open the store and the coordinator, time a few operations on each, and add the findings. Nothing that
    the first start would create is created, and nothing is left behind."""
    databases = dict(config.database_paths)
    kind, _, folder = config.store.url.partition(":")
    folder = folder if kind == "file" else ""
    findings.rows.append(("store", config.store.url))
    _check_database("store", databases, findings)
    if not folder or _check_folder("store", Path(folder), "pysync.db", findings):
        await _report_failures(
            "store", _probe_store(config.store, config.is_multi_process, findings, timer), findings
        )
    url = config.effective_coordinator
    kind, _, own_folder = url.partition(":")
    findings.rows.append(("coordinator", config.redacted_coordinator))
    _check_database("coordinator", databases, findings)
    if kind != "file" or _check_folder("coordinator", Path(own_folder or folder), "coordinator.db", findings):
        await _report_failures(
            "coordinator", _probe_coordinator(url, folder or None, findings, timer), findings
        )


def _check_database(of: str, databases: dict[str, Path], report: Report) -> None:
    """Run the quick check of SQLite on a database that exists."""
    path = databases.get(of)
    if path is not None and path.exists():
        found = quick_check(path)
        report.rows.append((f"{of} quick_check", "nothing found" if found is None else "damage found"))
        if found is not None:
            report.problems.append(Problem(of, found))


async def _probe_store(config: StoreConfig, shared: bool, report: Report, timer: Timer) -> None:
    async with closing(open_store(config, shared=shared)) as store:
        diagnosis = await store.diagnose()
        ignored = " and ".join(diagnosis.ignored_conditions)
        report.rows.append(("store conditions", f"{ignored} ignored" if ignored else "honoured"))
        if ignored:
            report.warnings.append(Problem("store", f"{ignored} ignored: one process alone may serve it"))
        report.add_clock_skew("store", diagnosis.skew_ms)
        key = f"{PROBE_PREFIX}/{os.urandom(8).hex()}"
        try:
            report.add_timing("store put", await _measure(timer, lambda: store.put(key, BODY)))
            report.add_timing("store get", await _measure(timer, lambda: store.get(key)))
        finally:
            await store.delete(key)


async def _probe_coordinator(url: str, folder: str | None, report: Report, timer: Timer) -> None:
    async with closing(open_coordinator(url, folder)) as coordinator:

        async def claim() -> None:
            await coordinator.put_if_absent(f"probe {os.urandom(8).hex()}", b"", ttl_ms=1_000)

        report.add_timing("coordinator claim", await _measure(timer, claim))
        report.add_clock_skew("coordinator", (await coordinator.diagnose()).skew_ms)


def _check_folder(what: str, folder: Path, database: str, report: Report) -> bool:
    """Return True if a folder contains its database; add a problem if it cannot be created either."""
    if (folder / database).exists():
        return True
    report.rows.append((what, "does not exist yet: the first start creates it"))
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not parent.is_dir():
        report.problems.append(Problem(what, f"{parent} is not a folder"))
    elif not os.access(parent, os.W_OK | os.X_OK):
        report.problems.append(Problem(what, f"{parent} is not writable"))
    return False


async def _report_failures(what: str, check: Coroutine[None, None, None], report: Report) -> None:
    """Await a check, and add a problem if it fails."""
    try:
        await check
    except (ValueError, Unavailable) as error:
        why = error.detail if isinstance(error, Unavailable) else str(error)
        report.problems.append(Problem(what, why.removeprefix(f"{what}: ")))


async def _measure(timer: Timer, operation: Callable[[], Awaitable[object]]) -> list[float]:
    """Return the duration of each of several runs, in seconds."""
    took = []
    for _ in range(SAMPLES):
        begun = timer()
        await operation()
        took.append(timer() - begun)
    return took
