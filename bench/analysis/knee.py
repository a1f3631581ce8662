"""The knee of a sweep: the highest offered load that is still served as promised."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bench.analysis.at_load import AtLoad, ascending
from bench.analysis.steadiness import unsteadiness

KEPT_PERCENT = 95.0  # of the requests offered: the share that a p95 target speaks of


@dataclass(frozen=True, slots=True)
class Knee:
    """`load_per_s` None: not even the lowest load was kept. `broken_per_s` None: every load measured was."""

    load_per_s: float | None
    goodput_per_s: float | None
    broken_per_s: float | None  # the next load above, which is not kept
    peak_goodput_per_s: float | None  # wherever it lies
    kept_percent: float = KEPT_PERCENT
    unsteady: str = ""  # why its load was not offered for long enough to be called borne

    @property
    def found(self) -> bool:
        """Both sides of it were measured."""
        return self.load_per_s is not None and self.broken_per_s is not None

    def __str__(self) -> str:
        broken = f"{self.broken_per_s:g} req/s" if self.broken_per_s is not None else "none"
        if self.load_per_s is None:
            if self.broken_per_s is None:
                return "no knee: nothing was measured"
            return f"no knee: already at the lowest load, {broken}, the SLO is not kept"
        goodput = f"{self.goodput_per_s or 0:.3g} req/s"
        doubt = f"; {self.unsteady}" if self.unsteady else ""
        return f"knee at {self.load_per_s:g} req/s, goodput {goodput}{self.edge(f'; at {broken} the SLO is not kept any more')}{doubt}"

    def edge(self, above: str) -> str:
        """What lies above the knee: `above` where that was measured."""
        if self.found:
            return above
        return ", the highest load measured" + ("" if self.unsteady else ": the true limit lies above")


def find_knee(points: Iterable[AtLoad], kept_percent: float = KEPT_PERCENT) -> Knee:
    """The highest measured load at which, as at every lower one, `kept_percent` of the requests offered were good.

    Good is a complete, right answer within the SLO, so this is at once where goodput stops following the offered load and
    the last load whose p95 targets hold. A target for queue time is held against the server's own p95; one that was not
    measured is not kept. Shares of requests are compared, not rates: the time in which the last answers of
    a finite trace run out lowers every rate and no share. The middle run of n counts. A load above a broken one is never
    the knee, whatever it brought: what holds at 4 and 6 but not at 5 does not hold at 6.
    """
    kept: AtLoad | None = None
    broken: AtLoad | None = None
    loads = ascending(points)
    for point in loads:
        share = point.median("attainment_percent")
        if share is None or share < kept_percent or not point.queue_kept:
            broken = point
            break
        kept = point
    goodputs = [value for point in loads if (value := point.median("goodput_per_s")) is not None]
    return Knee(
        load_per_s=kept.offered_per_s if kept else None,
        goodput_per_s=kept.median("goodput_per_s") if kept else None,
        broken_per_s=broken.offered_per_s if broken else None,
        peak_goodput_per_s=max(goodputs, default=None),
        kept_percent=kept_percent,
        unsteady=unsteadiness(kept) if kept else "",
    )
