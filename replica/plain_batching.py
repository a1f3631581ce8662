"""The baselines: how engines chose who starts before ours, kept to be measured against.

iteration   Requests join and leave at every step, strictly in order: the head of the queue starts as soon as there are a slot,
            pages for its tokens now and budget, and nobody passes it.
static      A batch is filled in the same way until nobody more fits, then closed: it runs until its last member has ended,
            and only then is the next one begun. Members that have ended keep their slots, not their pages.
"""

from __future__ import annotations

from replica.chunk_budget import ChunkBudget
from replica.chunks import add_chunk
from replica.kv_manager import Match
from replica.plan import PlanBuilder
from replica.request import Request
from replica.roster import Roster
from replica.scheduling_policy import SchedulingPolicy


class PlainBatching:
    """Starts waiting requests in a step; remembers the batch that runs, where batches are closed."""

    def __init__(self, roster: Roster, policy: SchedulingPolicy) -> None:
        self._roster = roster
        self._policy = policy
        self._static = policy.batching == "static"
        self._members = 0
        self._closed = False

    def start_in_order(self, builder: PlanBuilder, budget: ChunkBudget) -> None:
        roster = self._roster
        if not roster.running:
            self._members, self._closed = 0, False
        if self._static and self._closed:
            return
        before = self._members
        for request in roster.waiting.first(roster.slots):
            free_slots = roster.slots - self._members if self._static else roster.free_slots
            match = roster.kv.match(request)
            if free_slots < 1 or match.needed > roster.kv.pool.available or not self._has_budget(builder, budget, request, match):
                break
            copy = roster.start(request, match)
            if copy is not None:
                builder.add_copy(copy)
            add_chunk(builder, budget, roster.kv, request, self._policy.chunk_tokens_max)
            self._members += 1
        self._closed = self._members == before and self._members > 0

    def _has_budget(self, builder: PlanBuilder, budget: ChunkBudget, request: Request, match: Match) -> bool:
        lacking = len(request.tokens) - match.computed
        fits = budget.fit(match.computed, lacking, self._policy.chunk_tokens_max)
        return fits == lacking or (fits > 0 and builder.partials(self._roster.running) < self._policy.partial_prefills_max)
