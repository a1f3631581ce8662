"""What a replica would do with a request, by the step-time model (DESIGN §6). Seconds, uncalibrated.

The queue is drained in steps of one chunk each: a chunk is what the token budget and the step's time bound leave beside
the decodes. A request is first scheduled when the backlog before it has less than a chunk left, when a slot is free and
when its blocks fit; it has its first token when its own uncached tokens are through as well. One that half a chunk completes
passes longer ones (replica/starting.py): before it are only others as short, half a chunk of them in a step.
"""

from __future__ import annotations

import math

import msgspec

from replica.contract.step_time import chunk_tokens
from router.policy.load import ReplicaView
from router.policy.request_view import RequestView

_PRIOR_OUTPUT_TOKENS = 128.0
_FORGET = 0.98


class Forecast(msgspec.Struct, frozen=True, gc=False):
    """One request on one replica."""

    wait_s: float  # until the first step that schedules (the last choice of) it
    ttft_s: float  # until its first token
    score_s: float  # ttft_s with the prefill of a popular prefix charged to all who will use it
    tpot_s: float  # a step's time once it decodes there
    grain_s: float  # one step there now: nothing is predicted finer
    new_tokens: int  # to prefill
    charged_tokens: float  # the same, a popular prefix charged to all who will use it
    cached_tokens: int
    shared_blocks: int  # leading blocks of the prompt that some replica holds
    blocks: int  # needed beside the cached ones, of one choice
    batch: int  # requests there, this one included
    service_s: float  # by how much it delays whoever comes after it
    token_s: float = 0.0  # of that, per token to prefill
    alone_tpot_s: float = 0.0  # a step's time if it had the replica to itself
    after_s: float = 0.0  # of the wait, in order, what is left when the step that runs has ended
    idle_s: float = 0.0  # until all who are there now are through


class Hit(msgspec.Struct, frozen=True, gc=False):
    """What of a prompt is cached where."""

    blocks: int = 0  # leading blocks this replica holds, or will when what is under way there is done
    shared_blocks: int = 0  # leading blocks some replica holds
    shared_uses: float = 0.0  # how many other requests lately shared exactly these


class OutputLength:
    """Mean tokens that a request generates, forgetting: how soon a slot frees."""

    def __init__(self) -> None:
        self._mean = _PRIOR_OUTPUT_TOKENS

    def observe(self, tokens: int) -> None:
        self._mean = _FORGET * self._mean + (1 - _FORGET) * max(1, tokens)

    @property
    def mean(self) -> float:
        return self._mean


class Outlook(msgspec.Struct, frozen=True, gc=False):
    """A replica's near future, whoever comes."""

    there: int  # requests that run, wait or are on their way
    base_s: float  # a step without prefill
    slope_s: float  # per prefill token
    chunk: float  # prefill tokens per step
    began_s: float | None  # the step that runs, by the router's clock; None: none does
    running_s: float  # that it takes
    left_s: float  # of it
    backlog: float  # tokens to prefill after it
    step_s: float  # a full step while there is backlog, else the base
    drain_s: float  # until the backlog leaves room in a step
    rest_s: float  # from there until the backlog is through
    short_tokens: float  # a prompt of no more passes longer ones; 0: none does, or there are none to pass
    short_drain_s: float  # until those as short leave room in a step
    finishes_per_s: float  # requests that leave, when the batch is as now
    free_blocks: float  # beyond the needs of all who run or wait


def outlook(view: ReplicaView, output_tokens: float, now: float) -> Outlook:
    """As of now: nothing is scheduled before the step that runs has ended. `output_tokens` is what a request generates on average."""
    state = _kept(view, output_tokens, now)
    if state.began_s is None:
        return state
    left_s = max(0.0, state.running_s - max(0.0, now - state.began_s))
    return msgspec.structs.replace(state, left_s=left_s, drain_s=state.drain_s + left_s, short_drain_s=state.short_drain_s + left_s)


def full_step_s(view: ReplicaView, output_tokens: float, now: float) -> float:
    """What a step may take with all that is there and on its way."""
    return _kept(view, output_tokens, now).step_s


def _kept(view: ReplicaView, output_tokens: float, now: float) -> Outlook:
    there = view.requests(now)
    state = view.outlook
    if state is None or state.there != there:
        state = view.outlook = _outlook(view, there, output_tokens)
    return state


def _outlook(view: ReplicaView, there: int, output_tokens: float) -> Outlook:
    """As of the end of the running step; kept by the view until its report or its claims change."""
    load, limits, claims, k = view.load, view.limits, view.claims, view.load.step_time
    queued = load.queued_prefill_tokens + claims.new_tokens
    waiting = max(0, there - load.running)
    decodes = min(float(limits.max_num_seqs), load.running + waiting / 2)
    context = load.context_tokens + queued / 2
    base_s = k.a + k.c * decodes + k.d * context
    slope_s = k.b + k.e * context / max(1.0, decodes)
    chunk = chunk_tokens(
        k,
        decodes=decodes,
        context_tokens=context,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        step_slo_s=limits.step_slo_s,
        spread=load.step_spread,
        block_size=limits.block_size,
    )
    began_s, early = _running_step(view)
    running = 0.0 if began_s is None else min(chunk, load.queued_prefill_tokens + sum(early))
    backlog = queued - running
    full_s = base_s + slope_s * min(chunk, queued)
    steps = backlog // chunk
    half = chunk / 2
    before = backlog
    if load.short_prefill_tokens is not None:
        own = sum(lease.new_tokens for lease in view.pending.values() if lease.new_tokens <= half)
        computed = min(half, running, load.short_prefill_tokens + sum(tokens for tokens in early if tokens <= half))
        before = min(backlog, load.short_prefill_tokens + own - computed)
    if before == backlog:
        half = 0.0  # there are none to pass
    return Outlook(
        there=there,
        base_s=base_s,
        slope_s=slope_s,
        chunk=chunk,
        began_s=began_s,
        running_s=base_s + slope_s * running,
        left_s=0.0,
        backlog=backlog,
        step_s=full_s,
        drain_s=steps * full_s,
        rest_s=(backlog - steps * chunk) * slope_s,
        short_tokens=half,
        short_drain_s=before // half * full_s if half else 0.0,
        finishes_per_s=min(there, limits.max_num_seqs) / max(1e-9, output_tokens * full_s),
        free_blocks=load.free_blocks + load.evictable_blocks - claims.blocks - load.queued_prefill_tokens / limits.block_size,
    )


