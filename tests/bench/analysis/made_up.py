"""Sweeps made up for the tests of the analysis: what a server of a known capacity would have brought."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.analysis.at_load import AtLoad, Figures


def at_load(offered_per_s: float, attainment: float, runs: int = 1, **figures: float | None) -> AtLoad:
    """The same figures in every run."""
    every: dict[str, float | None] = {
        "attainment_percent": attainment,
        "accepted_percent": attainment,
        "goodput_per_s": offered_per_s * attainment / 100,
        **figures,
    }
    return AtLoad(offered_per_s, (every,) * runs)


def burst(**figures: float | None) -> AtLoad:
    return AtLoad(math.inf, (figures,))


def served(capacity_per_s: float, rates: Sequence[float], *, runs: int = 1, jitter: float = 0.0) -> tuple[AtLoad, ...]:
    """A server that keeps every load up to its capacity, and above it only what it can do; TTFT grows towards it."""

    def one(rate: float, run: int) -> Figures:
        wobble = 1 + jitter * (run - (runs - 1) / 2)
        kept = min(1.0, capacity_per_s / rate) ** 2
        return {
            "attainment_percent": 100 * kept,
            "accepted_percent": 100 * kept,
            "goodput_per_s": rate * kept * wobble,
            "completed_per_s": min(rate, capacity_per_s),
            "ttft_p95_ms": 100 * wobble / max(0.02, 1 - rate / (1.1 * capacity_per_s)),
            "shed_percent": 100 * (1 - min(1.0, capacity_per_s / rate)),
            "error_percent": 0.0,
            "preemptions": 0.0,
            "kv_use_max_percent": min(100.0, 60 * rate / capacity_per_s),
        }

    return tuple(AtLoad(rate, tuple(one(rate, run) for run in range(runs))) for rate in rates)
