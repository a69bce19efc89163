"""What a process has answered, counted in plain Python; of several workers, added up by whichever is asked.

Each worker keeps its counts in a file of its own, in a folder that the workers of a service share. They are
written every second, and before they are told: what one worker has told of itself, the others tell too, and
the one that takes its place counts on from there. So no count ever goes back.

The metrics page: counts of our own, handed to prometheus_client when it asks.

A labelled prometheus_client counter and histogram cost a small request about a tenth of its time; a dict of
our own costs next to nothing, and the exposition format stays the library's.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import orjson
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
PUBLISH_EVERY_S: Final = 1.0

log = logging.getLogger("pysync.server")


class Counters:
    """Answered requests: `statuses` counts them by action, collection and status (labels bounded by the
    configuration), `durations` by action and bucket of time, `seconds` adds up their times by action. And
    whatever else is counted: `counts`, by the metric's name and the values of its labels. `streams` is how
    many change streams are open."""

    def __init__(self) -> None:
        self.statuses: dict[tuple[str, str, int], int] = {}
        self.durations: dict[str, list[int]] = {}
        self.seconds: dict[str, float] = {}
        self.counts: dict[tuple[str, ...], int] = {}
        self.streams = 0

    def count(self, metric: str, *labels: str, by: int = 1) -> None:
        """Count `by` more of a metric that `server.metrics.COUNTERS` knows, with the values of its labels."""
        key = (metric, *labels)
        self.counts[key] = self.counts.get(key, 0) + by

    def add(self, other: "Counters") -> None:
        """Count what `other` has counted."""
        for counted, count in other.counts.items():
            self.counts[counted] = self.counts.get(counted, 0) + count
        for key, count in other.statuses.items():
            self.statuses[key] = self.statuses.get(key, 0) + count
        for action, counts in other.durations.items():
            own = self.durations.get(action, [0] * len(counts))
            self.durations[action] = [mine + theirs for mine, theirs in zip(own, counts, strict=True)]
            self.seconds[action] = self.seconds.get(action, 0.0) + other.seconds[action]
        self.streams += other.streams

    def encode(self) -> bytes:
        """The counts as text that `decode` reads."""
        statuses = [[*key, count] for key, count in self.statuses.items()]
        counts = [[*key, count] for key, count in self.counts.items()]
        return orjson.dumps([statuses, self.durations, self.seconds, counts, self.streams])

    @classmethod
    def decode(cls, text: bytes) -> "Counters":
        tally = cls()
        statuses, tally.durations, tally.seconds, counts, tally.streams = orjson.loads(text)
        tally.statuses = {(action, collection, status): n for action, collection, status, n in statuses}
        tally.counts = {tuple(key): count for *key, count in counts}
        return tally


class MultiprocessCounters:
    """The counts of one worker, `own`, and the file, named by its `number`, where the others find them."""

    def __init__(self, own: Counters, folder: Path, number: int) -> None:
        """Counts on from what an earlier worker of that number left. Needs a running loop."""
        self._own = own
        self._folder = folder
        self._file = folder / str(number)
        self._earlier = _read(self._file)
        self._earlier.streams = 0  # they ended with it
        self._published = b""
        self._task = asyncio.get_running_loop().create_task(self._publish_periodically())

    def total(self) -> Counters:
        """What all workers have counted, those that are gone included."""
        self.publish()
        total = Counters()
        for file in self._folder.glob("[0-9]*"):
            total.add(_read(file))
        return total

    def publish(self) -> None:
        """Write what is new, or gone: temporary folders are swept where nothing happens for days. A disk that
        takes nothing costs the others our latest counts, and no more."""
        tally = Counters()
        tally.add(self._earlier)
        tally.add(self._own)
        text = tally.encode()
        if text == self._published and self._file.exists():
            return
        beside = self._file.with_name(f".{self._file.name}")
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            beside.touch(0o600)
            beside.write_bytes(text)
            os.replace(beside, self._file)
        except OSError as error:
            log.warning("metrics are not up to date: %s", error)
            return
        self._published = text

    def close(self) -> None:
        """Write the last counts."""
        self._task.cancel()
        self.publish()

    async def _publish_periodically(self) -> None:
        while True:
            await asyncio.sleep(PUBLISH_EVERY_S)
            self.publish()


def _read(file: Path) -> Counters:
    try:
        return Counters.decode(file.read_bytes())
    except FileNotFoundError:
        return Counters()


COUNTERS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "pysync_corrupt_objects": (
        "Corrupt stored objects, each time that one was met.",
        ("kind", "found_by"),
    ),
    "pysync_events": ("Events sent on change streams.", ("collection",)),
    "pysync_plugin_failures": ("Hooks of plugins that failed, or took too long.", ("plugin", "hook")),
    "pysync_projection_folds": ("Times that writes were folded into a list.", ("projection",)),
    "pysync_projection_puts": ("Lists written.", ("projection",)),
    "pysync_projection_drops": (
        "Entries for which a list was full, and changes of contested lists.",
        ("projection",),
    ),
    "pysync_projection_failures": ("Sources, lists and functions that failed.", ("projection",)),
}
"""What `Counters.count` counts: the metric, without `_total`, what it means, and the names of its labels."""


class Metrics(Collector):
    """What `snapshot` returns when somebody asks."""

    def __init__(self, version: str, snapshot: Callable[[], Counters]) -> None:
        self._version = version
        self._snapshot = snapshot
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The metrics as prometheus_client wants them."""
        tally = self._snapshot()
        build = GaugeMetricFamily("pysync_build_info", "Version of pysync.", labels=["version"])
        build.add_metric([self._version], 1)
        yield build
        requests = CounterMetricFamily(
            "pysync_requests", "Answered requests.", labels=["action", "collection", "status"]
        )
        for (action, collection, status), count in list(tally.statuses.items()):
            requests.add_metric([action, collection, str(status)], count)
        yield requests
        durations = HistogramMetricFamily(
            "pysync_request_seconds", "Time from a request's head to its answer.", labels=["action"]
        )
        for action, counts in list(tally.durations.items()):
            cumulated, buckets = 0, []
            for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), counts, strict=True):
                cumulated += count
                buckets.append((bound, cumulated))
            durations.add_metric([action], buckets, tally.seconds[action])
        yield durations
        yield from _counters(tally)
        streams = GaugeMetricFamily("pysync_streams", "Open change streams.")
        streams.add_metric([], tally.streams)
        yield streams

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


def _counters(tally: Counters) -> Iterator[Metric]:
    families = {
        metric: CounterMetricFamily(metric, meaning, labels=labels)
        for metric, (meaning, labels) in COUNTERS.items()
    }
    for (metric, *labels), count in list(tally.counts.items()):
        families[metric].add_metric(labels, count)
    yield from families.values()