def _running_step(view: ReplicaView) -> tuple[float | None, list[int]]:
    """When it began, and own work that had come then and that no report has counted, in tokens to prefill.

    A replica reports between steps and begins the next one at once; an idle one begins with the first that comes, or that came
    while its last step ran.
    """
    began_s = view.stepped_s
    if not view.load.running + view.load.waiting:
        if not view.pending:
            return None, []
        began_s = max(began_s, min(lease.dispatched_s for lease in view.pending.values()))
    return began_s, [lease.new_tokens for lease in view.pending.values() if lease.dispatched_s <= began_s]


def fits(view: ReplicaView, request: RequestView) -> bool:
    """The replica's own rule of what can never run there."""
    limits = view.limits
    needed = max(request.prompt_tokens, request.longest_tokens) + 1
    return needed <= limits.max_model_len and needed <= limits.num_blocks * limits.block_size


def forecast(view: ReplicaView, request: RequestView, hit: Hit, ahead: Outlook) -> Forecast:
    """`ahead` is the replica's, of now."""
    limits, load = view.limits, view.load
    k = load.step_time
    block_size, seats = limits.block_size, limits.max_num_seqs
    prompt_tokens, choices = request.prompt_tokens, request.choices
    batch = ahead.there + choices
    cached = min(hit.blocks * block_size, prompt_tokens - 1) if hit.blocks else 0
    new = prompt_tokens - cached
    blocks = -(-(prompt_tokens + 1) // block_size) - cached // block_size
    passes = new <= ahead.short_tokens and ahead.short_drain_s < ahead.drain_s and choices == 1 and not request.in_order
    drain_s = ahead.short_drain_s if passes else ahead.drain_s
    held_s = 0.0  # by seats or pages
    if ahead.finishes_per_s > 0:
        if batch > seats:
            held_s = (batch - seats) / ahead.finishes_per_s
        lacking = blocks * choices - ahead.free_blocks
        if lacking > 0:
            used = limits.num_blocks - load.free_blocks - load.evictable_blocks
            held_s = max(held_s, lacking * load.running / max(1, used) / ahead.finishes_per_s)
    wait_s = drain_s if drain_s >= held_s else held_s
    if passes:
        own_s = ahead.base_s + ahead.slope_s * min(ahead.chunk, ahead.backlog + new)  # the longer ones have the rest of its step
    else:
        own_s = _prefill_s(ahead, k.e, cached, new) + (ahead.rest_s if wait_s <= drain_s else 0.0)
    excused = 0.0
    if hit.shared_blocks:
        shared = max(0, min(hit.shared_blocks * block_size, prompt_tokens - 1) - cached)
        excused = shared * hit.shared_uses / (1.0 + hit.shared_uses)
    work = new + request.other_tokens
    if choices > request.prompts:  # those who find the blocks of the first choice with their prompt
        work += (choices - request.prompts) * min(new, block_size)
    token_s = ahead.base_s / ahead.chunk + ahead.slope_s
    service_s = work * token_s
    if ahead.there >= seats and ahead.finishes_per_s > 0:
        service_s = max(service_s, choices / ahead.finishes_per_s)
    return Forecast(
        wait_s=wait_s,
        ttft_s=wait_s + own_s,
        after_s=(ahead.drain_s if ahead.drain_s >= held_s else held_s) - ahead.left_s,
        score_s=wait_s + own_s - excused * ahead.slope_s,
        tpot_s=k.a + k.c * (batch if batch < seats else seats) + k.d * (load.context_tokens + view.claims.context_tokens + prompt_tokens),
        grain_s=ahead.step_s if ahead.step_s > 0.005 else 0.005,
        new_tokens=new,
        charged_tokens=new - excused,
        cached_tokens=cached,
        shared_blocks=hit.shared_blocks,
        blocks=blocks,
        batch=batch,
        service_s=service_s,
        token_s=token_s,
        alone_tpot_s=k.a + k.c * (choices if choices < seats else seats) + k.d * prompt_tokens,
        idle_s=ahead.there / ahead.finishes_per_s if ahead.finishes_per_s > 0 else 0.0,
    )


def _prefill_s(ahead: Outlook, e: float, cached: int, new: int) -> float:
    """Time to prefill `new` tokens after `cached` ones, chunk by chunk."""
    steps = math.ceil(new / ahead.chunk)
    return steps * ahead.base_s + new * ahead.slope_s + e * new * (cached + new / 2)
