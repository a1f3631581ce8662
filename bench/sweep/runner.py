"""Carries a sweep out: the same trace at every load, what is finished never again, and says how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.analysis.at_load import AtLoad, ascending, at_load_of, burst_of
from bench.analysis.knee import Knee, find_knee
from bench.analysis.rates import around, next_rate
from bench.hours import spoken
from bench.load import BURST_RATE_PER_S, Load
from bench.point import Point
from bench.request_log import RequestRow
from bench.sweep.eta import eta_s
from bench.sweep.state import SweepState

Measure = Callable[[Load], tuple[Point, list[RequestRow]]]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Extent:
    """Which loads. `rates` empty: found by the sweep itself from the burst, with at most `refinements` more around the knee."""

    requests: int
    repeats: int
    rates: tuple[float, ...] = ()
    burst: bool = True
    refinements: int = 3


class Sweep:
    """One sweep. `measure` is asked only for loads that `state` does not hold."""

    def __init__(self, state: SweepState, extent: Extent, measure: Measure, say: Say) -> None:
        self._state = state
        self._extent = extent
        self._measure = measure
        self._say = say
        self._overheads_s: list[float] = []

    def run(self) -> Knee:
        """Every finished load is in the state before the next begins. Raises ValueError for a load that cannot be judged."""
        extent = self._extent
        if extent.burst or not extent.rates:
            self._at(BURST_RATE_PER_S, extent.rates)
        rates = extent.rates or around(capacity_of(self._measured()))
        for i, rate in enumerate(rates):
            self._at(rate, rates[i + 1 :])
        for _ in range(0 if extent.rates else extent.refinements):
            loads = [point.offered_per_s for point in ascending(self._measured())]
            rate_more = next_rate(self.knee, loads[0], loads[-1])
            if rate_more is None:
                break
            self._say(f"{self.knee}; closing in")
            self._at(rate_more, ())
        return self.knee

    @property
    def knee(self) -> Knee:
        return find_knee(self._measured())

    def _measured(self) -> list[AtLoad]:
        return [at_load_of(point) for point in self._state.points]

    def _at(self, rate: float, to_come: tuple[float, ...]) -> None:
        extent = self._extent
        words = f"burst of {extent.requests}" if rate >= BURST_RATE_PER_S else f"{rate:g} req/s"
        if any(point.load.rate_per_s == rate for point in self._state.points):
            self._say(f"{words}: already measured")
            return
        left = eta_s((rate, *to_come), extent.requests, extent.repeats, self._overheads_s)
        self._say(
            f"{words}: {extent.repeats} × {extent.requests} requests; about {spoken(left)} left for {_count(1 + len(to_come), 'load')}"
        )
        started_s = time.monotonic()
        point, rows = self._measure(Load(rate_per_s=rate))
        if rate < BURST_RATE_PER_S:  # a burst is nothing but last answers
            self._overheads_s.append(max(0.0, (time.monotonic() - started_s) / extent.repeats - extent.requests / rate))
        found = at_load_of(point)
        self._refuse_nothing(found, words)
        self._state.add(point, rows)
        self._say(f"{words}: {_in_short(found)}")

    def _refuse_nothing(self, found: AtLoad, words: str) -> None:
        """Raises ValueError for what says nothing of this load; it is then not kept, and a later run measures it again.

        A server that refuses a whole load says something, one that is gone does not, nor one that hides what is asked of it.
        """
        if not found.highest("completed_per_s"):
            if not found.highest("shed_percent") or (found.is_burst and not self._extent.rates):
                if found.highest("shed_percent"):
                    raise ValueError(f"{words}: the server refused every request, which tells no rate to begin at: give --rates")
                raise ValueError(f"{words}: nothing was answered at all")
        elif found.queue_kept is None:
            raise ValueError(f"{words}: the server does not tell its queue time in /metrics: queue_ms cannot be judged")


def capacity_of(points: list[AtLoad]) -> float:
    """Responses per second when the whole trace is there at once: about what saturation brings. 0 when there was no burst."""
    burst = burst_of(points)
    return (burst.median("completed_per_s") or 0.0) if burst else 0.0


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def _in_short(point: AtLoad) -> str:
    figures = (
        ("goodput {:.3g} req/s", "goodput_per_s"),
        ("{:.0f} % within the SLO", "attainment_percent"),
        ("TTFT p95 {:.0f} ms", "ttft_p95_ms"),
        ("{:.0f} % shed", "shed_percent"),
    )
    told = [words.format(value) for words, name in figures if (value := point.median(name)) is not None]
    return ", ".join(told) or "nothing was answered"
