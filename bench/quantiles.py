"""Quantiles, one definition for every figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles in milliseconds; None: nothing to take them from."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


def quantile(values: Sequence[float], q: float) -> float | None:
    """The smallest value that at least the fraction q of the values do not exceed; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def spread_ms(values_s: Sequence[float | None]) -> Spread:
    """Of seconds, those that are known."""
    known = sorted(value * 1e3 for value in values_s if value is not None)
    p50, p95, p99 = (quantile(known, q) for q in (0.5, 0.95, 0.99))
    return Spread(*(None if value is None else round(value, 3) for value in (p50, p95, p99)))
