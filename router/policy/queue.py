"""Batches that wait at the router for a replica that keeps their promise.

Per class and tenant a lane in deadline order; among the lanes of a class deficit round robin by uncached tokens; among
classes first those behind their floor, then the earliest deadline. Bounded in requests and tokens. `_take` and `add` are
the only doors, so that sums over a lane are what its entries say (a test counts them again).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from router.policy.classes import Slo
from router.policy.request_view import RequestView

STARTED = 0.75  # part of the prefill that should be through at the deadline: at 1 the long are never passed, at 0 always by the short
QUANTUM_TOKENS = 1024  # uncached tokens per turn, times the tenant's weight


@dataclass(frozen=True, slots=True, order=False)
class Waiting:
    """One batch in the queue. `service_s` is the work it puts before those behind it, `prefill_s` its own until the first token."""

    batch_id: int
    view: RequestView
    arrival_s: float
    slo: Slo
    service_s: float
    new_tokens: int = 0  # that no cache holds
    prefill_s: float = 0.0
    request_id: str = ""

    @property
    def deadline_s(self) -> float:
        """Its turn comes by this: when its first step should have been, or part of its prefill."""
        return self.arrival_s + time_left_s(self.slo, self.new_tokens, self.prefill_s)


def time_left_s(slo: Slo, new_tokens: int, prefill_s: float) -> float:
    """From the arrival until the deadline."""
    return min(slo.queue_time_s, slo.ttft_within_s(new_tokens) - STARTED * prefill_s)


def _order(one: Waiting) -> tuple[float, int]:
    return (one.deadline_s, one.batch_id)


@dataclass(slots=True)
class _Lane:
    """One tenant's batches of one class; or those of all tenants, whose weights are summed up."""

    weight: float = 0.0
    entries: list[Waiting] = field(default_factory=list)
    work_s: float = 0.0
    deficit: float = 0.0  # tokens it may take yet

    def add(self, one: Waiting) -> None:
        insort(self.entries, one, key=_order)
        self.work_s += one.service_s

    def take(self, one: Waiting) -> None:
        place = bisect_left(self.entries, _order(one), key=_order)
        assert self.entries[place] is one
        del self.entries[place]
        self.work_s = self.work_s - one.service_s if self.entries else 0.0

    def work_before_s(self, deadline_s: float) -> float:
        """Of those with an earlier deadline; most often all, so that there is nothing to sum up."""
        place = bisect_right(self.entries, deadline_s, key=lambda one: one.deadline_s)
        if 2 * place < len(self.entries):
            return sum(one.service_s for one in self.entries[:place])
        return self.work_s - sum(one.service_s for one in self.entries[place:])


@dataclass(slots=True)
class _Line:
    """One class."""

    lanes: dict[str, _Lane] = field(default_factory=dict)  # of tenants with something waiting, in turn
    all: _Lane = field(default_factory=_Lane)  # the same batches once more, so that nobody has to go from lane to lane

    def turn(self, yields: Callable[[str], bool]) -> _Lane:
        """Whose head is next. Asked again before that head is taken, the answer is the same."""
        if len(self.lanes) == 1:
            return next(iter(self.lanes.values()))
        lanes = {tenant: lane for tenant, lane in self.lanes.items() if not yields(tenant)} or dict(self.lanes)
        while True:
            tenant, lane = next(iter(lanes.items()))
            if len(lanes) == 1 or lane.deficit >= lane.entries[0].new_tokens:
                return lane
            rounds = min((one.entries[0].new_tokens - one.deficit) / (QUANTUM_TOKENS * one.weight) for one in lanes.values())
            if rounds > 1:  # nobody can afford its head within a round: let the idle rounds pass at once
                for one in lanes.values():
                    one.deficit += math.floor(rounds) * QUANTUM_TOKENS * one.weight
            del self.lanes[tenant]  # to the end
            lanes[tenant] = self.lanes[tenant] = lanes.pop(tenant)
            following = next(iter(lanes.values()))
            following.deficit += QUANTUM_TOKENS * following.weight

    def earliest_s(self) -> float:
        return self.all.entries[0].deadline_s

    def others_s(self, tenant: str, lane: _Lane | None, own_s: float, weight: float) -> float:
        """Work of other tenants in between, while this one gets `own_s` done."""
        if len(self.lanes) == (tenant in self.lanes):
            return 0.0
        others = self.all.weight - (lane.weight if lane else 0.0)
        return max(0.0, min(self.all.work_s - (lane.work_s if lane else 0.0), own_s * others / weight))


