"""Points and results made up for tests: every figure as wanted, nothing measured."""

from __future__ import annotations

from collections.abc import Sequence

from bench.load import Load
from bench.point import Point, Repeat, Served, spread_of
from bench.quantiles import Spread
from bench.record import Outcome
from bench.request_log import RequestRow
from bench.result import ResultFile
from bench.scorecard import Cost, Goodput, Scorecard, ServerSide
from bench.slo import Slo
from bench.summary import Latencies, Summary
from bench.timeline import Timeline
from bench.workload import WorkloadFacts

FACTS = WorkloadFacts("chat", 0, "short chat", "0123456789abcdef", 20)
SLO = Slo(ttft_ms=2_000.0)


def card(rate: float = 1.0, attainment: float = 100.0, ttft_ms: float = 100.0, **server: float | None) -> Scorecard:
    flat = Spread(20.0, 30.0, 40.0)
    latencies = Latencies(Spread(ttft_ms / 2, ttft_ms, ttft_ms), flat, flat, flat, Spread(), Spread(0.1, 0.2, 0.3))
    done = round(20 * attainment / 100)
    summary = Summary(20, 20, 0, 0, 0, 20 / rate, rate, 10 * rate, 2_000, 200, None, latencies, {})
    return Scorecard(rate, summary, Goodput(done, attainment, rate * attainment / 100, 10 * rate), ServerSide(**server), 0.1, Cost())  # type: ignore[arg-type]


def point(
    cards: Sequence[Scorecard], *, label: str = "baseline", rate: float | None = None, served: Served | None = None,
    facts: WorkloadFacts = FACTS, slo: Slo = SLO, timeline: Timeline | None = None,
) -> Point:  # fmt: skip
    load = Load(rate_per_s=cards[0].offered_per_s if rate is None else rate)
    repeats = tuple(Repeat("2026-01-01T00:00:00", each, timeline or Timeline()) for each in cards)
    return Point(label, facts, load, slo, served or Served("rantang", "0.1", "rantang serve"), repeats, spread_of(cards))


def result_file(points: Sequence[Point], **machine: str | int | float) -> ResultFile:
    facts: dict[str, str | int | float] = {"cpu": "one", "cores": 2, **machine}
    return ResultFile(2, "2026-01-01", "abc", "rantang bench run", facts, "run-chat", {"seed": "0"}, points=tuple(points))


def rows_for(index: int, count: int = 20, rate: float = 1.0, shed: int = 0) -> list[RequestRow]:
    answered = [
        RequestRow(index, 0, 1e3 * i / rate, Outcome.COMPLETED, "chat", 50 + 10 * i, 5, 0, 100.0 + i, 300.0 + i, 0.1, 0, True, [20.0, 25.0])
        for i in range(count)
    ]
    return answered + [RequestRow(index, 0, 1e3 * (count + i) / rate, Outcome.SHED) for i in range(shed)]
