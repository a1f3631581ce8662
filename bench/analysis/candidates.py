"""Candidates of a choice, from the points of sweeps."""

from __future__ import annotations

from collections.abc import Sequence

from bench.analysis.at_load import at_load_of
from bench.analysis.choice import Candidate
from bench.point import Point, Served


def candidates_of(points: Sequence[Point]) -> tuple[Candidate, ...]:
    """One per label and configuration, in the order met. Raises ValueError when they were not asked the same.

    Several sweeps may all call theirs "baseline": the settings then tell them apart.
    """
    if not points:
        raise ValueError("no sweep was measured: there is nothing to choose from")
    for name, values in (
        ("workloads", {f"{point.workload.name} ({point.workload.hash})" for point in points}),
        ("SLOs", {point.slo.description for point in points}),
    ):
        if len(values) > 1:
            raise ValueError(f"different {name} cannot be weighed against each other: {' and '.join(sorted(values))}")
    groups: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        groups.setdefault((point.label, settings_text(point.served)), []).append(point)
    labels = [label for label, _ in groups]
    return tuple(
        Candidate(
            label if labels.count(label) == 1 else f"{label} ({text})",
            group[0].served.replicas,
            tuple(at_load_of(point) for point in group),
        )
        for (label, text), group in groups.items()
    )


def settings_text(served: Served) -> str:
    settings = {"replicas": str(served.replicas), **served.configuration}
    return ", ".join(f"{name}={value}" for name, value in sorted(settings.items()))
