"""The metrics page: counts of our own, handed to prometheus_client when it asks.

A labelled prometheus_client counter and histogram cost a small request about a tenth of its time; a dict of
our own (`tally.py`) costs next to nothing, and the exposition format stays the library's.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pysync.server.tally import BUCKETS_S, Tally

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
"""What `Tally.count` counts: the metric, without `_total`, what it means, and the names of its labels."""


class Metrics(Collector):
    """What `counted` returns when somebody asks."""

    def __init__(self, version: str, counted: Callable[[], Tally]) -> None:
        self._version = version
        self._counted = counted
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The metrics as prometheus_client wants them."""
        tally = self._counted()
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

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


def _counters(tally: Tally) -> Iterator[Metric]:
    families = {
        metric: CounterMetricFamily(metric, meaning, labels=labels)
        for metric, (meaning, labels) in COUNTERS.items()
    }
    for (metric, *labels), count in list(tally.counts.items()):
        families[metric].add_metric(labels, count)
    yield from families.values()
