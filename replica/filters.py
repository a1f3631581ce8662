"""top-k, top-p and min-p as one threshold per row: what is at least as likely as the threshold stays.

A threshold does not depend on how a sort orders equal values, so a row is filtered alike alone and in a batch. Tokens that
tie with the last one kept are kept too. The best token always stays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from replica.contract.messages import SamplingParams

Float32 = npt.NDArray[np.float32]
DEPTHS = (-6.0, -12.0, -np.inf)  # below the best; sorted one after the other until top-k and top-p are decided


def thresholds(scaled: Float32, params: Sequence[SamplingParams]) -> Float32:
    """[R] least scaled logit that may be drawn, for scaled [R, V] = (logits − the row's largest) / temperature.

    In this order, vLLM's: min-p relative to the best token, top-k by rank, top-p over the mass of what both left.
    """
    vocab = scaled.shape[1]
    with np.errstate(divide="ignore"):
        least: Float32 = np.minimum(np.log([p.min_p for p in params]), 0.0).astype(np.float32)
    for row, param in enumerate(params):
        if 0 < param.top_k < vocab or param.top_p < 1.0:
            least[row] = min(_by_rank(scaled[row], param, float(least[row])), 0.0)
    return least


def _by_rank(scaled: Float32, param: SamplingParams, floor: float) -> float:
    """Top-k, then top-p, of one row's values that are not below `floor`. The best few are looked at first: mostly they decide."""
    limit = param.top_k if 0 < param.top_k < scaled.size else scaled.size
    for depth in DEPTHS:
        best = np.sort(scaled[scaled >= max(floor, depth)])[::-1][:limit]
        is_all = best.size == limit or depth <= floor
        if not is_all and limit < scaled.size:
            continue  # top-k is not full yet
        if param.top_p >= 1.0:
            return float(best[-1])
        mass = np.exp(best.astype(np.float64)).cumsum()
        place = int(np.searchsorted(mass, param.top_p * (float(mass[-1]) if is_all else _mass(scaled, floor))))
        if is_all or place < mass.size:
            return float(best[min(place, mass.size - 1)])
    raise AssertionError("the last depth holds every value")


def _mass(scaled: Float32, floor: float) -> float:
    left = scaled if floor == -np.inf else scaled[scaled >= floor]
    return float(np.exp(left).sum(dtype=np.float64))
