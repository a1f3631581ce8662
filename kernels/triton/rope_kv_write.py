"""Rotary position embedding of queries and keys, and the write of keys and values into the paged cache.

    a head (a | b) of a query or key, normed where norms are given, becomes (a·cos - b·sin | b·cos + a·sin)
    a key or value goes to page slot // block, place slot % block; in eight bits: c = round(x / s), s = max |x| / L

qkv [T, (heads + 2 · kv_heads) · D] in float32, float16 or bfloat16; cosine and sine [T, D] float32, of which one half each is read.
bytes       T · ((heads + 2 · kv_heads) · D · size read + heads · D · size + 2 · kv_heads · D · size of an element of the cache written
            (+ 8 · kv_heads for scales) + D · 4 · programs of a token for angles, from the L2 but once)
operations  6 a pair of elements of queries and keys, 4 an element more with norms
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.errors import KernelError
from kernels.reference.cache_form import LARGEST
from kernels.reference.rope_kv_write import HeadNorms
from kernels.triton.arguments import ask
from kernels.triton.attention_plan import AttentionPlan, check_scales
from kernels.triton.tiles import EVERYWHERE, FLOATS, Tile, TileRow, TileTable, architecture_of, name_of

TILES = TileTable(  # m: heads; sizes: head dim. A thread loads 16 bytes of a half of 16-bit elements
    "rope_kv_write",
    (
        TileRow(EVERYWHERE, FLOATS, Tile(m=16, warps=2), size_max=64),
        TileRow(EVERYWHERE, FLOATS, Tile(m=16, warps=4), size_max=128),
        TileRow(EVERYWHERE, FLOATS, Tile(m=8, warps=4), size_max=256),
    ),
)
FORMS = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}


@triton.jit
def e4m3_bits(x):
    """float32 of at most 448 → the byte of the nearest e4m3, ties to even: in integers, so that every architecture gives the same."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    rounded = (size + 0x7FFFF + ((size >> 20) & 1)) >> 20
    normal = rounded - 960  # exponent bias 127 → 7, three bits of mantissa below it
    # Below 2^-6 steps are 2^-9 wide; added to 2^23 · 2^-9 they are float32's own, and the sum is rounded as wanted.
    steps = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(size < 0x3C800000, steps, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def codes_of(x, scale, FORM: tl.constexpr):
    """float32 heads [BLOCK, half] and their scales [BLOCK] → codes as they are stored."""
    divided = x / tl.where(scale > 0, scale, 1.0)[:, None]
    if FORM == "int8":
        codes = tl.minimum(tl.maximum(tl.floor(divided + 0.5), -127.0), 127.0).to(tl.int8)
    else:
        codes = e4m3_bits(tl.minimum(tl.maximum(divided, -448.0), 448.0))
    return codes


@triton.jit
def rope_kernel(
    qkv, cosine, sine, query_weight, key_weight, out, cache, scales, slots,
    qkv_stride, cosine_stride, sine_stride, page_stride, epsilon,
    NORMED: tl.constexpr, FORM: tl.constexpr, LARGEST: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Program (token, BLOCK_HEADS of the heads of queries, keys and values, in this order)."""
    HALF: tl.constexpr = DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    d = tl.arange(0, BLOCK_HALF)
    inner = d < HALF
    there = (head < HEADS + 2 * KV_HEADS)[:, None] & inner[None, :]
    at = head[:, None] * DIM + d[None, :]
    a = tl.load(qkv + token * qkv_stride + at, mask=there, other=0.0).to(tl.float32)
    b = tl.load(qkv + token * qkv_stride + HALF + at, mask=there, other=0.0).to(tl.float32)
    x, y = a, b
    if NORMED:
        scale = 1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + epsilon)
        asks = (head < HEADS)[:, None]
        for_queries = tl.load(query_weight + d, mask=inner, other=0.0).to(tl.float32)[None, :]
        for_keys = tl.load(key_weight + d, mask=inner, other=0.0).to(tl.float32)[None, :]
        x = a * scale[:, None] * tl.where(asks, for_queries, for_keys)
        for_queries = tl.load(query_weight + HALF + d, mask=inner, other=0.0).to(tl.float32)[None, :]
        for_keys = tl.load(key_weight + HALF + d, mask=inner, other=0.0).to(tl.float32)[None, :]
        y = b * scale[:, None] * tl.where(asks, for_queries, for_keys)
    cos = tl.load(cosine + token * cosine_stride + d, mask=inner, other=0.0)[None, :]
    sin = tl.load(sine + token * sine_stride + HALF + d, mask=inner, other=0.0)[None, :]
    value = (head >= HEADS + KV_HEADS)[:, None]
    first = tl.where(value, a, x * cos - y * sin)
    second = tl.where(value, b, y * cos + x * sin)

    query = there & (head < HEADS)[:, None]
    row = out + token * (HEADS * DIM) + at
    tl.store(row, first.to(out.dtype.element_ty), mask=query)
    tl.store(row + HALF, second.to(out.dtype.element_ty), mask=query)

    kept = there & (head >= HEADS)[:, None]
    slot = tl.load(slots + token)
    page, place = slot // PAGE, slot % PAGE
    lane = (head - HEADS) * PAGE + place  # a value's head comes KV_HEADS after its key's, as in the cache
    cell = cache + page * page_stride + lane[:, None] * DIM + d[None, :]
    if FORM == "plain":
        tl.store(cell, first.to(cache.dtype.element_ty), mask=kept)
        tl.store(cell + HALF, second.to(cache.dtype.element_ty), mask=kept)
    else:
        scale = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1)) / LARGEST
        tl.store(cell, codes_of(first, scale, FORM), mask=kept)
        tl.store(cell + HALF, codes_of(second, scale, FORM), mask=kept)
        written = (head >= HEADS) & (head < HEADS + 2 * KV_HEADS)
        tl.store(scales + page * (2 * KV_HEADS * PAGE) + lane, scale, mask=written)


def rope_kv_write(
    qkv: Tensor,
    cosine: Tensor,
    sine: Tensor,
    cache: Tensor,
    plan: AttentionPlan,
    norms: HeadNorms | None = None,
    cache_scales: Tensor | None = None,
) -> Tensor:
    """Normalises heads where `norms` are given, rotates, writes keys and values to their pages, returns the queries [T, heads · D].

    Meaning and shapes as in the reference. cache [pages, 2, kv_heads, block, D], pages contiguous, anywhere; `cache_scales`
    contiguous. ValueError where shapes do not fit or a slot lies beyond the cache, KernelError where a dtype is not served.
    """
    plan.check(cache)
    layout, tokens = plan.layout, plan.slots.numel()
    _check(qkv, (cosine, sine), cache, plan, cache_scales)
    if norms is not None:
        ask("norms.query", norms.query, (layout.head_dim,), qkv)
        ask("norms.key", norms.key, (layout.head_dim,), qkv)
    heads = qkv.shape[1] // layout.head_dim - 2 * layout.kv_heads
    tile = TILES.tile(architecture_of(qkv.device), qkv.dtype, layout.head_dim)
    out = torch.empty((tokens, heads * layout.head_dim), dtype=qkv.dtype, device=qkv.device)
    form = "plain" if cache_scales is None else FORMS[cache.dtype]
    weights = (qkv, qkv) if norms is None else (norms.query, norms.key)  # without norms nothing is read there
    rope_kernel[(tokens, triton.cdiv(heads + 2 * layout.kv_heads, tile.m))](
        qkv, cosine, sine, *weights, out, cache.view(torch.uint8) if form == "fp8" else cache,
        qkv if cache_scales is None else cache_scales, plan.slots,
        qkv.stride(0), cosine.stride(0), sine.stride(0), cache.stride(0), 0.0 if norms is None else norms.epsilon,
        NORMED=norms is not None, FORM=form, LARGEST=LARGEST.get(cache.dtype, 1.0),
        HEADS=heads, KV_HEADS=layout.kv_heads, PAGE=layout.block_size, DIM=layout.head_dim,
        BLOCK_HEADS=tile.m, BLOCK_HALF=triton.next_power_of_2(layout.head_dim // 2), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _check(qkv: Tensor, angles: tuple[Tensor, Tensor], cache: Tensor, plan: AttentionPlan, scales: Tensor | None) -> None:
    layout, tokens = plan.layout, plan.slots.numel()
    heads, rest = divmod(qkv.shape[-1], layout.head_dim)
    if qkv.ndim != 2 or rest or heads <= 2 * layout.kv_heads or layout.head_dim % 2 or qkv.shape[0] != tokens or qkv.stride(1) != 1:
        raise ValueError(f"qkv: {list(qkv.shape)} for {tokens} tokens and {layout}")
    for name, angle in zip(("cosine", "sine"), angles, strict=True):
        if angle.shape != (tokens, layout.head_dim) or angle.dtype is not torch.float32 or angle.stride(1) != 1:
            raise ValueError(f"{name}: {list(angle.shape)} {name_of(angle.dtype)}, wanted float32 {[tokens, layout.head_dim]}")
    if scales is None:
        if cache.dtype is not qkv.dtype:
            raise KernelError(f"rope_kv_write: a cache of {name_of(cache.dtype)} without scales for {name_of(qkv.dtype)}")
        return
    if cache.dtype not in FORMS:
        raise KernelError(f"rope_kv_write: a cache of {name_of(cache.dtype)} with scales (it does {', '.join(map(name_of, FORMS))})")
    check_scales(scales, cache)
