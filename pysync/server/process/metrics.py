"""The metrics of a process, counted in plain Python. `exposition` renders them for Prometheus.

Metrics are monotonic across workers. Each worker persists its counters in a file, in a folder that the
workers of a service share, every second and before it answers `/metrics`, which reports the sum over all
workers. A worker that replaces another continues from its file. A scrape therefore never sees a counter
decrease.

A labelled counter and histogram of prometheus_client cost a small request about a tenth of its time; a dict
costs next to nothing.
"""

import asyncio
import logging
import os
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import orjson

from pysync.concurrency import every

BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
PUBLISH_EVERY_S: Final = 1.0
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

log = logging.getLogger("pysync.server")


class Counters:
    """The counters of a process. `statuses` counts responses by action, collection and status, labels that
    the configuration bounds. `durations` counts them by action and bucket of time, `seconds` is the sum of
    their times by action. `counts` has all other counters, by the metric's name and the values of its labels.
    `gauges` has what is held now, by the metric's name, and `lags_s` the lag of each worker of projections,
    by its name: of these a service has the largest."""

    def __init__(self) -> None:
        self.statuses: Counter[tuple[str, str, int]] = Counter()
        self.durations: dict[str, list[int]] = {}
        self.seconds: dict[str, float] = {}
        self.counts: Counter[tuple[str, ...]] = Counter()
        self.gauges: Counter[str] = Counter()
        self.lags_s: dict[str, int] = {}

    def copy(self) -> "Counters":
        """Return a copy of the counts. Any thread may call it: the event loop goes on counting meanwhile, so
        one step of the interpreter copies each dict."""
        copied = Counters()
        copied.statuses.update(self.statuses)
        copied.counts.update(self.counts)
        copied.gauges.update(self.gauges)
        copied.lags_s.update(self.lags_s)
        copied.durations = {action: list(counts) for action, counts in dict(self.durations).items()}
        seconds = dict(self.seconds)
        copied.seconds = {action: seconds.get(action, 0.0) for action in copied.durations}
        return copied

    def count(self, metric: str, *labels: str, by: int = 1) -> None:
        """Add `by` to a metric of `COUNTERS`, with the values of its labels."""
        self.counts[metric, *labels] += by

    def set_lag(self, name: str, lag_s: int) -> None:
        """Set the lag of one worker of projections."""
        self.lags_s[name] = lag_s

    def gauge(self, metric: str) -> int:
        """Return the value of a metric of `GAUGES`."""
        if metric == COORDINATOR_UP:
            return int(not self.gauges[COORDINATOR_DOWN])
        return max(self.lags_s.values(), default=0) if metric == PROJECTION_LAG else self.gauges[metric]

    def add(self, other: "Counters") -> None:
        """Add the counts of `other`."""
        self.counts.update(other.counts)
        self.statuses.update(other.statuses)
        for action, counts in other.durations.items():
            own = self.durations.get(action, [0] * len(counts))
            self.durations[action] = [mine + theirs for mine, theirs in zip(own, counts, strict=True)]
            self.seconds[action] = self.seconds.get(action, 0.0) + other.seconds[action]
        self.gauges.update(other.gauges)
        for name, lag_s in other.lags_s.items():
            self.lags_s[name] = max(lag_s, self.lags_s.get(name, 0))

    def encode(self) -> bytes:
        """Return the counts as text for `decode`."""
        statuses = [[*key, count] for key, count in self.statuses.items()]
        counts = [[*key, count] for key, count in self.counts.items()]
        return orjson.dumps([statuses, self.durations, self.seconds, counts, self.gauges, self.lags_s])

    @classmethod
    def decode(cls, text: bytes) -> "Counters":
        """Return the counts that `encode` wrote."""
        counters = cls()
        statuses, counters.durations, counters.seconds, counts, gauges, counters.lags_s = orjson.loads(text)
        counters.statuses.update({tuple(key): count for *key, count in statuses})
        counters.counts.update({tuple(key): count for *key, count in counts})
        counters.gauges.update(gauges)
        return counters


