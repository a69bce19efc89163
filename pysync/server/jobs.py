"""The background jobs of a process."""

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from pysync.concurrency import Job, every
from pysync.erase import Eraser
from pysync.migrate import Damage
from pysync.quotas.recount import UsageCounter
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

log = logging.getLogger("pysync.server")

COUNT_EVERY_S: Final = 5.0
"""Seconds between two checks whether something stored is not counted."""


class Jobs:
    """The background jobs of a process: `all` of them, which are not started, and those that can also be run
    by hand. Those that one process of a machine does for all are among them if the engine sweeps."""

    def __init__(
        self, process: Process, current: ConfiguredService, eraser: Eraser, counter: UsageCounter | None
    ) -> None:
        config, engine, clock, counters = current.config, process.engine, process.clock, process.counters
        store, coordinator = engine.store, engine.coordinator
        report_debt = partial(counters.set_gauge, "pysync_sweep_debt_seconds")
        self.ttl_sweeper: Final = TtlSweeper(store, engine.documents, engine.logs, clock, report_debt)
        self.history_sweeper: Final = HistorySweeper(store, engine.documents.history, clock)
        self.erasure: Final = Job(partial(resume_erasure, eraser))
        monitor = CoordinatorMonitor(coordinator.diagnose, process.readiness, counters.gauges)
        self.all = [
            Job(OutboxRelay(engine.outbox, sweeps=engine.sweeps).run),
            Job(process.loop_monitor.run),
            _periodic(PROBE_EVERY_S, monitor.check, "cannot query the coordinator"),
        ]
        if engine.sweeps:
            self.all += [
                Job(self.ttl_sweeper.run),
                Job(self.history_sweeper.run),
                Job(process.revocations.delete_expired_periodically),
                self.erasure,
            ]
        if counter is not None and (engine.sweeps or store.transactional is None):
            self.all.append(_periodic(COUNT_EVERY_S, counter.run_if_needed, "failed to count what is stored"))
        self.scrubber: Scrubber | None = None
        if config.store.url == "memory:":
            return
        repair = None
        if config.backup is not None:
            from pysync.server.process import backup_process  # most services do without

            repair = partial(backup_process.repair_from, config.backup, store)
            backup = backup_process.of_config(config.store, config.backup, coordinator, counters, clock)
            self.all.append(Job(backup.run))

        def report(damage: Damage) -> None:
            engine.corruption.report(damage.kind, damage.key, damage.why, "scrub")

        self.scrubber = Scrubber(
            store, coordinator, config.scrub, report, clock, repair=repair, set_gauge=counters.set_gauge
        )
        self.all.append(Job(self.scrubber.run))

    def use(self, current: ConfiguredService) -> None:
        """Go on with another configuration."""
        self.ttl_sweeper.use(current.routes)
        self.history_sweeper.use(current.config, current.owners)
        if self.scrubber is not None:
            self.scrubber.config = current.config.scrub


def _periodic(seconds: float, work: Callable[[], Awaitable[object]], failed: str) -> Job:
    return Job(partial(every, seconds, work, failed, log))
