"""Quantised GGUF blocks as the groups that the C++ step computes with: the very values of the file, or its scales to the nearest."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from kernels.cpu.packed import Groups
from replica.config import WEIGHT_ONLY

Bytes = npt.NDArray[np.uint8]
BITS = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q8_0": 8}  # kinds that have a form of groups
FLOATS = ("F32", "F16", "BF16")
VOCABULARY = ("token_embd.weight", "output.weight")


def groups_of(raw: Bytes, kind: str) -> Groups | None:
    """raw [rows, blocks, block bytes]: None for a kind that has no form here.

    Q4_1: float16 d and m, then nibbles, the low ones for values 0 … 15, the high ones for 16 … 31; w = d · q + m. Q4_0: d alone,
    w = d · (q − 8), and −8 · d is exact in float16 but for the largest. Q8_0: d, then 32 signed bytes; w = d · q. Q4_K: blocks of 256
    with scales of their own for each 32, products of a float16 and six bits, here rounded to float16: 1 part in 2,048.
    """
    if kind == "Q8_0":
        return Groups(torch.from_numpy(raw[:, :, 2:].copy().view(np.int8)), _halves(raw, 0))
    if kind == "Q4_1":
        return Groups(_nibbles(raw[:, :, 4:]), _halves(raw, 0), _halves(raw, 2))
    if kind == "Q4_0":
        d = _halves(raw, 0)
        m = d * -8
        return Groups(_nibbles(raw[:, :, 2:]), d, m) if bool(m.isfinite().all()) else None
    return _q4_k(raw) if kind == "Q4_K" else None


def held_as(kinds: Mapping[str, str], quantization: str | None) -> str:
    """What becomes of a file's quantised matrices, by their kinds, in words for people; '' when it has none.

    kinds: of each tensor by the file's name; embedding and head are held in whatever form they have, or dequantised where weights alone
    are quantised.
    """
    bits = {None: 0, "w8a8": 8, "w4a8": 4, "w8a16": 8, "w4a16": 4, "fp8": -1}[quantization]
    plain_vocabulary = quantization in WEIGHT_ONLY
    said: dict[str, set[str]] = {}
    for name, kind in kinds.items():
        if kind in FLOATS:
            continue
        if not bits or (plain_vocabulary and name in VOCABULARY):
            verb = "dequantised"
        elif kind not in BITS or (BITS[kind] != bits and name not in VOCABULARY):
            verb = "quantised anew"
        else:
            verb = "scales to the nearest" if kind == "Q4_K" else "as in the file"
        said.setdefault(verb, set()).add(kind)
    return ", ".join(f"{' '.join(sorted(found))} {verb}" for verb, found in sorted(said.items()))


def _q4_k(raw: Bytes) -> Groups | None:
    """Of a block: float16 d and dmin, 6-bit scales and minima of 8 groups in 12 bytes, nibbles; w = d · scale · q − dmin · minimum."""
    rows, blocks, _ = raw.shape
    packed = raw[:, :, 4:16]
    first, second, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale = np.concatenate((first & 63, (high & 15) | (first >> 6 << 4)), axis=-1)
    minimum = np.concatenate((second & 63, (high >> 4) | (second >> 6 << 4)), axis=-1)
    d, m = (
        (_halves(raw, at).float().unsqueeze(-1) * torch.from_numpy(six.astype(np.float32))).half().reshape(rows, blocks * 8)
        for at, six in ((0, scale), (2, minimum))
    )
    if not bool(d.isfinite().all() and m.isfinite().all()):
        return None
    return Groups(_nibbles(raw[:, :, 16:].reshape(rows, blocks * 4, 32)).reshape(rows, blocks * 8, 32), d, -m)


def _halves(raw: Bytes, at: int) -> torch.Tensor:
    return torch.from_numpy(raw[:, :, at : at + 2].copy().view(np.float16)[..., 0])


def _nibbles(packed: Bytes) -> torch.Tensor:
    return torch.from_numpy(np.concatenate((packed & 15, packed >> 4), axis=-1))
