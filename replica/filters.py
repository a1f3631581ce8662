"""top-k, top-p and min-p as one threshold per row: what is at least as likely as the threshold stays.

A threshold does not depend on how a sort orders equal values, so a row is filtered alike alone and in a batch. Tokens that
tie with the last one kept are kept too. The best token always stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from replica.contract.messages import SamplingParams

Float32 = npt.NDArray[np.float32]
GROUPS = 64  # a row is cut into that many stripes; what is largest at a place of any of them bounds the k-th largest
NEAR = -6.0  # below the best; top-p is mostly decided there, by a sort of a few values
FAR = -104.0  # exp of less is 0 in float32: adds nothing to any mass
BINS = 1024
MARGIN = 1e-6  # relative: eight times what float32 rounds by


def candidates(logits: Float32, best: float, top_k: int) -> npt.NDArray[np.int64] | None:
    """Tokens, in order, that hold all whom top-k can leave of logits [V]; None where finding them is no use.

    So everything after looks at some dozens of values instead of a vocabulary. Temperature keeps their order, but what it rounds to
    the same value as the k-th is kept with it: hence the margin.
    """
    width = logits.size // GROUPS
    if not 0 < top_k <= width:
        return None
    maxima = logits[: GROUPS * width].reshape(GROUPS, width).max(axis=0)
    bound = float(np.partition(maxima, width - top_k)[width - top_k])
    return np.flatnonzero(logits >= np.float32(bound - MARGIN * (abs(bound) + abs(best))))


def thresholds(scaled: Float32, params: Sequence[SamplingParams]) -> Float32:
    """[R] least scaled logit that may be drawn, for scaled [R, V] = (logits − the row's largest) / temperature.

    In this order, vLLM's: min-p relative to the best token, top-k by rank, top-p over the mass of what both left.
    """
    vocab = scaled.shape[1]
    least: Float32 = np.array([min(math.log(p.min_p), 0.0) if p.min_p > 0 else -math.inf for p in params], np.float32)
    for row, param in enumerate(params):
        if 0 < param.top_k < vocab or param.top_p < 1.0:
            least[row] = min(_by_rank(scaled[row], param, float(least[row])), 0.0)
    return least


def _by_rank(scaled: Float32, param: SamplingParams, floor: float) -> float:
    """Top-k, then top-p, of one row's values that are not below `floor`."""
    if not 0 < param.top_k < scaled.size:
        return _by_mass(scaled, param.top_p, floor)
    best = _largest(scaled, param.top_k)
    best = best[best >= floor]
    return float(best[-1]) if param.top_p >= 1.0 else _cut(best, param.top_p, 0.0, _exp_sum(best))


def _largest(values: Float32, count: int) -> Float32:
    """The `count` largest, in descending order.

    The maxima over the stripes are values of their own, so `count` of them are not below the count-th largest of these maxima:
    only what reaches it is sorted.
    """
    width = values.size // GROUPS
    if count <= width:
        maxima = values[: GROUPS * width].reshape(GROUPS, width).max(axis=0)
        values = values[values >= np.partition(maxima, width - count)[width - count]]
    return np.sort(values)[::-1][:count]


def _by_mass(scaled: Float32, top_p: float, floor: float) -> float:
    """Least of the values not below `floor` that together have `top_p` of their mass, the largest first."""
    near = scaled[scaled >= max(floor, NEAR)]
    if floor >= NEAR:
        return _cut(np.sort(near)[::-1], top_p, 0.0, _exp_sum(near))
    total = _exp_sum(scaled if floor == -np.inf else scaled[scaled >= floor])
    if _exp_sum(near) >= top_p * total:
        return _cut(np.sort(near)[::-1], top_p, 0.0, total)
    values = scaled[scaled >= max(floor, FAR)]
    places = (values * np.float32((BINS - 1) / float(values.min()))).astype(np.intp)  # some are below NEAR, or it had been enough
    masses = np.bincount(places, weights=np.exp(values), minlength=BINS).cumsum()
    place = int(np.searchsorted(masses, top_p * masses[-1]))
    inside = np.sort(values[places == min(place, BINS - 1)])[::-1]
    return _cut(inside, top_p, float(masses[place - 1]) if place else 0.0, float(masses[-1]))


def _cut(descending: Float32, top_p: float, before: float, total: float) -> float:
    """The value at which the mass, `before` included, reaches top_p · total; the last one if none does."""
    mass = before + np.exp(descending.astype(np.float64)).cumsum()
    place = int(np.searchsorted(mass, top_p * total))
    return float(descending[min(place, descending.size - 1)])


def _exp_sum(values: Float32) -> float:
    return float(np.exp(values).sum(dtype=np.float64))
