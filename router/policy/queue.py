"""Batches that wait at the router for a replica that keeps their promise: deadline order, bounded in requests and tokens."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

from router.policy.request_view import RequestView


@dataclass(frozen=True, slots=True, order=False)
class Waiting:
    """One batch in the queue. `service_s` is the work it puts before those behind it."""

    batch_id: int
    view: RequestView
    arrival_s: float
    slo_s: float
    service_s: float

    @property
    def deadline_s(self) -> float:
        """When its first step should have been."""
        return self.arrival_s + self.slo_s


def _order(one: Waiting) -> tuple[float, int]:
    return (one.deadline_s, one.batch_id)


def _tokens(view: RequestView) -> int:
    return view.total_tokens or view.choices * view.prompt_tokens


class WaitQueue:
    """Depth and tokens are measured on the container itself, never counted beside it."""

    def __init__(self, depth_max: int, tokens_max: int) -> None:
        self._depth_max = depth_max
        self._tokens_max = tokens_max
        self._entries: list[Waiting] = []

    def has_room(self, view: RequestView) -> bool:
        """n choices count n; a prompt counts once per choice."""
        return self.depth + view.choices <= self._depth_max and self.tokens + _tokens(view) <= self._tokens_max

    def add(self, one: Waiting) -> None:
        assert self.has_room(one.view)
        insort(self._entries, one, key=_order)

    def remove(self, batch_id: int) -> bool:
        """Idempotent; False: it was not here."""
        for place, one in enumerate(self._entries):
            if one.batch_id == batch_id:
                del self._entries[place]
                return True
        return False

    def head(self) -> Waiting | None:
        return self._entries[0] if self._entries else None

    def ahead_s(self, deadline_s: float) -> float:
        """Work of those with an earlier deadline."""
        return sum(one.service_s for one in self._entries if one.deadline_s <= deadline_s)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(tuple(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def depth(self) -> int:
        return sum(one.view.choices for one in self._entries)

    @property
    def tokens(self) -> int:
        return sum(_tokens(one.view) for one in self._entries)

    @property
    def work_s(self) -> float:
        return sum(one.service_s for one in self._entries)
