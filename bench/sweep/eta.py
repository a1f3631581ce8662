"""How long a sweep will still take, from the loads that are to come and what earlier runs took beyond their traces."""

from __future__ import annotations

from collections.abc import Sequence


def eta_s(rates: Sequence[float], requests: int, repeats: int, overheads_s: Sequence[float]) -> float:
    """`overheads_s`: of earlier runs, what they took beyond the time in which their requests became due (warm-up, last answers)."""
    beyond_s = sum(overheads_s) / len(overheads_s) if overheads_s else 0.0
    return repeats * sum(requests / rate + beyond_s for rate in rates)
