"""The gate of a GEGLU feed-forward layer."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

APPROXIMATIONS = ("tanh", "none")


def gelu_mul(gate_up: Tensor, approximate: str = "tanh") -> Tensor:
    """gelu(gate) · up for gate_up [T, 2·I] = (gate | up); returns [T, I]. `approximate`: "tanh", or "none" for the error function."""
    width = gate_up.shape[-1] // 2
    return functional.gelu(gate_up[..., :width], approximate=approximate).mul_(gate_up[..., width:])
