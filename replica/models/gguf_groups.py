"""Quantised GGUF blocks as the groups that the C++ step computes with: the very values of the file, nothing rounded twice."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kernels.cpu.packed import Groups

Bytes = npt.NDArray[np.uint8]


def groups_of(raw: Bytes, kind: str) -> Groups | None:
    """raw [rows, blocks, block bytes] of blocks of 32: None for a kind that has no exact form here.

    Q4_1: float16 d and m, then nibbles, the low ones for values 0 … 15, the high ones for 16 … 31; w = d · q + m. Q4_0: d alone,
    w = d · (q − 8), and −8 · d is exact in float16 but for the largest. Q8_0: d, then 32 signed bytes; w = d · q.
    """
    if kind == "Q8_0":
        return Groups(torch.from_numpy(raw[:, :, 2:].copy().view(np.int8)), _halves(raw, 0))
    if kind == "Q4_1":
        return Groups(_nibbles(raw[:, :, 4:]), _halves(raw, 0), _halves(raw, 2))
    if kind == "Q4_0":
        d = _halves(raw, 0)
        m = d * -8
        return Groups(_nibbles(raw[:, :, 2:]), d, m) if bool(m.isfinite().all()) else None
    return None


def _halves(raw: Bytes, at: int) -> torch.Tensor:
    return torch.from_numpy(raw[:, :, at : at + 2].copy().view(np.float16)[..., 0])


def _nibbles(packed: Bytes) -> torch.Tensor:
    return torch.from_numpy(np.concatenate((packed & 15, packed >> 4), axis=-1))
