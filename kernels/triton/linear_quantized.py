"""y = x · Wᵀ + b with W in int8, fp8 (e4m3) or int4: the weight is read once, in its stored form, and is exact in the product.

    out[m, n] = Σ_groups (scale[n, group] · Σ_k q[n, k] · x[m, k] + minimum[n, group] · Σ_k x[m, k]) + bias[n]

x [M, K], bias [N], out [M, N] in float32, float16 or bfloat16; W: kernels/reference/quantized_weight.py. q is exact in every such
dtype, so the products are exact and scales meet float32 sums: nothing of the weight is rounded.
W is the left operand of the product (128 rows, from registers), x the right (16 tokens): a decode step fills what it uses. K is split
by a fixed size of 512, each split's sums are added in order by a second kernel: the result does not depend on M.
Bytes: N · K · (1 or ½) + scales N · K / 16 (int4: / 8, fp8: 4 · N) + s · M · (K + N) + 8 · M · N · ⌈K / 512⌉ of partial sums, the
weight again for every 16 tokens, from the L2. Operations: 2 · M · N · K. Bound by bandwidth up to some 16 tokens; with many more,
dequantising once for a dense product is faster.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cpu.packed import GROUP as GROUP_SIZE
from kernels.reference.quantized_weight import PANEL as PANEL_ROWS
from kernels.reference.quantized_weight import QuantizedWeight
from kernels.triton.arguments import ask, rows_of
from kernels.triton.tiles import EVERYWHERE, HALVES, Tile, TileRow, TileTable, architecture_of

TILES = TileTable(
    "linear_quantized",
    (
        TileRow(EVERYWHERE, HALVES, Tile(m=16, n=PANEL_ROWS, k=GROUP_SIZE, split=512, warps=4, stages=6)),
        TileRow(EVERYWHERE, (torch.float32,), Tile(m=16, n=PANEL_ROWS, k=GROUP_SIZE, split=512, warps=4, stages=3)),
    ),
)
JOIN_COLUMNS = 512
ROWS_AT_ONCE = 256  # of x: so much and no more is there of partial sums
BYTES = {"int8": GROUP_SIZE, "fp8": GROUP_SIZE, "int4": GROUP_SIZE // 2}  # of a group
GROUP = tl.constexpr(GROUP_SIZE)
HALF = tl.constexpr(GROUP_SIZE // 2)
PANEL = tl.constexpr(PANEL_ROWS)
FP8_SHIFT = tl.constexpr(256.0)  # e4m3's bits as the upper bits of a float16 mean 2^-8 of their value


@triton.jit
def tokens_part(x, token, rows, k, depth):
    """x transposed: [K of this part, tokens], 0 outside."""
    at = token.to(tl.int64)[None, :] * depth + k[:, None]
    return tl.load(x + at, mask=(token < rows)[None, :] & (k < depth)[:, None], other=0.0)


@triton.jit
def fp8_values(codes):
    """uint8 → float32, exact; written out because sm_80 has no instruction for it. NaN codes are not looked for."""
    wide = codes.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * FP8_SHIFT


@triton.jit(do_not_specialize=["rows"])
def linear_quantized_kernel(
    partial,
    x,
    values,
    scales,
    minima,
    rows,
    depth,
    groups,
    FORM: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Grid: (panels, splits, tiles of tokens). partial [splits, M, panels · PANEL] float32. SPLIT: groups of a split."""
    panel, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    lane = tl.arange(0, PANEL)
    kind = x.dtype.element_ty
    total = tl.zeros((PANEL, BLOCK_M), dtype=tl.float32)
    for group in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, groups)):
        place = (panel * groups + group) * PANEL + lane
        if FORM == "int4":
            k = tl.arange(0, HALF) + group * GROUP
            codes = tl.load(values + place[:, None] * HALF + tl.arange(0, HALF)[None, :])
            low, high = tokens_part(x, token, rows, k, depth), tokens_part(x, token, rows, k + HALF, depth)
            part = tl.dot((codes & 15).to(kind), low, input_precision="ieee")
            part = tl.dot((codes >> 4).to(kind), high, part, input_precision="ieee")
            sums = tl.sum(low.to(tl.float32), axis=0) + tl.sum(high.to(tl.float32), axis=0)
            total += (
                part * tl.load(scales + place).to(tl.float32)[:, None] + sums[None, :] * tl.load(minima + place).to(tl.float32)[:, None]
            )
        else:
            codes = tl.load(values + place[:, None] * GROUP + tl.arange(0, GROUP)[None, :])
            right = tokens_part(x, token, rows, tl.arange(0, GROUP) + group * GROUP, depth)
            if FORM == "fp8":
                total = tl.dot(fp8_values(codes).to(kind), right, total, input_precision="ieee")
            else:
                part = tl.dot(codes.to(tl.int8, bitcast=True).to(kind), right, input_precision="ieee")
                total += part * tl.load(scales + place).to(tl.float32)[:, None]
    if FORM == "fp8":
        total = total * tl.load(scales + panel * PANEL + lane)[:, None]
    width = tl.num_programs(0) * PANEL
    at = (split.to(tl.int64) * rows + token)[None, :] * width + (panel * PANEL + lane)[:, None]
    tl.store(partial + at, total, mask=(token < rows)[None, :])


