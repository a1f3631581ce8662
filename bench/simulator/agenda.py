"""The virtual clock: what is to happen when. Equal times happen in the order in which they were written down."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Agenda:
    """`now` moves only by `next`; nothing here looks at a real clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0  # that have happened
        self._heap: list[tuple[float, int, Callable[..., object], tuple[object, ...]]] = []
        self._order = 0

    def at(self, time_s: float, what: Callable[..., object], *arguments: object) -> None:
        """A time that has passed already is now."""
        self._order += 1
        heapq.heappush(self._heap, (max(time_s, self.now), self._order, what, arguments))

    def next(self, until_s: float) -> bool:
        """Let the next event happen, if it is due by `until_s`. False: nothing is left to happen until then."""
        if not self._heap or self._heap[0][0] > until_s:
            return False
        self.now, _, what, arguments = heapq.heappop(self._heap)
        self.events += 1
        what(*arguments)
        return True
