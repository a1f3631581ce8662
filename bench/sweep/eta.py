"""How long a sweep will still take, from the loads that are to come and what earlier runs took beyond their traces."""

from __future__ import annotations

from collections.abc import Sequence


def eta_s(rates: Sequence[float], requests: int, repeats: int, overheads_s: Sequence[float]) -> float:
    """`overheads_s`: of earlier runs, what they took beyond the time in which their requests became due (warm-up, last answers)."""
    beyond_s = sum(overheads_s) / len(overheads_s) if overheads_s else 0.0
    return repeats * sum(requests / rate + beyond_s for rate in rates)


def spoken(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `1 h 5 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
