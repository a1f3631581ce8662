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
