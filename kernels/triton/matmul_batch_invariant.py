"""y = x · Wᵀ + b, a row of which depends on nothing but that row of x.

    out[m, n] = Σ_k x[m, k] · weight[n, k] + bias[n]

x [M, K], weight [N, K], bias [N], all float32, float16 or bfloat16, summed in float32 in one order: K in steps of the tile's k,
never split. One tile per architecture and dtype whatever M, so the same instructions compute a row alone and in a batch.
float32 multiplies in float32 (no tf32). Bytes, if the caches hold what is shared: s · (M·K + N·K + M·N), s the bytes of an
element; operations 2 · M · N · K. Bound by bandwidth below about 200 rows, by arithmetic above.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.arguments import ask, rows_of
from kernels.triton.tiles import EVERYWHERE, HALVES, Tile, TileRow, TileTable, architecture_of

TILES = TileTable(
    "matmul_batch_invariant",
    (
        TileRow(("sm_90", "sm_100"), HALVES, Tile(m=128, n=128, k=64, warps=8, stages=4)),
        TileRow(("sm_80",), HALVES, Tile(m=128, n=128, k=32, warps=8, stages=4)),
        TileRow(("gfx942",), HALVES, Tile(m=128, n=128, k=64, warps=8, stages=2)),
        TileRow(EVERYWHERE, (torch.float32,), Tile(m=64, n=64, k=16, warps=8, stages=3)),
    ),
)
GROUP_M = 8  # tiles of rows that share a column of weights while both are in the cache


@triton.jit(do_not_specialize=["rows"])
def matmul_kernel(
    out,
    x,
    weight,
    bias,
    rows,
    columns,
    depth,
    HAS_BIAS: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid: (tiles of rows · tiles of columns,), GROUP_M tiles of rows before the next tile of columns."""
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    group = tl.program_id(0) // (GROUP_M * tiles_n)
    inside = tl.program_id(0) % (GROUP_M * tiles_n)
    height = min(tiles_m - group * GROUP_M, GROUP_M)
    row = (group * GROUP_M + inside % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (inside // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows and columns past the end read the last one again: their sums are not stored, and only K needs a mask.
    x += tl.minimum(row, rows - 1).to(tl.int64)[:, None] * depth + k[None, :]
    weight += tl.minimum(column, columns - 1).to(tl.int64)[None, :] * depth + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, depth, BLOCK_K):
        left = tl.load(x, mask=k[None, :] < depth - start, other=0.0)
        right = tl.load(weight, mask=k[:, None] < depth - start, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
        x += BLOCK_K
        weight += BLOCK_K
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < columns)[None, :])


def matmul_batch_invariant(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, K] · weightᵀ [K, N] + bias [N], in one dtype, rows contiguous; returns [M, N] in it.

    ValueError where shapes do not fit, TypeError where dtypes differ.
    """
    (rows, depth), (columns, _) = rows_of("x", x), rows_of("weight", weight)
    ask("weight", weight, (columns, depth), x, x.dtype)
    if bias is not None:
        ask("bias", bias, (columns,), x, x.dtype)
    tile = TILES.tile(architecture_of(x.device), x.dtype)
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    if rows and columns:
        grid = (triton.cdiv(rows, tile.m) * triton.cdiv(columns, tile.n),)
        matmul_kernel[grid](
            out,
            x,
            weight,
            weight if bias is None else bias,
            rows,
            columns,
            depth,
            HAS_BIAS=bias is not None,
            GROUP_M=GROUP_M,
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
            BLOCK_K=tile.k,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out
