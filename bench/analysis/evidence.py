"""What one measured load says about where its time went, as the rules of `explain` read it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.analysis.at_load import AtLoad, Figures, at_load_of
from bench.analysis.knee import KEPT_PERCENT
from bench.point import Point, Served
from bench.quantiles import quantile
from bench.request_log import RequestRow
from bench.slo import Slo
from bench.timeline import Timeline
from replica.config import EngineConfig

OURS = "rantang serve"  # how the command begins that started a stack whose settings are all known


OF_METRICS = ("running_max", "waiting_max", "kv_use_max_percent", "queue_p50_ms", "preemptions")  # what /metrics alone tells


@dataclass(frozen=True, slots=True)
class Moment:
    """One sample in which all three were known."""

    running: float
    waiting: float
    kv_use_percent: float

    @property
    def kv_with_one_more(self) -> float:
        """With another request of the average size of those that run, in percent."""
        return self.kv_use_percent * (1 + 1 / self.running) if self.running else self.kv_use_percent


@dataclass(frozen=True, slots=True)
class Evidence:
    """One run. Limits are of the whole server; None: not known."""

    figures: Figures
    requests: int
    arriving: tuple[Moment, ...] = ()  # samples while requests still became due; of a burst until its last answer
    ttft_by_prompt: tuple[tuple[int, float], ...] = ()  # (prompt tokens not found in a cache, ms)
    sequences_max: int | None = None
    budget_tokens: int | None = None
    cores: int | None = None  # of the machine that client and server shared
    load: AtLoad | None = None
    calmer: Figures = field(default_factory=dict)  # of the next lower load of the same configuration; of a burst none is
    slo: Slo = field(default_factory=Slo)
    problems: Mapping[str, int] = field(default_factory=dict)  # what failed, how often
    late_gaps: tuple[int, int] = (0, 0)  # answers whose own p95 of gaps is above the target, of so many

    @property
    def at(self) -> AtLoad:
        """All runs of this load; where nobody gave them, the one."""
        return self.load or AtLoad(0.0, (self.figures,), self.slo.queue_ms)

    @property
    def at_once(self) -> bool:
        return self.at.is_burst

    @property
    def broken(self) -> bool:
        """Whether its SLO was not kept: what no knee can lie at."""
        share = self.at.median("attainment_percent")
        return self.slo != Slo() and share is not None and (share < KEPT_PERCENT or not self.at.queue_kept)

    @property
    def told(self) -> bool:
        """Whether the server said anything of itself."""
        return bool(self.arriving) or any(self.figure(name) is not None for name in OF_METRICS)

    @property
    def late_prompts(self) -> tuple[tuple[int, float], ...]:
        """Those of `ttft_by_prompt` above the target."""
        return tuple(pair for pair in self.ttft_by_prompt if self.slo.ttft_ms is not None and pair[1] > self.slo.ttft_ms)

    @property
    def timely_prompts(self) -> tuple[tuple[int, float], ...]:
        return tuple(pair for pair in self.ttft_by_prompt if self.slo.ttft_ms is None or pair[1] <= self.slo.ttft_ms)

    def figure(self, name: str) -> float | None:
        return self.figures.get(name)


def evidence_of(points: Sequence[Point], index: int, rows: Sequence[RequestRow], cores: int | None = None) -> Evidence:
    """Of the first run of point `index`; `rows` are those of the whole result."""
    point = points[index]
    run = point.repeats[0]
    own = [row for row in rows if row.point == index and row.repeat == 0]
    load = at_load_of(point)
    ends_ms = [row.due_ms + ((row.e2e_ms or 0.0) if load.is_burst else 0.0) for row in own]
    return Evidence(
        figures=load.runs[0],
        requests=run.scorecard.summary.requests,
        arriving=_moments(run.timeline, max(ends_ms, default=float("inf")) / 1e3),
        ttft_by_prompt=tuple(
            (row.prompt_tokens - (row.cached_tokens or 0), row.ttft_ms)
            for row in own
            if row.completed and row.prompt_tokens is not None and row.ttft_ms is not None
        ),
        sequences_max=_limit(point.served, "max_num_seqs", per_replica=True),
        budget_tokens=_limit(point.served, "max_num_batched_tokens", per_replica=False),
        cores=cores,
        load=load,
        calmer={} if load.is_burst else _calmer(points, index),
        slo=point.slo,
        problems=run.scorecard.summary.problems,
        late_gaps=_late_gaps(own, point.slo),
    )


def _late_gaps(rows: Sequence[RequestRow], slo: Slo) -> tuple[int, int]:
    p95s = [quantile(row.gaps_ms, 0.95) or 0.0 for row in rows if row.completed]
    return sum(slo.itl_p95_ms is not None and p95 > slo.itl_p95_ms for p95 in p95s), len(p95s)


def _moments(timeline: Timeline, until_s: float) -> tuple[Moment, ...]:
    columns = zip(timeline.time_s, timeline.running, timeline.waiting, timeline.kv_use_percent, strict=False)
    return tuple(
        Moment(running, waiting, kv)
        for at_s, running, waiting, kv in columns
        if 0 <= at_s <= until_s and running is not None and waiting is not None and kv is not None
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
