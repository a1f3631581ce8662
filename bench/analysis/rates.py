"""Which loads a sweep offers: a ladder around what the server bears, then halvings of where the knee must lie."""

from __future__ import annotations

import math

from bench.analysis.knee import Knee

OF_CAPACITY = (0.25, 0.5, 0.7, 0.85, 1.0, 1.25)
BRACKET = 1.12  # the knee is known well enough when the two loads around it are this close


def around(capacity_per_s: float) -> tuple[float, ...]:
    """From well below to above saturation. Raises ValueError when nothing is known of the capacity."""
    if not (capacity_per_s > 0 and math.isfinite(capacity_per_s)):
        raise ValueError("nothing was answered at all: there is no load to begin with")
    return tuple(rounded(capacity_per_s * part) for part in OF_CAPACITY)


def next_rate(knee: Knee, lowest_per_s: float, highest_per_s: float) -> float | None:
    """One more load worth measuring, None when the knee is bracketed.

    Half the lowest when that already breaks, half as much again as the highest when none does, else the middle (geometric).
    """
    if knee.load_per_s is None and knee.broken_per_s is None:
        return None
    if knee.load_per_s is None:
        return rounded(lowest_per_s / 2)
    if knee.broken_per_s is None:
        return rounded(highest_per_s * 1.5)
    if knee.broken_per_s / knee.load_per_s <= BRACKET:
        return None
    return rounded(math.sqrt(knee.load_per_s * knee.broken_per_s))


def parse(text: str) -> tuple[float, ...]:
    """`0.5,1,2` as ascending loads. Raises ValueError with what is wrong, and for one given twice."""
    rates: list[float] = []
    for part in text.split(","):
        try:
            rate = float(part)
        except ValueError:
            raise ValueError(f"{part.strip()!r} is no rate; give numbers such as 0.5,1,2, or auto") from None
        if not (rate > 0 and math.isfinite(rate)):
            raise ValueError(f"a rate must be a positive number, got {part.strip()}")
        if rate in rates:
            raise ValueError(f"the rate {rate:g} is given twice: --repeats 2 measures each twice")
        rates.append(rate)
    return tuple(sorted(rates))


def rounded(rate: float) -> float:
    """To three significant digits: what is printed is what was offered."""
    return float(f"{rate:.3g}")
