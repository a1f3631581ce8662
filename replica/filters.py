"""top-k, top-p and min-p as one threshold per row: what is at least as likely as the threshold stays.

A threshold does not depend on how a sort orders equal values, so a row is filtered alike alone and in a batch. Tokens that
tie with the last one kept are kept too. The best token always stays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from replica.contract.messages import SamplingParams

Float32 = npt.NDArray[np.float32]
CANDIDATES = 1024  # enough for nearly every top-p; a flatter row is sorted whole


def thresholds(scaled: Float32, params: Sequence[SamplingParams]) -> Float32:
    """[R] least scaled logit that may be drawn, for scaled [R, V] = (logits − the row's largest) / temperature.

    In this order, vLLM's: min-p relative to the best token, top-k by rank, top-p over the mass of what both left.
    """
    vocab = scaled.shape[1]
    with np.errstate(divide="ignore"):
        least: Float32 = np.minimum(np.log([p.min_p for p in params]), 0.0).astype(np.float32)
    ranked = [i for i, p in enumerate(params) if 0 < p.top_k < vocab or p.top_p < 1.0]
    if ranked:
        by_rank = _by_rank(scaled[ranked], [params[i] for i in ranked], least[ranked])
        least[ranked] = np.minimum(np.maximum(least[ranked], by_rank), 0.0)
    return least


def _by_rank(scaled: Float32, params: Sequence[SamplingParams], floors: Float32) -> Float32:
    """`floors` [R]: what is below has no mass."""
    vocab = scaled.shape[1]
    limits = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    width = min(vocab, max(CANDIDATES, *(limit for limit in limits if limit < vocab), 1))
    sorted_rows = torch.from_numpy(scaled).topk(width, dim=-1).values.numpy()
    above = scaled >= floors[:, None]
    totals = np.exp(scaled, dtype=np.float32).sum(axis=1, dtype=np.float64, where=above)
    counts = above.sum(axis=1).tolist()
    result = np.empty(len(params), np.float32)
    for row, (limit, param) in enumerate(zip(limits, params, strict=True)):
        result[row] = _threshold(sorted_rows[row], scaled[row], float(totals[row]), min(limit, counts[row]), param.top_p)
    return result


def _threshold(best: Float32, whole: Float32, total: float, limit: int, top_p: float) -> float:
    """`best`: the row's largest values, descending; `limit`: how many of the row's top-k and min-p left, `total` the mass min-p left."""
    if top_p >= 1.0:
        return float(best[limit - 1])
    mass = np.exp(best[:limit].astype(np.float64)).cumsum()
    wanted = top_p * (float(mass[-1]) if limit <= best.size else total)
    if wanted > mass[-1] and limit > best.size:
        best = np.sort(whole)[::-1]
        mass = np.exp(best.astype(np.float64)).cumsum()
    return float(best[min(int(np.searchsorted(mass, wanted)), mass.size - 1)])
