"""How long a step takes: the one model that the scheduler, the router, admission and Retry-After share.

t_step = a + b·prefill_tokens + c·decodes + d·Σcontext + e·Σ(prefill_tokens·context), in seconds.
"""

from __future__ import annotations

from replica.contract.messages import StepTimeCoefficients


def predict_step_s(
    coefficients: StepTimeCoefficients, *, prefill_tokens: int, decodes: int, context_tokens: int, prefill_context: int = 0
) -> float:
    """Predicted duration of one step in seconds.

    `context_tokens` is Σ over its requests of tokens attended to; `prefill_context` is Σ over its chunks of chunk
    length × tokens before the chunk's end.
    """
    k = coefficients
    return k.a + k.b * prefill_tokens + k.c * decodes + k.d * context_tokens + k.e * prefill_context


def chunk_tokens(
    coefficients: StepTimeCoefficients,
    *,
    decodes: float,
    context_tokens: float,
    max_num_batched_tokens: int,
    step_slo_s: float | None,
    spread: float,
    block_size: int,
) -> float:
    """Prefill tokens of a full step beside `decodes` of `context_tokens` in all: what the token budget leaves, and `step_slo_s` by a
    prediction that is `spread` longer; never less than a block, by the second."""
    k = coefficients
    chunk = max(1.0, max_num_batched_tokens - decodes)
    slope_s = k.b + k.e * context_tokens / max(1.0, decodes)
    if step_slo_s is not None and slope_s > 0:
        base_s = k.a + k.c * decodes + k.d * context_tokens
        chunk = min(chunk, max(float(block_size), (step_slo_s / (1.0 + spread) - base_s) / slope_s))
    return chunk
