"""The gate of a GEGLU feed-forward layer.

    out[t, i] = gelu(g) · u,  g = gate_up[t, i], u = gate_up[t, I + i]
    "tanh": gelu(g) = g · σ(2c·(g + 0.044715·g³)), c = √(2/π), which is g/2 · (1 + tanh(c·(…)));  "none": g/2 · (1 + erf(g/√2))

gate_up [T, 2·I] = (gate | up), float32, float16 or bfloat16; out [T, I] in the same dtype, computed in float32, rounded once.
Bytes: 3 · T · I · s, s the bytes of an element. Operations: about 10 · T · I. Bound by bandwidth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.gelu_mul import APPROXIMATIONS
from kernels.triton.arguments import rows_of
from kernels.triton.tiles import EVERYWHERE, FLOATS, Tile, TileRow, TileTable, architecture_of

TILES = TileTable("gelu_mul", (TileRow(EVERYWHERE, FLOATS, Tile(n=1024, warps=4)),))


@triton.jit
def gelu_mul_kernel(out, gate_up, width, TANH: tl.constexpr, BLOCK_N: tl.constexpr):
    """Grid: (T, width / BLOCK_N)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * width + column, mask=inside, other=0.0).to(tl.float32)
    if TANH:
        gated = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    else:
        gated = 0.5 * gate * (1.0 + tl.erf(0.7071067811865476 * gate))
    tl.store(out + row * width + column, (gated * up).to(out.dtype.element_ty), mask=inside)


def gelu_mul(gate_up: Tensor, approximate: str = "tanh") -> Tensor:
    """gelu(gate) · up for gate_up [T, 2·I] = (gate | up), rows contiguous; returns [T, I]. `approximate`: "tanh" or "none".

    ValueError where they are something else.
    """
    rows, columns = rows_of("gate_up", gate_up)
    width, odd = divmod(columns, 2)
    if odd:
        raise ValueError(f"gate_up: {columns} columns, wanted an even number: gates, then as many values")
    if approximate not in APPROXIMATIONS:
        raise ValueError(f"approximate: {approximate!r}, wanted one of {', '.join(APPROXIMATIONS)}")
    tile = TILES.tile(architecture_of(gate_up.device), gate_up.dtype, width)
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (rows, triton.cdiv(width, tile.n))
        tanh = approximate == "tanh"
        gelu_mul_kernel[grid](out, gate_up, width, TANH=tanh, BLOCK_N=tile.n, num_warps=tile.warps, num_stages=tile.stages)
    return out
