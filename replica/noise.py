"""Randomness as a function: (seed, choice, position, token) → noise. No state, so nothing can shift it.

A token is drawn by the largest logit + Gumbel noise, which draws from softmax(logits). The noise of a token depends on the
request's seed, the choice, the position in the sequence and the token alone: not on the batch, the step, the replica, or which
other tokens a filter left. Two replicas whose logits differ in the last bit draw the same token but at near-ties.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

UInt64 = npt.NDArray[np.uint64]
Float64 = npt.NDArray[np.float64]

_MASK = (1 << 64) - 1
_WEYL = 0x9E3779B97F4A7C15  # splitmix64's increment (2^64 / golden ratio) and multipliers
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_UNIT = 2.0**-32

GUMBEL_MAX = -math.log(-math.log1p(-0.5 * _UNIT))  # 22.9: no noise is larger, so hopeless tokens need none


def stream_key(seed: int, choice: int, position: int) -> int:
    """64 bits that name one draw. Any integers; each is mixed in by a round of splitmix64."""
    state = 0
    for part in (seed, choice, position):
        state = _mix(((state ^ part) + _WEYL) & _MASK)
    return state


def gumbel(keys: UInt64, tokens: npt.NDArray[np.int64]) -> Float64:
    """Noise of each (key, token), elementwise: −log(−log u), u from 32 bits, strictly between 0 and 1."""
    bits = keys + (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(_WEYL)  # wraps at 2^64, as it should
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(_MULTIPLIERS[0])
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(_MULTIPLIERS[1])
    bits ^= bits >> np.uint64(31)
    uniform = ((bits >> np.uint64(32)).astype(np.float64) + 0.5) * _UNIT
    noise: Float64 = -np.log(-np.log(uniform))
    return noise


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MULTIPLIERS[0]) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLIERS[1]) & _MASK
    return value ^ (value >> 31)
