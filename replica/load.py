"""The engine's load, computed from the containers themselves each time it is asked for."""

from __future__ import annotations

from replica.contract.messages import EngineLimits, LoadReport
from replica.contract.step_time import chunk_tokens
from replica.plan import Plan, Shape
from replica.roster import Roster
from replica.scheduling_policy import SchedulingPolicy
from replica.starting import may_pass
from replica.step_time_fit import StepTimeFit


def load_report(
    roster: Roster,
    *,
    progress: int,
    step_time: StepTimeFit,
    policy: SchedulingPolicy,
    limits: EngineLimits,
    current: Plan | None,
    draining: bool,
    block_bytes: int,
) -> LoadReport:
    """State now. `current` is the step that runs, if one does; else the predicted step is one token for everyone who runs."""
    pool = roster.kv.pool
    size = roster.kv.block_size
    context = 0
    queued = 0
    for request in roster.running:
        computed = request.computed
        context += computed
        lacking = len(request.tokens) - computed
        if lacking > 1:
            queued += lacking
    short_tokens = _short_tokens(roster, policy, step_time, limits, context)
    short = 0
    for request in roster.waiting:
        lacking = max(1, len(request.tokens) - request.history.known_hits * size)
        queued += lacking
        if short_tokens is not None and lacking <= short_tokens:
            short += lacking
    shape = current.shape if current is not None else Shape(0, len(roster.running), context + len(roster.running), 0)
    return LoadReport(
        progress=progress,
        running=len(roster.running),
        waiting=len(roster.waiting),
        queued_prefill_tokens=queued,
        context_tokens=context,
        free_blocks=pool.available - pool.cached,
        evictable_blocks=pool.cached,
        step_time=step_time.coefficients,
        predicted_step_s=shape.predict_s(step_time.coefficients),
        draining=draining,
        preemptions=roster.preemptions,
        kv_bytes_used=pool.referenced * block_bytes,
        short_prefill_tokens=None if short_tokens is None else short,
        step_spread=step_time.spread,
        busy_s=step_time.busy_s,
        foreseen_s=step_time.foreseen_s,
    )


def _short_tokens(roster: Roster, policy: SchedulingPolicy, step_time: StepTimeFit, limits: EngineLimits, context: int) -> float | None:
    """Of the longest prompt that passes longer ones now; None: the order is kept."""
    longest = may_pass(roster, policy)
    if longest is None:
        return None
    half = chunk_tokens(
        step_time.coefficients,
        decodes=len(roster.running),
        context_tokens=context,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        step_slo_s=limits.step_slo_s,
        spread=step_time.spread,
        block_size=limits.block_size,
    )
    return min(half / 2, longest)
