"""Randomness as a function: (seed, choice, position, token) → noise. No state, so nothing can shift it.

A token is drawn by the largest logit + Gumbel noise, which draws from softmax(logits). The noise of a token depends on the
request's seed, the choice, the position in the sequence and the token alone: not on the batch, the step, the replica, or which
other tokens a filter left. Two replicas whose logits differ in the last bit draw the same token but at near-ties.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64 = npt.NDArray[np.uint64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

_MASK = (1 << 64) - 1
WEYL = 0x9E3779B97F4A7C15  # splitmix64's increment (2^64 / golden ratio) and multipliers
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_UNIT = 2.0**-32


def stream_key(seed: int, choice: int, position: int) -> int:
    """64 bits that name one draw. Any integers; each is mixed in by a round of splitmix64."""
    state = 0
    for part in (seed, choice, position):
        state = _mix(((state ^ part) + WEYL) & _MASK)
    return state


def noise_bits(keys: UInt64 | np.uint64, tokens: npt.NDArray[np.int64]) -> UInt64:
    """32 random bits of each (key, token), elementwise; one key serves for all tokens."""
    bits = tokens.astype(np.uint64)
    bits += np.uint64(1)
    bits *= np.uint64(WEYL)
    bits += keys  # wraps at 2^64, as it should
    shifted = bits >> np.uint64(30)
    bits ^= shifted
    bits *= np.uint64(MULTIPLIERS[0])
    np.right_shift(bits, np.uint64(27), out=shifted)
    bits ^= shifted
    bits *= np.uint64(MULTIPLIERS[1])
    np.right_shift(bits, np.uint64(31), out=shifted)
    bits ^= shifted
    bits >>= np.uint64(32)
    return bits


def gumbel(bits: UInt64) -> Float64:
    """−log(−log u) for u = (bits + ½) / 2^32, strictly between 0 and 1."""
    noise: Float64 = -np.log(-np.log((bits.astype(np.float64) + 0.5) * _UNIT))
    return noise


def complement(bits: UInt64) -> Float32:
    """1 − u, as exact as float32 can be. −log(1 − u) is no less than gumbel(bits), and near the top they are the same."""
    rest: Float32 = (np.uint64(0xFFFFFFFF) - bits).astype(np.float32)
    rest += np.float32(0.5)
    rest *= np.float32(_UNIT)
    return rest


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * MULTIPLIERS[0]) & _MASK
    value = ((value ^ (value >> 27)) * MULTIPLIERS[1]) & _MASK
    return value ^ (value >> 31)
