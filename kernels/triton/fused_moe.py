"""A feed-forward layer of experts: gate, grouped products over tokens sorted by expert, SiLU, and the weighted sum of each token.

    out[t] = Σ_slot weight[t, slot] · down[e] · (silu(g) · u),  (g | u) = gate_up[e] · hidden[t],  e = experts[t, slot]

hidden [T, H], gate_up [E, 2·I, H], down [E, H, I] in float32, float16 or bfloat16; router_logits [T, E] in any of them; out [T, H].
    up       BLOCK_M entries of one expert × BLOCK_N of I: two products over one read of hidden, SiLU in float32   activated [T·k, I]
    down     BLOCK_M entries × BLOCK_N of H, times the entry's weight                                              parts [T·k, H]
    combine  Σ over a token's slots in their order                                                                out [T, H]
One tile whatever T, one order of every sum: a token's result does not depend on its batch. Bytes: the weights of the experts that
are used, 3 · I · H · s each, once more for every BLOCK_M of their tokens (from the L2), + T · k · s · (2·H + 2·I) + T · H · s · 2;
operations 6 · T · k · I · H. Bound by bandwidth until an expert has some 200 tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.arguments import ask, rows_of
from kernels.triton.moe_routing import Routing, route_tokens
from kernels.triton.tiles import EVERYWHERE, HALVES, NVIDIA, Tile, TileRow, TileTable, architecture_of

TILES = TileTable(
    "fused_moe, up",
    (
        TileRow(("sm_90", "sm_100"), HALVES, Tile(m=64, n=64, k=64, warps=4, stages=4)),
        TileRow(("sm_80", "gfx942"), HALVES, Tile(m=64, n=64, k=32, warps=4, stages=2)),
        TileRow(EVERYWHERE, (torch.float32,), Tile(m=32, n=32, k=32, warps=4, stages=2)),
    ),
)
DOWN_TILES = TileTable(
    "fused_moe, down",
    (
        TileRow(NVIDIA, HALVES, Tile(m=64, n=128, k=64, warps=4, stages=3)),
        TileRow(("gfx942",), HALVES, Tile(m=64, n=128, k=64, warps=4, stages=2)),
        TileRow(EVERYWHERE, (torch.float32,), Tile(m=32, n=32, k=32, warps=4, stages=2)),
    ),
)
COMBINE_COLUMNS = 1024


@triton.jit(do_not_specialize=["size"])
def up_kernel(
    activated,
    hidden,
    gate_up,
    entries,
    block_experts,
    size,
    top_k,
    width,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid: (blocks, I / BLOCK_N). width I, depth H, size T · k."""
    expert = tl.load(block_experts + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        entry = tl.load(entries + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        # Padding reads the last token, columns past the end the last column: neither is stored.
        token = tl.minimum(entry, size - 1) // top_k
        left = hidden + token.to(tl.int64)[:, None] * depth + k[None, :]
        gates = gate_up + (expert * 2 * width + tl.minimum(column, width - 1))[None, :] * depth + k[:, None]
        ups = gates + (expert * 0 + width) * depth
        gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, depth, BLOCK_K):
            x = tl.load(left + start, mask=k[None, :] < depth - start, other=0.0)
            gate = tl.dot(x, tl.load(gates + start, mask=k[:, None] < depth - start, other=0.0), gate, input_precision="ieee")
            up = tl.dot(x, tl.load(ups + start, mask=k[:, None] < depth - start, other=0.0), up, input_precision="ieee")
        result = gate / (1.0 + tl.exp(-gate)) * up
        at = entry.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(activated + at, result.to(activated.dtype.element_ty), mask=(entry < size)[:, None] & (column < width)[None, :])


@triton.jit(do_not_specialize=["size"])
def down_kernel(
    parts,
    activated,
    down,
    weights,
    entries,
    block_experts,
    size,
    width,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid: (blocks, H / BLOCK_N). width H, depth I, size T · k."""
    expert = tl.load(block_experts + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        entry = tl.load(entries + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        left = activated + tl.minimum(entry, size - 1).to(tl.int64)[:, None] * depth + k[None, :]
        right = down + (expert * width + tl.minimum(column, width - 1))[None, :] * depth + k[:, None]
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, depth, BLOCK_K):
            x = tl.load(left + start, mask=k[None, :] < depth - start, other=0.0)
            total = tl.dot(x, tl.load(right + start, mask=k[:, None] < depth - start, other=0.0), total, input_precision="ieee")
        total = total * tl.load(weights + entry, mask=entry < size, other=0.0)[:, None]
        at = entry.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(parts + at, total.to(parts.dtype.element_ty), mask=(entry < size)[:, None] & (column < width)[None, :])


@triton.jit
def combine_kernel(out, parts, top_k, width, BLOCK_N: tl.constexpr):
    """Grid: (T, H / BLOCK_N)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for slot in range(top_k):
        total += tl.load(parts + (row * top_k + slot) * width + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=column < width)


def fused_moe(hidden: Tensor, router_logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, renormalize: bool = True) -> Tensor:
    """hidden [T, H], router_logits [T, E], gate_up [E, 2·I, H] = (gate | up), down [E, H, I], all contiguous; returns [T, H].

    ValueError where shapes do not fit, TypeError where hidden, gate_up and down are not of one dtype.
    """
    tokens, width = rows_of("hidden", hidden)
    if gate_up.ndim != 3:
        raise ValueError(f"gate_up: {list(gate_up.shape)}, wanted [experts, 2 · width, hidden]")
    experts, inner = gate_up.shape[0], gate_up.shape[1] // 2
    ask("gate_up", gate_up, (experts, 2 * inner, width), hidden, hidden.dtype)
    ask("down", down, (experts, width, inner), hidden, hidden.dtype)
    ask("router_logits", router_logits, (tokens, experts), hidden)
    architecture = architecture_of(hidden.device)
    tile, down_tile = TILES.tile(architecture, hidden.dtype), DOWN_TILES.tile(architecture, hidden.dtype)
    if tile.m != down_tile.m:
        raise ValueError(f"tiles: {tile.m} entries a block for up, {down_tile.m} for down, wanted the same")
    out = torch.empty_like(hidden)
    if not tokens:
        return out
    routing = route_tokens(router_logits, top_k, renormalize, tile.m)
    activated = _up(hidden, gate_up, routing, tile)
    parts = torch.empty((tokens * top_k, width), dtype=hidden.dtype, device=hidden.device)
    down_kernel[(routing.block_experts.shape[0], triton.cdiv(width, down_tile.n))](
        parts,
        activated,
        down,
        routing.weights,
        routing.entries,
        routing.block_experts,
        tokens * top_k,
        width,
        down.shape[2],
        BLOCK_M=down_tile.m,
        BLOCK_N=down_tile.n,
        BLOCK_K=down_tile.k,
        num_warps=down_tile.warps,
        num_stages=down_tile.stages,
    )
    combine_kernel[(tokens, triton.cdiv(width, COMBINE_COLUMNS))](out, parts, top_k, width, BLOCK_N=COMBINE_COLUMNS, num_warps=4)
    return out


def _up(hidden: Tensor, gate_up: Tensor, routing: Routing, tile: Tile) -> Tensor:
    """[T · k, I] of every entry."""
    tokens, depth = hidden.shape
    top_k, width = routing.weights.shape[1], gate_up.shape[1] // 2
    activated = torch.empty((tokens * top_k, width), dtype=hidden.dtype, device=hidden.device)
    up_kernel[(routing.block_experts.shape[0], triton.cdiv(width, tile.n))](
        activated,
        hidden,
        gate_up,
        routing.entries,
        routing.block_experts,
        tokens * top_k,
        top_k,
        width,
        depth,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return activated
