"""The feed-forward layer of a decoder: one SwiGLU, or a mixture of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.ops import Operators
from replica.linear import Linear, ReducedLinear
from replica.models.model_config import Mixture
from replica.parallel.group import TensorParallel


class FeedForward(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] → [T, H], complete on every rank."""
        ...


@dataclass(frozen=True, slots=True)
class Dense:
    gate_up: Linear  # H → 2 · I
    down: ReducedLinear  # I → H
    operators: Operators

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.operators.silu_mul(self.gate_up(x)))


@dataclass(frozen=True, slots=True)
class Experts:
    """Every rank has its part of the width of all experts, and the whole router: all choose alike."""

    mixture: Mixture
    router: Linear  # H → E
    gate_up: Tensor  # [E, 2 · I, H] = (gate | up)
    down: Tensor  # [E, H, I]
    operators: Operators
    tp: TensorParallel

    def __call__(self, x: Tensor) -> Tensor:
        mixture = self.mixture
        out = self.operators.fused_moe(x, self.router(x), self.gate_up, self.down, mixture.per_token, mixture.renormalize)
        return out if self.tp.size == 1 else self.tp.all_reduce(out)
