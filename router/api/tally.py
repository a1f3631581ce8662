"""A histogram for what is observed with every token: prometheus_client's own costs several times as much, for locks of many threads."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally(Collector):
    """One series. `bounds`: upper ends of its buckets, ascending, in the unit of what is observed; the last bucket has none."""

    def __init__(self, name: str, help_text: str, labels: dict[str, str], bounds: tuple[float, ...], registry: CollectorRegistry) -> None:
        self._name = name
        self._help = help_text
        self._labels = labels
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._help, labels=list(self._labels))
        ends = [str(floatToGoString(bound)) for bound in (*self._bounds, float("inf"))]  # type: ignore[no-untyped-call]
        family.add_metric(list(self._labels.values()), list(zip(ends, map(float, accumulate(self._counts)), strict=True)), self._sum)
        yield family
