"""One workload at one load on one configuration: its runs, each with its own scorecard, and how far they lie apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from bench.load import BURST_RATE_PER_S, Load
from bench.scorecard import FIGURES, Scorecard, figure
from bench.slo import Slo
from bench.timeline import Timeline
from bench.workload import WorkloadFacts


@dataclass(frozen=True, slots=True)
class Served:
    """What was measured. `configuration`: the settings that were given, by name; all others have their defaults."""

    name: str = "rantang"
    version: str = ""
    command: str = ""
    configuration: dict[str, str] = field(default_factory=dict)
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class Repeat:
    """One run. Its requests are in the result's side file."""

    date: str
    scorecard: Scorecard
    timeline: Timeline = field(default_factory=Timeline)


@dataclass(frozen=True, slots=True)
class FigureSpread:
    """One figure over the repeats that have it."""

    median: float
    least: float
    most: float
    runs: int


@dataclass(frozen=True, slots=True)
class Point:
    """`label` tells points of one result apart, e.g. "baseline" or "max_num_seqs=8"."""

    label: str
    workload: WorkloadFacts
    load: Load
    slo: Slo
    served: Served
    repeats: tuple[Repeat, ...]
    spread: dict[str, FigureSpread] = field(default_factory=dict)  # by figure; one that no run has is absent

    @property
    def is_burst(self) -> bool:
        """Whether all its requests were due at once."""
        if self.load.streams is not None:
            return False
        rate = self.figure("offered_per_s") if self.load.rate_per_s is None else self.load.rate_per_s
        return rate is None or rate >= BURST_RATE_PER_S

    @property
    def offered(self) -> str:
        """How it was loaded, in words."""
        return f"burst of {self.workload.requests}" if self.is_burst else self.load.over(self.workload.requests)

    def figure(self, name: str) -> float | None:
        """The median over the runs. Raises ValueError with the list for an unknown name."""
        figure(name)
        return self.spread[name].median if name in self.spread else None


def spread_of(cards: Sequence[Scorecard]) -> dict[str, FigureSpread]:
    spreads: dict[str, FigureSpread] = {}
    for each in FIGURES:
        known = [value for card in cards if (value := each.get(card)) is not None]
        if known:
            spreads[each.name] = FigureSpread(median(known), min(known), max(known), len(known))
    return spreads
