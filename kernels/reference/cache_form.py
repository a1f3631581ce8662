"""How keys and values may lie in a cache: in the layers' dtype, or in eight bits with one scale for each head of each token.

A head x [D] of a token is kept as codes c = round(x / s) with s = max |x| / L, L = 127 for int8 and 448 for fp8 (e4m3): x ≈ c · s.
A scale depends on its own token and head alone, so no calibration is needed, and what a token's bits are never depends on
its neighbours. Scales lie beside the cache: [pages, 2, kv_heads, block], float32. For D = 128 that is 3 % more bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantize_heads(heads: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """heads […, D] → codes […, D] of `dtype` (int8 or float8_e4m3fn), scales […] in float32; a head of zeros has scale 0.

    int8 rounds halves up, fp8 to the nearest even.
    """
    exact = heads.double() if heads.dtype is torch.float64 else heads.float()
    scales = (exact.abs().amax(-1) / LARGEST[dtype]).float()
    divided = exact / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
    if dtype is torch.int8:
        return divided.add(0.5).floor().clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype), scales
    return divided.clamp(-LARGEST[dtype], LARGEST[dtype]).float().to(dtype), scales


def dequantize_heads(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """codes […, D] · scales […] in `dtype`."""
    return codes.to(dtype) * scales.to(dtype).unsqueeze(-1)
