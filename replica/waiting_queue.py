"""Requests that hold nothing yet, or no longer: in order, with a bound on how often one is passed.

Order: class (priority), then who has been passed too often, then preempted before new, then arrival. A request that
starts passes every earlier arrival of its class (or a more urgent one) that still waits. Passed `bypasses_max` times, a
request goes to the head of its class, and nothing of its class starts before it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import islice

from replica.request import Request, State

Place = tuple[int, int, int, int, int]


def by_arrival(request: Request) -> int:
    """The order inside a class: nothing goes before arrival."""
    return 0


class WaitingQueue:
    """`rank` may prefer some requests of a class (lower first); the bound holds whatever it prefers."""

    def __init__(self, *, bypasses_max: int, rank: Callable[[Request], int] = by_arrival) -> None:
        self._bypasses_max = bypasses_max
        self._rank = rank
        self._places: dict[int, Place] = {}
        self._line: list[tuple[Place, Request]] = []
        self.agings = 0  # requests that have gone to the head of their class so far: whoever goes through the line then begins anew

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._line)

    def first(self, count: int) -> list[Request]:
        return [request for _, request in islice(self._line, count)]

    def is_aged(self, request: Request) -> bool:
        return request.history.bypasses >= self._bypasses_max

    def add(self, request: Request) -> None:
        place = self._place(request)
        self._places[request.number] = place
        insort(self._line, (place, request), key=_place_of)

    def remove(self, request: Request) -> None:
        """Raises KeyError if it does not wait."""
        place = self._places.pop(request.number)
        del self._line[bisect_left(self._line, place, key=_place_of)]

    def passed_by(self, started: Request) -> None:
        """`started` has left the queue to run: whoever came before it and is not less urgent has been passed."""
        aged: list[Request] = []
        for _, request in self._line:
            if request.priority > started.priority:
                break
            if request.number < started.number:
                request.history.bypasses += 1
                if request.history.bypasses == self._bypasses_max:
                    aged.append(request)
        self.agings += len(aged)
        for request in aged:
            self.remove(request)
            self.add(request)

    def _place(self, request: Request) -> Place:
        preempted_first = 0 if request.state is State.PREEMPTED else 1
        if self.is_aged(request):
            return (request.priority, 0, 0, 0, request.number)
        return (request.priority, 1, preempted_first, self._rank(request), request.number)


def _place_of(entry: tuple[Place, Request]) -> Place:
    return entry[0]