class WaitQueue:
    def __init__(self, depth_max: int, tokens_max: int, weight_of: Callable[[str], float] = lambda tenant: 1.0) -> None:
        self._depth_max = depth_max
        self._tokens_max = tokens_max
        self._weight_of = weight_of
        self._entries: dict[int, Waiting] = {}
        self._lines: dict[str, _Line] = {}
        self.depth = 0  # requests: n choices count n
        self.tokens = 0  # of prompts: each counts once per choice

    # --- doors -------------------------------------------------------------------------------------------------------

    def has_room(self, view: RequestView) -> bool:
        return self.depth + view.choices <= self._depth_max and self.tokens + view.all_tokens <= self._tokens_max

    def could_hold(self, view: RequestView) -> bool:
        """If it were empty."""
        return view.choices <= self._depth_max and view.all_tokens <= self._tokens_max

    def add(self, one: Waiting) -> None:
        assert self.has_room(one.view)
        view = one.view
        line = self._lines.setdefault(view.request_class, _Line())
        lane = line.lanes.get(view.tenant)
        if lane is None:
            lane = line.lanes[view.tenant] = _Lane(self._weight_of(view.tenant))
            line.all.weight += lane.weight
        lane.add(one)
        line.all.add(one)
        self._entries[one.batch_id] = one
        self.depth += view.choices
        self.tokens += view.all_tokens

    def remove(self, batch_id: int, *, served: bool = False) -> bool:
        """Idempotent; False: it was not here. `served`: its tenant has had its turn."""
        one = self._entries.pop(batch_id, None)
        if one is None:
            return False
        view = one.view
        line = self._lines[view.request_class]
        lane = line.lanes[view.tenant]
        lane.take(one)
        line.all.take(one)
        if served:
            lane.deficit = max(0.0, lane.deficit - one.new_tokens)
        if not lane.entries:  # an empty lane saves nothing up
            del line.lanes[view.tenant]
            line.all.weight -= lane.weight
        if not line.lanes:
            del self._lines[view.request_class]
        self.depth -= view.choices
        self.tokens -= view.all_tokens
        return True

    # --- questions ---------------------------------------------------------------------------------------------------

    def head(self, first: Sequence[str] = (), yields: Callable[[str], bool] = lambda tenant: False) -> Waiting | None:
        """`first`: classes behind their floor. `yields`: tenants that have had more than their share; they come after the others."""
        if not self._lines:
            return None
        behind = [name for name in first if name in self._lines]
        name = behind[0] if behind else min(self._lines, key=lambda one: self._lines[one].earliest_s()) if len(self._lines) > 1 else ""
        line = self._lines[name] if name else next(iter(self._lines.values()))
        return line.turn(yields).entries[0]

    def others(self, head: Waiting, first: Sequence[str], yields: Callable[[str], bool], tpot_s: float) -> Iterator[Waiting]:
        """Who may go while `head` cannot: in the order of classes and turns, one of each lane, then the second of each.

        `tpot_s`: whoever was promised less per token is passed over unasked, however many they are.
        """
        names = sorted(self._lines, key=lambda name: (name not in first, self._lines[name].earliest_s()))
        lanes = [(yields(tenant), lane) for name in names for tenant, lane in self._lines[name].lanes.items()]
        rows = [
            (one for one in lane.entries if one is not head and (one.slo.tpot_s is None or one.slo.tpot_s >= tpot_s))
            for _, lane in sorted(lanes, key=lambda each: each[0])
        ]
        while rows:
            left = []
            for row in rows:
                if (one := next(row, None)) is not None:
                    yield one
                    left.append(row)
            rows = left

    def ahead_s(self, request_class: str, tenant: str, deadline_s: float) -> float:
        """Work that would come before such a request: its lane's with an earlier deadline, and what others get in between."""
        line = self._lines.get(request_class)
        lane = None if line is None else line.lanes.get(tenant)
        own_s = 0.0 if lane is None else lane.work_before_s(deadline_s)
        ahead_s = own_s + sum(other.all.work_before_s(deadline_s) for name, other in self._lines.items() if name != request_class)
        if line is None:
            return ahead_s
        return ahead_s + line.others_s(tenant, lane, own_s, self._weight_of(tenant) if lane is None else lane.weight)

    def with_ahead_s(self) -> Iterator[tuple[Waiting, float]]:
        """Each batch, the earliest deadline first, and the work that comes before it; they may be removed meanwhile.

        One walk: what a sweep costs must not grow with classes and tenants.
        """
        lines = dict(self._lines)
        passed_s = 0.0
        by_line = dict.fromkeys(lines, 0.0)
        by_lane: dict[tuple[str, str], float] = {}
        for one in sorted(chain.from_iterable(line.all.entries for line in lines.values()), key=_order):
            if one.batch_id not in self._entries:
                continue
            name, tenant = one.view.request_class, one.view.tenant
            line = lines[name]
            lane = line.lanes[tenant]
            own_s = by_lane.get((name, tenant), 0.0)
            yield one, own_s + max(0.0, passed_s - by_line[name]) + line.others_s(tenant, lane, own_s, lane.weight)
            if one.batch_id in self._entries:
                passed_s += one.service_s
                by_line[name] += one.service_s
                by_lane[name, tenant] = own_s + one.service_s

    def lacking(self, view: RequestView) -> tuple[int, int]:
        """Requests and tokens that would have to leave, so that it has room."""
        return self.depth + view.choices - self._depth_max, self.tokens + view.all_tokens - self._tokens_max

    def latest(self, request_class: str, tenant: str) -> Iterator[Waiting]:
        """Of one lane, the latest deadline first."""
        return reversed(self._lines[request_class].lanes[tenant].entries)

    def lanes(self) -> tuple[tuple[str, str], ...]:
        """(class, tenant) of all who wait."""
        return tuple((name, tenant) for name, line in self._lines.items() for tenant in line.lanes)

    def __contains__(self, batch_id: int) -> bool:
        return batch_id in self._entries

    def __iter__(self) -> Iterator[Waiting]:
        return iter(tuple(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def work_s(self) -> float:
        return sum(line.all.work_s for line in self._lines.values())
