"""Time that never runs back: leases, deadlines and half-lives rely on it."""

from __future__ import annotations

from router.policy.report_check import Lies


class SteadyClock:
    """Give it every reading of a clock; one that steps back stands still until it has caught up, and is noted."""

    def __init__(self, now: float, lies: Lies) -> None:
        self._now = now
        self._lies = lies

    def __call__(self, now: float) -> float:
        if now >= self._now:
            self._now = now
        else:
            self._lies.note("clock")
        return self._now
