"""Reads a server's /metrics: single values by name, and quantiles of histograms."""

from __future__ import annotations

import math
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
REPLICAS = "rantang:replicas"  # connected to the router
MOVES = "rantang:stream_moves_total"
QUEUE_TIME = "vllm:request_queue_time_seconds"


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """Samples summed over all labels but `le`."""

    values: dict[str, float]
    buckets: dict[str, dict[float, float]]  # histogram name -> upper bound -> cumulative count

    def since(self, earlier: MetricsPage) -> MetricsPage:
        """What counters and histograms gained."""
        values = {name: value - earlier.values.get(name, 0.0) for name, value in self.values.items()}
        buckets = {
            name: {bound: count - earlier.buckets.get(name, {}).get(bound, 0.0) for bound, count in counts.items()}
            for name, counts in self.buckets.items()
        }
        return MetricsPage(values, buckets)

    def quantile_bound(self, histogram: str, q: float) -> float | None:
        """The upper bound of the bucket that holds the quantile: the quantile is not above it. None: no such data."""
        counts = sorted(self.buckets.get(histogram, {}).items())
        if not counts or counts[-1][1] <= 0:
            return None
        wanted = q * counts[-1][1]
        return next((bound for bound, count in counts if count >= wanted - 1e-9), math.inf)

    def quantile(self, histogram: str, q: float) -> float | None:
        """The quantile, interpolated within its bucket; beyond the last finite bound, that bound. None: no such data."""
        counts = sorted(self.buckets.get(histogram, {}).items())
        if not counts or counts[-1][1] <= 0:
            return None
        wanted = q * counts[-1][1]
        low, below = 0.0, 0.0
        for bound, count in counts:
            if count >= wanted - 1e-9:
                return low if math.isinf(bound) else low + (bound - low) * (wanted - below) / max(count - below, 1e-9)
            low, below = bound, count
        return low


def parse(text: str) -> MetricsPage:
    """Raises ValueError for text that is not Prometheus's format."""
    values: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                bound = float(sample.labels["le"])
                counts = buckets.setdefault(sample.name.removesuffix("_bucket"), {})
                counts[bound] = counts.get(bound, 0.0) + sample.value
            else:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return MetricsPage(values, buckets)