class MultiprocessCounters:
    """The counters of one worker, `own`, and the file, named by its `number`, in which the other workers find
    them. Any thread may call `total` and `publish`."""

    def __init__(self, own: Counters, folder: Path, number: int) -> None:
        """Continue from the counts of an earlier worker with that number. Needs a running loop."""
        self._own = own
        self._folder = folder
        self._file = folder / str(number)
        self._earlier = _read(self._file)
        self._earlier.gauges.clear()  # what it held ended with it
        self._earlier.lags_s.clear()
        self._published = b""
        self._lock = threading.Lock()
        periodically = every(PUBLISH_EVERY_S, self._publish_in_loop, "failed to write metrics", log)
        self._task = asyncio.create_task(periodically)

    def total(self) -> Counters:
        """Return the sum of the counts of all workers, including those that have ended."""
        self.publish()
        total = Counters()
        for file in self._folder.glob("[0-9]*"):
            total.add(_read(file))
        return total

    def publish(self) -> None:
        """Write the counts if they have changed or the file is gone, because temporary folders are cleaned up
        after days without changes. If the disk fails, the other workers only miss this worker's latest
        counts."""
        with self._lock:
            self._write_file()

    def _write_file(self) -> None:
        counters = self._own.copy()
        counters.add(self._earlier)
        text = counters.encode()
        if text == self._published and self._file.exists():
            return
        if _write(self._file, text):
            self._published = text

    def close(self) -> None:
        """Write the last counts."""
        self._task.cancel()
        self.publish()

    async def _publish_in_loop(self) -> None:
        self.publish()


class SupervisorCounters(Counters):
    """The counters of the parent of all workers, in a file of the same folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._file = folder / "0"

    def count(self, metric: str, *labels: str, by: int = 1) -> None:
        """See `Counters.count`. The counts are written at once."""
        super().count(metric, *labels, by=by)
        _write(self._file, self.encode())


def _write(file: Path, text: bytes) -> bool:
    """Replace the file. Returns False, and logs why, if that fails."""
    temporary = file.with_name(f".{file.name}")
    try:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        temporary.touch(0o600)
        temporary.write_bytes(text)
        os.replace(temporary, file)
    except OSError as error:
        log.warning("failed to write metrics: %s", error)
        return False
    return True


def _read(file: Path) -> Counters:
    try:
        return Counters.decode(file.read_bytes())
    except FileNotFoundError:
        return Counters()


COUNTERS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "pysync_backup_bytes": ("Bytes that the service wrote to its backup.", ()),
    "pysync_backup_failures": ("Backups of the service that failed.", ()),
    "pysync_bytes_rejections": ("Requests rejected because too many bytes were in flight.", ()),
    "pysync_slow_transfers_ended": ("Slow bodies and responses that were ended to make room.", ()),
    "pysync_corrupt_objects": (
        "Corrupt stored objects, each time that one was met.",
        ("kind", "found_by"),
    ),
    "pysync_events": ("Events sent on change streams.", ("collection",)),
    "pysync_overload_refusals": ("Requests that waited too long for their turn.", ()),
    "pysync_rejected_connections": ("Connections ended because too many were open.", ()),
    "pysync_rejected_streams": ("Change streams refused because too many were open.", ("limit",)),
    "pysync_aborted_streams": ("Change streams aborted because their clients did not read.", ("reason",)),
    "pysync_plugin_failures": ("Hooks of plugins that failed, or took too long.", ("plugin", "hook")),
    "pysync_plugin_rejections": (
        "Requests refused because too many hooks of a plugin were running.",
        ("plugin",),
    ),
    "pysync_projection_unawaited": (
        "Pushes answered before lists contained them: too many waited, or for too long.",
        (),
    ),
    "pysync_projection_folds": ("Times that writes were folded into a list.", ("projection",)),
    "pysync_projection_puts": ("Lists written.", ("projection",)),
    "pysync_projection_drops": (
        "Entries for which a list was full, and changes of contested lists.",
        ("projection",),
    ),
    "pysync_projection_failures": ("Sources, lists and functions that failed.", ("projection",)),
    "pysync_worker_replacements": ("Workers that were replaced.", ("reason",)),
    "pysync_write_timeouts": ("Writes that were not acknowledged in time.", ()),
}
"""The metrics that `Counters.count` counts, by name without `_total`: the help text and the label names."""

PROJECTION_LAG: Final = "pysync_projection_lag_seconds"
COORDINATOR_UP: Final = "pysync_coordinator_up"
COORDINATOR_DOWN: Final = "coordinator_down"
"""A gauge that is added up over workers: the number of those that do not reach the coordinator."""
GAUGES: Final[Mapping[str, str]] = {
    "pysync_backup_lag_seconds": "Age of the newest moment that the backup of the service has; 0: none.",
    "pysync_backup_last_success_timestamp_seconds": "Time of that moment; 0 if there is none.",
    "pysync_backup_unreadable_objects": "Objects of the newest snapshot that could not be read.",
    "pysync_connections": "Open connections.",
    COORDINATOR_UP: "1 if the coordinator can be reached, 0 if not.",
    "pysync_bytes_in_flight": "Bytes of request bodies and responses that are held.",
    "pysync_streams": "Open change streams.",
    PROJECTION_LAG: "Age of the oldest writes that projections fold; 0 if all are folded.",
    "pysync_stream_unread_bytes": "Bytes that wait in change streams whose clients do not read.",
}
"""The metrics that `Counters.gauge` returns, with their help texts."""
