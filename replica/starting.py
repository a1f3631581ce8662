"""Which waiting requests start in a step: in order, past those that do not fit, within the queue's bound."""

from __future__ import annotations

import math

from replica.chunk_budget import ChunkBudget
from replica.chunks import add_chunk
from replica.growth import Forecast
from replica.kv_manager import Match
from replica.plan import PlanBuilder
from replica.request import Request
from replica.roster import Roster
from replica.scheduling_policy import SchedulingPolicy

_SCAN_MAX = 64  # waiting requests looked at
_MISFITS_MAX = 16  # of those, how many may turn out not to fit: each costs a look into the cache and at the forecast


class Starting:
    """One step's starts."""

    def __init__(self, roster: Roster, policy: SchedulingPolicy, builder: PlanBuilder, budget: ChunkBudget) -> None:
        self._roster = roster
        self._policy = policy
        self._builder = builder
        self._budget = budget
        self._forecast: Forecast | None = None
        self._least_urgent: int | None = None  # the priority, once asked for
        self._stood_back: set[int] = set()  # numbers; membership only

    def start_before(self, partial: list[Request]) -> None:
        """Before the partly computed go on: whoever is more urgent than all of them, then who is short."""
        if self._policy.by_priority:
            self.start_in_order(below=min(request.priority for request in partial))
        self._start_short(partial)

    def _start_short(self, partial: list[Request]) -> None:
        """Waiting requests that half of the budget completes, of its tokens and of its seconds. A long prompt does not hold up short
        ones, and is at most halved by them, or to a block. Nobody less urgent than the most urgent partial profits."""
        roster, budget = self._roster, self._budget
        if not roster.waiting or not roster.free_slots:
            return
        for request in partial:  # what they are about to write is no reason to compute it twice
            roster.kv.announce(request, min(len(request.tokens), request.computed + budget.tokens))
        half, agings = budget.half(max(request.computed for request in partial)), roster.waiting.agings
        urgency = min(request.priority for request in partial)
        for request in roster.waiting.first(_SCAN_MAX):
            if not roster.free_slots or half.tokens < 1 or request.priority > urgency:
                return
            match = self._match(request)
            if match is None:
                continue
            if self._fit(request, match, half) == len(request.tokens) - match.computed and self._has_room(request, match):
                self._start(request, match, half)
                if roster.waiting.agings != agings:
                    return  # nobody may pass who is at the head now: the rest is for another step
            elif roster.waiting.is_aged(request):
                return

    def start_again(self, since: int) -> None:
        """The step before has been settled: who may start now, if anybody came or left after change number `since`, or stood back."""
        if self._roster.waiting and (self._stood_back or self._roster.changes != since):
            self._forecast = self._least_urgent = None
            self._stood_back.clear()
            self.start_in_order()

    def start_in_order(self, below: int | None = None) -> None:
        """As many as there are slots, budget, pages and partial prefills for; only priorities `below`, if given. Who has been passed
        for the last time by one of them is at the head from then on."""
        while self._start_in_this_order(below):
            pass

    def _start_in_this_order(self, below: int | None) -> bool:
        """True if a start has changed the order."""
        roster, budget = self._roster, self._budget
        agings, misfits = roster.waiting.agings, 0
        for request in roster.waiting.first(_SCAN_MAX):
            if not roster.free_slots or budget.tokens < 1 or (below is not None and request.priority >= below):
                return False
            match = self._match(request)
            if match is None:
                continue
            fits = self._fit(request, match, budget)
            may = fits == len(request.tokens) - match.computed or (fits > 0 and self._may_be_partial(request))
            if may and self._has_room(request, match):
                self._start(request, match, budget)
                if roster.waiting.agings != agings:
                    return True
                continue
            misfits += 1
            if misfits == _MISFITS_MAX or roster.waiting.is_aged(request):
                return False  # an aged one has been passed often enough: nobody starts before it
        return False

    def _may_be_partial(self, request: Request) -> bool:
        """Not too many are partly computed; those less urgent than `request` do not count."""
        not_less_urgent = (other for other in self._roster.running if other.priority <= request.priority)
        return self._builder.partials(not_less_urgent) < self._policy.partial_prefills_max

    def _match(self, request: Request) -> Match | None:
        """What the cache holds for it; None if it stands back in this step of its own accord."""
        history = request.history
        if history.preempted_at_step == self._roster.step_id or request.number in self._stood_back:
            return None  # it has just yielded, or does so already
        match = self._roster.kv.match(request)
        if match.pending and history.shared_waits < self._policy.shared_waits_max:
            history.stand_back(self._roster.step_id)
            self._stood_back.add(request.number)
            return None
        if match.copy_source is not None and not self._has_room(request, match):
            return self._roster.kv.without_copy(match)
        return match

    def _has_room(self, request: Request, match: Match) -> bool:
        """Pages for its tokens now, and for everybody's growth later; alone, or where others would yield to it, now is enough."""
        roster = self._roster
        if match.needed > roster.kv.pool.available:
            return False
        if self._least_urgent is None:
            self._least_urgent = max((other.priority for other in roster.running), default=request.priority)
        if not roster.running or self._least_urgent > request.priority:
            return True
        return self._everyone().fits(request, match.needed)

    def _start(self, request: Request, match: Match, budget: ChunkBudget) -> None:
        self._everyone().add(request, match.needed)
        assert self._least_urgent is not None, "nobody starts without having been looked at"
        self._least_urgent = max(self._least_urgent, request.priority)
        copy = self._roster.start(request, match)
        if copy is not None:
            self._builder.add_copy(copy)
        add_chunk(self._builder, budget, self._roster.kv, request, self._policy.chunk_tokens_max)

    def _everyone(self) -> Forecast:
        if self._forecast is None:
            roster = self._roster
            pool = roster.kv.pool
            self._forecast = Forecast(
                capacity=pool.count,
                in_use=pool.referenced,
                block_size=roster.kv.block_size,
                running=roster.running,
                growth=roster.growth,
            )
        return self._forecast

    def _fit(self, request: Request, match: Match, budget: ChunkBudget) -> int:
        return budget.fit(match.computed, len(request.tokens) - match.computed, self._policy.chunk_tokens_max)


def may_pass(roster: Roster, policy: SchedulingPolicy) -> float | None:
    """Tokens of the longest prompt that may pass longer ones now, as far as the policy goes; None: nobody may.

    Urgency has an order of its own; an aged head lets nobody pass, and who stands behind too many is not looked at.
    """
    if policy.batching != "adaptive" or policy.by_priority or len(roster.waiting) >= _SCAN_MAX:
        return None
    if any(roster.waiting.is_aged(request) for request in roster.waiting.first(1)):
        return None
    return math.inf if policy.chunk_tokens_max is None else policy.chunk_tokens_max
