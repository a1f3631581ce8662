"""One offered load and the figures of its n runs: what knee, choice and curves are taken from."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.point import Point
from bench.scorecard import figures_of

Figures = Mapping[str, float | None]  # of one run, by the names of the scorecard; None: the run could not tell


@dataclass(frozen=True, slots=True)
class AtLoad:
    """`offered_per_s` is infinite when the whole trace was sent at once (the burst)."""

    offered_per_s: float
    runs: tuple[Figures, ...]
    queue_ms: float | None = None  # the SLO's target for the p95 of queue time, which no single response can be held to
    requests: int | None = None  # due at this rate; None: of a closed loop, whose load does not depend on their number

    @property
    def is_burst(self) -> bool:
        return math.isinf(self.offered_per_s)

    @property
    def queue_kept(self) -> bool | None:
        """In the middle run. None: there is a target, and the server did not tell the time."""
        if self.queue_ms is None:
            return True
        middle = self.median("queue_p95_ms")
        return None if middle is None else middle <= self.queue_ms

    def values(self, name: str) -> tuple[float, ...]:
        """The figure in every run that knows it."""
        return tuple(value for run in self.runs if (value := run.get(name)) is not None)

    def median(self, name: str) -> float | None:
        values = self.values(name)
        return statistics.median(values) if values else None

    def highest(self, name: str) -> float | None:
        return max(self.values(name), default=None)

    def spread_percent(self, name: str) -> float | None:
        """(highest − lowest) / median; None with fewer than two runs or nothing to divide by."""
        values = self.values(name)
        if len(values) < 2 or not (middle := statistics.median(values)):
            return None
        return 100 * (max(values) - min(values)) / abs(middle)


def ascending(points: Iterable[AtLoad]) -> tuple[AtLoad, ...]:
    """By load, without the burst."""
    return tuple(sorted((point for point in points if not point.is_burst), key=lambda point: point.offered_per_s))


def burst_of(points: Iterable[AtLoad]) -> AtLoad | None:
    return next((point for point in points if point.is_burst), None)


def at_load_of(point: Point) -> AtLoad:
    """What a result file knows of one load."""
    offered = math.inf if point.is_burst else point.load.rate_per_s or point.figure("offered_per_s") or 0.0
    requests = point.workload.requests if point.load.streams is None else None
    return AtLoad(offered, tuple(figures_of(repeat.scorecard) for repeat in point.repeats), point.slo.queue_ms, requests)


def name_of(point: Point, points: Sequence[Point]) -> str:
    """Of a point among others: what tells it apart, its load or its configuration."""
    parts = [point.offered]
    if len({each.workload.name for each in points}) > 1:
        parts.insert(0, point.workload.name)
    if len({each.label for each in points}) == 1:
        return ", ".join(parts)
    return point.label if len({(each.load, each.workload.name) for each in points}) == 1 else ", ".join([point.label, *parts])
