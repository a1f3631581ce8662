"""The figures of a result: which of its points are drawn, and under which names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.figure import Figure

from bench.analysis.at_load import at_load_of, name_of
from bench.analysis.knee import find_knee
from bench.point import Point
from bench.report.curves import Curve, Target, draw_curves
from bench.report.distributions import Distribution, draw_distributions
from bench.report.timelines import draw_timeline
from bench.request_log import RequestRow
from bench.result import ResultFile

DISTRIBUTIONS_MAX = 6
TIMELINES_MAX = 3
SAMPLES_MAX = 400  # points of a distribution's line


def pictures(result: ResultFile, rows: Sequence[RequestRow]) -> Iterator[tuple[str, str, Figure]]:
    """(name, what it shows, figure), as far as the result has the data."""
    points = result.points
    if not points:
        return
    curves = curves_of(points)
    if any(len([point for point in curve.points if not point.is_burst]) > 1 for curve in curves):
        slo = points[0].slo
        bounds = (("ttft_p95_ms", slo.ttft_ms), ("itl_p95_ms", slo.itl_p95_ms))
        targets = [Target(name, value) for name, value in bounds if value is not None]
        yield "curves", "Goodput, p95 time to first token and p95 inter-token latency against offered load", draw_curves(curves, targets)
    chosen = _spaced(range(len(points)), DISTRIBUTIONS_MAX)
    ttft = [_ttft(points[i], points, [row for row in rows if row.point == i and row.completed]) for i in chosen]
    itl = [_itl(points[i], points, [row for row in rows if row.point == i and row.completed]) for i in chosen]
    yield "distributions", "Distributions of time to first token and inter-token latency", draw_distributions(ttft, itl)
    for i in telling(points):
        own = [row for row in rows if row.point == i and row.repeat == 0]
        title = f"Over time: {name_of(points[i], points)}"
        yield f"timeline-{i}", title, draw_timeline(points[i].repeats[0].timeline, own, points[i].slo.queue_ms, title)


def curves_of(points: Sequence[Point]) -> list[Curve]:
    """A curve per configuration and workload, in the order measured. A closed loop has no load of its own, and no place on one."""
    several = len({point.workload.name for point in points}) > 1
    groups: dict[str, list[Point]] = {}
    for point in points:
        if point.load.streams is None:
            groups.setdefault(f"{point.label}, {point.workload.name}" if several else point.label, []).append(point)
    return [Curve(name, tuple(at_load_of(point) for point in group)) for name, group in groups.items()]


def telling(points: Sequence[Point]) -> list[int]:
    """The points worth a look over time: the first configuration's knee, the first load above it, and the burst; else a few."""
    open_loops = [point for point in points if point.load.streams is None]
    first = [
        i
        for i, point in enumerate(points)
        if point.load.streams is None and (point.label, point.workload.name) == (open_loops[0].label, open_loops[0].workload.name)
    ]
    measured = {i: at_load_of(points[i]) for i in first}
    knee = find_knee(measured.values())
    wanted = [i for i, at in measured.items() if at.is_burst or at.offered_per_s in (knee.load_per_s, knee.broken_per_s)]
    return wanted[:TIMELINES_MAX] if len(first) > 1 else _spaced(range(len(points)), TIMELINES_MAX)


def _ttft(point: Point, points: Sequence[Point], rows: Sequence[RequestRow]) -> Distribution:
    return _distribution(name_of(point, points), [row.ttft_ms for row in rows if row.ttft_ms is not None])


def _itl(point: Point, points: Sequence[Point], rows: Sequence[RequestRow]) -> Distribution:
    return _distribution(name_of(point, points), [gap for row in rows for gap in row.gaps_ms])


def _distribution(name: str, values: list[float]) -> Distribution:
    """Thinned to so many steps as can be seen; the largest value stays."""
    ordered = sorted(values)
    kept = _spaced(range(len(ordered)), SAMPLES_MAX)
    return Distribution(name, tuple(ordered[i] for i in kept), tuple((i + 1) / len(ordered) for i in kept))


def _spaced(indices: range, most: int) -> list[int]:
    """At most `most` of them, evenly, first and last among them."""
    if len(indices) <= most:
        return list(indices)
    return sorted({indices[round(i * (len(indices) - 1) / (most - 1))] for i in range(most)})
