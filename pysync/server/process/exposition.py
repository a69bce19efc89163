"""The metrics in the Prometheus text format."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pysync import __version__
from pysync.server.process.metrics import BUCKETS_S, COUNTERS, GAUGES, Counters


class Metrics(Collector):
    """The counters that `snapshot` returns, as metrics in the Prometheus text format."""

    def __init__(self, snapshot: Callable[[], Counters]) -> None:
        self._snapshot = snapshot
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics in the form of prometheus_client."""
        counters = self._snapshot()
        build = GaugeMetricFamily("pysync_build_info", "Version of pysync.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build
        requests = CounterMetricFamily(
            "pysync_requests", "Answered requests.", labels=["action", "collection", "status"]
        )
        for (action, collection, status), count in list(counters.statuses.items()):
            requests.add_metric([action, collection, str(status)], count)
        yield requests
        durations = HistogramMetricFamily(
            "pysync_request_seconds", "Time from a request's head to its answer.", labels=["action"]
        )
        for action, counts in list(counters.durations.items()):
            cumulated, buckets = 0, []
            for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), counts, strict=True):
                cumulated += count
                buckets.append((bound, cumulated))
            durations.add_metric([action], buckets, counters.seconds[action])
        yield durations
        families = {
            metric: CounterMetricFamily(metric, meaning, labels=labels)
            for metric, (meaning, labels) in COUNTERS.items()
        }
        for (metric, *labels), count in list(counters.counts.items()):
            families[metric].add_metric(labels, count)
        yield from families.values()
        for metric, meaning in GAUGES.items():
            gauge = GaugeMetricFamily(metric, meaning)
            gauge.add_metric([], counters.gauge(metric))
            yield gauge

    def render(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self._registry)
