"""The extreme of what was seen lately."""

from __future__ import annotations

import math


class LeastOfLate:
    """The least value: each counts for `period_s`, and at most twice as long."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._least = self._before = math.inf
        self._since_s = 0.0

    def see(self, value: float, now: float) -> None:
        self._turn(now)
        if value < self._least:
            self._least = value

    def least(self, now: float) -> float:
        """Infinite if none was seen."""
        self._turn(now)
        return min(self._least, self._before)

    def _turn(self, now: float) -> None:
        age_s = now - self._since_s
        if age_s >= self._period_s:
            self._before = self._least if age_s < 2 * self._period_s else math.inf
            self._least, self._since_s = math.inf, now
