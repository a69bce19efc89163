"""The metrics in the Prometheus text format."""

from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pysync import __version__
from pysync.server.process.metrics import COUNTERS, GAUGES, HISTOGRAMS, Counters


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
        histograms = {
            metric: HistogramMetricFamily(metric, each.meaning, labels=each.labels)
            for metric, each in HISTOGRAMS.items()
        }
        for (metric, *values), found in list(counters.histograms.items()):
            bounds = (*map(str, HISTOGRAMS[metric].bounds), "+Inf")
            buckets = list(zip(bounds, accumulate(found[:-1]), strict=True))
            histograms[metric].add_metric(values, buckets, found[-1])
        yield from histograms.values()
        families = {
            metric: CounterMetricFamily(metric, meaning, labels=labels)
            for metric, (meaning, labels) in COUNTERS.items()
        }
        for (metric, *labels), count in list(counters.counts.items()):
            families[metric].add_metric(labels, count)
        yield from families.values()
        for metric, (meaning, names) in GAUGES.items():
            gauge = GaugeMetricFamily(metric, meaning, labels=names)
            if not names:
                gauge.add_metric([], counters.gauge(metric))
            for (name, *values), held in list(counters.peaks.items()):
                if names and name == metric:
                    gauge.add_metric(values, held)
            yield gauge

    def render(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self._registry)
