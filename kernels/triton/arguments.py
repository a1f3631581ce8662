"""What launchers ask of their arguments: said by name, with what was wanted, before anything is launched."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.triton.tiles import FLOATS


def rows_of(name: str, tensor: Tensor) -> tuple[int, int]:
    """Rows and columns of `tensor`. Raises ValueError unless it is a matrix, contiguous."""
    if tensor.ndim != 2 or not tensor.is_contiguous():
        raise ValueError(f"{name}: {_described(tensor)}, wanted a contiguous matrix")
    return tensor.shape[0], tensor.shape[1]


def ask(name: str, tensor: Tensor, shape: Sequence[int], beside: Tensor, dtype: torch.dtype | None = None) -> None:
    """Raises ValueError unless `tensor` is contiguous, of `shape` and on the device of `beside`; TypeError where it is not of `dtype`
    (None: any that kernels compute)."""
    if tuple(tensor.shape) != tuple(shape) or not tensor.is_contiguous():
        raise ValueError(f"{name}: {_described(tensor)}, wanted contiguous {list(shape)}")
    if tensor.dtype is not dtype and (dtype is not None or tensor.dtype not in FLOATS):
        raise TypeError(f"{name}: {tensor.dtype}, wanted {dtype or ', '.join(map(str, FLOATS))}")
    if tensor.device != beside.device:
        raise ValueError(f"{name}: on {tensor.device}, wanted on {beside.device}")


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of strides {list(tensor.stride())}"
