"""The difference of two means with what can be said of it: Welch's interval, for a few repeats each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# Two-sided 95 % points of Student's t by degrees of freedom; between two entries the lower one, which is the cautious one.
_T_95 = (
    (1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (6, 2.447), (7, 2.365), (8, 2.306), (9, 2.262), (10, 2.228),
    (12, 2.179), (14, 2.145), (16, 2.120), (18, 2.101), (20, 2.086), (25, 2.060), (30, 2.042), (40, 2.021), (60, 2.000), (120, 1.980),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """b − a. The interval covers the true difference in 95 of 100 such comparisons; None: too few runs to tell."""

    a: float  # mean
    b: float
    low: float | None
    high: float | None

    @property
    def change(self) -> float:
        return self.b - self.a

    @property
    def percent(self) -> float | None:
        return 100 * (self.b - self.a) / abs(self.a) if self.a else None

    @property
    def real(self) -> bool | None:
        """Whether the difference exceeds the spread; None: cannot tell."""
        if self.low is None or self.high is None:
            return None
        return self.low > 0 or self.high < 0


def difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """Of n runs each. Welch: the two may spread differently. Fewer than two runs on a side: no interval."""
    if not a or not b:
        raise ValueError("a mean of nothing")
    mean_a, mean_b = statistics.fmean(a), statistics.fmean(b)
    if len(a) < 2 or len(b) < 2:
        return Difference(mean_a, mean_b, None, None)
    part_a, part_b = statistics.variance(a) / len(a), statistics.variance(b) / len(b)
    error = math.sqrt(part_a + part_b)
    if error == 0.0:
        return Difference(mean_a, mean_b, mean_b - mean_a, mean_b - mean_a)
    freedom = (part_a + part_b) ** 2 / (part_a**2 / (len(a) - 1) + part_b**2 / (len(b) - 1))
    half = t_95(freedom) * error
    return Difference(mean_a, mean_b, mean_b - mean_a - half, mean_b - mean_a + half)


def t_95(freedom: float) -> float:
    """The two-sided 95 % point of Student's t, never too small."""
    point = _T_95[0][1]
    for least, value in _T_95:
        if freedom + 1e-9 >= least:
            point = value
    return point
