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
import resource
import shutil
import threading
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import orjson

from pysync.clock import wall_clock_ms
from pysync.concurrency import every

BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
GROUP_SIZES: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
PUBLISH_EVERY_S: Final = 1.0
RECENT: Final = 1_000
"""The refusals that a service remembers, and the reports of damage."""
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

log = logging.getLogger("pysync.server")


Happening = Literal["refusal", "damage"]


class Counters:
    """The counters of a process. `statuses` counts responses by action, collection and status, labels that
    the configuration bounds. `counts` has all other counters, by the metric's name and the values of its
    labels. `histograms` has the counts of the buckets of `HISTOGRAMS`, then the sum of all values. `gauges`
    has what is held now, by the metric's name: a service has the sum of its workers' values. Of those in
    `peaks`, by the metric's name and the values of its labels, it has the largest. `recent` has what happened
    last, with its times."""

    def __init__(self) -> None:
        self.statuses: Counter[tuple[str, str, int]] = Counter()
        self.counts: Counter[tuple[str, ...]] = Counter()
        self.histograms: dict[tuple[str, ...], list[float]] = {}
        self.gauges: Counter[str] = Counter()
        self.peaks: dict[tuple[str, ...], float] = {}
        self.recent: dict[Happening, deque[dict[str, Any]]] = {
            "refusal": deque(maxlen=RECENT),
            "damage": deque(maxlen=RECENT),
        }

    def copy(self) -> "Counters":
        """Return a copy of the counts. Any thread may call it: the event loop goes on counting meanwhile, so
        one step of the interpreter copies each dict."""
        copied = Counters()
        copied.statuses.update(self.statuses)
        copied.counts.update(self.counts)
        copied.gauges.update(self.gauges)
        copied.peaks.update(self.peaks)
        copied.histograms = {key: list(values) for key, values in dict(self.histograms).items()}
        copied.recent = {what: found.copy() for what, found in self.recent.items()}
        return copied

    def count(self, metric: str, *labels: str, by: int = 1) -> None:
        """Add `by` to a metric of `COUNTERS`, with the values of its labels."""
        self.counts[metric, *labels] += by

    def observe(self, metric: str, value: float, *labels: str) -> None:
        """Add a value to a metric of `HISTOGRAMS`, with the values of its labels."""
        bounds = HISTOGRAMS[metric].bounds
        values = self.histograms.get((metric, *labels))
        if values is None:
            values = self.histograms[metric, *labels] = [0] * (len(bounds) + 2)
        values[bisect_left(bounds, value)] += 1
        values[-1] += value

    def remember(self, what: Happening, /, **facts: str | int | None) -> None:
        """Remember what happened now. Its texts may come from clients."""
        shown = {
            name: value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
            for name, value in facts.items()
        }
        self.recent[what].append({"timestamp": wall_clock_ms(), **shown})

    def set_gauge(self, metric: str, value: float, *labels: str) -> None:
        """Set a metric of `GAUGES`, with the values of its labels, of which a service has the largest."""
        self.peaks[metric, *labels] = value

    def measure_process(self, worker: int) -> None:
        """Set the gauges of this process, which is the worker with this number."""
        descriptors = os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))  # 0: an old kernel
        self.set_gauge("pysync_resident_bytes", resident_bytes(), str(worker))
        self.set_gauge("pysync_descriptors", descriptors, str(worker))
        self.set_gauge(WORKER_PID, os.getpid(), str(worker))
        self.set_gauge("pysync_max_descriptors", resource.getrlimit(resource.RLIMIT_NOFILE)[0], str(worker))

    def gauge(self, metric: str) -> float:
        """Return the value of a metric of `GAUGES`: the largest, if it has labels."""
        if metric == COORDINATOR_UP:
            return int(not self.gauges[COORDINATOR_DOWN])
        values = [value for (name, *_), value in self.peaks.items() if name == metric]
        return max(values, default=self.gauges[metric])

    def add(self, other: "Counters") -> None:
        """Add the counts of `other`."""
        self.counts.update(other.counts)
        self.statuses.update(other.statuses)
        for key, values in other.histograms.items():
            own = self.histograms.get(key, [0] * len(values))
            self.histograms[key] = [mine + theirs for mine, theirs in zip(own, values, strict=True)]
        self.gauges.update(other.gauges)
        for peak, value in other.peaks.items():
            self.peaks[peak] = max(value, self.peaks.get(peak, value))
        for what, found in other.recent.items():
            merged = sorted([*self.recent[what], *found], key=itemgetter("timestamp"))
            self.recent[what] = deque(merged, RECENT)

    def encode(self) -> bytes:
        """Return the counts as text for `decode`."""
        parts = self.statuses, self.counts, self.histograms, self.peaks
        recent = {what: list(found) for what, found in self.recent.items()}
        return orjson.dumps([self.gauges, recent, *([[*item] for item in part.items()] for part in parts)])

    @classmethod
    def decode(cls, text: bytes) -> "Counters":
        """Return the counts that `encode` wrote."""
        counters = cls()
        gauges, recent, *parts = orjson.loads(text)
        counters.gauges.update(gauges)
        counters.recent = {what: deque(found, RECENT) for what, found in recent.items()}
        statuses, counts, histograms, peaks = ({tuple(key): value for key, value in part} for part in parts)
        counters.statuses.update(statuses)
        counters.counts.update(counts)
        counters.histograms, counters.peaks = histograms, peaks
        return counters


