"""Paged attention of rows with several new tokens: a tile is some queries of one row times all query heads of one KV head.

    tile row r:  query r // GROUP of the tile, query head r % GROUP of the KV head's        (GQA packed along M)

With C = Σ over the tiles of BLOCK_M // GROUP queries of the keys up to the tile's last query (no more than reach into its windows):
bytes       C · 2 · kv_heads · D · size of an element (+ 8 · C · kv_heads for scales), most of it from the L2 where a row's tiles
            run side by side, + 2 · T · heads · D · size
operations  4 · heads · D · Σ over queries of the keys that each sees
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.attend import LOWEST, attend


@triton.jit
def _find_row(firsts, tile, rows, BLOCK_Q: tl.constexpr):
    """Index among the chunks of the row that `tile` belongs to: the last i with firsts[i] // BLOCK_Q + i ≤ tile.

    Counted so, every row has at least the tiles that it needs, however its tokens lie to multiples of BLOCK_Q.
    """
    lowest, above = 0, rows
    while above - lowest > 1:
        middle = (lowest + above) // 2
        if tl.load(firsts + middle) // BLOCK_Q + middle <= tile:
            lowest = middle
        else:
            above = middle
    return lowest


@triton.jit(do_not_specialize=["table_stride", "window", "chunks"])
def chunk_kernel(
    queries, cache, scales, out,  # [T, heads · D], cache, its scales, [T, heads · D]
    starts, cu_query_lengths, tables, chunk_rows, chunk_firsts,
    query_stride, page_stride, table_stride, chunks,
    scale, soft_cap, window,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, FORM: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (tile, KV head), the tiles with the most keys first."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    chunk = _find_row(chunk_firsts, tile, chunks, BLOCK_Q)
    before = tl.load(chunk_firsts + chunk)
    count = tl.load(chunk_firsts + chunk + 1) - before
    offset = (tile - before // BLOCK_Q - chunk) * BLOCK_Q
    if offset >= count:
        return
    row = tl.load(chunk_rows + chunk)
    first = tl.load(starts + row) + offset  # position of the tile's first query
    end = tl.minimum(first + BLOCK_Q, first - offset + count)

    r, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query = r // GROUP
    mine = ((query < BLOCK_Q) & (offset + query < count))[:, None] & (d < DIM)[None, :]
    token = (tl.load(cu_query_lengths + row) + offset + query).to(tl.int64)
    lanes = ((head * GROUP + r % GROUP) * DIM)[:, None] + d[None, :]
    asked = tl.load(queries + (token * query_stride)[:, None] + lanes, mask=mine, other=0.0)
    positions = first + query
    m = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table = tables + row.to(tl.int64) * table_stride
    low = 0
    begin = 0
    if WINDOWED:
        low = tl.maximum(first + 1 - window, 0)
        begin = low // BLOCK_N * BLOCK_N
    else:
        begin = (first + 1) // BLOCK_N * BLOCK_N  # up to here every query sees every key
        m, total, acc = attend(
            asked, m, total, acc, 0, begin, low, positions, table, cache, scales, page_stride, head, scale, soft_cap, window,
            False, WINDOWED, CAPPED, FORM, KV_HEADS, PAGE, DIM, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    m, total, acc = attend(
        asked, m, total, acc, begin, end, low, positions, table, cache, scales, page_stride, head, scale, soft_cap, window,
        True, WINDOWED, CAPPED, FORM, KV_HEADS, PAGE, DIM, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + (token * (KV_HEADS * GROUP * DIM))[:, None] + lanes, result.to(out.dtype.element_ty), mask=mine)
