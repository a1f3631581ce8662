"""Root-mean-square norm of the residual stream, with the addition that precedes it."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(residual: Tensor, weight: Tensor, epsilon: float, delta: Tensor | None = None) -> Tensor:
    """residual += delta (in place, where given); returns residual / sqrt(mean(residual²) + epsilon) · weight.

    residual [T, H] in the stream's dtype (float32 or float64), delta [T, H] and weight [H] in the layers' dtype, which is also
    the result's. The stream keeps its precision: only what enters a matrix multiplication is rounded.
    """
    if delta is not None:
        residual.add_(delta)
    scale = torch.linalg.vector_norm(residual, dim=-1, keepdim=True)
    scale.square_().mul_(1.0 / residual.shape[-1]).add_(epsilon).rsqrt_()
    normed = torch.mul(residual, scale)
    return normed.mul_(weight).to(weight.dtype)
