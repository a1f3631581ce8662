"""A tile of queries of one row over a stretch of that row's keys: the part that decode and prefill share.

    s = q · kᵀ · scale, capped, in units of log₂;  m, total, acc: running maximum, sum of 2^(s - m), sum of 2^(s - m) · v, in float32

Keys and values of BLOCK_N positions are gathered through the row's table of pages. What a mask hides is not loaded, so that
nothing that lies there (NaN) can reach a sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4e38)  # a running maximum before the first key: finite, so that no difference of two infinities arises
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_heads(cache, at, seen, dtype: tl.constexpr, FORM: tl.constexpr):
    """Elements of the cache in `dtype`, 0 where not seen; codes of eight bits without their scale.

    FORM is "plain", "int8", "fp8", or "fp8_bits": e4m3 as bytes, where the hardware does not know it.
    """
    if FORM == "plain":
        got = tl.load(cache + at, mask=seen, other=0.0)
    elif FORM == "int8":
        got = tl.load(cache + at, mask=seen, other=0).to(tl.float32).to(dtype)
    elif FORM == "fp8":
        got = tl.load(cache + at, mask=seen, other=0.0).to(tl.float32).to(dtype)
    else:
        bits = tl.load(cache + at, mask=seen, other=0).to(tl.int32)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.uint16).to(tl.float16, bitcast=True)
        got = (half.to(tl.float32) * 256.0).to(dtype)  # e4m3's exponent is biased by 7, float16's by 15
    return got


@triton.jit
def tanh(x):
    """Exact to float32's rounding also near 0, where 1 - 2 / (1 + e^2x) cancels."""
    square = x * x
    near = x * (
        1.0
        + square * (-0.3333333333333333 + square * (0.13333333333333333 + square * (-0.05396825396825397 + square * 0.021869488536155203)))
    )
    far = 1.0 - 2.0 / (1.0 + tl.exp2(tl.minimum(tl.abs(x), 15.0) * 2.8853900817779268))
    return tl.where(tl.abs(x) < 0.2, near, tl.where(x < 0, -far, far))


@triton.jit
def attend(
    queries, m, total, acc,
    begin, end, low, positions,
    table, cache, scales, page_stride, head,
    scale, soft_cap, window,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, FORM: tl.constexpr,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Takes keys begin … end - 1 in, in steps of BLOCK_N from `begin`, a multiple of BLOCK_N.

    queries [M, BLOCK_D] at `positions` [M]. MASKED: keys below `low` or after a query's position are hidden, and (WINDOWED) those
    `window` or more before it. Otherwise every key is seen by every query, and end - begin is a multiple of BLOCK_N.
    """
    VALUES: tl.constexpr = KV_HEADS * PAGE * DIM  # from a token's key to its value
    d = tl.arange(0, BLOCK_D)
    unit = (soft_cap if CAPPED else scale) * LOG2E  # > 0: it may be multiplied after the maximum, and in one with the difference
    precision: tl.constexpr = "ieee" if queries.dtype == tl.float32 else "tf32"
    for first in range(begin, end, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        if MASKED:
            seen = (keys >= low) & (keys < end)
        else:
            seen = tl.full([BLOCK_N], True, tl.int1)
        page = tl.load(table + keys // PAGE, mask=seen, other=0).to(tl.int64)
        loaded = tl.broadcast_to(seen[:, None], BLOCK_N, BLOCK_D)
        if BLOCK_D != DIM:
            loaded = loaded & (d < DIM)[None, :]
        lane = head * PAGE + keys % PAGE
        at = (page * page_stride + lane * DIM)[:, None] + d[None, :]
        k = load_heads(cache, at, loaded, queries.dtype, FORM)
        s = tl.dot(queries, tl.trans(k), input_precision=precision)
        if FORM != "plain":
            scale_at = page * (2 * KV_HEADS * PAGE) + lane
            s = s * tl.load(scales + scale_at, mask=seen, other=0.0)[None, :]
        if CAPPED:
            s = tanh(s * (scale / soft_cap))
        if MASKED:
            visible = seen[None, :] & (keys[None, :] <= positions[:, None])
            if WINDOWED:
                visible = visible & (keys[None, :] > positions[:, None] - window)
            s = tl.where(visible, s, float("-inf"))
        higher = tl.maximum(m, tl.max(s, 1) * unit)
        p = tl.exp2(s * unit - higher[:, None])
        fade = tl.exp2(m - higher)
        total = total * fade + tl.sum(p, 1)
        m = higher
        acc = acc * fade[:, None]
        v = load_heads(cache, at + VALUES, loaded, queries.dtype, FORM)
        if FORM != "plain":
            p = p * tl.load(scales + scale_at + KV_HEADS * PAGE, mask=seen, other=0.0)[None, :]
            if queries.dtype == tl.float16:  # p · scale alone would sink below float16's least
                p = p * 128.0
                v = v * 0.0078125
        acc = tl.dot(p.to(queries.dtype), v, acc, input_precision=precision)
    return m, total, acc