class MultiprocessCounters:
    """The counters of one worker, `own`, and the file, named by its `number`, in which the other workers find
    them. Any thread may call `total` and `publish`."""

    def __init__(self, own: Counters, folder: Path, number: int) -> None:
        """Continue from the counts of an earlier worker with that number. Needs a running loop."""
        self._own = own
        self._folder = folder
        self._number = number
        self._file = folder / str(number)
        self._earlier = _read(self._file)
        self._earlier.gauges.clear()  # what it held ended with it
        self._earlier.peaks.clear()
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
        """Write the counts. If the disk fails, the other workers only miss this worker's latest counts."""
        with self._lock:
            counters = self._own.copy()
            counters.measure_process(self._number)
            counters.add(self._earlier)
            _write(self._file, counters.encode())

    def close(self) -> None:
        """Write the last counts."""
        self._task.cancel()
        self.publish()

    async def _publish_in_loop(self) -> None:
        self.publish()


def snapshot(
    own: Counters, shared: MultiprocessCounters | None, store_url: str, is_ready: Callable[[], bool]
) -> Counters:
    """Return the counters of a service: those of its only process, or of all its workers if they are
    `shared`. Any thread may call it."""
    if shared is None:
        counters = own.copy()
        counters.measure_process(1)
    else:
        counters = shared.total()
    counters.set_gauge("pysync_ready", int(is_ready()))
    kind, _, folder = store_url.partition(":")
    if kind == "file":
        with suppress(OSError):
            counters.set_gauge("pysync_disk_free_bytes", shutil.disk_usage(folder).free, folder)
    return counters


class SupervisorCounters(Counters):
    """The counters of the parent of all workers, in a file of the same folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._file = folder / "0"

    def count(self, metric: str, *labels: str, by: int = 1) -> None:
        """See `Counters.count`. The counts are written at once."""
        super().count(metric, *labels, by=by)
        _write(self._file, self.encode())


def _write(file: Path, text: bytes) -> None:
    """Replace the file. Logs why, if that fails."""
    temporary = file.with_name(f".{file.name}")
    try:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        temporary.touch(0o600)
        temporary.write_bytes(text)
        os.replace(temporary, file)
    except OSError as error:
        log.warning("failed to write metrics: %s", error)


def _read(file: Path) -> Counters:
    try:
        return Counters.decode(file.read_bytes())
    except FileNotFoundError:
        return Counters()


def resident_bytes() -> int:
    """Return the memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


