"""Angles of the rotary position embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from replica.models.rope_scaling import RopeScaling


class RotaryTable:
    """cosine and sine of every position, float32, as rope_kv_write wants them: equal halves of cosine, (-sin | sin)."""

    def __init__(self, frequencies: Tensor, positions: int, device: torch.device, scale: float = 1.0) -> None:
        """`frequencies` [head_dim / 2] in radians per position, float64; `positions`: how many; both are multiplied by `scale`."""
        angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
        cosine, sine = angles.cos() * scale, angles.sin() * scale
        self._cosine = torch.cat((cosine, cosine), dim=-1).float().to(device)
        self._sine = torch.cat((-sine, sine), dim=-1).float().to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cosine and sine [T, head_dim] of positions [T]."""
        return self._cosine.index_select(0, positions), self._sine.index_select(0, positions)

    def halves(self) -> tuple[Tensor, Tensor]:
        """cosine and sine [positions, head_dim / 2] of all positions, each angle once."""
        half = self._cosine.shape[-1] // 2
        return self._cosine[:, :half].contiguous(), self._sine[:, half:].contiguous()


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None, context: int = 0) -> Tensor:
    """[head_dim / 2] float64: theta^(-2i/head_dim), scaled. `context`: what is served, in tokens.

    dynamic: theta grows by (factor · context / original − factor + 1)^(D/(D−2)) once the served context exceeds the original one.
    The served context, not that of a request or a step: else a token's key would depend on when it was computed.
    llama3: what turns fewer than low_freq_factor times within the original context is ÷ factor, what turns more than
    high_freq_factor times stays, between them a linear blend by the number of turns. yarn: see _yarn.
    """
    if scaling is not None and scaling.kind == "dynamic" and context > scaling.original_context:
        stretch = scaling.factor * context / scaling.original_context - scaling.factor + 1
        theta = theta * stretch ** (head_dim / (head_dim - 2))
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling is None or scaling.kind == "dynamic":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        return _yarn(frequencies, head_dim, theta, scaling)
    turns = scaling.original_context * frequencies / (2 * math.pi)
    kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0.0, 1.0)
    return frequencies * kept + frequencies / scaling.factor * (1.0 - kept)


def _yarn(frequencies: Tensor, head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Dimensions that turn more than beta_fast times within the original context stay, those below beta_slow are ÷ factor, between
    them a linear blend by the dimension's number."""

    def dimension(turns: float) -> float:
        """The (fractional) number of the dimension that turns so often."""
        return head_dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    divided = ((torch.arange(head_dim // 2, dtype=torch.float64) - low) / width).clamp(0.0, 1.0)
    return frequencies * (1.0 - divided) + frequencies / scaling.factor * divided
