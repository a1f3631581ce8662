"""Would an urgent request get a chunk of the step being planned if others yielded to it? The step rehearsed; changes nothing.

Whoever yields where the urgent one then finds no token left has lost its place for nothing: what comes first in the step
(decodes, prompts that stood still too long, prompts and starts that are no less urgent) is laid out as the scheduler will.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from replica.chunk_budget import ChunkBudget
from replica.kv_manager import KvManager, Match
from replica.plan import Shape
from replica.request import Request
from replica.scheduling_policy import SchedulingPolicy

Start = tuple[Request, Match]


@dataclass(frozen=True, slots=True)
class Rehearsal:
    policy: SchedulingPolicy
    budget_beside: Callable[[Shape], ChunkBudget]  # what a step has left beside these decodes
    kv: KvManager

    def gets_a_chunk(self, start: Start, staying: Sequence[Request], started: Sequence[Start]) -> bool:
        """Beside those `staying`, after those of `started` that are in the queue before it."""
        request, match = start
        partial = [other for other in staying if not other.decodes]
        budget = self._beside(staying)
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

    def stands_back(self, start: Start, staying: Sequence[Request], started: Sequence[Start]) -> bool:
        """The next block it needs is announced as its turn comes, and it has not waited for one too often (replica.starting)."""
        request, match = start
        awaited = self.kv.awaited(request, match)
        waits = awaited is not None and request.history.shared_waits < self.policy.shared_waits_max
        return waits and awaited in self._announced(request, staying, started)

    def _announced(self, request: Request, staying: Sequence[Request], started: Sequence[Start]) -> set[bytes]:
        """What the overdue and those `started` write before `request`; and what everybody else who is partly computed is about to write,
        unless `request` starts before all of them."""
        overdue = [other for other in staying if not other.decodes and self.policy.is_overdue(other)]
        overdue.sort(key=lambda other: (-other.history.left_out, other.number))
        partial = [other for other in staying if not other.decodes and not self.policy.is_overdue(other)]
        urgency = min((other.priority for other in partial), default=request.priority + 1)
        budget = self._beside(staying)
        keys = set[bytes]()
        for other in overdue:
            keys.update(self._filled(other, other.keyed, other.computed + self._take(budget, other, other.computed)))
        for before in (True, False):
            for other, found in started:
                if (other.priority < urgency) == before:
                    keys.update(self._filled(other, len(found.hits), found.computed + self._take(budget, other, found.computed)))
            if before and request.priority >= urgency:
                for other in partial:
                    keys.update(self._filled(other, other.keyed, min(len(other.tokens), other.computed + budget.tokens)))
        return keys

    def _filled(self, request: Request, keyed: int, end: int) -> list[bytes]:
        return request.keys[keyed : end // self.kv.block_size]

    def _beside(self, staying: Sequence[Request]) -> ChunkBudget:
        return self.budget_beside(_decodes(other for other in staying if other.decodes))

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


def _decodes(requests: Iterable[Request]) -> Shape:
    lengths = [len(request.tokens) for request in requests]
    return Shape(prefill_tokens=0, decodes=len(lengths), context_tokens=sum(lengths), prefill_context=0)
