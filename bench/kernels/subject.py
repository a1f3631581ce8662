"""A kernel with inputs of one shape: what is checked, compiled ahead of time and measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.triton.costs import Cost

TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}  # by norm, against float64


@dataclass(frozen=True, slots=True)
class Ground:
    """Where inputs are made, which of the random ones, and for whom."""

    device: torch.device
    seed: int = 0
    exact: bool = False  # for the reference, in float64

    def normal(self, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
        """The same values for both sides: rounded to `dtype`, then widened for the reference."""
        values = (torch.randn(*shape, generator=self.generator, device=self.device) * scale).to(dtype)
        return values.double() if self.exact else values

    @property
    def generator(self) -> torch.Generator:
        return torch.Generator(device=self.device).manual_seed(self.seed)

    def other(self, number: int) -> Ground:
        """For another tensor: other values."""
        return Ground(self.device, self.seed * 1000 + number + 1, self.exact)


Call = Callable[[], list[Tensor]]  # computes, returns everything that was written


@dataclass(frozen=True, slots=True)
class Subject:
    kernel: str  # as its page in docs/kernels is called
    shape: str  # for people
    dtype: torch.dtype
    build: Callable[[Ground], Call]
    cost: Cost
    tolerance: float  # by norm
    wide_matrix: bool = False  # whether Hopper's own matrix instructions are expected

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.shape} {str(self.dtype).removeprefix('torch.')}"


def error_of(ours: list[Tensor], right: list[Tensor]) -> float:
    """The largest relative error by norm of what was written; NaN where anything is."""
    errors = [float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-300)) for a, b in zip(ours, right, strict=True)]
    return max(errors, key=lambda error: (error != error, error))
