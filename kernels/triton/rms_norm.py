"""Root-mean-square norm of the residual stream, with the addition that precedes it: one program a row, the row in registers.

    residual[t] += delta[t];  out[t] = residual[t] · (Σ residual[t]² / H + ε)^-½ · weight

residual [T, H] float32, delta and weight float32, float16 or bfloat16; out [T, H] in the weight's dtype.
Bytes: T · H · (4 + s) without and T · H · (8 + 2·s) with delta, s the bytes of a weight; + H · s of the weight, which stays in the
cache. Operations: 4 · T · H (5 with delta). Bound by bandwidth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.arguments import ask, rows_of
from kernels.triton.tiles import EVERYWHERE, FLOATS, Tile, TileRow, TileTable, architecture_of

TILES = TileTable(
    "rms_norm",
    (
        TileRow(EVERYWHERE, FLOATS, Tile(warps=1), 512),
        TileRow(EVERYWHERE, FLOATS, Tile(warps=4), 4096),
        TileRow(EVERYWHERE, FLOATS, Tile(warps=8), 8192),
        TileRow(EVERYWHERE, FLOATS, Tile(warps=16), 16384),
    ),
)


@triton.jit
def rms_norm_kernel(out, residual, delta, weight, width, epsilon, HAS_DELTA: tl.constexpr, WIDTH: tl.constexpr):
    """WIDTH: the power of two that holds `width`. Grid: (T,)."""
    column = tl.arange(0, WIDTH)
    inside = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    x = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + at, x, mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + epsilon)
    gain = tl.load(weight + column, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
    tl.store(out + at, (x * scale * gain).to(out.dtype.element_ty), mask=inside)


def rms_norm(residual: Tensor, weight: Tensor, epsilon: float, delta: Tensor | None = None) -> Tensor:
    """residual [T, H] += delta [T, H] (in place, where given); returns the norm of it · weight [H]. All rows contiguous.

    ValueError, or TypeError for a residual that is not float32, where it is not so.
    """
    rows, width = rows_of("residual", residual)
    ask("residual", residual, (rows, width), residual, torch.float32)
    ask("weight", weight, (width,), residual)
    if delta is not None:
        ask("delta", delta, (rows, width), residual)
    tile = TILES.tile(architecture_of(residual.device), weight.dtype, width)
    out = torch.empty((rows, width), dtype=weight.dtype, device=residual.device)
    if rows:
        padded = max(16, triton.next_power_of_2(width))
        rms_norm_kernel[(rows,)](
            out,
            residual,
            residual if delta is None else delta,
            weight,
            width,
            epsilon,
            HAS_DELTA=delta is not None,
            WIDTH=padded,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out
