"""The gate of a SwiGLU feed-forward layer.

    out[t, i] = g / (1 + e^-g) · u,  g = gate_up[t, i], u = gate_up[t, I + i]

gate_up [T, 2·I] = (gate | up), float32, float16 or bfloat16; out [T, I] in the same dtype, computed in float32, rounded once.
Bytes: 3 · T · I · s, s the bytes of an element. Operations: 5 · T · I. Bound by bandwidth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.arguments import rows_of
from kernels.triton.tiles import EVERYWHERE, FLOATS, Tile, TileRow, TileTable, architecture_of

TILES = TileTable("silu_mul", (TileRow(EVERYWHERE, FLOATS, Tile(n=1024, warps=4)),))


@triton.jit
def silu_mul_kernel(out, gate_up, width, BLOCK_N: tl.constexpr):
    """Grid: (T, width / BLOCK_N)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * width + column, mask=inside, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, gated.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) · up for gate_up [T, 2·I] = (gate | up), rows contiguous; returns [T, I]. ValueError where it is not so."""
    rows, columns = rows_of("gate_up", gate_up)
    width, odd = divmod(columns, 2)
    if odd:
        raise ValueError(f"gate_up: {columns} columns, wanted an even number: gates, then as many values")
    tile = TILES.tile(architecture_of(gate_up.device), gate_up.dtype, width)
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (rows, triton.cdiv(width, tile.n))
        silu_mul_kernel[grid](out, gate_up, width, BLOCK_N=tile.n, num_warps=tile.warps, num_stages=tile.stages)
    return out
