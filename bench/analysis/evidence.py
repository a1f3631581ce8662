"""What one measured load says about where its time went, as the rules of `explain` read it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.analysis.at_load import Figures, at_load_of
from bench.point import Point, Served
from bench.request_log import RequestRow
from bench.timeline import Timeline
from replica.config import EngineConfig

OURS = "rantang serve"  # how the command begins that started a stack whose settings are all known


@dataclass(frozen=True, slots=True)
class Moment:
    """One sample in which all three were known."""

    running: float
    waiting: float
    kv_use_percent: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """One run. Limits are of the whole server; None: not known."""

    figures: Figures
    requests: int
    arriving: tuple[Moment, ...] = ()  # samples while requests still became due
    ttft_by_prompt: tuple[tuple[int, float], ...] = ()  # (prompt tokens not found in a cache, ms)
    sequences_max: int | None = None
    budget_tokens: int | None = None
    cores: int | None = None  # of the machine that client and server shared
    calmer: Figures = field(default_factory=dict)  # of the next lower load of the same configuration

    def figure(self, name: str) -> float | None:
        return self.figures.get(name)


def evidence_of(points: Sequence[Point], index: int, rows: Sequence[RequestRow], cores: int | None = None) -> Evidence:
    """Of the first run of point `index`; `rows` are those of the whole result."""
    point = points[index]
    run = point.repeats[0]
    own = [row for row in rows if row.point == index and row.repeat == 0]
    last_due_s = max((row.due_ms for row in own), default=float("inf")) / 1e3
    return Evidence(
        figures=at_load_of(point).runs[0],
        requests=run.scorecard.summary.requests,
        arriving=_moments(run.timeline, last_due_s),
        ttft_by_prompt=tuple(
            (row.prompt_tokens - (row.cached_tokens or 0), row.ttft_ms)
            for row in own
            if row.completed and row.prompt_tokens is not None and row.ttft_ms is not None
        ),
        sequences_max=_limit(point.served, "max_num_seqs", per_replica=True),
        budget_tokens=_limit(point.served, "max_num_batched_tokens", per_replica=False),
        cores=cores,
        calmer=_calmer(points, index),
    )


def _moments(timeline: Timeline, until_s: float) -> tuple[Moment, ...]:
    columns = zip(timeline.time_s, timeline.running, timeline.waiting, timeline.kv_use_percent, strict=False)
    return tuple(
        Moment(running, waiting, kv)
        for at_s, running, waiting, kv in columns
        if at_s <= until_s and running is not None and waiting is not None and kv is not None
    )


def _limit(served: Served, name: str, *, per_replica: bool) -> int | None:
    """As given, else the default of a stack started here; of a server that ran already nothing is known."""
    given = served.configuration.get(name)
    if given is None and served.command.startswith(OURS):
        given = str(EngineConfig.model_fields[name].default)
    if given is None or not given.isdigit():
        return None
    return int(given) * (served.replicas if per_replica else 1)


def _calmer(points: Sequence[Point], index: int) -> Figures:
    here = points[index]
    load = at_load_of(here).offered_per_s
    lower = [
        at_load_of(point)
        for point in points
        if point.served.configuration == here.served.configuration
        and point.workload.hash == here.workload.hash
        and at_load_of(point).offered_per_s < load
    ]
    return max(lower, key=lambda point: point.offered_per_s).runs[0] if lower else {}


def mean(values: Sequence[float]) -> float:
    """0 of nothing."""
    return statistics.fmean(values) if values else 0.0
