"""Angles of the rotary position embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from replica.models.config import RopeScaling


class RotaryTable:
    """cosine and sine of every position, float32, as rope_kv_write wants them: equal halves of cosine, (-sin | sin)."""

    def __init__(self, frequencies: Tensor, positions: int, device: torch.device) -> None:
        """`frequencies` [head_dim / 2] in radians per position, float64; `positions`: how many."""
        angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
        cosine, sine = angles.cos(), angles.sin()
        self._cosine = torch.cat((cosine, cosine), dim=-1).float().to(device)
        self._sine = torch.cat((-sine, sine), dim=-1).float().to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cosine and sine [T, head_dim] of positions [T]."""
        return self._cosine.index_select(0, positions), self._sine.index_select(0, positions)

    def halves(self) -> tuple[Tensor, Tensor]:
        """cosine and sine [positions, head_dim / 2] of all positions, each angle once."""
        half = self._cosine.shape[-1] // 2
        return self._cosine[:, :half].contiguous(), self._sine[:, half:].contiguous()


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """[head_dim / 2] float64: theta^(-2i/head_dim), scaled.

    llama3: what turns fewer than low_freq_factor times within the original context is ÷ factor, what turns more than
    high_freq_factor times stays, between them a linear blend by the number of turns.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_context * frequencies / (2 * math.pi)
    kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0.0, 1.0)
    return frequencies * kept + frequencies / scaling.factor * (1.0 - kept)
