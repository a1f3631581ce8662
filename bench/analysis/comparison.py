"""Two results side by side: for each figure, whether the difference exceeds the spread of the runs."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from bench.analysis.interval import Difference, difference
from bench.point import Point
from bench.result import ResultFile
from bench.scorecard import FIGURES, Figure, figure


class Says(enum.StrEnum):
    BETTER = "better"
    WORSE = "worse"
    HIGHER = "higher"  # of a figure that is neither good nor bad
    LOWER = "lower"
    SAME = "no difference beyond the spread"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of both sides. `says` is of B against A."""

    figure: Figure
    difference: Difference
    runs: tuple[int, int]
    says: Says


@dataclass(frozen=True, slots=True)
class Pair:
    """One point of each side, measured under the same load."""

    label: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]  # what else differs between the two


class NotComparable(ValueError):
    """The two were not asked the same."""


def compare(a: ResultFile, b: ResultFile, metrics: Sequence[str] = (), *, force: bool = False) -> tuple[Pair, ...]:
    """Every point that both have. Raises NotComparable when they answered different workloads or loads, unless forced.

    Raises ValueError with the list for an unknown metric.
    """
    wanted = tuple(figure(name) for name in metrics) or FIGURES
    pairs = _pairs(a.points, b.points)
    if not pairs:
        raise NotComparable(f"no load was measured in both: {_loads(a)} against {_loads(b)}")
    problems = [problem for one, other in pairs for problem in _obstacles(one, other)]
    if problems and not force:
        raise NotComparable("; ".join(dict.fromkeys(problems)) + " (--force compares all the same)")
    return tuple(
        Pair(
            _heading(one, a.points),
            _rows(one, other, wanted),
            (*_obstacles(one, other), *_notes(a, b), *_slo_note(one, other)),
        )
        for one, other in pairs
    )


def says(difference: Difference, better: str) -> Says:
    if difference.real is None:
        return Says.CANNOT_TELL
    if not difference.real:
        return Says.SAME
    rose = difference.change > 0
    if not better:
        return Says.HIGHER if rose else Says.LOWER
    return Says.BETTER if rose == (better == "higher") else Says.WORSE


def _rows(one: Point, other: Point, wanted: Sequence[Figure]) -> tuple[Row, ...]:
    rows = []
    for each in wanted:
        a = [value for repeat in one.repeats if (value := each.get(repeat.scorecard)) is not None]
        b = [value for repeat in other.repeats if (value := each.get(repeat.scorecard)) is not None]
        if a and b:
            found = difference(a, b)
            rows.append(Row(each, found, (len(a), len(b)), says(found, each.better)))
    return tuple(rows)


def _pairs(a: Sequence[Point], b: Sequence[Point]) -> list[tuple[Point, Point]]:
    """The only one with the only one; else those of the same load, where there are any of the same workload too, and label."""
    if len(a) == 1 and len(b) == 1:
        return [(a[0], b[0])]
    same = [(one, other) for one in a for other in b if one.load == other.load]
    same = [(one, other) for one, other in same if one.workload.name == other.workload.name] or same
    return [(one, other) for one, other in same if one.label == other.label] or same


def _obstacles(one: Point, other: Point) -> list[str]:
    problems = []
    if one.workload.hash != other.workload.hash:
        problems.append(
            f"different workloads: {one.workload.name} ({one.workload.hash}) against {other.workload.name} ({other.workload.hash})"
        )
    if one.load != other.load:
        problems.append(f"different loads: {one.offered} against {other.offered}")
    return problems


def _heading(point: Point, points: Sequence[Point]) -> str:
    return point.label if len(points) == 1 else f"{point.label}, {point.workload.name}, {point.offered}"


def _slo_note(one: Point, other: Point) -> tuple[str, ...]:
    if one.slo == other.slo:
        return ()
    return (f"goodput and attainment were counted by different SLOs: {one.slo.description} against {other.slo.description}",)


def _notes(a: ResultFile, b: ResultFile) -> list[str]:
    keys = ("cpu", "cores", "memory_gib", "python", "torch", "ray")
    return [f"{key} differs: {a.machine.get(key)} against {b.machine.get(key)}" for key in keys if a.machine.get(key) != b.machine.get(key)]


def _loads(result: ResultFile) -> str:
    return ", ".join(point.offered for point in result.points) or "nothing"
