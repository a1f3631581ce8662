"""y = x · Wᵀ + b for a weight that is stored in eight or four bits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.reference.quantized_weight import QuantizedWeight, dequantize


def linear_quantized(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """x [M, K] · Wᵀ [K, N] + bias [N]; returns [M, N] in x's dtype. The weight is not rounded to it."""
    exact = torch.float64 if x.dtype is torch.float64 else torch.float32
    wide = None if bias is None else bias.to(exact)
    return functional.linear(x.to(exact), dequantize(weight, exact), wide).to(x.dtype)
