"""Histograms of tokens and requests: prometheus_client's own cost several times as much, for the locks of many threads."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Series:
    """What was observed under one set of labels."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # by bucket, each without those below it
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times


class Tally(Collector):
    """One histogram. `bounds`: upper ends of its buckets, ascending, in the unit of what is observed; the last bucket has none."""

    def __init__(self, name: str, help_text: str, labels: Sequence[str], bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._help = help_text
        self._labels = labels
        self._bounds = bounds
        self._series: dict[tuple[str, ...], Series] = {}
        registry.register(self)

    def labels(self, *values: str) -> Series:
        """One value for each label; to be looked up once."""
        return self._series.setdefault(values, Series(self._bounds))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        ends = [str(floatToGoString(bound)) for bound in (*self._bounds, float("inf"))]  # type: ignore[no-untyped-call]
        for values, series in self._series.items():
            family.add_metric(values, list(zip(ends, map(float, accumulate(series.counts)), strict=True)), series.total)
        yield family
