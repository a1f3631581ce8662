"""The tiles of paged attention. The size of a row of the tables is the head dim."""

from __future__ import annotations

import torch

from kernels.triton.tiles import EVERYWHERE, HALVES, Tile, TileRow, TileTable

SPLIT_TILES = TileTable(  # m is never below 16, the least that a matrix instruction takes
    "paged_attention (decode)",
    (
        TileRow(EVERYWHERE, HALVES, Tile(m=16, n=64, split=256, warps=4, stages=3), size_max=128),
        TileRow(EVERYWHERE, HALVES, Tile(m=16, n=32, split=256, warps=4, stages=3), size_max=256),
        TileRow(EVERYWHERE, (torch.float32,), Tile(m=16, n=16, split=256, warps=8, stages=2), size_max=128),
        TileRow(EVERYWHERE, (torch.float32,), Tile(m=16, n=16, split=256, warps=8, stages=2), size_max=256),
    ),
)
REDUCE_TILES = TileTable("paged_attention (reduce)", (TileRow(EVERYWHERE, (torch.float32, *HALVES), Tile(n=16, warps=4), size_max=256),))
CHUNK_TILES = TileTable(
    "paged_attention (prefill)",
    (
        TileRow(("sm_90", "sm_100"), HALVES, Tile(m=128, n=64, warps=8, stages=3), size_max=128),
        TileRow(("sm_90", "sm_100"), HALVES, Tile(m=128, n=32, warps=8, stages=2), size_max=256),
        TileRow(("sm_80", "gfx942"), HALVES, Tile(m=64, n=32, warps=4, stages=3), size_max=128),
        TileRow(("sm_80", "gfx942"), HALVES, Tile(m=64, n=32, warps=8, stages=2), size_max=256),
        TileRow(EVERYWHERE, (torch.float32,), Tile(m=16, n=16, warps=8, stages=2), size_max=128),
        TileRow(EVERYWHERE, (torch.float32,), Tile(m=16, n=16, warps=4, stages=2), size_max=256),
    ),
)
