"""The gate of a SwiGLU feed-forward layer."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) · up for gate_up [T, 2·I] = (gate | up); returns [T, I]."""
    width = gate_up.shape[-1] // 2
    return functional.silu(gate_up[..., :width]).mul_(gate_up[..., width:])
