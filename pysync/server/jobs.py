"""The background jobs of a process."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from pysync.concurrency import Job, every
from pysync.erase import Eraser
from pysync.migrate import Damage
from pysync.quotas.recount import Tracked
from pysync.server.compose import Process
from pysync.server.configured import ConfiguredService
from pysync.server.process.background import (
    HistorySweeper,
    OutboxRelay,
    Scrubber,
    TtlSweeper,
    resume_erasure,
)
from pysync.server.process.readiness import PROBE_EVERY_S, CoordinatorMonitor
from pysync.server.process.watchdog import observe_delays

log = logging.getLogger("pysync.server")

COUNT_EVERY_S: Final = 5.0
"""Seconds between two checks whether something stored is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """The background jobs of a process: all of them, and those that can also be run by hand."""

    all: Sequence[Job]
    ttl_sweeper: TtlSweeper
    history_sweeper: HistorySweeper
    scrubber: Scrubber | None
    erasure: Job

    def use(self, current: ConfiguredService) -> None:
        """Go on with another configuration."""
        self.ttl_sweeper.use(current.routes)
        self.history_sweeper.use(current.config, current.owners)
        if self.scrubber is not None:
            self.scrubber.config = current.config.scrub


def build_jobs(process: Process, current: ConfiguredService, eraser: Eraser, tracked: Tracked | None) -> Jobs:
    """Return the background jobs of a process, which are not started. Those that one process of a machine
    does for all are among them if the engine sweeps."""
    config, engine, clock, counters = current.config, process.engine, process.clock, process.counters
    store, coordinator = engine.store, engine.coordinator
    report_debt = partial(counters.set_gauge, "pysync_sweep_debt_seconds")
    ttl_sweeper = TtlSweeper(store, engine.documents, engine.logs, clock, report_debt)
    history_sweeper = HistorySweeper(store, engine.documents.history, clock)
    monitor = CoordinatorMonitor(coordinator.diagnose, process.readiness, counters.gauges)
    erasure = Job(partial(resume_erasure, eraser))
    jobs = [
        Job(OutboxRelay(engine.outbox, sweeps=engine.sweeps).run),
        Job(partial(observe_delays, counters.observe)),
        _periodic(PROBE_EVERY_S, monitor.check, "cannot query the coordinator"),
    ]
    if engine.sweeps:
        jobs += [
            Job(ttl_sweeper.run),
            Job(history_sweeper.run),
            Job(process.revocations.delete_expired_periodically),
            erasure,
        ]
    counter = None if tracked is None else tracked.counter
    if counter is not None and (engine.sweeps or store.transactional is None):
        jobs.append(_periodic(COUNT_EVERY_S, counter.run_if_needed, "failed to count what is stored"))
    repair = None
    if config.backup is not None and config.store.url != "memory:":
        from pysync.server.process import backup_process  # most services do without

        repair = partial(backup_process.repair_from, config.backup, store)
        backup = backup_process.of_config(config.store, config.backup, coordinator, counters, clock)
        jobs.append(Job(backup.run))
    scrubber: Scrubber | None = None
    if config.store.url != "memory:":

        def report(damage: Damage) -> None:
            engine.corruption.report(damage.kind, damage.key, damage.why, "scrub")

        scrubber = Scrubber(
            store, coordinator, config.scrub, report, clock, repair=repair, set_gauge=counters.set_gauge
        )
        jobs.append(Job(scrubber.run))
    return Jobs(
        all=jobs,
        ttl_sweeper=ttl_sweeper,
        history_sweeper=history_sweeper,
        scrubber=scrubber,
        erasure=erasure,
    )


def _periodic(seconds: float, work: Callable[[], Awaitable[object]], failed: str) -> Job:
    return Job(partial(every, seconds, work, failed, log))
