"""Prefill: the next part of a request's uncomputed tokens."""

from __future__ import annotations

from replica.chunk_budget import ChunkBudget
from replica.kv_manager import KvManager
from replica.plan import PlanBuilder
from replica.request import Request
from replica.step import Row


def add_chunk(builder: PlanBuilder, budget: ChunkBudget, kv: KvManager, request: Request, tokens_max: int | None) -> bool:
    """As much of `request` as the budget and `tokens_max` allow; False if that is nothing."""
    start = request.computed
    count = budget.fit(start, len(request.tokens) - start, tokens_max)
    if count < 1:
        return False
    budget.spend(start, count)
    request.history.left_out = 0
    builder.add_chunk(request, chunk_row(request, start, count))
    kv.announce(request, start + count)
    return True


def chunk_row(request: Request, start: int, count: int) -> Row:
    """Positions start … start+count-1: draws if they reach the end and a token may follow, scores what has no score yet.

    The last position of a chunk judges the token after it, so no chunk computes anything for the sake of a score.
    """
    end = start + count
    draws = end == len(request.tokens) and end < request.tokens_max
    score_from = score_next = None
    score_top = 0
    scoring = request.scoring
    if scoring is not None and len(scoring.scores) < min(end + 1, request.terms.prompt_length):
        score_from = len(scoring.scores)
        score_top = scoring.top
        score_next = request.tokens[end] if end < request.terms.prompt_length else None
    return Row(
        request=request.number,
        tokens=request.tokens[start:end],
        start=start,
        blocks=request.blocks,
        draw=request.draw if draws else None,
        score_from=score_from,
        score_top=score_top,
        score_next=score_next,
    )
