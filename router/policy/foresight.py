"""What was foreseen lately, for those who ask the same before anything has happened.

A burst is refused within one step of the replicas: nothing has changed between two of its requests, and to judge each of them
anew would cost more than all the rest of their refusals.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.policy.admission import Overrun
from router.policy.classes import Terms
from router.policy.steady_clock import SteadyClock

VALID_S = 0.005  # nothing is predicted finer
KEPT_MAX = 64  # of different terms: clients choose their headers


@dataclass(frozen=True, slots=True)
class _Found:
    overrun: Overrun
    arrival_s: float  # of whom it was found for
    now: float


class Foresight:
    """By what was asked. Only of the hopeless: whoever has hope is judged, and that changes what comes after."""

    def __init__(self) -> None:
        self._found: dict[tuple[Terms, bool], _Found] = {}

    def forget(self) -> None:
        """Something has happened."""
        self._found.clear()

    def keep(self, terms: Terms, in_order: bool, arrival_s: float, overrun: Overrun, now: float) -> None:
        if len(self._found) >= KEPT_MAX:
            self._found.clear()
        self._found[terms, in_order] = _Found(overrun, arrival_s, now)

    def find(self, terms: Terms, in_order: bool, arrival_s: float, now: float) -> Overrun | None:
        """`in_order`: of the least request, whether it passes nobody.

        Whoever came earlier than who was judged has even less hope; whoever came later, up to a moment, no more.
        """
        found = self._found.get((terms, in_order))
        if found is None or now - found.now > VALID_S or arrival_s - found.arrival_s > VALID_S:
            return None
        return found.overrun


class Happening:
    """To be called with the time of every event: what was foreseen before no longer holds. The steady time of it."""

    def __init__(self, foresight: Foresight, steady: SteadyClock) -> None:
        self._foresight = foresight
        self._steady = steady

    def __call__(self, now: float) -> float:
        self._foresight.forget()
        return self._steady(now)
