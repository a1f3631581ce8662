"""How busy the replicas are kept: what was lately sent to them to prefill, in seconds of theirs per second."""

from __future__ import annotations

import math

HALF_LIFE_S = 30.0
_MOST = 0.9  # more is not believed: a burst is no lasting load, and a tenfold price keeps requests with their prefixes anyhow
_MEMORY_S = HALF_LIFE_S / math.log(2)  # over which a steady load sums up


class Utilisation:
    """A forgetful sum of work. From the start it grows: whoever knows nothing takes the replicas for idle."""

    def __init__(self) -> None:
        self._work_s = 0.0
        self._as_of_s = 0.0

    def add(self, work_s: float, now: float) -> None:
        """Seconds that a replica will spend."""
        self._work_s = self._left_s(now) + max(0.0, work_s)
        self._as_of_s = now

    def of(self, replicas: int, now: float) -> float:
        """Of each of so many, between 0 and 0.9."""
        return min(_MOST, self._left_s(now) / (_MEMORY_S * max(1, replicas)))

    def _left_s(self, now: float) -> float:
        return self._work_s * float(0.5 ** (max(0.0, now - self._as_of_s) / HALF_LIFE_S))
