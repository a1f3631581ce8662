"""Weights in the layouts that the C++ step reads (drawn in matrix.h)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn import functional

GROUP = 32  # weights that share a scale
PANEL = 16  # output rows side by side
PAIR = 2 * PANEL  # output rows of a task: rows are padded to it with zeros


class Kind(IntEnum):
    """Values are those of matrix.h."""

    BF16 = 0
    Q8 = 1
    Q4 = 2


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """y = W · x + bias for W [rows, columns]."""

    kind: Kind
    rows: int
    columns: int
    weights: Tensor
    scales: Tensor | None = None
    bias: Tensor | None = None  # [rows, padded] float32

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes + (0 if self.scales is None else self.scales.nbytes)


@dataclass(frozen=True, slots=True)
class Form:
    """What a matrix is expected to be."""

    kinds: tuple[Kind, ...]  # one of them
    rows: int
    columns: int
    has_bias: bool = False

    def fits(self, one: PackedMatrix) -> bool:
        sizes = (one.rows, one.columns, one.bias is not None)
        return one.kind in self.kinds and sizes == (self.rows, self.columns, self.has_bias)


@dataclass(frozen=True, slots=True)
class Groups:
    """A quantised matrix before packing: w = d · q + m for q8 (q -127 … 127, m = 0) and q4 (q 0 … 15)."""

    q: Tensor  # [rows, columns / 32, 32] int8 or uint8
    d: Tensor  # [rows, columns / 32] float16
    m: Tensor | None = None  # the same; None: q8


def pack_bf16(weight: Tensor, bias: Tensor | None = None) -> PackedMatrix:
    """weight [rows, columns], columns a multiple of 32."""
    rows, columns = weight.shape
    padded = _padded(weight.bfloat16())
    panels = padded.view(-1, PANEL, columns // 2, 2).permute(0, 2, 1, 3).contiguous()
    return PackedMatrix(Kind.BF16, rows, columns, panels, bias=_bias(bias, padded.shape[0]))


def quantise_q8(weight: Tensor) -> Groups:
    """Symmetric, to the nearest; the scale is rounded to float16 first, so that the values are the nearest to what they mean."""
    groups = weight.float().reshape(weight.shape[0], -1, GROUP)
    d = (groups.abs().amax(-1) / 127).half()
    return Groups(_nearest(groups, d).clamp_(-127, 127).to(torch.int8), d)


def quantise_q4(weight: Tensor) -> Groups:
    """From the least to the greatest of a group in 15 steps."""
    groups = weight.float().reshape(weight.shape[0], -1, GROUP)
    m = groups.amin(-1).half()
    d = ((groups.amax(-1) - m.float()) / 15).half()
    return Groups(_nearest(groups - m.float().unsqueeze(-1), d).clamp_(0, 15).to(torch.uint8), d, m)


def dequantise(groups: Groups) -> Tensor:
    """[rows, columns] float32: what the step computes with."""
    values = groups.q.float() * groups.d.float().unsqueeze(-1)
    return (values if groups.m is None else values + groups.m.float().unsqueeze(-1)).flatten(-2)


def pack_groups(groups: Groups, bias: Tensor | None = None) -> PackedMatrix:
    rows, count = groups.d.shape
    d = _panels(groups.d)  # [panels, groups, 16]
    if groups.m is None:
        quads = _quads((groups.q.to(torch.int16) + 128).to(torch.uint8), pad=128)
        return PackedMatrix(Kind.Q8, rows, count * GROUP, quads, d.contiguous(), _bias(bias, d.shape[0] * PANEL))
    quads = _quads(groups.q)
    nibbles = quads[:, :, 0::2] | (quads[:, :, 1::2] << 4)
    scales = torch.stack((d, _panels(groups.m)), dim=2).contiguous()
    return PackedMatrix(Kind.Q4, rows, count * GROUP, nibbles.contiguous(), scales, _bias(bias, d.shape[0] * PANEL))


def is_whole(matrix: PackedMatrix) -> bool:
    """Whether its parts have the dtypes and shapes that go with its kind and sizes: the step is told no others."""
    if matrix.rows < 1 or matrix.columns < 1 or matrix.columns % GROUP:
        return False
    padded = matrix.rows + -matrix.rows % PAIR
    panels, groups = padded // PANEL, matrix.columns // GROUP
    weights, scales = {
        Kind.BF16: ((torch.bfloat16, (panels, matrix.columns // 2, PANEL, 2)), None),
        Kind.Q8: ((torch.uint8, (panels, groups, GROUP // 4, PANEL, 4)), (torch.float16, (panels, groups, PANEL))),
        Kind.Q4: ((torch.uint8, (panels, groups, GROUP // 8, PANEL, 4)), (torch.float16, (panels, groups, 2, PANEL))),
    }[matrix.kind]
    bias = None if matrix.bias is None else (torch.float32, (padded,))
    parts = (matrix.weights, matrix.scales, matrix.bias)
    return tuple(None if part is None else (part.dtype, tuple(part.shape)) for part in parts) == (weights, scales, bias)


def by_turns(gate: Tensor, up: Tensor) -> Tensor:
    """16 rows of gate, 16 of up, 16 of gate, …: what a task then computes together is silu(gate) · up. Rows a multiple of 32."""
    panels = [each.reshape(-1, PANEL, *each.shape[1:]) for each in (gate, up)]
    return torch.stack(panels, dim=1).flatten(0, 2)


def _nearest(groups: Tensor, d: Tensor) -> Tensor:
    scale = d.float().unsqueeze(-1)
    return torch.where(scale > 0, groups / scale, 0.0).round_()


def _padded(values: Tensor, fill: float = 0) -> Tensor:
    missing = -values.shape[0] % PAIR
    return functional.pad(values, (0, 0) * (values.ndim - 1) + (0, missing), value=fill) if missing else values


def _panels(scales: Tensor) -> Tensor:
    return _padded(scales).view(-1, PANEL, scales.shape[1]).transpose(1, 2)


def _quads(q: Tensor, pad: int = 0) -> Tensor:
    """[rows, groups, 32] → [panels, groups, 8, 16, 4]: four neighbours in a row's lane."""
    return _padded(q, pad).view(-1, PANEL, q.shape[1], GROUP // 4, 4).permute(0, 2, 3, 1, 4).contiguous()


def _bias(bias: Tensor | None, rows: int) -> Tensor | None:
    return None if bias is None else functional.pad(bias.float(), (0, rows - bias.shape[0])).contiguous()
