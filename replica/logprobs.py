"""Log probabilities as they are reported: of the model's own distribution, before temperature, rules and filters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from replica.contract.messages import TokenLogprobs

IMPOSSIBLE = -9999.0  # instead of −inf, which JSON cannot carry


def token_logprobs(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    """For each row of logits [R, V], float32, on the CPU: its token's log probability and its `tops` likeliest alternatives (at most V)."""
    if not tokens:
        return []
    normalizers = torch.logsumexp(logits, dim=-1).tolist()
    widest = min(max(tops), logits.shape[1])
    best = logits.topk(widest, dim=-1)
    values: npt.NDArray[np.float32] = best.values.numpy()
    ids: npt.NDArray[np.int64] = best.indices.numpy()
    chosen = logits[range(len(tokens)), list(tokens)].tolist()
    return [
        TokenLogprobs(
            token_id=token,
            logprob=_finite(chosen[row] - normalizers[row]),
            top=_alternatives(values[row, :top], ids[row, :top], normalizers[row]) if top else (),
        )
        for row, (token, top) in enumerate(zip(tokens, tops, strict=True))
    ]


def _alternatives(values: npt.NDArray[np.float32], ids: npt.NDArray[np.int64], normalizer: float) -> tuple[tuple[int, float], ...]:
    order = np.lexsort((ids, -values))  # best first, equals by id
    return tuple((int(ids[i]), _finite(float(values[i]) - normalizer)) for i in order)


def _finite(logprob: float) -> float:
    return logprob if logprob > IMPOSSIBLE else IMPOSSIBLE  # NaN too
