"""Reports that cannot be true: a replica that says such a thing is not believed, and nothing breaks (L9).

The router divides by these numbers and sorts by them: everything it reads is checked here once, when it comes.
"""

from __future__ import annotations

import math

from replica.contract.messages import EngineLimits, LoadReport, TokenDelta

COUNT_MAX = 2**40
STEP_S_MAX = 3600.0


class Lies:
    """How often, by reason."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def note(self, reason: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1


def limits_fault(limits: EngineLimits) -> str | None:
    """None: nothing is wrong. The reason is one word, for a metric's label."""
    numbers = (
        limits.max_model_len,
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        limits.num_blocks,
        limits.block_size,
        limits.vocab_size,
    )
    if not all(0 < one <= COUNT_MAX for one in numbers) or not 0 <= limits.max_waiting <= COUNT_MAX:
        return "limits"
    if limits.step_slo_s is not None and not (math.isfinite(limits.step_slo_s) and limits.step_slo_s > 0):
        return "limits"
    return None


def load_fault(load: LoadReport, limits: EngineLimits, before: LoadReport | None = None) -> str | None:
    """`before`: the last report of the same incarnation that was believed."""
    running, waiting, queued, context = load.running, load.waiting, load.queued_prefill_tokens, load.context_tokens
    if load.progress < 0 or running < 0 or waiting < 0 or queued < 0 or context < 0 or load.free_blocks < 0 or load.evictable_blocks < 0:
        return "negative_load"
    if (
        max(load.progress, running, waiting, queued, context, load.free_blocks, load.evictable_blocks) > COUNT_MAX
        or load.free_blocks + load.evictable_blocks > limits.num_blocks
    ):
        return "impossible_load"
    if load.short_prefill_tokens is not None and not 0 <= load.short_prefill_tokens <= load.queued_prefill_tokens:
        return "impossible_load"
    k = load.step_time
    if not (  # what is no number is in no range
        0 <= k.a <= STEP_S_MAX
        and 0 <= k.b <= STEP_S_MAX
        and 0 <= k.c <= STEP_S_MAX
        and 0 <= k.d <= STEP_S_MAX
        and 0 <= k.e <= STEP_S_MAX
        and 0 <= load.predicted_step_s <= STEP_S_MAX
    ):
        return "step_time"
    if not (0 <= load.step_spread <= 1 and 0 <= load.busy_s < math.inf and 0 <= load.foreseen_s < math.inf):  # which NaN never is
        return "step_time"
    if before is not None and load.progress < before.progress:
        return "progress"
    return None


def delta_fault(delta: TokenDelta) -> str | None:
    """Of what a first delta says for admission to learn from."""
    if delta.waited_s is not None and not (math.isfinite(delta.waited_s) and 0 <= delta.waited_s <= 24 * STEP_S_MAX):
        return "waited"
    if delta.cached_tokens is not None and not 0 <= delta.cached_tokens <= COUNT_MAX:
        return "cached_tokens"
    return None