@triton.jit(do_not_specialize=["rows"])
def join_splits_kernel(out, partial, bias, rows, columns, width, splits, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Grid: (M, N / BLOCK_N). Adds the splits in order."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < columns
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for split in range(splits):
        total += tl.load(partial + (split * rows + row) * width + column, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, total.to(out.dtype.element_ty), mask=inside)


def linear_quantized(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """x [M, K] · Wᵀ [K, N] + bias [N], rows contiguous; returns [M, N] in x's dtype.

    ValueError where shapes do not fit or the form is unknown, TypeError where what is stored is not of the form's dtypes.
    """
    rows, _ = rows_of("x", x)
    _check(x, weight, bias)
    tile = TILES.tile(architecture_of(x.device), x.dtype)
    out = torch.empty((rows, weight.rows), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    panels, groups = weight.values.shape[:2]
    splits = triton.cdiv(groups * tile.k, tile.split)
    partial = torch.empty((splits * min(rows, ROWS_AT_ONCE), panels * tile.n), dtype=torch.float32, device=x.device)
    for first in range(0, rows, ROWS_AT_ONCE):
        _launch(out[first : first + ROWS_AT_ONCE], x[first : first + ROWS_AT_ONCE], weight, bias, partial, splits, tile)
    return out


def _check(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> None:
    if weight.form not in BYTES:
        raise ValueError(f"weight: form {weight.form!r}, wanted one of {', '.join(BYTES)}")
    ask("x", x, (x.shape[0], weight.columns), x)
    panels, groups = triton.cdiv(weight.rows, PANEL_ROWS), triton.cdiv(weight.columns, GROUP_SIZE)
    ask("weight.values", weight.values, (panels, groups, PANEL_ROWS, BYTES[weight.form]), x, torch.uint8)
    by_row = weight.form == "fp8"
    scale = torch.float32 if by_row else torch.float16
    ask("weight.scales", weight.scales, (panels, 1 if by_row else groups, PANEL_ROWS), x, scale)
    if (weight.minima is None) is (weight.form == "int4"):
        raise ValueError(f"weight.minima: {'none' if weight.minima is None else 'given'} for {weight.form}")
    if weight.minima is not None:
        ask("weight.minima", weight.minima, weight.scales.shape, x, torch.float16)
    if bias is not None:
        ask("bias", bias, (weight.rows,), x)


def _launch(out: Tensor, x: Tensor, weight: QuantizedWeight, bias: Tensor | None, partial: Tensor, splits: int, tile: Tile) -> None:
    panels, groups = weight.values.shape[:2]
    rows = x.shape[0]
    linear_quantized_kernel[(panels, splits, triton.cdiv(rows, tile.m))](
        partial,
        x,
        weight.values,
        weight.scales,
        weight.scales if weight.minima is None else weight.minima,
        rows,
        weight.columns,
        groups,
        FORM=weight.form,
        SPLIT=tile.split // tile.k,
        BLOCK_M=tile.m,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    join_splits_kernel[(rows, triton.cdiv(weight.rows, JOIN_COLUMNS))](
        out,
        partial,
        partial if bias is None else bias,
        rows,
        weight.rows,
        panels * tile.n,
        splits,
        HAS_BIAS=bias is not None,
        BLOCK_N=JOIN_COLUMNS,
        num_warps=4,
    )
