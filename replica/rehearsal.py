"""Would an urgent request get a chunk of the step being planned if others yielded to it? The step rehearsed; changes nothing.

Whoever yields where the urgent one then finds no token left has lost its place for nothing: what comes first in the step
(decodes, prompts that stood still too long, prompts and starts that are no less urgent) is laid out as the scheduler will.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from replica.chunk_budget import ChunkBudget
from replica.kv_manager import Match
from replica.plan import Shape
from replica.request import Request
from replica.scheduling_policy import SchedulingPolicy

Start = tuple[Request, Match]


@dataclass(frozen=True, slots=True)
class Rehearsal:
    policy: SchedulingPolicy
    budget_beside: Callable[[Shape], ChunkBudget]  # what a step has left beside these decodes
    block_size: int

    def gets_a_chunk(self, start: Start, staying: Sequence[Request], started: Sequence[Start]) -> bool:
        """Beside those `staying`, after those of `started` that are in the queue before it."""
        request, match = start
        partial = [other for other in staying if not other.decodes]
        if self._stands_back(request, match, [*partial, *(other for other, _ in started)]):
            return False
        budget = self.budget_beside(_decodes(other for other in staying if other.decodes))
        overdue = {other.number for other in partial if self.policy.is_overdue(other)}  # membership only
        if self._is_short(request, match, partial, budget) and not overdue:
            return True
        before = [(other.number not in overdue, other.priority, 0, other, other.computed) for other in partial]
        before += [(True, other.priority, 1, other, found.computed) for other, found in started]
        before.sort(key=lambda entry: entry[:3])
        unfinished = 0
        for waits, priority, _, other, computed in before:
            if waits and priority > request.priority:
                continue
            wanted = len(other.tokens) - computed
            count = self._take(budget, other, computed)
            unfinished += priority <= request.priority and wanted - count > 0
        wanted = len(request.tokens) - match.computed
        count = budget.fit(match.computed, wanted, self.policy.chunk_tokens_max) if budget.tokens > 0 else 0
        return count == wanted or (count > 0 and unfinished < self.policy.partial_prefills_max)

    def _take(self, budget: ChunkBudget, request: Request, computed: int) -> int:
        count = budget.fit(computed, len(request.tokens) - computed, self.policy.chunk_tokens_max)
        if count:
            budget.spend(computed, count)
        return count

    def _is_short(self, request: Request, match: Match, partial: Sequence[Request], budget: ChunkBudget) -> bool:
        """It starts in the half of the budget that short prompts have of those partly computed (replica.starting)."""
        if not partial or request.priority > min(other.priority for other in partial):
            return False
        half = budget.half(max(other.computed for other in partial))
        wanted = len(request.tokens) - match.computed
        return half.tokens > 0 and half.fit(match.computed, wanted, self.policy.chunk_tokens_max) == wanted

    def _stands_back(self, request: Request, match: Match, writers: Iterable[Request]) -> bool:
        """The next block it needs is one that another is going to write, and it has not waited for that too often."""
        position = len(match.hits)
        if position >= min(len(request.keys), (len(request.tokens) - 1) // self.block_size):
            return False
        key = request.keys[position]
        waits = request.history.shared_waits < self.policy.shared_waits_max
        return waits and any(position < len(other.keys) and other.keys[position] == key for other in writers)


def _decodes(requests: Iterable[Request]) -> Shape:
    lengths = [len(request.tokens) for request in requests]
    return Shape(prefill_tokens=0, decodes=len(lengths), context_tokens=sum(lengths), prefill_context=0)