COUNTERS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "pysync_backup_bytes": ("Bytes that the service wrote to its backup.", ()),
    "pysync_backup_failures": ("Backups of the service that failed.", ()),
    "pysync_bytes_rejections": ("Requests rejected because too many bytes were in flight.", ()),
    "pysync_slow_transfers_ended": ("Slow bodies and responses that were ended to make room.", ()),
    "pysync_corrupt_objects": ("Corrupt stored objects, each time that one was met.", ("kind", "found_by")),
    "pysync_events": ("Events sent on change streams.", ("collection",)),
    "pysync_overload_refusals": ("Requests that waited too long for their turn.", ()),
    "pysync_rejected_connections": ("Connections ended because too many were open.", ()),
    "pysync_rejected_streams": ("Change streams refused because too many were open.", ("limit",)),
    "pysync_aborted_streams": ("Change streams aborted because their clients did not read.", ("reason",)),
    "pysync_plugin_failures": ("Hooks of plugins that failed, or took too long.", ("plugin", "hook")),
    "pysync_plugin_rejections": ("Requests refused: too many hooks of a plugin were running.", ("plugin",)),
    "pysync_projection_unawaited": ("Pushes answered before lists contained them.", ()),
    "pysync_projection_folds": ("Times that writes were folded into a list.", ("projection",)),
    "pysync_projection_puts": ("Lists written.", ("projection",)),
    "pysync_projection_drops": ("Entries of full lists, and changes of contested ones.", ("projection",)),
    "pysync_projection_failures": ("Sources, lists and functions that failed.", ("projection",)),
    "pysync_refusals": ("Requests that were answered with an error.", ("collection", "reason")),
    "pysync_stream_resets": ("Resets sent on change streams, whose clients read everything again.", ()),
    "pysync_webhook_deliveries": ("Requests that a webhook's receiver accepted.", ("webhook",)),
    "pysync_webhook_failures": ("Attempts to deliver to a webhook that failed.", ("webhook",)),
    "pysync_worker_replacements": ("Workers that were replaced.", ("reason",)),
    "pysync_write_timeouts": ("Writes that were not acknowledged in time.", ()),
}
"""The metrics that `Counters.count` counts, by name without `_total`: the help text and the label names."""


class Histogram(NamedTuple):
    """A metric that `Counters.observe` adds to: its help text, its labels, and the upper bounds of its
    buckets."""

    meaning: str
    labels: tuple[str, ...] = ()
    bounds: Sequence[float] = BUCKETS_S


REQUEST_SECONDS: Final = "pysync_request_seconds"
HISTOGRAMS: Final[Mapping[str, Histogram]] = {
    REQUEST_SECONDS: Histogram("Time from a request's head to its answer.", ("action",)),
    "pysync_store_seconds": Histogram("Time that the store took.", ("operation",)),
    "pysync_coordinator_seconds": Histogram("Time that the coordinator took.", ("operation",)),
    "pysync_commit_writes": Histogram("Writes that a commit made durable.", ("database",), GROUP_SIZES),
    "pysync_event_loop_delay_seconds": Histogram("How late the event loop ran a timer."),
    "pysync_stream_lag_seconds": Histogram("Age of the oldest change of those delivered together."),
}
COORDINATOR_UP: Final = "pysync_coordinator_up"
COORDINATOR_DOWN: Final = "coordinator_down"
"""A gauge that is added up over workers: the number of those that do not reach the coordinator."""
WORKER_PID: Final = "worker_pid"
"""A gauge that is not shown: the process id of each worker, by its number."""
GAUGES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "pysync_backup_lag_seconds": ("Age of the newest moment that the backup has; 0: none.", ()),
    "pysync_backup_last_success_timestamp_seconds": ("Time of that moment; 0 if there is none.", ()),
    "pysync_backup_unreadable_objects": ("Objects of the newest snapshot that could not be read.", ()),
    "pysync_connections": ("Open connections.", ()),
    COORDINATOR_UP: ("1 if the coordinator can be reached, 0 if not.", ()),
    "pysync_bytes_in_flight": ("Bytes of request bodies and responses that are held.", ()),
    "pysync_descriptors": ("Open files and connections of a process.", ("worker",)),
    "pysync_max_descriptors": ("The number of those that it may have.", ("worker",)),
    "pysync_disk_free_bytes": ("Space that is left on the disk of the store.", ("folder",)),
    "pysync_ready": ("1 if the process that answers could serve requests, 0 if not.", ()),
    "pysync_resident_bytes": ("Memory of a process.", ("worker",)),
    "pysync_scrub_timestamp_seconds": ("Time when the last scrub ended; 0 if there was none.", ()),
    "pysync_stored_bytes": ("Bytes that it found in the store.", ()),
    "pysync_streams": ("Open change streams.", ()),
    "pysync_projection_lag_seconds": ("Age of the oldest writes not folded; 0: none.", ()),
    "pysync_stream_unread_bytes": ("Bytes that wait in change streams whose clients do not read.", ()),
    "pysync_webhook_lag_seconds": ("Age of the oldest change not accepted; 0: none.", ("webhook",)),
    "pysync_sweep_debt_seconds": ("Time since the sweep that last deleted all expired data.", ()),
}
"""The metrics that `Counters.gauge` returns: the help text and the label names."""
