"""Paged attention of rows with one new token: split-KV by a fixed split size, and the reduce that joins a row's splits.

Per split and KV head: o = Σ 2^(s - m) · v / Σ 2^(s - m), e = m + log₂ Σ 2^(s - m);  joined: Σ 2^(e - max e) · o / Σ 2^(e - max e).

With N = Σ tokens in the cache of the B decoding rows (at most `window` each) and S splits:
bytes       N · 2 · kv_heads · D · size of an element (+ 8 · N · kv_heads for scales) + 2 · B · heads · D · size, and for rows of
            several splits, written and read once each, S · heads · (D + 1) · 4
operations  4 · N · heads · D
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.attend import LOWEST, attend


@triton.jit(do_not_specialize=["table_stride", "window"])
def split_kernel(
    queries, cache, scales, out, partial, weights,  # [T, heads · D], cache, its scales, [T, heads · D], [S, heads, D], [S, heads]
    starts, cu_query_lengths, tables, split_rows, split_indices,
    query_stride, page_stride, table_stride,
    scale, soft_cap, window,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, FORM: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (split, KV head). A negative row is no work: lists may be longer than what they hold."""
    place, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(split_rows + place)
    if row < 0:
        return
    index = tl.load(split_indices + place)
    position = tl.load(starts + row)
    low = 0
    if WINDOWED:
        low = tl.maximum(position + 1 - window, 0)
    begin = tl.maximum(index * SPLIT, low // BLOCK_N * BLOCK_N)
    end = tl.minimum((index + 1) * SPLIT, position + 1)

    member, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    mine = (member < GROUP)[:, None] & (d < DIM)[None, :]
    lanes = ((head * GROUP + member) * DIM)[:, None] + d[None, :]
    token = tl.load(cu_query_lengths + row).to(tl.int64)
    asked = tl.load(queries + token * query_stride + lanes, mask=mine, other=0.0)
    positions = tl.full([BLOCK_M], 0, tl.int32) + position
    m = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table = tables + row.to(tl.int64) * table_stride
    m, total, acc = attend(
        asked, m, total, acc, begin, end, low, positions, table, cache, scales, page_stride, head, scale, soft_cap, window,
        True, WINDOWED, CAPPED, FORM, KV_HEADS, PAGE, DIM, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    result = acc / total[:, None]
    if position // SPLIT == low // SPLIT:  # the row's only split
        tl.store(out + token * (KV_HEADS * GROUP * DIM) + lanes, result.to(out.dtype.element_ty), mask=mine)
    else:
        first = place.to(tl.int64) * (KV_HEADS * GROUP)
        tl.store(partial + first * DIM + lanes, result, mask=mine)
        tl.store(weights + first + head * GROUP + member, m + tl.log2(total), mask=member < GROUP)


@triton.jit(do_not_specialize=["window"])
def reduce_kernel(
    partial, weights, out, starts, cu_query_lengths, reduced_rows, reduced_firsts, window,
    WINDOWED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (row of several splits, query head): joins its splits, BLOCK_S at a time from the first. A negative row is no work."""
    place, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(reduced_rows + place)
    if row < 0:
        return
    first = tl.load(reduced_firsts + place)
    position = tl.load(starts + row)
    low = 0
    if WINDOWED:
        low = tl.maximum(position + 1 - window, 0)
    splits = position // SPLIT - low // SPLIT + 1
    d = tl.arange(0, BLOCK_D)
    m = tl.full([1], LOWEST, tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for begin in range(0, splits, BLOCK_S):
        index = begin + tl.arange(0, BLOCK_S)
        there = index < splits
        lane = (first + index).to(tl.int64) * HEADS + head
        e = tl.load(weights + lane, mask=there, other=float("-inf"))
        o = tl.load(partial + (lane * DIM)[:, None] + d[None, :], mask=there[:, None] & (d < DIM)[None, :], other=0.0)
        higher = tl.maximum(m, tl.max(e, 0))
        p = tl.exp2(e - higher)
        fade = tl.exp2(m - higher)
        total = total * fade + tl.sum(p, 0)
        acc = acc * fade + tl.sum(o * p[:, None], 0)
        m = higher
    token = tl.load(cu_query_lengths + row).to(tl.int64)
    tl.store(out + (token * HEADS + head) * DIM + d, (acc / total).to(out.dtype.element_ty), mask=d < DIM)
