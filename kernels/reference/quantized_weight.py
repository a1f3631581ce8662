"""Weight-only quantised matrices, in panels of 128 rows so that a GPU reads what lies together.

    values [panels, groups, 128, bytes of a group]: int8 and fp8 (e4m3) 32 bytes; int4 16, byte j = value j | value j + 16 << 4
    scales, minima [panels, groups, 128]; fp8 has one float32 scale for a row: [panels, 1, 128]

A group is 32 weights of a row, as in GGUF and in kernels/cpu/packed.py, whose Groups these are made from: w = d · q (+ m in int4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu.packed import GROUP, Groups, quantise_q4, quantise_q8

PANEL = 128
FP8_LARGEST = 448.0


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """W [rows, columns]; rows are padded to panels and columns to groups (what is padded meets x = 0, or is not stored)."""

    form: str  # int8, fp8 or int4
    rows: int
    columns: int
    values: Tensor  # uint8
    scales: Tensor  # float16; fp8: float32
    minima: Tensor | None = None  # float16; int4 alone

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + (0 if self.minima is None else self.minima.nbytes)


def quantize_int8(weight: Tensor) -> QuantizedWeight:
    """weight [rows, columns], symmetric by groups."""
    return pack_groups(groups_of(weight, 8), weight.shape[1])


def quantize_int4(weight: Tensor) -> QuantizedWeight:
    """weight [rows, columns], from the least to the greatest of a group in 15 steps."""
    return pack_groups(groups_of(weight, 4), weight.shape[1])


def groups_of(weight: Tensor, bits: int) -> Groups:
    """weight [rows, columns] in 8 or 4 bits; the last of a row's groups may reach beyond `columns`."""
    return (quantise_q8 if bits == 8 else quantise_q4)(_whole_groups(weight))


def quantize_fp8(weight: Tensor) -> QuantizedWeight:
    """weight [rows, columns] in e4m3, the largest of a row as 448."""
    scale = weight.float().abs().amax(1).clamp_min_(1e-12) / FP8_LARGEST
    return pack_fp8((weight.float() / scale[:, None]).to(torch.float8_e4m3fn), scale)


def pack_groups(groups: Groups, columns: int) -> QuantizedWeight:
    """The very values of `groups` (a file's, say), laid out anew. The last of the groups may reach beyond `columns`. ValueError."""
    rows, count = groups.d.shape
    if count != -(-columns // GROUP):
        raise ValueError(f"groups: {count} in a row, but {columns} columns are {-(-columns // GROUP)} groups of {GROUP}")
    bytes_ = groups.q.view(torch.uint8)
    if groups.m is not None:
        bytes_ = bytes_[..., : GROUP // 2] | (bytes_[..., GROUP // 2 :] << 4)
    minima = None if groups.m is None else _panels(groups.m)
    return QuantizedWeight("int8" if minima is None else "int4", rows, columns, _panels(bytes_), _panels(groups.d), minima)


def pack_fp8(values: Tensor, scale: Tensor) -> QuantizedWeight:
    """values [rows, columns] float8_e4m3fn without NaN, scale [rows]: a checkpoint's, say."""
    rows, columns = values.shape
    grouped = functional.pad(values.view(torch.uint8), (0, -columns % GROUP)).view(rows, -1, GROUP)
    return QuantizedWeight("fp8", rows, columns, _panels(grouped), _panels(scale.float()[:, None]))


def dequantize(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """[rows, columns]: what the quantised form means, exact in float32."""
    values = _rows(weight.values, weight.rows)
    scales = _rows(weight.scales, weight.rows).to(dtype)[..., None]
    if weight.form == "fp8":
        decoded = values.view(torch.float8_e4m3fn).to(dtype)
    elif weight.form == "int8":
        decoded = values.view(torch.int8).to(dtype)
    else:
        decoded = torch.cat((values & 15, values >> 4), dim=-1).to(dtype)
    whole = decoded * scales
    if weight.minima is not None:
        whole = whole + _rows(weight.minima, weight.rows).to(dtype)[..., None]
    return whole.flatten(1)[:, : weight.columns].contiguous()


def _whole_groups(weight: Tensor) -> Tensor:
    """Columns repeat the last one up to a multiple of GROUP, which leaves the range of the last group as it is."""
    missing = -weight.shape[1] % GROUP
    return torch.cat((weight, weight[:, -1:].expand(-1, missing)), dim=1) if missing else weight


def _panels(by_row: Tensor) -> Tensor:
    """[rows, groups, …] → [panels, groups, PANEL, …], rows padded with zeros."""
    missing = -by_row.shape[0] % PANEL
    padded = functional.pad(by_row, (0, 0) * (by_row.ndim - 1) + (0, missing)) if missing else by_row
    return padded.view(-1, PANEL, *by_row.shape[1:]).transpose(1, 2).contiguous()


def _rows(panels: Tensor, rows: int) -> Tensor:
    return panels.transpose(1, 2).flatten(0, 1)[:rows].contiguous()
